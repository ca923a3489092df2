"""What this machine has, and an estimate of what a run needs.

An estimate is the tables, the working memory of the kernels and a fixed part. It is 1 to 1.5 times
what the run takes. An automatic GPU cache gets what the estimate leaves free.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from shlex import quote

import numpy as np
import torch

from w2v.config import Config, ConfigError
from w2v.distributed.ranks import SINGLE, Ranks
from w2v.rows.launch import cuda_runtime, has_cupy
from w2v.rows.optim import RowOptimizer
from w2v.rows.table import ALIGNMENT, CPU_ALIGNMENT, pinning_is_limited, record_width
from w2v.system.files import one_line
from w2v.system.process import cores
from w2v.system.resources import UNLIMITED, format_bytes, free_host_bytes, lockable_bytes, same_disk
from w2v.text.corpus import Corpus
from w2v.text.vocab import Vocab, keep_probabilities
from w2v.vectors.datasets import RESTRICT_VOCAB
from w2v.vectors.export import EXPORT_BYTES
from w2v.word2vec.batch import StepShape, chunk_words, max_rows, output_vectors
from w2v.word2vec.sampler import EARLY_BATCHES, expected_negatives, negative_distribution, reach
from w2v.word2vec.subwords import Subwords

MIB = 1 << 20
# The fixed part of CPU memory.
PROGRAM_BYTES = 440 * MIB  # torch, and what allocators keep
COMPILER_BYTES = 80 * MIB  # more while numba compiles kernels
UNUSED_CUDA_BYTES = 300 * MIB  # more with torch's CUDA libraries, where a CPU computes
CUDA_BYTES = 1000 * MIB  # more with CUDA's context and libraries, cuBLAS for scores included
TORCH_CUDA_BYTES = 470 * MIB  # more with torch's kernels, where it pages or steps rows
RING_BYTES = 48 * MIB  # pinned by the staged link
WORD_BYTES = 180  # a vocabulary word: its string, counts and probabilities
NGRAM_BYTES, NGRAM_GPU_BYTES = 40, 4  # an n-gram of a word: its row, also while it is found
PATH_BYTES = 5  # a node of a word's path in the tree: row and code

# Memory of batches on the compute device, beside that of the kernels.
CHUNK_WORD_BYTES = 32  # a word of a chunk of the text, also while it is subsampled
NEGATIVE_BYTES = 4 * (1 + EARLY_BATCHES) + 8  # of the batches drawn ahead, and while one is drawn
POOL_BYTES = 36  # a word of the pool of negatives, which plain torch keeps in memory
SAMPLED = 100_000  # words of a vocabulary, at most, from which the rows of a batch are estimated
PAGES = 3  # pages whose batches are in memory: planned, computing, and the one before
MOST_STEPS = 8  # of a page, a power of two: with more the CPU saves nothing that can be measured

# GPU memory besides the rows of the tables and batches.
GPU_RESERVE = 512 * MIB  # CUDA's modules, scores, and what torch's allocator cannot use
WORD_GPU_BYTES = 12  # a vocabulary word: its share of the negatives, and how often it is kept
INDEX_BYTES = 4  # a table row: its index among the unique rows of a step
ROUTE_BYTES = 20  # a vocabulary word, where several ranks exchange rows: indices and marks
MAP_BYTES = 11  # a table row, where rows are paged: slot, uses, marks, lookahead
MOVE_BYTES = 24  # a cache slot: two lists of moves
MAPPED_PART = 512  # the GPU's page tables take one byte for this many of pinned tables
UNUSED_PART = 256  # the allocator leaves one byte unused for this many of the cache
IDS_SHARE = 16  # ids of the text are on a GPU that has this many times their bytes free

PRODUCTS_PER_THREAD = 1 << 20  # of a step on the CPU; with fewer, threads cost more than they gain
LEAST_COPIED = 256 * MIB  # a CPU run waits only tenths of a second while less is written to disk
DEVIATIONS = 4  # a cache must hold a page's expected rows and this many standard deviations
SPARE = 1 / 16  # share of the free CPU memory that checkpoint copies leave to the file cache
# Type of rows by precision, float32 where it is not named.
ROW_TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
# What is counted, with remedies where there is too little.
PLACES = {
    "host": "CPU memory",
    "locked": "locked CPU memory",
    "gpu": "GPU memory",
    "disk": "disk space",
    "files": "disk space of transfer.table_dir",  # if it is another disk
}
SMALLER = "a smaller vocab.max_final_vocab, model.vector_size or train.batch_size"
REMEDIES = {
    "host": f"set {SMALLER}, or transfer.table_dir=FOLDER",
    "locked": "set transfer.engine=staged, or raise ulimit -l",
    "gpu": f"set transfer.engine=mapped or staged, or {SMALLER}",
    "disk": "set run.dir=FOLDER on a larger disk, or run.checkpoint_minutes=0",
    "files": "set transfer.table_dir=FOLDER on a larger disk",
}


class DoesNotFit(MemoryError):
    """The run needs more than there is; names the place and remedies."""


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
        gpus = torch.cuda.device_count()
        share = ranks.local_size
        if 0 < gpus < share and "W2V_SHARED_GPUS" not in os.environ:  # set by tests alone
            remedy = f"start one a GPU: --gpus {gpus}, or set CUDA_VISIBLE_DEVICES="
            raise ConfigError(f"{share} ranks on a machine of {gpus} GPUs; {remedy}")
        gpu = cupy = ""
        gpu_free = 0
        if torch.cuda.is_available():
            # torch keeps the memory of earlier tables, for new ones.
            kept = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
            gpu = torch.cuda.get_device_name()
            gpu_free = (torch.cuda.mem_get_info()[0] + kept) // -(-share // gpus)
            if has_cupy():
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

    def __str__(self) -> str:
        host = f"{self.cores} core{'s' * (self.cores > 1)}, {format_bytes(self.host_bytes)}"
        if not self.gpu:
            return f"{host} | no GPU"
        gpu = f"{self.gpu}, {format_bytes(self.gpu_free_bytes)} free"
        cupy = f"CuPy for CUDA {self.cuda_cupy}" if self.cuda_cupy else "no CuPy"
        return f"{host} | {gpu} | torch for CUDA {self.cuda_torch}, {cupy}"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is trained, what computes it and why, and the bytes it takes.

    Bytes are those of one rank, but for the disk, which all ranks share. Device, kernels, engine
    and slots are what the config's `auto` became on this machine.
    """

    config: Config  # with a value for each `auto` that depends on the text alone
    machine: Machine  # this rank's share of it
    vocab: Vocab
    corpus: Corpus
    centers: float = 0.0  # expected in an epoch: the words that subsampling keeps
    optimizer: RowOptimizer
    device: torch.device  # where steps are computed
    kernels: str  # reference, cpu, sequential or cuda
    subwords: Subwords | None = None
    ranks: Ranks = SINGLE
    engine: str = "resident"  # resident, mapped or staged
    slots: int = 0  # capacity of the GPU cache in rows; with resident tables, all rows
    free: Mapping[str, float] = field(default_factory=dict)  # bytes in each of PLACES
    reason: str = ""  # why this engine
    chosen: Mapping[str, str] = field(default_factory=dict)  # for `auto`, by key: what, and why

    @property
    def words(self) -> int:
        """Words of the vocabulary."""
        return len(self.vocab.counts)

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    @property
    def has_own_step(self) -> bool:
        """Whether the kernels step rows themselves; else torch's class does."""
        return bool(self.optimizer.formula) and self.kernels != "reference"

    @property
    def vectors(self) -> int:
        """Input vectors of all ranks, and as many output vectors."""
        return output_vectors(self.words, self.config.model.hs, self.config.model.negative)

    @property
    def subword_rows(self) -> int:
        """Rows of words' own vectors and of n-grams."""
        return self.subwords.rows if self.subwords else 0

    @property
    def shape(self) -> StepShape:
        """Shape of the whole table."""
        return StepShape(
            vectors=self.vectors + -(-self.subword_rows // 2),
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
        dim = self.shape.dim
        element = self.shape.dtype.itemsize
        return record_width(dim, self.optimizer.states(dim), element, alignment) * element

    @property
    def table_bytes(self) -> int:
        """Bytes of the rows of the rank that holds the most."""
        return self.shape.shard_rows * self.record_bytes

    @property
    def is_hosted(self) -> bool:
        """Whether the tables of a run on a GPU are in CPU memory or in files."""
        return self.engine != "resident"

    @property
    def is_paged(self) -> bool:
        """Whether the GPU has no room for some rows."""
        return self.is_hosted and self.slots < self.shape.shard_rows

    @property
    def threads(self) -> int:
        """How many of torch's threads the steps of a run on a CPU keep busy."""
        model = self.config.model
        pairs = self.config.train.batch_size * model.window * (1 + model.negative)
        busy = pairs * model.vector_size // PRODUCTS_PER_THREAD
        return max(1, min(torch.get_num_threads(), busy))

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
        counts_V = np.maximum(self.vocab.counts, 1)
        return np.log2(counts_V.sum() / counts_V) + 1

    def capacity(self) -> int:
        """Return the capacity of the GPU cache in rows.

        Resident tables have all rows on the GPU. An automatic cache gets the free memory that is
        not needed otherwise.
        """
        rows = self.shape.shard_rows
        if not self.is_hosted:
            return rows * self.on_gpu
        if self.given_slots is not None:
            return self.given_slots
        needs = self.needs()["gpu"]
        left = int(self.free["gpu"]) - sum(needs.values()) + needs["cache"]
        return max(0, min(rows, left // self.slot_bytes))

    def lacking(self) -> list[str]:
        """Return the places that have less free than the run needs."""
        needs = self.needs().items()
        return [place for place, parts in needs if sum(parts.values()) > self.free[place]]

    def check(self, saves: bool = True) -> None:
        """Raise `DoesNotFit` if some place lacks bytes.

        saves: whether checkpoints and vectors are written.
        """
        takes = self.takes()
        lacking = [place for place in self.lacking() if saves or place != "disk"]
        if lacking:
            totals = (f"{PLACES[place]}: {self.total(place, takes[place])}" for place in lacking)
            raise DoesNotFit(f"not enough {' and '.join(totals)}; {REMEDIES[lacking[0]]}")

    def total(self, place: str, parts: Mapping[str, int]) -> str:
        """Return the bytes that the run takes of a place, and what is free."""
        words = format_bytes(sum(parts.values()))
        if self.free[place] < UNLIMITED:
            words += f" of {format_bytes(self.free[place])} free"
        if place == "disk":
            words += f" in {self.config.run.dir}"
        return words

    def takes(self) -> dict[str, dict[str, int]]:
        """Return what is needed, with the cache and copies for checkpoints."""
        needs = self.needs()
        needs["host"]["copies"] = self.copies
        if self.is_hosted:
            needs["gpu"]["cache"] = self.slot_bytes * self.slots
        return {place: parts for place, parts in needs.items() if any(parts.values())}

    @property
    def copies(self) -> int:
        """Bytes for a copy of the table, written while training goes on."""
        tables = self.table_bytes
        if not self.config.run.checkpoint_minutes or self.is_small:
            return 0
        needs = sum(self.needs()["host"].values())
        if self.config.transfer.table_dir:
            needs += tables  # for the file cache, which makes tables in files fast
        room = self.free["host"] * (1 - SPARE) - needs
        return tables if room >= tables else 0

    @property
    def is_small(self) -> bool:
        """Whether tables are written to disk as fast as they would be copied."""
        return not self.on_gpu and self.table_bytes < LEAST_COPIED

    def needs(self) -> dict[str, dict[str, int]]:
        """Return the estimated bytes by place and purpose."""
        # The oldest checkpoint is removed when the third is whole.
        checkpoints = 3 if self.config.run.checkpoint_minutes else 1
        formats = self.config.run.formats.split(",")
        rows = len(formats) * self.words
        if self.subwords:  # fastText's file has them again, beside output vectors
            rows += (self.words + self.config.model.buckets) * (1 + ("fasttext" in formats))
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
            "gpu": self._gpu_needs(),
            "disk": {
                "checkpoints": checkpoints * self.shape.rows * unpadded,
                "vectors": 4 * self.shape.dim * rows + 32 * self.words,
                "tables": file_bytes * is_one_disk,
            },
            "files": {"tables": file_bytes * (not is_one_disk)},
        }

    def _host_needs(self) -> dict[str, int]:
        program = PROGRAM_BYTES
        if self.on_gpu or self.kernels != "reference":
            program += COMPILER_BYTES
        if self.on_gpu:
            program += CUDA_BYTES + TORCH_CUDA_BYTES * (self.is_hosted or not self.has_own_step)
        elif self.machine.cuda_torch:
            program += UNUSED_CUDA_BYTES
        tables = 0
        if not self.config.transfer.table_dir and (self.is_hosted or not self.on_gpu):
            tables = self.table_bytes
        # Large vectors are exported block by block; only those that are scored are copied.
        vectors = min(EXPORT_BYTES, 2 * 4 * self.words * self.shape.dim)
        if self.on_gpu or self.ranks.size > 1:
            vectors += 4 * min(self.words, RESTRICT_VOCAB) * self.shape.dim
        return {
            "program": program,
            "tables": tables,
            "buffers": RING_BYTES * (self.engine == "staged"),
            "vocabulary": WORD_BYTES * self.words + self._tree_bytes + self._ngrams(NGRAM_BYTES),
            "vectors": vectors,
            # Freed before vectors are exported, so only the larger of the two counts.
            "batches": max(0, self.batch_bytes() - vectors) * (not self.on_gpu),
        }

    def _gpu_needs(self) -> dict[str, int]:
        if not self.on_gpu:
            return {}
        reserve = GPU_RESERVE
        word_bytes = WORD_GPU_BYTES
        if self.ranks.size > 1:  # buffers to exchange rows
            reserve *= 4
            word_bytes += ROUTE_BYTES
        rows = self.shape.shard_rows
        needs = {
            "program": reserve + self.table_bytes // MAPPED_PART * (self.engine == "mapped"),
            "batches": self.batch_bytes(),
            "ids": 4 * len(self.corpus.ids) * self.ids_on_gpu,
            "vocabulary": word_bytes * self.words
            + INDEX_BYTES * rows
            + self._tree_bytes
            + self._ngrams(NGRAM_GPU_BYTES),
        }
        if not self.is_hosted:
            return needs | {"tables": self.table_bytes}
        # An automatic cache takes what is left.
        slots = self.given_slots or 0
        return needs | {"cache maps": MAP_BYTES * rows, "cache": self.slot_bytes * slots}

    def _ngrams(self, each: int) -> int:
        """Return the bytes of the n-grams of all words."""
        return each * len(self.subwords.rows_N) if self.subwords else 0

    @property
    def given_slots(self) -> int | None:
        """Capacity of the cache in rows, as configured; None if it is automatic."""
        rows = self.shape.shard_rows
        if self.cache_bytes is None:
            return None
        if self.cache_bytes:
            return min(rows, self.cache_bytes // self.record_bytes)
        # None are kept from page to page: there is room for one, of all ranks.
        steps = max(1, self.config.transfer.steps_per_page)
        return min(rows, self.most_page_rows(self.config.train.batch_size, steps))

    def most_page_rows(self, batch_size: int, steps: int) -> int:
        """Return the most rows that a page of so many batches may touch."""
        of_tables = self._most_rows(steps * batch_size, steps)
        return sum(min(self.vectors, rows) for rows in of_tables) + self.subword_rows

    def _most_rows(self, centers: int, steps: int = 1) -> tuple[int, int]:
        """Return the most input and output rows that some steps may touch."""
        model = self.config.model
        negatives = model.distinct_negatives(centers, steps)
        window = reach(model.window, self.corpus.offsets)
        depth = math.ceil(self.path_lengths.max()) if model.hs else 0
        return max_rows(centers, negatives, window, depth, self.words)

    @property
    def _tree_bytes(self) -> int:
        if not self.config.model.hs:
            return 0
        return PATH_BYTES * int(self.path_lengths.sum()) + 8 * self.words

    def batch_bytes(self) -> int:
        """Return the bytes of batches and gradients on the compute device."""
        model, dim = self.config.model, self.shape.dim
        batch_size = -(-self.config.train.batch_size // self.ranks.size)
        centers = min(batch_size, int(self.centers))
        chunk = min(chunk_words(batch_size), len(self.corpus.ids))
        window = reach(model.window, self.corpus.offsets)
        depth = math.ceil(self.path_lengths.max()) if model.hs else 0
        found = CHUNK_WORD_BYTES * chunk + NEGATIVE_BYTES * centers * model.negative
        gradient = 4 * dim + 16  # with its row, pairs and owner
        if self.kernels == "cuda":
            # Buffers for the most rows that a batch may touch; the batches of several pages.
            most = self._most_rows(centers)
            found += 4 * (1 + model.negative) * (PAGES * MOST_STEPS * centers + chunk)
            found += 2 * gradient * sum(min(self.shape.shard_rows // 2, rows) for rows in most)
            found += gradient * self.subword_rows
        elif self.kernels == "reference":  # products of all pairs
            found += POOL_BYTES * max(0, model.negative_pool)
            found += 8 * centers * (2 * window + 1 + model.negative + depth) * dim
        elif self.kernels == "cpu":  # an index of each row, and gradients, of each thread
            threads = self.threads
            found += 4 * self.shape.rows * (threads + 1)
            # Several ranks send and receive weights and gradients, and sum these again.
            arrays = 2 + 4 * (self.ranks.size > 1)
            found += arrays * gradient * threads * sum(self.touched(-(-centers // threads)))
        if not self.has_own_step:
            rows = sum(self.touched(centers))
            if self.on_gpu:  # gradients of all batches under way, and indices of rows
                batches = PAGES * (1 + (MOST_STEPS - 1) * self.is_hosted)
                found += batches * (gradient * rows + 8 * self.vectors)
            found += rows * (4 * dim + 3 * self.record_bytes)  # torch steps copies
        return found

    def touched(self, centers: int, steps: int = 1) -> tuple[int, int]:
        """Return the expected unique rows of some steps' centers, by table."""
        model = self.config.model
        total = self.vocab.counts.sum()
        every = -(-self.words // SAMPLED)
        # A sample of the words: each stands for `every` words around it.
        counts_V = self.vocab.counts[every // 2 :: every].astype(np.float64)
        kept_V = counts_V * keep_probabilities(counts_V, total, model.sample)
        uses_V = (centers + 2 * reach(model.window, self.corpus.offsets)) * kept_V / kept_V.sum()

        def unique(uses_V: np.ndarray) -> int:  # expected, each word being drawn independently
            return int(every * -np.expm1(-uses_V / every).sum())

        inputs = unique(uses_V)
        if self.subwords:
            like_V = np.minimum(np.arange(self.subwords.words) // every, len(uses_V) - 1)
            inputs += int(self.subwords.expected_rows(uses_V[like_V] / every))
        outputs = 0
        if model.negative:  # a word that is a center and a negative has one row
            prob_V = negative_distribution(counts_V, model.ns_exponent)
            drawn_V = expected_negatives(model, centers, self.ranks.size, steps) * prob_V
            outputs = unique(uses_V + drawn_V)
        if model.hs and inputs:
            # Paths to n of V words share the nodes above the level of n nodes.
            outputs += int(min(self.words, inputs * (1 + max(0, math.log2(self.words / inputs)))))
        return inputs, min(self.vectors, outputs)


def fitting_batch_size(plan: Plan, slots: int) -> int:
    """Return the batch size, halved until a page fits into the cache.

    Rows are estimated for words in random order. A text repeats words, so its pages have fewer.
    `slots` is the capacity of the cache on all ranks.
    """
    size = plan.config.train.batch_size
    steps = max(1, plan.config.transfer.steps_per_page)
    while size > 1:
        rows = sum(plan.touched(steps * size, steps))
        if min(rows + DEVIATIONS * math.sqrt(rows), plan.most_page_rows(size, steps)) <= slots:
            break
        size //= 2
    return size


@contextlib.contextmanager
def explained(plan: Plan, run: Path | None = None) -> Iterator[None]:
    """Raise `DoesNotFit` if an allocation in the block fails nevertheless.

    run: the folder of a run that has begun, which can be resumed.
    """
    try:
        yield
    except (MemoryError, RuntimeError, OSError) as error:
        if isinstance(error, DoesNotFit) or not _is_out_of_memory(error):
            raise
        raised_by = f"{type(error).__module__} {error}".lower()  # torch, CuPy or the driver
        place = "gpu" if plan.on_gpu and ("cuda" in raised_by or "cupy" in raised_by) else "host"
        remedy = REMEDIES[place]
        if run:  # whose tables must stay as they are
            remedy = f"continue with w2v train --resume {quote(str(run))}"
            if place == "gpu":
                remedy += " transfer.gpu_bytes=50%"
            elif not plan.config.transfer.table_dir:
                remedy += " transfer.table_dir=FOLDER"
            else:
                remedy += ", when more memory is free"
        problem = f"{PLACES[place]} ran out ({one_line(error)[:200]})"
        takes = plan.total(place, plan.takes()[place])
        raise DoesNotFit(f"{problem}: {takes}; {remedy}") from None


def _is_out_of_memory(error: Exception) -> bool:
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    # Of torch on the CPU, and of CUDA.
    return "can't allocate memory" in str(error) or "out of memory" in str(error)
