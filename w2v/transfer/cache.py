"""Rows stay on the GPU while there is room; what the next steps add comes over the link, and what has to go goes back, meanwhile.

A store of S slots on the GPU holds records of all tables, each row in one slot at most: that slot owns the row until it is written
back, so a row is never in two places and overlap changes no result. Two kinds of work run beside the computation:

    plan     which rows are missing, which slots they get, which rows must go (the caller's stream)
    moves    rows that go, slots -> CPU memory, and missing rows, CPU memory -> slots

Steps `t` compute while the rows of steps `t + 1` are moved, and rows of either are never written back then. What orders them: moves are
made in the order of their plans, and of one plan the writes first; the computation waits for its reads; and a plan waits for the
computation before the current one, whose rows it may send away.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from w2v.model.table import Table
from w2v.transfer import streams
from w2v.transfer.engine import Link
from w2v.transfer.slots import InSlots, no_room


class Cached(InSlots):
    """Moves rows over any `link`, only when they are not in one of the `slots` on the `device`; plans in plain torch."""

    def __init__(
        self,
        link: Link,
        tables: Sequence[Table],
        slots: int,
        device: torch.device,
        uses_TV: Tensor | None = None,
    ):
        super().__init__(link, tables, slots, device, uses_TV)
        self.rows_used = self.rows_read = self.rows_written = 0
        self._wanted_TV = torch.zeros_like(self._slot_of_TV)  # the last plan that wanted the row
        self._free = torch.arange(slots, device=device)  # free slots, the longest free first
        self._waiting: tuple[Tensor, Tensor | None] | None = (
            None  # what was asked for, and had no room beside the rows in use
        )
        self._writes = torch.cuda.Stream(device, priority=-1) if self._reads else None
        self._in_flight: deque[tuple[Tensor, ...]] = deque(
            maxlen=3
        )  # tensors of the last plans, which other streams may still use

    def prefetch(self, marks_TV: Tensor, soon_V: Tensor | None = None) -> None:
        """Plan on the current stream, and start the moves, for the steps after those that compute now."""
        self._plan += 1
        if not self._bring(marks_TV, soon_V, in_use=self._plan - 1):
            self._waiting = marks_TV, soon_V

    def _settle(self) -> None:
        if self._waiting is None:
            return
        self._join()
        asked_for, self._waiting = self._waiting, None
        if not self._bring(*asked_for, in_use=self._plan):
            raise no_room(self.slots, int(asked_for[0].sum()))

    def _bring(self, marks_TV: Tensor, soon_V: Tensor | None, in_use: int) -> bool:
        """Give each marked row a slot and start the moves; False, with all as it was, where there is no room.

        Rows that a plan numbered `in_use` or higher wants stay. Rows are found by passes over marks for all of them, which keeps them
        sorted and needs few waits of the CPU for the GPU.
        """
        if self._planned:
            streams.current().wait_event(self._planned)
        self._wanted_TV.masked_fill_(marks_TV, self._plan)
        here_TV = self._slot_of_TV != self.slots
        missing_TV = marks_TV & ~here_TV
        idle_TV = here_TV & (self._wanted_TV < in_use)
        *coming_T, idle, used = torch.stack(
            [*missing_TV.sum(1), idle_TV.sum(), marks_TV.sum()]
        ).tolist()
        coming = sum(coming_T)
        leaving = max(0, coming - len(self._free))
        if leaving > idle:
            return False
        self.rows_used, self.rows_read, self.rows_written = (
            self.rows_used + used,
            self.rows_read + coming,
            self.rows_written + leaving,
        )

        left, leaving_rows = [], []
        if leaving:
            leaving_TV = self._least_used(idle_TV, idle, leaving, soon_V)
            for slot_of_V, leaving_V, count in zip(
                self._slot_of_TV, leaving_TV, leaving_TV.sum(1).tolist(), strict=True
            ):
                rows = _first_true(leaving_V, count)
                left.append(slot_of_V[rows].long())
                leaving_rows.append(rows)
                slot_of_V.index_fill_(0, rows, self.slots)
        available = torch.cat([self._free, *left])
        taken, self._free = available[:coming].split(coming_T), available[coming:]
        coming_rows = [
            _first_true(missing_V, count)
            for missing_V, count in zip(missing_TV, coming_T, strict=True)
        ]
        for slot_of_V, rows, slots in zip(self._slot_of_TV, coming_rows, taken, strict=True):
            slot_of_V[rows] = slots.int()
        self._in_flight.append(
            (
                marks_TV,
                *([] if soon_V is None else [soon_V]),
                *coming_rows,
                *taken,
                *leaving_rows,
                *left,
            )
        )
        self._move(coming_rows, taken, leaving_rows, left)
        return True

    def _least_used(self, idle_TV: Tensor, idle: int, number: int, soon_V: Tensor | None) -> Tensor:
        """Marks of so many of the `idle` rows, the least used: of those that are not used soon, and then of the others."""
        idle_N = idle_TV.flatten()[self._order_N]
        place_N = idle_N.cumsum(0, dtype=torch.int32)  # these are as long as both tables
        if soon_V is not None:
            soon_N = idle_N & soon_V.repeat(len(idle_TV))[self._order_N]
            soon_before_N = soon_N.cumsum(0, dtype=torch.int32)
            # Those that are not used soon come after all that are.
            place_N = torch.where(
                soon_N, soon_before_N, place_N.sub_(soon_before_N).add_(soon_before_N[-1])
            )
        chosen_TV = torch.zeros_like(idle_TV)
        chosen_TV.view(-1)[self._order_N] = idle_N & (place_N > idle - number)
        return chosen_TV

    def _move(
        self,
        coming: Sequence[Tensor],
        taken: Sequence[Tensor],
        leaving: Sequence[Tensor],
        left: Sequence[Tensor],
    ) -> None:
        """Start to write back each table's `leaving` rows from their slots `left` and to read `coming` ones into slots `taken`."""
        if self._reads:
            self._planned = streams.current().record_event()
            self._writes.wait_event(self._planned)
        with streams.on(self._writes):
            for table, rows, slots in zip(self.tables, leaving, left, strict=False):
                self.link.write(table, rows, self._records_SR, slots)
        if self._reads:
            self._reads.wait_stream(self._writes)
        with streams.on(self._reads):
            for table, rows, slots in zip(self.tables, coming, taken, strict=True):
                self.link.read(table, rows, self._records_SR, slots)
        if self._reads:
            self._arrived = self._reads.record_event()


def _first_true(mask_V: Tensor, count: int) -> Tensor:
    """Where the mask holds, `count` times; knowing how often spares the wait for it."""
    return torch.nonzero_static(mask_V, size=count).flatten()
