"""Rows on the GPU in slots, whatever plans which rows are there: what `Cached` and `CachedMapped` share."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import torch
from torch import Tensor

from w2v.config import ConfigError
from w2v.kernels.batch import Held, Page
from w2v.model.table import Table
from w2v.transfer import streams
from w2v.transfer.engine import Engine, Link
from w2v.transfer.timing import Waits


class InSlots(Engine):
    """Records of T tables of V rows in S slots on the `device`; S as a slot means "not on the GPU".

    uses_TV: how often each row is expected to be used, which says which rows to keep; by default rows are in order of frequency.
    """

    pages = True

    def __init__(
        self,
        link: Link,
        tables: Sequence[Table],
        slots: int,
        device: torch.device,
        uses_TV: Tensor | None = None,
    ):
        assert len({(table.rows, table.width) for table in tables}) == 1, (
            "tables that share slots are of one shape"
        )
        self.link, self.tables, self.slots = link, list(tables), slots
        shape = len(tables), tables[0].rows
        assert shape[0] * shape[1] < 2**31, "rows of all tables are counted in 32 bits"
        # The last record is nobody's: kernels find it where a row that found no room would lie.
        self._records_SR = torch.empty(
            slots + 1, tables[0].width, dtype=tables[0].records_VR.dtype, device=device
        )
        self._slot_of_TV = torch.full(shape, slots, dtype=torch.int32, device=device)
        self._held = [Held(self._records_SR, slot_of_V) for slot_of_V in self._slot_of_TV]
        by_rank_N = (
            torch.arange(shape[0] * shape[1], dtype=torch.int32, device=device)
            .view(shape)
            .T.flatten()
        )
        # The rows, counted through all tables, the most used first; those of a table in their order where uses are equal.
        self._order_N = (
            by_rank_N
            if uses_TV is None
            else by_rank_N[uses_TV.T.flatten().argsort(descending=True, stable=True)]
        )
        self._plan = 0
        self._reads = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None
        # When the last plan is made, and when all moves are; events may be recorded again once all waits for them are enqueued.
        self._planned, self._arrived = (
            streams.current().record_event() if self._reads else None for _ in range(2)
        )
        self._waits, self._waited_for = Waits(), 0  # the plan whose rows are there

    @property
    def waited(self) -> float:
        return self._waits.seconds

    def hold(self, table: Table) -> Held:
        if self._waited_for != self._plan:
            with (
                self._waits.counted(streams.current()) if self._reads else contextlib.nullcontext()
            ):
                self._settle()
                self._join()
            self._waited_for = self._plan
        return self._held[self.tables.index(table)]

    def fetch(self, table: Table, rows_U: Tensor) -> Page:
        slots_U = self.hold(table).slot_of_V[rows_U].long()
        return Page(
            table,
            rows_U,
            table.decode(self._records_SR.index_select(0, slots_U)),
            table.columns,
            slots_U=slots_U,
        )

    def write_back(self, page: Page) -> None:
        self._records_SR.index_copy_(
            0, page.slots_U, page.table.encode(page.rows_U, page.records_UR)
        )

    def flush(self) -> None:
        self._settle()
        self._join()
        for table, slot_of_V in zip(self.tables, self._slot_of_TV, strict=True):
            rows = torch.nonzero(slot_of_V != self.slots).flatten()
            self.link.write(table, rows, self._records_SR, slot_of_V[rows].long())
        if self._reads:
            streams.current().synchronize()

    def _settle(self) -> None:
        """See to it that all rows of the last plan have slots, now that the steps before it are computed."""
        raise NotImplementedError

    def _join(self) -> None:
        """Have the current stream wait for all plans and moves."""
        if self._arrived:
            streams.current().wait_event(self._arrived)


def no_room(slots: int, needed: float) -> ConfigError:
    """Where a page needs more rows than there are slots."""
    return ConfigError(
        f"transfer.gpu_bytes has room for {slots:,} rows on the GPU, but {needed:,.0f} are needed at once; "
        "raise it, or lower train.batch_size, transfer.steps_per_page or model.negative_pool"
    )
