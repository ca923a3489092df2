"""Embedding tables: one contiguous record per row.

A record is the weight of a row, followed by its optimizer state.

Shapes: V rows, D dimensions, U unique rows, R elements of a record, padding included.
"""

from __future__ import annotations

import copy
import math
import mmap
import resource
import weakref
from collections.abc import Callable, Mapping
from numbers import Integral
from pathlib import Path
from typing import Literal, NamedTuple, get_args

import numpy as np
import torch
from torch import Tensor

from w2v.rows.file import NPY_TYPES, RowFile
from w2v.rows.launch import INSTALL_CUPY, cuda_runtime
from w2v.system.process import on_threads
from w2v.system.random import mix, shift_right, splitmix64

ALIGNMENT = 128  # bytes that a GPU reads from host memory at a time
CPU_ALIGNMENT = 64  # bytes of a cache line, and of the widest vectors
# Elements initialised at a time: many on a GPU, for few launches; few on a CPU, to stay in cache.
INIT_CHUNK = {"cuda": 1 << 21, "cpu": 1 << 15}
TOUCH_BYTES = 64 << 20  # memory that one thread allocates at a time

Storage = Literal["cpu", "cuda", "pinned", "mmap"]
Init = Callable[[Tensor], Tensor]  # row ids [n] -> weights [n, D]


class RowState(NamedTuple):
    """Number of elements and initial value of an optimizer state."""

    width: int
    initial: float
    counts: bool = False  # a row's own steps, for which 16 bits are too few


class Table:
    """V records of a D-dimensional weight and its optimizer state.

    With storage="mmap" the records are in the file `path`, and their layout and the scalars in
    `<path>.json`; a table without state may also be an .npy file [V, D]. An existing file of the
    same layout is continued. A new file gets its name at the first `flush`, so it is never
    incomplete. A file is locked: a second table or process is refused. After `flush` everything is
    on disk. If the process is killed later, each row is as of the last flush or a later write, and
    the scalars are as of the last flush, of which the next opener is warned. If the machine
    crashes, rows written since the flush may be damaged.

    float16 cannot hold squared gradients below 6e-8: optimizers that keep them need bfloat16.

    Raises `ValueError` for an unusable argument or file, `MemoryError` where memory cannot be
    pinned, and `OSError` where the disk is full.
    """

    def __init__(
        self,
        name: str,  # in checkpoints
        rows: int,
        dim: int,
        states: Mapping[str, RowState],  # of each row, in the order of the record
        scalars: Mapping[str, Tensor],  # state kept once, such as Adam's step; copied
        storage: Storage,  # "pinned" is CPU memory that a GPU reads in place
        dtype: torch.dtype = torch.float32,
        path: str | Path | None = None,  # the file of "mmap"
        alignment: int = ALIGNMENT,  # bytes of which a record has a multiple; a GPU needs 128
        memory_VR: Tensor | None = None,  # for the records, if there is some in this storage
    ):
        check_table(rows, dim, states, storage, dtype, path)
        self.name = name
        self.rows = rows
        self.dim = dim
        self.storage = storage
        self.dtype = dtype
        self.columns = record_columns(dim, states)
        self.width = record_width(dim, states, dtype.itemsize, alignment)
        self.scalars = {key: value.clone() for key, value in scalars.items()}
        if dtype == torch.bfloat16:  # the number of writes seeds the stochastic rounding
            self.scalars["writes"] = torch.zeros((), dtype=torch.int64, device="cpu")
        self._file = None
        if path is not None:
            self._file = RowFile(Path(path), rows, self.width, self.columns, dtype, self.scalars)
            self.records_VR = self._file.records_VR
        elif memory_VR is not None:
            self.records_VR = memory_VR
        elif storage == "cuda":
            self.records_VR = torch.zeros(rows, self.width, dtype=dtype, device=storage)
        else:
            memory = host_memory(rows * self.width * dtype.itemsize)
            if storage == "pinned":
                pin(memory)
            self.records_VR = torch.from_numpy(memory).view(dtype).view(rows, self.width)
        self.width = self.records_VR.shape[1]  # an .npy file has no padding
        self.continued = self._file is not None and self._file.continued
        for key, state in states.items():
            if state.initial and not self.continued:  # new records are zero
                self[key].fill_(state.initial)

    def __getitem__(self, name: str) -> Tensor:
        """Return a view [V, D] or [V, 1] of "weight" or of an optimizer state."""
        return self.records_VR[:, self.columns[name]]

    @property
    def saved_VR(self) -> Tensor:
        """Return the records without padding, as files hold them."""
        return self.records_VR[:, : max(part.stop for part in self.columns.values())]

    @property
    def parts(self) -> list[Table]:
        """This table; of a split one, that of the weights and that of the states."""
        return [self]

    @property
    def bytes(self) -> int:
        """Size of all records, those of the states included."""
        return sum(part.records_VR.nbytes for part in self.parts)

    def interleaved(self, *names: str) -> tuple[Table, ...]:
        """Return views of the table as several, whose rows are here in turn."""
        tables = []
        for first, name in enumerate(names):
            table = copy.copy(self)  # shares the scalars
            table.name = name
            table.rows = self.rows // len(names)
            table.records_VR = self.records_VR[first :: len(names)]
            tables.append(table)
        return tuple(tables)

    def initialise(
        self,
        values: Init,
        device: torch.device | None = None,
        threads: int = 1,
        first_row: int = 0,
        last_row: int | None = None,
    ) -> None:
        """Set the weights of rows [first_row, last_row), a chunk at a time.

        `values` gets row ids [n] on `device`, by default the table's, and returns weights [n, D].
        That many `threads` call it at once.
        """
        # With the number of a GPU: threads begin with the first one.
        device = torch.empty(0, device=device or self.records_VR.device).device
        chunk_rows = max(1, INIT_CHUNK[device.type] // self.dim)
        end = self.rows if last_row is None else last_row

        # Parts of records would go to pinned memory by way of pageable memory, much slower.
        is_whole = self.storage == "pinned" and self.records_VR.is_contiguous()
        is_sent_whole = is_whole and device.type == "cuda"

        def fill(start: int) -> None:
            rows = torch.arange(start, min(start + chunk_rows, end), device=device)
            weights = values(rows)
            expected = [len(rows), self.dim]
            if (shape := list(weights.shape)) != expected:
                raise ValueError(f"init gives {shape} for {len(rows)} rows; expected {expected}")
            records_nR = self.records_VR[start : start + len(rows)]
            if is_sent_whole:
                whole_nR = records_nR.to(device, non_blocking=True)
                whole_nR[:, self.columns["weight"]] = weights
                records_nR.copy_(whole_nR, non_blocking=True)
            else:
                records_nR[:, self.columns["weight"]].copy_(weights)

        on_threads(fill, range(first_row, end, chunk_rows), threads)
        if is_sent_whole:
            torch.cuda.synchronize(device)

    def decode(self, records_UR: Tensor) -> Tensor:
        """Return records in the dtype of steps: float32, or float64 as stored."""
        return records_UR if self.dtype == torch.float64 else records_UR.float()

    def encode(self, rows_U: Tensor, records_UR: Tensor, first_row: int = 0) -> Tensor:
        """Return decoded records in the table's dtype, once for each write.

        bfloat16 is rounded up or down at random, which keeps the mean: rounding to nearest would
        lose every update below 1/512 of its weight. The result depends on the number of writes, the
        row, from `first_row` on, and the column alone. float16 is rounded to nearest.
        """
        if self.dtype != torch.bfloat16:
            return records_UR.to(self.dtype)
        fours = torch.arange(self.width // 4, device=rows_U.device)
        counter = (rows_U[:, None] - first_row) * len(fours) + fours
        # Each draw of 64 bits rounds four elements.
        random_UR = splitmix64(counter, self.next_rounding_seed()).view(torch.int16).int() & 0xFFFF
        rounded_UR = (records_UR.view(torch.int32) + random_UR) & ~0xFFFF
        # To add to the bits of an infinity or a NaN would give another value.
        finite_UR = records_UR.isfinite()
        return torch.where(finite_UR, rounded_UR.view(torch.float32), records_UR).bfloat16()

    def next_rounding_seed(self) -> int:
        """Count a write, and return its 64-bit seed for rounding to bfloat16."""
        if self.dtype != torch.bfloat16:
            return 0
        writes = int(self.scalars["writes"]) + 1
        self.scalars["writes"].fill_(writes)
        return mix(writes)

    def is_in(self, path: str | Path) -> bool:
        """Return whether this file holds the records."""
        return self._file is not None and self._file.path.resolve() == Path(path).resolve()

    def begin_step(self) -> None:
        """Mark in a table's file that its scalars are older than its rows."""
        if self._file:
            self._file.begin_step()

    def flush(self) -> None:
        """Return when a table in a file is on disk."""
        if self._file:
            self._file.flush()


class SplitTable(Table):
    """Table of weights, with the optimizer state in other memory.

    `records_VR` holds the weights and the second table `states` the rest. `columns` index the
    records of both, joined.
    """

    def __init__(
        self,
        name: str,
        rows: int,
        dim: int,
        states: Mapping[str, RowState],
        scalars: Mapping[str, Tensor],
        storage: Storage,
        dtype: torch.dtype,
        state_storage: Storage,
    ):
        super().__init__(name, rows, dim, {}, scalars, storage, dtype)
        # In the second table the first state takes the place of the weight.
        (_, first), *others = states.items()
        self.states = Table(name, rows, first.width, dict(others), {}, state_storage, dtype)
        self.states["weight"].fill_(first.initial)
        self.states.columns = dict(zip(states, self.states.columns.values(), strict=True))
        self.states.scalars = self.scalars  # both round by the same count of writes
        for key, column in self.states.columns.items():
            self.columns[key] = slice(self.width + column.start, self.width + column.stop)

    def __getitem__(self, name: str) -> Tensor:
        return super().__getitem__(name) if name == "weight" else self.states[name]

    @property
    def parts(self) -> list[Table]:
        return [self, self.states]


def record_columns(dim: int, states: Mapping[str, RowState]) -> dict[str, slice]:
    """Return the elements of a record that hold the weight and each state."""
    columns = {"weight": slice(0, dim)}
    start = dim
    for key, state in states.items():
        columns[key] = slice(start, start + state.width)
        start += state.width
    return columns


def record_width(
    dim: int, states: Mapping[str, RowState], element_size: int = 4, alignment: int = ALIGNMENT
) -> int:
    """Return the number of elements of a record."""
    elements = dim + sum(state.width for state in states.values())
    return padded(elements, element_size, alignment)


def padded(elements: int, element_size: int, alignment: int = ALIGNMENT) -> int:
    """Round a number of elements up to a multiple of `alignment` bytes."""
    unit = alignment // element_size
    return -(-elements // unit) * unit


def uniform(dim: int, bound: float, seed: int) -> Init:
    """Return an initialiser with uniform weights in [-bound, bound).

    A weight depends on (seed, row, column) alone: not on chunks, threads or the device.
    """

    def values(rows_n: Tensor) -> Tensor:
        return ((_random_bits(rows_n, dim, seed) & 0xFFFFFF).float() / (1 << 23) - 1) * bound

    return values


def normal(dim: int, std: float, seed: int) -> Init:
    """Return an initialiser with normal weights of mean 0.

    A weight depends on (seed, row, column) alone (Box and Muller, 1958). It is computed in float64,
    so that devices differ in the last bit of at most one weight in some hundred million.
    """

    def values(rows_n: Tensor) -> Tensor:
        bits = _random_bits(rows_n, dim, seed)
        radius = ((shift_right(bits, 32) + 0.5).double() / 2**32).log_().mul_(-2).sqrt_()
        angle = (bits & 0xFFFFFFFF).double() * (2 * math.pi / 2**32)
        return (radius * angle.cos_() * std).float()

    return values


def _random_bits(rows_n: Tensor, dim: int, seed: int) -> Tensor:
    """Return 64 random bits for each row and column: [n, D]."""
    columns = torch.arange(dim, device=rows_n.device)
    return splitmix64(rows_n[:, None] * dim + columns + 1, mix(seed))


def check_table(
    rows: int,
    dim: int,
    states: Mapping[str, RowState],
    storage: str,
    dtype: torch.dtype,
    path: str | Path | None,
) -> None:
    """Raise `ValueError` for arguments of a table that cannot be used."""
    dtypes = [torch.bfloat16, *NPY_TYPES]
    counter = next((key for key, state in states.items() if state.counts), None)
    reason = None
    if not (isinstance(rows, Integral) and isinstance(dim, Integral)):
        reason = f"{rows!r} rows and {dim!r} dimensions are not whole numbers; use int()"
    elif min(rows, dim) < 1:
        reason = f"a table needs at least 1 row and 1 dimension; it has {rows} and {dim}"
    elif storage not in get_args(Storage):
        reason = f"storage={storage!r} is unknown; choose from {' '.join(get_args(Storage))}"
    elif dtype not in dtypes:
        reason = f"dtype={dtype} cannot be stored; choose from {' '.join(map(str, dtypes))}"
    elif dtype.itemsize == 2 and counter:
        reason = f"dtype={dtype} cannot hold each row's own {counter!r}; use float32, or step=table"
    elif (storage == "mmap") != (path is not None):
        reason = f"storage={storage!r} with path={path}: 'mmap' needs a path, the others take none"
    elif path is not None and Path(path).suffix == ".npy" and (states or dtype not in NPY_TYPES):
        reason = f"path={path}: an .npy file holds weights alone, not in bfloat16; rename the file"
    elif storage in ("cuda", "pinned") and not torch.cuda.is_available():
        reason = f"storage={storage!r} needs an NVIDIA GPU, and torch finds none; use storage='cpu'"
    if reason:
        raise ValueError(reason)


def host_memory(nbytes: int) -> np.ndarray:
    """Return zeroed, page-aligned CPU memory in huge pages: uint8 [nbytes].

    Threads touch the pages, so that the system zeroes them in parallel.
    """
    memory = mmap.mmap(-1, max(nbytes, mmap.PAGESIZE), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    content = np.frombuffer(memory, np.uint8, nbytes)

    def touch(start: int) -> None:
        # NumPy releases the GIL during the assignment.
        content[start : start + TOUCH_BYTES : mmap.PAGESIZE] = 0

    on_threads(touch, range(0, nbytes, TOUCH_BYTES), torch.get_num_threads())
    return content


def pinning_is_limited() -> bool:
    """Return whether the limit on locked memory applies to pinning."""
    before = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (1 << 16, before[1]))
    try:
        pin(host_memory(2 << 20))  # far more than the limit of 64 KiB
    except MemoryError:
        return True
    finally:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, before)
    return False


def pin(memory: np.ndarray) -> None:
    """Pin CPU memory in place (cudaHostRegister) until its array is freed."""
    # Pinning touched memory is three times faster than having the driver allocate it.
    try:
        # torch's binding would leave the error of a failure behind for the next kernel.
        runtime = cuda_runtime()
    except ImportError:
        missing = "storage='pinned' needs CuPy, which is not there"
        raise ValueError(f"{missing}; {INSTALL_CUPY}") from None
    try:
        runtime.hostRegister(memory.ctypes.data, memory.nbytes, 0)
    except runtime.CUDARuntimeError as error:
        size = f"{memory.nbytes / 2**30:.1f} GiB"
        raise MemoryError(
            f"cannot pin {size} of CPU memory ({error}); raise its limit (ulimit -l, or --ulimit "
            "memlock=-1 for a container), or use storage='cpu' (transfer.engine=staged)"
        ) from None
    # An array's callbacks run before its memory is unmapped, a torch storage's after: the system
    # could then give the address to others while it is still registered.
    weakref.finalize(memory, runtime.hostUnregister, memory.ctypes.data)
