"""Caches of rows on the GPU; moves overlap with computation.

A cache of S slots holds records of all tables, each row in one slot at most. That slot owns the
row until it is written back: a row is never in two places, so overlap changes no result. Beside the
computation run

    plans    which rows miss, which slots they get, which rows are evicted (the caller's stream)
    moves    evicted rows to CPU memory, missing rows into their slots

Page t computes while the rows of page t + 1 move, and rows of either are never evicted then. Moves
follow the order of their plans, and the writes of a plan come before its reads. The computation
waits for its reads. A plan waits for the page before the current one, whose rows it may evict.

Shapes: T tables, V rows of a table, S slots, N = T * V rows counted through all tables.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from w2v.kernels import cuda_cache
from w2v.kernels.batch import Page, View
from w2v.model.table import Table
from w2v.transfer.engine import TransferStats, cache_too_small
from w2v.transfer.links import Link, MappedLink
from w2v.transfer.streams import Waits, current_stream, on_stream


class RowCache(ABC):
    """Cache of rows on the device, whatever plans its moves.

    Args:
        link: Moves the records.
        tables: Tables of one shape.
        slots: Rows that the cache holds, its capacity.
        device: The compute device.
        uses_TV: Expected uses of each row: rows used least are evicted first. By default rows are
            taken to be in order of frequency.
    """

    pages = True

    def __init__(
        self,
        link: Link,
        tables: Sequence[Table],
        slots: int,
        device: torch.device,
        uses_TV: Tensor | None = None,
    ):
        assert len({(table.rows, table.width) for table in tables}) == 1, "tables of one shape"
        self.link = link
        self.tables = list(tables)
        self.slots = slots
        shape = len(tables), tables[0].rows
        assert shape[0] * shape[1] < 2**31, "rows of all tables are counted in 32 bits"
        # Sorted first: it takes 48 bytes a row for a moment, which the records need afterwards.
        self._order_N = _order_by_use(shape, device, uses_TV)
        # Kernels find the last record, nobody's, where a row without a slot would lie.
        records = slots + 1, tables[0].width
        self._records_SR = torch.empty(records, dtype=tables[0].records_VR.dtype, device=device)
        # Slot S stands for rows that are not cached.
        self._slot_of_TV = torch.full(shape, slots, dtype=torch.int32, device=device)
        self._page = Page(*(View(self._records_SR, slot_of_V) for slot_of_V in self._slot_of_TV))
        self._plan = 0
        self._page_plan = 0  # the plan whose rows have arrived
        self._reads = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None
        # Events of the last plan and of the last move; reused once all waits for them are enqueued.
        self._planned = current_stream().record_event() if self._reads else None
        self._arrived = current_stream().record_event() if self._reads else None
        self._waits = Waits()

    @property
    @abstractmethod
    def stats(self) -> TransferStats:
        """What has crossed the link so far."""

    @abstractmethod
    def prefetch(self, marks_TV: Tensor, soon_V: Tensor | None = None) -> None:
        """Plan on the current stream, and start the moves for the next page."""

    @abstractmethod
    def _complete(self) -> None:
        """Give slots to all rows of the last plan, once the page before is done."""

    def page(self) -> Page:
        # A step calls this twice; only the first call after a plan has to wait.
        if self._page_plan != self._plan:
            with self._waits.counted(current_stream()) if self._reads else contextlib.nullcontext():
                self._complete()
                self._wait_for_moves()
            self._page_plan = self._plan
        return self._page

    def flush(self) -> None:
        self._complete()
        self._wait_for_moves()
        for table, slot_of_V in zip(self.tables, self._slot_of_TV, strict=True):
            # The rows stay cached as well, so training goes on without reading them again.
            rows = torch.nonzero(slot_of_V != self.slots).flatten()
            self.link.write(table, rows, self._records_SR, slot_of_V[rows].long())
        if self._reads:
            current_stream().synchronize()

    def _wait_for_moves(self) -> None:
        """Have the current stream wait for all plans and moves."""
        if self._arrived:
            current_stream().wait_event(self._arrived)


class TorchCache(RowCache):
    """Row cache over any link, planned in plain torch.

    It is the specification of `MappedCache`.
    """

    def __init__(
        self,
        link: Link,
        tables: Sequence[Table],
        slots: int,
        device: torch.device,
        uses_TV: Tensor | None = None,
    ):
        super().__init__(link, tables, slots, device, uses_TV)
        self._rows_used = 0
        self._rows_read = 0
        self._rows_written = 0
        self._wanted_TV = torch.zeros_like(self._slot_of_TV)  # the last plan that wanted the row
        self._free = torch.arange(slots, device=device)  # free slots, longest free first
        # A page that found no room beside the current one.
        self._waiting: tuple[Tensor, Tensor | None] | None = None
        self._writes = torch.cuda.Stream(device, priority=-1) if self._reads else None
        # Tensors of the last plans, which other streams may still use.
        self._in_flight: deque[list[Tensor]] = deque(maxlen=3)

    @property
    def stats(self) -> TransferStats:
        counts = self._rows_used, self._rows_read, self._rows_written
        return TransferStats(*counts, self._waits.seconds)

    def prefetch(self, marks_TV: Tensor, soon_V: Tensor | None = None) -> None:
        self._plan += 1
        # The page before may still compute: its rows must stay as well as those of this plan.
        if not self._bring(marks_TV, soon_V, in_use=self._plan - 1):
            self._waiting = marks_TV, soon_V

    def _complete(self) -> None:
        if self._waiting is None:
            return
        self._wait_for_moves()
        marks_TV, soon_V = self._waiting
        self._waiting = None
        # The page before is computed by now: only the rows of this plan must stay.
        if not self._bring(marks_TV, soon_V, in_use=self._plan):
            raise cache_too_small(self.slots, int(marks_TV.sum()))

    def _bring(self, marks_TV: Tensor, soon_V: Tensor | None, in_use: int) -> bool:
        """Give marked rows slots and start the moves; return False if too few.

        Rows that a plan numbered `in_use` or higher wants are not evicted. Rows are found by passes
        over marks for all of them, which keeps them sorted and needs few waits for the GPU.
        """
        if self._planned:
            current_stream().wait_event(self._planned)
        self._wanted_TV.masked_fill_(marks_TV, self._plan)
        cached_TV = self._slot_of_TV != self.slots
        missing_TV = marks_TV & ~cached_TV
        idle_TV = cached_TV & (self._wanted_TV < in_use)
        counts = [*missing_TV.sum(1), idle_TV.sum(), marks_TV.sum()]
        *missing_T, idle, used = torch.stack(counts).tolist()
        missing = sum(missing_T)
        evictions = max(0, missing - len(self._free))
        if evictions > idle:
            return False
        self._rows_used += used
        self._rows_read += missing
        self._rows_written += evictions

        evicted_rows = []
        freed = []
        if evictions:
            evicted_TV = self._least_used(idle_TV, idle, evictions, soon_V)
            evicted_T = evicted_TV.sum(1).tolist()
            parts = zip(self._slot_of_TV, evicted_TV, evicted_T, strict=True)
            for slot_of_V, evicted_V, count in parts:
                rows = _first_true(evicted_V, count)
                freed.append(slot_of_V[rows].long())
                evicted_rows.append(rows)
                slot_of_V.index_fill_(0, rows, self.slots)
        available = torch.cat([self._free, *freed])
        taken = list(available[:missing].split(missing_T))
        self._free = available[missing:]
        entering_rows = [
            _first_true(missing_V, count)
            for missing_V, count in zip(missing_TV, missing_T, strict=True)
        ]
        for slot_of_V, rows, slots in zip(self._slot_of_TV, entering_rows, taken, strict=True):
            slot_of_V[rows] = slots.int()
        soon = [] if soon_V is None else [soon_V]
        self._in_flight.append([marks_TV, *soon, *entering_rows, *taken, *evicted_rows, *freed])
        self._move(entering_rows, taken, evicted_rows, freed)
        return True

    def _least_used(self, idle_TV: Tensor, idle: int, number: int, soon_V: Tensor | None) -> Tensor:
        """Mark the least used idle rows; those of the lookahead window last."""
        idle_N = idle_TV.flatten()[self._order_N]
        place_N = idle_N.cumsum(0, dtype=torch.int32)
        if soon_V is not None:
            soon_N = idle_N & soon_V.repeat(len(idle_TV))[self._order_N]
            soon_before_N = soon_N.cumsum(0, dtype=torch.int32)
            # Rows outside the window come after all rows in it.
            late_N = place_N.sub_(soon_before_N).add_(soon_before_N[-1])
            place_N = torch.where(soon_N, soon_before_N, late_N)
        chosen_TV = torch.zeros_like(idle_TV)
        chosen_TV.view(-1)[self._order_N] = idle_N & (place_N > idle - number)
        return chosen_TV

    def _move(
        self,
        entering: Sequence[Tensor],
        slots: Sequence[Tensor],
        evicted: Sequence[Tensor],
        freed: Sequence[Tensor],
    ) -> None:
        """Start to write back the evicted rows and to read the entering ones."""
        if self._reads:
            self._planned = current_stream().record_event()
            self._writes.wait_event(self._planned)
        with on_stream(self._writes):
            for table, rows, its_slots in zip(self.tables, evicted, freed, strict=False):
                self.link.write(table, rows, self._records_SR, its_slots)
        if self._reads:
            # A row may enter a slot whose last row is still being written back.
            self._reads.wait_stream(self._writes)
        with on_stream(self._reads):
            for table, rows, its_slots in zip(self.tables, entering, slots, strict=True):
                self.link.read(table, rows, self._records_SR, its_slots)
        if self._reads:
            self._arrived = self._reads.record_event()


class MappedCache(RowCache):
    """Row cache over pinned tables, planned on the GPU.

    The CPU never waits for what a plan finds.

    A plan that finds no room for all missing rows brings the first of them; the rest come when the
    page before is computed, by a second plan. The CPU omits that one only when it has already seen
    that nothing is left to bring.
    """

    def __init__(
        self,
        tables: Sequence[Table],
        slots: int,
        device: torch.device,
        uses_TV: Tensor | None = None,
    ):
        super().__init__(MappedLink(), tables, slots, device, uses_TV)
        self._state = cuda_cache.CacheState(slots, self._slot_of_TV, self._order_N)
        addresses = [table.records_VR.data_ptr() for table in tables]
        self._addresses_T = torch.tensor(addresses, device=device)
        # The next plan is made while the moves of one are under way: each has lists of its own.
        self._plans = [cuda_cache.MovePlan(self._state) for _ in range(2)]
        self._moved = [current_stream().record_event() for _ in self._plans]
        self._is_complete = True

    @property
    def stats(self) -> TransferStats:
        _, used, read, written, _ = self._state.counters.tolist()
        return TransferStats(used, read, written, self._waits.seconds)

    def prefetch(self, marks_TV: Tensor, soon_V: Tensor | None = None) -> None:
        self._plan += 1
        self._is_complete = False
        self._make_plan(marks_TV, soon_V, in_use=self._plan - 1)
        self._reads.wait_event(self._planned)
        self._move(self._reads)

    def flush(self) -> None:
        super().flush()
        self._check_room()

    def _complete(self) -> None:
        if not self._is_complete and not (self._planned.query() and self._current.notice[0] == 0):
            self._wait_for_moves()
            self._make_plan(None, None, in_use=self._plan)
            self._move(current_stream())
            current_stream().record_event(self._planned)  # the next plan follows these moves
        self._is_complete = True
        self._check_room()

    def _make_plan(self, marks_TV: Tensor | None, soon_V: Tensor | None, in_use: int) -> None:
        stream = current_stream()
        # The lists of this plan may still be read by the moves of the plan before the last.
        for event in (self._planned, self._moved[self._plan % 2]):
            stream.wait_event(event)
        marks = marks_TV, soon_V
        cuda_cache.plan_moves(self._state, self._current, *marks, self._plan, in_use)
        stream.record_event(self._planned)

    def _move(self, stream: torch.cuda.Stream) -> None:
        table = self.tables[0].records_VR
        cuda_cache.exchange_records(
            self._current.moves,
            self._addresses_T,
            table.shape[0],
            table.stride(0),
            self._records_SR,
            self._slot_of_TV,
            self.slots,
            stream,
        )
        self._arrived = stream.record_event(self._moved[self._plan % 2])

    @property
    def _current(self) -> cuda_cache.MovePlan:
        return self._plans[self._plan % 2]

    def _check_room(self) -> None:
        """Raise the error of a plan that found no room, if one is known by now."""
        refused = max(int(plan.notice[1]) for plan in self._plans)
        if refused:
            raise cache_too_small(self.slots, self.slots + refused)


def _order_by_use(shape: tuple[int, int], device: torch.device, uses_TV: Tensor | None) -> Tensor:
    """Return the rows of all tables by falling expected use."""
    rows = shape[0] * shape[1]
    by_row_N = torch.arange(rows, dtype=torch.int32, device=device).view(shape).T.flatten()
    if uses_TV is None:
        return by_row_N
    return by_row_N[uses_TV.T.flatten().argsort(descending=True, stable=True)]


def _first_true(mask_V: Tensor, count: int) -> Tensor:
    """Return the `count` places where the mask holds, without a wait."""
    return torch.nonzero_static(mask_V, size=count).flatten()
