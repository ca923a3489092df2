"""Whole training runs: words/s, loss, scores, rows over the link and GPU memory, by config, engine, precision and seed; and what the time
of a step goes into, in a run of its own.

    python tests/bench/train.py --corpus wiki100.txt --configs configs/optimizers/*.yaml --engines resident mapped:50% --seeds 1 2 3
"""

from __future__ import annotations

import argparse
import gc
import sys
from itertools import product
from pathlib import Path
from statistics import mean, stdev
from tempfile import TemporaryDirectory

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.bench import results, stages, steps
from tests.bench.measure import Figures, Section
from w2v.api import compare as experiments
from w2v.api.compare import Opened
from w2v.config import Config, load_config
from w2v.system import console
from w2v.training import plan
from w2v.vectors import evaluate as evaluation


def train_once(config: Config, opened: Opened) -> Figures:
    """One run of the config."""
    gc.collect()  # what the run before took is not this one's
    with TemporaryDirectory() as folder:
        trainer = experiments.train_once(config, opened, Path(folder))
    pipeline, seconds, trained = trainer.pipeline, trainer.metrics.seconds, trainer.metrics.words
    memory = steps.gpu_memory(pipeline, trainer.sampler._ids_N)  # before scoring takes some
    words, vectors = trainer.vocab.words, pipeline.inputs["weight"]
    score = evaluation.analogies(words, vectors.float().to(pipeline.fault.device))
    return {
        "words/s": (trained / seconds, ""),
        "seconds": (seconds, "s"),
        "loss": (trainer.metrics.loss, ""),
        **{
            name: (100 * getattr(score, part).accuracy, "%")
            for name, part in [
                ("analogies", "total"),
                ("semantic", "semantic"),
                ("syntactic", "syntactic"),
            ]
        },
        **{
            found.name: (found.spearman or 0.0, "")
            for found in evaluation.similarities(words, vectors)
        },
        **steps.link(steps.Moved.by(pipeline), pipeline, trained, seconds),
        **memory,
    }


def over_seeds(runs: list[Figures]) -> Figures:
    """The mean of each metric and, of more than one run, the standard deviation."""
    figures = {}
    for metric, (_, unit) in runs[0].items():
        values = [run[metric][0] for run in runs]
        figures[metric] = (mean(values), unit)
        if len(runs) > 1:
            figures[f"{metric} stdev"] = (stdev(values), unit)
    return figures


def engine_settings(engine: str) -> list[str]:
    """Assignments for an engine, "mapped", or one with its GPU memory, "mapped:50%"."""
    name, _, room = engine.partition(":")
    return [f"transfer.engine={name}"] + ([f"transfer.gpu_bytes={room}"] if room else [])


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--corpus", required=True)
    parser.add_argument("--base", default="configs/text8.yaml")
    parser.add_argument("--configs", nargs="+", default=["configs/optimizers/adamax.yaml"])
    parser.add_argument(
        "--engines",
        nargs="+",
        default=["auto"],
        help="each with the GPU memory for rows, if any: mapped:50%%",
    )
    parser.add_argument("--precisions", nargs="+", default=["float32"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[1])
    parser.add_argument("--set", nargs="*", default=[], metavar="section.key=value")
    parser.add_argument("--results", type=Path, default=results.FILE)
    args = parser.parse_args(arguments)
    console.log_to_console()
    opened, cases = Opened(), {}
    breakdown = Section("stages", "What the time of a step goes into", args.results)
    try:
        for path, engine, precision in product(args.configs, args.engines, args.precisions):
            common = [
                f"corpus.path={args.corpus}",
                *engine_settings(engine),
                f"train.precision={precision}",
                "run.checkpoint_minutes=0",
            ]
            configs = [
                load_config([args.base, path], [*common, f"train.seed={seed}", *args.set])
                for seed in args.seeds
            ]
            found = plan.make_plan(configs[0], opened(configs[0])).engine + engine.removeprefix(
                engine.partition(":")[0]
            )
            cases[
                " ".join([Path(args.corpus).stem, Path(path).stem, found, precision, *args.set])
            ] = configs
        for case, configs in cases.items():
            experiments.warm_up(configs[0], opened)
            figures = over_seeds([train_once(config, opened) for config in configs])
            results.append("train", f"{case} seeds={len(configs)}", figures, args.results)
            gc.collect()
            breakdown.add(
                case, stages.measure(steps.Steps(plan.make_plan(configs[0], opened(configs[0]))))
            )
        breakdown.print()
    except ValueError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
