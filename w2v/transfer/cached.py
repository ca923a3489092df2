"""Rows stay on the GPU while there is room; what the next steps add comes over the link, and what has to go goes back, meanwhile.

A store of S slots on the GPU holds records of all tables, each row in one slot at most: that slot owns the row until it is written
back, so a row is never in two places and overlap changes no result. Three kinds of work run beside the computation:

    plan     which rows are missing, which slots they get, which rows must go (the caller's stream)
    reads    missing rows, CPU memory -> slots
    writes   rows that go, slots -> CPU memory

Steps `t` compute while the rows of steps `t + 1` are read. Rows of either are never written back then, so reads and writes touch
different rows and run at once. What orders them: reads wait for the writes planned before, whose rows and slots they may take up; the
computation waits for its reads; and a plan waits for the computation before the current one, whose rows it may send away.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from w2v.batch import Held, Page
from w2v.config import ConfigError
from w2v.table import Table
from w2v.transfer import Link


class Cached:
    """Moves rows over `link` only when they are not in one of the `slots` on the `device`.

    Shapes: T tables of V rows, S slots. S as a slot means "not on the GPU".
    """

    pages = True

    def __init__(self, link: Link, tables: Sequence[Table], slots: int, device: torch.device):
        assert len({(table.rows, table.width) for table in tables}) == 1, "tables that share slots are of one shape"
        self.link, self.tables, self.slots = link, list(tables), slots
        self.rows_used = self.rows_read = self.rows_written = 0
        self._records_SR = torch.empty(slots, tables[0].width, dtype=tables[0].records_VR.dtype, device=device)
        self._slot_of_TV = torch.full((len(tables), tables[0].rows), slots, dtype=torch.int32, device=device)
        self._plan_of_TV = torch.zeros_like(self._slot_of_TV)  # the last plan that wanted the row
        self._free = torch.arange(slots, device=device)  # free slots, the longest free first
        self._plan = 0
        self._reads, self._writes = (torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None for _ in range(2))
        self._planned = None if self._reads is None else torch.cuda.current_stream().record_event()
        self._waiting: Tensor | None = None  # marks of rows for which there was no room beside those in use
        self._held: deque[tuple[Tensor, ...]] = deque(maxlen=3)  # tensors of the last plans, which other streams may still use

    def prefetch(self, marks: Sequence[Tensor]) -> None:
        """Plan on the current stream, and start the moves, for the steps after those that compute now."""
        self._plan += 1
        marks_TV = torch.stack(list(marks))
        if not self._bring(marks_TV, in_use=self._plan - 1):
            self._waiting = marks_TV

    def hold(self, table: Table) -> Held:
        if self._waiting is not None:
            self._bring_at_last()
        if self._reads:
            torch.cuda.current_stream().wait_stream(self._reads)
        return Held(self._records_SR, self._slot_of_TV[self.tables.index(table)])

    def fetch(self, table: Table, rows_U: Tensor) -> Page:
        slots_U = self.hold(table).slot_of_V[rows_U].long()
        return Page(table, rows_U, self._records_SR.index_select(0, slots_U).float(), table.columns, slots_U=slots_U)

    def write_back(self, page: Page) -> None:
        self._records_SR.index_copy_(0, page.slots_U, page.table.encode(page.rows_U, page.records_UR))

    def flush(self) -> None:
        self._join()
        for table, slot_of_V in zip(self.tables, self._slot_of_TV, strict=True):
            rows = torch.nonzero(slot_of_V != self.slots).flatten()
            self.link.write(table, rows, self._records_SR, slot_of_V[rows].long())
        if self._reads:
            torch.cuda.current_stream().synchronize()

    def _bring_at_last(self) -> None:
        """Bring the rows that found no room beside those of the steps before, which have been computed by now."""
        self._join()
        marks_TV, self._waiting = self._waiting, None
        if not self._bring(marks_TV, in_use=self._plan):
            raise ConfigError(
                f"transfer.gpu_bytes has room for {self.slots:,} rows on the GPU, but {int(marks_TV.sum()):,} are needed at once; "
                "raise it, or lower train.batch_size, transfer.steps_per_page or model.negative_pool"
            )

    def _bring(self, marks_TV: Tensor, in_use: int) -> bool:
        """Give each marked row a slot and start the moves; False, with all as it was, where there is no room.

        Rows that a plan numbered `in_use` or higher wants stay. Rows are found by passes over marks for all of them, which keeps them
        sorted and needs few waits of the CPU for the GPU.
        """
        if self._planned:
            torch.cuda.current_stream().wait_event(self._planned)
        self._plan_of_TV.masked_fill_(marks_TV, self._plan)
        here_TV = self._slot_of_TV != self.slots
        missing_TV = marks_TV & ~here_TV
        idle_VT = (here_TV & (self._plan_of_TV < in_use)).T.contiguous()  # in order of frequency, whatever the table
        *coming_T, idle, used = torch.stack([*missing_TV.sum(1), idle_VT.sum(), marks_TV.sum()]).tolist()
        coming = sum(coming_T)
        # Where it must empty slots, it empties as many again: the next plan then has free ones and its reads need not wait.
        lacking = coming - len(self._free)
        leaving = min(max(0, lacking + coming), idle) if coming else 0
        if leaving < lacking:
            return False
        self.rows_used, self.rows_read, self.rows_written = self.rows_used + used, self.rows_read + coming, self.rows_written + leaving

        left, leaving_rows = [], []
        if leaving:  # the least frequent
            leaving_VT = idle_VT & (idle_VT.flatten().cumsum(0).view_as(idle_VT) > idle - leaving)
            for slot_of_V, leaving_V, count in zip(self._slot_of_TV, leaving_VT.T, leaving_VT.sum(0).tolist(), strict=True):
                rows = _first_true(leaving_V, count)
                left.append(slot_of_V[rows].long())
                leaving_rows.append(rows)
                slot_of_V.index_fill_(0, rows, self.slots)
        available = torch.cat([self._free, *left])
        taken, self._free = available[:coming].split(coming_T), available[coming:]
        coming_rows = [_first_true(missing_V, count) for missing_V, count in zip(missing_TV, coming_T, strict=True)]
        for slot_of_V, rows, slots in zip(self._slot_of_TV, coming_rows, taken, strict=True):
            slot_of_V[rows] = slots.int()
        self._held.append((marks_TV, *coming_rows, *taken, *leaving_rows, *left))
        self._move(coming_rows, taken, leaving_rows, left, reads_wait=lacking > 0)
        return True

    def _move(
        self, coming: Sequence[Tensor], taken: Sequence[Tensor], leaving: Sequence[Tensor], left: Sequence[Tensor], reads_wait: bool
    ) -> None:
        """Start to write back each table's `leaving` rows from their slots `left` and to read `coming` ones into slots `taken`."""
        if self._reads:
            self._planned = torch.cuda.current_stream().record_event()
            self._reads.wait_stream(self._writes)  # the writes planned before this
            self._reads.wait_event(self._planned)
            self._writes.wait_event(self._planned)
        with _on(self._writes):
            for table, rows, slots in zip(self.tables, leaving, left, strict=False):
                self.link.write(table, rows, self._records_SR, slots)
        if self._reads and reads_wait:
            self._reads.wait_stream(self._writes)
        with _on(self._reads):
            for table, rows, slots in zip(self.tables, coming, taken, strict=True):
                self.link.read(table, rows, self._records_SR, slots)

    def _join(self) -> None:
        """Have the current stream wait for all plans and moves."""
        if self._reads:
            current = torch.cuda.current_stream()
            current.wait_event(self._planned)
            current.wait_stream(self._reads)
            current.wait_stream(self._writes)


def _first_true(mask_V: Tensor, count: int) -> Tensor:
    """Where the mask holds, `count` times; knowing how often spares the wait for it."""
    return torch.nonzero_static(mask_V, size=count).flatten()


def _on(stream: torch.cuda.Stream | None) -> contextlib.AbstractContextManager:
    return torch.cuda.stream(stream) if stream else contextlib.nullcontext()
