"""Each step's rows cross the link, and go back over it: no row stays on the GPU."""

from __future__ import annotations

import torch
from torch import Tensor

from w2v.batch import Page
from w2v.table import Table
from w2v.transfer import Link, Wanted


class Paged:
    def __init__(self, link: Link):
        self.link = link
        self.rows_read = self.rows_written = 0

    def prefetch(self, wanted: Wanted) -> None:
        """Nothing is brought ahead."""

    def fetch(self, table: Table, rows_U: Tensor) -> Page:
        records_UR = torch.empty(len(rows_U), table.width, dtype=table.records_VR.dtype, device=rows_U.device)
        self.link.read(table, rows_U, records_UR)
        self.rows_read += len(rows_U)
        return Page(table, rows_U, records_UR, table.columns)

    def write_back(self, page: Page) -> None:
        self.link.write(page.table, page.rows_U, page.records_UR)
        self.rows_written += len(page.rows_U)

    def flush(self) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
