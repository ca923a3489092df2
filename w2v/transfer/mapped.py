"""Tables in pinned CPU memory that the GPU addresses directly: kernels gather and scatter records in place."""

from __future__ import annotations

from torch import Tensor

from w2v.kernels import cuda
from w2v.model.table import Table


class Mapped:
    def read(
        self, table: Table, rows_U: Tensor, records_SR: Tensor, slots_U: Tensor | None = None
    ) -> None:
        cuda.gather_records(table.records_VR, rows_U, records_SR, slots_U)

    def write(
        self, table: Table, rows_U: Tensor, records_SR: Tensor, slots_U: Tensor | None = None
    ) -> None:
        cuda.scatter_records(table.records_VR, rows_U, records_SR, slots_U)
