"""Groups of tables whose rows move together.

Shapes: V rows, D dimensions, N ids, U unique rows, R elements of a record.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from w2v.rows import ops
from w2v.rows.cache import CachedLink, TransferStats
from w2v.rows.launch import has_cupy
from w2v.rows.link import Link, link_between
from w2v.rows.moves import MOST_ROWS, PLANNED_BYTES
from w2v.rows.ops import View
from w2v.rows.optim import RowOptimizer
from w2v.rows.table import SplitTable, Table, padded

Function = TypeVar("Function", bound=Callable[..., Any])
PAGE_BYTES = 16 << 20  # smaller pages get no room: planning takes longer than moving them


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
        layout: Replaced when a table joins or leaves, or `gpu_bytes` changes: older look-ups are
            invalid.
        link: Moves weight columns past the caches, padded to 16 bytes where the GPU reads them in
            place.
        has_kernels: Whether kernels look up rows: on a GPU, where CuPy is installed.
        bags_differ: Whether tables were found to differ in the offsets of their bags.
        is_exact: Whether these columns have no part of the optimizer state.
    """

    parts: list[tuple[Table, Link]]
    caches: list[CachedLink]
    pages_only: bool  # whether rows are cached during `PagedOptimizer.pages` only
    layout: object = None
    bags_differ = False

    def __init__(self, table: Table, device: torch.device, lock: threading.RLock | None = None):
        self.table, self.device = table, device
        self.lock = lock or threading.RLock()
        self.members: list[Member] = []
        self.zeros_UD: Tensor | None = None  # for the next call of `zeros`
        self.is_mapped = (table.storage, device.type) == ("pinned", "cuda")
        self.has_kernels = device.type == "cuda" and has_cupy()
        width = padded(table.dim, table.dtype.itemsize, 16) if self.is_mapped else table.dim
        self.link = link_between(table, device, width)
        self._past, self.caches = TransferStats(), []  # of caches before, and those now
        has_states = len(table.columns) > 1 and not isinstance(table, SplitTable)
        self.is_exact = width == table.dim or not has_states

    @property
    def paged_bytes(self) -> int:
        """Size of what a cache may hold: all but what is in the memory of the GPU."""
        return sum(part.records_VR.nbytes for part in self.table.parts if part.storage != "cuda")

    def make_caches(self) -> None:
        """Make empty caches, of the size of all members' `cache_bytes` together."""
        self.layout = object()
        cache_bytes = sum(member.cache_bytes for member in self.members)
        # The records of a split table are those of both its tables, joined.
        self._set_slots(cache_bytes * self.table.rows // max(1, self.paged_bytes))
        self.pages_only = self.is_mapped and not self.caches and self.table.rows <= MOST_ROWS

    def make_room(self, rows: int) -> None:
        """Have room for two pages of so many rows, if `pages_only`."""
        record_bytes = self.paged_bytes // max(1, self.table.rows)  # of both tables, if split
        present = self.caches[0].slots if self.caches else 0
        rows = min(rows, self.table.rows)
        wanted = min(2 * rows, self.table.rows)
        if not self.pages_only or rows * record_bytes < PAGE_BYTES or present >= wanted:
            return
        # As if nothing was taken yet: else each call would take half of what the last one left.
        free = torch.cuda.mem_get_info(self.device)[0] + present * record_bytes
        spared = free // 2 - PLANNED_BYTES * self.table.rows
        slots = min(wanted + wanted // 8, spared // record_bytes)
        if slots > max(present, rows):
            self.empty_caches()
            self._set_slots(slots)

    def end_pages(self) -> None:
        """Write rows back that were only there for pages, as `pages_only` says."""
        with self.lock:
            self.empty_caches()
            self._set_slots(0)

    @property
    def stats(self) -> TransferStats:
        """What has crossed the link so far, with caches."""
        return TransferStats.sum([self._past, *(cache.stats for cache in self.caches)])

    def _set_slots(self, slots: int) -> None:
        """Make caches anew; those before are empty."""
        slots = min(self.table.rows, slots)
        self._past = self.stats
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

    def in_place(self, rows_U: Tensor) -> View | None:
        """Return records on the compute device, those of these rows among them.

        None if rows are moved to the device and back.
        """
        (part, link), *others = self.parts
        if isinstance(link, CachedLink) and not others:
            return link.view(rows_U)
        if type(link) is Link and not others:
            return View(part.records_VR, None)
        return None

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
        narrow_U: Tensor,  # the same in 32 bits
        count: Tensor | None = None,  # their number, if the GPU knows it
    ) -> None:
        """Step unique rows by the fused kernel, in place if they are on the GPU."""
        grad_UD = grad_UD.contiguous()
        if (view := self.in_place(rows_U)) is not None:
            ops.step_rows(optimizer, counted, seed, view, narrow_U, count, grad_UD, lr)
            return
        ((_, link),) = self.parts
        stored_UR = link.records(rows_U)
        ops.step_rows(optimizer, counted, seed, View(stored_UR, None), None, count, grad_UD, lr)
        link.write(rows_U, stored_UR)

    @outside_inference
    def read(self, rows_U: Tensor) -> Tensor:
        """Return the decoded records [U, R] of unique rows, on the compute device."""
        parts = [part.decode(link.records(rows_U)) for part, link in self.parts]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

    @outside_inference
    def write(self, member: Member, rows_U: Tensor, records_UR: Tensor) -> None:
        """Write decoded records [U, R] of a member's unique rows."""
        member.version += 1
        start = 0
        for (part, link), own in zip(self.parts, member.table.parts, strict=True):
            # Contiguous, as the kernels that copy records to pinned memory need them.
            part_UR = records_UR[:, start : start + part.width].contiguous()
            link.write(rows_U, own.encode(rows_U, part_UR, member.first_row))
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
