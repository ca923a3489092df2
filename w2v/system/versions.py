"""What figures and vectors were made with: this program's commit, versions and hardware."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

PACKAGES = (
    "torch",
    "numpy",
    "numba",
    "gensim",
    "omegaconf",
    "safetensors",
    "cupy-cuda12x",
    "cupy-cuda13x",
)


def describe(machine: object) -> str:
    """A line for each part; `machine` says itself what it is."""
    lines = [
        f"python {platform.python_version()} on {platform.platform()}",
        f"machine {machine}",
        f"commit {commit()}",
    ]
    for package in PACKAGES:
        try:
            lines.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            continue
    return "\n".join(lines) + "\n"


def commit() -> str:
    """Of this program; W2V_COMMIT says it where there is no git."""
    if "W2V_COMMIT" in os.environ:
        return os.environ["W2V_COMMIT"]
    try:
        command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
