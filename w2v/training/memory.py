"""Estimate the bytes that a run takes, and find what this machine has.

`Task.needs` is the one count of bytes, by place and purpose: the check before a run starts, the
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

from w2v.config import Config, ConfigError
from w2v.distributed.ranks import SINGLE, Ranks
from w2v.kernels.batch import StepShape, chunk_words, max_rows, table_rows
from w2v.kernels.cuda import DRAWN_AT_ONCE
from w2v.kernels.launch import cuda_runtime
from w2v.model.optim import RowOptimizer
from w2v.model.sampler import EARLY_BATCHES, expected_negatives, negative_distribution, reach
from w2v.model.table import ALIGNMENT, CPU_ALIGNMENT, padded, pinning_is_limited, record_width
from w2v.system.files import one_line
from w2v.system.process import cores
from w2v.system.resources import UNLIMITED, format_bytes, free_host_bytes, lockable_bytes, same_disk
from w2v.text.corpus import Corpus
from w2v.text.vocab import Vocab, keep_probabilities
from w2v.training.checkpoint_files import FILE_BYTES
from w2v.training.paging import MOST_STEPS
from w2v.vectors.datasets import RESTRICT_VOCAB
from w2v.vectors.export import EXPORT_BYTES

PROGRAM_BYTES = 300 << 20  # CPU memory of torch, and what allocators keep
COMPILER_BYTES = 196 << 20  # CPU memory of numba while it compiles kernels
CUDA_BYTES = 600 << 20  # CPU memory of CUDA's context and libraries
TORCH_CUDA_BYTES = 168 << 20  # CPU memory of torch's kernels, where it pages or steps
UNUSED_CUDA_BYTES = 300 << 20  # CPU memory of torch's CUDA libraries where a CPU computes
CUBLAS_BYTES = 300 << 20  # CPU memory of the libraries that plain torch needs on a GPU
REUSED_BYTES = 90 << 20  # CPU memory of freed arrays, where `reuse_freed_memory` keeps it
GAPS_BYTES = 32 << 20  # CPU memory of plain torch between arrays, in some runs
PATH_BYTES = 5  # a node of a word's path in the tree: row and code
WORD_BYTES = 180  # CPU memory of a vocabulary word: its string, counts and probabilities
RING_BYTES = 48 << 20  # CPU memory pinned by the staged link

# Memory of a batch on the compute device: bytes that stay, and those needed while it is drawn.
CHUNK_WORD_BYTES, CHUNK_DRAW_BYTES = 8, 24  # a word of a chunk of the text
NEGATIVE_BYTES, NEGATIVE_DRAW_BYTES = 4, 8  # a negative
POOL_BYTES, POOL_DRAW_BYTES = 4, 32  # a word of the pool, which only torch keeps in memory
SAMPLED = 100_000  # words of a vocabulary, at most, from which the rows of a batch are estimated

# GPU memory besides the rows of the tables and batches.
GPU_RESERVE = 512 << 20  # CUDA's modules, scores, and what torch's allocator cannot use
DRAW_BYTES = 12  # a vocabulary word: its share of the negatives, and how often it is kept
INDEX_BYTES = 4  # a table row: its index among the unique rows of a step
ROUTE_BYTES = 20  # a vocabulary word, where several ranks exchange rows: indices and marks
MAP_BYTES = 15  # a table row, where rows are paged: slot, rank by use, marks, lookahead
SORT_BYTES = 48  # a table row, while rows are sorted by use, before the cache is allocated
MOVE_BYTES = 24  # a cache slot: two lists of moves
MAPPED_PART = 512  # the GPU's page tables take one byte for this many of pinned tables
UNUSED_PART = 256  # the allocator leaves one byte unused for this many of the cache
DEVIATIONS = 4  # a cache must hold a page's expected rows and this many standard deviations
PAGES = 3  # pages whose batches are in memory: planned, computing, and the one before

LEAST_COPIED = 256 << 20  # a CPU run waits only tenths of a second while less is written to disk
SHORT = 0.9  # after a failed allocation, assume that this share of the needs is free
SPARE = 1 / 16  # share of the free CPU memory that checkpoint copies leave to the file cache
PLACES = {
    "host": "CPU memory",
    "locked": "locked CPU memory",
    "gpu": "GPU memory",
    "disk": "disk",
    "files": "disk of transfer.table_dir",  # if it is another one
}
LIGHTER = ("RMSprop", "Adagrad", "SGD")  # optimizers with less state than Adam's, in that order
IDS_SHARE = 16  # ids of the text are on a GPU that has this many times their bytes free
# Type of rows by precision, float32 where it is not named.
ROW_TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


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
        if 0 < gpus < share and "W2V_SHARED_GPUS" not in os.environ:  # set by tests alone
            remedy = f"start one a GPU: --gpus {gpus}, or set CUDA_VISIBLE_DEVICES="
            raise ConfigError(f"{share} ranks on a machine of {gpus} GPUs; {remedy}")
        gpu, gpu_free, cupy = "", 0, ""
        if torch.cuda.is_available():
            # torch keeps the memory of earlier tables, for new ones.
            kept = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
            gpu, gpu_free = torch.cuda.get_device_name(), torch.cuda.mem_get_info()[0] + kept
            gpu_free //= -(-share // gpus)
            with contextlib.suppress(ImportError):
                version = cuda_runtime().runtimeGetVersion()
                cupy = f"{version // 1000}.{version % 1000 // 10}"
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

    @property
    def install_cupy(self) -> str:
        """The command that installs the CuPy for torch's CUDA version."""
        return f"pip install 'cupy-cuda{self.cuda_torch.split('.')[0]}x'"

    def __str__(self) -> str:
        host = f"{self.cores} core{'s' * (self.cores > 1)}, {format_bytes(self.host_bytes)}"
        if not self.gpu:
            return f"{host} | no GPU"
        gpu = f"{self.gpu}, {format_bytes(self.gpu_free_bytes)} free"
        cupy = f"CuPy for CUDA {self.cuda_cupy}" if self.cuda_cupy else "no CuPy"
        return f"{host} | {gpu} | torch for CUDA {self.cuda_torch}, {cupy}"


@dataclass(frozen=True, kw_only=True)
class Task:
    """What is trained, what computes it, and how many bytes that takes.

    Bytes are those of one rank, but for the disk, which all ranks share.
    """

    config: Config  # with a value for each `auto` that bytes depend on
    machine: Machine  # this rank's share of it
    vocab: Vocab
    corpus: Corpus
    centers: float = 0.0  # expected in an epoch: the words that subsampling keeps
    optimizer: RowOptimizer
    device: torch.device  # where steps are computed
    kernels: str  # reference, cpu, sequential or cuda
    ranks: Ranks = SINGLE
    engine: str = "resident"  # resident, mapped or staged

    @property
    def words(self) -> int:
        """Words of the vocabulary."""
        words = len(self.vocab.counts)
        return min(words, self.config.vocab.max_final_vocab or words)

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    @property
    def has_own_step(self) -> bool:
        """Whether the kernels step rows themselves; else torch's class does."""
        return bool(self.optimizer.formula) and self.kernels != "reference"

    @property
    def rows(self) -> int:
        """Rows of each table, on all ranks."""
        return table_rows(self.words, self.config.model.hs, self.config.model.negative)

    @property
    def shape(self) -> StepShape:
        """Shape of the whole tables."""
        return StepShape(
            rows=self.rows,
            dim=self.config.model.vector_size,
            dtype=ROW_TYPES.get(self.config.train.precision, torch.float32),
            device=self.device,
            count_pairs=self.optimizer.occurrence_cap > 0,
            world_size=self.ranks.size,
        )

    @property
    def alignment(self) -> int:
        """Bytes that records are padded to."""
        on_cpu = not self.on_gpu and self.shape.dtype == torch.float32
        return CPU_ALIGNMENT if on_cpu else ALIGNMENT

    @property
    def ids_on_gpu(self) -> bool:
        """Whether the ids of the text take little enough GPU memory to be there."""
        return self.on_gpu and IDS_SHARE * self.corpus.ids.nbytes <= self.machine.gpu_free_bytes

    @property
    def record_bytes(self) -> int:
        return self._record_bytes(self.alignment)

    def _record_bytes(self, alignment: int) -> int:
        dim, element = self.shape.dim, self.shape.dtype.itemsize
        return record_width(dim, self.optimizer.states(dim), element, alignment) * element

    @property
    def table_bytes(self) -> int:
        """Bytes of both tables on the rank that holds the most rows."""
        return 2 * self.shape.stride * self.record_bytes

    @property
    def is_hosted(self) -> bool:
        """Whether the tables of a run on a GPU are in CPU memory or in files."""
        return self.engine != "resident"

    @property
    def cache_bytes(self) -> int | None:
        """Bytes of rows that are kept on the GPU; None: all that is left there."""
        return self.config.transfer.gpu_bytes_of(self.table_bytes)

    @property
    def slot_bytes(self) -> int:
        """Bytes of a cache slot."""
        return self.record_bytes + MOVE_BYTES + self.record_bytes // UNUSED_PART

    @property
    def path_lengths(self) -> np.ndarray:
        """The expected length of each word's path: the bits of an ideal code."""
        counts_V = np.maximum(self.vocab.counts[: self.words], 1)
        return np.log2(counts_V.sum() / counts_V) + 1

    def needs(self) -> dict[str, dict[str, int]]:
        """Return the bytes by place and purpose."""
        # The oldest checkpoint is removed when the third is whole.
        checkpoints = 3 if self.config.run.checkpoint_minutes else 1
        formats = len(self.config.run.formats.split(","))
        run_dir, table_dir = self.config.run.dir, self.config.transfer.table_dir
        file_bytes = self.ranks.size * self.table_bytes * bool(table_dir)
        is_one_disk = same_disk(Path(run_dir), Path(table_dir))
        unpadded = self._record_bytes(alignment=self.shape.dtype.itemsize)
        return {
            "host": self._host_needs(),
            "locked": {
                "tables": self.table_bytes * (self.engine == "mapped"),
                "buffers": RING_BYTES * (self.engine == "staged"),
            },
            "gpu": self._gpu_needs() if self.on_gpu else {},
            "disk": {
                "checkpoints": checkpoints * 2 * self.rows * unpadded,
                "vectors": (formats * 4 * self.shape.dim + 32) * self.words,
                "tables": file_bytes * is_one_disk,
            },
            "files": {"tables": file_bytes * (not is_one_disk)},
        }

    def _host_needs(self) -> dict[str, int]:
        compiles = self.on_gpu or self.kernels != "reference"
        plain_on_gpu = self.on_gpu and self.kernels == "reference"
        tables = 0
        if not self.config.transfer.table_dir and (self.is_hosted or not self.on_gpu):
            # A CPU provides no memory for the rows of the input table that no word uses.
            used = self.shape.stride if self.on_gpu else -(-self.words // self.ranks.size)
            tables = self.record_bytes * (self.shape.stride + used)
        # Large vectors are exported block by block; only those that are scored are copied.
        vectors = min(EXPORT_BYTES, 2 * 4 * self.words * self.shape.dim)
        if self.on_gpu or self.ranks.size > 1:
            vectors += 4 * min(self.words, RESTRICT_VOCAB) * self.shape.dim
        return {
            "program": PROGRAM_BYTES
            + (CUDA_BYTES if self.on_gpu else UNUSED_CUDA_BYTES * bool(self.machine.cuda_torch))
            + COMPILER_BYTES * compiles
            + TORCH_CUDA_BYTES * (self.on_gpu and (self.is_hosted or not self.has_own_step))
            + CUBLAS_BYTES * plain_on_gpu
            + REUSED_BYTES * (not (self.on_gpu or self.has_own_step))
            + GAPS_BYTES * (not self.on_gpu and self.kernels == "reference"),
            "tables": tables,
            "buffers": RING_BYTES * (self.engine == "staged"),
            "vocabulary": WORD_BYTES * self.words + self._tree_bytes,
            "vectors": vectors,
            # Freed before vectors are exported, so only the larger of the two counts.
            "batches": 0 if self.on_gpu else max(0, self._batch_bytes() - vectors),
        }

    def _gpu_needs(self) -> dict[str, int]:
        several = self.ranks.size > 1
        rows = 2 * self.shape.stride
        needs = {
            # Ranks have buffers to exchange rows.
            "program": GPU_RESERVE * (4 if several else 1)
            + self.table_bytes // MAPPED_PART * (self.engine == "mapped"),
            "batches": self._batch_bytes(),
            "ids": 4 * len(self.corpus.ids) * self.ids_on_gpu,
            "vocabulary": (DRAW_BYTES + ROUTE_BYTES * several) * self.words
            + INDEX_BYTES * rows
            + self._tree_bytes,
        }
        if not self.is_hosted:
            return needs | {"tables": self.table_bytes}
        # An automatic cache takes what is left; it only needs the memory to be set up.
        slots = min(rows, (self.cache_bytes or 0) // self.record_bytes)
        cache = max(self.slot_bytes * slots, SORT_BYTES * rows)
        return needs | {"cache maps": MAP_BYTES * rows, "cache": cache}

    @property
    def _tree_bytes(self) -> int:
        if not self.config.model.hs:
            return 0
        return PATH_BYTES * int(self.path_lengths.sum()) + 8 * self.words

    def _batch_bytes(self) -> int:
        """Return the bytes of batches and gradients on the compute device.

        What stays between steps, and the larger of what drawing a batch and a step take meanwhile.
        """
        model, shape, kernels = self.config.model, self.shape, self.kernels
        dim = shape.dim
        batch_size = -(-self.config.train.batch_size // shape.world_size)
        centers = min(batch_size, int(self.centers))
        drawn = centers * model.negative
        chunk = min(chunk_words(batch_size), len(self.corpus.ids))
        window = reach(model.window, self.corpus.offsets)
        depth = math.ceil(self.path_lengths.max()) if model.hs else 0
        # The next batches are drawn while this one is still there.
        batches = 1 + EARLY_BATCHES if self.centers > centers else 1
        stay = CHUNK_WORD_BYTES * chunk + NEGATIVE_BYTES * batches * drawn
        drawing = max(CHUNK_DRAW_BYTES * chunk, NEGATIVE_DRAW_BYTES * drawn)
        gradient = 4 * dim + 8  # with its row and pairs
        step = 0
        if kernels == "cuda":
            # Buffers for the most rows that a batch may touch; larger ones are allocated beside
            # them. The batches of several pages are under way, and those drawn with them.
            distinct = model.distinct_negatives(centers)
            most = max_rows(centers, distinct, window, depth, self.words)
            under_way = PAGES * MOST_STEPS * centers + 2 * min(DRAWN_AT_ONCE, chunk)
            stay += 4 * (1 + model.negative) * under_way
            if self.has_own_step:
                stay += 2 * gradient * sum(min(shape.stride, rows) for rows in most)
        elif kernels == "cpu":
            threads = torch.get_num_threads()
            touched = self.touched(-(-centers // threads))
            gradient = 4 * padded(dim, 4, CPU_ALIGNMENT) + 16  # with its row, pairs and owner
            stay += 8 * self.rows * (threads + 1) + gradient * threads * sum(touched)
            if not self.has_own_step:  # the summed gradients are copied; at most so many
                step = 4 * dim * threads * max(touched)
        elif kernels == "reference":  # products of all pairs
            pool = max(0, model.negative_pool)
            stay += POOL_BYTES * pool
            drawing = max(drawing, POOL_DRAW_BYTES * pool)
            step = 8 * centers * (2 * window + 1 + model.negative + depth) * dim
        if not self.has_own_step:
            if self.on_gpu:  # gradients of all batches under way, and indices of rows
                batches = PAGES * (MOST_STEPS if self.is_hosted else 1)
                stay += batches * (gradient * sum(self.touched(centers)) + 8 * self.rows)
            # torch steps copies of a table's rows.
            step += max(self.touched(centers)) * (4 * dim + 3 * self.record_bytes)
        return stay + max(drawing, step)

    def touched(self, centers: int) -> tuple[int, int]:
        """Return the expected unique rows of that many centers, in each table."""
        model = self.config.model
        total = self.vocab.counts[: self.words].sum()
        every = -(-self.words // SAMPLED)
        # A sample of the words: each stands for `every` words around it.
        counts_V = self.vocab.counts[every // 2 : self.words : every].astype(np.float64)
        kept_V = counts_V * keep_probabilities(counts_V, total, model.sample)
        uses_V = (centers + 2 * reach(model.window, self.corpus.offsets)) * kept_V / kept_V.sum()

        def unique(uses_V: np.ndarray) -> int:  # expected, each word being drawn independently
            return int(every * -np.expm1(-uses_V / every).sum())

        inputs = unique(uses_V)
        outputs = 0
        if model.negative:  # a word that is a center and a negative has one row
            prob_V = negative_distribution(counts_V, model.ns_exponent)
            drawn_V = expected_negatives(model, centers, self.shape.world_size) * prob_V
            outputs = unique(uses_V + drawn_V)
        if model.hs and inputs:
            # Paths to n of V words share the nodes above the level of n nodes.
            outputs += int(min(self.words, inputs * (1 + max(0, math.log2(self.words / inputs)))))
        return inputs, min(self.rows, outputs)


def fitting_batch_size(task: Task, slots: int) -> int:
    """Return the batch size, halved until a page fits into the cache.

    Rows are estimated for words in random order. A text repeats words, so its pages have fewer.
    `slots` is the capacity of the cache on all ranks.
    """
    size, steps = task.config.train.batch_size, max(1, task.config.transfer.steps_per_page)
    while size > 1:
        rows = sum(task.touched(steps * size))
        if rows + DEVIATIONS * math.sqrt(rows) <= slots:
            break
        size //= 2
    return size


@dataclass(frozen=True)
class Budget:
    """A task and the bytes that are free for it, by place."""

    task: Task
    free: Mapping[str, float]  # of each of PLACES

    def check(self) -> None:
        """Raise `DoesNotFit` if some place lacks bytes."""
        if places := self.lacking(self.task):
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
            place = "gpu" if self.task.on_gpu and _is_of_gpu(error) else "host"
            changes = self._with_less(place).changes()
            message = self._explain(f"memory ran out ({reason})", changes)
            if run:
                change = next((one for one in changes if one.startswith("transfer.")), None)
                command = " ".join(["w2v train --resume", quote(str(run)), *filter(None, [change])])
                message += f"; this run goes on with {command}"
                message += "" if change else ", when more memory is free"
            raise DoesNotFit(message) from None

    def _with_less(self, place: str) -> Budget:
        """Return this budget, with less free memory than is needed in a place."""
        task = self.task
        if task.is_hosted:  # an automatic cache takes what there was
            cache_bytes = str(self.slots * task.record_bytes)
            task = replace(task, config=_with(task.config, "transfer.gpu_bytes", cache_bytes))
        short = SHORT * sum(task.needs()[place].values())
        return Budget(task, {**self.free, place: min(short, self.free[place])})

    def lacking(self, task: Task) -> list[str]:
        """Return the places where the task does not fit."""
        needs = task.needs().items()
        return [place for place, parts in needs if sum(parts.values()) > self.free[place]]

    def changes(self) -> list[str]:
        """Return the smallest single changes that would make the task fit."""
        task, config = self.task, self.task.config
        lacking = self.lacking(task)
        changes = []

        def fits(key: str, value: Any) -> bool:
            return not self.lacking(replace(task, config=_with(config, key, value)))

        def find(key: str, below: int, spelled: Callable[[int], Any] = lambda n: n) -> None:
            """Add the largest value of a key in [2, below) that fits, if any."""

            def too_large(number: int) -> bool:
                return not fits(key, spelled(number))

            largest = 1 + bisect.bisect_left(range(2, below), True, key=too_large)
            if largest > 1:
                unit = 10 ** max(0, len(str(largest)) - 3)  # 3 digits are enough
                changes.append(f"{key}={spelled(largest // unit * unit)}")

        find("vocab.max_final_vocab", task.words)
        find("model.vector_size", config.model.vector_size)
        find("train.batch_size", config.train.batch_size)
        for name in LIGHTER:
            other = RowOptimizer(replace(config.optimizer, name=name, args={}))
            if not self.lacking(replace(task, optimizer=other)):
                changes.append(f"optimizer.name={name}")
                break
        if "gpu" in lacking or "locked" in lacking:
            for name in ("mapped", "staged"):
                if name != task.engine and not self.lacking(replace(task, engine=name)):
                    changes.append(f"transfer.engine={name}")
                    break
            kept = task.cache_bytes or 0
            shift, unit = (20, "MiB") if kept >> 30 else (10, "KiB")
            find("transfer.gpu_bytes", kept >> shift, lambda n: f"{n}{unit}")
        if lacking == ["host"] and not task.on_gpu and fits("transfer.table_dir", "FOLDER"):
            changes.append("transfer.table_dir=FOLDER")
        if lacking == ["disk"]:
            if fits("run.checkpoint_minutes", 0.0):
                changes.append("run.checkpoint_minutes=0")
            changes.append("run.dir=FOLDER on a larger disk")
        if lacking == ["files"]:
            changes.append("transfer.table_dir=FOLDER on a larger disk")
        return changes

    @property
    def takes(self) -> dict[str, dict[str, int]]:
        """Bytes by place and purpose, with copies and a cache of what is left."""
        needs = self.task.needs()
        needs["host"]["copies"] = self.copies
        if self.task.is_hosted:
            needs["gpu"]["cache"] = self.task.slot_bytes * self.slots
        return {place: parts for place, parts in needs.items() if any(parts.values())}

    @property
    def slots(self) -> int:
        """Capacity of the GPU cache in rows.

        Resident tables have all rows on the GPU. An automatic cache gets what all other needs leave
        of the free memory.
        """
        task, rows = self.task, 2 * self.task.shape.stride
        if not task.is_hosted:
            return rows if task.on_gpu else 0
        if task.cache_bytes is not None:
            return min(rows, task.cache_bytes // task.record_bytes)
        needs = task.needs()["gpu"]
        left = int(self.free["gpu"]) - sum(needs.values()) + needs["cache"]
        return max(0, min(rows, left // task.slot_bytes))

    @property
    def copies(self) -> int:
        """Bytes of CPU memory for copies of the tables.

        Copied files are written while training goes on: as many are copied as fit.
        """
        tables, config = self.task.table_bytes, self.task.config
        if not config.run.checkpoint_minutes or self._small:
            return 0
        # Tables in files need the file cache to be fast, so it is not used for copies.
        cached = tables if config.transfer.table_dir else 0
        needs = sum(self.task.needs()["host"].values()) + cached
        room = self.free["host"] * (1 - SPARE) - needs
        return tables if room >= tables else max(0, int(room) // FILE_BYTES * FILE_BYTES)

    @property
    def saving(self) -> str:
        """Whether training waits while a checkpoint is written, and why."""
        tables, copies = self.task.table_bytes, self.copies
        run = self.task.config.run
        if not run.checkpoint_minutes:
            end = "when training is over" if run.final_checkpoint else "if a signal ends training"
            return f"one checkpoint, {end}"
        if copies == tables:
            return "checkpoints are written while training goes on, from a copy of the tables"
        why = f"memory has room to copy {format_bytes(copies)} of {format_bytes(tables)}"
        why = "small tables are written faster than copied" if self._small else why
        return f"checkpoints are written while training waits: {why}"

    @property
    def _small(self) -> bool:
        return not self.task.on_gpu and self.task.table_bytes < LEAST_COPIED

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
        config = self.task.config
        folder = {"disk": config.run.dir, "files": config.transfer.table_dir}.get(place)
        where = f" in {folder}" if folder else ""
        return f"{format_bytes(sum(needs.values()))}{of}{where}"

    def _explain(self, problem: str, changes: list[str]) -> str:
        """Return the problem, the bytes and changes that help, on one line."""
        needs = "; ".join(" ".join(line.split()) for line in str(self).splitlines())
        remedy = "no single change is enough: take a larger machine"
        if changes:
            remedy = f"it would fit with {' or '.join(changes)}"
        return f"{problem}: {needs}; {remedy}"


def _with(config: Config, key: str, value: Any) -> Config:
    """Return the config with another value of one key."""
    section, name = key.split(".")
    return replace(config, **{section: replace(getattr(config, section), **{name: value})})


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
