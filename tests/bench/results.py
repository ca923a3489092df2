"""Results of the benchmarks: one JSON file per run.

A file has a header (date, GPU, CPU, versions, commit, command) and the figures of each case:
{"figures": {case: {"metric [unit]": value}}}.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import mean, stdev

from w2v.system.files import atomic_write
from w2v.system.process import cores, git_commit

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "tests/bench/results"
Figures = dict[str, float]  # {"metric [unit]": value}


class Results:
    """Figures of one run: printed, and saved after each case."""

    def __init__(self, benchmark: str, folder: Path = FOLDER):
        self._benchmark = benchmark
        self._folder = folder
        self._cases: dict[str, Figures] = {}
        self.path: Path | None = None  # chosen with the first figures

    def add(self, case: str, figures: Figures) -> None:
        """Add figures to a case and save the file."""
        self._cases.setdefault(case, {}).update(
            {metric: float(f"{value:.6g}") for metric, value in figures.items()}
        )
        shown = ", ".join(f"{metric} {value:.4g}" for metric, value in figures.items())
        print(f"{self._benchmark} {case}: {shown}", flush=True)
        if self.path is None:
            self._header = header(self._benchmark)
            self.path = self._new_path()
        content = self._header | {"figures": self._cases}
        atomic_write(self.path, json.dumps(content, indent=1) + "\n")

    def figures(self, case: str) -> Figures:
        """Return the figures of a case so far."""
        return self._cases[case]

    def _new_path(self) -> Path:
        """Return <benchmark>-<date>.json, or the next number of that day."""
        self._folder.mkdir(parents=True, exist_ok=True)
        stem = f"{self._benchmark}-{self._header['date']}"
        path = self._folder / f"{stem}.json"
        number = 1
        while path.exists():
            number += 1
            path = self._folder / f"{stem}-{number}.json"
        return path


def header(benchmark: str) -> dict[str, str]:
    """Return date, hardware, versions, commit and command of this run."""
    import torch  # not at the top: benchmarks of memory import this module before they measure

    gpus = torch.cuda.device_count()
    name = torch.cuda.get_device_name() if gpus else ""
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    launcher = "python" if ranks == 1 else f"torchrun --nproc-per-node {ranks}"
    # The folder of a file on the machine that measured does not matter.
    arguments = [Path(word).name if os.path.isabs(word) else word for word in sys.argv[1:]]
    return {
        "benchmark": benchmark,
        "date": time.strftime("%Y-%m-%d"),
        "gpu": f"{ranks} x {name}" if name and ranks > 1 else name,
        "cpu": f"{cores()} cores",
        "torch": torch.__version__,
        "cupy": _installed("cupy-cuda12x") or _installed("cupy-cuda13x"),
        "commit": git_commit(),
        "command": f"{launcher} {shlex.join([os.path.relpath(sys.argv[0]), *arguments])}",
    }


def _installed(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def deviation_of(metric: str) -> str:
    """Return a metric's name for its deviation: "x stdev [s]"."""
    name, bracket, unit = metric.partition(" [")
    return f"{name} stdev{bracket}{unit}"


def over_seeds(runs: Sequence[Mapping[str, float]]) -> Figures:
    """Return mean and standard deviation of each metric over runs."""
    figures: Figures = {"seeds": len(runs)}
    for metric in runs[0]:
        values = [run[metric] for run in runs]
        figures[metric] = mean(values)
        if len(runs) > 1:
            figures[deviation_of(metric)] = stdev(values)
    return figures


def memory(process: int | str = "self") -> float:
    """Return the memory (RSS) of a process in MiB, or 0 once it has ended."""
    try:
        found = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{process}/status").read_text())
    except OSError:
        return 0
    return int(found[1]) / 1024 if found else 0


def parser(description: str) -> argparse.ArgumentParser:
    """Return a parser with the options that all benchmarks have."""
    options = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument(
        "--results", type=Path, default=FOLDER, metavar="FOLDER", help="where the file is written"
    )
    options.add_argument("--set", nargs="*", default=[], metavar="section.key=value")
    return options
