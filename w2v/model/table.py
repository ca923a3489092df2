"""One embedding matrix with its row-aligned optimizer state: one contiguous record per row, 128-byte aligned where a GPU reads it.

Shapes: V rows, D dimensions, U unique rows, R elements of a record (weight, then each state, padded to 128 bytes if aligned).
"""

from __future__ import annotations

import math
import mmap
import resource
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal, NamedTuple, get_args

import numpy as np
import torch
from torch import Tensor

from w2v.kernels.random import mix, shift_right, splitmix64
from w2v.model.row_file import NPY_TYPES, RowFile

ALIGNMENT = 128  # bytes: the unit in which a GPU reads host memory
CHUNK = {
    "cuda": 1 << 21,
    "cpu": 1 << 15,
}  # numbers initialised at a time: few kernels to launch, or all in a core's cache
TOUCH_BYTES = 64 << 20  # memory that one thread makes exist at a time
FILE_BYTES = (
    1 << 30
)  # of records at most in a file of a checkpoint, which is copied whole or not at all

Storage = Literal["cpu", "cuda", "pinned", "mmap"]
Init = Callable[[Tensor], Tensor]  # row numbers [n] -> weights [n, D]


class RowState(NamedTuple):
    """A per-row optimizer state: how many elements a row has of it, and their first value."""

    width: int
    initial: float


class Table:
    """V rows of D weights with optimizer state, in ordinary CPU memory, on the GPU, in pinned CPU memory, or in a file ("mmap").

    Elements are float64, float32, bfloat16 or float16; pages of those with 16 bits are float32, others as the table. float16 has no room
    for squared gradients under 6e-8, so optimizers that keep them want bfloat16. `scalars` holds what is kept once for the whole table:
    the optimizer's, such as Adam's step, and the count of writes that seeds the rounding to bfloat16.

    storage="mmap" keeps the records in the file `path`, and their layout and the scalars in `<path>.json`; rows without state may also
    be an .npy file [V, D], which needs no .json. An existing file is continued (`continued` is then True), if it is of this layout. A
    new one is written aside and gets its name at the first `flush`, so a file of that name is always whole. What is promised: after
    `flush` all is on disk, and survives a crash of the machine. Rows written later reach the file when the system chooses. If the
    process is killed, every row is as of the last flush or as some later write left it (the one row being copied at that moment may be
    partly new), and the scalars are as of the last flush; the layout is never damaged. After a crash of the machine, rows written
    since the flush may be partly new. One process at a time may have the file open.

    aligned: whether records are padded to 128 bytes, as a GPU wants them; bfloat16 counts its rounding by them. pinned_VR: the memory
    of a pinned table's records, one of `side_by_side`, if it is not to have its own.

    Raises `ValueError` for sizes, types and files that cannot be used, `MemoryError` where memory cannot be pinned, `OSError` where
    the disk has no room.
    """

    def __init__(
        self,
        name: str,
        rows: int,
        dim: int,
        states: Mapping[str, RowState],
        scalars: Mapping[str, Tensor],
        storage: Storage,
        dtype: torch.dtype = torch.float32,
        path: str | Path | None = None,
        aligned: bool = True,
        pinned_VR: Tensor | None = None,
    ):
        _check(rows, dim, states, storage, dtype, path)
        self.name, self.rows, self.dim, self.storage, self.dtype = name, rows, dim, storage, dtype
        self.columns = record_columns(dim, states)
        self.width = record_width(dim, states, dtype.itemsize, aligned)
        self.scalars = {key: value.clone() for key, value in scalars.items()}
        if dtype == torch.bfloat16:
            self.scalars["writes"] = torch.zeros((), dtype=torch.int64)
        self._file = None
        if storage == "mmap":
            self._file = RowFile(Path(path), rows, self.width, self.columns, dtype, self.scalars)
            self.records_VR = self._file.records_VR
            self.width = self.records_VR.shape[1]  # an .npy file has no padding
        elif storage == "pinned":
            self.records_VR = (
                side_by_side(1, rows, self.width, dtype)[0] if pinned_VR is None else pinned_VR
            )
        else:
            self.records_VR = torch.zeros(rows, self.width, dtype=dtype, device=storage)
        self.continued = self._file is not None and self._file.continued
        if not self.continued:
            for key, state in states.items():
                if state.initial:
                    self[key].fill_(state.initial)

    def __getitem__(self, name: str) -> Tensor:
        """A view of one field, "weight" or an optimizer state, of all rows: [V, D] or [V, 1]."""
        return self.records_VR[:, self.columns[name]]

    @property
    def bytes(self) -> int:
        return self.rows * self.width * self.records_VR.element_size()

    def initialise(self, values: Init, device: torch.device | None = None) -> None:
        """Set the weights, a chunk of rows at a time: `values` maps row numbers [n] to weights [n, D].

        device: where the row numbers are, and with them the computation; by default where the table is.
        """
        device = device or self.records_VR.device
        chunk_rows = max(1, CHUNK[device.type] // self.dim)
        for start in range(0, self.rows, chunk_rows):
            rows = torch.arange(start, min(start + chunk_rows, self.rows), device=device)
            weights = values(rows)
            if weights.shape != (len(rows), self.dim):
                raise ValueError(
                    f"init gives {list(weights.shape)} for {len(rows)} rows; it must give [{len(rows)}, {self.dim}]"
                )
            self["weight"][start : start + len(rows)].copy_(weights)

    def decode(self, records_UR: Tensor) -> Tensor:
        """Records of the table as a page has them: in float32, or in float64 where the table is."""
        return records_UR if self.dtype == torch.float64 else records_UR.float()

    def encode(self, rows_U: Tensor, records_UR: Tensor) -> Tensor:
        """The records of a page as the table is to hold them; one call for each write.

        float16 is rounded to nearest. bfloat16 is rounded up or down with the chances that keep the mean, since to nearest would lose
        every update under 1/512 of its weight; the bits depend on (count of writes, row, column) alone.
        """
        if self.dtype != torch.bfloat16:
            return records_UR.to(self.dtype)
        counter = rows_U[:, None] * (self.width // 4) + torch.arange(
            self.width // 4, device=rows_U.device
        )
        noise_UR = splitmix64(counter, self.next_noise()).view(torch.int16)  # four from each
        rounded_UR = (records_UR.view(torch.int32) + (noise_UR.int() & 0xFFFF)) & ~0xFFFF
        return torch.where(
            records_UR.isfinite(), rounded_UR.view(torch.float32), records_UR
        ).bfloat16()

    def next_noise(self) -> int:
        """The seed, mixed, that rounds the next write to bfloat16: of 64 bits, unsigned; 0 for other elements."""
        if self.dtype != torch.bfloat16:
            return 0
        writes = int(self.scalars["writes"]) + 1
        self.scalars["writes"].fill_(writes)
        return mix(writes)

    def shrink(self, width: int) -> None:
        """Keep the first `width` elements of each record; the others' memory is given back if it is ordinary CPU memory."""
        if self.storage == "cpu" and width < self.width:
            self.records_VR, self.width = (
                self.records_VR[:, :width].clone(memory_format=torch.contiguous_format),
                width,
            )
            self.columns = {name: part for name, part in self.columns.items() if part.stop <= width}

    def is_in(self, path: str | Path) -> bool:
        """Whether the records lie in this file."""
        return self._file is not None and self._file.path.resolve() == Path(path).resolve()

    def flush(self) -> None:
        """Return when all rows and scalars are on disk, for a table in a file; otherwise there is nothing to do."""
        if self._file:
            self._file.flush()


def record_columns(dim: int, states: Mapping[str, RowState]) -> dict[str, slice]:
    """Where each field lies in a record: the weight first, then the states in their order."""
    columns, start = {}, 0
    for key, width in [("weight", dim), *((key, state.width) for key, state in states.items())]:
        columns[key] = slice(start, start + width)
        start += width
    return columns


def record_width(
    dim: int, states: Mapping[str, RowState], element_size: int = 4, aligned: bool = True
) -> int:
    """Elements of a record, padding included."""
    elements = dim + sum(state.width for state in states.values())
    return padded(elements, element_size) if aligned else elements


def padded(elements: int, element_size: int) -> int:
    """So many elements, or as many more as fill the last 128 bytes."""
    per_line = ALIGNMENT // element_size
    return -(-elements // per_line) * per_line


def uniform(dim: int, bound: float, seed: int) -> Init:
    """Weights uniform in [-bound, bound), each a function of (seed, row, column) alone.

    The bits come from SplitMix64 (Steele, Lea and Flood, OOPSLA 2014), counted by row * dim + column, so they depend neither
    on chunks or threads nor on the device.
    """

    def values(rows_n: Tensor) -> Tensor:
        return ((_bits(rows_n, dim, seed) & 0xFFFFFF).float() / (1 << 23) - 1) * bound

    return values


def normal(dim: int, std: float, seed: int) -> Init:
    """Weights normal with mean 0, each a function of (seed, row, column) alone, by Box and Muller (1958) from the bits of `uniform`.

    Computed in float64, so that devices agree but for a last bit once in some hundred million values.
    """

    def values(rows_n: Tensor) -> Tensor:
        bits = _bits(rows_n, dim, seed)
        radius = ((shift_right(bits, 32) + 0.5).double() / 2**32).log_().mul_(-2).sqrt_()
        angle = (bits & 0xFFFFFFFF).double() * (2 * math.pi / 2**32)
        return (radius * angle.cos_() * std).float()

    return values


def _bits(rows_n: Tensor, dim: int, seed: int) -> Tensor:
    """64 random bits for each row and column: [n, D]."""
    return splitmix64(
        rows_n[:, None] * dim + torch.arange(dim, device=rows_n.device) + 1, mix(seed)
    )


def _check(
    rows: int,
    dim: int,
    states: Mapping[str, RowState],
    storage: str,
    dtype: torch.dtype,
    path: str | Path | None,
) -> None:
    if min(rows, dim) < 1:
        raise ValueError(
            f"a table of {rows} rows of {dim} dimensions cannot be made; both must be at least 1"
        )
    if storage not in get_args(Storage):
        raise ValueError(
            f"storage={storage!r} is unknown; choose from {' '.join(get_args(Storage))}"
        )
    if dtype not in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(
            f"dtype={dtype} cannot be stored; choose torch.float64, torch.float32, torch.bfloat16 or torch.float16"
        )
    counters = [key for key, state in states.items() if state.width == 1]
    if dtype.itemsize == 2 and counters:
        raise ValueError(
            f"dtype={dtype} cannot hold the state {counters[0]!r} that counts for each row; use float32, or step=table"
        )
    if (storage == "mmap") != (path is not None):
        raise ValueError(
            f"storage={storage!r} with path={path}: a path goes with storage='mmap', which needs one"
        )
    if path is not None and Path(path).suffix == ".npy" and (states or dtype not in NPY_TYPES):
        raise ValueError(
            f"path={path}: an .npy file holds weights alone, in float64, float32 or float16; give the path another ending"
        )
    if storage in ("cuda", "pinned") and not torch.cuda.is_available():
        raise ValueError(
            f"storage={storage!r} needs an NVIDIA GPU, and torch finds none; use storage='cpu' or 'mmap'"
        )


def host_memory(nbytes: int) -> Tensor:
    """Zero bytes in anonymous memory, huge pages advised; exactly as many as asked for, rounded up to a page.

    Making pages exist is what takes the time: a write to each of them, by as many threads as torch uses, has the system zero them in
    parallel, and touches the memory once.
    """
    memory = mmap.mmap(-1, max(nbytes, mmap.PAGESIZE), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    content = np.frombuffer(memory, np.uint8)

    def touch(start: int) -> None:
        content[start : start + TOUCH_BYTES : mmap.PAGESIZE] = (
            0  # numpy lets other threads run meanwhile
        )

    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        list(pool.map(touch, range(0, nbytes, TOUCH_BYTES)))
    return torch.frombuffer(memory, dtype=torch.uint8, count=nbytes)


def side_by_side(tables: int, rows: int, width: int, dtype: torch.dtype) -> Tensor:
    """Pinned memory for the records of so many tables [T, V, R], in which the rows of one number lie beside each other.

    A GPU that reads the rows of a word in all tables then looks up one address, which is what limits records that lie far apart.
    """
    memory = host_memory(tables * rows * width * dtype.itemsize)
    _register(memory)
    return memory.view(dtype).view(rows, tables, width).transpose(0, 1)


def pinning_is_limited() -> bool:
    """Whether the driver heeds the limit on locked memory: found by pinning 2 MiB under a limit of 64 KiB. Needs CuPy and a GPU."""
    before = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (1 << 16, before[1]))
    try:
        _register(host_memory(2 << 20))
    except MemoryError:
        return True
    finally:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, before)
    return False


def _register(memory: Tensor) -> None:
    """Pin host memory in place for as long as its storage lives (CUDA runtime API, cudaHostRegister).

    The memory exists already, which is three times faster than having the driver fault it in.
    """
    try:
        from cupy.cuda import (
            runtime,
        )  # unlike torch's binding it clears the error that a failure leaves for the next kernel
    except ImportError:
        raise ValueError(
            "storage='pinned' needs CuPy, which cannot be imported; install cupy-cuda12x or cupy-cuda13x"
        ) from None
    nbytes = memory.numel() * memory.element_size()
    try:
        runtime.hostRegister(memory.data_ptr(), nbytes, 0)
    except runtime.CUDARuntimeError as error:
        raise MemoryError(
            f"cannot pin {nbytes / 2**30:.1f} GiB of CPU memory ({error}); raise the limit on locked memory (ulimit -l, "
            "or --ulimit memlock=-1 for a container), make the tables smaller, or set transfer.engine=resident"
        ) from None
    weakref.finalize(memory.untyped_storage(), runtime.hostUnregister, memory.data_ptr())
