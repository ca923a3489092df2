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
from pathlib import Path
from shlex import quote
from typing import Any

import numpy as np
import torch

from w2v.config import ConfigError
from w2v.distributed.ranks import SINGLE, Ranks
from w2v.kernels.batch import chunk_words, table_rows
from w2v.model.table import (
    ALIGNMENT,
    CPU_ALIGNMENT,
    FILE_BYTES,
    RowState,
    padded,
    pinning_is_limited,
    record_width,
)
from w2v.system.files import one_line
from w2v.system.process import cores
from w2v.system.resources import UNLIMITED, format_bytes, free_host_bytes, lockable_bytes
from w2v.training.paging import MOST_STEPS
from w2v.vectors.datasets import ASKED
from w2v.vectors.export import EXPORT_BYTES

PROGRAM_BYTES = 300 << 20  # CPU memory of torch, and what allocators keep
COMPILER_BYTES = 196 << 20  # CPU memory of numba while it compiles kernels
CUDA_BYTES = 800 << 20  # CPU memory of CUDA's context and libraries
CUBLAS_BYTES = 300 << 20  # CPU memory of the libraries that plain torch needs on a GPU
PATH_BYTES = 5  # a node of a word's path in the tree: row and code
WORD_BYTES = 180  # CPU memory of a vocabulary word: its string, counts and probabilities
RING_BYTES = 48 << 20  # CPU memory pinned by the staged link

# Memory of a batch, wherever it is computed: bytes that stay, and those of its drawing.
CHUNK_WORD_BYTES, CHUNK_DRAW_BYTES = 8, 24  # a word of a chunk of the text
NEGATIVE_BYTES, NEGATIVE_DRAW_BYTES = 4, 8  # a negative
POOL_BYTES, POOL_DRAW_BYTES = 4, 32  # a word of the pool, which only torch keeps in memory
SAMPLED = 100_000  # words by which the rows of a batch are estimated, of a larger vocabulary

# GPU memory besides the rows of the tables and batches.
GPU_RESERVE = 512 << 20  # CUDA's modules, scores, and what torch's allocator cannot use
DRAW_BYTES = 12  # a vocabulary word: its place in the noise distribution, how often it is kept
NUMBER_BYTES = 4  # a table row: its number among the unique rows of a step
ROUTE_BYTES = 20  # a vocabulary word, where several ranks exchange rows: indices and marks
MAP_BYTES = 15  # a table row, where rows are paged: slot, rank by use, marks, lookahead
SORT_BYTES = 48  # a table row, while rows are sorted by use, before the cache is allocated
MOVE_BYTES = 24  # a cache slot: two lists of moves
MAPPED_PART = 512  # the GPU's page tables take this part of pinned tables
UNUSED_PART = 256  # the allocator leaves this part of the cache unused
FILLED = 15 / 16  # share of the cache for the expected rows of a page; some have more
PAGES = 3  # whose batches are in memory: planned, computing, and the one before

LEAST_COPIED = 256 << 20  # a CPU run waits only tenths of a second while less is written to disk
SHORT = 0.9  # of what it needs, a place is taken to have where an allocation failed nevertheless
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
            remedy = f"start one a GPU: --nproc-per-node {gpus}, or set CUDA_VISIBLE_DEVICES="
            raise ConfigError(f"{share} ranks on a machine of {gpus} GPUs; {remedy}")
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
    """

    words: int  # of the vocabulary
    vector_size: int
    states: States
    engine: str  # resident, mapped or staged
    on_gpu: bool
    batch_size: int  # of all ranks
    window: int
    negative: int
    counts_V: np.ndarray  # of the words
    text_words: int
    centers: float  # of an epoch: words that subsampling keeps, in the mean
    kernels: str = "cpu"  # reference, cpu, sequential or cuda
    has_formula: bool = True  # kernels step rows in place, without copies for torch.optim
    threads: int = 1
    pool: int = 0
    pool_centers: int = 0
    hs: bool = False
    ns_exponent: float = 0.75
    ranks: int = 1
    cache_bytes: int | None = None  # of rows that are kept on the GPU; None: all that is left there
    ids_bytes: int = 0  # of the corpus, where it is put on the GPU
    checkpoints: bool = True  # whether any are written before the last one
    element_size: int = 4
    in_files: bool = False  # whether the tables are in files
    alignment: int = ALIGNMENT  # bytes that records are padded to, see `Table`

    @property
    def rows(self) -> int:
        """Rows of each table on the rank that holds the most."""
        return -(-self.all_rows // self.ranks)

    @property
    def all_rows(self) -> int:
        """Rows of each table on all ranks."""
        return table_rows(self.words, self.hs, self.negative)

    @property
    def path_lengths(self) -> np.ndarray:
        """The expected length of each word's path: the bits of an ideal code."""
        counts_V = np.maximum(self.counts_V[: self.words], 1)
        return np.log2(counts_V.sum() / counts_V) + 1

    @property
    def tree_bytes(self) -> int:
        """Bytes of the paths of all words."""
        return PATH_BYTES * int(self.path_lengths.sum()) + 8 * self.words if self.hs else 0

    @property
    def record_bytes(self) -> int:
        return self._record_bytes(self.alignment)

    @property
    def table_bytes(self) -> int:
        """Bytes of this rank's rows of both tables."""
        return 2 * self.rows * self.record_bytes

    @property
    def is_paged(self) -> bool:
        """Whether rows move between CPU memory and a cache on the GPU."""
        return self.on_gpu and self.engine != "resident"

    @property
    def slot_bytes(self) -> int:
        """Bytes of a cache slot."""
        return self.record_bytes + MOVE_BYTES + self.record_bytes // UNUSED_PART

    def _record_bytes(self, alignment: int) -> int:
        states = self.states(self.vector_size)
        width = record_width(self.vector_size, states, self.element_size, alignment)
        return width * self.element_size

    def needs(self) -> dict[str, dict[str, int]]:
        """Return the bytes by place and purpose."""
        locked = {"buffers": RING_BYTES} if self.engine == "staged" else {}
        if self.engine == "mapped":
            locked = {"tables": self.table_bytes}
        return {
            "host": self._host_needs(),
            "locked": locked,
            "gpu": self._gpu_needs() if self.on_gpu else {},
            "disk": self._disk_needs(),
        }

    def _host_needs(self) -> dict[str, int]:
        program = PROGRAM_BYTES + (CUDA_BYTES if self.on_gpu else 0)
        if self.kernels != "reference":
            program += COMPILER_BYTES
        elif self.on_gpu:
            program += COMPILER_BYTES + CUBLAS_BYTES
        needs = {"program": program}
        if not self.in_files and not (self.on_gpu and self.engine == "resident"):
            # A CPU provides no memory for the rows of the input table that no word uses.
            unused = 0 if self.on_gpu else self.rows - -(-self.words // self.ranks)
            needs["tables"] = self.table_bytes - unused * self.record_bytes
        needs["vocabulary"] = WORD_BYTES * self.words
        needs["vocabulary"] += self.tree_bytes
        # Large vectors are exported block by block; only those that are scored are copied.
        needs["vectors"] = min(EXPORT_BYTES, 8 * self.words * self.vector_size)
        if self.on_gpu or self.ranks > 1:
            needs["vectors"] += 4 * min(self.words, ASKED) * self.vector_size
        if not self.on_gpu:
            batches = self._batch_bytes()
            needs["batches"] = max(0, batches - needs["vectors"])  # gone when vectors are exported
        return needs

    def _batch_bytes(self) -> int:
        """Return the bytes of batches and gradients on the compute device."""
        batch_size = -(-self.batch_size // self.ranks)
        centers = min(batch_size, int(self.centers))
        drawn = centers * self.negative
        chunk = min(chunk_words(batch_size), self.text_words)
        # The next batch is drawn while this one is still there.
        batches = 2 if self.centers > centers else 1
        stay = CHUNK_WORD_BYTES * chunk + NEGATIVE_BYTES * batches * drawn
        drawing = max(CHUNK_DRAW_BYTES * chunk, NEGATIVE_DRAW_BYTES * drawn)
        dim, gradient = self.vector_size, 4 * self.vector_size + 8  # with its row and pairs
        if self.kernels == "cuda":
            # Buffers for the most rows that a batch may touch; larger ones are allocated beside
            # them. The batches of several pages are under way.
            outputs = centers + self.words_drawn(centers) if self.negative else 0
            if self.hs:
                outputs += min(self.words, int(centers * self.path_lengths.max()))
            inputs = centers + 2 * self.window
            rows = min(self.rows, inputs) + min(self.rows, outputs)
            in_use = PAGES * MOST_STEPS * 4 * centers * (1 + self.negative)
            return stay + drawing + in_use + 2 * gradient * rows
        if self.kernels == "sequential":
            return stay + drawing
        step = 0
        if self.kernels == "cpu":
            share = -(-centers // self.threads)
            touched = self.touched(share)
            gradient = 4 * padded(dim, 4, CPU_ALIGNMENT) + 16  # with its row, pairs and owner
            stay += 8 * self.rows * (self.threads + 1) + gradient * self.threads * sum(touched)
            if not self.has_formula:  # gradients of all threads are joined
                step += 4 * dim * self.threads * max(touched)
        else:  # products of all pairs
            stay += POOL_BYTES * self.pool
            drawing = max(drawing, POOL_DRAW_BYTES * self.pool)
            targets = 1 + self.negative + (int(self.path_lengths.max()) if self.hs else 0)
            step += 8 * centers * (2 * self.window + targets) * dim
            if self.on_gpu:  # gradients of all batches under way
                batches = PAGES * (1 if self.engine == "resident" else MOST_STEPS)
                stay += batches * gradient * sum(self.touched(centers))
        if self.kernels == "reference" or not self.has_formula:
            # torch steps copies of a table's rows.
            step += max(self.touched(centers)) * (4 * dim + 3 * self.record_bytes)
        return stay + max(drawing, step)

    def words_drawn(self, centers: int) -> int:
        """Return how many negatives are drawn for so many centers, at most."""
        pools = -(-centers // (self.pool_centers or centers or 1))
        drawn = centers * self.negative
        return min(drawn, pools * self.pool or drawn)

    def touched(self, centers: int) -> tuple[int, int]:
        """Return the expected unique rows of both tables for so many centers."""
        step = -(-self.words // SAMPLED)
        counts_V = self.counts_V[: self.words : step].astype(np.float64)

        def different(exponent: float, draws: int) -> int:
            share_V = counts_V**exponent
            return int(step * -np.expm1(-draws / step * share_V / share_V.sum()).sum())

        # Subsampling makes centers flatter, much as the exponent does negatives.
        inputs = different(0.75, centers + 2 * self.window)
        outputs = 0
        if self.negative:
            outputs = inputs + different(self.ns_exponent, self.words_drawn(centers))
        if self.hs and inputs:
            # Paths to n of V words share the nodes above the level of n nodes.
            outputs += int(min(self.words, inputs * (1 + max(0, math.log2(self.words / inputs)))))
        return inputs, min(self.rows, outputs)

    def _gpu_needs(self) -> dict[str, int]:
        word_bytes = DRAW_BYTES + (ROUTE_BYTES if self.ranks > 1 else 0)
        program = GPU_RESERVE * (4 if self.ranks > 1 else 1)  # 4: buffers to exchange rows
        if self.engine == "mapped":
            program += self.table_bytes // MAPPED_PART
        needs = {
            "program": program,
            "batches": self._batch_bytes(),
            "ids": self.ids_bytes,
            "vocabulary": word_bytes * self.words + 2 * NUMBER_BYTES * self.rows + self.tree_bytes,
        }
        if self.engine == "resident":
            return needs | {"tables": self.table_bytes}
        # An automatic cache takes what is left, so it needs no more than to be set up.
        slots = min(2 * self.rows, (self.cache_bytes or 0) // self.record_bytes)
        cache = max(self.slot_bytes * slots, 2 * SORT_BYTES * self.rows)
        return needs | {"cache maps": 2 * MAP_BYTES * self.rows, "cache": cache}

    def _disk_needs(self) -> dict[str, int]:
        # The oldest checkpoint is removed when the third is whole.
        kept = 3 if self.checkpoints else 1
        vectors = 4 * self.words * self.vector_size
        needs = {
            "checkpoints": kept * 2 * self.all_rows * self._record_bytes(ALIGNMENT),
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
        needs = job.needs()["gpu"]
        left = free_gpu_bytes - sum(needs.values()) + needs["cache"]
        capacity = left // job.slot_bytes
    return max(0, min(2 * job.rows, capacity))


def fitting_batch_size(job: Job, slots: int, steps: int = 1) -> int:
    """Return the batch size, halved until a page fits into the cache.

    `slots` is the capacity of the cache on all ranks, `steps` the batches of a page.
    """
    size = job.batch_size
    while size > 1 and sum(job.touched(steps * size)) > FILLED * slots:
        size //= 2
    return size


@dataclass(frozen=True)
class Budget:
    """A job and the bytes that are free for it, by place."""

    job: Job
    free: Mapping[str, float]  # of each of PLACES
    run_dir: str
    lighter: Callable[[], Mapping[str, States]]  # of optimizers that keep less, by name

    def check(self) -> None:
        """Raise `DoesNotFit` if some place lacks bytes."""
        if places := self.lacking(self.job):
            problem = f"{' and '.join(map(PLACES.get, places))} would run out"
            raise DoesNotFit(self._explain(problem, self.changes()))

    @contextlib.contextmanager
    def explained(self, run: Path | None = None) -> Iterator[None]:
        """Raise `DoesNotFit` if an allocation in the block fails nevertheless.

        run: the folder of a run that has begun, which can be resumed.
        """
        try:
            yield
        except (MemoryError, RuntimeError, OSError) as error:
            if isinstance(error, DoesNotFit) or not _is_out_of_memory(error):
                raise
            reason = one_line(error)[:200]
            place = "gpu" if self.job.on_gpu and _is_of_gpu(error) else "host"
            found = self._with_less(place).changes()
            message = self._explain(f"memory ran out ({reason})", found)
            if run:
                change = next((one for one in found if one.startswith("transfer.")), None)
                command = " ".join(["w2v train --resume", quote(str(run)), *filter(None, [change])])
                message += f"; this run goes on with {command}"
                message += "" if change else ", when more memory is free"
            raise DoesNotFit(message) from None

    def _with_less(self, place: str) -> Budget:
        """Return this budget, with less free memory than is needed in a place."""
        job = self.job
        if job.is_paged:  # an automatic cache takes what there was
            job = replace(job, cache_bytes=self.slots * job.record_bytes)
        short = SHORT * sum(job.needs()[place].values())
        return replace(self, job=job, free={**self.free, place: min(short, self.free[place])})

    def lacking(self, job: Job) -> list[str]:
        """Return the places where the job does not fit."""
        needs = job.needs().items()
        return [place for place, parts in needs if sum(parts.values()) > self.free[place]]

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
            kept = job.cache_bytes or 0
            shift, unit = (20, "MiB") if kept >> 30 else (10, "KiB")
            if fewer := _largest(lambda n: fits(cache_bytes=n << shift), kept >> shift):
                found.append(f"transfer.gpu_bytes={fewer}{unit}")
        if lacking == ["host"] and not job.on_gpu and not job.in_files and fits(in_files=True):
            found.append("transfer.table_dir=FOLDER")
        if lacking == ["disk"]:
            if job.checkpoints and fits(checkpoints=False):
                found.append("run.checkpoint_minutes=0")
            found.append("run.dir=FOLDER on a larger disk")
        return found

    @property
    def takes(self) -> dict[str, dict[str, int]]:
        """Bytes by place and purpose, with copies and a cache of what is left."""
        needs = self.job.needs()
        needs["host"]["copies"] = self.copies
        if self.job.is_paged:
            needs["gpu"]["cache"] = self.job.slot_bytes * self.slots
        return {place: parts for place, parts in needs.items() if any(parts.values())}

    @property
    def slots(self) -> int:
        """Capacity of the GPU cache in rows."""
        return cache_rows(self.job, int(self.free["gpu"]))

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
        if not self.job.checkpoints:
            return "one checkpoint, when training is over"
        if copies == tables:
            return "checkpoints are written while training goes on, from a copy of the tables"
        why = f"memory has room to copy {format_bytes(copies)} of {format_bytes(tables)}"
        why = "small tables are written faster than copied" if self._small else why
        return f"checkpoints are written while training waits: {why}"

    @property
    def _small(self) -> bool:
        return not self.job.on_gpu and self.job.table_bytes < LEAST_COPIED

    def __str__(self) -> str:
        """Return a line for each place: bytes by purpose, sum, what is free."""
        lines = []
        for place, needs in self.takes.items():
            parts = (f"{purpose} {format_bytes(n)}" for purpose, n in needs.items() if n)
            lines.append(f"{place:9} {' + '.join(parts)} = {self._total(place, needs)}")
        return "\n".join(lines)

    @property
    def totals(self) -> str:
        """What each place needs and has, on one line."""
        return ", ".join(f"{place} {self._total(place, n)}" for place, n in self.takes.items())

    def _total(self, place: str, needs: Mapping[str, int]) -> str:
        free = self.free[place]
        of = f" of {format_bytes(free)} free" if free < UNLIMITED else ""
        where = f" in {self.run_dir}" if place == "disk" else ""
        return f"{format_bytes(sum(needs.values()))}{of}{where}"

    def _explain(self, problem: str, changes: list[str]) -> str:
        """Return the problem, the bytes and changes that help, on one line."""
        needs = "; ".join(" ".join(line.split()) for line in str(self).splitlines())
        remedy = "no single change is enough: take a larger machine"
        if changes:
            remedy = f"it would fit with {' or '.join(changes)}"
        return f"{problem}: {needs}; {remedy}"


def _largest(fits: Callable[[int], bool], below: int) -> int:
    """Return the largest number in [1, below) that fits, to three digits."""
    largest = bisect.bisect_left(range(1, below), True, key=lambda number: not fits(number))
    unit = 10 ** max(0, len(str(largest)) - 3)
    return largest // unit * unit


def _is_out_of_memory(error: Exception) -> bool:
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    words = "can't allocate memory", "out of memory"  # of torch on the CPU, and of CUDA
    return getattr(error, "errno", None) == errno.ENOMEM or any(
        word in str(error) for word in words
    )


def _is_of_gpu(error: Exception) -> bool:
    """Return whether torch, CuPy or the driver could not allocate GPU memory."""
    return any(word in f"{type(error).__module__} {error}" for word in ("CUDA", "cuda", "cupy"))


def _cupy_cuda() -> str:
    try:
        import cupy
    except ImportError:
        return ""
    number = cupy.cuda.runtime.runtimeGetVersion()
    return f"{number // 1000}.{number % 1000 // 10}"
