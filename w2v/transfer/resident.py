"""Tables that lie on the compute device, CPU or GPU: the degenerate case of paging."""

from __future__ import annotations

from torch import Tensor

from w2v.kernels.batch import Held, Page
from w2v.model.table import Table
from w2v.transfer.engine import Engine


class Resident(Engine):
    pages = False
    rows_used = rows_read = rows_written = 0  # nothing crosses a link
    waited = 0.0

    def prefetch(self, marks_TV: Tensor, soon_V: Tensor | None = None) -> None:
        """Nothing is brought ahead."""

    def fetch(self, table: Table, rows_U: Tensor) -> Page:
        return Page(
            table, rows_U, table.decode(table.records_VR.index_select(0, rows_U)), table.columns
        )

    def write_back(self, page: Page) -> None:
        page.table.records_VR.index_copy_(
            0, page.rows_U, page.table.encode(page.rows_U, page.records_UR)
        )

    def hold(self, table: Table) -> Held:
        return Held(table.records_VR, None)
