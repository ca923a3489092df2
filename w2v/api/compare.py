"""Train several configs with several seeds on the same ids, in one process, and compare them:

    python -m w2v.api.compare configs/optimizers/*.yaml --base configs/text8.yaml --seeds 1 2 3 --set corpus.path=text8

Whatever is finished in the folder is not trained again.
"""

from __future__ import annotations

import argparse
import json
import logging
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from pathlib import Path

from w2v.api import gensim_baseline as baseline
from w2v.api import runs as comparison
from w2v.config import Config, ConfigError, load_config, save_config
from w2v.model import heldout
from w2v.system import console
from w2v.system import versions as environment
from w2v.system.files import error_message
from w2v.system.signals import Signals
from w2v.text import opening
from w2v.text.corpus import Corpus
from w2v.text.vocab import Vocab
from w2v.training import metrics, plan
from w2v.training.trainer import Trainer
from w2v.vectors import evaluate as evaluation
from w2v.vectors import export

log = logging.getLogger("w2v")
ENOUGH_STEPS = 500
TUNED_WORDS = (
    70_000  # in the vocabulary of texts of text8's kind, for which configs/optimizers are tuned
)
ALWAYS = [
    "train.held_out_words=20000",
    "run.score_epochs=true",
    "run.log_seconds=0.1",
    "run.checkpoint_minutes=0",
]


class Opened:
    """Corpora that are open, by what was asked of them, so that each is read once."""

    def __init__(self) -> None:
        self._corpora: dict[tuple, tuple[Vocab, Corpus]] = {}

    def __call__(self, config: Config) -> tuple[Vocab, Corpus]:
        asked = config.corpus, config.vocab
        if asked not in self._corpora:
            self._corpora[asked] = opening.open_corpus(config)
        return self._corpora[asked]


def with_batch(config: Config, size: int, oftener: float = 1.0) -> Config:
    """The config with another batch size, and the learning rate that goes with it.

    It goes with the square root of how often a step meets a word, since that many gradients are summed before the optimizer divides by
    their size (Malladi et al. 2022, arXiv 2205.10287). It stays for SGD, which does not divide, and with a cap on occurrences: the sum
    grows by itself up to the cap. oftener: how many times as often each word occurs, in a text of fewer words.
    """
    factor, optimizer = (size / config.train.batch_size * oftener) ** 0.5, config.optimizer
    if factor == 1 or optimizer.occurrence_cap or optimizer.name == "SGD":
        return replace(config, train=replace(config.train, batch_size=size))
    lr, min_lr = (float(f"{rate * factor:.3g}") for rate in (optimizer.lr, optimizer.min_lr))
    return replace(
        config,
        optimizer=replace(optimizer, lr=lr, min_lr=min_lr),
        train=replace(config.train, batch_size=size),
    )


def fitted(config: Config, vocab: Vocab) -> Config:
    """The config, or where the text is too short for ENOUGH_STEPS steps, one with smaller batches and the learning rate for them."""
    tuned = size = config.train.batch_size
    while size > 1 and plan.expected_centers(config, vocab) < ENOUGH_STEPS * size:
        size //= 2
    return (
        config
        if size == tuned
        else with_batch(config, size, min(TUNED_WORDS / len(vocab.words), tuned / size))
    )


def train_once(config: Config, opened: Opened, folder: Path) -> Trainer:
    """Train in this process, metrics.jsonl in the folder, and say nothing; raises `Diverged` where the loss became no number."""
    with _quiet():
        planned = plan.make_plan(config, opened(config))
        sampler, pipeline = plan.build(planned)
        with Trainer(
            config,
            planned.vocab,
            planned.corpus.raw_words,
            sampler,
            pipeline,
            folder,
            plan.held_out(planned),
        ) as trainer:
            trainer.train()
    return trainer


def warm_up(config: Config, opened: Opened) -> None:
    """Make two steps that count for nothing, so that kernels are compiled and libraries loaded before anything is timed."""
    with _quiet():
        sampler, pipeline = plan.build(plan.make_plan(config, opened(config)))
        for planned in islice(pipeline.ahead(sampler.epoch()), 2):
            pipeline.step(planned, config.optimizer.lr)
        pipeline.engine.flush()


def compare(
    configs: dict[str, Config],
    seeds: Sequence[int],
    folder: Path,
    gensim_alpha: float | None = None,
) -> str:
    """Train each named config with each seed in a folder of its own, unless it is there, and write the table; gives it as text.

    gensim_alpha: the learning rate with which gensim trains the first config's model too, None for no such run.
    """
    opened, runs, warm = Opened(), {}, set()
    if gensim_alpha is not None:
        configs = {
            "gensim": baseline.as_config(next(iter(configs.values())), gensim_alpha)
        } | configs
    for name, config in configs.items():
        for seed in seeds:
            seeded = replace(config, train=replace(config.train, seed=seed))
            run = _place(folder, f"{name}-seed{seed}", seeded)
            if not (run / "scores.json").exists() and name == "gensim":
                _train_gensim(seeded, opened, run)
            elif not (run / "scores.json").exists():
                if name not in warm:
                    warm_up(seeded, opened)
                    warm.add(name)
                _train(seeded, opened, run)
            runs[run] = comparison.read(run)
            log.info(f"{run.name:<24}  {_line(runs[run])}")
    (folder / "env.txt").write_text(
        environment.describe(plan.make_plan(config, opened(config)).machine), encoding="utf-8"
    )
    return comparison.write(list(runs.values()), folder)


def _place(folder: Path, name: str, config: Config) -> Path:
    """The folder of this run, an unfinished one emptied; one of that name with other settings stays, and this one gets a number."""
    number, run = 1, folder / name
    while (run / "config.yaml").exists() and load_config([run / "config.yaml"]) != config:
        number += 1
        run = folder / f"{name}-{number}"
    if run.exists() and not (run / "scores.json").exists():
        shutil.rmtree(run)
    return run


def _train(config: Config, opened: Opened, run: Path) -> None:
    run.mkdir(parents=True)
    save_config(config, run / "config.yaml")
    try:
        trainer = train_once(config, opened, run)
        export.save(trainer.vectors(), run, ("kv",))
        scores = evaluation.as_dict(*trainer.score()) | trainer.took()
    except (metrics.Diverged, evaluation.EvaluationError) as error:
        scores = {"diverged": str(error)}
    (run / "scores.json").write_text(json.dumps(scores, indent=1), encoding="utf-8")


def _train_gensim(config: Config, opened: Opened, run: Path) -> None:
    run.mkdir(parents=True)
    vocab, corpus = opened(config)
    planned = plan.make_plan(replace(config, optimizer=Config().optimizer), (vocab, corpus))
    left_out = heldout.choose(corpus.offsets, config.train.held_out_words)
    with _quiet():
        baseline.train(
            config, vocab, corpus, left_out, plan.held_out(planned), planned.machine.cores, run
        )


def _line(run: comparison.Run) -> str:
    if run.diverged:
        return run.scores["diverged"]
    (row,) = comparison.rows([run])
    shown = ("held-out loss", "analogies %", "WordSim-353", "SimLex-999", "seconds")
    return "  ".join(
        f"{name} {comparison.spread(row.values(name), comparison.FIGURES[name].form)}"
        for name in shown
    )


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep what a run says to itself; what it warns of was said when the configs were checked."""
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(level)


def folder_to_use(runs: Path) -> Path:
    """The newest comparison in `runs` if it was interrupted, else that of today."""
    newest = max(runs.glob("compare-*"), default=None)
    if newest and not (newest / "table.csv").exists():
        return newest
    return runs / f"compare-{time.strftime('%Y-%m-%d')}"


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m w2v.api.compare", description="Train configs with seeds on the same ids."
    )
    parser.add_argument(
        "configs", nargs="+", metavar="CONFIG", help="config files, each laid over the base"
    )
    parser.add_argument(
        "--base",
        default="configs/text8.yaml",
        metavar="CONFIG",
        help="what all share (default: configs/text8.yaml)",
    )
    parser.add_argument(
        "--seeds",
        nargs="+",
        type=int,
        default=[1],
        metavar="N",
        help="seeds of each config (default: 1)",
    )
    parser.add_argument(
        "--set", nargs="*", default=[], metavar="section.key=value", help="laid over every config"
    )
    batch = f"halve batches until there are {ENOUGH_STEPS} steps, and lower the learning rate with them, or keep them (default: fit)"
    parser.add_argument("--batch", choices=("fit", "keep"), default="fit", help=batch)
    parser.add_argument(
        "--with", dest="gensim", choices=("gensim",), help="a row by gensim, with the same model"
    )
    parser.add_argument(
        "--gensim-alpha",
        type=float,
        default=0.025,
        metavar="LR",
        help="gensim's learning rate (default: 0.025)",
    )
    parser.add_argument(
        "--to",
        type=Path,
        metavar="FOLDER",
        help="default: runs/compare-<date>, or the last one if it was interrupted",
    )
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    options = arguments(argv)
    console.log_to_console()
    try:
        opened, configs = Opened(), {}
        for path in options.configs:
            config = load_config([options.base, path], [*ALWAYS, *options.set])
            if options.batch == "fit":
                config = fitted(config, opened(config)[0])
            plan.make_plan(
                config, opened(config)
            )  # what it refuses is said before anything is trained
            if (name := Path(path).stem) in configs:
                raise ConfigError(
                    f"{path}: another config is called {name} too, which their runs are named after; rename one"
                )
            configs[name] = config
        folder = options.to or folder_to_use(Path(config.run.dir))
        print(
            compare(
                configs, options.seeds, folder, options.gensim_alpha if options.gensim else None
            )
        )
        print(
            f"\nin {folder}: table.txt, table.md, table.csv, curves.png where matplotlib is installed, and a folder for each run"
        )
    except (ValueError, MemoryError, OSError) as error:
        print(f"error: {error_message(error)}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    with Signals():
        sys.exit(main())
