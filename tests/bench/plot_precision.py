"""Time, memory and loss by batch size and precision, drawn from the results file.

python tests/bench/plot_precision.py [results.csv [precision.png]]
"""

from __future__ import annotations

import csv
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.bench.plot import RESULTS, ROOT, pyplot_for, save

FILE = ROOT / "docs" / "precision.png"
CASE = re.compile(r"(\S+) (\S+) (reference|fused) batch (\d+) (\d+ steps.*)")
PANELS = {
    "step": "time per step [ms]",
    "gpu memory": "GPU memory [GiB]",
    "loss": "loss of a pair at the end",
}
COLORS = {"float32": "C0", "amp": "C1", "bf16": "C2", "fp16": "C3"}
KERNELS = {
    "reference": ("plain torch", {"linestyle": "--", "marker": "s", "fillstyle": "none"}),
    "fused": ("fused", {"marker": "o"}),
}

Series = dict[
    tuple[str, str, str], dict[int, float]
]  # (metric, precision, kernels) -> {batch size: value}


def read(path: Path) -> tuple[Series, str]:
    """The last figures of each case that measured what the last of all did, as text and steps go; and what and where that was."""
    with path.open(newline="", encoding="utf-8") as handle:
        rows = [
            row
            for row in csv.DictReader(handle)
            if row["benchmark"] == "precision" and CASE.fullmatch(row["case"])
        ]
    if not rows:
        raise ValueError(f"{path} holds no figures of precisions; run make bench-precision first")
    series: Series = {}
    corpus, *_, how = CASE.fullmatch(rows[-1]["case"]).groups()
    for row in rows:
        text, precision, kernels, batch, steps = CASE.fullmatch(row["case"]).groups()
        if (text, steps) == (corpus, how) and row["metric"] in PANELS:
            series.setdefault((row["metric"], precision, kernels), {})[int(batch)] = float(
                row["value"]
            )
    return (
        series,
        f"{corpus}, {how}; {rows[-1]['device']}, {rows[-1]['date']}, commit {rows[-1]['commit']}",
    )


def draw(results: Path = RESULTS, file: Path = FILE) -> None:
    """Write the picture, or say why there is none."""
    if (pyplot := pyplot_for("plot_precision.py", results)) is None:
        return
    series, where = read(results)
    batches = sorted({batch for values in series.values() for batch in values})
    figure, panels = pyplot.subplots(1, len(PANELS), figsize=(15, 5), layout="constrained")
    for panel, (metric, title) in zip(panels, PANELS.items(), strict=True):
        for (of, precision, kernels), values in series.items():
            if of == metric:
                name, style = KERNELS[kernels]
                points = zip(*sorted(values.items()), strict=True)
                panel.plot(
                    *points,
                    color=COLORS[precision],
                    label=f"{precision}, {name}",
                    markersize=4,
                    **style,
                )
        panel.set(title=title, xscale="log", xlabel="batch size (centers)")
        if metric != "loss":
            panel.set_yscale("log")
            panel.yaxis.set_major_locator(pyplot.LogLocator(subs=(1, 2, 5)))
            panel.yaxis.set_major_formatter("{x:g}")
        panel.set_xticks(batches, [f"{batch:,}" for batch in batches], rotation=45)
        panel.minorticks_off()
        panel.grid(alpha=0.3)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside right center")
    figure.suptitle(f"Precision by batch size ({where})", fontsize="medium")
    save(figure, file)
    pyplot.close(figure)


if __name__ == "__main__":
    draw(*map(Path, sys.argv[1:3]))
