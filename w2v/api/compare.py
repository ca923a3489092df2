"""Train several configs with several seeds, and compare them.

    w2v compare configs/optimizers/*.yaml --seeds 1 2 3 --set corpus.path=text8

Runs that are already finished in the folder are not trained again.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import logging
import shutil
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
from w2v.system.process import describe_environment
from w2v.text import open_corpus
from w2v.text.corpus import Corpus
from w2v.text.vocab import Vocab
from w2v.training import plan
from w2v.training.memory import Machine
from w2v.training.trainer import Diverged, Trainer
from w2v.vectors import evaluate, export
from w2v.vectors.datasets import NOTHING_FURTHER, Further

log = logging.getLogger("w2v")
COMMON_SETTINGS = ["run.checkpoint_minutes=0"]
HELD_OUT_WORDS = 20_000
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


def held_out(config: Config) -> str:
    """Return the setting of held-out words: of a short text a tenth."""
    _, corpus = open_once(config.corpus, config.vocab)
    words = min(HELD_OUT_WORDS, len(corpus.ids) // 10) if len(corpus.offsets) > 10 else 0
    return f"train.held_out_words={words}"


def warm_up(planned: plan.Plan) -> None:
    """Train two steps, so that the timed run finds all kernels compiled."""
    loop = plan.build(planned)
    deque(islice(loop.epoch(), 2), maxlen=0)
    loop.step.engine.flush()


@quiet()
def train_and_score(
    config: Config, folder: Path, save: bool = False, further: Further = NOTHING_FURTHER
) -> dict[str, Any]:
    """Return the scores of a run, as in scores.json, or {"diverged": reason}.

    metrics.jsonl is written to the folder; `save` writes vectors.kv too. `further` are sets to
    score beside gensim's.
    """
    vocab, corpus = open_once(config.corpus, config.vocab)
    planned = plan.make_plan(config, (vocab, corpus))
    held_out = plan.make_heldout(planned)
    warm_up(planned)
    try:
        with Trainer(plan.build(planned), vocab, corpus.raw_words, folder, held_out) as trainer:
            trainer.train()
        if save:
            export.save(trainer.vectors(), folder, ("kv",))
        scores = evaluate.scores(vocab.words, trainer.loop.step.inputs["weight"], *further)
        return evaluate.as_dict(*scores) | trainer.took()
    except (Diverged, evaluate.EvaluationError) as error:
        return {"diverged": str(error)}


def compare(
    configs: dict[str, Config],
    seeds: Sequence[int],
    folder: Path,
    further: Further = NOTHING_FURTHER,
) -> str:
    """Train every config with every seed; write and return the table.

    Each run gets a folder `<name>-seed<seed>`. Runs that are finished there are not repeated.
    """
    compared = []
    for name, config in configs.items():
        for seed in seeds:
            seeded = replace(config, train=replace(config.train, seed=seed))
            run = _run_folder(folder, f"{name}-seed{seed}", seeded)
            if not (run / "scores.json").exists():
                _train_into(run, seeded, further)
            compared.append(runs.read(run))
            done = f"{len(compared)} of {len(configs) * len(seeds)}"
            log.info(f"{done}  {run.name:<24}  {_summary(compared[-1])}")
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


def _train_into(run: Path, config: Config, further: Further) -> None:
    """Train into a new run folder."""
    run.mkdir(parents=True)
    save_config(config, run / "config.yaml")
    if config.optimizer.name == gensim_baseline.NAME:
        with quiet():
            opened = open_once(config.corpus, config.vocab)
            scores = gensim_baseline.train(config, *opened, run, further)
    else:
        scores = train_and_score(config, run, save=True, further=further)
    # Written last: it marks the run as finished.
    atomic_write(run / "scores.json", json.dumps(scores, indent=1))


def _summary(run: runs.Run) -> str:
    """Return a run's scores on one line."""
    if run.diverged:
        return run.scores["diverged"]
    (row,) = runs.rows([run])
    figures = {name: runs.spread(row.values(name), runs.figure(name).form) for name in SHOWN}
    return "  ".join(f"{name} {value}" for name, value in figures.items())


def folder_to_use(parent: Path) -> Path:
    """Return the last comparison's folder if unfinished, or today's."""
    newest = max(parent.glob("compare-*"), default=None)
    if newest and not (newest / "table.csv").exists():
        return newest
    return parent / f"compare-{time.strftime('%Y-%m-%d')}"


def load_configs(options: argparse.Namespace) -> dict[str, Config]:
    """Return the configs by name, each checked to be trainable."""
    configs: dict[str, Config] = {}
    for corpus, path in itertools.product(options.corpora or [None], options.configs):
        files = [options.base, path]
        given = [*options.set, *([f"corpus.path={corpus}"] if corpus else [])]
        own = held_out(load_config(files, given))
        config = load_config(files, [own, *COMMON_SETTINGS, *LOGGED, *given])
        opened = open_once(config.corpus, config.vocab)
        # What a plan refuses or warns of is shown before anything is trained.
        config = plan.make_plan(config, opened).config
        ending = f"-{Path(corpus).name.split('.')[0]}" if corpus else ""
        name = Path(path).stem + ending
        if name in configs:
            remedy = "runs are named after configs, so rename one"
            raise ConfigError(f"{path}: another config is called {name} too; {remedy}")
        if options.gensim and path == options.configs[0]:
            configs[f"gensim{ending}"] = gensim_baseline.as_config(config, options.gensim_alpha)
        configs[name] = config
    return configs


def run(options: argparse.Namespace) -> None:
    """Print the table of run folders, or train configs and print theirs."""
    if any(Path(name).is_dir() or name == "latest" for name in options.configs):
        print(runs.report(options.configs, options.to))
        return
    console.log_to_console()
    configs = load_configs(options)
    folder = options.to or folder_to_use(Path(next(iter(configs.values())).run.dir))
    further = Further(options.questions, options.pairs)
    print(compare(configs, options.seeds, folder, further))
    print(f"\ntables, curves (with matplotlib) and a folder for each run are in {folder}")
