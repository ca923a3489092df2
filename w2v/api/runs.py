"""Compare runs: a row for each setting, mean and spread over seeds."""

from __future__ import annotations

import csv
import io
import json
import logging
import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import Any, NamedTuple

from w2v.system.files import atomic_write
from w2v.vectors import plots
from w2v.vectors.datasets import PAIR_SETS
from w2v.vectors.runs import Run, find_all, read

log = logging.getLogger("w2v")
SHOWN = {
    "optimizer.name": "optimizer",
    "optimizer.lr": "lr",
    "train.batch_size": "batch",
    "train.epochs": "epochs",
}
NO_SETTING = ("train.seed", "corpus.data_dir", "run.")  # may differ between runs of one row
Columns = dict[str, list[str]]  # cells by heading


class Figure(NamedTuple):
    """A column of the table: its format, and its value in scores.json."""

    form: str
    value: Callable[[dict[str, Any]], float]  # may raise where a run has no such figure


def _percent(scores: dict[str, Any], part: str) -> Any:
    """Return the accuracy in a part of the analogies, if any was counted."""
    score = scores["analogies"][part]
    return 100 * score["accuracy"] if score["counted"] else None


SCORES = {
    "held-out loss": Figure("{:.4f}", lambda s: s["held_out_loss"]),
    "loss": Figure("{:.4f}", lambda s: s["loss"]),
    "analogies %": Figure("{:.1f}", lambda s: _percent(s, "total")),
    "questions": Figure("{:.0f}", lambda s: s["analogies"]["total"]["counted"]),
    "semantic %": Figure("{:.1f}", lambda s: _percent(s, "semantic")),
    "syntactic %": Figure("{:.1f}", lambda s: _percent(s, "syntactic")),
    "WordSim-353": Figure("{:.3f}", lambda s: s["similarity"]["wordsim353"]["spearman"]),
    "SimLex-999": Figure("{:.3f}", lambda s: s["similarity"]["simlex999"]["spearman"]),
}
COSTS = {
    "M words/s": Figure("{:.3g}", lambda s: s["words"] / s["seconds"] / 1e6),
    "seconds": Figure("{:.3g}", lambda s: s["seconds"]),
    "host MiB": Figure("{:.0f}", lambda s: s["bytes_host"] / 2**20),
    "GPU MiB": Figure("{:.0f}", lambda s: s["bytes_gpu"] / 2**20 or None),  # 0 without a GPU
}
# Columns that a terminal has no room for, and those whose spread it has no room for.
ONLY_IN_FILES = {"loss", "semantic %", "syntactic %", "host MiB", "GPU MiB", "other settings"}
WITHOUT_SPREAD = {"questions", "M words/s", "seconds"}


@dataclass(frozen=True)
class Row:
    """Runs whose settings, by dotted name, differ in nothing but the seed."""

    settings: dict[str, Any]
    runs: list[Run]

    def values(self, figure: Figure) -> list[float]:
        """Return a figure of all runs that did not diverge and have it."""
        found = []
        for run in self.runs:
            with suppress(KeyError, TypeError, ZeroDivisionError):
                found.append(float(figure.value(run.scores)))
        return found


def figures(runs: Iterable[Run]) -> dict[str, Figure]:
    """Return the columns by heading, those of further data sets included."""
    further = {}
    for run in runs:
        for name in run.scores.get("questions", ()):
            value = lambda s, name=name: 100 * s["questions"][name]["total"]["accuracy"]  # noqa: E731
            further[f"{name} %"] = Figure("{:.1f}", value)
        for name in run.scores.get("similarity", {}).keys() - PAIR_SETS:
            value = lambda s, name=name: s["similarity"][name]["spearman"]  # noqa: E731
            further[name] = Figure("{:.3f}", value)
    return {**SCORES, **further, **COSTS}


def quality(runs: Sequence[Run]) -> tuple[float, float]:
    """Return the mean of all scores from 0 to 1, and the negative held-out loss.

    The loss decides between equal scores. Both are -inf if a run diverged.
    """
    if any(run.diverged for run in runs):
        return -math.inf, -math.inf
    means, losses = [], []
    for scores in (run.scores for run in runs):
        sets = [scores["analogies"], *scores.get("questions", {}).values()]
        totals = [each["total"] for each in sets]
        found = [total["accuracy"] for total in totals if total["counted"]]
        correlations = [pairs["spearman"] for pairs in scores["similarity"].values()]
        found += [value for value in correlations if value is not None]
        means.append(mean(found or [-1.0]))
        losses.append(scores.get("held_out_loss") or 0.0)
    return mean(means), -mean(losses)


def rows(runs: Sequence[Run]) -> list[Row]:
    """Group runs by their settings, best first.

    Of several corpora, rows of one run.name, or else of one optimizer, are ranked by their mean.
    """
    groups: dict[str, Row] = {}
    by_name: dict[str, list[Run]] = {}
    for run in runs:
        given = run.settings.items()
        settings = {key: value for key, value in given if not key.startswith(NO_SETTING)}
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

    Settings beyond SHOWN that differ between rows are in one column. A column for the number
    of seeds is there if any row has several.
    """
    columns = {title: _column(compared, key) for key, title in SHOWN.items()}
    if any(others := _other_settings(compared)):
        columns["other settings"] = others
    seeds = [{run.settings["train.seed"]: run.diverged for run in row.runs} for row in compared]
    sizes = [*map(len, seeds)]
    finished = [sum(not diverged for diverged in found.values()) for found in seeds]
    if max(sizes) > 1:
        columns["seeds"] = [
            str(size) if done == size else f"{done} of {size}"
            for done, size in zip(finished, sizes, strict=True)
        ]
    for name, figure in figures(run for row in compared for run in row.runs).items():
        if any(values := [row.values(figure) for row in compared]):
            columns[name] = [
                spread(found, figure.form) if done else "diverged"
                for found, done in zip(values, finished, strict=True)
            ]
    return columns


def _column(compared: Sequence[Row], key: str) -> list[str]:
    """Return one setting of all rows; numbers without needless digits."""
    values = [row.settings.get(key) for row in compared]
    plain = [f"{value:g}" if isinstance(value, float) else value for value in values]
    return [value if isinstance(value, str) else json.dumps(value) for value in plain]


def _other_settings(compared: Sequence[Row]) -> list[str]:
    """Return for each row its settings beyond SHOWN in which rows differ."""
    texts: list[list[str]] = [[] for _ in compared]
    for key in compared[0].settings:
        given = {json.dumps(row.settings[key]) for row in compared if key in row.settings}
        if key not in SHOWN and len(given) > 1:
            for text, value in zip(texts, _column(compared, key), strict=True):
                if value not in ("{}", "null"):
                    text.append(f"{key.partition('.')[2]}={value}")
    return [" ".join(text) for text in texts]


def spread(values: Sequence[float], form: str) -> str:
    """Format the mean, and the standard deviation if there are several values."""
    if len(values) > 1:
        return f"{form.format(mean(values))} +- {form.format(stdev(values))}"
    return form.format(values[0]) if values else "-"


def in_120_columns(columns: Columns) -> str:
    """Format a table for a terminal; settings that differ are below it."""
    columns = dict(columns)
    others = columns.get("other settings", [])
    settings = zip(columns["optimizer"], columns["lr"], others, strict=False)
    notes = [f"{name} {lr}: {other}" for name, lr, other in settings if other]
    for name in ONLY_IN_FILES & columns.keys():
        del columns[name]
    for name in ("batch", "epochs"):
        if len(set(columns[name])) == 1 < len(columns[name]):
            notes.append(f"all: {name} {columns.pop(name)[0]}")
    aligned = []
    for name, cells in columns.items():
        parts = [cell.split(" +- ") for cell in cells]
        shown = [name, *("±".join(part[:1] if name in WITHOUT_SPREAD else part) for part in parts)]
        width = max(map(len, shown))
        is_number = any(cell[:1].isdigit() for cell in cells)
        aligned.append([cell.rjust(width) if is_number else cell.ljust(width) for cell in shown])
    lines = ["  ".join(cells).rstrip() for cells in zip(*aligned, strict=True)]
    return "\n".join([*lines, *notes])


def markdown(columns: Columns) -> str:
    """Format a Markdown table."""
    lines = [list(columns), ["---"] * len(columns), *zip(*columns.values(), strict=True)]
    return "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in lines)


def as_csv(compared: Sequence[Row]) -> str:
    """Format all settings and the unrounded figures of all rows as CSV."""
    columns = {key: _column(compared, key) for key in compared[0].settings}
    columns["seeds"] = [str(len(row.runs)) for row in compared]
    for name, figure in figures(run for row in compared for run in row.runs).items():
        values = [row.values(figure) for row in compared]
        columns[name] = [str(mean(found)) if found else "" for found in values]
        columns[f"{name} stdev"] = [str(stdev(found)) if found[1:] else "" for found in values]
    file = io.StringIO()
    csv.writer(file).writerows([columns, *zip(*columns.values(), strict=True)])
    return file.getvalue()


def write(runs: Sequence[Run], folder: Path) -> str:
    """Write the table in all formats, and the curves; return it as text."""
    folder.mkdir(parents=True, exist_ok=True)
    compared = rows(runs)
    columns = table(compared)
    atomic_write(folder / "table.txt", in_120_columns(columns) + "\n")
    atomic_write(folder / "table.md", markdown(columns) + "\n")
    # The legend needs all that tells the rows apart, or two would be one line.
    parts = [*(_column(compared, key) for key in SHOWN), _other_settings(compared)]
    labels = map(" ".join, zip(*parts, strict=True))
    try:
        groups = {label: row.runs for label, row in zip(labels, compared, strict=True)}
        plots.curves(groups, folder / "curves.png")
    except plots.PlotError as error:  # the tables need no matplotlib
        log.warning(f"no curves.png: {error}")
    # The last file, by which a comparison is known to be finished.
    atomic_write(folder / "table.csv", as_csv(compared))
    return in_120_columns(columns)


def report(paths: Iterable[str | Path], folder: str | Path | None = None) -> str:
    """Return the table of the runs that paths name; write it to a folder."""
    runs = [read(found) for found in find_all(paths)]
    return write(runs, Path(folder)) if folder else in_120_columns(table(rows(runs)))
