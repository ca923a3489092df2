"""The one file of measurements, results.csv: a row a figure, with what it takes to measure it again."""

from __future__ import annotations

import csv
import os
import platform
import sys
import time
from pathlib import Path

import torch

from w2v.system import versions as environment

FILE = Path(__file__).with_name("results.csv")
COLUMNS = "date benchmark case metric value unit device torch cupy commit command".split()


def append(
    benchmark: str, case: str, figures: dict[str, tuple[float, str]], file: Path = FILE
) -> None:
    """Append figures, {metric: (value, unit)}, of one case, and print them."""
    fresh = not file.exists()
    with file.open("a", newline="", encoding="utf-8") as handle:
        writer = csv.DictWriter(handle, COLUMNS)
        if fresh:
            writer.writeheader()
        measured = _circumstances() | {"benchmark": benchmark, "case": case}
        for metric, (value, unit) in figures.items():
            writer.writerow(measured | {"metric": metric, "value": f"{value:.6g}", "unit": unit})
    shown = "  ".join(
        f"{metric} {value:.4g} {unit}".strip() for metric, (value, unit) in figures.items()
    )
    print(f"{benchmark} {case}: {shown}", flush=True)


def _circumstances() -> dict[str, str]:
    """Date, hardware, versions, commit and command."""
    try:
        import cupy

        cupy_version = cupy.__version__
    except ImportError:
        cupy_version = ""
    return {
        "date": time.strftime("%Y-%m-%d"),
        "device": torch.cuda.get_device_name()
        if torch.cuda.is_available()
        else f"{platform.machine()}, {os.cpu_count()} cores",
        "torch": torch.__version__,
        "cupy": cupy_version,
        "commit": environment.commit(),
        "command": " ".join(
            [
                _launcher(),
                os.path.relpath(sys.argv[0]),
                *(_shown(argument) for argument in sys.argv[1:]),
            ]
        ),
    }


def _launcher() -> str:
    return (
        f"torchrun --nproc-per-node {os.environ['WORLD_SIZE']}"
        if "WORLD_SIZE" in os.environ
        else "python"
    )


def _shown(argument: str) -> str:
    """Where a file lies on the machine that measured does not matter."""
    return Path(argument).name if os.path.isabs(argument) else argument
