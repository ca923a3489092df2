"""Moves of a row cache, planned and made on the GPU (cache.cu, rows.cu).

Shapes: S slots, A rows, W words of bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from w2v.rows.launch import THREADS, blocks_for, c_struct, kernel

WARP_ROWS = 1024  # rows that one warp of cache.cu surveys
# As in cache.cu: bits of a row's number of uses, the limit at which all numbers are halved, and the
# words that share a number in SlotMap.
USE_BITS = 4
HIGHEST_LIMIT = 12
GROUP_WORDS = 4
AGE = 2048  # plans after which numbers of uses are halved, whatever the limit is
LISTED_WORDS = 1 << 16  # words of bits that `cached_rows` expands at a time
# Blocks for both directions at once: few enough that kernels which compute meanwhile do not wait
# for GPU memory behind reads of CPU memory (docs/dev/log.md has the figures).
EXCHANGE_BLOCKS = 16
Rows, RowCounts, SlotMap, Wanted, PlanSlots = (
    c_struct("cache.cu", name) for name in ("Rows", "RowCounts", "SlotMap", "Wanted", "PlanSlots")
)
NOTHING = Wanted(marks=None, used_soon=None, uses=None, is_counted=False, halve=False)


class Moves(NamedTuple):
    """Lists of rows to load and to evict, on the GPU.

    plan: int64: the number of loaded rows, and how many of them get unused slots, which are first
    in the list; the others get the slots of the evicted rows, in order.
    """

    loaded: Tensor  # int32
    evicted: Tensor  # int32
    slots: Tensor  # int32, of the loaded rows
    plan: Tensor


class PageRows(NamedTuple):
    """Rows that a page needs: marks, or lists.

    marks_A, soon_A: bool, whether each row is needed, and whether it is evicted last. lists: rows,
    int64. soon: rows of later pages, which are evicted last: pairs of a list and None, or of a
    buffer and `FoundRows.known`, the number of rows at its front. is_counted: whether the page adds
    1 to the number of uses of its rows.
    """

    marks_A: Tensor | None = None
    soon_A: Tensor | None = None
    lists: Sequence[Tensor] = ()
    soon: Sequence[tuple[Tensor, Tensor | None]] = ()
    is_counted: bool = True


class MovePlanner:
    """Plans the moves of a cache on the GPU.

    It keeps 4 + USE_BITS bits of each row, and the slots of cached rows: by row where `slot_of_A`
    is given, else in the order of the rows, which takes few bytes for each row. Rows with more uses
    than a limit are evicted last. The limit rises where others do not suffice; numbers of uses are
    halved when it reaches HIGHEST_LIMIT, and every AGE plans.

    Args:
        slots: Capacity of the cache in rows.
        rows: Number of rows.
        device: The GPU.
        slot_of_A: The slot of each row, which `exchange_records` keeps current.

    Attributes:
        counters: int64 [5]: slots in use, rows used, read and written so far, and the number of
            uses above which rows are evicted last.
        moves: Of plan n: `moves[n % 2]`; its lists have room for the largest page so far.
        notices: For both, int64 [2] in pinned memory: rows that found no slot beside those in use,
            and rows that were refused since no slot is left at all.
    """

    def __init__(
        self, slots: int, rows: int, device: torch.device, slot_of_A: Tensor | None = None
    ):
        self._capacity, self._rows, self._device = slots, rows, device
        self.slot_of_A = slot_of_A
        self._warps = -(-rows // WARP_ROWS)
        words = self._warps * WARP_ROWS // 32
        # Bits of rows that two plans want, cached rows, rows evicted last, and numbers of uses.
        self._bits = torch.zeros(4 + USE_BITS, words, dtype=torch.int32, device=device)
        *self._wanted, self._cached_W, self._late_W = self._bits[:4]
        self._uses = self._bits[4:]
        shape = 3, self._warps + 1
        misses, first, last = torch.empty(shape, dtype=torch.int32, device=device).unbind()
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
        if slot_of_A is None:
            # Cached rows before each group of words, and their slots; the next plan writes these to
            # the other list, and the two change places.
            groups = words // GROUP_WORDS
            self._before = torch.zeros(groups, dtype=torch.int32, device=device)
            self._slots, self._old_slots = torch.empty(2, slots, dtype=torch.int32, device=device)

    def plan(self, page: PageRows | None, number: int, in_use: int) -> None:
        """Give slots to the rows of a page and list the moves.

        Args:
            page: Rows that the page needs. None: those that plan `number` was given before.
            number: Number of this plan.
            in_use: Rows wanted since this plan are not evicted: `number`, or the one before it.
        """
        is_final = in_use == number
        wanted = NOTHING if page is None else self._wanted_by(page, number)
        if self.slot_of_A is None:
            self._old_slots, self._slots = self._slots, self._old_slots
            slots = PlanSlots(
                slot_of=None, before=self._before, old_slots=self._old_slots, new_slots=self._slots
            )
        else:
            slots = PlanSlots(slot_of=self.slot_of_A, before=None, old_slots=None, new_slots=None)
        rows = Rows(
            wanted=self._wanted[number % 2],
            in_use=None if is_final else self._wanted[in_use % 2],
            cached=self._cached_W,
            late=self._late_W,
        )
        moves = self.moves[number % 2]
        blocks = -(-32 * self._warps // THREADS)
        kernel("cache.cu", "survey")(
            blocks,
            all=rows,
            page=wanted,
            count=self._rows,
            counts=self._counts,
            slots=self._capacity,
            final=is_final,
            done=self._done,
            totals=self.counters,
            plan=moves.plan,
            notice=self._notices[number % 2],
        )
        kernel("cache.cu", "list")(
            blocks,
            all=rows,
            counts=self._counts,
            rows=slots,
            moves=moves,
            next_wanted=self._wanted[(number + 1) % 2],
        )
        if self.slot_of_A is None:
            blocks = blocks_for(moves.loaded.shape[0])
            kernel("cache.cu", "fill_slots")(blocks, map=self._slot_map, moves=moves)

    def _wanted_by(self, page: PageRows, number: int) -> Any:
        """Return struct Wanted of a page, with room for its moves."""
        most = self._rows
        if page.marks_A is None:
            most = sum(rows_U.shape[0] for rows_U in page.lists)
        self._make_room(number, most)
        for rows_U in page.lists:
            self._mark(rows_U, None, self._wanted[number % 2])
        for soon_U, known in page.soon:
            self._mark(soon_U, known, self._late_W)
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

    def slots_of(self, rows_U: Tensor) -> Tensor:
        """Return the slots of rows, int32; S for rows that are not cached."""
        if self.slot_of_A is not None:
            return self.slot_of_A.index_select(0, rows_U)
        count = rows_U.shape[0]
        slots_U = torch.empty(count, dtype=torch.int32, device=self._device)
        kernel("cache.cu", "find_slots")(
            blocks_for(count),
            map=self._slot_map,
            rows=rows_U,
            count=count,
            none=self._capacity,
            found=slots_U,
        )
        return slots_U

    def cached_rows(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield all cached rows and their slots, int64, some at a time."""
        if self.slot_of_A is not None:
            rows_U = torch.nonzero(self.slot_of_A != self._capacity).flatten()
            yield rows_U, self.slot_of_A[rows_U].long()
            return
        bits_B = torch.arange(32, dtype=torch.int32, device=self._device)
        first_slot = 0
        for first in range(0, self._cached_W.shape[0], LISTED_WORDS):
            bits_WB = self._cached_W[first : first + LISTED_WORDS, None] >> bits_B & 1
            rows_U = torch.nonzero(bits_WB.flatten()).flatten() + 32 * first
            slots_U = self._slots[first_slot : first_slot + len(rows_U)]
            first_slot += len(rows_U)
            yield rows_U, slots_U.long()

    @property
    def _slot_map(self) -> Any:
        return SlotMap(cached=self._cached_W, before=self._before, slots=self._slots)

    def _mark(self, rows_U: Tensor, known: Tensor | None, words_W: Tensor) -> None:
        """Set the bits of rows."""
        count = rows_U.shape[0]
        launch = kernel("cache.cu", "mark_rows")
        launch(blocks_for(count), rows=rows_U, count=count, known=known, words=words_W)


def exchange_records(
    moves: Moves,
    table_AR: Tensor,  # on the GPU or in pinned memory
    records_SR: Tensor,  # the cache
    slot_of_A: Tensor | None = None,  # kept current, if given
    no_slot: int = 0,  # of rows that are not cached
) -> None:
    """Write evicted records back, and load others into their slots."""
    itemsize = records_SR.element_size()
    kernel("rows.cu", "exchange")(
        EXCHANGE_BLOCKS,
        table=table_AR,
        stride=table_AR.stride(0) * itemsize // 16,
        records=records_SR,
        width=records_SR.shape[1] * itemsize // 16,
        moves=moves,
        slot_of=slot_of_A,
        none=no_slot,
    )
