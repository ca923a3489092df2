"""Run folders: find them, read what runs have written, and tabulate it.

A table has a row for each setting: the mean, and the spread over seeds.
"""

from __future__ import annotations

import csv
import io
import json
import logging
import math
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import yaml

from w2v.system.files import nearest, refused
from w2v.vectors.datasets import title

log = logging.getLogger("w2v")
VISIBLE = "[!.]*"  # folders: killed processes leave hidden ones
SHOWN = {
    "optimizer.name": "optimizer",
    "optimizer.lr": "lr",
    "train.batch_size": "batch",
    "train.epochs": "epochs",
}
OTHERS = "other settings"  # heading of one column for all others that differ between rows
NO_SETTING = ("train.seed", "corpus.data_dir", "run.")  # may differ between runs of one row
Columns = dict[str, list[str]]  # cells by heading


class RunError(ValueError):
    """A run folder that cannot be found or read; one line with the remedy."""


@dataclass(frozen=True)
class Run:
    """What a run has written.

    Scores are empty for an unfinished run, and have the reason "diverged" for one that did.
    """

    folder: Path
    settings: dict[str, Any]  # the config by dotted name, such as "optimizer.lr"
    scores: dict[str, Any]
    metrics: list[dict[str, Any]]

    def curve(self, name: str, x: str = "words") -> list[tuple[float, float]]:
        """Return the points (x, metric), with the final score as the last one.

        Means of epochs are used where the run has recorded them.
        """
        final = {key: self.scores.get(key) for key in ("words", "seconds", "held_out_loss")}
        total = self.scores.get("analogies", {}).get("total", {})
        final["analogies"] = total.get("accuracy") if total.get("counted", 1) else None
        lines = [line for line in self.metrics if "epoch" in line and name in line]
        points = [(line.get(x), line.get(name)) for line in [*(lines or self.metrics), final]]
        return [point for point in points if None not in point]


def find(run: str | Path, file: str, runs: str | Path = "runs") -> Path:
    """Return the folder that `run` names, which must hold `file`.

    "latest" names the folder in `runs` whose `file` is the newest. Every run has a
    config.yaml, but only finished runs have a scores.json.
    """
    if str(run) == "latest":
        files = Path(runs).glob(f"{VISIBLE}/{file}")
        newest = max(files, key=lambda path: (path.stat().st_mtime_ns, path), default=None)
        if newest is None:
            remedy = "name a run folder, or train first"
            raise RunError(f"no folder in {runs} holds {file}; {remedy}")
        return newest.parent
    folder = Path(run)
    if not folder.exists():
        near = nearest(folder.name, (path.name for path in folder.parent.glob("*")))
        hint = f"did you mean {folder.parent / near}?" if near else "name a run, such as latest"
        raise RunError(f"{run} does not exist; {hint}")
    if (folder / file).is_file():
        return folder
    # To name the parent of the run folders is a common mistake.
    if nested := min(folder.glob(f"{VISIBLE}/{file}"), default=None):
        raise RunError(f"{run} is a folder of runs; name one run's folder, such as {nested.parent}")
    raise RunError(f"{run} holds no {file}; name another run folder or latest")


def find_all(paths: Iterable[str | Path], file: str = "scores.json") -> list[Path]:
    """Return the run folders that paths name.

    A path is a run folder, a folder of run folders, or "latest". Folders without any
    `file` are left out with a warning, as are files; it is an error if none has one.
    """
    folders: list[Path] = []
    without: list[str] = []
    for path in map(Path, paths):
        if str(path) == "latest" or not path.exists() or (path / file).is_file():
            folders.append(find(path, file))
        elif nested := sorted(match.parent for match in path.glob(f"{VISIBLE}/{file}")):
            folders += nested
        else:
            without.append(str(path))
    if not folders:
        raise RunError(f"no {file} in {', '.join(without)} or a folder there; name run folders")
    if without:
        log.warning(f"left out, as there is no {file} in it: {', '.join(without)}")
    return list(dict.fromkeys(folders))  # each once


def picture_path(folders: Sequence[Path], name: str, to: str | Path | None = None) -> Path:
    """Return the file for a picture of runs.

    That is `to`, or `name` in the folder `to`; by default `name` in the run folder, or for
    several runs in the folder "pictures" beside the first.
    """
    if to is None:
        to = folders[0] if len(folders) == 1 else folders[0].parent / "pictures"
        return to / name
    return Path(to) / name if Path(to).is_dir() else Path(to)


def read(folder: Path) -> Run:
    """Read config.yaml, metrics.jsonl and, if present, scores.json."""
    remedy = "leave it out, or train it again"
    with refused(RunError, f"{folder} is not a whole run folder", remedy):
        config = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))
        # A run that still trains, or was killed, may leave its last line half-written.
        lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").split("\n")[:-1]
        scores = folder / "scores.json"
        return Run(
            folder,
            {f"{section}.{key}": keys[key] for section, keys in config.items() for key in keys},
            dict(json.loads(scores.read_text(encoding="utf-8"))) if scores.exists() else {},
            [dict(json.loads(line)) for line in lines],
        )


def read_all(folders: Sequence[Path]) -> dict[str, Run]:
    """Read runs by the names of folders, or by paths if names are equal."""
    names = [folder.absolute().name for folder in folders]
    labels = names if len(set(names)) == len(names) else map(str, folders)
    return {label: read(folder) for label, folder in zip(labels, folders, strict=True)}


FORMATS = {  # of numbers by column; by default .1f for percent and .3f for correlations
    "held-out loss": ".4f",
    "loss": ".4f",
    "questions": ".0f",
    "M words/s": ".3g",
    "seconds": ".3g",
    "host MiB": ".0f",
    "GPU MiB": ".0f",
}
# Columns that a terminal has no room for, and columns that it shows without their deviation.
ONLY_IN_FILES = {"loss", "semantic %", "syntactic %", "seconds", "host MiB", "GPU MiB", OTHERS}
WITHOUT_SPREAD = {"questions", "M words/s"}


def figures(run: Run) -> dict[str, float | None]:
    """Return scores and costs by the heading of their column; None if missing."""
    scores = run.scores
    google = scores.get("analogies", {})
    pairs = scores.get("similarity", {})
    words, seconds = scores.get("words"), scores.get("seconds")
    bytes_host, bytes_gpu = scores.get("bytes_host"), scores.get("bytes_gpu")

    def percent(analogies: dict[str, Any], part: str) -> float | None:
        score = analogies.get(part, {})
        return 100 * score["accuracy"] if score.get("counted") else None

    return {
        "held-out loss": scores.get("held_out_loss"),
        "loss": scores.get("loss"),
        "analogies %": percent(google, "total"),
        "questions": google.get("total", {}).get("counted"),
        "semantic %": percent(google, "semantic"),
        "syntactic %": percent(google, "syntactic"),
        **{title(name): own.get("spearman") for name, own in pairs.items()},
        **{f"{name} %": percent(own, "total") for name, own in scores.get("questions", {}).items()},
        "M words/s": words / seconds / 1e6 if words and seconds else None,
        "seconds": seconds,
        "host MiB": bytes_host / 2**20 if bytes_host else None,
        "GPU MiB": bytes_gpu / 2**20 if bytes_gpu else None,
    }


@dataclass(frozen=True)
class Row:
    """Runs whose settings, by dotted name, differ only in the seed."""

    settings: dict[str, Any]
    runs: list[Run]


def quality(runs: Sequence[Run]) -> tuple[float, float]:
    """Return the mean of all scores, from 0 to 1, and minus the held-out loss.

    The loss decides between equal scores. Both are -inf if a run diverged.
    """
    if any("diverged" in run.scores for run in runs):
        return -math.inf, -math.inf
    means, losses = [], []
    for scores in (run.scores for run in runs):
        sets = [scores["analogies"], *scores.get("questions", {}).values()]
        values = [each["total"]["accuracy"] for each in sets if each["total"]["counted"]]
        correlations = [pairs["spearman"] for pairs in scores["similarity"].values()]
        values += [value for value in correlations if value is not None]
        means.append(mean(values or [-1.0]))
        losses.append(scores.get("held_out_loss") or 0.0)
    return mean(means), -mean(losses)


def rows(runs: Sequence[Run]) -> list[Row]:
    """Group runs by their settings, best first.

    Of several corpora, rows of one run.name, or else of one optimizer, are ranked by their mean.
    """
    groups: dict[str, Row] = {}
    by_name: dict[str, list[Run]] = {}
    for run in runs:
        items = run.settings.items()
        settings = {key: value for key, value in items if not key.startswith(NO_SETTING)}
        groups.setdefault(json.dumps(settings, sort_keys=True), Row(settings, [])).runs.append(run)
        by_name.setdefault(_name(run), []).append(run)
    several = len({run.settings["corpus.path"] for run in runs}) > 1

    def rank(row: Row) -> tuple[float, float]:
        return quality(by_name[_name(row.runs[0])] if several else row.runs)

    return sorted(groups.values(), key=rank, reverse=True)


def _name(run: Run) -> str:
    return run.settings["run.name"] or run.settings["optimizer.name"]


def table(compared: Sequence[Row]) -> Columns:
    """Return the columns of the comparison.

    All settings beyond SHOWN that differ between rows share one column. There is a column for the
    number of seeds if any row has several, and one for each figure that any run has.
    """
    differing = []
    for key in compared[0].settings:
        values = {json.dumps(row.settings[key]) for row in compared if key in row.settings}
        if key not in SHOWN and len(values) > 1:
            differing.append(key)
    headings = dict.fromkeys(name for row in compared for run in row.runs for name in figures(run))
    lines = [_cells(row, differing, headings) for row in compared]
    columns = {name: [line[name] for line in lines] for name in lines[0]}
    # A column is left out if all its cells are among these.
    empty = {OTHERS: {""}, "seeds": {"1", "0 of 1"}}
    empty |= {name: {"-", "diverged"} for name in headings}
    return {name: cells for name, cells in columns.items() if set(cells) - empty.get(name, set())}


def _cells(row: Row, differing: Sequence[str], headings: Iterable[str]) -> dict[str, str]:
    """Return a row's settings, number of seeds and figures, by heading."""
    cells = {heading: _text(row.settings.get(key)) for key, heading in SHOWN.items()}
    others = [f"{key.partition('.')[2]}={_text(row.settings.get(key))}" for key in differing]
    cells[OTHERS] = " ".join(text for text in others if not text.endswith(("={}", "=null")))
    # A seed whose run diverged counts as one, but has no scores.
    seeds = {run.settings["train.seed"]: "diverged" in run.scores for run in row.runs}
    finished = len(seeds) - sum(seeds.values())
    cells["seeds"] = str(finished) if finished == len(seeds) else f"{finished} of {len(seeds)}"
    measured = [*map(figures, row.runs)]
    for name in headings:
        values = [value for of_run in measured if (value := of_run.get(name)) is not None]
        form = FORMATS.get(name, ".1f" if name.endswith("%") else ".3f")
        cells[name] = spread(values, form) if finished else "diverged"
    return cells


def _text(value: Any) -> str:
    """Return the value of a setting; a number without needless digits."""
    if isinstance(value, str):
        return value
    return f"{value:g}" if isinstance(value, float) else json.dumps(value)


def spread(values: Sequence[float], form: str) -> str:
    """Format the mean, and the standard deviation if there are several values."""
    if len(values) > 1:
        return f"{mean(values):{form}} +- {stdev(values):{form}}"
    return f"{values[0]:{form}}" if values else "-"


def in_120_columns(columns: Columns) -> str:
    """Format a table for a terminal; settings that differ are below it."""
    columns = dict(columns)
    others = columns.get(OTHERS, [])
    settings = zip(columns["optimizer"], columns["lr"], others, strict=False)
    notes = [f"{name} {lr}: {other}" for name, lr, other in settings if other]
    for name in ONLY_IN_FILES & columns.keys():
        del columns[name]
    aligned = []
    for name, cells in columns.items():
        parts = [cell.split(" +- ") for cell in cells]
        shown = [name, *("±".join(part[:1] if name in WITHOUT_SPREAD else part) for part in parts)]
        width = max(map(len, shown))
        is_number = any(cell[:1].isdigit() for cell in cells)
        aligned.append([cell.rjust(width) if is_number else cell.ljust(width) for cell in shown])
    lines = ["  ".join(cells).rstrip() for cells in zip(*aligned, strict=True)]
    notes = [textwrap.fill(note, 120, subsequent_indent="  ") for note in notes]
    return "\n".join([*lines, *notes])


def markdown(columns: Columns) -> str:
    """Format a Markdown table."""
    lines = [list(columns), ["---"] * len(columns), *zip(*columns.values(), strict=True)]
    return "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in lines)


def as_csv(runs: Sequence[Run]) -> str:
    """Format all settings and unrounded figures as CSV, a line for each run."""
    lines = [{key: _text(run.settings[key]) for key in run.settings} | figures(run) for run in runs]
    file = io.StringIO()
    writer = csv.DictWriter(file, dict.fromkeys(name for line in lines for name in line))
    writer.writeheader()
    writer.writerows(lines)
    return file.getvalue()
