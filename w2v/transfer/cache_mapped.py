"""`Cached` over tables that the GPU addresses, with plans made on the GPU: the CPU launches them and never waits for what they find.

A plan that finds no room for all missing rows beside those in use brings the first of them; the rest comes when the steps before are
computed, by a second plan. The CPU leaves that one out only when it has already seen that nothing is left to bring.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from w2v.kernels import cuda
from w2v.kernels import cuda_cache as cache
from w2v.model.table import Table
from w2v.transfer import streams
from w2v.transfer.mapped import Mapped
from w2v.transfer.slots import InSlots, no_room


class CachedMapped(InSlots):
    """Moves rows of pinned tables only when they are not in one of the `slots` on the GPU."""

    def __init__(
        self,
        tables: Sequence[Table],
        slots: int,
        device: torch.device,
        uses_TV: Tensor | None = None,
    ):
        super().__init__(Mapped(), tables, slots, device, uses_TV)
        self._in_slots = cache.Slots.empty(slots, self._slot_of_TV, self._order_N)
        self._addresses = torch.tensor(
            [table.records_VR.data_ptr() for table in tables], device=device
        )
        # While the moves of one plan are under way the next is made: each has its own lists, free again when its moves are done.
        self._orders = [cache.Orders(self._in_slots) for _ in range(2)]
        self._moved = [streams.current().record_event() for _ in self._orders]
        self._settled = True

    @property
    def rows_used(self) -> int:
        return int(self._in_slots.book[1])

    @property
    def rows_read(self) -> int:
        return int(self._in_slots.book[2])

    @property
    def rows_written(self) -> int:
        return int(self._in_slots.book[3])

    def prefetch(self, marks_TV: Tensor, soon_V: Tensor | None = None) -> None:
        """Plan on the current stream, and start the moves, for the steps after those that compute now."""
        self._plan += 1
        self._settled = False
        self._make_plan(marks_TV, soon_V, in_use=self._plan - 1)
        self._reads.wait_event(self._planned)
        self._move(self._reads)

    def flush(self) -> None:
        super().flush()
        self._refuse()

    def _settle(self) -> None:
        if not self._settled and not (self._planned.query() and self._noticed[0] == 0):
            self._join()
            self._make_plan(None, None, in_use=self._plan)
            self._move(streams.current())
            streams.current().record_event(self._planned)  # the next plan is made after these moves
        self._settled = True
        self._refuse()

    def _make_plan(self, marks_TV: Tensor | None, soon_V: Tensor | None, in_use: int) -> None:
        current = streams.current()
        for event in (self._planned, self._moved[self._plan % 2]):
            current.wait_event(event)
        cache.plan_moves(
            self._in_slots, self._orders[self._plan % 2], marks_TV, soon_V, self._plan, in_use
        )
        current.record_event(self._planned)

    def _move(self, stream: torch.cuda.Stream) -> None:
        moves, (rows, _), stride = (
            self._orders[self._plan % 2].moves,
            self.tables[0].records_VR.shape,
            self.tables[0].records_VR.stride(0),
        )
        cuda.exchange(
            moves,
            self._addresses,
            rows,
            stride,
            self._records_SR,
            self._slot_of_TV,
            self.slots,
            stream,
        )
        self._arrived = stream.record_event(self._moved[self._plan % 2])

    @property
    def _noticed(self) -> np.ndarray:
        """What the GPU said last about the current plan, which it may not have made yet."""
        return self._orders[self._plan % 2].noticed

    def _refuse(self) -> None:
        """Raise the error of a plan that found no room, if one is known by now."""
        refused = max(int(orders.noticed[1]) for orders in self._orders)
        if refused:
            raise no_room(self.slots, self.slots + refused)
