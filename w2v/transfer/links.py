"""Links: how records move between a table and the compute device.

Rows are sorted and unique, int64, on the compute device; `slots_U` says where each record lies in
`records_SR`, by default 0, 1, 2, ... Moves are made in the order of torch's current stream.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from w2v.kernels import cuda
from w2v.model.table import Storage, Table

RING = 3
BUFFER_BYTES = 16 << 20  # 16 MiB copies reach 97 % of the link's rate
PROBE_BYTES = 256 << 20  # of a table that stands for a large one
MOVED_BYTES = 16 << 20  # at a time
COPIES = 8  # each way, at a time
SECONDS = 0.2  # each way


class Link(Protocol):
    """Moves records between a table and the compute device."""

    def read(
        self, table: Table, rows_U: Tensor, records_SR: Tensor, slots_U: Tensor | None = None
    ) -> None:
        """Copy records[slots[u]] = table[rows[u]]."""

    def write(
        self, table: Table, rows_U: Tensor, records_SR: Tensor, slots_U: Tensor | None = None
    ) -> None:
        """Copy table[rows[u]] = records[slots[u]]."""


class LocalLink:
    """Tables on the compute device itself."""

    def read(
        self, table: Table, rows_U: Tensor, records_SR: Tensor, slots_U: Tensor | None = None
    ) -> None:
        records_UR = table.records_VR.index_select(0, rows_U)
        if slots_U is None:
            records_SR.copy_(records_UR)
        else:
            records_SR.index_copy_(0, slots_U, records_UR)

    def write(
        self, table: Table, rows_U: Tensor, records_SR: Tensor, slots_U: Tensor | None = None
    ) -> None:
        records_UR = records_SR if slots_U is None else records_SR.index_select(0, slots_U)
        table.records_VR.index_copy_(0, rows_U, records_UR)


class MappedLink:
    """Tables in pinned CPU memory that GPU kernels read and write in place."""

    def read(
        self, table: Table, rows_U: Tensor, records_SR: Tensor, slots_U: Tensor | None = None
    ) -> None:
        cuda.gather_records(table.records_VR, rows_U, records_SR, slots_U)

    def write(
        self, table: Table, rows_U: Tensor, records_SR: Tensor, slots_U: Tensor | None = None
    ) -> None:
        cuda.scatter_records(table.records_VR, rows_U, records_SR, slots_U)


class StagedLink:
    """Tables in any CPU memory, moved through pinned buffers.

    A ring of buffers serves both directions, so that the CPU fills one while the last is copied.
    The CPU has to wait for the row ids, and for the copy before it scatters: the link of last
    resort.
    """

    def __init__(self) -> None:
        self._ring: list[tuple[Tensor, torch.cuda.Event]] = []

    def read(
        self, table: Table, rows_U: Tensor, records_SR: Tensor, slots_U: Tensor | None = None
    ) -> None:
        start = 0
        for number, rows in enumerate(rows_U.cpu().split(self._rows_per_buffer(table))):
            here = slice(start, start + len(rows))
            buffer, copied = self._buffer(number, table, len(rows))
            torch.index_select(table.records_VR, 0, rows, out=buffer)
            if slots_U is None:
                records_SR[here].copy_(buffer, non_blocking=True)
            else:
                arrived = buffer.to(records_SR.device, non_blocking=True)
                records_SR.index_copy_(0, slots_U[here], arrived)
            copied.record()
            start += len(rows)

    def write(
        self, table: Table, rows_U: Tensor, records_SR: Tensor, slots_U: Tensor | None = None
    ) -> None:
        start = 0
        arriving: list[tuple[Tensor, Tensor, torch.cuda.Event]] = []
        for number, rows in enumerate(rows_U.cpu().split(self._rows_per_buffer(table))):
            if len(arriving) == RING:
                _store(table, *arriving.pop(0))
            here = slice(start, start + len(rows))
            buffer, copied = self._buffer(number, table, len(rows))
            records = records_SR[here]
            if slots_U is not None:
                records = records_SR.index_select(0, slots_U[here])
            buffer.copy_(records, non_blocking=True)
            copied.record()
            arriving.append((rows, buffer, copied))
            start += len(rows)
        for waiting in arriving:
            _store(table, *waiting)

    def _rows_per_buffer(self, table: Table) -> int:
        return max(1, BUFFER_BYTES // (table.width * table.records_VR.element_size()))

    def _buffer(self, number: int, table: Table, rows: int) -> tuple[Tensor, torch.cuda.Event]:
        """Return a pinned buffer that is free, and the event of its next copy."""
        if not self._ring:
            self._ring = [
                (torch.empty(BUFFER_BYTES, dtype=torch.uint8, pin_memory=True), torch.cuda.Event())
                for _ in range(RING)
            ]
        raw, copied = self._ring[number % RING]
        copied.synchronize()
        nbytes = rows * table.width * table.records_VR.element_size()
        if nbytes > len(raw):
            raw = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        return raw[:nbytes].view(table.records_VR.dtype).view(rows, table.width), copied


def link_between(table: Table, device: torch.device) -> Link:
    """Return the link between a table and the compute device."""
    if table.records_VR.device.type == device.type:
        return LocalLink()
    return MappedLink() if table.storage == "pinned" else StagedLink()


def measure_rates(
    link: Link, storage: Storage, dim: int, dtype: torch.dtype, device: torch.device
) -> tuple[float, float]:
    """Return bytes/s to and from the device, for random records.

    Raises:
        MemoryError: The storage cannot be pinned.
        ValueError: The storage cannot be used on this machine.
    """
    record_bytes = dim * dtype.itemsize
    rows = max(2, PROBE_BYTES // record_bytes)
    table = Table("probe", rows, dim, {}, {}, storage, dtype)
    moved = max(1, MOVED_BYTES // record_bytes)
    rows_U = torch.randperm(rows, device=device)[:moved].sort().values
    records_UR = torch.zeros(len(rows_U), table.width, dtype=dtype, device=device)
    to_device = _rate(lambda: link.read(table, rows_U, records_UR), records_UR.nbytes)
    return to_device, _rate(lambda: link.write(table, rows_U, records_UR), records_UR.nbytes)


def measure_copy_rate(device: torch.device) -> float:
    """Return the bytes/s of copies in both directions: the link's roofline."""
    on_gpu = device.type == "cuda"
    host = [torch.empty(MOVED_BYTES, dtype=torch.uint8, pin_memory=on_gpu) for _ in range(2)]
    there = [torch.empty(MOVED_BYTES, dtype=torch.uint8, device=device) for _ in range(2)]
    streams = [torch.cuda.Stream(device) if on_gpu else None for _ in range(2)]

    def move() -> None:
        ways = (there[0], host[0], streams[0]), (host[1], there[1], streams[1])
        for target, source, stream in ways:
            with torch.cuda.stream(stream):
                for _ in range(COPIES):
                    target.copy_(source, non_blocking=True)

    return _rate(move, 2 * COPIES * MOVED_BYTES)


def _rate(move: Callable[[], None], nbytes: int) -> float:
    """Return the bytes/s of calls that move `nbytes` each."""
    calls = -1  # the first call warms up
    start = 0.0
    while calls < 1 or time.perf_counter() - start < SECONDS:
        if calls == 0:
            start = time.perf_counter()
        move()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        calls += 1
    return calls * nbytes / (time.perf_counter() - start)


def _store(table: Table, rows: Tensor, buffer: Tensor, copied: torch.cuda.Event) -> None:
    copied.synchronize()
    table.records_VR.index_copy_(0, rows, buffer)
