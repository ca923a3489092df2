"""Each step's rows cross the link, and go back over it: no row stays on the GPU."""

from __future__ import annotations

import contextlib

import torch
from torch import Tensor

from w2v.kernels.batch import Held, Page
from w2v.model.table import Table
from w2v.transfer import streams
from w2v.transfer.engine import Engine, Link
from w2v.transfer.timing import Waits


class Paged(Engine):
    pages = True

    def __init__(self, link: Link):
        self.link = link
        self.rows_used = self.rows_read = self.rows_written = 0
        self._waits = Waits()

    @property
    def waited(self) -> float:
        return self._waits.seconds

    def prefetch(self, marks_TV: Tensor, soon_V: Tensor | None = None) -> None:
        """Nothing is brought ahead."""

    def fetch(self, table: Table, rows_U: Tensor) -> Page:
        records_UR = torch.empty(
            len(rows_U), table.width, dtype=table.records_VR.dtype, device=rows_U.device
        )
        with self._waits.counted(streams.current()) if rows_U.is_cuda else contextlib.nullcontext():
            self.link.read(table, rows_U, records_UR)
        self.rows_used, self.rows_read = self.rows_used + len(rows_U), self.rows_read + len(rows_U)
        return Page(table, rows_U, table.decode(records_UR), table.columns)

    def write_back(self, page: Page) -> None:
        records_UR = page.table.encode(page.rows_U, page.records_UR)
        with (
            self._waits.counted(streams.current())
            if records_UR.is_cuda
            else contextlib.nullcontext()
        ):
            self.link.write(page.table, page.rows_U, records_UR)
        self.rows_written += len(page.rows_U)

    def hold(self, table: Table) -> Held:
        raise NotImplementedError(
            "no row stays on the GPU: give the kernels room with transfer.gpu_bytes"
        )
