"""Run folders: find them, read what runs have written, and tabulate it.

A table has a row for each setting: the mean, and the spread over seeds.
"""

from __future__ import annotations

import contextlib
import csv
import errno
import io
import json
import logging
import math
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations
from pathlib import Path
from statistics import mean, stdev
from typing import Any, NamedTuple

import numpy as np
import yaml

from w2v.system.files import nearest, printable, refused
from w2v.vectors import significance
from w2v.vectors.datasets import title

log = logging.getLogger("w2v")
SCRIPT = "plotly.min.js"  # beside run folders
VISIBLE = "[!.]*"  # folders: killed processes leave hidden ones
SHOWN = {
    "optimizer.name": "optimizer",
    "optimizer.lr": "lr",
    "train.batch_size": "batch",
    "train.epochs": "epochs",
    "corpus.path": "text",
}
OTHERS = "other settings"  # heading of one column for all others that differ between rows
NO_SETTING = ("train.seed", "corpus.data_dir", "run.")  # may differ between runs of one row
Columns = dict[str, list[str]]  # cells by heading
UNSCORED = (-1.0, -math.inf)  # quality

# What is read of a run folder: the default of each key, which tells its type; None is a number that
# may be missing. Any other value, such as NaN, is replaced by the default. `...` is any key.
PART = {"name": "", "accuracy": None, "counted": None}
ANALOGIES = {
    **dict.fromkeys(("total", "semantic", "syntactic"), PART),
    "sections": [PART],
    "answers": "",
}
SCORES = {
    "diverged": "",  # the reason
    "analogies": ANALOGIES,
    "questions": {...: ANALOGIES},
    "similarity": {...: {"spearman": None, "answers": ""}},
    **dict.fromkeys("words seconds loss held_out_loss bytes_host bytes_gpu".split()),
}
LINE = {  # of metrics.jsonl
    "phase": "",
    **dict.fromkeys("epoch words seconds loss held_out_loss analogies words_per_s".split()),
}
SETTINGS = {"corpus.path": "unknown", "optimizer.name": "unknown", "run.name": "", "train.seed": 1}
LARGEST = 1e15  # above all numbers that a run writes; plots overflow at far greater ones
# Characters with a meaning in Markdown, its tables or HTML.
MARKUP = {ord(mark): f"&#{ord(mark)};" for mark in "&<>|`*[]\\"}
FORMULA = ("=", "+", "-", "@", "\t", "\r")  # a text that a spreadsheet takes for a formula


class RunError(ValueError):
    """A run folder that cannot be found or read; one line with the remedy."""


@dataclass(frozen=True)
class Run:
    """What a run has written.

    An unfinished run has the default scores; one that diverged has the reason "diverged".
    """

    folder: Path
    settings: dict[str, Any]  # the config by dotted name, such as "optimizer.lr"
    scores: dict[str, Any]  # as in SCORES
    metrics: list[dict[str, Any]]  # as in LINE

    def curve(self, name: str) -> list[tuple[float, float, float]]:
        """Return the points (words, seconds, metric).

        The last one is the final score. Means of epochs are used where the run has recorded them.
        """
        final = {key: self.scores[key] for key in ("words", "seconds", "loss", "held_out_loss")}
        total = self.scores["analogies"]["total"]
        if total["counted"]:
            final["analogies"] = total["accuracy"]
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
    their final words, seconds and scores. Seeds that have not got as far, such as diverged ones,
    are left out.
    """
    curves = [np.array(points).T for run in runs if (points := run.curve(name))]
    if not curves:
        return {}
    last = max(curve[0, -1] for curve in curves)
    curves = [curve for curve in curves if curve[0, -1] == last]
    words_P = np.unique(np.concatenate([curve[0] for curve in curves]))
    words_P = words_P[words_P >= max(curve[0, 0] for curve in curves)]
    seconds_SP = np.array([np.interp(words_P, words, at) for words, at, _ in curves])
    value_SP = np.array([np.interp(words_P, words, values) for words, _, values in curves])
    columns = {"words": words_P, "seconds": seconds_SP.mean(0), "mean": value_SP.mean(0)}
    return columns | {"low": value_SP.min(0), "high": value_SP.max(0)}


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
        if near:
            raise RunError(f"{run} does not exist; did you mean {folder.parent / near}?")
        raise RunError(f"{run} does not exist; name a run, such as latest")
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
    """Return the file for a picture of runs.

    That is `to`, or `name` in the folder `to`; by default `name` in the run folder, or for
    several runs in the folder "pictures" beside the first.
    """
    if to is None:
        to = folders[0]
        if len(folders) > 1:
            to = to.parent / "pictures"
        return to / name
    if Path(to).is_dir():
        return Path(to) / name
    return Path(to)


def read(folder: Path) -> Run:
    """Read config.yaml, metrics.jsonl and, if present, scores.json."""
    remedy = "leave it out, or train it again"
    with refused(RunError, f"{folder} is not a whole run folder", remedy):
        content = _Loader(_text_of(folder / "config.yaml")).get_single_data()
        # As JSON: YAML has dates, and keys of any type.
        config = json.dumps(content, default=str, skipkeys=True)
        settings = {
            f"{section}.{key}": value
            for section, keys in dict(json.loads(config)).items()
            if isinstance(keys, dict)
            for key, value in keys.items()
        }
        if isinstance(texts := settings.get("corpus.path"), list):
            settings["corpus.path"] = ", ".join(map(str, texts))
        scores: dict[str, Any] = {}
        if (folder / "scores.json").exists():
            scores = dict(json.loads(_text_of(folder / "scores.json")))
        metrics = _read_lines(folder / "metrics.jsonl")
    return Run(folder, settings | _fitted(settings, SETTINGS), _fitted(scores, SCORES), metrics)


class _Loader(yaml.SafeLoader):
    """Refuse aliases, as a short file of them can stand for endless values.

    Composing is recursive, so that deep nesting ends at Python's limit; parsing alone would take
    hours.
    """

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            raise ValueError("config.yaml has an alias")
        return super().compose_node(parent, index)


def _read_lines(file: Path) -> list[dict[str, Any]]:
    """Read metrics.jsonl without the lines that are damaged."""
    lines = []
    # A run that still trains, or was killed, may leave its last line half-written.
    whole = _text_of(file).split("\n")[:-1]
    for line in whole:
        with contextlib.suppress(ValueError, RecursionError):
            lines.append(_fitted(json.loads(line), LINE))
    if damaged := len(whole) - len(lines):
        log.warning(f"{file}: {damaged} of {len(whole)} lines are damaged and left out")
    return lines


def _text_of(file: Path) -> str:
    """Return the text of a file; a pipe of this name could be read forever."""
    if not file.is_file():
        raise FileNotFoundError(errno.ENOENT, "no such file", str(file))
    return file.read_text(encoding="utf-8", errors="replace")


def _fitted(value: Any, shape: Any) -> Any:
    """Return what fits a shape such as SCORES, and defaults for the rest."""
    if isinstance(shape, dict):
        if not isinstance(value, dict):
            value = {}
        if ... in shape:
            return {key: _fitted(value[key], shape[...]) for key in value}
        return {key: _fitted(value.get(key), shape[key]) for key in shape}
    if isinstance(shape, list):
        if not isinstance(value, list):
            value = []
        return [_fitted(item, shape[0]) for item in value]
    is_number = type(value) in (int, float) and abs(value) < LARGEST  # not if it is NaN
    if isinstance(value, str) == isinstance(shape, str) and (is_number or isinstance(value, str)):
        return value
    return shape


def environment(folder: Path) -> str:
    """Return versions and hardware of a run, or nothing."""
    with contextlib.suppress(FileNotFoundError):
        return _text_of(folder / "env.txt")
    return ""


FORMATS = {  # of numbers by column, or by its last letter; .3f of the others, correlations
    "%": ".1f",
    "held-out loss": ".4f",
    "loss": ".4f",
    "questions": ".0f",
    "M words/s": ".3g",
    "seconds": ".3g",
    "host MiB": ".0f",
    "GPU MiB": ".0f",
}
SCALES = {"%": 100}  # of items, by the last letter of their heading
VERDICT = "beside the best"  # heading of the tests against the first row
TESTED = 4  # of the best rows, each pair gets a verdict
# Columns that a terminal has no room for, those that it shows without their deviation, those above
# the table if all rows are equal, and those that a narrow one leaves out, the first ones first.
ONLY_IN_FILES = {"loss", "semantic %", "syntactic %", "seconds", "host MiB", "GPU MiB", OTHERS}
WITHOUT_SPREAD = {"questions", "M words/s"}
COMMON = {"lr", "batch", "epochs", "seeds", "questions"}
OPTIONAL = ["questions", "epochs", "batch", "M words/s", "seeds", "held-out loss"]


def figures(run: Run) -> dict[str, float | None]:
    """Return scores and costs by the heading of their column; None if missing."""
    scores = run.scores
    google = scores["analogies"]
    found: dict[str, float | None] = {
        "held-out loss": scores["held_out_loss"],
        "loss": scores["loss"],
        "analogies %": None,
        "questions": google["total"]["counted"],
        "semantic %": _accuracy(google["semantic"]),
        "syntactic %": _accuracy(google["syntactic"]),
    }
    found |= {heading: score for heading, (score, _) in _sets(run).items()}
    for heading, value in found.items():
        if value is not None:
            found[heading] = value * SCALES.get(heading[-1:], 1)
    found |= dict.fromkeys(("M words/s", "seconds", "host MiB", "GPU MiB"))
    if scores["words"] and scores["seconds"]:
        found["M words/s"] = scores["words"] / scores["seconds"] / 1e6
        found["seconds"] = scores["seconds"]
    for name, key in (("host MiB", "bytes_host"), ("GPU MiB", "bytes_gpu")):
        if scores[key]:
            found[name] = scores[key] / 2**20
    return found


def _accuracy(part: dict[str, Any]) -> float | None:
    if part["counted"]:
        return part["accuracy"]
    return None


def _sets(run: Run) -> dict[str, tuple[float | None, str]]:
    """Return score (a share) and answers of each set by its heading."""
    scores = run.scores
    google = scores["analogies"]
    found = {"analogies %": (_accuracy(google["total"]), google["answers"])}
    for name, pairs in scores["similarity"].items():
        found[title(name)] = pairs["spearman"], pairs["answers"]
    for name, other in scores["questions"].items():
        found[f"{name} %"] = _accuracy(other["total"]), other["answers"]
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
            for heading, (_, answers) in _sets(run).items():
                with contextlib.suppress(ValueError):
                    items_I = np.array(answers.split(), float)
                    items_I[~(np.abs(items_I) < LARGEST)] = np.nan
                    if np.isfinite(items_I).any():
                        of_seeds.setdefault(heading, []).append(items_I)
        # Without sets that have changed between the runs.
        return {
            heading: np.mean(items_SI, axis=0)
            for heading, items_SI in of_seeds.items()
            if len(set(map(len, items_SI))) == 1
        }

    @cached_property
    def intervals(self) -> dict[str, tuple[float, float]]:
        """95 % intervals of scores by their heading, and in its unit."""
        found = {}
        for heading, items_I in self.items.items():
            if ends := significance.interval(items_I * SCALES.get(heading[-1:], 1)):
                found[heading] = ends
        return found

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
        return significance.test(difference_S, self.items, other.items)


def quality(runs: Sequence[Run]) -> tuple[float, float]:
    """Return the mean of all scores, from 0 to 1, and minus the held-out loss.

    The loss decides between equal scores. Both are -inf if a run diverged; a run without any
    score has `UNSCORED`.
    """
    if any(run.scores["diverged"] for run in runs):
        return -math.inf, -math.inf
    means = []
    losses = []
    for run in runs:
        means.append(mean([score for score, _ in _sets(run).values() if score is not None] or [-1]))
        losses.append(run.scores["held_out_loss"] or math.inf)
    return mean(means), -mean(losses)


def rows(runs: Sequence[Run]) -> list[Row]:
    """Group runs by their settings, best first, and name the groups.

    Of several corpora, rows of one run.name, or else of one optimizer, are ranked by their mean.
    """
    groups: dict[str, Row] = {}
    for run in runs:
        items = run.settings.items()
        settings = {key: value for key, value in items if not key.startswith(NO_SETTING)}
        groups.setdefault(json.dumps(settings, sort_keys=True), Row(settings, [])).runs.append(run)
    several = len({run.settings["corpus.path"] for run in runs}) > 1

    def rank(row: Row) -> tuple[float, float]:
        if several:
            return quality([run for run in runs if _name(run) == _name(row.runs[0])])
        return quality(row.runs)

    ranked = sorted(groups.values(), key=rank, reverse=True)
    for row, name in zip(ranked, labels(ranked), strict=True):
        row.name = name
    return ranked


def _name(run: Run) -> str:
    return run.settings["run.name"] or run.settings["optimizer.name"]


def table(compared: Sequence[Row], tested: bool = True) -> Columns:
    """Return the columns of the comparison.

    All settings beyond SHOWN that differ between rows share one column. There is a column for the
    number of seeds if any row has several, and one for each figure that any run has. If `tested`,
    which takes a second for SciPy, scores have 95 % intervals, and rows p beside the best one.
    """
    differing = []
    for key in compared[0].settings:
        values = {json.dumps(row.settings[key]) for row in compared if key in row.settings}
        if key not in SHOWN and len(values) > 1:
            differing.append(key)
    headings = dict.fromkeys(name for row in compared for run in row.runs for name in figures(run))
    lines = [_cells(row, differing, headings) for row in compared]
    for row, line in zip(compared, lines, strict=True) if tested else ():
        line[VERDICT] = _beside(compared, row)
        for name, (low, high) in row.intervals.items():
            line[name] += f" [{low:{_form(name)}}, {high:{_form(name)}}]"
    columns = {name: [line[name] for line in lines] for name in lines[0]}
    # A column is left out if all its cells are among these.
    empty = {
        OTHERS: {""},
        "text": {columns["text"][0]},
        "seeds": {"1", "0 of 1"},
        VERDICT: {"best", ""},
    }
    empty |= {name: {"-", "diverged"} for name in headings}
    return {name: cells for name, cells in columns.items() if set(cells) - empty.get(name, set())}


def _cells(row: Row, differing: Sequence[str], headings: Iterable[str]) -> dict[str, str]:
    """Return a row's settings, number of seeds and figures, by heading."""
    cells = {heading: _text(row.settings.get(key)) for key, heading in SHOWN.items()}
    others = [f"{key.partition('.')[2]}={_text(row.settings.get(key))}" for key in differing]
    cells[OTHERS] = " ".join(text for text in others if not text.endswith(("={}", "=null")))
    # A seed whose run diverged counts as one, but has no scores.
    seeds = {run.settings["train.seed"]: bool(run.scores["diverged"]) for run in row.runs}
    finished = len(seeds) - sum(seeds.values())
    cells["seeds"] = str(len(seeds))
    if finished < len(seeds):
        cells["seeds"] = f"{finished} of {len(seeds)}"
    cells[VERDICT] = ""
    measured = [figures(run) for run in row.runs]
    for name in headings:
        values = [value for of_run in measured if (value := of_run.get(name)) is not None]
        cells[name] = spread(values, _form(name))
        if not finished:
            cells[name] = "diverged"
    return cells


def _form(heading: str) -> str:
    return FORMATS.get(heading) or FORMATS.get(heading[-1:], ".3f")


def _beside(compared: Sequence[Row], row: Row) -> str:
    """Return what tells a row from the best one on its text."""
    text = row.settings["corpus.path"]
    best = next(other for other in compared if other.settings["corpus.path"] == text)
    if row is best:
        return "best"
    if quality(row.runs) < UNSCORED:
        return "diverged"
    test = best.test(row)
    if test.p is not None and test.is_noise:
        return f"noise ({test})"
    return str(test)


def labels(compared: Sequence[Row]) -> list[str]:
    """Return names of rows: the optimizer, and settings that tell rows apart."""
    named = [_text(row.settings["optimizer.name"]) for row in compared]
    for key in SHOWN | compared[0].settings:
        heading = SHOWN.get(key, key.rpartition(".")[2])
        longer = [
            f"{name} {heading} {_text(row.settings.get(key))}"
            for name, row in zip(named, compared, strict=True)
        ]
        if len(set(longer)) > len(set(named)):
            named = longer
    return named


class Comparison(NamedTuple):
    """Rows, best first, with their table and verdicts."""

    rows: list[Row]
    columns: Columns
    verdicts: list[str]

    @classmethod
    def of(cls, found: Sequence[Run]) -> Comparison:
        """Compare runs; tests take half a second for each row and pair."""
        compared = rows(found)
        return cls(compared, table(compared), verdicts(compared))


def verdicts(compared: Sequence[Row]) -> list[str]:
    """Return a sentence for each pair of the best rows: which is better."""
    lines = []
    for better, worse in combinations(compared[:TESTED], 2):
        if better.settings["corpus.path"] != worse.settings["corpus.path"]:
            continue
        if quality(worse.runs) < UNSCORED:
            continue  # the table says that it diverged
        test = better.test(worse)
        line = f"{better.name} > {worse.name} ({test})"
        if test.is_noise:
            line = f"{better.name} and {worse.name} are not distinguishable ({test})"
            hint = "nor would they be with 100 seeds"
            if test.seeds < 2:
                hint = "train more seeds"
            elif test.more_seeds == 0:
                hint = "these questions are too few"
            elif test.more_seeds:
                hint = f"about {test.more_seeds} more seeds would"
            line += f"; {hint}"
        elif test.seeds < 2:
            line += "; other seeds may differ: train more"
        lines.append(line)
    return lines


def _text(value: Any) -> str:
    """Return the value of a setting on one line."""
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, str):
        return printable(value)
    return json.dumps(value)


def spread(values: Sequence[float], form: str) -> str:
    """Format the mean, and the standard deviation if there are several values."""
    if not values:
        return "-"
    text = f"{mean(values):{form}}"
    if len(values) > 1:
        text += f" +- {stdev(values):{form}}"
    return text


def split_common(columns: Columns) -> tuple[str, Columns]:
    """Return what all rows have in common, on a line, and the other columns."""
    common, others = [], {}
    for name, cells in columns.items():
        if name in COMMON and len(cells) > 1 and len(set(cells)) == 1:
            common.append(f"{name} {cells[0].partition(' +- ')[0]}")
        else:
            others[name] = cells
    return ", ".join(common), others


def aligned(columns: Columns) -> list[str]:
    """Return the lines of a table, numbers at the right of their columns."""
    padded = []
    for name, cells in columns.items():
        align = str.ljust
        if any(cell[:1].isdigit() for cell in cells):
            align = str.rjust
        column = [name, *cells]
        width = max(map(len, column))
        padded.append([align(cell, width) for cell in column])
    return ["  ".join(cells).rstrip() for cells in zip(*padded, strict=True)]


def in_columns(columns: Columns, width: int) -> str:
    """Format a table for a terminal of this width.

    Settings that differ are below it, and what all rows have in common is above. What a narrow
    terminal has no room for is left out.
    """
    common, others = split_common(columns)
    shown = {}
    for name, cells in others.items():
        if name not in ONLY_IN_FILES:
            shown[name] = [cell.partition(" [")[0].replace(" +- ", "±") for cell in cells]
        if name in WITHOUT_SPREAD:
            shown[name] = [cell.partition("±")[0] for cell in shown[name]]
    for name in OPTIONAL:
        if max(map(len, aligned(shown))) > width:
            shown.pop(name, None)
    lines = aligned(shown)
    if common:
        lines.insert(0, f"all rows: {common}")
    settings = zip(columns["optimizer"], columns["lr"], columns.get(OTHERS, []), strict=False)
    for optimizer, lr, other in dict.fromkeys(settings):
        if other:
            lines += textwrap.wrap(f"{optimizer} {lr}: {other}", width, subsequent_indent="  ")
    return "\n".join(lines)


def markdown(columns: Columns) -> str:
    """Format a Markdown table; text from runs is shown as it is."""
    lines = [[markup(name) for name in columns], ["---"] * len(columns)]
    lines += [[markup(cell) for cell in cells] for cells in zip(*columns.values(), strict=True)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def markup(text: object) -> str:
    """Escape text for Markdown, its tables and HTML."""
    return printable(str(text)).translate(MARKUP)


def as_csv(runs: Sequence[Run]) -> str:
    """Format all settings and unrounded figures as CSV, a line for each run.

    "low" and "high" are the ends of the 95 % interval of a score over its questions or pairs.
    """
    lines = []
    for run in runs:
        line: dict[str, Any] = {}
        for key, value in run.settings.items():
            line[key] = _text(value)
            if isinstance(value, str):
                line[key] = _unformula(value)
        line |= figures(run)
        for name, (low, high) in Row(run.settings, [run]).intervals.items():
            line |= {f"{name} low": low, f"{name} high": high}
        lines.append({_unformula(key): value for key, value in line.items()})
    file = io.StringIO()
    writer = csv.DictWriter(file, dict.fromkeys(name for line in lines for name in line))
    writer.writeheader()
    writer.writerows(lines)
    return file.getvalue()


def _unformula(text: str) -> str:
    """Quote a text for CSV that a spreadsheet would compute."""
    return printable("'" * text.startswith(FORMULA) + text)
