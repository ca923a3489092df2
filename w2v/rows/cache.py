"""Caches of rows on the GPU; moves overlap with computation.

A cache of S slots has records of a table, each row in one slot at most. That slot owns the row
until it is written back: a row is never in two places, so overlap changes no result. A page takes

    a plan   which rows miss, which slots they get, which rows are evicted (the caller's stream)
    moves    evicted rows to CPU memory, missing rows into their slots (a stream beside it)

Rows used least are evicted first, those in the lookahead window last (rows/cu/cache.cu).

Page t computes while the rows of page t + 1 move: rows of both are protected from eviction. If too
few slots are left for all misses of page t + 1, the first rows are loaded at once, and the others
by a second plan once page t is done. A page of more than S rows is a user error.

Moves follow the order of their plans, and the writes of a plan come before its reads. The
computation waits for its reads. A plan waits for the page before the current one, whose rows it may
evict.

Shapes: S slots, A rows of the table.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from w2v.config import ConfigError
from w2v.rows.link import Link, MappedLink, current_stream, link_between, on_stream
from w2v.rows.moves import MOST_ROWS, GpuPlanner, TorchPlanner, WantedRows
from w2v.rows.ops import View
from w2v.rows.table import Table
from w2v.system.process import finalize

PageLists = dict[int | None, list[Tensor]]  # by the first row of their table; None: of all tables
FLUSHED_ROWS = 1 << 24  # of a table, cached or not, that `flush` handles at a time


class TransferStats(NamedTuple):
    """What has crossed the link between CPU and GPU so far."""

    rows_used: int = 0  # unique rows of all pages
    rows_read: int = 0  # rows that were copied to the GPU
    rows_written: int = 0  # rows that were copied back

    @classmethod
    def sum(cls, stats: Iterable[TransferStats]) -> TransferStats:
        """Return the sums of some stats."""
        return cls._make(map(sum, zip(cls(), *stats, strict=True)))


class Engine:
    """Loads the rows of a table to the compute device, a page at a time.

    This one is for a table whose rows are all there, CPU or GPU: paging with nothing to move.

    Args:
        device: If given, a copy of the records is there until `flush`.

    Attributes:
        moves_rows: Whether rows have to be prefetched at all.
        view: Where records are; those of the page that was prefetched last, after `wait`.
    """

    moves_rows = False

    def __init__(self, table: Table, device: torch.device | None = None):
        self._table = table
        self.records_SR = table.records_VR
        self._is_copy = device is not None
        if device:
            assert table.rows <= MOST_ROWS
            self.records_SR = table.records_VR.to(device, copy=True)
        self.view = View(self.records_SR, None)

    @property
    def stats(self) -> TransferStats:
        """What has crossed the link so far."""
        return TransferStats(rows_read=self._table.rows * self._is_copy)

    def prefetch(self, page: WantedRows) -> None:
        """Start to load the rows of the next page."""

    def wait(self) -> None:
        """Have the current stream wait for the rows that were prefetched last."""

    def flush(self) -> None:
        """Return when the table holds all that was computed."""
        if self._is_copy:
            self._table.records_VR.copy_(self.records_SR)
        if torch.cuda.is_available():
            torch.cuda.synchronize()


class RowCache(Engine):
    """Cache of rows on the device, in slots that a planner assigns.

    Args:
        slots: Capacity of the cache in rows.
        planner: By default the one that suits the link.
    """

    moves_rows = True

    def __init__(
        self,
        table: Table,
        slots: int,
        device: torch.device,
        planner: type[TorchPlanner] | type[GpuPlanner] | None = None,
    ):
        assert table.rows <= MOST_ROWS
        self._table = table
        self.slots = slots
        self._link = link_between(table, device)
        # The last record is a dummy, slot S, to which rows without a slot point.
        self.records_SR = torch.empty(slots + 1, table.width, dtype=table.dtype, device=device)
        if planner is None:
            planner = GpuPlanner if isinstance(self._link, MappedLink) else TorchPlanner
        self.planner = planner(slots, table.rows, device)
        self.view = View(self.records_SR, self.planner.slot_of_A)
        self._plan = 0
        self._is_consistent = True  # no error came between a plan and its moves
        self._arrived_plan = 0  # the plan whose rows have arrived
        self._reads = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None
        # Events after the last plan, after the moves of each of the last two plans, and after the
        # last moves; reused once all waits for them are enqueued. Without a GPU there are none.
        self._planned = self._record()
        self._moved = [self._record(), self._record()]
        self._arrived = self._moved[0]

    @property
    def stats(self) -> TransferStats:
        return TransferStats._make(self.planner.counts())

    def prefetch(self, page: WantedRows) -> None:
        """Plan on the current stream, and start the moves for the next page."""
        self._require_consistent()
        self._is_consistent = False
        self._plan += 1
        # The lists of this plan may still be read by the moves of the plan before the last.
        for event in (self._planned, self._moved[self._plan % 2]):
            self._wait(event)
        self.planner.plan(page, self._plan)
        self._record(self._planned)
        with on_stream(self._reads):
            self._wait(self._planned)
            self._move()
        self._is_consistent = True

    def wait(self) -> None:
        self._require_consistent()
        if self._arrived_plan != self._plan:
            self._finish_plan()
            self._wait(self._arrived)
            self._arrived_plan = self._plan

    def flush(self) -> None:
        self.wait()
        # The rows stay cached as well, so training goes on without reading them again.
        for first, slot_of_a in enumerate(self.planner.slot_of_A.split(FLUSHED_ROWS)):
            cached_U = torch.nonzero(slot_of_a != self.slots).flatten()
            rows_U, slots_U = cached_U + first * FLUSHED_ROWS, slot_of_a[cached_U].long()
            self._link.write(rows_U, self.records_SR, slots_U)
        if self._reads:
            current_stream().synchronize()
        self._check_capacity()

    def _finish_plan(self) -> None:
        """Assign slots to rows without one, once the page before is done."""
        if not self.planner.has_placed_all(self._plan, self._planned):
            self._wait(self._arrived)
            self._is_consistent = False
            self.planner.plan(None, self._plan)
            self._move()
            self._record(self._planned)  # the next plan follows these moves
            self._is_consistent = True
        self._check_capacity()

    def _require_consistent(self) -> None:
        """Raise `RuntimeError` if an error came between a plan and its moves."""
        if not self._is_consistent:
            remedy = "make the tables anew and load the last checkpoint"
            raise RuntimeError(f"the row cache is inconsistent after an earlier error; {remedy}")

    def _move(self) -> None:
        self.planner.move(self._plan, self._link, self.records_SR)
        self._arrived = self._record(self._moved[self._plan % 2])

    def _check_capacity(self) -> None:
        if excess := self.planner.refused():
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


class CachedLink(Link):
    """Link with a cache of a table's rows.

    The rows used least are evicted first, and those of announced pages last. Lists of more rows
    than the cache's capacity go through the link beneath.

    A page is several lists of rows: of some batches that were read ahead, or of tables that share
    the records and are looked up one after the other. A list is known by its memory: its rows are
    loaded once for all calls with the same tensor or a slice of it.

    Args:
        link: Moves the records between the table and the device.
        slots: Capacity of the cache in rows.
    """

    def __init__(self, link: Link, table: Table, slots: int, device: torch.device):
        if table.rows > MOST_ROWS:
            rows = f"{table.rows:,} rows, which are numbered in 32 bits"
            raise ValueError(f"gpu_bytes cannot cache a table of {rows}; set gpu_bytes=0")
        super().__init__(link.table_VR)
        self._link = link
        self._table = table
        self.slots = min(slots, table.rows)
        self._device = device
        self._cache: Engine | None = None
        self._past = TransferStats()  # of caches before this one
        self._rows_used = 0
        self._current: PageLists = {}
        self._next: PageLists = {}  # prefetched, until it is the current page
        self._uncounted: set[int] = set()  # tables prefetched since a page was counted
        self._is_warned = False
        self._at_end: weakref.finalize | None = None  # writes the rows back

    @property
    def stats(self) -> TransferStats:
        """What has crossed the link so far."""
        moved = self._past
        if self._cache:
            moved = TransferStats.sum([moved, self._cache.stats])
        return moved._replace(rows_used=self._rows_used)

    def prefetch(
        self, lists: Sequence[Tensor], soon: Sequence[Tensor] = (), one_table: int | None = None
    ) -> None:
        """Prefetch the next page; the one before, if any, becomes the current one.

        Args:
            lists: Its rows.
            soon: As in `WantedRows`.
            one_table: The first row of the table that all lists are of. They replace its lists of
                the current page; those of other tables are in the next page too, if they fit.
        """
        lists = [
            rows_U
            for rows_U in lists
            if 0 < rows_U.shape[0] <= self.slots
            and not _has(self._current, rows_U)
            and not _has(self._next, rows_U)
        ]
        if not lists:
            return
        cache = self._open_cache()
        self._begin_next()  # as a plan keeps only the rows of the page before it
        page = self._fitting(lists, one_table)
        # A page of several tables repeats lists of the page before. Uses are counted when a table
        # comes round again, so that each list counts once.
        is_counted = len(page) == 1 or one_table in self._uncounted
        if is_counted:
            self._uncounted.clear()
        if one_table is not None:
            self._uncounted.add(one_table)
        cache.prefetch(WantedRows(lists=list(_lists(page)), soon=soon, is_counted=is_counted))
        self._next = page  # after what may fail
        self._rows_used += sum(rows_U.shape[0] for rows_U in page[one_table])

    def _begin_next(self) -> None:
        """Make the page that was prefetched, if any, the current one."""
        if self._next:
            self._open_cache().wait()
            self._current, self._next = self._next, {}

    def view(self, rows_U: Tensor) -> View | None:
        """Make the page of these rows the current one; return where it is.

        Returns None for no rows, or more than the capacity, for which the cache is emptied.
        """
        count = rows_U.shape[0]
        if count > self.slots:
            if not self._is_warned:
                room = f"the GPU has room for {self.slots:,} rows, but a batch has"
                remedy = "raise gpu_bytes; such batches are paged without the cache"
                self._is_warned = True  # before, as warnings may be errors
                warnings.warn(f"{room} {count:,}; {remedy}", stacklevel=2)
            self.flush()
        if not 0 < count <= self.slots:
            return None
        if not _has(self._current, rows_U):
            self.prefetch([rows_U])
            self._begin_next()
        return self._open_cache().view

    def read(self, rows_U: Tensor, records_SR: Tensor, slots_U: Tensor | None = None) -> None:
        assert slots_U is None
        if (view := self.view(rows_U)) is not None:
            torch.index_select(view.records_SR, 0, view.slots(rows_U), out=records_SR)
        else:
            self._link.read(rows_U, records_SR)

    def write(self, rows_U: Tensor, records_SR: Tensor, slots_U: Tensor | None = None) -> None:
        assert slots_U is None
        if (view := self.view(rows_U)) is not None:
            view.records_SR.index_copy_(0, view.slots(rows_U), records_SR)
        else:
            self._link.write(rows_U, records_SR)

    def flush(self) -> None:
        """Write all rows back and empty the cache."""
        if self._cache:
            self._cache.flush()
            if self._at_end:
                self._at_end.detach()
            self._past = self.stats
            self._cache = None  # free before another cache is allocated
            self._current, self._next = {}, {}

    def _open_cache(self) -> Engine:
        """Return the cache, a new one after `flush`."""
        if self._cache is None:
            if self.slots == self._table.rows:
                self._cache = Engine(self._table, self._device)
            else:
                self._cache = RowCache(self._table, self.slots, self._device)
            if self._table.storage == "mmap":  # the file outlives this link and the program
                self._at_end = finalize(self, self._cache.flush)
        return self._cache

    def _fitting(self, lists: list[Tensor], one_table: int | None) -> PageLists:
        """Return the lists of the next page that fit in the cache.

        Those of other tables are dropped first, then the last of `lists`.
        """
        page: PageLists = {one_table: lists}
        if one_table is not None and _count_rows(self._current | page) <= self.slots:
            return self._current | page
        while _count_rows(page) > self.slots:
            lists.pop()
        return page


def _lists(page: PageLists) -> Iterator[Tensor]:
    return chain.from_iterable(page.values())


def _count_rows(page: PageLists) -> int:
    return sum(rows_U.shape[0] for rows_U in _lists(page))


def _has(page: PageLists, rows_U: Tensor) -> bool:
    """Return whether a page has these rows: a list of it, or a slice of one."""
    begin, size = rows_U.data_ptr(), rows_U.nbytes
    return any(0 <= begin - list_U.data_ptr() <= list_U.nbytes - size for list_U in _lists(page))
