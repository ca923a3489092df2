"""Folder of a run: create it, find it again, and lock it."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from w2v.config import (
    TYPES,
    Config,
    ConfigError,
    config_changes,
    flat_config,
    load_config,
    save_config,
)
from w2v.distributed import launcher
from w2v.distributed.ranks import SINGLE, Ranks
from w2v.rows import checkpoint
from w2v.system.console import log
from w2v.system.files import atomic_write, remove_partial
from w2v.text import CorpusError
from w2v.text.sources import require_source
from w2v.vectors import manifest
from w2v.vectors.runs import RunError, find
from w2v.word2vec.auto import shipped

# Settings that may change on resume: how long and how fast it trains, reports, and paging.
# Of a text, checkpoints compare the words, so that it may lie elsewhere.
MAY_CHANGE = {"train.epochs", "optimizer.lr", "optimizer.min_lr", "corpus.path", "corpus.data_dir"}
MAY_CHANGE |= {name for name in TYPES if name.startswith(("run.", "transfer."))}
MAY_CHANGE.remove("run.held_out_items")

MOST_CHARACTERS = 50  # of a text's name in that of a run, which may have 255 bytes
JOB = ".job"  # file with the torchrun job that created the run


def create(config: Config, ranks: Ranks = SINGLE) -> Path:
    """Create a new <run.dir>/<date>-<name>; rank 0 does it for all."""
    text = Path(config.corpus.path[0])
    corpus = text.name.strip(".").split(".")[0][:MOST_CHARACTERS]
    name = config.run.name or f"{corpus}-{config.optimizer.name.lower()}"
    folder = base = Path(config.run.dir) / f"{time.strftime('%Y-%m-%d-%H%M%S')}-{name}"
    with ranks.reraise():
        base.parent.mkdir(parents=True, exist_ok=True)
        for number in itertools.count(2):
            if ranks.rank:
                break
            with contextlib.suppress(FileExistsError):
                folder.mkdir()
                break
            folder = Path(f"{base}-{number}")
    return ranks.all_gather(folder)[0]  # that of rank 0


def find_to_resume(resume: str | None, runs: str, ranks: Ranks = SINGLE) -> Path | None:
    """Return the folder of --resume, or that of a restarted torchrun job."""
    folder = None
    with ranks.reraise():
        if ranks.rank == 0 and resume:
            folder = find(resume, "config.yaml", runs)
        elif ranks.rank == 0:
            folder = _find_restarted(runs)
    return ranks.all_gather(folder)[0]  # that of rank 0


def _find_restarted(runs: str) -> Path | None:
    """Return the folder where `begin` has written this torchrun job."""
    job = launcher.job().encode()
    files = [file for file in Path(runs).glob(f"*/{JOB}") if file.is_file()]
    files = [file for file in files if file.read_bytes() == job]
    if launcher.restarts():
        newest = sorted(files, key=lambda file: file.stat().st_mtime_ns)
        return next((file.parent for file in reversed(newest)), None)
    for file in files:  # of an earlier job with the same name
        file.unlink()
    return None


def resume_config(folder: Path, files: Sequence[str], assignments: Sequence[str]) -> Config:
    """Return the settings of the run, changed by config files and assignments.

    If the folder lies elsewhere now, `run.dir` is where it lies: the plan counts the disk there.

    Raises `ConfigError` if there is a checkpoint and a setting differs that must not change, or if
    the run is finished without one.
    """
    config = load_config([folder / "config.yaml", *files], assignments)
    if saved := checkpoint.latest(folder / "checkpoints"):
        with saved.checked():
            changes = config_changes(saved.state["config"], flat_config(config))
        refused = [change for name, change in changes.items() if name not in MAY_CHANGE]
        if refused:
            others = f"{saved.path} has other settings: {'; '.join(refused)}"
            raise ConfigError(f"{others}; leave them as they were, or begin a new run")
        if not config.optimizer.lr and shipped(config.optimizer) != config.optimizer:
            other = "would change optimizer.args={} of the run to the shipped ones"
            raise ConfigError(f"optimizer.lr=auto {other}; give a number")
    elif (folder / "scores.json").exists():  # not those killed while they wrote vectors
        remedy = "begin a new run, with run.final_checkpoint=true to go on from it later"
        raise ConfigError(f"{folder} is finished and has no checkpoint; {remedy}")
    else:
        log.info(f"{folder} has no checkpoint; it trains from the beginning")
    parent = folder.resolve().parent
    if Path(config.run.dir).resolve() != parent:
        config = replace(config, run=replace(config.run, dir=str(parent)))
    return config


def require_text(folder: Path, config: Config) -> None:
    """Raise `CorpusError` unless the text of the run is there."""
    try:
        for path in config.corpus.path:
            require_source(path, config.corpus.data_dir)
    except CorpusError as error:  # such as a relative path, from another working folder
        reason = str(error).partition("; did you mean")[0]
        raise CorpusError(f"{reason}; name the text: w2v train --resume {folder} TEXT") from None


def begin(folder: Path, config: Config, environment: str) -> None:
    """Write settings, versions and hardware, and the torchrun job.

    Scores and pictures of an earlier step are removed. Its vectors are left until there are new
    ones, and refused when the run has a later checkpoint.
    """
    manifest.remove_derived(folder)
    save_config(config, folder / "config.yaml")
    atomic_write(folder / "env.txt", environment)
    if launcher.job():
        atomic_write(folder / JOB, launcher.job())


def lock(folder: Path, ranks: Ranks = SINGLE) -> contextlib.AbstractContextManager:
    """Lock the folder until the returned file is closed.

    Rank 0 does so for all, and removes temporary files; the other ranks get a context
    manager that does nothing.
    """
    with ranks.reraise():
        if not folder.is_dir():
            missing = f"rank {ranks.rank} does not see {folder}"
            raise RunError(f"{missing}; set run.dir to storage that all hosts share")
        if ranks.rank:
            return contextlib.nullcontext()
        file = open(folder / ".lock", "a+", encoding="utf-8")  # noqa: SIM115 - until the end
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            user = f"process {file.read().strip() or '(unknown)'}"
            remedy = "wait for it, stop it, or begin a run of its own"
            raise RunError(f"{folder} is in use by {user}; {remedy}") from None
        # Others can name the process that has the lock.
        file.truncate(0)
        file.write(f"{os.getpid()}\n")
        file.flush()
        remove_partial(folder)
        remove_partial(folder / "checkpoints")
        return file
