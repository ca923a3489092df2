"""Moves of a row cache, planned and made on the GPU (cache.cu, rows.cu).

Rows are counted through all T tables, t * V + v. Shapes: S slots, N = T * V rows, W words of bits.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from w2v.kernels.launch import THREADS, launch

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


class CacheState:
    """Which rows are in which slots, on the GPU; see cache.cu.

    order_N: int32, rows by falling expected use. wanted, here_W, soon_W: int32 bits by place in
    that order: rows that the last two plans want, in turn; cached rows; the lookahead window.
    counters: int64 [5]: slots in use, rows used, read and written so far, and rows for which the
    last plan found no slot.
    """

    def __init__(self, slots: int, slot_of_TV: Tensor, order_N: Tensor):
        self.slots = slots
        self.slot_of_TV = slot_of_TV
        self.order_N = order_N
        words = -(-order_N.shape[0] // WARP_ROWS) * (WARP_ROWS // 32)
        bits = torch.zeros(4, words, dtype=torch.int32, device=order_N.device)
        *self.wanted, self.here_W, self.soon_W = bits
        self.counters = torch.zeros(5, dtype=torch.int64, device=order_N.device)


class MovePlan:
    """The moves of one plan, and what it tells the CPU.

    notice: int64 [2], in pinned memory: rows that found no slot beside those in use, and rows that
    were refused since no slot is left at all.
    """

    def __init__(self, state: CacheState):
        rows, device = state.order_N.shape[0], state.order_N.device
        self.warps = -(-rows // WARP_ROWS)
        counts = torch.empty(3, self.warps + 1, dtype=torch.int32, device=device)
        self.missing, self.late, self.early = counts
        lists = torch.empty(3, min(state.slots, rows), dtype=torch.int32, device=device)
        entering, evicted, slots = lists
        numbers = torch.zeros(5, dtype=torch.int64, device=device)
        self.moves = Moves(entering, evicted, slots, numbers)
        self.done = torch.zeros((), dtype=torch.int32, device=device)
        self._notice = torch.zeros(2, dtype=torch.int64, pin_memory=True)
        self.notice = self._notice.numpy()  # is read faster than the tensor


def plan_moves(
    state: CacheState,
    plan: MovePlan,
    marks_TV: Tensor | None,
    soon_V: Tensor | None,
    number: int,
    in_use: int,
) -> None:
    """Give slots to the marked rows and list the moves.

    Args:
        state: The cache.
        plan: Takes the lists.
        marks_TV: Rows that the page needs, bool; None: those that plan `number` marked before.
        soon_V: Rows of each table in the lookahead window, bool, which are evicted last.
        number: Number of this plan.
        in_use: Rows wanted since this plan are not evicted: `number`, or the one before it.
    """
    is_final = in_use == number
    previous = None if is_final else state.wanted[in_use % 2]
    rows = state.wanted[number % 2], previous, state.here_W, state.soon_W
    counts = plan.missing, plan.late, plan.early, plan.warps
    entering, evicted, slots, numbers = plan.moves
    blocks = -(-32 * plan.warps // THREADS)
    table_rows, all_rows = state.slot_of_TV.shape[1], state.order_N.shape[0]
    launch(
        "cache.cu",
        "survey",
        {},
        blocks,
        *rows,
        marks_TV,
        soon_V,
        table_rows,
        state.order_N,
        all_rows,
        *counts,
        state.slots,
        is_final,
        plan.done,
        state.counters,
        numbers,
        plan._notice,
    )
    launch(
        "cache.cu",
        "list",
        {},
        blocks,
        *rows,
        state.order_N,
        state.slot_of_TV,
        *counts,
        numbers,
        entering,
        evicted,
        slots,
    )


def exchange_records(
    moves: Moves,
    addresses_T: Tensor,
    rows: int,
    stride: int,
    records_SR: Tensor,
    slot_of_TV: Tensor | None = None,
    no_slot: int = 0,
    stream: torch.cuda.Stream | None = None,
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
        stream: Where to; by default torch's current stream.
    """
    itemsize = records_SR.element_size()
    width, row_stride = records_SR.shape[1] * itemsize // 16, stride * itemsize // 16
    launch(
        "rows.cu",
        "exchange",
        {},
        EXCHANGE_BLOCKS,
        addresses_T,
        rows,
        row_stride,
        records_SR,
        width,
        *moves,
        slot_of_TV,
        no_slot,
        stream=stream,
    )
