"""Moves of a row cache, planned and made on the GPU (cache.cu, rows.cu).

Rows are counted through all T tables, t * V + v. Shapes: S slots, N = T * V rows, W words of bits.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from w2v.kernels.launch import THREADS, blocks_for, launch

WARP_ROWS = 1024  # rows that one warp of cache.cu surveys
# Blocks for both directions at once: few enough that kernels which compute meanwhile do not wait
# for GPU memory behind reads of CPU memory (docs/log.md has the figures).
EXCHANGE_BLOCKS = 16


class Moves(NamedTuple):
    """Rows that enter the cache and rows that leave it, on the GPU.

    numbers: int64: how many rows enter, and how many of them go to unused slots, which are first in
    the list; the others take the slots of the evicted rows, in order.
    """

    entering: Tensor  # int32
    evicted: Tensor  # int32
    slots: Tensor  # int32, of the entering rows
    numbers: Tensor


class PageRows(NamedTuple):
    """Rows that a page needs, in lists, and pages to come.

    A row is evicted last if `page_of_V` has a page after `page` for it, by numbers of 16 bits, or
    if it has more than `limit` uses; this rises where others do not suffice. Rows are of one table.
    """

    lists: list[Tensor]  # int64
    page_of_V: Tensor  # int16
    page: int
    count_V: Tensor  # int16, uses
    limit: Tensor  # int64


class MovePlanner:
    """Plans the moves of a cache on the GPU; plan n uses lists n % 2.

    Args:
        slots: Capacity of the cache in rows.
        slot_of_TV: The slot of each row.
        order_N: int32, rows by falling expected use; by default as they are numbered.

    Attributes:
        counters: int64 [5]: slots in use, rows used, read and written so far, and rows for which
            the last plan found no slot.
        moves: The lists of two plans, as long as a page needs.
        notices: For both, int64 [2] in pinned memory: rows that found no slot beside those in use,
            and rows that were refused since no slot is left at all.
    """

    def __init__(self, slots: int, slot_of_TV: Tensor, order_N: Tensor | None = None):
        self._rows, device = slot_of_TV.numel(), slot_of_TV.device
        self._slots = slots
        self._slot_of_TV = slot_of_TV
        self._order_N = order_N
        self._warps = -(-self._rows // WARP_ROWS)
        # Bits by place in the order: rows that two plans want, cached rows, the lookahead window.
        bits = torch.zeros(4, self._warps * WARP_ROWS // 32, dtype=torch.int32, device=device)
        *self._wanted, self._cached_W, self._soon_W = bits
        counts = torch.empty(3, self._warps + 1, dtype=torch.int32, device=device)
        self._counts = *counts, self._warps
        self._done = torch.zeros((), dtype=torch.int32, device=device)
        self.counters = torch.zeros(5, dtype=torch.int64, device=device)
        numbers = torch.zeros(2, 5, dtype=torch.int64, device=device)
        none = slot_of_TV.view(-1)[:0]
        self.moves = [Moves(none, none, none, of_plan) for of_plan in numbers]
        self._notices = torch.zeros(2, 2, dtype=torch.int64, device="cpu", pin_memory=True).unbind()
        self.notices = [notice.numpy() for notice in self._notices]  # read faster than tensors

    def plan(
        self, marks_TV: Tensor | PageRows | None, soon_V: Tensor | None, number: int, in_use: int
    ) -> None:
        """Give slots to the marked rows and list the moves.

        Args:
            marks_TV: Rows that the page needs, bool, or in lists, at each call of a cache; None:
                those that plan `number` marked before.
            soon_V: Rows of each table in the lookahead window, bool, which are evicted last.
            number: Number of this plan.
            in_use: Rows wanted since this plan are not evicted: `number`, or the one before it.
        """
        is_final = in_use == number
        previous = None if is_final else self._wanted[in_use % 2]
        wanted_W, next_W = self._wanted[number % 2], self._wanted[(number + 1) % 2]
        bits = wanted_W, previous, self._cached_W, self._soon_W
        marks: tuple[Tensor | int | None, ...]
        if isinstance(marks_TV, PageRows):
            self._make_room(number, sum(rows_U.shape[0] for rows_U in marks_TV.lists))
            self._mark(marks_TV.lists, wanted_W)
            marks = None, None, 0, *marks_TV[1:]
        else:
            if marks_TV is not None:
                self._make_room(number, self._rows)
            marks = marks_TV, soon_V, self._slot_of_TV.shape[1], None, 0, None, None
        order = self._order_N, self._rows
        *lists, numbers = self.moves[number % 2]
        found = self._done, self.counters, numbers, self._notices[number % 2]
        blocks = -(-32 * self._warps // THREADS)
        counts = self._counts
        capacity = self._slots, is_final
        launch("cache.cu", "survey", {}, blocks, *bits, *marks, *order, *counts, *capacity, *found)
        slots = self._order_N, self._slot_of_TV
        launch("cache.cu", "list", {}, blocks, *bits, *slots, *counts, numbers, *lists, next_W)

    def _make_room(self, number: int, wanted: int) -> None:
        """Have lists of a plan for so many wanted rows."""
        moves = self.moves[number % 2]
        room = min(self._slots, wanted)
        if moves.entering.shape[0] < room:
            torch.cuda.synchronize()  # moves on another stream may read the lists that go
            room = min(self._slots, self._rows, room + room // 8)
            shape = 3, room
            lists = torch.empty(shape, dtype=torch.int32, device=moves.slots.device).unbind()
            self.moves[number % 2] = Moves(lists[0], lists[1], lists[2], moves.numbers)

    def _mark(self, lists: Sequence[Tensor], wanted_W: Tensor) -> None:
        """Set the bits of rows in words that are 0."""
        assert self._order_N is None, "rows in lists are ordered by number"
        for first in range(0, len(lists), 2):
            rows_U, more_U = lists[first], lists[min(first + 1, len(lists) - 1)]
            counts = rows_U.shape[0], more_U.shape[0]
            marked = rows_U, counts[0], more_U, counts[1], wanted_W
            launch("cache.cu", "mark_rows", {}, blocks_for(sum(counts)), *marked)


class Span(NamedTuple):
    """One of the tables that are looked up together.

    Row v belongs to rank v % N; ids are looked up for all N ranks.
    """

    rows: int  # of the whole table
    padding: int | None  # a row whose place is wanted
    first_rows: tuple[int, ...]  # of each rank: its rows of the table are numbered from here on


class Spans(NamedTuple):
    """Tables that are looked up together, for kernels: int64 [N * T, 5]."""

    on_device: Tensor
    words: int  # of bits for all rows
    tables: int
    ranks: int

    @classmethod
    def of(cls, spans: Sequence[Span], counts: Sequence[int], device: torch.device) -> Spans:
        """`counts` are numbers of ids of the tables; none if these are equal."""
        ends = list(itertools.accumulate(counts)) or [0] * len(spans)
        ranks, words, numbers = len(spans[0].first_rows), 0, []
        for rank in range(ranks):
            for span, end in zip(spans, ends, strict=True):
                padding = -1
                if span.padding is not None and span.padding % ranks == rank:
                    padding = span.padding // ranks
                numbers.append((end, words, span.first_rows[rank], span.rows, padding))
                # A rank without rows has a word, so that the kernels find its place.
                words += max(1, -(-(span.rows - rank) // (32 * ranks)))
        # Without waiting for the GPU, as copies from unpinned memory would.
        pinned = torch.tensor(numbers, dtype=torch.int64, device="cpu").pin_memory()
        return cls(pinned.to(device, non_blocking=True), words, len(spans), ranks)


def numbers_of(spans: int) -> int:
    """Return how many numbers `find_rows` reports of so many spans."""
    return 2 + 4 * spans


def find_rows(
    ids_N: Tensor,  # int64 on the GPU, table by table
    spans: Spans,
    each: int,  # ids of each table, 0 if `spans` has their numbers
    uses_V: Tensor | None,  # int16, counts the look-ups of each row
    page_of_V: Tensor | None,  # int16, becomes `page` for these rows
    page: int,
    readback: Tensor,
    is_filled: bool = False,  # whether -1 stands behind the rows, and alone if an id is no row
    are_rows: bool = False,  # whether ids are rows of one rank, of all tables in any order
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Find the unique rows of ids without sorting.

    `readback` gets, in pinned memory, the number of rows; not 0 if an id is no row; and for each
    table of each rank the rows before it, the least and the greatest id that is no row (0: none),
    and 1 + the place of its padding row (0: it is not there).

    Returns the place of each id among the rows; the rows, by rank and then sorted, in a buffer as
    long as the ids, and in 32 bits; their number, first of some on the GPU; and the last id of each
    row, if `is_filled`.
    """
    ids, parts = ids_N.shape[0], spans.on_device.shape[0]
    word_blocks = -(-spans.words // THREADS)
    numbers, words, rows = numbers_of(parts), word_blocks * THREADS, ids if is_filled else 0
    # One zeroed and one other allocation: each takes the CPU as long as a launch.
    zeros = torch.zeros(numbers + words // 2 + 1 + rows, dtype=torch.int64, device=ids_N.device)
    scratch = torch.empty(ids + words + word_blocks + 1, dtype=torch.int32, device=ids_N.device)
    bits = zeros.data_ptr() + 8 * numbers
    done = bits + 4 * words
    last_N = zeros[len(zeros) - rows :]
    before = scratch.data_ptr() + 4 * ids
    counts = before + 4 * words
    places_N = torch.empty_like(ids_N)
    rows_N = torch.empty_like(ids_N)
    given = ids_N, ids
    tables = spans.on_device, spans.tables, 0 if are_rows else spans.ranks, each, zeros
    blocks = blocks_for(ids)
    launch("cache.cu", "mark_ids", {}, blocks, *given, *tables, bits)
    launch("cache.cu", "count_ids", {}, word_blocks, bits, counts, done, zeros)
    listed = before, rows_N, scratch, uses_V, page_of_V, page
    placed = before, places_N, readback, *((rows_N, last_N) if is_filled else (None, None))
    launch("cache.cu", "list_ids", {}, word_blocks, bits, counts, *tables, *listed)
    launch("cache.cu", "place_ids", {}, blocks, *given, bits, *tables, *placed)
    return places_N, rows_N, scratch[:ids], zeros, last_N


def exchange_records(
    moves: Moves,
    addresses_T: Tensor,  # of each table's records, int64 on the GPU
    rows: int,  # of a table
    stride: int,  # elements from one row of a table to the next
    records_SR: Tensor,  # the cache
    slot_of_TV: Tensor | None = None,  # kept current, if given
    no_slot: int = 0,  # of rows that are not cached
) -> None:
    """Write evicted records back, and read the entering ones."""
    itemsize = records_SR.element_size()
    width, row_stride = records_SR.shape[1] * itemsize // 16, stride * itemsize // 16
    records = addresses_T, rows, row_stride, records_SR, width
    slots = slot_of_TV, no_slot
    launch("rows.cu", "exchange", {}, EXCHANGE_BLOCKS, *records, *moves, *slots)
