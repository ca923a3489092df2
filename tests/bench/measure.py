"""Times on the GPU; figures, appended to the results file as they come and printed as one table."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

from tests.bench import results

Run = Callable[[int], object]  # called with 0, 1, 2, ... so that each repeat may take other rows
Figures = dict[str, tuple[float, str]]  # {metric: (value, unit)}

WARMUPS, REPEATS = 3, 11
CALLS = WARMUPS + REPEATS
SPIN_CYCLES = 2_000_000  # about a millisecond


def milliseconds(run: Run, queued: bool) -> float:
    """The median time of a call, between CUDA events on the current stream, after a few calls that warm up.

    queued: the GPU spins until `run` has returned, so that its own time counts and not the CPU's for launching. Where the CPU does a
    part of the work that must be False: the time then starts on an idle GPU and counts everything.
    """
    times = []
    for i in range(CALLS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        if queued:
            torch.cuda._sleep(SPIN_CYCLES)
        start.record()
        run(i)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return median(times[WARMUPS:])


def at_once(first: Run, second: Run) -> Run:
    """Both, `second` on a stream of its own; the current stream goes on when both are done."""
    side = torch.cuda.Stream()

    def run(i: int) -> None:
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            second(i)
        first(i)
        torch.cuda.current_stream().wait_stream(side)

    return run


def rate(nbytes: float, ms: float) -> tuple[float, str]:
    return nbytes / ms / 1e6, "GB/s"


def share(achieved: tuple[float, str], possible: tuple[float, str]) -> tuple[float, str]:
    return 100 * achieved[0] / possible[0], "%"


def row_sets(
    table_rows: int, count: int, in_order: bool = True, device: str = "cuda"
) -> list[Tensor]:
    """Random sets of `count` rows, int64, sorted if `in_order`; no row is in two of them. One for each call of a timing, or all that
    the table has rows for."""
    sets = min(CALLS, table_rows // count)
    parts = torch.randperm(table_rows, device=device)[: sets * count].view(sets, count)
    return list(parts.sort().values if in_order else parts)


class Section:
    """One part of a benchmark: a title and cases with their figures."""

    def __init__(self, benchmark: str, title: str, file: Path):
        self.benchmark, self.title, self.file = benchmark, title, file
        self.cases: dict[str, Figures] = {}

    def add(self, case: str, figures: Figures) -> None:
        """Append to the results file and, as a line of progress, to stderr."""
        self.cases[case] = figures
        with contextlib.redirect_stdout(sys.stderr):
            results.append(self.benchmark, case, figures, self.file)

    def print(self) -> None:
        print(f"\n{self.title}\n{format_table(self.cases)}", flush=True)


def format_table(cases: dict[str, Figures]) -> str:
    """A line a case and a column a metric, "-" where a case lacks it."""
    units = {metric: unit for figures in cases.values() for metric, (_, unit) in figures.items()}
    lines = [["", *(f"{metric} [{unit}]" if unit else metric for metric, unit in units.items())]]
    for case, figures in cases.items():
        lines.append(
            [case, *(shown(figures[metric][0]) if metric in figures else "-" for metric in units)]
        )
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])])
        for line in lines
    )


def shown(value: float) -> str:
    """Three digits, or all before the point."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
