"""One embedding matrix with its row-aligned optimizer state: one contiguous, 128-byte aligned record per row.

Shapes: V rows, D dimensions, R elements of a record (weight, then each state, padded to 128 bytes).
"""

from __future__ import annotations

import mmap
import weakref
from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple

import torch
from torch import Tensor

ALIGNMENT = 128  # bytes: the unit in which a GPU reads host memory
CHUNK_ROWS = 1 << 16  # rows initialised at a time, which bounds the scratch memory

Storage = Literal["cpu", "cuda", "pinned"]


class RowState(NamedTuple):
    """A per-row optimizer state: how many elements a row has of it, and their first value."""

    width: int
    initial: float


class Table:
    """V rows of D weights with optimizer state, in ordinary CPU memory, on the GPU, or in pinned CPU memory.

    `scalars` holds the state that the optimizer keeps once for the whole table, such as Adam's step.
    """

    def __init__(self, name: str, rows: int, dim: int, states: Mapping[str, RowState], scalars: Mapping[str, Tensor], storage: Storage):
        self.name, self.rows, self.dim, self.storage = name, rows, dim, storage
        self.columns = record_columns(dim, states)
        self.width = record_width(dim, states)
        self.scalars = {key: value.clone() for key, value in scalars.items()}
        self.records_VR = _host_memory(rows, self.width) if storage == "pinned" else torch.zeros(
            rows, self.width, device="cuda" if storage == "cuda" else "cpu"
        )
        for key, state in states.items():
            self[key].fill_(state.initial)
        if storage == "pinned":
            _register(self.records_VR)

    def __getitem__(self, name: str) -> Tensor:
        """A view of one field, "weight" or an optimizer state, of all rows: [V, D] or [V, 1]."""
        return self.records_VR[:, self.columns[name]]

    @property
    def bytes(self) -> int:
        return self.rows * self.width * self.records_VR.element_size()

    def initialise(self, values: Callable[[Tensor], Tensor]) -> None:
        """Set the weights, a chunk of rows at a time: `values` maps row numbers [n] to weights [n, D]."""
        for start in range(0, self.rows, CHUNK_ROWS):
            rows = torch.arange(start, min(start + CHUNK_ROWS, self.rows), device=self.records_VR.device)
            self["weight"][start : start + len(rows)] = values(rows)


def record_columns(dim: int, states: Mapping[str, RowState]) -> dict[str, slice]:
    """Where each field lies in a record: the weight first, then the states in their order."""
    columns, start = {}, 0
    for key, width in [("weight", dim), *((key, state.width) for key, state in states.items())]:
        columns[key] = slice(start, start + width)
        start += width
    return columns


def record_width(dim: int, states: Mapping[str, RowState], element_size: int = 4) -> int:
    """Elements of a record, padding included."""
    elements = dim + sum(state.width for state in states.values())
    per_line = ALIGNMENT // element_size
    return -(-elements // per_line) * per_line


def uniform(dim: int, bound: float, seed: int) -> Callable[[Tensor], Tensor]:
    """Weights uniform in [-bound, bound), each a function of (seed, row, column) alone.

    The bits come from SplitMix64 (Steele, Lea and Flood, OOPSLA 2014), counted by row * dim + column, so they depend neither
    on chunks or threads nor on the device.
    """

    def values(rows_n: Tensor) -> Tensor:
        columns = torch.arange(dim, device=rows_n.device)
        bits = _splitmix64(rows_n[:, None] * dim + columns + 1, seed)
        return ((bits & 0xFFFFFF).float() / (1 << 23) - 1) * bound

    return values


def _splitmix64(counter: Tensor, seed: int) -> Tensor:
    def shift_right(value: Tensor, by: int) -> Tensor:  # of unsigned numbers, in signed ones
        return (value >> by) & ((1 << (64 - by)) - 1)

    bits = counter * _signed(0x9E3779B97F4A7C15) + _signed(_mix(seed))
    bits = (bits ^ shift_right(bits, 30)) * _signed(0xBF58476D1CE4E5B9)
    bits = (bits ^ shift_right(bits, 27)) * _signed(0x94D049BB133111EB)
    return bits ^ shift_right(bits, 31)


def _mix(seed: int) -> int:
    seed = (seed + 0x9E3779B97F4A7C15) * 0xBF58476D1CE4E5B9 % 2**64
    return seed ^ (seed >> 32)


def _signed(value: int) -> int:
    return value - 2**64 if value >= 2**63 else value


def _host_memory(rows: int, width: int) -> Tensor:
    """Zeros in anonymous memory, huge pages advised; exactly the bytes asked for, rounded up to a page."""
    memory = mmap.mmap(-1, max(rows * width * 4, mmap.PAGESIZE), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.float32, count=rows * width).view(rows, width)


def _register(records: Tensor) -> None:
    """Pin host memory in place for as long as its storage lives (CUDA runtime API, cudaHostRegister)."""
    from cupy.cuda import runtime  # unlike torch's binding it clears the error that a failure leaves for the next kernel

    records.add_(0)  # touches each page: registering memory that exists is three times faster than having the driver fault it in
    nbytes = records.numel() * records.element_size()
    try:
        runtime.hostRegister(records.data_ptr(), nbytes, 0)
    except runtime.CUDARuntimeError as error:
        raise MemoryError(
            f"cannot pin {nbytes / 2**30:.1f} GiB of CPU memory ({error}); raise the limit on locked memory (ulimit -l, "
            "or --ulimit memlock=-1 for a container), make the tables smaller, or set transfer.engine=resident"
        ) from None
    weakref.finalize(records.untyped_storage(), runtime.hostUnregister, records.data_ptr())
