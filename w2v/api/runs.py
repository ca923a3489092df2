"""Runs side by side: a row for each setting, mean and spread over its seeds, as text, Markdown and CSV; and their curves as a picture."""

from __future__ import annotations

import csv
import json
import logging
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import yaml

from w2v.system.files import newest_file

log = logging.getLogger("w2v")
SHOWN = {
    "optimizer.name": "optimizer",
    "optimizer.lr": "lr",
    "train.batch_size": "batch",
    "train.epochs": "epochs",
}
NO_SETTING = ("train.seed", "corpus.data_dir", "run.")  # what may differ between runs of one row


class ComparisonError(ValueError):
    """Runs that cannot be compared; the message is one line that names the folder and the remedy."""


@dataclass(frozen=True)
class Run:
    """What a run folder says: its settings by dotted name, scores.json, and the lines of metrics.jsonl."""

    settings: dict[str, Any]
    scores: dict[str, Any]
    logged: list[dict[str, Any]]

    @property
    def diverged(self) -> bool:
        return "diverged" in self.scores

    def curve(self, figure: str) -> list[tuple[float, float, float]]:
        """(words, seconds, value) whenever the run wrote down this figure, the end included."""
        last = {
            "held_out_loss": self.scores.get("held_out_loss"),
            "analogies": _accuracy("total")(self),
        }.get(figure)
        end = {key: self.scores.get(key) for key in ("words", "seconds")} | {figure: last}
        return [
            (line["words"], line["seconds"], line[figure])
            for line in [*self.logged, end]
            if None not in map(line.get, ("words", "seconds", figure))
        ]


@dataclass(frozen=True)
class Row:
    """Runs whose settings differ in nothing but the seed."""

    settings: dict[str, Any]
    runs: list[Run]

    def values(self, figure: str) -> list[float]:
        """A figure of those runs that have it."""
        found = [FIGURES[figure].of(run) for run in self.runs if not run.diverged]
        return [value for value in found if value is not None]


@dataclass(frozen=True)
class Figure:
    """A column: where its value comes from, and how it is written."""

    of: Callable[[Run], float | None]
    form: str = "{:.3f}"


def _accuracy(part: str) -> Callable[[Run], float | None]:
    return lambda run: run.scores.get("analogies", {}).get(part, {}).get("accuracy")


def _percent(part: str) -> Callable[[Run], float | None]:
    return lambda run: None if (share := _accuracy(part)(run)) is None else 100 * share


def _similarity(name: str) -> Callable[[Run], float | None]:
    return lambda run: run.scores.get("similarity", {}).get(name, {}).get("spearman")


def _took(key: str, unit: float = 1.0) -> Callable[[Run], float | None]:
    return lambda run: value / unit if (value := run.scores.get(key)) else None


def _speed(run: Run) -> float | None:
    words, seconds = run.scores.get("words"), run.scores.get("seconds")
    return words / seconds / 1e6 if words and seconds else None


FIGURES = {
    "held-out loss": Figure(_took("held_out_loss"), "{:.4f}"),
    "loss": Figure(_took("loss"), "{:.4f}"),
    "analogies %": Figure(_percent("total"), "{:.1f}"),
    "semantic %": Figure(_percent("semantic"), "{:.1f}"),
    "syntactic %": Figure(_percent("syntactic"), "{:.1f}"),
    "WordSim-353": Figure(_similarity("wordsim353")),
    "SimLex-999": Figure(_similarity("simlex999")),
    "M words/s": Figure(_speed, "{:.3g}"),
    "seconds": Figure(_took("seconds"), "{:.3g}"),
    "host MiB": Figure(_took("bytes_host", 2**20), "{:.0f}"),
    "GPU MiB": Figure(_took("bytes_gpu", 2**20), "{:.0f}"),
}


def find(paths: Iterable[str | Path], file: str = "scores.json") -> list[Path]:
    """The run folders with that file, which finished ones have, that the paths name: themselves, or those inside them; or with `latest`
    the one in `runs` that has written it last.

    Says which paths lead to none, and raises `ComparisonError` if none does or one does not exist.
    """
    found: list[Path] = []
    without: list[str] = []
    for path in (_latest(file) if str(path) == "latest" else Path(path) for path in paths):
        inside = (
            [path]
            if (path / file).is_file()
            else sorted(named.parent for named in path.glob(f"*/{file}"))
        )
        if not (inside or path.exists()):
            raise ComparisonError(f"{path} does not exist; name run folders, or folders of such")
        found += inside
        without += [] if inside else [str(path)]
    if not found:
        raise ComparisonError(
            f"no {file} in {', '.join(without)}, nor in a folder there; name run folders, or folders of such"
        )
    if without:
        log.warning(f"left out, as there is no {file} in it: {', '.join(without)}")
    return list(dict.fromkeys(found))


def _latest(file: str) -> Path:
    written = newest_file(Path("runs"), file)
    if written is None:
        raise ComparisonError(f"no folder in runs holds {file}; train first, or name run folders")
    return written.parent


def read(folder: Path) -> Run:
    """A finished run. Raises `ComparisonError` where a file of it is missing or damaged."""
    try:
        sections = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))
        settings = {
            f"{section}.{key}": value
            for section, keys in sections.items()
            for key, value in keys.items()
        }
        scores = json.loads((folder / "scores.json").read_text(encoding="utf-8"))
        lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        return Run(settings, scores, [json.loads(line) for line in lines])
    except (OSError, ValueError, AttributeError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise ComparisonError(
            f"{folder} is not a whole run folder ({reason}); leave it out, or train it again"
        ) from None


def rows(runs: Iterable[Run]) -> list[Row]:
    """The runs by their settings, the best at analogies first."""
    groups: dict[str, Row] = {}
    for run in runs:
        settings = {
            key: value for key, value in run.settings.items() if not key.startswith(NO_SETTING)
        }
        groups.setdefault(json.dumps(settings, sort_keys=True), Row(settings, [])).runs.append(run)
    return sorted(
        groups.values(), key=lambda row: mean(row.values("analogies %") or [-1.0]), reverse=True
    )


def table(compared: Sequence[Row]) -> list[list[str]]:
    """The header and the cells; settings that differ between rows stand in a column of their own, and so do seeds where there are many."""
    known = {
        key: {json.dumps(row.settings[key]) for row in compared if key in row.settings}
        for key in compared[0].settings
    }
    differ = [key for key, values in known.items() if key not in SHOWN and len(values) > 1]
    figures = [name for name in FIGURES if any(row.values(name) for row in compared)]
    several = any(len(row.runs) > 1 for row in compared)
    lines = [
        [
            *SHOWN.values(),
            *(["other settings"] if differ else []),
            *(["seeds"] if several else []),
            *figures,
        ]
    ]
    for row in compared:
        cells = [_plain(row.settings.get(key)) for key in SHOWN]
        if differ:
            said = [key for key in differ if row.settings.get(key) not in ({}, None)]
            cells.append(
                " ".join(f"{key.partition('.')[2]}={_plain(row.settings[key])}" for key in said)
            )
        whole = sum(not run.diverged for run in row.runs)
        if several:
            cells.append(str(whole) if whole == len(row.runs) else f"{whole} of {len(row.runs)}")
        lines.append(
            cells
            + [
                spread(row.values(name), FIGURES[name].form) if whole else "diverged"
                for name in figures
            ]
        )
    return lines


def spread(values: Sequence[float], form: str) -> str:
    """The mean, and the standard deviation where there are several."""
    if not values:
        return "-"
    return form.format(mean(values)) + (
        f" +- {form.format(stdev(values))}" if len(values) > 1 else ""
    )


def text(lines: Sequence[Sequence[str]]) -> str:
    """Columns of cells side by side, words to the left and numbers to the right."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    words = [
        not any(line[column][:1].isdigit() for line in lines[1:]) for column in range(len(widths))
    ]
    aligned = [
        [
            f"{cell:<{width}}" if left else f"{cell:>{width}}"
            for cell, width, left in zip(line, widths, words, strict=True)
        ]
        for line in lines
    ]
    return "\n".join("  ".join(cells).rstrip() for cells in aligned)


def markdown(lines: Sequence[Sequence[str]]) -> str:
    header, *body = [f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in lines]
    return "\n".join([header, "|" + "---|" * len(lines[0]), *body])


def write(runs: Sequence[Run], folder: Path) -> str:
    """Leave table.txt, table.md, table.csv and, with matplotlib, curves.png in the folder; gives the table as text."""
    folder.mkdir(parents=True, exist_ok=True)
    compared = rows(runs)
    lines = table(compared)
    (folder / "table.txt").write_text(text(lines) + "\n", encoding="utf-8")
    (folder / "table.md").write_text(markdown(lines) + "\n", encoding="utf-8")
    if find_spec("matplotlib"):
        _draw(compared, folder / "curves.png")
    _write_csv(compared, folder / "table.csv")
    return text(lines)


def report(paths: Iterable[str | Path], folder: str | Path | None = None) -> str:
    """The table of the runs that the paths name, written to the folder too, if one is given."""
    runs = [read(found) for found in find(paths)]
    return write(runs, Path(folder)) if folder else text(table(rows(runs)))


def _write_csv(compared: Sequence[Row], file: Path) -> None:
    """Unrounded: for each figure its mean and its standard deviation."""
    with file.open("w", newline="", encoding="utf-8") as handle:
        writer = csv.writer(handle)
        keys = list(compared[0].settings)
        writer.writerow(
            [*keys, "seeds", *(name + part for name in FIGURES for part in ("", " stdev"))]
        )
        for row in compared:
            figures = []
            for values in map(row.values, FIGURES):
                figures += [
                    mean(values) if values else "",
                    stdev(values) if len(values) > 1 else "",
                ]
            writer.writerow(
                [*(_plain(row.settings.get(key)) for key in keys), len(row.runs), *figures]
            )


def _draw(compared: Sequence[Row], file: Path) -> None:
    """Loss against words and against seconds, analogies against seconds; a line a run, a colour a row."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot, ticker

    held_out = all(
        run.curve("held_out_loss") for row in compared for run in row.runs if not run.diverged
    )
    loss = ("held_out_loss", "held-out loss") if held_out else ("loss", "training loss")
    panels = [
        (*loss, 0, "words"),
        (*loss, 1, "seconds of training"),
        ("analogies", "analogies, share right", 1, "seconds of training"),
    ]
    figure, axes = pyplot.subplots(1, len(panels), figsize=(16, 5), layout="constrained")
    for number, row in enumerate(compared):
        style = {
            "color": f"C{number % 10}",
            "linestyle": ("-", "--", ":")[number // 10 % 3],
            "marker": ".",
            "linewidth": 1,
        }
        for axis, (name, _, across, _) in zip(axes, panels, strict=True):
            for run in row.runs:
                points = run.curve(name)
                axis.plot(
                    [point[across] for point in points], [point[2] for point in points], **style
                )
        label = " ".join(_plain(row.settings.get(key)) for key in list(SHOWN)[:3])
        axes[0].plot([], [], label=label, **style)
    for axis, (_, title, across, below) in zip(axes, panels, strict=True):
        axis.set(ylabel=title, xlabel=below, xscale="log" if across else "linear")
        axis.xaxis.set_major_formatter("{x:g}" if across else ticker.EngFormatter(sep=""))
        if across:
            axis.xaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
            axis.xaxis.set_minor_formatter("")
        axis.grid(alpha=0.3)
    figure.legend(
        *axes[0].get_legend_handles_labels(),
        loc="outside right center",
        title="optimizer, lr, batch",
    )
    aside = file.with_name(f".{file.name}.part")
    figure.savefig(aside, dpi=110, format="png")
    pyplot.close(figure)
    os.replace(aside, file)


def _plain(value: Any) -> str:
    return (
        f"{value:g}"
        if isinstance(value, float)
        else value
        if isinstance(value, str)
        else json.dumps(value)
    )
