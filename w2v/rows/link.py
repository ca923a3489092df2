"""Links: how records move between a table and the compute device.

Rows are sorted and unique, int64, on the compute device; `slots_U` says where each record lies in
`records_SR`, by default 0, 1, 2, ... Moves are made in the order of torch's current stream.
"""

from __future__ import annotations

import contextlib
import functools
from collections import deque
from collections.abc import Iterator

import torch
from torch import Tensor

from w2v.rows import ops
from w2v.rows.table import Table

RING = 3  # pinned buffers of a `StagedLink`
BUFFER_BYTES = 16 << 20  # of each: 16 MiB copies reach 97 % of the link's rate


class Link:
    """Moves records between a table and the device that both are on."""

    def __init__(self, table_VR: Tensor):
        self.table_VR = table_VR

    def records(self, rows_U: Tensor) -> Tensor:
        """Return records as they are stored, on the compute device: [U, R]."""
        shape = rows_U.shape[0], self.table_VR.shape[1]
        records_UR = torch.empty(shape, dtype=self.table_VR.dtype, device=rows_U.device)
        self.read(rows_U, records_UR)
        return records_UR

    def read(self, rows_U: Tensor, records_SR: Tensor, slots_U: Tensor | None = None) -> None:
        """Copy records[slots[u]] = table[rows[u]]."""
        if slots_U is None:
            torch.index_select(self.table_VR, 0, rows_U, out=records_SR)
        else:
            records_SR.index_copy_(0, slots_U, self.table_VR.index_select(0, rows_U))

    def write(self, rows_U: Tensor, records_SR: Tensor, slots_U: Tensor | None = None) -> None:
        """Copy table[rows[u]] = records[slots[u]]."""
        records_UR = records_SR if slots_U is None else records_SR.index_select(0, slots_U)
        self.table_VR.index_copy_(0, rows_U, records_UR)


class MappedLink(Link):
    """Tables in pinned CPU memory that GPU kernels read and write in place.

    Negative rows are skipped.
    """

    def read(self, rows_U: Tensor, records_SR: Tensor, slots_U: Tensor | None = None) -> None:
        ops.move_records(self.table_VR, rows_U, records_SR, slots_U)

    def write(self, rows_U: Tensor, records_SR: Tensor, slots_U: Tensor | None = None) -> None:
        ops.move_records(self.table_VR, rows_U, records_SR, slots_U, to_table=True)


class StagedLink(Link):
    """Tables in any CPU memory, moved through pinned buffers.

    A ring of buffers serves both directions, so that the CPU fills one while the last is copied.
    The CPU has to wait for the row ids, and for the copy before it scatters: the link of last
    resort.
    """

    def __init__(self, table_VR: Tensor):
        super().__init__(table_VR)
        self._ring: list[tuple[Tensor, torch.cuda.Event]] = []

    def read(self, rows_U: Tensor, records_SR: Tensor, slots_U: Tensor | None = None) -> None:
        for rows, part, buffer, copied in self._parts(rows_U):
            torch.index_select(self.table_VR, 0, rows, out=buffer)
            if slots_U is None:
                records_SR[part].copy_(buffer, non_blocking=True)
            else:
                arrived = buffer.to(records_SR.device, non_blocking=True)
                records_SR.index_copy_(0, slots_U[part], arrived)
            copied.record()

    def write(self, rows_U: Tensor, records_SR: Tensor, slots_U: Tensor | None = None) -> None:
        arriving: deque[tuple[Tensor, Tensor, torch.cuda.Event]] = deque()

        def store_first() -> None:
            rows, buffer, copied = arriving.popleft()
            copied.synchronize()
            self.table_VR.index_copy_(0, rows, buffer)

        for rows, part, buffer, copied in self._parts(rows_U):
            records_UR = records_SR[part]
            if slots_U is not None:
                records_UR = records_SR.index_select(0, slots_U[part])
            buffer.copy_(records_UR, non_blocking=True)
            copied.record()
            arriving.append((rows, buffer, copied))
            if len(arriving) == RING:  # the next part takes the buffer of the first
                store_first()
        while arriving:
            store_first()

    def _parts(self, rows_U: Tensor) -> Iterator[tuple[Tensor, slice, Tensor, torch.cuda.Event]]:
        """Yield rows, their part of `rows_U`, a free buffer, and its event."""
        if not self._ring:
            self._ring = [(_pinned(BUFFER_BYTES), torch.cuda.Event()) for _ in range(RING)]
        dtype, width = self.table_VR.dtype, self.table_VR.shape[1]
        record_bytes = width * dtype.itemsize
        part_rows = max(1, BUFFER_BYTES // record_bytes)
        for number, rows in enumerate(rows_U.cpu().split(part_rows)):
            raw, copied = self._ring[number % RING]
            copied.synchronize()  # until the buffer is free
            if record_bytes > len(raw):
                raw = _pinned(record_bytes)
            buffer = raw[: len(rows) * record_bytes].view(dtype).view(len(rows), width)
            start = number * part_rows
            yield rows, slice(start, start + len(rows)), buffer, copied


def link_between(table: Table, device: torch.device, width: int | None = None) -> Link:
    """Return the link between a table and the compute device.

    `width`: of how many elements of each record; by default all.
    """
    table_VR = table.records_VR[:, :width]
    if table_VR.device.type == device.type:
        return Link(table_VR)
    return MappedLink(table_VR) if table.storage == "pinned" else StagedLink(table_VR)


def _pinned(*shape: int) -> Tensor:
    """Return pinned memory, whatever torch.set_default_device says."""
    return torch.empty(shape, dtype=torch.uint8, device="cpu", pin_memory=True)


def current_stream() -> torch.cuda.Stream:
    """Return the stream that this thread's work goes to.

    torch.cuda.current_stream takes as long as launching a kernel; this takes a tenth.
    """
    return _stream(*torch._C._cuda_getCurrentStream(torch._C._cuda_getDevice()))


@functools.cache
def _stream(stream_id: int, device_index: int, device_type: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(
        stream_id=stream_id, device_index=device_index, device_type=device_type
    )


def on_stream(stream: torch.cuda.Stream | None) -> contextlib.AbstractContextManager:
    """Send the work of a block to a stream; without a GPU there is none."""
    return stream or contextlib.nullcontext()
