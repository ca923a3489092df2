"""Run folders: find them, read what runs have written, and tabulate it.

A table has a row for each setting: the mean, and the spread over seeds.
"""

from __future__ import annotations

import contextlib
import csv
import io
import json
import logging
import math
import shutil
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import mean, stdev
from typing import Any, NamedTuple

import numpy as np

from w2v.config import flat_config, load_config
from w2v.system.console import hang
from w2v.system.files import nearest, printable, refused
from w2v.vectors import significance
from w2v.vectors.datasets import ITEM_SCORES, title

log = logging.getLogger("w2v")
SCRIPT = "plotly.min.js"  # beside run folders
VISIBLE = "[!.]*"  # folders: killed processes leave hidden ones
NO_SETTING = ("train.seed", "corpus.data_dir", "run.")  # may differ between runs of one row
Columns = dict[str, list[str]]  # cells by heading
ARGUMENTS = "optimizer.args"  # settings of their own
UNSCORED = (-1.0, -math.inf)  # quality
TESTED = 10  # rows beside the best one
COSTS = "words seconds loss held_out_loss bytes_host bytes_gpu".split()
UNFINISHED = {  # scores of a run that has none
    "diverged": "",  # the reason
    "analogies": {"total": {"accuracy": None, "counted": 0}},
    "questions": {},
    "similarity": {},
    **dict.fromkeys(COSTS),
}
CURVES = "epoch words seconds loss held_out_loss analogies words_per_s".split()  # of metrics.jsonl
LARGEST = 1e100  # above all losses of float32; plots overflow at far greater numbers
# Of numbers, by the end of their heading.
FORMATS = {"loss": ".4f", "%": ".1f", "questions": ".0f", "MiB": ".0f", "s": ".2f", "": ".3f"}
# Characters with a meaning in Markdown, its tables or HTML.
MARKUP = {ord(mark): f"&#{ord(mark)};" for mark in "&<>|`*[]\\"}
FORMULA = ("=", "+", "-", "@", "\t", "\r")  # a text that a spreadsheet takes for a formula


class RunError(ValueError):
    """A run folder that cannot be found or read; one line with the remedy."""


@dataclass(frozen=True)
class Run:
    """What a run has written; an unfinished one has the default scores."""

    folder: Path
    settings: dict[str, Any]  # the config by dotted name, such as "optimizer.lr"
    scores: dict[str, Any]  # of scores.json
    metrics: list[dict[str, Any]]  # lines of metrics.jsonl, with all of CURVES
    environment: str = ""  # versions and hardware

    @cached_property
    def sets(self) -> dict[str, tuple[float | None, str]]:
        """Score (a share) and answers of each set by its heading."""
        sets = {"analogies %": self.scores["analogies"]}
        sets |= {title(name): pairs for name, pairs in self.scores["similarity"].items()}
        sets |= {f"{name} %": of for name, of in self.scores["questions"].items()}
        found = {}
        for heading, of in sets.items():
            score = of.get("spearman")
            if total := of.get("total"):
                score = total["accuracy"] if total["counted"] else None
            found[heading] = score, str(of.get("answers", ""))
        return found

    @property
    def popular(self) -> dict[str, float]:
        """Scores of the most frequent items, which others must exceed."""
        questions = self.scores["questions"]
        scored = {name: questions[name]["sections"][1] for name in ITEM_SCORES if name in questions}
        return {name: section["accuracy"] for name, section in scored.items()}

    def curve(self, name: str) -> list[tuple[float, float, float]]:
        """Return points (words, seconds, metric); the last is the final score.

        Means of epochs are used where the run has recorded them.
        """
        final = self.scores | {"analogies": self.sets["analogies %"][0]}
        epochs = [line for line in self.metrics if None not in (line["epoch"], line[name])]
        points = {}
        for line in [*(epochs or self.metrics), final]:
            point: Any = (line["words"], line["seconds"], line.get(name))
            if None not in point:
                points[point[0]] = point  # the final score replaces that of the last epoch
        return [points[words] for words in sorted(points)]


def mean_curve(runs: Sequence[Run], name: str) -> dict[str, np.ndarray]:
    """Return the mean curve of seeds and its range: columns of points, or {}.

    Seeds are averaged at equal words, as their seconds differ: the curve ends with the means of
    their final words, seconds and scores. Seeds that have not got as far are left out.
    """
    curves = [np.array(points).T for run in runs if (points := run.curve(name))]
    if not curves:
        return {}
    last = max(curve[0, -1] for curve in curves)
    curves = [curve for curve in curves if curve[0, -1] == last]
    words_P = np.unique(np.concatenate([curve[0] for curve in curves]))
    words_P = words_P[words_P >= max(curve[0, 0] for curve in curves)]
    seconds_SP, value_SP = (
        np.array([np.interp(words_P, curve[0], curve[n]) for curve in curves]) for n in (1, 2)
    )
    columns = {"words": words_P, "seconds": seconds_SP.mean(0), "mean": value_SP.mean(0)}
    return columns | {"low": value_SP.min(0), "high": value_SP.max(0)}


def find(run: str | Path, file: str, runs: str | Path = "runs") -> Path:
    """Return the folder that `run` names, which must hold `file`.

    "latest" names the folder in `runs` whose `file` is the newest. Every run has a
    config.yaml, but only finished runs have a scores.json.
    """
    if str(run) == "latest":
        newest, begun = (
            max(paths, key=lambda path: (path.stat().st_mtime_ns, path), default=None)
            for paths in (Path(runs).glob(f"{VISIBLE}/{name}") for name in (file, "config.yaml"))
        )
        if newest is None:
            remedy = "name a run folder, or train first"
            raise RunError(f"no folder in {runs} holds {file}; {remedy}")
        if begun and not (begun.parent / file).exists():
            log.warning(f"latest is {newest.parent}, as {begun.parent} has no {file} yet")
        return newest.parent
    folder = Path(run)
    if not folder.exists():
        if near := nearest(folder.name, (path.name for path in folder.parent.glob("*"))):
            raise RunError(f"{run} does not exist; did you mean {folder.parent / near}?")
        raise RunError(f"{run} does not exist; name a run, such as latest")
    if (folder / file).is_file():
        return folder
    # To name the parent of the run folders is a common mistake.
    if nested := min(folder.glob(f"{VISIBLE}/{file}"), default=None):
        raise RunError(f"{run} is a folder of runs; name one run's folder, such as {nested.parent}")
    raise RunError(f"{run} holds no {file}; name another run folder or latest")


def find_all(paths: Iterable[str | Path], file: str = "scores.json") -> list[Path]:
    """Return the run folders of paths: of runs, of their parents, or "latest".

    Paths without any `file` are left out with a warning; it is an error if none has one.
    """
    folders: list[Path] = []
    without: list[str] = []
    # Without the script of pages, which a pattern such as runs/* matches too.
    for path in (Path(path) for path in paths if Path(path).name != SCRIPT):
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
    """Return `to`, or `name` in that folder, the run's or that of several."""
    path = Path(to or (folders[0].parent if len(folders) > 1 else folders[0]))
    return path / name if to is None or path.is_dir() else path


def read(folder: Path) -> Run:
    """Read config.yaml, metrics.jsonl and what else the run has written."""
    texts = dict.fromkeys(("metrics.jsonl", "scores.json", "env.txt"), "")
    metrics: list[dict[str, Any]] = []
    remedy = "leave it out, or train it again"
    with refused(RunError, f"{folder} is not a whole run folder", remedy):
        for file in (folder / name for name in ("config.yaml", *texts)):
            if file.exists() and not file.is_file():  # a pipe could be read forever
                raise ValueError(f"{file} is not a file")
            if file.exists() or file.name in ("config.yaml", "metrics.jsonl"):
                texts[file.name] = file.read_text(encoding="utf-8", errors="replace")
        config = load_config([folder / "config.yaml"], trains=False)
        settings = flat_config(config) | {"corpus.path": config.corpus.paths}
        scores = UNFINISHED | json.loads(texts["scores.json"] or "{}")
        run = Run(folder, settings, scores, metrics, texts["env.txt"])
        costs = [scores[name] for name in COSTS]
        check_numbers([*costs, *figures(run).values(), *run.popular.values()])
    # A run that still trains, or was killed, may leave its last line half-written.
    whole = texts["metrics.jsonl"].split("\n")[:-1]
    for text in whole:
        with contextlib.suppress(TypeError, ValueError, RecursionError):
            line = dict.fromkeys(CURVES) | json.loads(text)
            check_numbers([line[name] for name in CURVES])
            metrics.append(line)
    if damaged := len(whole) - len(metrics):
        left_out = f"{damaged} of {len(whole)} lines are damaged and left out"
        log.warning(f"{folder / 'metrics.jsonl'}: {left_out}")
    return run


def check_numbers(values: Iterable[float | None]) -> None:
    """Raise an error unless each value that is there is a finite number."""
    for value in values:
        if value is not None and not abs(value) < LARGEST:
            raise ValueError(f"{value} is not a number that a run writes")


def scale(heading: str) -> int:
    """Return what a score from 0 to 1 is multiplied by in this column."""
    return 100 if heading.endswith("%") else 1


def figures(run: Run) -> dict[str, float | None]:
    """Return scores and costs by the heading of their column; None if missing."""
    scores = run.scores
    found: dict[str, float | None] = {"held-out loss": scores["held_out_loss"]}
    for heading, (score, _) in run.sets.items():
        found[heading] = None if score is None else score * scale(heading)
    speed = (scores["words"] or 0) / (scores["seconds"] or math.inf) / 1e6
    found |= {"M words/s": speed or None, "seconds": scores["seconds"] or None}
    found |= {"loss": scores["loss"], "questions": scores["analogies"]["total"]["counted"] or None}
    for name in ("host", "GPU"):
        found[f"{name} MiB"] = (scores[f"bytes_{name.lower()}"] or 0) / 2**20 or None
    return found


@dataclass
class Row:
    """Runs whose settings, by dotted name, differ only in the seed."""

    settings: dict[str, Any]
    runs: list[Run]
    name: str = ""  # the optimizer, and settings that tell it from other rows

    @cached_property
    def items(self) -> dict[str, np.ndarray]:
        """Scores of each question or word pair of the sets, by heading: [I].

        These are means over seeds, and their mean is the score; NaN is an item that was skipped.
        """
        of_seeds: dict[str, list[np.ndarray]] = {}
        for run in self.runs:
            for heading, (_, answers) in run.sets.items():
                with contextlib.suppress(ValueError):
                    items_I = np.array(answers.split(), float)
                    items_I[~(np.abs(items_I) < LARGEST)] = np.nan
                    if np.isfinite(items_I).any():
                        of_seeds.setdefault(heading, []).append(items_I)
        # Without sets that have changed between the runs.
        same = {name: seeds for name, seeds in of_seeds.items() if len({*map(len, seeds)}) == 1}
        return {heading: np.mean(items_SI, axis=0) for heading, items_SI in same.items()}

    @cached_property
    def intervals(self) -> dict[str, tuple[float, float]]:
        """95 % intervals of scores by their heading, and in its unit."""
        ends = {name: significance.interval(of * scale(name)) for name, of in self.items.items()}
        return {heading: pair for heading, pair in ends.items() if pair}

    def test(self, other: Row) -> significance.Test:
        """Test the difference to another row, over equal seeds and over items."""
        mine, others = (
            {run.settings["train.seed"]: quality([run]) for run in row.runs}
            for row in (self, other)
        )
        pairs = [(mine[seed], others[seed]) for seed in sorted(mine.keys() & others.keys())]
        pairs = [pair for pair in pairs if min(pair) > UNSCORED]
        # Means of scores, or held-out losses if there are no scores.
        with np.errstate(invalid="ignore"):
            difference_SK = np.array([np.subtract(*pair) for pair in pairs]).reshape(-1, 2)
        difference_S = np.nan_to_num(difference_SK[:, int(not difference_SK[:, 0].any())])
        # Without hits: items that count twice would be taken for twice as many.
        tested = [row.items | {f"{ITEM_SCORES[0]} %": np.empty(0)} for row in (self, other)]
        return significance.test(difference_S, *tested)


def quality(runs: Sequence[Run]) -> tuple[float, float]:
    """Return the mean of all scores, from 0 to 1, and minus the held-out loss.

    The loss decides between equal scores. Both are -inf if a run diverged; a run without any
    score has `UNSCORED`.
    """
    if any(run.scores["diverged"] for run in runs):
        return -math.inf, -math.inf
    scores = [[score for score, _ in run.sets.values() if score is not None] for run in runs]
    losses = [run.scores["held_out_loss"] or math.inf for run in runs]
    return mean(mean(of_run or [-1]) for of_run in scores), -mean(losses)


def rows(runs: Sequence[Run]) -> list[Row]:
    """Group runs by their settings, best first, and name the groups.

    Of several corpora, rows of one run.name, or else of one optimizer, are ranked by their mean.
    """
    groups: dict[str, Row] = {}
    for run in runs:
        items = run.settings.items()
        settings = {key: value for key, value in items if not key.startswith(NO_SETTING)}
        groups.setdefault(json.dumps(settings, sort_keys=True), Row(settings, [])).runs.append(run)

    def called(run: Run) -> str:
        return run.settings["run.name"] or run.settings["optimizer.name"]

    def rank(row: Row) -> tuple[float, float]:
        if len({run.settings["corpus.path"] for run in runs}) == 1:
            return quality(row.runs)
        return quality([run for run in runs if called(run) == called(row.runs[0])])

    ranked = sorted(groups.values(), key=rank, reverse=True)
    # The optimizer and, as long as that tells more rows apart, further settings.
    flat = [{**row.settings, **row.settings[ARGUMENTS]} for row in ranked]
    names = [settings.pop("optimizer.name") for settings in flat]
    for key in dict.fromkeys(key for settings in flat for key in settings if key != ARGUMENTS):
        values = [_text(settings.get(key)) for settings in flat]
        last = key.rpartition(".")[2]
        longer = [f"{name} {last} {value}" for name, value in zip(names, values, strict=True)]
        if len(set(longer)) > len(set(names)):
            names = longer
    for row, name in zip(ranked, names, strict=True):
        row.name = name
    return ranked


def table(compared: Sequence[Row]) -> Columns:
    """Return the columns of the comparison, the most important ones first.

    A figure that no run has is left out. Scores have 95 % intervals.
    """
    seeds = [{run.settings["train.seed"] for run in row.runs} for row in compared]
    columns = {"optimizer": [row.name for row in compared]}
    columns["seeds"] = [str(len(of_row)) for of_row in seeds]
    for heading in dict.fromkeys(
        key for row in compared for run in row.runs for key in figures(run)
    ):
        cells = [_cell(row, heading) for row in compared]
        if set(cells) - {"-", "diverged"}:
            columns[heading] = cells
    for key in ("optimizer.lr", "train.batch_size", "train.epochs"):
        columns[key.rpartition(".")[2]] = [_text(row.settings[key]) for row in compared]
    return columns


def _cell(row: Row, heading: str) -> str:
    """Return the mean of a figure over seeds, with deviation and interval."""
    form = next(FORMATS[end] for end in FORMATS if heading.endswith(end))
    values = [value for run in row.runs if (value := figures(run).get(heading)) is not None]
    if quality(row.runs) < UNSCORED:
        return "diverged"
    if not values:
        return "-"
    text = f"{mean(values):{form}}"
    if len(set(values)) > 1:
        text += f" +- {stdev(values):{form}}"
    if heading in row.intervals:
        low, high = row.intervals[heading]
        text += f" [{low:{form}}, {high:{form}}]"
    return text


class Comparison(NamedTuple):
    """Rows, best first, with their table and verdicts, which it prints."""

    rows: list[Row]
    columns: Columns
    verdicts: list[str]

    @classmethod
    def of(cls, found: Sequence[Run]) -> Comparison:
        """Compare runs; a test takes half a second."""
        compared = rows(found)
        popular = [
            f"{name} of popular items in {row.settings['corpus.path']}: {100 * share:.1f} %"
            for row in compared
            for name, share in row.runs[0].popular.items()
        ]
        return cls(compared, table(compared), [*sorted(set(popular)), *verdicts(compared)])

    def __str__(self) -> str:
        width = min(shutil.get_terminal_size((120, 24)).columns, 120)
        lines = [in_columns(self.columns, width), "", *self.verdicts]
        return hang("\n".join(lines).rstrip(), width)


def verdicts(compared: Sequence[Row]) -> list[str]:
    """Return a sentence for each row beside the best one of its text."""
    lines = []
    best: dict[str, Row] = {}  # by text
    for row in compared[: TESTED + 1]:
        first = best.setdefault(row.settings["corpus.path"], row)
        if row is not first and quality(row.runs) >= UNSCORED:  # the table says if it diverged
            lines.append(first.test(row).verdict(first.name, row.name))
    return lines


def _text(value: Any, guarded: bool = False) -> str:
    """Return a value on one line; if `guarded`, not as a formula."""
    if isinstance(value, str):
        return printable("'" * (guarded and value.startswith(FORMULA)) + value)
    return f"{value:g}" if isinstance(value, float) else json.dumps(value)


def aligned(columns: Columns) -> list[str]:
    """Return the lines of a table, numbers at the right of their columns."""
    padded = []
    for name, cells in columns.items():
        align = str.rjust if any(cell[:1].isdigit() for cell in cells) else str.ljust
        width = max(map(len, [name, *cells]))
        padded.append([align(cell, width) for cell in (name, *cells)])
    return ["  ".join(cells).rstrip() for cells in zip(*padded, strict=True)]


def short(cell: str) -> str:
    """Return a cell of a table without the interval."""
    return cell.partition(" [")[0].replace(" +- ", "±")


def in_columns(columns: Columns, width: int) -> str:
    """Format the columns of a table that fit a terminal; wrap long names."""
    (heading, names), *others = columns.items()
    wrap = textwrap.TextWrapper(max(20, width // 2), subsequent_indent="  ", break_on_hyphens=False)
    wrapped = [wrap.wrap(name) for name in names]
    shown = {heading: [line for lines in wrapped for line in lines]}
    for heading, cells in others:
        pairs = zip(map(short, cells), wrapped, strict=True)
        column = [line for cell, lines in pairs for line in (cell, *[""] * (len(lines) - 1))]
        if max(map(len, aligned(shown | {heading: column}))) > width:
            break
        shown[heading] = column
    return "\n".join(aligned(shown))


def markdown(columns: Columns) -> str:
    """Format a Markdown table; text from runs is shown as it is."""
    lines = [list(columns), ["---"] * len(columns), *zip(*columns.values(), strict=True)]
    return "\n".join(f"| {' | '.join(map(markup, cells))} |" for cells in lines)


def markup(text: object) -> str:
    """Escape text for Markdown and its tables, HTML, SVG and plotly."""
    return printable(str(text)).translate(MARKUP)


def as_csv(runs: Sequence[Run]) -> str:
    """Format all settings and unrounded figures as CSV, a line for each run.

    "low" and "high" are the ends of the 95 % interval of a score over its questions or pairs.
    """
    lines = []
    for run in runs:
        line: dict[str, Any] = {key: _text(run.settings[key], guarded=True) for key in run.settings}
        line |= figures(run)
        for name, (low, high) in Row(run.settings, [run]).intervals.items():
            line |= {f"{name} low": low, f"{name} high": high}
        lines.append({_text(key, guarded=True): value for key, value in line.items()})
    file = io.StringIO()
    writer = csv.DictWriter(file, dict.fromkeys(name for line in lines for name in line))
    writer.writeheader()
    writer.writerows(lines)
    return file.getvalue()
