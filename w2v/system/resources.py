"""Limits of this process: CPU time, memory, locked memory and disk."""

from __future__ import annotations

import contextlib
import math
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path

UNLIMITED = 1 << 60  # a limit of this many bytes or more is none
LEAST_FREE = 1 << 26  # bytes, while a file is read


def free_host_bytes(root: Path = Path("/")) -> int:
    """Return the CPU memory in bytes that this process may still take.

    The least of what the system has available, what its control groups (v1 or v2) allow and what
    its own limit (ulimit -v) allows. `root` stands for the file system's, in tests.
    """
    # Each line is such as "MemAvailable:   1234 kB".
    words = (root / "proc/meminfo").read_text().split()
    available = int(words[words.index("MemAvailable:") + 1]) << 10
    free = [available, *_control_groups_free(root)]
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit != resource.RLIM_INFINITY:
        used_pages = int((root / "proc/self/statm").read_text().split()[0])
        free.append(limit - used_pages * resource.getpagesize())
    return max(0, min(free))


def require_memory() -> None:
    """Raise `MemoryError` if less than LEAST_FREE is left."""
    if (left := free_host_bytes()) < LEAST_FREE:
        raise MemoryError(f"it does not fit into memory, where {format_bytes(left)} are left")


def cpu_quota(root: Path = Path("/")) -> float:
    """Return how many CPUs control groups let this process keep busy.

    Infinity without a limit. A container that may use 4 of 64 CPUs still sees all of them.
    """
    quotas = [math.inf]
    for folder, version in _control_groups(root, "cpu"):
        names = ["cpu.max"] if version == 2 else ["cpu.cfs_quota_us", "cpu.cfs_period_us"]
        # There may be no such group here, or its quota be "max" or -1.
        with contextlib.suppress(OSError, ValueError):
            words = " ".join((folder / name).read_text() for name in names).split()
            quota, period = map(int, words)
            if quota > 0:
                quotas.append(quota / period)
    return min(quotas)


def lockable_bytes() -> int:
    """Return the limit on locked memory in bytes (ulimit -l)."""
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return UNLIMITED if limit == resource.RLIM_INFINITY else limit


def free_disk_bytes(folder: Path) -> int:
    """Return the free bytes of the disk where the folder is, or will be."""
    return shutil.disk_usage(_existing(folder)).free


def same_disk(folder: Path, other: Path) -> bool:
    """Return whether two folders are, or will be, on one disk."""
    return _existing(folder).stat().st_dev == _existing(other).stat().st_dev


def _existing(folder: Path) -> Path:
    while not folder.exists():
        folder = folder.parent
    return folder


def format_bytes(count: float) -> str:
    """Return a number of bytes in a unit that reads well, such as "1.5 GiB"."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"


def _control_groups_free(root: Path) -> Iterator[int]:
    """Yield the free memory of each control group that sets a limit."""
    for folder, version in _control_groups(root, "memory"):
        names = ("memory.max", "memory.current", "inactive_file")
        if version == 1:
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        # There may be no such group here, or its limit be "max".
        with contextlib.suppress(OSError, ValueError):
            limit, used = (int((folder / name).read_text()) for name in names[:2])
            # Each line is such as "inactive_file 4096".
            pairs = (folder / "memory.stat").read_text().splitlines()
            stat = dict(map(str.split, pairs))
            if limit < UNLIMITED:
                # The kernel gives cached file pages back when memory runs short.
                yield limit - used + int(stat.get(names[2], 0))


def _control_groups(root: Path, controller: str) -> Iterator[tuple[Path, int]]:
    """Yield the folder and version of each control group of this process."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        mount = root / "sys/fs/cgroup"
        if controllers:
            mount /= controller
            if controller not in controllers.split(","):
                continue
        # Every group above this one limits it as well.
        group = mount / path.lstrip("/")
        for folder in [group, *group.parents]:
            yield folder, 1 if controllers else 2
