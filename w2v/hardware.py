"""Machines that are not at hand, as `train.py --dry-run` takes them."""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass, fields
from typing import Any

from w2v.config import SIZE, UNITS, ConfigError

OPTIONS = {
    "world_size": ("RANKS", "with --dry-run: what so many GPUs would take and do, on machines that are not at hand"),
    "rows": ("ROWS[:WORDS]", "the same for words after Zipf's law, so many different ones in a text of so many (20 times as many)"),
    "machine": ("KEY=VALUE,...", "what these machines are, where not as measured: gpus=8,gpu=80GiB,host=2TiB,link=50,network=50"),
}


def add_options(parser: argparse.ArgumentParser) -> None:
    for name, (shape, meaning) in OPTIONS.items():
        parser.add_argument(f"--{name.replace('_', '-')}", metavar=shape, help=meaning)


def asked(args: argparse.Namespace) -> bool:
    """Whether any of them is given."""
    return any(getattr(args, name) is not None for name in OPTIONS)


@dataclass(frozen=True)
class Hardware:
    """The hosts, and what connects them; the defaults are what was measured, but for `network`. GB are 10^9 bytes."""

    gpus: int = 4  # of a host, a rank each
    gpu: int = 139 << 30  # bytes, of each
    host: int = 512 << 30  # bytes
    disk: float = math.inf  # bytes, of each host
    link: float = 41.5  # GB/s of single records to the GPU, and as many from it at the same time
    memory: float = 95.0  # GB/s that the links of a host carry together, each way
    peers: float = 280.0  # GB/s that a GPU sends to those of its host
    network: float = 25.0  # GB/s that a GPU sends to those of other hosts
    words: float = 380.0  # M words/s of configs/text8.yaml by Adam on one GPU that has all rows

    @classmethod
    def parse(cls, text: str) -> Hardware:
        """From KEY=VALUE,...; raises `ConfigError`."""
        known: dict[str, Any] = {entry.name: entry.default for entry in fields(cls)}
        given = {}
        for entry in filter(None, text.split(",")):
            key, _, value = entry.partition("=")
            if key not in known:
                raise ConfigError(f"--machine: {key!r} is unknown; choose from {' '.join(known)}, as in link=50,network=25,host=1TiB")
            whole, size = key == "gpus", key in ("gpu", "host", "disk")
            amount = _size(value) if size else _number(value)
            if not 0 < amount < math.inf or (whole and amount % 1):
                kind = "a whole number" if whole else "a size such as 80GiB or 2TiB" if size else "a number"
                raise ConfigError(f"--machine: {entry} is out of range; it must be {kind} above 0")
            given[key] = type(known[key])(amount)
        return cls(**given)


def whole(name: str, text: str, least: int) -> int:
    """Raises `ConfigError` where it is no whole number, or below the least."""
    amount = _number(text)
    if not least <= amount < math.inf or amount % 1:
        raise ConfigError(f"{name}={text} is out of range; it must be a whole number from {least:,} up")
    return int(amount)


def _number(text: str) -> float:
    """NaN where it is none."""
    try:
        return float(text)
    except ValueError:
        return math.nan


def _size(text: str) -> float:
    """Bytes; NaN where it is no size."""
    match = SIZE.fullmatch(text)
    return float(match[1]) * UNITS[match[2]] if match and match[2] in UNITS else math.nan
