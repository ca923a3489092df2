"""Moves of a row cache, planned and made on the GPU (cache.cu, rows.cu).

Rows are counted through all T tables, t * V + v. Shapes: S slots, N = T * V rows, W words of bits.
"""

from __future__ import annotations

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


class MovePlanner:
    """Plans the moves of a cache on the GPU; plan n uses lists n % 2.

    Args:
        slots: Capacity of the cache in rows.
        slot_of_TV: The slot of each row.
        order_N: int32, rows by falling expected use.

    Attributes:
        counters: int64 [5]: slots in use, rows used, read and written so far, and rows for which
            the last plan found no slot.
        moves: The lists of two plans.
        notices: For both, int64 [2] in pinned memory: rows that found no slot beside those in use,
            and rows that were refused since no slot is left at all.
    """

    def __init__(self, slots: int, slot_of_TV: Tensor, order_N: Tensor):
        rows, device = order_N.shape[0], order_N.device
        self._slots = slots
        self._slot_of_TV = slot_of_TV
        self._order_N = order_N
        self._warps = -(-rows // WARP_ROWS)
        # Bits by place in the order: rows that two plans want, cached rows, the lookahead window.
        bits = torch.zeros(4, self._warps * WARP_ROWS // 32, dtype=torch.int32, device=device)
        *self._wanted, self._cached_W, self._soon_W = bits
        counts = torch.empty(3, self._warps + 1, dtype=torch.int32, device=device)
        self._counts = *counts, self._warps
        self._done = torch.zeros((), dtype=torch.int32, device=device)
        self.counters = torch.zeros(5, dtype=torch.int64, device=device)
        lists = torch.empty(2, 3, min(slots, rows), dtype=torch.int32, device=device)
        numbers = torch.zeros(2, 5, dtype=torch.int64, device=device)
        self.moves = [
            Moves(its[0], its[1], its[2], n) for its, n in zip(lists, numbers, strict=True)
        ]
        self._notices = torch.zeros(2, 2, dtype=torch.int64, pin_memory=True).unbind()
        self.notices = [notice.numpy() for notice in self._notices]  # read faster than tensors

    def plan(
        self, marks_TV: Tensor | None, soon_V: Tensor | None, number: int, in_use: int
    ) -> None:
        """Give slots to the marked rows and list the moves.

        Args:
            marks_TV: Rows that the page needs, bool; None: those that plan `number` marked before.
            soon_V: Rows of each table in the lookahead window, bool, which are evicted last.
            number: Number of this plan.
            in_use: Rows wanted since this plan are not evicted: `number`, or the one before it.
        """
        is_final = in_use == number
        previous = None if is_final else self._wanted[in_use % 2]
        bits = self._wanted[number % 2], previous, self._cached_W, self._soon_W
        marks = marks_TV, soon_V, self._slot_of_TV.shape[1]
        order = self._order_N, self._order_N.shape[0]
        *lists, numbers = self.moves[number % 2]
        found = self._done, self.counters, numbers, self._notices[number % 2]
        room = self._slots, is_final
        blocks = -(-32 * self._warps // THREADS)
        counts = self._counts
        launch("cache.cu", "survey", {}, blocks, *bits, *marks, *order, *counts, *room, *found)
        slots = self._order_N, self._slot_of_TV
        launch("cache.cu", "list", {}, blocks, *bits, *slots, *counts, numbers, *lists)


def find_rows(
    ids_N: Tensor,
    rows: int,
    padding: int | None,
    uses_V: Tensor | None,
    page_of_V: Tensor | None,
    page: int,
    fill: int | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Find the unique rows of ids without sorting.

    Args:
        ids_N: The ids, int64 on the GPU.
        rows: Rows of the table.
        padding: A row whose place is wanted.
        uses_V: Counts the look-ups of each row, int32.
        page_of_V: Becomes `page` for these rows, int32.
        page: Number of a page.
        fill: What stands behind the rows; alone, if an id is not a row.

    Returns:
        The place of each id among the rows; the rows, sorted, in a buffer as long as the ids; their
        bits; and numbers: how many rows, the least and the greatest id that is no row (0: none),
        and 1 + the place of `padding` (0: it is not there).
    """
    warps = -(-rows // WARP_ROWS)
    sizes = [8, *[warps * WARP_ROWS // 32] * 2, warps + 1, 1]
    zeros = torch.zeros(sum(sizes), dtype=torch.int32, device=ids_N.device)
    numbers, words, before, counts, done = zeros.split(sizes)
    found = numbers.view(torch.int64)
    places_N = torch.empty_like(ids_N)
    rows_N = torch.empty_like(ids_N) if fill is None else torch.full_like(ids_N, fill)
    ids = ids_N, ids_N.shape[0], rows, words
    blocks, survey_blocks = blocks_for(ids_N.shape[0]), -(-32 * warps // THREADS)
    listed = words, counts, warps
    launch("cache.cu", "mark_ids", {}, blocks, *ids, found)
    launch("cache.cu", "count_ids", {}, survey_blocks, *listed, done, found)
    uses = uses_V, page_of_V, page, -1 if padding is None else padding, found
    launch("cache.cu", "list_ids", {}, survey_blocks, *listed, before, rows_N, *uses)
    launch("cache.cu", "place_ids", {}, blocks, *ids, before, places_N)
    return places_N, rows_N, words, found


def mark_page(words: Tensor, page_of_V: Tensor, page: int, marks_V: Tensor, soon_V: Tensor) -> None:
    """Mark the rows of a page by its bits, and those of later pages."""
    rows = page_of_V.shape[0]
    marks = marks_V, soon_V
    launch("cache.cu", "mark_page", {}, blocks_for(rows), words, rows, page_of_V, page, *marks)


def last_ids(places_N: Tensor, rows: int) -> Tensor:
    """Return the last id of each row: int64 [rows]."""
    last_U = torch.zeros(rows, dtype=torch.int64, device=places_N.device)
    count = places_N.shape[0]
    launch("cache.cu", "last_ids", {}, blocks_for(count), places_N, count, last_U)
    return last_U


def exchange_records(
    moves: Moves,
    addresses_T: Tensor,
    rows: int,
    stride: int,
    records_SR: Tensor,
    slot_of_TV: Tensor | None = None,
    no_slot: int = 0,
) -> None:
    """Write evicted records back, and read the entering ones.

    Args:
        moves: Lists of rows.
        addresses_T: Address of each table's records, int64 on the GPU.
        rows: Rows of a table.
        stride: Elements from one row of a table to the next.
        records_SR: The cache.
        slot_of_TV: Kept current, if given, with `no_slot` for an evicted row.
        no_slot: The slot of rows that are not cached.
    """
    itemsize = records_SR.element_size()
    width, row_stride = records_SR.shape[1] * itemsize // 16, stride * itemsize // 16
    records = addresses_T, rows, row_stride, records_SR, width
    slots = slot_of_TV, no_slot
    launch("rows.cu", "exchange", {}, EXCHANGE_BLOCKS, *records, *moves, *slots)
