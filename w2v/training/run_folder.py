"""The folder of a run: a new one, or one to go on in; used by one process at a time."""

from __future__ import annotations

import fcntl
import os
import shutil
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import IO

from w2v.config import (
    Config,
    ConfigError,
    config_changes,
    config_keys,
    flat_config,
    load_config,
    save_config,
)
from w2v.distributed import launcher as torchrun
from w2v.distributed.ranks import SINGLE, Ranks
from w2v.system.files import atomic_write, newest_file
from w2v.training import checkpoint

# What may change when a run goes on: how long it trains and how fast it learns, what it reports, and how rows travel.
MAY_CHANGE = {"train.epochs", "optimizer.lr", "optimizer.min_lr", "corpus.data_dir"}
MAY_CHANGE |= {name for name in config_keys() if name.startswith(("run.", "transfer."))}


JOB = ".job"  # a file that says which job of torchrun began the run


class RunFolderError(ValueError):
    """A run folder that cannot be used; the message is one line that names it and the remedy."""


def create(config: Config, ranks: Ranks = SINGLE) -> Path:
    """Make <run.dir>/<date>-<name>, never one that exists; the first rank's, for all."""
    with ranks.reraise():
        folder = _create(config) if ranks.rank == 0 else None
    return ranks.all_gather(folder)[0]  # which `lock` makes where ranks share no storage


def _create(config: Config) -> Path:
    corpus = Path(config.corpus.path).name.split(".")[0]
    name = config.run.name or f"{corpus}-{config.optimizer.name.lower()}"
    base = Path(config.run.dir) / f"{time.strftime('%Y-%m-%d-%H%M%S')}-{name}"
    folder, number = base, 1
    while True:
        try:
            folder.mkdir(parents=True)
            return folder
        except FileExistsError:
            number += 1
            folder = base.with_name(f"{base.name}-{number}")


def find(run: str, runs: str | Path) -> Path:
    """The folder that `run` names: itself, or with `latest` the one in `runs` that was begun last."""
    if run == "latest":
        begun = newest_file(Path(runs), "config.yaml")
        if begun is None:
            raise RunFolderError(
                f"--resume latest finds no run in {runs}; name a run folder, or where they are with run.dir=FOLDER"
            )
        return begun.parent
    folder = Path(run)
    if not (folder / "config.yaml").is_file():
        raise RunFolderError(
            f"--resume {run}: no run was begun there, as it holds no config.yaml; name a folder of {runs}, or latest"
        )
    return folder


def resumed(folder: Path, files: Sequence[str], assignments: Sequence[str]) -> Config:
    """The settings of the run overlaid by these; raises `ConfigError` where one differs that may not, once there is a checkpoint."""
    config = load_config([folder / "config.yaml", *files], assignments)
    if saved := checkpoint.latest(folder / "checkpoints"):
        changed = config_changes(saved.state["config"], flat_config(config))
        if refused := [words for name, words in changed.items() if name not in MAY_CHANGE]:
            raise ConfigError(
                f"{saved.path} has other settings: {'; '.join(refused)}; leave them as they were, or begin a new run"
            )
    return config


def begun(resume: str | None, runs: str, ranks: Ranks = SINGLE) -> Path | None:
    """The folder to go on in: that which is asked for, or that of the job whose ranks torchrun starts again; None for a new run."""
    found = None
    with ranks.reraise():
        if ranks.rank == 0:
            found = find(resume, runs) if resume else _of_this_job(runs)
    return ranks.all_gather(found)[0]


def _of_this_job(runs: str) -> Path | None:
    marks = [
        mark
        for mark in Path(runs).glob(f"*/{JOB}")
        if mark.read_text(encoding="utf-8") == torchrun.job()
    ]
    if torchrun.starts():
        return max(marks, key=lambda mark: mark.stat().st_mtime_ns).parent if marks else None
    for mark in marks:  # of another job, which bore the same name
        mark.unlink()
    return None


def begin(folder: Path, config: Config, environment: str) -> None:
    """Write what says how to go on in the folder: the settings, versions and hardware, and the name of the job."""
    save_config(config, folder / "config.yaml")
    atomic_write(folder / "env.txt", environment)
    if torchrun.job():
        atomic_write(folder / JOB, torchrun.job())


def lock(folder: Path, ranks: Ranks = SINGLE) -> AbstractContextManager[IO[str] | None]:
    """Keep other processes out of the folder for as long as what is returned is open, and remove what a killed one left half-written.

    The first of the ranks that see the folder does so for all of them, who get nothing to open.
    """
    leads = ranks.leads(folder)
    with ranks.reraise():
        return _lock(folder) if leads else nullcontext()


def _lock(folder: Path) -> IO[str]:
    file = open(folder / ".lock", "a+", encoding="utf-8")  # noqa: SIM115 - open until the process ends
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        user = f"process {number}" if (number := file.read().strip()) else "another process"
        raise RunFolderError(
            f"{folder} is in use by {user}; wait for it, stop it, or begin a run of its own"
        ) from None
    file.truncate(0)
    file.write(f"{os.getpid()}\n")
    file.flush()
    checkpoint.clean(folder / "checkpoints")
    for left in [
        *folder.rglob(".rank-*"),
        *folder.glob(".saving-*"),
        *folder.glob(".vocab.tsv.*"),
        *folder.glob("*.part"),
    ]:
        shutil.rmtree(left) if left.is_dir() else left.unlink(missing_ok=True)
    return file
