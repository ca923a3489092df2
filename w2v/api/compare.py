"""Train several configs with several seeds, and compare them.

    python -m w2v.api.compare configs/optimizers/*.yaml --seeds 1 2 3 --set corpus.path=text8

Runs that are already finished in the folder are not trained again.
"""

from __future__ import annotations

import argparse
import functools
import json
import logging
import shutil
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

from w2v.api import gensim_baseline, runs
from w2v.config import Config, ConfigError, CorpusConfig, VocabConfig, load_config, save_config
from w2v.system import console
from w2v.system.files import atomic_write
from w2v.system.process import Signals, describe_environment, with_exit_status
from w2v.text import open_corpus
from w2v.text.corpus import Corpus
from w2v.text.vocab import Vocab
from w2v.training import plan
from w2v.training.memory import Machine
from w2v.training.trainer import Diverged, Trainer
from w2v.vectors import evaluate, export

log = logging.getLogger("w2v")
ENOUGH_STEPS = 500  # fewer optimizer steps learn little
TUNED_WORDS = 70_000  # vocabulary size of the text for which configs/optimizers are tuned
COMMON_SETTINGS = ["train.held_out_words=20000", "run.checkpoint_minutes=0"]
LOGGED = ["run.score_epochs=true", "run.log_seconds=0.1"]  # for the curves
SHOWN = ("held-out loss", "analogies %", "WordSim-353", "SimLex-999", "seconds")


@functools.cache
def open_once(corpus: CorpusConfig, vocab: VocabConfig) -> tuple[Vocab, Corpus]:
    """Open a corpus; later calls return the same one."""
    return open_corpus(Config(corpus=corpus, vocab=vocab))


@contextmanager
def quiet() -> Iterator[None]:
    """Log errors only; warnings were shown when configs were checked."""
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(level)


def scale_batch_size(config: Config, batch_size: int, word_frequency: float = 1.0) -> Config:
    """Return the config with another batch size and learning rate.

    The learning rate follows the square root of the number of gradients that a row sums per step,
    as the optimizer divides by their size (Malladi et al. 2022, arXiv 2205.10287). That number
    grows with the batch size and with `word_frequency`, the frequency of words relative to the
    text for which the config is tuned.
    """
    optimizer = config.optimizer
    factor = (batch_size / config.train.batch_size * word_frequency) ** 0.5
    # SGD does not divide; with a cap on occurrences, the sum itself grows up to the cap.
    if factor != 1 and not optimizer.occurrence_cap and optimizer.name != "SGD":
        lr = float(f"{optimizer.lr * factor:.3g}")
        min_lr = float(f"{optimizer.min_lr * factor:.3g}")
        optimizer = replace(optimizer, lr=lr, min_lr=min_lr)
    return replace(config, optimizer=optimizer, train=replace(config.train, batch_size=batch_size))


def fit_batch_to_text(config: Config, vocab: Vocab, batch_size: int | None = None) -> Config:
    """Return the config with a batch size and learning rate for the text.

    Batches are halved until there are ENOUGH_STEPS steps, unless a batch size is given.
    """
    tuned = config.train.batch_size
    size = batch_size or tuned
    if batch_size is None:
        centers = plan.expected_centers(config, vocab)
        while size > 1 and centers < ENOUGH_STEPS * size:
            size //= 2
        if size == tuned:
            return config
    # Words are more frequent in a small vocabulary, but none is in more than the whole batch.
    word_frequency = min(TUNED_WORDS / len(vocab.words), max(1.0, tuned / size))
    return scale_batch_size(config, size, word_frequency)


@quiet()
def warm_up(config: Config) -> None:
    """Train two steps, so that timed runs find all kernels compiled."""
    loop = plan.build(plan.make_plan(config, open_once(config.corpus, config.vocab)))
    deque(islice(loop.epoch(), 2), maxlen=0)
    loop.step.engine.flush()


@quiet()
def train_and_score(config: Config, folder: Path, save: bool = False) -> dict[str, Any]:
    """Return the scores of a run, as in scores.json, or {"diverged": reason}.

    metrics.jsonl is written to the folder; `save` writes vectors.kv too.
    """
    planned = plan.make_plan(config, open_once(config.corpus, config.vocab))
    held_out = plan.make_heldout(planned)
    raw_words = planned.corpus.raw_words
    try:
        with Trainer(plan.build(planned), planned.vocab, raw_words, folder, held_out) as trainer:
            trainer.train()
        if save:
            export.save(trainer.vectors(), folder, ("kv",))
        return evaluate.as_dict(*trainer.score()) | trainer.took()
    except (Diverged, evaluate.EvaluationError) as error:
        return {"diverged": str(error)}


def compare(configs: dict[str, Config], seeds: Sequence[int], folder: Path) -> str:
    """Train every config with every seed; write and return the table.

    Each run gets a folder `<name>-seed<seed>`. Runs that are finished there are not repeated.
    """
    compared = []
    for name, config in configs.items():
        is_warm = config.optimizer.name == gensim_baseline.NAME
        for seed in seeds:
            seeded = replace(config, train=replace(config.train, seed=seed))
            run = _run_folder(folder, f"{name}-seed{seed}", seeded)
            if not (run / "scores.json").exists():
                if not is_warm:  # configs may differ in the kernels they use
                    warm_up(seeded)
                    is_warm = True
                _train_into(run, seeded)
            compared.append(runs.read(run))
            log.info(f"{run.name:<24}  {_summary(compared[-1])}")
    atomic_write(folder / "env.txt", describe_environment(Machine.here()))
    return runs.write(compared, folder)


def _run_folder(folder: Path, name: str, config: Config) -> Path:
    """Return the folder of a run, without what an unfinished run left."""
    number = 1
    run = folder / name
    # A run of the same name with other settings is kept; this one's name gets a number.
    while (run / "config.yaml").exists() and load_config([run / "config.yaml"]) != config:
        number += 1
        run = folder / f"{name}-{number}"
    if run.exists() and not (run / "scores.json").exists():
        shutil.rmtree(run)
    return run


def _train_into(run: Path, config: Config) -> None:
    """Train into a new run folder."""
    run.mkdir(parents=True)
    save_config(config, run / "config.yaml")
    if config.optimizer.name == gensim_baseline.NAME:
        with quiet():
            scores = gensim_baseline.train(config, *open_once(config.corpus, config.vocab), run)
    else:
        scores = train_and_score(config, run, save=True)
    # Written last: it marks the run as finished.
    atomic_write(run / "scores.json", json.dumps(scores, indent=1))


def _summary(run: runs.Run) -> str:
    """Return a run's scores on one line."""
    if run.diverged:
        return run.scores["diverged"]
    (row,) = runs.rows([run])
    figures = {name: runs.spread(row.values(name), runs.FIGURES[name].form) for name in SHOWN}
    return "  ".join(f"{name} {value}" for name, value in figures.items())


def folder_to_use(parent: Path) -> Path:
    """Return the last comparison's folder if unfinished, or today's."""
    newest = max(parent.glob("compare-*"), default=None)
    if newest and not (newest / "table.csv").exists():
        return newest
    return parent / f"compare-{time.strftime('%Y-%m-%d')}"


def make_parser(program: str, does: str) -> argparse.ArgumentParser:
    """Return a parser of the options that compare and sweep share."""
    parser = argparse.ArgumentParser(prog=f"python -m w2v.api.{program}", description=does)
    add = parser.add_argument
    base = "config file that all are laid over (default: %(default)s)"
    add("--base", default="configs/text8.yaml", metavar="CONFIG", help=base)
    add("--seeds", nargs="+", type=int, default=[1], metavar="N", help="default: 1")
    add("--set", nargs="*", default=[], metavar="section.key=value", help="laid over all configs")
    add("--to", type=Path, metavar="FOLDER", help="where the results go")
    return parser


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the parsed command line."""
    parser = make_parser(
        "compare",
        "Train configs with seeds on the same ids. Results go to runs/compare-<date>, or to the "
        "last such folder if it was interrupted.",
    )
    add = parser.add_argument
    add("configs", nargs="+", metavar="CONFIG", help="config files")
    batch = f"halve batches until there are {ENOUGH_STEPS} steps, and lower the learning rate too"
    add("--batch", choices=("fit", "keep"), default="fit", help=f"fit (default): {batch}")
    add("--with", dest="gensim", choices=("gensim",), help="add a row trained by gensim")
    lr = "gensim's learning rate (default: %(default)s)"
    add("--gensim-alpha", type=float, default=0.025, metavar="LR", help=lr)
    return parser.parse_args(argv)


def load_configs(options: argparse.Namespace) -> dict[str, Config]:
    """Return the configs by name, each checked to be trainable."""
    configs: dict[str, Config] = {}
    for path in options.configs:
        config = load_config([options.base, path], [*COMMON_SETTINGS, *LOGGED, *options.set])
        opened = open_once(config.corpus, config.vocab)
        if options.batch == "fit":
            vocab, _ = opened
            config = fit_batch_to_text(config, vocab)
        # What a plan refuses or warns of is shown before anything is trained.
        plan.make_plan(config, opened)
        name = Path(path).stem
        if name in configs:
            remedy = "runs are named after configs, so rename one"
            raise ConfigError(f"{path}: another config is called {name} too; {remedy}")
        configs[name] = config
    if options.gensim:
        first = next(iter(configs.values()))
        configs = {"gensim": gensim_baseline.as_config(first, options.gensim_alpha)} | configs
    return configs


@with_exit_status
def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line."""
    options = parse_arguments(argv)
    console.log_to_console()
    configs = load_configs(options)
    folder = options.to or folder_to_use(Path(next(iter(configs.values())).run.dir))
    print(compare(configs, options.seeds, folder))
    print(f"\ntables, curves (with matplotlib) and a folder for each run are in {folder}")


if __name__ == "__main__":
    with Signals():
        sys.exit(main())
