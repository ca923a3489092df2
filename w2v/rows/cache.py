"""Caches of rows on the GPU; moves overlap with computation.

A cache of S slots has records of a table, each row in one slot at most. That slot owns the row
until it is written back: a row is never in two places, so overlap changes no result. Beside the
computation run

    plans    which rows miss, which slots they get, which rows are evicted (the caller's stream)
    moves    evicted rows to CPU memory, missing rows into their slots

Rows used least are evicted first, those in the lookahead window last (rows/cu/cache.cu).

Page t computes while the rows of page t + 1 move: rows of both are protected from eviction. If too
few slots are left for all misses of page t + 1, the rows used most are loaded at once, and the
others by a second plan once page t is done. A page of more than S rows is a user error.

Moves follow the order of their plans, and the writes of a plan come before its reads. The
computation waits for its reads. A plan waits for the page before the current one, whose rows it may
evict.

Shapes: S slots, A rows of the table.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from w2v.config import ConfigError
from w2v.rows import moves
from w2v.rows.link import Link, MappedLink, Waits, current_stream, on_stream
from w2v.rows.moves import AGE, HIGHEST_LIMIT, USE_BITS, PageRows
from w2v.rows.ops import View
from w2v.rows.table import Table


class TransferStats(NamedTuple):
    """What has crossed the link between CPU and GPU so far."""

    rows_used: int = 0  # unique rows of all pages
    rows_read: int = 0  # rows that were copied to the GPU
    rows_written: int = 0  # rows that were copied back
    wait_seconds: float = 0.0  # for which the computation stood still until rows had moved

    @classmethod
    def sum(cls, stats: Iterable[TransferStats]) -> TransferStats:
        """Return the sums of some stats."""
        return cls(*map(sum, zip(cls(), *stats, strict=True)))  # type: ignore[arg-type]


class Engine:
    """Loads the rows of a table to the compute device, a page at a time.

    A row is in one place at a time, so overlap changes no result. `moves_rows` says whether rows
    have to be prefetched at all. This is the engine of a table on the compute device, CPU or GPU:
    paging with nothing to move.
    """

    moves_rows = False

    def __init__(self, table: Table):
        self._table = table

    @property
    def stats(self) -> TransferStats:
        """What has crossed the link so far."""
        return TransferStats()

    def prefetch(self, page: PageRows) -> None:
        """Start to load the rows of the next page."""

    def view(self) -> View:
        """Return the records of the rows that were prefetched last, in place."""
        return self._whole_table

    @functools.cached_property
    def _whole_table(self) -> View:
        return View(self._table.records_VR, None)

    def flush(self) -> None:
        """Return when the table holds all that was computed."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()


class Paged(Engine):
    """Loads the rows of each page and writes them back: nothing is cached."""

    moves_rows = True

    def __init__(self, link: Link, table: Table, device: torch.device):
        super().__init__(table)
        self._link = link
        self._slot_of_A = torch.zeros(table.rows, dtype=torch.int32, device=device)
        self._rows_U: Tensor | None = None  # of the current page
        self._view: View | None = None
        self._marks_A: Tensor | None = None  # of the next page
        self._rows_read = 0
        self._rows_written = 0
        self._waits = Waits()

    @property
    def stats(self) -> TransferStats:
        seconds = self._waits.seconds
        return TransferStats(self._rows_read, self._rows_read, self._rows_written, seconds)

    def prefetch(self, page: PageRows) -> None:
        """Remember the rows: some may be on the current page until it is done."""
        self._marks_A = page.marks_A

    def view(self) -> View:
        if self._marks_A is not None:
            with self._waits.counted(self._slot_of_A.device):
                self._write_back()
                self._read(self._marks_A)
            if self._marks_A.is_cuda:
                # They are memory of the planning stream, which must not reuse it before they are
                # read: `nonzero` returns when it knows the number of rows, not yet the rows.
                self._marks_A.record_stream(current_stream())
            self._marks_A = None
        if self._view is None:
            raise RuntimeError("no page was prefetched")
        return self._view

    def flush(self) -> None:
        self._write_back()
        super().flush()

    def _read(self, marks_A: Tensor) -> None:
        rows_U = torch.nonzero(marks_A).flatten()
        shape = len(rows_U), self._table.width
        records_UR = torch.empty(shape, dtype=self._table.dtype, device=rows_U.device)
        self._link.read(self._table.records_VR, rows_U, records_UR)
        slots_U = torch.arange(len(rows_U), dtype=torch.int32, device=rows_U.device)
        self._slot_of_A[rows_U] = slots_U
        self._rows_U = rows_U
        self._view = View(records_UR, self._slot_of_A)
        self._rows_read += len(rows_U)

    def _write_back(self) -> None:
        if self._rows_U is not None and self._view is not None:
            self._link.write(self._table.records_VR, self._rows_U, self._view.records_SR)
            self._rows_written += len(self._rows_U)


class RowCache(Engine, ABC):
    """Cache of rows on the device; subclasses plan and make the moves.

    Rows with few uses are evicted first, and rows in the lookahead window last.

    Args:
        link: Moves the records.
        table: The table.
        slots: Capacity of the cache in rows.
        device: The compute device.
    """

    moves_rows = True
    is_timed = True  # whether stats have the seconds that the computation waits

    def __init__(self, link: Link, table: Table, slots: int, device: torch.device):
        super().__init__(table)
        assert table.rows < 2**31, "rows are counted in 32 bits"
        self.link = link
        self.slots = slots
        # The last record is a dummy, slot S, to which rows without a slot point.
        self.records_SR = torch.empty(slots + 1, table.width, dtype=table.dtype, device=device)
        self._plan = 0
        self._is_whole = True  # no error came between a plan and its moves
        self._second_plan_done = True  # or not needed: all rows of the page have slots
        self._arrived_plan = 0  # the plan whose rows have arrived
        self._reads = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None
        # Events after the last plan, after the moves of each of the last two plans, and after the
        # last moves; reused once all waits for them are enqueued. Without a GPU there are none.
        self._planned = self._record()
        self._moved = [self._record(), self._record()]
        self._arrived = self._moved[0]
        self._waits = Waits()

    @abstractmethod
    def _make_plan(self, page: PageRows | None) -> None:
        """Assign free or evicted slots to missing rows, and list the copies.

        Rows of the page before are not evicted. Without `page` this is the page's second plan:
        rows that the first one left without slots get them, and the page before may be evicted.
        """

    @abstractmethod
    def _make_moves(self) -> None:
        """Write evicted rows back and read the missing ones."""

    @abstractmethod
    def _all_rows_have_slots(self) -> bool:
        """Return whether all rows of the last plan are known to have slots."""

    @abstractmethod
    def _rows_over_capacity(self) -> int:
        """Return how many rows a second plan left without slots, if known."""

    @abstractmethod
    def slots_of(self, rows_U: Tensor) -> Tensor:
        """Return the slots of rows, int32."""

    @abstractmethod
    def _cached_rows(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield rows that are cached, and their slots, int64."""

    def prefetch(self, page: PageRows) -> None:
        """Plan on the current stream, and start the moves for the next page."""
        self._require_whole()
        self._is_whole = False
        self._plan += 1
        self._second_plan_done = False
        # The lists of this plan may still be read by the moves of the plan before the last.
        for event in (self._planned, self._moved[self._plan % 2]):
            self._wait(event)
        self._make_plan(page)
        self._record(self._planned)
        with on_stream(self._reads):
            self._wait(self._planned)
            self._move()
        self._is_whole = True

    def wait(self) -> None:
        """Have the current stream wait for the rows that were prefetched last."""
        # A step calls this twice; only the first call after a plan has to wait.
        self._require_whole()
        if self._arrived_plan != self._plan:
            with self._waits.counted(self.records_SR.device, self.is_timed):
                self._finish_plan()
                self._wait(self._arrived)
            self._arrived_plan = self._plan

    def flush(self) -> None:
        self._require_whole()
        self._finish_plan()
        self._wait(self._arrived)
        # The rows stay cached as well, so training goes on without reading them again.
        for rows_U, slots_U in self._cached_rows():
            self.link.write(self._table.records_VR, rows_U, self.records_SR, slots_U)
        if self._reads:
            current_stream().synchronize()
        self._check_capacity()

    def _finish_plan(self) -> None:
        """Assign slots to rows without one, once the page before is done."""
        if not self._second_plan_done and not self._all_rows_have_slots():
            self._wait(self._arrived)
            self._is_whole = False
            self._make_plan(None)
            self._move()
            self._record(self._planned)  # the next plan follows these moves
            self._is_whole = True
        self._second_plan_done = True
        self._check_capacity()

    def _require_whole(self) -> None:
        """Raise `RuntimeError` if an error came between a plan and its moves."""
        if not self._is_whole:
            inconsistent = "the row cache is inconsistent after an earlier error"
            raise RuntimeError(f"{inconsistent}; reload the last checkpoint")

    def _move(self) -> None:
        self._make_moves()
        self._arrived = self._record(self._moved[self._plan % 2])

    def _check_capacity(self) -> None:
        if excess := self._rows_over_capacity():
            raise ConfigError(
                f"transfer.gpu_bytes has room for {self.slots:,} rows on the GPU, but "
                f"{self.slots + excess:,} are needed at once; raise it, or lower "
                "train.batch_size, transfer.steps_per_page or model.negative_pool"
            )

    def _wait(self, event: torch.cuda.Event | None) -> None:
        if event:
            current_stream().wait_event(event)

    def _record(self, event: torch.cuda.Event | None = None) -> torch.cuda.Event | None:
        return current_stream().record_event(event) if self._reads else None


class TorchCache(RowCache):
    """Row cache over any link, planned in plain torch.

    It is the specification of `GpuCache`.
    """

    def __init__(self, link: Link, table: Table, slots: int, device: torch.device):
        super().__init__(link, table, slots, device)
        self._slot_of_A = torch.full((table.rows,), slots, dtype=torch.int32, device=device)
        self._view = View(self.records_SR, self._slot_of_A)
        # Rows of the last two plans, cached rows, rows evicted last.
        bits = torch.zeros(4, table.rows, dtype=torch.bool, device=device)
        *self._wanted, self._cached_A, self._late_A = bits
        # Uses of rows, and the limit of those evicted first.
        self._uses_A = torch.zeros(table.rows, dtype=torch.uint8, device=device)
        self._limit = 1
        self._slots_in_use = 0
        self._rows_without_slot = 0  # after the last plan
        self._used = self._read = self._written = 0  # rows
        # Of the last two plans: loaded rows, evicted rows, and the slots of the former.
        none = torch.zeros(0, dtype=torch.int64, device=device)
        self._lists: list[tuple[Tensor, Tensor, Tensor]] = [(none,) * 3] * 2

    def view(self) -> View:
        self.wait()
        return self._view

    def slots_of(self, rows_U: Tensor) -> Tensor:
        return self._slot_of_A.index_select(0, rows_U)

    def _cached_rows(self) -> Iterator[tuple[Tensor, Tensor]]:
        rows_U = torch.nonzero(self._cached_A).flatten()
        yield rows_U, self._slot_of_A[rows_U].long()

    @property
    def stats(self) -> TransferStats:
        return TransferStats(self._used, self._read, self._written, self._waits.seconds)

    def _make_plan(self, page: PageRows | None) -> None:
        wanted_A = protected_A = self._wanted[self._plan % 2]
        if page is not None:
            self._mark(page, wanted_A)
            protected_A = self._wanted[0] | self._wanted[1]  # the page before may still compute
        missing_A = wanted_A & ~self._cached_A
        evictable_A = self._cached_A & ~protected_A
        masks = missing_A, evictable_A & self._late_A, evictable_A & ~self._late_A
        *counts, used = torch.stack([mask_A.sum() for mask_A in (*masks, wanted_A)]).tolist()
        missing, late, others = (
            torch.nonzero_static(mask_A, size=count).flatten()
            for mask_A, count in zip(masks, counts, strict=True)
        )
        # Rows are evicted from the last, which are those of rare words.
        evictable = torch.cat([late, others])
        empty = self.slots - self._slots_in_use
        evictions = min(max(0, len(missing) - empty), len(evictable))
        evicted_U = evictable[len(evictable) - evictions :]
        loaded_U = missing[: empty + evictions]
        slots_in_use = self._slots_in_use + len(loaded_U) - evictions
        unused = torch.arange(self._slots_in_use, slots_in_use, device=missing.device)
        self._cached_A.index_fill_(0, loaded_U, True).index_fill_(0, evicted_U, False)
        slots = torch.cat([unused, self._slot_of_A[evicted_U].long()])
        self._lists[self._plan % 2] = loaded_U, evicted_U, slots
        self._slots_in_use = slots_in_use
        self._rows_without_slot = len(missing) - len(loaded_U)
        if page is not None:
            self._limit += len(others) < evictions
            self._used += used
        self._read += len(loaded_U)
        self._written += evictions

    def _mark(self, page: PageRows, wanted_A: Tensor) -> None:
        """Mark the rows of a page and those evicted last, and count uses."""
        wanted_A.zero_()
        if page.marks_A is not None:
            wanted_A.copy_(page.marks_A)
        for rows_U in page.lists:
            wanted_A.index_fill_(0, rows_U, True)
        if self._plan % AGE == 0 or self._limit >= HIGHEST_LIMIT:
            self._uses_A >>= 1
            self._limit = max(1, self._limit >> 1)
        if page.is_counted:
            self._uses_A.add_(wanted_A).clamp_(max=2**USE_BITS - 1)
        torch.gt(self._uses_A, self._limit, out=self._late_A)
        if page.soon_A is not None:
            self._late_A |= page.soon_A
        for rows_U, known in page.soon:
            count, is_wrong = (len(rows_U), 0) if known is None else known.tolist()
            self._late_A.index_fill_(0, rows_U[: 0 if is_wrong else count], True)

    def _make_moves(self) -> None:
        loaded_U, evicted_U, slots = self._lists[self._plan % 2]
        rows_U, order = evicted_U.sort()
        from_slots = slots[len(slots) - len(evicted_U) :][order]
        self.link.write(self._table.records_VR, rows_U, self.records_SR, from_slots)
        self._slot_of_A.index_fill_(0, evicted_U, self.slots)
        rows_U, order = loaded_U.sort()
        self.link.read(self._table.records_VR, rows_U, self.records_SR, slots[order])
        self._slot_of_A.index_copy_(0, loaded_U, slots.int())

    def _all_rows_have_slots(self) -> bool:
        return self._rows_without_slot == 0

    def _rows_over_capacity(self) -> int:
        return self._rows_without_slot if self._second_plan_done else 0


class GpuCache(RowCache):
    """Row cache over a pinned table, planned on the GPU.

    The CPU never waits for a plan's result: it omits a page's second plan only if it has already
    seen that the first one found slots for all rows. It evicts the rows that a `TorchCache` does,
    but where a page is replaced before it was used.

    Args:
        by_row: Whether there is an array with the slot of each row, as a `view` has it. Without it
            the cache takes one byte for each row (`moves.MovePlanner`).
    """

    def __init__(self, table: Table, slots: int, device: torch.device, by_row: bool):
        super().__init__(MappedLink(), table, slots, device)
        slot_of_A = None
        if by_row:
            slot_of_A = torch.full((table.rows,), slots, dtype=torch.int32, device=device)
        self.is_timed = by_row  # of pages of a batch, it would cost as much as two launches
        self._planner = moves.MovePlanner(slots, table.rows, device, slot_of_A)
        self._view = View(self.records_SR, slot_of_A)

    def view(self) -> View:
        assert self._view.slot_of_A is not None, "the slots are in an array"
        self.wait()
        return self._view

    @property
    def stats(self) -> TransferStats:
        _, used, read, written, _ = self._planner.counters.tolist()
        return TransferStats(used, read, written, self._waits.seconds)

    def slots_of(self, rows_U: Tensor) -> Tensor:
        return self._planner.slots_of(rows_U)

    def _cached_rows(self) -> Iterator[tuple[Tensor, Tensor]]:
        return self._planner.cached_rows()

    def _make_plan(self, page: PageRows | None) -> None:
        self._planner.plan(page, self._plan, self._plan - (page is not None))

    def _make_moves(self) -> None:
        moves.exchange_records(
            self._planner.moves[self._plan % 2],
            self._table.records_VR,
            self.records_SR,
            self._planner.slot_of_A,
            self.slots,
        )

    def _all_rows_have_slots(self) -> bool:
        is_planned = self._planned is None or self._planned.query()
        return is_planned and self._planner.notices[self._plan % 2][0] == 0

    def _rows_over_capacity(self) -> int:
        return max(int(excess) for _, excess in self._planner.notices)
