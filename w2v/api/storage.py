"""Commands that list and remove what runs have written."""

from __future__ import annotations

import argparse
import contextlib
import shutil
import sys
import time
from pathlib import Path

from w2v.config import Config
from w2v.system.console import show
from w2v.system.files import exclusive, printable
from w2v.system.resources import format_bytes
from w2v.text import corpus
from w2v.text.sources import CACHE
from w2v.vectors import runs
from w2v.vectors.datasets import ITEM_SCORES

PARENT = Config().run.dir
DATA = Config().corpus.data_dir
SCORES = ["analogies %", "WordSim-353", f"{ITEM_SCORES[0]} %"]
HEADINGS = ["date", "text", "optimizer", *SCORES, "size", "run"]


def list_runs(options: argparse.Namespace) -> None:
    """Print date, text, optimizer, scores and size of runs, the newest last."""
    folders = []
    for name in options.runs or [PARENT]:
        path = Path(name)
        if name == "latest":
            path = runs.find(name, "config.yaml")
        # Runs of a comparison are one level deeper.
        for parents in ("", f"{runs.VISIBLE}/", f"{runs.VISIBLE}/{runs.VISIBLE}/"):
            folders += [file.parent for file in path.glob(f"{parents}config.yaml")]
    if not folders:
        places = " ".join(options.runs) or PARENT
        raise runs.RunError(f"no run is in {places}; name a folder of runs, or train first")
    folders = sorted(dict.fromkeys(folders), key=_changed)
    lines = [_line(folder) for folder in folders]
    columns = {heading: [line.get(heading, "-") for line in lines] for heading in HEADINGS}
    shown = {heading: cells for heading, cells in columns.items() if set(cells) != {"-"}}
    show("\n".join(runs.aligned(shown)))
    caches = cached_texts(DATA)
    in_runs, in_caches = (format_bytes(sum(map(_size, paths))) for paths in (folders, caches))
    show("", f"runs: {len(folders)}, {in_runs}; cached texts: {len(caches)}, {in_caches}")


def clean(options: argparse.Namespace) -> None:
    """Remove run folders and cached texts after a question."""
    targets = [Path(path) for path in options.runs if (Path(path) / "runs.csv").is_file()]
    others = [path for path in options.runs if Path(path) not in targets]  # no comparisons
    if others:
        targets += runs.find_all(others, "config.yaml")
    caches = []
    if options.caches:
        caches = cached_texts(options.caches)
    if not (targets or caches):
        raise runs.RunError("nothing to remove; name run folders, or --caches (see w2v runs)")
    for folder in targets + caches:
        show(f"{format_bytes(_size(folder)):>9}  {folder}")
    if options.dry_run:
        return
    if not options.yes:
        if not sys.stdin.isatty():
            raise runs.RunError("clean asks in a terminal before it removes; or add --yes")
        show("remove all of these? y/N")
        if sys.stdin.readline().strip().lower() not in ("y", "yes"):
            return
    from w2v.training import run_folder  # only now, as it imports torch

    for folder in targets:
        with run_folder.lock(folder):
            shutil.rmtree(folder)
        with contextlib.suppress(OSError):  # holds more than the runs of a stopped comparison
            folder.parent.rmdir()
    for folder in caches:
        with exclusive(folder.parent, lambda: show("waiting for a run that reads a text")):
            shutil.rmtree(folder)


def cached_texts(data_dir: str | Path) -> list[Path]:
    """Return the folders of word ids below `corpus.data_dir`."""
    return sorted(file.parent for file in (Path(data_dir) / CACHE).glob(f"*/{corpus.HEADER}"))


def _line(folder: Path) -> dict[str, str]:
    """Return the cells of a run, finished or not, by their heading."""
    line = {"text": "unreadable", "size": format_bytes(_size(folder)), "run": str(folder)}
    line["date"] = time.strftime("%Y-%m-%d", time.localtime(_changed(folder)))
    with contextlib.suppress(runs.RunError):
        run = runs.read(folder)
        line["text"] = Path(run.settings["corpus.path"]).name
        line["optimizer"] = run.settings["optimizer.name"]
        for heading, score in runs.figures(run).items():
            if heading in SCORES and score is not None:
                line[heading] = f"{score:{runs.FORMATS['%' * heading.endswith('%')]}}"
        if not (folder / "scores.json").exists():
            line[SCORES[0]] = "unfinished"
        if run.scores["diverged"]:
            line[SCORES[0]] = "diverged"
    return {heading: printable(cell) for heading, cell in line.items()}


def _changed(folder: Path) -> float:
    return (folder / "config.yaml").stat().st_mtime


def _size(folder: Path) -> int:
    size = 0
    for file in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):  # of a run that is writing
            size += file.lstat().st_size
    return size
