"""The rates of random records over the link, drawn from the results file.

python tests/bench/plot.py [results.csv [transfer.png]]
"""

from __future__ import annotations

import csv
import os
import re
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RESULTS, FILE = Path(__file__).with_name("results.csv"), ROOT / "docs" / "transfer.png"
RECORDS = re.compile(r"records (\d+) B x (\d+) rows of (\S+) GiB")
PANELS = {
    "gather": ("gather: CPU memory to GPU", "to GPU"),
    "scatter": ("scatter: GPU to CPU memory", "from GPU"),
    "both": ("both at once, in total", "both"),
}

Series = dict[
    tuple[str, float, int], dict[int, float]
]  # (move, GiB of the table, record bytes) -> {rows: GB/s}


def read(path: Path) -> tuple[Series, dict[str, float], str]:
    """The last figures of each case, the contiguous rates, and where the last were measured."""
    series: Series = {}
    contiguous, where = {}, ""
    with path.open(newline="", encoding="utf-8") as handle:
        for row in csv.DictReader(handle):
            if row["benchmark"] != "transfer":
                continue
            where = f"{row['device']}, {row['date']}, commit {row['commit']}"
            if row["case"].startswith("contiguous"):
                contiguous[row["metric"]] = float(row["value"])
            elif (match := RECORDS.fullmatch(row["case"])) and row["metric"] in PANELS:
                record_bytes, count, gib = match.groups()
                series.setdefault((row["metric"], float(gib), int(record_bytes)), {})[
                    int(count)
                ] = float(row["value"])
    return series, contiguous, where


def draw(results: Path = RESULTS, file: Path = FILE) -> None:
    """Write the picture, or say why there is none."""
    if (pyplot := pyplot_for("plot.py", results)) is None:
        return
    series, contiguous, where = read(results)
    if not series:
        raise ValueError(f"{results} holds no figures of records; run make bench-transfer first")
    tables, sizes = (
        sorted({gib for _, gib, _ in series}),
        sorted({record_bytes for *_, record_bytes in series}),
    )
    counts = sorted({count for rates in series.values() for count in rates})
    colors = {record_bytes: f"C{i}" for i, record_bytes in enumerate(sizes)}
    figure, panels = pyplot.subplots(
        1, len(PANELS), figsize=(14, 5), sharex=True, sharey=True, layout="constrained"
    )
    for panel, (move, (title, way)) in zip(panels, PANELS.items(), strict=True):
        for (of, gib, record_bytes), rates in sorted(series.items()):
            if of == move:
                style = (
                    {"linestyle": "-", "marker": "o"}
                    if gib == tables[0]
                    else {"linestyle": ":", "marker": "s", "fillstyle": "none"}
                )
                label = f"{record_bytes:,} B" + ("" if gib == tables[0] else f", {gib:g} GiB")
                panel.plot(
                    *zip(*sorted(rates.items()), strict=True),
                    color=colors[record_bytes],
                    label=label,
                    markersize=4,
                    **style,
                )
        panel.axhline(contiguous[way], color="grey", linestyle="--", linewidth=1)
        panel.text(
            counts[0], contiguous[way], f"contiguous copy {contiguous[way]:.1f}", va="bottom"
        )
        panel.set(title=title, xscale="log", xlabel="rows at a time")
        panel.set_xticks(counts, [f"{count:,}" for count in counts], rotation=30)
        panel.minorticks_off()
        panel.grid(alpha=0.3)
    figure.legend(
        *panels[0].get_legend_handles_labels(),
        loc="outside right center",
        title=f"record, of a\n{tables[0]:g} GiB table",
    )
    panels[0].set(ylabel="GB/s", ylim=(0, 1.1 * max(contiguous.values())))
    figure.suptitle(
        f"Sorted random records between pinned CPU memory and the GPU ({where})", fontsize="medium"
    )
    save(figure, file)
    pyplot.close(figure)


def pyplot_for(program: str, results: Path) -> Any:
    """matplotlib's pyplot, which draws to files; None where it is not installed, having said how to draw later."""
    if find_spec("matplotlib") is None:
        print(
            f"no plot: matplotlib is not installed; where it is, draw it later with python tests/bench/{program} {results.name}"
        )
        return None
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def save(figure: Any, file: Path) -> None:
    """Write the picture, whole or not at all."""
    aside = file.with_name(f".{file.name}.part")
    figure.savefig(aside, dpi=130, format="png")
    os.replace(aside, file)
    print(f"plot: {file.name}")


if __name__ == "__main__":
    draw(*map(Path, sys.argv[1:3]))
