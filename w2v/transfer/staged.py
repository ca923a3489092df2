"""Tables in any CPU memory: the CPU gathers records into pinned slots, which are copied whole; for machines where zero-copy is slow.

A ring of buffers serves both directions, so that the CPU fills one while the last is copied. Moving rows waits for the ids, which the CPU
has to read, and a write waits for its copy: the link of last resort.
"""

from __future__ import annotations

import torch
from torch import Tensor

from w2v.model.table import Table

RING, BUFFER_BYTES = 3, 16 << 20  # 16 MiB copies reach 97 % of the link


class Staged:
    def __init__(self) -> None:
        self._ring: list[tuple[Tensor, torch.cuda.Event]] = []

    def read(
        self, table: Table, rows_U: Tensor, records_SR: Tensor, slots_U: Tensor | None = None
    ) -> None:
        rows, start = rows_U.cpu(), 0
        for number, part in enumerate(rows.split(self._rows_per_buffer(table))):
            buffer, copied = self._buffer(number, table, len(part))
            torch.index_select(table.records_VR, 0, part, out=buffer)
            _place(buffer, records_SR, start, slots_U)
            copied.record()
            start += len(part)

    def write(
        self, table: Table, rows_U: Tensor, records_SR: Tensor, slots_U: Tensor | None = None
    ) -> None:
        rows, start = rows_U.cpu(), 0
        parts = rows.split(self._rows_per_buffer(table))
        arriving: list[tuple[Tensor, Tensor, torch.cuda.Event]] = []
        for number, part in enumerate(parts):
            if len(arriving) == RING:
                _store(table, *arriving.pop(0))
            buffer, copied = self._buffer(number, table, len(part))
            here = slice(start, start + len(part))
            buffer.copy_(
                records_SR[here] if slots_U is None else records_SR.index_select(0, slots_U[here]),
                non_blocking=True,
            )
            copied.record()
            arriving.append((part, buffer, copied))
            start += len(part)
        for waiting in arriving:
            _store(table, *waiting)

    def _rows_per_buffer(self, table: Table) -> int:
        return max(1, BUFFER_BYTES // (table.width * table.records_VR.element_size()))

    def _buffer(self, number: int, table: Table, rows: int) -> tuple[Tensor, torch.cuda.Event]:
        """Pinned memory for some records, whose last copy is done, whichever way it went; and the event to record after the next."""
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


def _place(buffer: Tensor, records_SR: Tensor, start: int, slots_U: Tensor | None) -> None:
    here = slice(start, start + len(buffer))
    if slots_U is None:
        records_SR[here].copy_(buffer, non_blocking=True)
    else:
        records_SR.index_copy_(0, slots_U[here], buffer.to(records_SR.device, non_blocking=True))


def _store(table: Table, rows: Tensor, buffer: Tensor, copied: torch.cuda.Event) -> None:
    copied.synchronize()
    table.records_VR.index_copy_(0, rows, buffer)
