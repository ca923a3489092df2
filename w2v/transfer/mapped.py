"""Tables in pinned CPU memory that the GPU addresses directly: kernels gather sorted unique records into the page and scatter them back."""

from __future__ import annotations

import torch
from torch import Tensor

from w2v.batch import Page
from w2v.kernels import cuda
from w2v.table import Table


class Mapped:
    def fetch(self, table: Table, rows_U: Tensor) -> Page:
        records_UR = torch.empty(len(rows_U), table.width, device=rows_U.device)
        cuda.gather_records(table.records_VR, rows_U, records_UR)
        return Page(table, rows_U, records_UR, table.columns)

    def write_back(self, page: Page) -> None:
        cuda.scatter_records(page.records_UR, page.rows_U, page.table.records_VR)

    def flush(self) -> None:
        torch.cuda.synchronize()
