"""Moves of a row cache, planned in plain torch or by cu/cache.cu.

Shapes: S slots, A rows, W words of bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from w2v.rows.launch import THREADS, blocks_for, c_struct, kernel
from w2v.rows.link import Link

MOST_ROWS = 2**31 - 1  # of a cached table: they are numbered in 32 bits
PLANNED_BYTES = 5  # of a row of such a table, on the GPU: its slot, and bits
WARP_ROWS = 1024  # rows that one warp of cache.cu surveys
# As in cache.cu: bits of a row's number of uses, and the limit at which all numbers are halved.
USE_BITS = 4
HIGHEST_LIMIT = 12
AGE = 2048  # plans after which numbers of uses are halved, whatever the limit is
# Blocks for both directions at once: few enough that kernels which compute meanwhile do not wait
# for GPU memory behind reads of CPU memory (docs/dev/log.md has the figures). Records below a KiB
# take more blocks: less is under way in each.
EXCHANGE_BLOCKS, NARROW_BLOCKS = 16, 24
NARROW_BYTES = 1024
Bits, RowCounts, Wanted = (c_struct("cache.cu", name) for name in ("Bits", "RowCounts", "Wanted"))
NOTHING = Wanted(marks=None, used_soon=None, uses=None, is_counted=False, halve=False)


class Moves(NamedTuple):
    """Lists of rows to load and to evict, on the GPU.

    plan: struct Plan of cache.cu, int64 [6]: first the number of loaded rows, and how many of them
    get unused slots. These are first in the list; the others get the evicted rows' slots, in order.
    """

    loaded: Tensor  # int32
    evicted: Tensor  # int32
    slots: Tensor  # int32, of the loaded rows
    plan: Tensor


class WantedRows(NamedTuple):
    """Rows that a page needs: marks, or lists.

    marks_A, soon_A: bool, whether each row is needed, and whether it is evicted last. lists: rows,
    int64. soon: lists of rows of later pages, which are evicted last; negative ones are skipped.
    is_counted: whether the page adds 1 to the number of uses of its rows.
    """

    marks_A: Tensor | None = None
    soon_A: Tensor | None = None
    lists: Sequence[Tensor] = ()
    soon: Sequence[Tensor] = ()
    is_counted: bool = True


class TorchPlanner:
    """Plans the moves of a cache in plain torch, as `GpuPlanner` has to.

    Attributes:
        slot_of_A: int32, the slot of each row; S for rows that are not cached.
    """

    def __init__(self, slots: int, rows: int, device: torch.device):
        self._capacity = slots
        self.slot_of_A = torch.full((rows,), slots, dtype=torch.int32, device=device)
        # Rows of the last two plans, cached rows, rows evicted last.
        bits = torch.zeros(4, rows, dtype=torch.bool, device=device)
        *self._wanted, self._cached_A, self._late_A = bits
        # Uses of rows, and the limit of those evicted first.
        self._uses_A = torch.zeros(rows, dtype=torch.uint8, device=device)
        self._limit = 1
        self._slots_in_use = 0
        self._unplaced = self._refused = 0  # rows without a slot after the last plan
        self._used = self._read = self._written = 0  # rows
        # Of the last two plans: loaded rows, evicted rows, and the slots of the former.
        none = torch.zeros(0, dtype=torch.int64, device=device)
        self._lists: list[tuple[Tensor, Tensor, Tensor]] = [(none,) * 3] * 2

    def plan(self, page: WantedRows | None, number: int) -> None:
        """Assign free or evicted slots to missing rows, and list the copies.

        Rows of this plan are not evicted, nor are those of the plan before it, which may still
        compute.

        Args:
            page: Rows that the page needs. None: those that plan `number` was given before and left
                without slots; the plan before it is done.
            number: Number of this plan.
        """
        wanted_A = protected_A = self._wanted[number % 2]
        if page is not None:
            self._mark(page, wanted_A, number)
            protected_A = self._wanted[0] | self._wanted[1]
        missing_A = wanted_A & ~self._cached_A
        evictable_A = self._cached_A & ~protected_A
        masks = missing_A, evictable_A & self._late_A, evictable_A & ~self._late_A
        *counts, used = torch.stack([mask_A.sum() for mask_A in (*masks, wanted_A)]).tolist()
        missing, late, others = (
            torch.nonzero_static(mask_A, size=count).flatten()
            for mask_A, count in zip(masks, counts, strict=True)
        )
        # From the last on: rows of word2vec are sorted by their words' counts.
        evictable = torch.cat([late, others])
        empty = self._capacity - self._slots_in_use
        evictions = min(max(0, len(missing) - empty), len(evictable))
        evicted_U = evictable[len(evictable) - evictions :]
        loaded_U = missing[: empty + evictions]
        slots_in_use = self._slots_in_use + len(loaded_U) - evictions
        unused = torch.arange(self._slots_in_use, slots_in_use, device=missing.device)
        self._cached_A.index_fill_(0, loaded_U, True).index_fill_(0, evicted_U, False)
        slots = torch.cat([unused, self.slot_of_A[evicted_U].long()])
        self._lists[number % 2] = loaded_U, evicted_U, slots
        self._slots_in_use = slots_in_use
        self._unplaced = len(missing) - len(loaded_U)
        if page is not None:
            self._limit += len(others) < evictions
            self._used += used
        else:
            self._refused = self._unplaced
        self._read += len(loaded_U)
        self._written += evictions

    def _mark(self, page: WantedRows, wanted_A: Tensor, number: int) -> None:
        """Mark the rows of a page and those evicted last, and count uses."""
        wanted_A.zero_()
        if page.marks_A is not None:
            wanted_A.copy_(page.marks_A)
        for rows_U in page.lists:
            wanted_A.index_fill_(0, rows_U, True)
        if number % AGE == 0 or self._limit >= HIGHEST_LIMIT:
            self._uses_A >>= 1
            self._limit = max(1, self._limit >> 1)
        if page.is_counted:
            self._uses_A.add_(wanted_A).clamp_(max=2**USE_BITS - 1)
        torch.gt(self._uses_A, self._limit, out=self._late_A)
        if page.soon_A is not None:
            self._late_A |= page.soon_A
        for rows_U in page.soon:
            self._late_A.index_fill_(0, rows_U[rows_U >= 0], True)

    def move(self, number: int, link: Link, records_SR: Tensor) -> None:
        """Write evicted rows back, and load others into their slots."""
        loaded_U, evicted_U, slots = self._lists[number % 2]
        rows_U, order = evicted_U.sort()
        from_slots = slots[len(slots) - len(evicted_U) :][order]
        link.write(rows_U, records_SR, from_slots)
        self.slot_of_A.index_fill_(0, evicted_U, self._capacity)
        rows_U, order = loaded_U.sort()
        link.read(rows_U, records_SR, slots[order])
        self.slot_of_A.index_copy_(0, loaded_U, slots.int())

    def has_placed_all(self, number: int, planned: torch.cuda.Event | None) -> bool:
        """Return whether all rows of a plan are known to have slots.

        `planned`: an event after the plan.
        """
        return self._unplaced == 0

    def refused(self) -> int:
        """Return how many rows a second plan left without slots, if known."""
        return self._refused

    def counts(self) -> tuple[int, int, int]:
        """Return how many rows were used, read and written so far."""
        return self._used, self._read, self._written


class GpuPlanner:
    """Plans the moves of a cache on the GPU.

    It keeps 4 + USE_BITS bits of each row, and its slot. Rows with more uses than a limit are
    evicted last. The limit rises where others do not suffice; numbers of uses are halved when it
    reaches HIGHEST_LIMIT, and every AGE plans. The CPU never waits for a plan's result. The rows
    evicted are those of a `TorchPlanner`, but where a page is replaced before it was used.

    Attributes:
        counters: int64 [5]: slots in use, rows used, read and written so far, and the number of
            uses above which rows are evicted last.
        moves: Of plan n: `moves[n % 2]`; its lists have room for the largest page so far.
        notices: For both, int64 [2] in pinned memory: rows that found no slot beside those in use,
            and rows that were refused since no slot is left at all.
    """

    def __init__(self, slots: int, rows: int, device: torch.device):
        self._capacity, self._rows, self._device = slots, rows, device
        self.slot_of_A = torch.full((rows,), slots, dtype=torch.int32, device=device)
        self._warps = -(-rows // WARP_ROWS)
        words = self._warps * WARP_ROWS // 32
        # Bits of rows that two plans want, cached rows, rows evicted last, and numbers of uses.
        bits = torch.zeros(4 + USE_BITS, words, dtype=torch.int32, device=device)
        *self._wanted, self._cached_W, self._late_W = bits[:4]
        self._uses = bits[4:]
        misses, first, last = torch.empty(3, self._warps + 1, dtype=torch.int32, device=device)
        self._counts = RowCounts(
            misses=misses, evict_first=first, evict_last=last, stretches=self._warps
        )
        self._done = torch.zeros((), dtype=torch.int32, device=device)
        self.counters = torch.tensor([0, 0, 0, 0, 1], device=device)
        numbers = torch.zeros(2, 6, dtype=torch.int64, device=device)
        none = torch.empty(0, dtype=torch.int32, device=device)
        self.moves = [Moves(none, none, none, of_plan) for of_plan in numbers]
        self._notices = torch.zeros(2, 2, dtype=torch.int64, device="cpu", pin_memory=True).unbind()
        self.notices = [notice.numpy() for notice in self._notices]  # read faster than tensors

    def plan(self, page: WantedRows | None, number: int) -> None:
        """Do as `TorchPlanner.plan`."""
        wanted = NOTHING if page is None else self._wanted_by(page, number)
        bits = Bits(
            wanted=self._wanted[number % 2],
            in_use=None if page is None else self._wanted[(number - 1) % 2],
            cached=self._cached_W,
            late=self._late_W,
        )
        moves = self.moves[number % 2]
        blocks = -(-32 * self._warps // THREADS)
        kernel("cache.cu", "survey")(
            blocks,
            all=bits,
            page=wanted,
            count=self._rows,
            counts=self._counts,
            slots=self._capacity,
            final=page is None,
            done=self._done,
            totals=self.counters,
            plan=moves.plan,
            notice=self._notices[number % 2],
        )
        kernel("cache.cu", "list")(
            blocks,
            all=bits,
            counts=self._counts,
            slot_of=self.slot_of_A,
            moves=moves,
            next_wanted=self._wanted[(number + 1) % 2],
        )

    def _wanted_by(self, page: WantedRows, number: int) -> Any:
        """Return struct Wanted of a page, with room for its moves."""
        most = self._rows
        if page.marks_A is None:
            most = sum(rows_U.shape[0] for rows_U in page.lists)
        self._make_room(number, most)
        for rows_U in page.lists:
            self._mark(rows_U, self._wanted[number % 2])
        for soon_U in page.soon:
            self._mark(soon_U, self._late_W)
        return Wanted(
            marks=page.marks_A,
            used_soon=page.soon_A,
            uses=self._uses,
            is_counted=page.is_counted,
            halve=number % AGE == 0,
        )

    def _make_room(self, number: int, wanted: int) -> None:
        """Have lists of a plan for so many wanted rows."""
        moves = self.moves[number % 2]
        room = min(self._capacity, wanted)
        if moves.loaded.shape[0] < room:
            torch.cuda.synchronize()  # moves on another stream may read the lists that go
            room = min(self._capacity, self._rows, room + room // 8)
            lists = torch.empty(3, room, dtype=torch.int32, device=self._device).unbind()
            self.moves[number % 2] = Moves(lists[0], lists[1], lists[2], moves.plan)

    def move(self, number: int, link: Link, records_SR: Tensor) -> None:
        """Do as `TorchPlanner.move`, for a pinned table."""
        exchange_records(
            self.moves[number % 2], link.table_VR, records_SR, self.slot_of_A, self._capacity
        )

    def has_placed_all(self, number: int, planned: torch.cuda.Event | None) -> bool:
        """Do as `TorchPlanner.has_placed_all`, without waiting for the plan."""
        return (planned is None or planned.query()) and self.notices[number % 2][0] == 0

    def refused(self) -> int:
        """Do as `TorchPlanner.refused`."""
        return max(int(excess) for _, excess in self.notices)

    def counts(self) -> tuple[int, int, int]:
        """Do as `TorchPlanner.counts`."""
        _, used, read, written, _ = self.counters.tolist()
        return used, read, written

    def _mark(self, rows_U: Tensor, words_W: Tensor) -> None:
        """Set the bits of rows."""
        count = rows_U.shape[0]
        kernel("cache.cu", "mark_rows")(blocks_for(count), rows=rows_U, count=count, words=words_W)


def exchange_records(
    moves: Moves,
    table_AR: Tensor,  # on the GPU or in pinned memory
    records_SR: Tensor,  # the cache
    slot_of_A: Tensor | None = None,  # kept current, if given
    no_slot: int = 0,  # of rows that are not cached
) -> None:
    """Write evicted records back, and load others into their slots."""
    itemsize = records_SR.element_size()
    record_bytes = records_SR.shape[1] * itemsize
    kernel("rows.cu", "exchange")(
        NARROW_BLOCKS if record_bytes < NARROW_BYTES else EXCHANGE_BLOCKS,
        table=table_AR,
        stride=table_AR.stride(0) * itemsize // 16,
        records=records_SR,
        width=record_bytes // 16,
        moves=moves,
        slot_of=slot_of_A,
        none=no_slot,
    )
