"""Whole training runs by config, engine, precision and seed.

    python tests/bench/train.py --corpus wiki100.txt --engines resident mapped:50% --seeds 1 2 3

Runs are warmed up before they are timed. The stages of a step are measured in a run of their own.
"""

from __future__ import annotations

import argparse
import gc
import sys
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.bench import results, stages, steps
from tests.bench.results import Figures, Results
from w2v.config import Config, load_config
from w2v.system import console
from w2v.text import open_corpus
from w2v.text.corpus import Corpus
from w2v.text.vocab import Vocab
from w2v.vectors import evaluate

Text = tuple[Vocab, Corpus]


def train_once(config: Config, text: Text) -> Figures:
    """Train and score one run."""
    gc.collect()  # memory of the run before must not count for this one
    with TemporaryDirectory() as folder:
        trainer = steps.train(steps.make_plan(config, text), Path(folder))
    figures = steps.run_figures(trainer)  # before scoring takes GPU memory
    words, vectors_VD = text[0].words, steps.vectors(trainer)
    device = trainer.loop.step.state.device
    score, similarities, _ = evaluate.scores(words, vectors_VD.float().to(device))
    return figures | {
        "analogies [%]": 100 * score.total.accuracy,
        "semantic [%]": 100 * score.semantic.accuracy,
        "syntactic [%]": 100 * score.syntactic.accuracy,
        **{found.name: found.spearman or 0.0 for found in similarities},
    }


def engine_settings(engine: str) -> list[str]:
    """Return the settings of "mapped", or of "mapped:50%"."""
    name, _, gpu_bytes = engine.partition(":")
    settings = [f"transfer.engine={name}"]
    return [*settings, f"transfer.gpu_bytes={gpu_bytes}"] if gpu_bytes else settings


def measure(args: argparse.Namespace) -> None:
    """Run every combination of config, engine and precision, with all seeds."""
    cases: dict[str, list[Config]] = {}
    text = None
    # Check all configs first, so that no setting fails after an hour of measuring.
    for path, engine, precision in product(args.configs, args.engines, args.precisions):
        common = [f"corpus.path={args.corpus}", *engine_settings(engine)]
        common += [f"train.precision={precision}", "run.checkpoint_minutes=0"]
        configs = [
            load_config(["text8", path], [*common, f"train.seed={seed}", *args.set])
            for seed in args.seeds
        ]
        text = text or open_corpus(configs[0])
        # "auto" is named after the engine that the plan chooses.
        chosen, given = steps.make_plan(configs[0], text).engine, engine.partition(":")[0]
        names = [Path(args.corpus).stem, Path(path).stem, chosen + engine.removeprefix(given)]
        cases[" ".join([*names, precision, *args.set])] = configs
    found = Results("train", args.results)
    for case, configs in cases.items():
        steps.Steps(steps.make_plan(configs[0], text))(2)  # compiles the kernels
        found.add(case, results.over_seeds([train_once(config, text) for config in configs]))
        gc.collect()
        found.add(case, stages.measure(steps.Steps(steps.make_plan(configs[0], text))))


def main(arguments: list[str] | None = None) -> None:
    parser = results.parser(__doc__)
    parser.add_argument("--corpus", required=True)
    parser.add_argument("--configs", nargs="+", default=["configs/optimizers/adamax.yaml"])
    parser.add_argument("--engines", nargs="+", default=["auto"], help="such as mapped:50%%")
    parser.add_argument("--precisions", nargs="+", default=["float32"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[1])
    args = parser.parse_args(arguments)
    console.log_to_console(console.ERRORS)
    try:
        measure(args)
    except (ValueError, MemoryError) as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
