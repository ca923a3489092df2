"""Will it fit? The bytes that a run takes, by purpose and place, against what this machine leaves free, before any of them is taken."""

from __future__ import annotations

import contextlib
import errno
import math
import os
import resource
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from w2v.model.table import FILE_BYTES, RowState, record_width

PROGRAM_BYTES, CUDA_BYTES = (
    400 << 20,
    2 << 30,
)  # of CPU memory: torch, numba and what allocators keep; CUDA's context and libraries
GPU_RESERVE = 2 << 30  # of GPU memory: pages, gradients and CUDA itself
RING_BYTES = 48 << 20  # pinned by the staged link
LEAST_COPIED = 256 << 20  # less is on the disk in the tenths of a second that a CPU can wait for it
SPARE = (
    1 / 16
)  # of the free CPU memory, which copies leave to the cache of files and to what nobody has counted
UNLIMITED = 1 << 60  # what limits say that are none
PLACES = {"host": "CPU memory", "locked": "locked CPU memory", "gpu": "GPU memory", "disk": "disk"}


class DoesNotFit(MemoryError):
    """The run takes more than there is; the message says of what, and the smallest changes that would make it fit."""


@dataclass(frozen=True)
class Job:
    """What decides how many bytes a run takes."""

    words: int  # rows of each table
    vector_size: int
    states: Callable[[int], Mapping[str, RowState]]  # of the optimizer, for vectors of that size
    engine: str  # resident, mapped or staged
    on_gpu: bool
    batch_size: int
    pairs: int  # context words and targets of a center
    kept_bytes: int = 0  # of rows that paged tables keep on the GPU; 0: what is free
    checkpoints: bool = True  # before the last one
    element_size: int = 4
    in_files: bool = False  # the tables, in the run folder's file system or another
    aligned: bool = True  # as in `Table`

    @property
    def table_bytes(self) -> int:
        return self._bytes(self.aligned)

    def _bytes(self, aligned: bool) -> int:
        width = record_width(
            self.vector_size, self.states(self.vector_size), self.element_size, aligned
        )
        return 2 * self.words * width * self.element_size

    @property
    def shard_bytes(self) -> int:
        """Of the rows that this process holds."""
        return self.table_bytes

    def needs(self) -> dict[str, dict[str, int]]:
        """Bytes by place and purpose."""
        weights, tables, paged = (
            4 * self.words * self.vector_size,
            self.table_bytes,
            self.engine != "resident",
        )
        rows = min(2 * self.words, self.batch_size * self.pairs)
        batch = 8 * self.batch_size * self.vector_size * self.pairs + 4 * rows * (
            tables // (2 * self.words)
        )
        host = {"program": PROGRAM_BYTES + (CUDA_BYTES if self.on_gpu else 0)}
        host |= {"tables": tables} if (paged or not self.on_gpu) and not self.in_files else {}
        # Vectors are exported and scored when the batches are gone.
        host["vectors"] = weights
        if not self.on_gpu:
            host["batches"] = max(0, batch - host["vectors"])
        gpu = (
            {"batches": GPU_RESERVE} | ({"rows": self.kept_bytes} if paged else {"tables": tables})
            if self.on_gpu
            else {}
        )
        locked = {"mapped": {"tables": tables}, "staged": {"buffers": RING_BYTES}}.get(
            self.engine, {}
        )
        files = {
            "checkpoints": self._bytes(aligned=True) * (3 if self.checkpoints else 1),
            "vectors": 2 * weights + 32 * self.words,
        }
        files |= {"tables": tables} if self.in_files else {}
        return {"host": host, "locked": locked, "gpu": gpu, "disk": files}


@dataclass(frozen=True)
class Budget:
    """A job and the bytes that are free for it, by place."""

    job: Job
    free: Mapping[str, float]
    run_dir: str
    lighter: Callable[
        [], Mapping[str, Callable[[int], Mapping[str, RowState]]]
    ]  # the states of optimizers that keep less

    def lacking(self, job: Job) -> list[str]:
        """The places where the job does not fit."""
        return [
            place
            for place, needs in job.needs().items()
            if sum(needs.values()) > self.free.get(place, math.inf)
        ]

    @property
    def copies(self) -> int:
        """Bytes of CPU memory from which checkpoints are written while training goes on, for as much of the tables as has room."""
        job = self.job
        if not (job.checkpoints and self._worth_copying):
            return 0
        cached = (
            job.shard_bytes if job.in_files else 0
        )  # they are quick where the cache of files has room for them
        room = self.free["host"] * (1 - SPARE) - sum(job.needs()["host"].values()) - cached
        return (
            job.shard_bytes
            if room >= job.shard_bytes
            else max(0, int(room) // FILE_BYTES * FILE_BYTES)
        )

    @property
    def _worth_copying(self) -> bool:
        return self.job.on_gpu or self.job.shard_bytes >= LEAST_COPIED

    @property
    def saving(self) -> str:
        tables, copies = self.job.shard_bytes, self.copies
        if not self.job.checkpoints:
            return "one checkpoint, when training is over"
        if copies == tables:
            return "checkpoints are written while training goes on, from a copy of the tables"
        if copies:
            some = (
                f"up to {size(copies)} of {size(tables)}, as many files as memory has room to copy"
            )
            return f"checkpoints are written while training waits, except for {some}"
        why = (
            "no room to copy the tables"
            if self._worth_copying
            else "small tables are written faster than copied and kept"
        )
        return f"checkpoints are written while training waits: {why}"

    def check(self) -> None:
        """Raise `DoesNotFit` where it does not."""
        if places := self.lacking(self.job):
            raise DoesNotFit(
                self.words(" and ".join(PLACES[place] for place in places) + " would run out")
            )

    def words(self, what: str) -> str:
        """What has happened, on one line with the bytes and the remedies."""
        return f"{what}: {'; '.join(' '.join(line.split()) for line in str(self).splitlines())}; {self.remedy()}"

    def remedy(self) -> str:
        """The smallest single changes after each of which the run would fit."""
        found = self.changes()
        return (
            f"it would fit with {' or '.join(found)}"
            if found
            else "no single change is enough: take a larger machine"
        )

    def changes(self) -> list[str]:
        job, lacking = self.job, self.lacking(self.job)

        def fits(**other: Any) -> bool:
            return not self.lacking(replace(job, **other))

        found = []
        if fewer := _largest(lambda n: fits(words=n), job.words):
            found.append(f"vocab.max_final_vocab={fewer}")
        if smaller := _largest(lambda n: fits(vector_size=n), job.vector_size):
            found.append(f"model.vector_size={smaller}")
        if batch := _largest(lambda n: fits(batch_size=n), job.batch_size):
            found.append(f"train.batch_size={batch}")
        found += [
            f"optimizer.name={name}"
            for name, states in self.lighter().items()
            if fits(states=states)
        ][:1]
        if "gpu" in lacking or "locked" in lacking:
            found += [
                f"transfer.engine={name}"
                for name in ("mapped", "staged")
                if name != job.engine and fits(engine=name)
            ][:1]
        if lacking == ["disk"]:
            found += (
                ["run.checkpoint_minutes=0"] if job.checkpoints and fits(checkpoints=False) else []
            )
            found.append("run.dir=FOLDER on a larger disk")
        return found

    def __str__(self) -> str:
        lines, needed = [], self.job.needs()
        needed["host"] |= {"copies": self.copies} if self.copies else {}
        for place, needs in needed.items():
            if needs:
                parts = " + ".join(f"{purpose} {size(count)}" for purpose, count in needs.items())
                free = self.free.get(place, math.inf)
                of = f" of {size(free)} free" if free < UNLIMITED else ""
                lines.append(
                    f"{place:9} {parts} = {size(sum(needs.values()))}{of}{f' in {self.run_dir}' if place == 'disk' else ''}"
                )
        return "\n".join(lines)

    @contextlib.contextmanager
    def explained(self) -> Iterator[None]:
        """An allocation that fails in the block although all seemed to fit says the same."""
        try:
            yield
        except (MemoryError, RuntimeError, OSError) as error:
            if isinstance(error, DoesNotFit) or not _is_of_memory(error):
                raise
            raise DoesNotFit(
                self.words(f"memory ran out ({' '.join(str(error).split())[:200]})")
            ) from None


def free_host_bytes(root: Path = Path("/")) -> int:
    """CPU memory that this process may still take: what the system, its control groups (v1 and v2) and its own limit leave."""
    free = [_system_free(root), *_control_groups_free(root)]
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit != resource.RLIM_INFINITY:
        free.append(
            limit - int((root / "proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        )
    return max(0, min(free))


def lockable_bytes() -> int:
    """The limit on locked memory."""
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return UNLIMITED if limit == resource.RLIM_INFINITY else limit


def free_disk_bytes(folder: Path) -> int:
    """Where the folder is or will be."""
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free


def size(count: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"


def _system_free(root: Path) -> int:
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
        return next(
            int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:")
        )
    except (OSError, StopIteration):  # not Linux
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _control_groups_free(root: Path) -> Iterator[int]:
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            mount, names = root / "sys/fs/cgroup", ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            mount, names = (
                root / "sys/fs/cgroup/memory",
                ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
            )
        else:
            continue
        inside = mount / path.lstrip("/")
        for group in [inside, *inside.parents]:
            if group.is_relative_to(mount):
                yield from _group_free(group, *names)


def _group_free(group: Path, limit_name: str, used_name: str, cached_name: str) -> Iterator[int]:
    try:
        limit, used = int((group / limit_name).read_text()), int((group / used_name).read_text())
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        if limit < UNLIMITED:
            yield (
                limit - used + int(stat.get(cached_name, 0))
            )  # pages of files, which the kernel gives back
    except (OSError, ValueError):  # no such group here, or "max"
        return


def _largest(fits: Callable[[int], bool], below: int) -> int:
    """The largest number of 1 and more below `below` that fits, rounded down to three digits; 0 where none does."""
    low, high = 0, below
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    unit = 10 ** max(0, len(str(low)) - 3)
    return low // unit * unit


def _is_of_memory(error: Exception) -> bool:
    out_of = (
        isinstance(error, (MemoryError, torch.OutOfMemoryError))
        or getattr(error, "errno", None) == errno.ENOMEM
    )
    return out_of or "can't allocate memory" in str(error)
