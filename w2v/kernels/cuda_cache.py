"""Launchers of the kernels that plan which rows are in which slots on the GPU: see cache.cu."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from w2v.kernels.cuda import THREADS, Moves, launch

STRETCH = 1024  # rows that one warp surveys, as cache.cu has it


class Slots(NamedTuple):
    """Where the rows of T tables are in S slots, on the GPU; see kernels/cache.cu. Rows are counted through all tables, t * V + v.

    room: S; slot_of_TV: int32, S for a row that is in none; order_N: int32, the rows, the most used first; wanted, here_W, soon_W: int32,
    bits by rank, of the rows that the last two plans want, in turn, of those in slots, and of those that are used soon; book: int64 [5],
    slots that were ever used, rows used, read and written so far, and those for which the last plan found no room.
    """

    room: int
    slot_of_TV: Tensor
    order_N: Tensor
    wanted: tuple[Tensor, Tensor]
    here_W: Tensor
    soon_W: Tensor
    book: Tensor

    @classmethod
    def empty(cls, room: int, slot_of_TV: Tensor, order_N: Tensor) -> Slots:
        words, device = -(-order_N.shape[0] // STRETCH) * (STRETCH // 32), order_N.device
        *wanted, here_W, soon_W = torch.zeros(4, words, dtype=torch.int32, device=device)
        return cls(
            room,
            slot_of_TV,
            order_N,
            tuple(wanted),
            here_W,
            soon_W,
            torch.zeros(5, dtype=torch.int64, device=device),
        )


class Orders:
    """The moves of a plan for `slots`, and what it tells the CPU.

    notice: int64 [2] in pinned memory, the rows for which there was no room beside those in use, and how many were refused since there
    was none at all.
    """

    def __init__(self, slots: Slots):
        device, rows = slots.book.device, slots.order_N.shape[0]
        self.stretches = -(-rows // STRETCH)
        self.missing, self.late, self.early = torch.empty(
            3, self.stretches + 1, dtype=torch.int32, device=device
        )
        coming, leaving, to = (
            torch.empty(min(slots.room, rows), dtype=torch.int32, device=device) for _ in range(3)
        )
        self.moves = Moves(coming, leaving, to, torch.zeros(5, dtype=torch.int64, device=device))
        self.done = torch.zeros((), dtype=torch.int32, device=device)
        self.notice = torch.zeros(2, dtype=torch.int64, pin_memory=True)
        self.noticed = self.notice.numpy()  # the same, read sooner


def plan_moves(
    slots: Slots,
    orders: Orders,
    marks_TV: Tensor | None,
    soon_V: Tensor | None,
    plan: int,
    in_use: int,
) -> None:
    """Give slots to the marked rows, or to those that `plan` has marked, and list the moves; rows wanted since plan `in_use` stay.

    soon_V: which rows of each table are used soon, and leave after all others; in_use: `plan`, or the one before it.
    """
    final, (coming, leaving, given, numbers) = in_use == plan, orders.moves
    rows = (
        slots.wanted[plan % 2],
        None if final else slots.wanted[in_use % 2],
        slots.here_W,
        slots.soon_W,
    )
    counts, blocks = (
        (orders.missing, orders.late, orders.early, orders.stretches),
        -(-32 * orders.stretches // THREADS),
    )
    launch(
        "cache.cu",
        "survey",
        {},
        blocks,
        *rows,
        marks_TV,
        soon_V,
        slots.slot_of_TV.shape[1],
        slots.order_N,
        slots.order_N.shape[0],
        *counts,
        slots.room,
        final,
        orders.done,
        slots.book,
        numbers,
        orders.notice,
    )
    launch(
        "cache.cu",
        "list",
        {},
        blocks,
        *rows,
        slots.order_N,
        slots.slot_of_TV,
        *counts,
        numbers,
        coming,
        leaving,
        given,
    )
