"""Pictures of the documents, drawn from files of results.

python tests/bench/plot.py                # docs/summary-light.svg and -dark.svg for README
python tests/bench/plot.py tests/bench/results/transfer-2026-11-21.json [picture.png]
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.bench import tables
from tests.bench.results import ROOT
from w2v.system.files import atomic_path

THEMES = {  # text, bars of w2v, bars of others
    "light": ("#1f2328", "#2f7de1", "#afb8c1"),
    "dark": ("#e6edf3", "#2f7de1", "#656c76"),
}
RECORDS = re.compile(r"records (\d+) B x (\d+) rows of (\S+) GiB")
MOVES = {
    "gather [GB/s]": ("gather: CPU memory to GPU", "to GPU [GB/s]"),
    "scatter [GB/s]": ("scatter: GPU to CPU memory", "from GPU [GB/s]"),
    "both [GB/s]": ("both at once, in total", "both [GB/s]"),
}
PRECISION = re.compile(r"\S+ (\S+) (reference|fused) batch (\d+) .*")
METRICS = {
    "step [ms]": "time per step [ms]",
    "gpu memory [GiB]": "GPU memory [GiB]",
    "loss": "training loss at the end",
}
COLORS = {"float32": "C0", "amp": "C1", "bf16": "C2", "fp16": "C3"}
DASHED = {"linestyle": "--", "marker": "s", "fillstyle": "none"}
SOLID = {"linestyle": "-", "marker": "o"}


def draw(results: Path, picture: Path | None = None) -> None:
    """Draw the picture of a file of results."""
    run = json.loads(results.read_text())
    figure = Figure(figsize=(15, 5), layout="constrained")
    panels = figure.subplots(1, 3)
    _DRAW[run["benchmark"]](run["figures"], panels)
    for panel in panels:
        panel.minorticks_off()
        panel.grid(alpha=0.3)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside right center")
    where = f"{run['gpu']}, {run['date']}, commit {run['commit']}"
    figure.suptitle(f"{TITLES[run['benchmark']]} ({where})", fontsize="medium")
    picture = picture or ROOT / "docs/dev" / f"{run['benchmark']}.png"
    with atomic_path(picture) as temporary:
        figure.savefig(temporary, dpi=130, format="png")
    print(f"plot: {picture}")


def draw_summary() -> None:
    """Draw the tables "summary" and "cpu", for light and dark pages."""
    shown = {"One GPU": "summary", "Two CPU cores": "cpu"}
    bars = {title: summary_bars(tables.TABLES[name]) for title, name in shown.items()}
    # Equal runs give equal files, whose text is text.
    matplotlib.rcParams.update({"svg.hashsalt": "w2v", "svg.fonttype": "none", "font.size": 9})
    for theme, (ink, ours, others) in THEMES.items():
        figure = Figure(figsize=(9, 3.4), layout="constrained")
        panels = figure.subplots(2, 2, sharey="row", height_ratios=[len(b) for b in bars.values()])
        for (title, cases), row in zip(bars.items(), panels, strict=True):
            labels = [f"{label}  " for label, _, _ in cases]
            colors = [ours if label.startswith("w2v") else others for label in labels]
            for panel, column, form in zip(row, (1, 2), ("{:.3g}", "{:.1f} %"), strict=True):
                drawn = panel.barh(labels, [case[column] for case in cases], color=colors)
                panel.bar_label(drawn, fmt=form, padding=3, color=ink)
                panel.spines[:].set_visible(False)
                panel.tick_params(length=0, labelbottom=False, colors=ink)
                panel.margins(x=0.15)
            row[0].invert_yaxis()
            row[0].set_title(f"{title}: M words/s", color=ink, loc="left", fontsize=10)
            row[1].set_title("analogy accuracy", color=ink, loc="left", fontsize=10)
        picture = ROOT / f"docs/summary-{theme}.svg"
        figure.savefig(picture, transparent=True, metadata={"Date": None})
        print(f"picture: {picture}")


def summary_bars(table: tables.Table) -> list[tuple[str, float, float]]:
    """Return label, million words/s and percent of analogies of each case."""
    cases = tables.cases(table)
    return [(label, f["words/s"] / 1e6, f["analogies [%]"]) for label, f in cases]


def _curves(cases: dict[str, dict[str, float]], pattern: re.Pattern, metric: str, x: int) -> dict:
    """Return {groups without x: [(x, value), ...]} of cases that match."""
    curves: dict[tuple[str, ...], list[tuple[int, float]]] = {}
    for case, figures in cases.items():
        match = pattern.fullmatch(case)
        if match and metric in figures:
            groups = match.groups()
            key = groups[: x - 1] + groups[x:]
            curves.setdefault(key, []).append((int(match[x]), figures[metric]))
    if not curves:
        raise ValueError(f"no figures of {metric!r} to draw")
    return curves


def _transfer(cases: dict[str, dict[str, float]], panels: Any) -> None:
    contiguous = next(value for case, value in cases.items() if case.startswith("contiguous"))
    colors: dict[str, str] = {}
    for panel, (move, (title, way)) in zip(panels, MOVES.items(), strict=True):
        curves = _curves(cases, RECORDS, move, 2)
        smallest = min(float(gib) for _, gib in curves)
        for (record_bytes, gib), points in curves.items():
            color = colors.setdefault(record_bytes, f"C{len(colors)}")
            style = SOLID if float(gib) == smallest else DASHED
            label = f"{record_bytes} B of {gib} GiB"
            panel.plot(*zip(*points, strict=True), color=color, label=label, **style)
        panel.axhline(contiguous[way], color="grey", linestyle="--", linewidth=1)
        panel.text(1024, contiguous[way], "contiguous copy", va="bottom")
        panel.set(title=f"{title} [GB/s]", xscale="log", xlabel="rows at a time")
        panel.set_ylim(0, 1.1 * max(contiguous.values()))


def _precision(cases: dict[str, dict[str, float]], panels: Any) -> None:
    for panel, (metric, title) in zip(panels, METRICS.items(), strict=True):
        for (precision, kernels), points in _curves(cases, PRECISION, metric, 3).items():
            style = SOLID if kernels == "fused" else DASHED
            label = f"{precision}, {'fused' if kernels == 'fused' else 'plain torch'}"
            panel.plot(*zip(*points, strict=True), color=COLORS[precision], label=label, **style)
        panel.set(title=title, xscale="log", xlabel="batch size (centers)")
        if metric != "loss":
            panel.set_yscale("log")
            panel.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            panel.yaxis.set_major_formatter("{x:g}")


_DRAW = {"transfer": _transfer, "precision": _precision}
TITLES = {
    "transfer": "Sorted random records between pinned CPU memory and the GPU",
    "precision": "Precision by batch size",
}

if __name__ == "__main__":
    draw(*map(Path, sys.argv[1:3])) if sys.argv[1:] else draw_summary()
