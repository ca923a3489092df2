"""Will it fit? Bytes that a run takes, and what this machine has.

`Job.needs` is the one count of bytes, by place and purpose: the check before a run starts, the
choice of the engine and the capacity of the GPU cache are all derived from it.
"""

from __future__ import annotations

import bisect
import contextlib
import errno
import math
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from w2v.config import ConfigError
from w2v.distributed.ranks import SINGLE, Ranks
from w2v.model.table import FILE_BYTES, RowState, pinning_is_limited, record_width
from w2v.system.process import cores
from w2v.system.resources import UNLIMITED, format_bytes, free_host_bytes, lockable_bytes
from w2v.vectors.datasets import ASKED

PROGRAM_BYTES = 400 << 20  # CPU memory of torch and numba, and what allocators keep
CUDA_BYTES = 2 << 30  # CPU memory of CUDA's context and libraries
WORD_BYTES = 180  # CPU memory of a vocabulary word: its string, counts and probabilities
RING_BYTES = 48 << 20  # CPU memory pinned by the staged link

# GPU memory besides the rows of the tables.
GPU_RESERVE = 2 << 30  # batches, gradients and CUDA itself
DRAW_BYTES = 12  # a vocabulary word: its place in the noise distribution, how often it is kept
NUMBER_BYTES = 4  # a table row: its number among the unique rows of a step
ROUTE_BYTES = 16  # a vocabulary word, where several ranks exchange rows
MAP_BYTES = 13  # a table row, where rows are paged: slot, rank by use, marks, lookahead
MOVE_BYTES = 24  # a cache slot: two lists of moves

LEAST_COPIED = 256 << 20  # a CPU run waits only tenths of a second while less is written to disk
SPARE = 1 / 16  # share of the free CPU memory that checkpoint copies leave to the file cache
PLACES = {"host": "CPU memory", "locked": "locked CPU memory", "gpu": "GPU memory", "disk": "disk"}
States = Callable[[int], Mapping[str, RowState]]  # vector size -> optimizer states of a row


class DoesNotFit(MemoryError):
    """The run takes more than there is; names the place and remedies."""


@dataclass(frozen=True)
class Machine:
    """What this computer offers to one rank of a run."""

    cores: int
    host_bytes: int
    gpu: str  # empty without one
    gpu_free_bytes: int
    cuda_torch: str  # CUDA version torch was built for; empty for a CPU build
    cuda_cupy: str  # CUDA version CuPy was built for; empty if it cannot be imported
    host_free_bytes: float = math.inf
    lockable_bytes: float = math.inf

    @classmethod
    def here(cls, ranks: Ranks = SINGLE) -> Machine:
        """Return this computer, or a rank's share of it."""
        gpus, share = torch.cuda.device_count(), ranks.local_size
        if 0 < gpus < share:
            raise ConfigError(
                f"{share} ranks on a machine of {gpus} GPUs; start one a GPU: "
                f"--nproc-per-node {gpus}, or set CUDA_VISIBLE_DEVICES="
            )
        gpu, gpu_free, cupy = "", 0, ""
        if torch.cuda.is_available():
            gpu, gpu_free = torch.cuda.get_device_name(), torch.cuda.mem_get_info()[0]
            cupy = _cupy_cuda()
        lockable = lockable_bytes()
        # Some drivers ignore ulimit -l.
        if cupy and lockable < UNLIMITED and not pinning_is_limited():
            lockable = UNLIMITED
        return cls(
            cores=max(1, cores() // share),
            host_bytes=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
            gpu=gpu,
            gpu_free_bytes=gpu_free,
            cuda_torch=torch.version.cuda or "",
            cuda_cupy=cupy,
            host_free_bytes=free_host_bytes() / share,
            lockable_bytes=lockable / share,
        )

    def __str__(self) -> str:
        host = f"{self.cores} cores, {format_bytes(self.host_bytes)}"
        if not self.gpu:
            return f"{host} | no GPU"
        gpu = f"{self.gpu}, {format_bytes(self.gpu_free_bytes)} free"
        cupy = f"CuPy for CUDA {self.cuda_cupy}" if self.cuda_cupy else "no CuPy"
        return f"{host} | {gpu} | torch for CUDA {self.cuda_torch}, {cupy}"


@dataclass(frozen=True)
class Job:
    """What decides how many bytes a run takes.

    Bytes are those of one rank, but for the disk, which all ranks share.

    cache_bytes: of rows that paged tables keep on the GPU; None: all that is left there.
    ids_bytes: of the corpus, where it is put on the GPU.
    aligned: whether records are padded, see `Table`.
    """

    words: int  # of the vocabulary: rows of a table, on all ranks
    vector_size: int
    states: States
    engine: str  # resident, mapped or staged
    on_gpu: bool
    batch_size: int  # of all ranks
    pairs: int  # context words and targets of a center
    ranks: int = 1
    cache_bytes: int | None = None
    ids_bytes: int = 0
    checkpoints: bool = True  # whether any are written before the last one
    element_size: int = 4
    in_files: bool = False  # whether the tables are in files
    aligned: bool = True

    @property
    def rows(self) -> int:
        """Rows of each table on the rank that holds the most."""
        return -(-self.words // self.ranks)

    @property
    def record_bytes(self) -> int:
        return self._record_bytes(self.aligned)

    @property
    def table_bytes(self) -> int:
        """Bytes of this rank's rows of both tables."""
        return 2 * self.rows * self.record_bytes

    def _record_bytes(self, aligned: bool) -> int:
        states = self.states(self.vector_size)
        width = record_width(self.vector_size, states, self.element_size, aligned)
        return width * self.element_size

    def needs(self) -> dict[str, dict[str, int]]:
        """Return the bytes by place and purpose."""
        return {
            "host": self._host_needs(),
            "locked": self._locked_needs(),
            "gpu": self._gpu_needs() if self.on_gpu else {},
            "disk": self._disk_needs(),
        }

    def _host_needs(self) -> dict[str, int]:
        needs = {"program": PROGRAM_BYTES + (CUDA_BYTES if self.on_gpu else 0)}
        if not self.in_files and not (self.on_gpu and self.engine == "resident"):
            needs["tables"] = self.table_bytes
        needs["vocabulary"] = WORD_BYTES * self.words
        # Several ranks export block by block, and keep the vectors that are scored.
        exported = self.words if self.ranks == 1 else min(self.words, ASKED)
        needs["vectors"] = 4 * exported * self.vector_size
        if not self.on_gpu:
            # Vectors are exported when the batches are gone, so only the larger of both counts.
            needs["batches"] = max(0, self._batch_bytes() - needs["vectors"])
        return needs

    def _batch_bytes(self) -> int:
        """Bytes of a step: products of all pairs, and a page with its copies."""
        batch_size = -(-self.batch_size // self.ranks)
        page_rows = min(2 * self.rows, batch_size * self.pairs)
        return 8 * batch_size * self.pairs * self.vector_size + 4 * page_rows * self.record_bytes

    def _locked_needs(self) -> dict[str, int]:
        if self.engine == "mapped":
            return {"tables": self.table_bytes}
        return {"buffers": RING_BYTES} if self.engine == "staged" else {}

    def _gpu_needs(self) -> dict[str, int]:
        word_bytes = DRAW_BYTES + (ROUTE_BYTES if self.ranks > 1 else 0)
        needs = {
            "batches": GPU_RESERVE,
            "ids": self.ids_bytes,
            "vocabulary": word_bytes * self.words + 2 * NUMBER_BYTES * self.rows,
        }
        if self.engine == "resident":
            return needs | {"tables": self.table_bytes}
        # An automatic cache takes what is left, so it needs nothing.
        slots = min(2 * self.rows, (self.cache_bytes or 0) // self.record_bytes)
        cache = (self.record_bytes + MOVE_BYTES) * slots
        return needs | {"cache maps": 2 * MAP_BYTES * self.rows, "cache": cache}

    def _disk_needs(self) -> dict[str, int]:
        # The oldest checkpoint is removed when the third is whole.
        kept = 3 if self.checkpoints else 1
        vectors = 4 * self.words * self.vector_size
        needs = {
            "checkpoints": kept * 2 * self.words * self._record_bytes(aligned=True),
            "vectors": 2 * vectors + 32 * self.words,  # vectors.kv and vectors.bin
        }
        return needs | ({"tables": self.ranks * self.table_bytes} if self.in_files else {})


def cache_rows(job: Job, free_gpu_bytes: int) -> int:
    """Return the capacity of the GPU cache in rows.

    Resident tables have all rows on the GPU. An automatic cache (cache_bytes is None) gets what all
    other needs leave of the free memory.
    """
    if not job.on_gpu:
        return 0
    if job.engine == "resident":
        return 2 * job.rows
    if job.cache_bytes is not None:
        capacity = job.cache_bytes // job.record_bytes
    else:
        left = free_gpu_bytes - sum(job.needs()["gpu"].values())
        capacity = left // (job.record_bytes + MOVE_BYTES)
    return max(0, min(2 * job.rows, capacity))


@dataclass(frozen=True)
class Budget:
    """A job and the bytes that are free for it, by place.

    lighter: returns the states of optimizers that keep less, by name.
    """

    job: Job
    free: Mapping[str, float]
    run_dir: str
    lighter: Callable[[], Mapping[str, States]]

    def check(self) -> None:
        """Raise `DoesNotFit` if some place lacks bytes."""
        if places := self.lacking(self.job):
            raise DoesNotFit(
                self._explain(f"{' and '.join(map(PLACES.get, places))} would run out")
            )

    @contextlib.contextmanager
    def explained(self) -> Iterator[None]:
        """Raise `DoesNotFit` if an allocation in the block fails nevertheless."""
        try:
            yield
        except (MemoryError, RuntimeError, OSError) as error:
            if isinstance(error, DoesNotFit) or not _is_out_of_memory(error):
                raise
            reason = " ".join(str(error).split())[:200]
            raise DoesNotFit(self._explain(f"memory ran out ({reason})")) from None

    def lacking(self, job: Job) -> list[str]:
        """Return the places where the job does not fit."""
        needs = job.needs().items()
        return [place for place, parts in needs if sum(parts.values()) > self._free(place)]

    def changes(self) -> list[str]:
        """Return the smallest single changes that would make the job fit."""
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
        lighter = self.lighter().items()
        found += [f"optimizer.name={name}" for name, states in lighter if fits(states=states)][:1]
        if "gpu" in lacking or "locked" in lacking:
            engines = [name for name in ("mapped", "staged") if name != job.engine]
            found += [f"transfer.engine={name}" for name in engines if fits(engine=name)][:1]
        if lacking == ["disk"]:
            if job.checkpoints and fits(checkpoints=False):
                found.append("run.checkpoint_minutes=0")
            found.append("run.dir=FOLDER on a larger disk")
        return found

    @property
    def copies(self) -> int:
        """Bytes of CPU memory for copies of the tables.

        They are written while training goes on: as many files as there is room for.
        """
        job = self.job
        if not job.checkpoints or self._small:
            return 0
        # Tables in files are quick where the file cache has room for them.
        cached = job.table_bytes if job.in_files else 0
        room = self.free["host"] * (1 - SPARE) - sum(job.needs()["host"].values()) - cached
        if room >= job.table_bytes:
            return job.table_bytes
        return max(0, int(room) // FILE_BYTES * FILE_BYTES)

    @property
    def saving(self) -> str:
        """Whether training waits while a checkpoint is written, and why."""
        tables, copies = self.job.table_bytes, self.copies
        waits = "checkpoints are written while training waits"
        if not self.job.checkpoints:
            return "one checkpoint, when training is over"
        if self._small:
            return f"{waits}: small tables are written faster than copied and kept"
        if copies == 0:
            return f"{waits}: no room to copy the tables"
        if copies < tables:
            share = f"{format_bytes(copies)} of {format_bytes(tables)}"
            return f"{waits}, except for up to {share}, as many files as memory has room to copy"
        return "checkpoints are written while training goes on, from a copy of the tables"

    @property
    def _small(self) -> bool:
        return not self.job.on_gpu and self.job.table_bytes < LEAST_COPIED

    def __str__(self) -> str:
        """Return a line for each place: bytes by purpose, sum, what is free."""
        needed = self.job.needs()
        needed["host"]["copies"] = self.copies
        if self.job.on_gpu and self.job.engine != "resident":
            slots = cache_rows(self.job, int(self._free("gpu")))
            needed["gpu"]["cache"] = (self.job.record_bytes + MOVE_BYTES) * slots
        lines = []
        for place, needs in needed.items():
            parts = [
                f"{purpose} {format_bytes(count)}" for purpose, count in needs.items() if count
            ]
            if parts:
                total = format_bytes(sum(needs.values()))
                free = self._free(place)
                of = f" of {format_bytes(free)} free" if free < UNLIMITED else ""
                where = f" in {self.run_dir}" if place == "disk" else ""
                lines.append(f"{place:9} {' + '.join(parts)} = {total}{of}{where}")
        return "\n".join(lines)

    def _free(self, place: str) -> float:
        return self.free.get(place, math.inf)

    def _explain(self, problem: str) -> str:
        """Return the problem, the bytes and the remedies on one line."""
        needs = "; ".join(" ".join(line.split()) for line in str(self).splitlines())
        remedy = "no single change is enough: take a larger machine"
        if found := self.changes():
            remedy = f"it would fit with {' or '.join(found)}"
        return f"{problem}: {needs}; {remedy}"


def _largest(fits: Callable[[int], bool], below: int) -> int:
    """Return the largest number in [1, below) that fits, to three digits."""
    largest = bisect.bisect_left(range(1, below), True, key=lambda number: not fits(number))
    unit = 10 ** max(0, len(str(largest)) - 3)
    return largest // unit * unit


def _is_out_of_memory(error: Exception) -> bool:
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return getattr(error, "errno", None) == errno.ENOMEM or "can't allocate memory" in str(error)


def _cupy_cuda() -> str:
    try:
        import cupy
    except ImportError:
        return ""
    number = cupy.cuda.runtime.runtimeGetVersion()
    return f"{number // 1000}.{number % 1000 // 10}"
