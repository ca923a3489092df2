"""Groups of tables whose rows move together.

Shapes: V rows, D dimensions, N ids, U unique rows, R elements of a record.
"""

from __future__ import annotations

import functools
import os
import threading
import warnings
import weakref
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, TypeVar

import torch
from torch import Tensor

from w2v.rows import ops
from w2v.rows.cache import Engine, RowCache, TransferStats
from w2v.rows.link import Link, MappedLink, link_between
from w2v.rows.moves import PageRows
from w2v.rows.optim import RowOptimizer
from w2v.rows.table import SplitTable, Table

PageLists = dict[int | None, list[Tensor]]  # rows of a page by part; None: a page without parts
Function = TypeVar("Function", bound=Callable[..., Any])


def outside_inference(function: Function) -> Function:
    """Return the function, which leaves torch.inference_mode if that is on.

    torch's own decorator takes as long as a kernel's launch where it is off.
    """

    @functools.wraps(function)
    def call(*args: Any, **settings: Any) -> Any:
        if not torch.is_inference_mode_enabled():
            return function(*args, **settings)
        with torch.inference_mode(False):
            return function(*args, **settings)

    return call  # type: ignore[return-value]


class RowGroup:
    """Tables side by side in one memory, which share row numbers and a cache.

    Attributes:
        lock: Buffers and records serve one thread at a time.
        parts: The tables that have the records, weights first, and their links.
        layout: Replaced when rows are renumbered or caches are made: older look-ups are invalid.
        bags_differ: Whether tables were found to differ in the offsets of their bags.
        weights_VW: Weight columns, padded to 16 bytes where the GPU reads them in place.
        is_exact: Whether these have no part of the optimizer state.
    """

    parts: list[tuple[Table, Link]]
    caches: list[CachedLink]
    layout: object
    bags_differ = False

    def __init__(self, table: Table, device: torch.device, lock: threading.RLock | None = None):
        self.table, self.device = table, device
        self.lock = lock or threading.RLock()
        self.members: list[Member] = []
        self.zeros_UD: Tensor | None = None  # for the next call of `zeros`
        self.link = link_between(table, device)
        self.is_mapped = isinstance(self.link, MappedLink)
        unit = 16 // table.dtype.itemsize if self.is_mapped else 1
        width = -(-table.dim // unit) * unit
        self.weights_VW = table.records_VR[:, :width]
        has_states = len(table.columns) > 1 and not isinstance(table, SplitTable)
        self.is_exact = width == table.dim or not has_states

    @property
    def paged_bytes(self) -> int:
        """Size of what a cache may hold: all but what is in the memory of the GPU."""
        return sum(part.records_VR.nbytes for part in self.table.parts if part.storage != "cuda")

    def make_caches(self) -> None:
        """Make empty caches, of the size of all members' `cache_bytes` together."""
        cache_bytes = sum(member.cache_bytes for member in self.members)
        # The records of a split table are those of both its tables, joined.
        slots = min(self.table.rows, cache_bytes * self.table.rows // max(1, self.paged_bytes))
        self.layout = object()
        self.parts, self.caches = [], []
        for part in self.table.parts:
            link = link_between(part, self.device)
            if slots and part.storage != "cuda":
                link = CachedLink(link, part, slots, self.device)
                self.caches.append(link)
            self.parts.append((part, link))

    def empty_caches(self) -> None:
        """Write all cached rows back."""
        for cache in self.caches:
            cache.flush()

    def in_place(self, rows_U: Tensor, narrow_U: Tensor | None) -> tuple[Tensor, Tensor] | None:
        """Return records on the compute device and the slots of rows.

        None if rows are moved to the device and back.
        """
        (part, link), *others = self.parts
        if isinstance(link, CachedLink) and not others:
            return link.locate(rows_U)
        if type(link) is Link and not others:
            return part.records_VR, rows_U.int() if narrow_U is None else narrow_U
        return None

    def read_weights(self, rows_U: Tensor, narrow_U: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return weights on the compute device, and the slots of the rows in them.

        Without slots the rows are in order.
        """
        if (located := self.in_place(rows_U, narrow_U)) is not None:
            return located
        return self.read_stored(self.link, self.weights_VW, rows_U), None

    def read_stored(
        self, link: Link, stored_VR: Tensor, rows_U: Tensor, slots_U: Tensor | None = None
    ) -> Tensor:
        """Return records as they are stored, on the compute device."""
        shape = rows_U.shape[0], stored_VR.shape[1]
        read_UR = torch.empty(shape, dtype=stored_VR.dtype, device=self.device)
        link.read(stored_VR, rows_U, read_UR, slots_U)
        return read_UR

    def zeros(self, rows: int) -> Tensor:
        """Return zeros, at least [rows, D]: `zeros_UD` if there are enough."""
        kept_UD, self.zeros_UD = self.zeros_UD, None
        if kept_UD is None or kept_UD.shape[0] < rows:
            kept_UD = torch.zeros(rows + rows // 8, self.table.dim, device=self.device)
        return kept_UD

    @outside_inference
    def step(
        self,
        optimizer: RowOptimizer,
        counted: tuple[float, int],  # by `optimizer.count_step`
        seed: int,  # of the rounding to bfloat16
        grad_UD: Tensor,
        lr: float,
        rows_U: Tensor,
        narrow_U: Tensor | None = None,  # the rows in 32 bits, if they are at hand
        count: Tensor | None = None,  # their number, if the GPU knows it
    ) -> None:
        """Step unique rows by the fused kernel, in place if they are on the GPU."""
        grad_UD = grad_UD.contiguous()
        if (located := self.in_place(rows_U, narrow_U)) is not None:
            records_SR, slots_U = located
            ops.step_rows(optimizer, counted, seed, records_SR, slots_U, count, grad_UD, lr)
            return
        ((part, link),) = self.parts
        stored_UR = self.read_stored(link, part.records_VR, rows_U)
        ops.step_rows(optimizer, counted, seed, stored_UR, None, count, grad_UD, lr)
        link.write(part.records_VR, rows_U, stored_UR)

    @outside_inference
    def read(self, rows_U: Tensor) -> Tensor:
        """Return the decoded records [U, R] of unique rows, on the compute device."""
        parts = [
            part.decode(self.read_stored(link, part.records_VR, rows_U))
            for part, link in self.parts
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

    @outside_inference
    def write(self, member: Member, rows_U: Tensor, records_UR: Tensor) -> None:
        """Write decoded records [U, R] of a member's unique rows."""
        member.version += 1
        own_U = rows_U - member.first_row if member.first_row else rows_U
        start = 0
        for (part, link), own in zip(self.parts, member.table.parts, strict=True):
            # Contiguous, as the kernels that copy records to pinned memory need them.
            part_UR = records_UR[:, start : start + part.width].contiguous()
            link.write(part.records_VR, rows_U, own.encode(own_U, part_UR))
            start += part.width


class Member:
    """A table of a group.

    Attributes:
        table: The records; its fields are "weight" and the states of the optimizer.
        first_rows: In the groups of all ranks, the table's rows are numbered from here on.
        first_row: The same in this process.
        device: Where rows come to.
        version: Number of changes of the table so far: rows read before one may be out of date.
        cache_bytes: Share of the group's cache, which a `flush` empties.
    """

    table: Table
    group: RowGroup

    def __init__(
        self,
        table: Table,
        group: RowGroup,
        cache_bytes: int = 0,
        first_rows: tuple[int, ...] = (0,),
        rank: int = 0,
    ):
        self.lock = group.lock
        self.version = 0
        self.cache_bytes = cache_bytes
        self._rank = rank
        self._join(table, group, first_rows)

    def _join(self, table: Table, group: RowGroup, first_rows: tuple[int, ...]) -> None:
        self.table, self.group, self.device = table, group, group.device
        self.first_rows, self.first_row = first_rows, first_rows[self._rank]
        group.members.append(self)
        group.make_caches()
        self.version += 1


def regroup(member: Member, table: Table, device: torch.device) -> None:
    """Use another table or device from now on, in a group of its own."""
    member.group.empty_caches()
    member.group.members.remove(member)
    member.group.make_caches()
    alone = (0,) * len(member.first_rows)
    member._join(table, RowGroup(table, device, member.lock), alone)


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
        self._cache: Engine | None = None
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

    def make_current(self, rows_U: Tensor) -> tuple[Tensor, int] | None:
        """Make this the current page; return its list and where the rows begin.

        None for no rows, or more than the capacity, for which the cache is emptied.
        """
        if not rows_U.shape[0]:
            return None
        if rows_U.shape[0] > self.slots:
            if not self._is_warned:
                room = f"gpu_bytes has room for {self.slots:,} rows, but a batch has"
                remedy = "raise gpu_bytes; such batches are paged without the cache"
                self._is_warned = True  # before, as warnings may be errors
                warnings.warn(f"{room} {len(rows_U):,}; {remedy}", stacklevel=2)
            self.flush()
            return None
        found = _find(self._current, rows_U)
        if found is None:
            found = _find(self._next, rows_U) or (rows_U, 0)
            self.prefetch([rows_U])
            self._filled().wait()
            self._current, self._next = self._next, {}
            self._slots.clear()
        return found

    def locate(self, rows_U: Tensor) -> tuple[Tensor, Tensor] | None:
        """Return the cache's records and the slots of rows, int32.

        Makes the rows the current page. Returns None for no rows, or more than the capacity.
        """
        if (found := self.make_current(rows_U)) is None:
            return None
        cache, (list_U, start) = self._filled(), found
        if (slots_U := self._slots.get(id(list_U))) is None:
            slots_U = self._slots[id(list_U)] = cache.slots_of(list_U)
        if rows_U is not list_U:
            slots_U = slots_U[start : start + rows_U.shape[0]]
        return cache.records_SR, slots_U

    def read(
        self, table_VR: Tensor, rows_U: Tensor, records_SR: Tensor, slots_U: Tensor | None = None
    ) -> None:
        assert table_VR is self._table.records_VR and slots_U is None
        if (located := self.locate(rows_U)) is not None:
            cached_SR, places_U = located
            torch.index_select(cached_SR, 0, places_U, out=records_SR)
        else:
            self._link.read(table_VR, rows_U, records_SR)

    def write(
        self, table_VR: Tensor, rows_U: Tensor, records_SR: Tensor, slots_U: Tensor | None = None
    ) -> None:
        assert table_VR is self._table.records_VR and slots_U is None
        if (located := self.locate(rows_U)) is not None:
            cached_SR, places_U = located
            cached_SR.index_copy_(0, places_U.long(), records_SR)
        else:
            self._link.write(table_VR, rows_U, records_SR)

    def flush(self) -> None:
        """Write all rows back and empty the cache."""
        if self._cache:
            self._cache.flush()
            if self._at_end:
                self._at_end.detach()
            self._past = self.stats
            self._cache = None  # free before another cache is allocated
            self._current, self._slots, self._next = {}, {}, {}

    def _filled(self) -> Engine:
        """Return the cache, a new one after `flush`."""
        if self._cache is None:
            self._cache = self._new_cache()
            if self._table.storage == "mmap":  # the file outlives this link and the program
                self._at_end = weakref.finalize(self, _flush_in, os.getpid(), self._cache)
        return self._cache

    def _new_cache(self) -> Engine:
        if self.slots == self._table.rows:
            return Engine(self._table, self._device)
        return RowCache(self._table, self.slots, self._device, is_timed=False)

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


def _flush_in(process: int, cache: Engine) -> None:
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
    for list_U in _lists(page):
        start = rows_U.data_ptr() - list_U.data_ptr()
        if 0 <= start <= list_U.nbytes - rows_U.nbytes:
            return list_U, start // rows_U.itemsize
    return None
