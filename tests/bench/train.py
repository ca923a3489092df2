"""Whole training runs: words/s, loss and scores, by engine, config and seed.

    python tests/bench/train.py --corpus wiki100.txt --configs configs/optimizers/*.yaml --engines mapped resident --seeds 1 2 3
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from statistics import mean, stdev
from tempfile import TemporaryDirectory

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.bench import results
from w2v import evaluation, export, metrics, plan, settings
from w2v.config import Config
from w2v.trainer import Trainer

UNSAVED = ["run.checkpoint_minutes=0"]


def train_once(config: Config) -> dict[str, tuple[float, str]]:
    """One run of the config: {metric: (value, unit)}."""
    planned = plan.make_plan(config)
    if planned.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    sampler, pipeline = plan.build(planned)
    with TemporaryDirectory() as folder:
        trainer = Trainer(config, planned.vocab, planned.corpus.raw_words, sampler, pipeline, Path(folder))
        trainer.train()
    vectors = pipeline.inputs["weight"].float()
    score = evaluation.analogies(planned.vocab.words, vectors.to(planned.device))
    keyed = export.keyed_vectors(planned.vocab.words, planned.vocab.counts, vectors.cpu().numpy())
    words = planned.corpus.raw_words * config.train.epochs
    figures = {
        "words/s": (words / trainer.metrics.seconds, ""),
        "seconds": (trainer.metrics.seconds, "s"),
        "loss": (trainer.metrics.loss, ""),
        **{name: (100 * getattr(score, part).accuracy, "%") for name, part in
           [("analogies", "total"), ("semantic", "semantic"), ("syntactic", "syntactic")]},
        **{name: (evaluation.similarity(keyed, name).spearman or 0.0, "") for name in evaluation.PAIR_SETS},
    }  # fmt: skip
    read = pipeline.engine.rows_read
    if read:
        figures["rows read"] = (100 * read / pipeline.engine.rows_used, "% of used")
        figures["link"] = (read * pipeline.inputs.bytes / pipeline.inputs.rows / trainer.metrics.seconds / 1e9, "GB/s each way")
    if planned.device.type == "cuda":
        figures["gpu memory"] = (torch.cuda.max_memory_allocated() / 2**30, "GiB")
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--corpus", required=True)
    parser.add_argument("--base", default="configs/text8.yaml")
    parser.add_argument("--configs", nargs="+", default=["configs/optimizers/adamax.yaml"])
    parser.add_argument("--engines", nargs="+", default=["auto"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[1])
    parser.add_argument("--set", nargs="*", default=[], metavar="section.key=value")
    parser.add_argument("--results", type=Path, default=results.FILE)
    args = parser.parse_args()
    metrics.log_to_console()
    for path in args.configs:
        for engine in args.engines:
            runs = []
            for seed in args.seeds:
                assignments = [f"corpus.path={args.corpus}", f"transfer.engine={engine}", f"train.seed={seed}", *UNSAVED, *args.set]
                runs.append(train_once(settings.load([args.base, path], assignments)))
            figures = {}
            for metric, (_, unit) in runs[0].items():
                values = [run[metric][0] for run in runs]
                figures[metric] = (mean(values), unit)
                if len(runs) > 1:
                    figures[f"{metric} stdev"] = (stdev(values), unit)
            case = " ".join([Path(args.corpus).stem, Path(path).stem, engine, *args.set, f"seeds={len(runs)}"])
            results.append("train", case, figures, args.results)


if __name__ == "__main__":
    main()
