"""Caches of rows on the GPU; moves overlap with computation.

A cache of S slots has records of a table, each row in one slot at most. That slot owns the row
until it is written back: a row is never in two places, so overlap changes no result. Beside the
computation run

    plans    which rows miss, which slots they get, which rows are evicted (the caller's stream)
    moves    evicted rows to CPU memory, missing rows into their slots

Rows used least are evicted first, those in the lookahead window last (kernels/cu/cache.cu).

Page t computes while the rows of page t + 1 move: rows of both are protected from eviction. If too
few slots are left for all misses of page t + 1, the rows used most are loaded at once, and the
others by a second plan once page t is done. A page of more than S rows is a user error.

Moves follow the order of their plans, and the writes of a plan come before its reads. The
computation waits for its reads. A plan waits for the page before the current one, whose rows it may
evict.

Shapes: S slots, A rows of the table.
"""

from __future__ import annotations

import os
import warnings
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from itertools import chain

import torch
from torch import Tensor

from w2v.config import ConfigError
from w2v.kernels import cuda_cache
from w2v.kernels.batch import View
from w2v.kernels.cuda_cache import AGE, HIGHEST_LIMIT, USE_BITS, PageRows
from w2v.model.table import Table
from w2v.transfer.engine import Engine, TransferStats
from w2v.transfer.links import Link, MappedLink, Records
from w2v.transfer.streams import Waits, current_stream, on_stream

PageLists = dict[int | None, list[Tensor]]  # rows of a page by part; None: a page without parts


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
            self.link.write(self._table, rows_U, self.records_SR, slots_U)
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
        self.link.write(self._table, rows_U, self.records_SR, from_slots)
        self._slot_of_A.index_fill_(0, evicted_U, self.slots)
        rows_U, order = loaded_U.sort()
        self.link.read(self._table, rows_U, self.records_SR, slots[order])
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
            the cache takes one byte for each row (`cuda_cache.MovePlanner`).
    """

    def __init__(self, table: Table, slots: int, device: torch.device, by_row: bool):
        super().__init__(MappedLink(), table, slots, device)
        slot_of_A = None
        if by_row:
            slot_of_A = torch.full((table.rows,), slots, dtype=torch.int32, device=device)
        self.is_timed = by_row  # of pages of a batch, it would cost as much as two launches
        self._planner = cuda_cache.MovePlanner(slots, table.rows, device, slot_of_A)
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
        cuda_cache.exchange_records(
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


class WholeTable:
    """Cache with a slot for each row of a table, all loaded when it is made."""

    def __init__(self, table: Table, device: torch.device):
        assert table.rows < 2**31, "slots are numbers of 32 bits"
        self._table = table
        self.records_SR = table.records_VR.to(device, copy=True)

    @property
    def stats(self) -> TransferStats:
        return TransferStats(rows_read=self._table.rows)

    def prefetch(self, page: PageRows) -> None:
        """All rows are there."""

    def wait(self) -> None:
        """All rows are there."""

    def slots_of(self, rows_U: Tensor) -> Tensor:
        """Return the slots of rows, int32."""
        return rows_U.int()

    def flush(self) -> None:
        self._table.records_VR.copy_(self.records_SR)


class CachedLink(Link):
    """Link with a cache of a table's rows.

    The rows used least are evicted first, and those of announced pages last. Lists of more rows
    than the cache's capacity go through the link beneath.

    A page is several lists of rows, such as one for each of some batches, or of some tables that
    share the records. A list is known by its memory: its rows are loaded once for all calls with
    the same tensor or a slice of it.

    Args:
        link: Moves the records between the table and the device.
        table: The table.
        slots: Capacity of the cache in rows.
        device: The compute device.
    """

    def __init__(self, link: Link, table: Table, slots: int, device: torch.device):
        self._link = link
        self._table = table
        self.slots = min(slots, table.rows)
        self._device = device
        self._cache: RowCache | WholeTable | None = None
        self._past = TransferStats()  # of caches before this one
        self._rows_used = 0
        self._current: PageLists = {}
        self._slots: dict[int, Tensor] = {}  # of lists of the current page, by their `id`
        self._next: PageLists = {}  # of the page that was prefetched
        self._parts_seen: set[int] = set()  # that were prefetched since a page was counted
        self._is_warned = False
        self._at_end: weakref.finalize | None = None  # writes the rows back

    @property
    def stats(self) -> TransferStats:
        """What has crossed the link so far."""
        caches = [self._past, *([self._cache.stats] if self._cache else [])]
        return TransferStats.sum(caches)._replace(rows_used=self._rows_used)

    def prefetch(
        self,
        lists: Sequence[Tensor],
        soon: Sequence[tuple[Tensor, Tensor | None]] = (),
        part: int | None = None,
    ) -> None:
        """Prefetch a page; the current page stays valid until `make_current`.

        A second page that is prefetched before replaces the first one, and the current page.

        Args:
            lists: Its rows.
            soon: As in `PageRows`.
            part: If given, the lists replace those of this part of the current page, whose other
                parts become those of the next page too, if they fit.
        """
        lists = [
            rows_U
            for rows_U in lists
            if 0 < rows_U.shape[0] <= self.slots
            and _find(self._current, rows_U) is None
            and _find(self._next, rows_U) is None
        ]
        if not lists:
            return
        cache = self._filled()
        if self._next:  # a plan keeps the rows of the page before it, not of the one before that
            self._current, self._slots, self._next = {}, {}, {}
        page = self._fitting(lists, part)
        # A page with parts repeats those of the page before. It is counted when a part comes round
        # again, so that each part counts once.
        is_counted = len(page) == 1 or part in self._parts_seen
        if is_counted:
            self._parts_seen.clear()
        if part is not None:
            self._parts_seen.add(part)
        cache.prefetch(PageRows(lists=_lists(page), soon=soon, is_counted=is_counted))
        self._next = page  # after what may fail
        self._rows_used += sum(rows_U.shape[0] for rows_U in page[part])

    def make_current(self, rows_U: Tensor) -> bool:
        """Make this the current page.

        Returns False, and empties the cache, if there are more rows than its capacity.
        """
        if rows_U.shape[0] > self.slots:
            if not self._is_warned:
                room = f"gpu_bytes has room for {self.slots:,} rows, but a batch has"
                remedy = "raise gpu_bytes; such batches are paged without the cache"
                self._is_warned = True  # before, as warnings may be errors
                warnings.warn(f"{room} {len(rows_U):,}; {remedy}", stacklevel=2)
            self.flush()
            return False
        if rows_U.shape[0]:
            self._current_list(rows_U)
        return True

    def locate(self, rows_U: Tensor) -> tuple[Tensor, Tensor] | None:
        """Return the cache's records and the slots of rows, int32.

        Makes the rows the current page. Returns None for no rows, or more than the capacity.
        """
        if not rows_U.shape[0] or not self.make_current(rows_U):
            return None
        cache, (list_U, start) = self._filled(), self._current_list(rows_U)
        if (slots_U := self._slots.get(id(list_U))) is None:
            slots_U = self._slots[id(list_U)] = cache.slots_of(list_U)
        if rows_U is not list_U:
            slots_U = slots_U[start : start + rows_U.shape[0]]
        return cache.records_SR, slots_U

    def read(
        self, table: Records, rows_U: Tensor, records_SR: Tensor, slots_U: Tensor | None = None
    ) -> None:
        assert table is self._table and slots_U is None
        if (located := self.locate(rows_U)) is not None:
            cached_SR, places_U = located
            torch.index_select(cached_SR, 0, places_U, out=records_SR)
        else:
            self._link.read(table, rows_U, records_SR)

    def write(
        self, table: Records, rows_U: Tensor, records_SR: Tensor, slots_U: Tensor | None = None
    ) -> None:
        assert table is self._table and slots_U is None
        if (located := self.locate(rows_U)) is not None:
            cached_SR, places_U = located
            cached_SR.index_copy_(0, places_U.long(), records_SR)
        else:
            self._link.write(table, rows_U, records_SR)

    def flush(self) -> None:
        """Write all rows back and empty the cache."""
        if self._cache:
            self._cache.flush()
            if self._at_end:
                self._at_end.detach()
            self._past = self.stats
            self._cache = None  # free before another cache is allocated
            self._current, self._slots, self._next = {}, {}, {}

    def _filled(self) -> RowCache | WholeTable:
        """Return the cache, a new one after `flush`."""
        if self._cache is None:
            self._cache = self._new_cache()
            if self._table.storage == "mmap":  # the file outlives this link and the program
                self._at_end = weakref.finalize(self, _flush_in, os.getpid(), self._cache)
        return self._cache

    def _current_list(self, rows_U: Tensor) -> tuple[Tensor, int]:
        """Make the list of these rows current; return it and where they begin."""
        if (found := _find(self._current, rows_U)) is not None:
            return found
        found = _find(self._next, rows_U) or (rows_U, 0)
        self.prefetch([rows_U])
        self._filled().wait()
        self._current, self._next = self._next, {}
        self._slots.clear()
        return found

    def _new_cache(self) -> RowCache | WholeTable:
        if self.slots == self._table.rows:
            return WholeTable(self._table, self._device)
        if isinstance(self._link, MappedLink):
            return GpuCache(self._table, self.slots, self._device, by_row=False)
        return TorchCache(self._link, self._table, self.slots, self._device)

    def _fitting(self, lists: list[Tensor], part: int | None) -> PageLists:
        """Return the lists of the next page that fit in the cache.

        Other parts of the current page are dropped first, then the last of `lists`.
        """
        page: PageLists = {part: lists}
        if part is not None and _count_rows(self._current | page) <= self.slots:
            return self._current | page
        while _count_rows(page) > self.slots:
            page = {part: page[part][:-1]}
        return page


def _flush_in(process: int, cache: RowCache | WholeTable) -> None:
    """Write rows back, but not from a forked process: its copy is out of date."""
    if os.getpid() == process:
        cache.flush()


def _lists(page: PageLists) -> list[Tensor]:
    return list(chain.from_iterable(page.values()))


def _count_rows(page: PageLists) -> int:
    return sum(rows_U.shape[0] for rows_U in _lists(page))


def _find(page: PageLists, rows_U: Tensor) -> tuple[Tensor, int] | None:
    """Return the list of a page that has these rows, and where they begin.

    It is the same tensor, or they are a slice of it.
    """
    lists = _lists(page)
    for list_U in lists:
        if rows_U is list_U:
            return list_U, 0
    for list_U in lists:
        start = rows_U.data_ptr() - list_U.data_ptr()
        if 0 <= start <= list_U.nbytes - rows_U.nbytes:
            return list_U, start // rows_U.itemsize
    return None
