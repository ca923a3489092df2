"""Compare runs: a row for each setting, mean and spread over seeds."""

from __future__ import annotations

import csv
import io
import json
import logging
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
BY_CORPUS = (
    "corpus.",
    "train.batch_size",
    "train.held_out_words",
    "optimizer.lr",
    "optimizer.occurrence_cap",
)
NO_SETTING = ("train.seed", "corpus.data_dir", "run.")  # may differ between runs of one row


class Figure(NamedTuple):
    """A column of the table: its format, and its value in scores.json."""

    form: str
    value: Callable[[dict[str, Any]], float]  # may raise where a run has no such figure


def _percent(scores: dict[str, Any], part: str) -> Any:
    """Return the accuracy in a part of the analogies, if any was counted."""
    score = scores["analogies"][part]
    return 100 * score["accuracy"] if score["counted"] else None


FIGURES = {
    "held-out loss": Figure("{:.4f}", lambda s: s["held_out_loss"]),
    "loss": Figure("{:.4f}", lambda s: s["loss"]),
    "analogies %": Figure("{:.1f}", lambda s: _percent(s, "total")),
    "questions": Figure("{:.0f}", lambda s: s["analogies"]["total"]["counted"]),
    "semantic %": Figure("{:.1f}", lambda s: _percent(s, "semantic")),
    "syntactic %": Figure("{:.1f}", lambda s: _percent(s, "syntactic")),
    "WordSim-353": Figure("{:.3f}", lambda s: s["similarity"]["wordsim353"]["spearman"]),
    "SimLex-999": Figure("{:.3f}", lambda s: s["similarity"]["simlex999"]["spearman"]),
    "M words/s": Figure("{:.3g}", lambda s: s["words"] / s["seconds"] / 1e6),
    "seconds": Figure("{:.3g}", lambda s: s["seconds"]),
    "host MiB": Figure("{:.0f}", lambda s: s["bytes_host"] / 2**20),
    "GPU MiB": Figure("{:.0f}", lambda s: s["bytes_gpu"] / 2**20 or None),  # 0 without a GPU
}
# Columns that a terminal has no room for, and those whose spread it has no room for.
ONLY_IN_FILES = {"loss", "semantic %", "syntactic %", "host MiB", "GPU MiB", "other settings"}
HEADINGS = ("optimizer", "lr", "other settings")
WITHOUT_SPREAD = {"questions", "M words/s", "seconds"}


@dataclass(frozen=True)
class Row:
    """Runs whose settings, by dotted name, differ in nothing but the seed."""

    settings: dict[str, Any]
    runs: list[Run]

    def values(self, name: str) -> list[float]:
        """Return a figure of all runs that did not diverge and have it."""
        found = []
        for run in self.runs:
            with suppress(KeyError, TypeError, ZeroDivisionError):
                found.append(float(figure(name).value(run.scores)))
        return found


def figure(name: str) -> Figure:
    """Return a column: one of FIGURES, or the scores of a further set."""
    if name in FIGURES:
        return FIGURES[name]
    if name.endswith(" %"):
        title = name.removesuffix(" %")
        return Figure("{:.1f}", lambda s: 100 * s["questions"][title]["total"]["accuracy"])
    return Figure("{:.3f}", lambda s: s["similarity"][name]["spearman"])


def figure_names(compared: Iterable[Row]) -> list[str]:
    """Return the columns of FIGURES, and of further sets behind SimLex-999."""
    scores = [run.scores for row in compared for run in row.runs]
    questions = [f"{name} %" for found in scores for name in found.get("questions", ())]
    pairs = [name for found in scores for name in found.get("similarity", ())]
    further = dict.fromkeys([*questions, *(name for name in pairs if name not in PAIR_SETS)])
    names = list(FIGURES)
    place = names.index("SimLex-999") + 1
    return [*names[:place], *further, *names[place:]]


def quality(row: Row) -> float:
    """Return the mean of all scores of a row, each from 0 to 1."""
    names = figure_names([row])
    sets = ["analogies %", *names[names.index("WordSim-353") : names.index("M words/s")]]
    found = {name: row.values(name) for name in sets}
    scores = [
        mean(values) / (100 if "%" in name else 1) for name, values in found.items() if values
    ]
    return mean(scores) if scores else -1.0


def rows(runs: Iterable[Run]) -> list[Row]:
    """Group runs by their settings; best first, over all sets and corpora."""
    groups: dict[str, Row] = {}
    for run in runs:
        given = run.settings.items()
        settings = {key: value for key, value in given if not key.startswith(NO_SETTING)}
        groups.setdefault(json.dumps(settings, sort_keys=True), Row(settings, [])).runs.append(run)
    # What depends on the corpus may differ between rows of one config.
    by_config: dict[str, list[Row]] = {}
    for row in groups.values():
        common = [value for key, value in row.settings.items() if not key.startswith(BY_CORPUS)]
        by_config.setdefault(json.dumps(common), []).append(row)
    ranked = sorted(by_config.values(), key=lambda found: -mean(map(quality, found)))
    corpora = {row.settings.get("corpus.path") for row in groups.values()}
    if len(corpora) == 1:
        return sorted(groups.values(), key=lambda row: -quality(row))
    return [row for found in ranked for row in found]


def table(compared: Sequence[Row]) -> list[list[str]]:
    """Return the header and the cells of the comparison table.

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
    for name in figure_names(compared):
        if any(values := [row.values(name) for row in compared]):
            columns[name] = [
                spread(found, figure(name).form) if done else "diverged"
                for found, done in zip(values, finished, strict=True)
            ]
    return [list(columns), *map(list, zip(*columns.values(), strict=True))]


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


def text(lines: Sequence[Sequence[str]]) -> str:
    """Format a header and cells as aligned text; numbers to the right."""
    columns = []
    for column in zip(*lines, strict=True):
        width = max(map(len, column))
        numbers = any(cell[:1].isdigit() for cell in column[1:])
        columns.append([cell.rjust(width) if numbers else cell.ljust(width) for cell in column])
    return "\n".join("  ".join(cells).rstrip() for cells in zip(*columns, strict=True))


def in_120_columns(lines: Sequence[Sequence[str]]) -> str:
    """Format a table for a terminal; settings that differ are below it."""
    header, *body = lines
    columns = dict(zip(header, map(list, zip(*body, strict=True)), strict=True))
    notes = (
        [
            f"{name} {lr}: {others}"
            for name, lr, others in zip(*map(columns.get, HEADINGS), strict=True)
            if others
        ]
        if "other settings" in columns
        else []
    )
    for name in ONLY_IN_FILES & columns.keys():
        del columns[name]
    for name in ("batch", "epochs"):
        if len(set(columns[name])) == 1 < len(body):
            notes.append(f"all: {name} {columns.pop(name)[0]}")
    for name, cells in columns.items():
        parts = [cell.split(" +- ") for cell in cells]
        columns[name] = ["±".join(cell[:1] if name in WITHOUT_SPREAD else cell) for cell in parts]
    return "\n".join([text([list(columns), *zip(*columns.values(), strict=True)]), *notes])


def markdown(lines: Sequence[Sequence[str]]) -> str:
    """Format a header and cells as a Markdown table."""
    header, *body = [f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in lines]
    return "\n".join([header, "|" + "---|" * len(lines[0]), *body])


def as_csv(compared: Sequence[Row]) -> str:
    """Format all settings and the unrounded figures of all rows as CSV."""
    columns = {key: _column(compared, key) for key in compared[0].settings}
    columns["seeds"] = [str(len(row.runs)) for row in compared]
    for name in figure_names(compared):
        values = [row.values(name) for row in compared]
        columns[name] = [str(mean(found)) if found else "" for found in values]
        columns[f"{name} stdev"] = [str(stdev(found)) if found[1:] else "" for found in values]
    file = io.StringIO()
    csv.writer(file).writerows([columns, *zip(*columns.values(), strict=True)])
    return file.getvalue()


def write(runs: Sequence[Run], folder: Path) -> str:
    """Write the table in all formats, and the curves; return it as text."""
    folder.mkdir(parents=True, exist_ok=True)
    compared = rows(runs)
    lines = table(compared)
    atomic_write(folder / "table.txt", in_120_columns(lines) + "\n")
    atomic_write(folder / "table.md", markdown(lines) + "\n")
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
    return in_120_columns(lines)


def report(paths: Iterable[str | Path], folder: str | Path | None = None) -> str:
    """Return the table of the runs that paths name; write it to a folder."""
    runs = [read(found) for found in find_all(paths)]
    return write(runs, Path(folder)) if folder else in_120_columns(table(rows(runs)))
