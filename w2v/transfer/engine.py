"""Engines: where the rows of a training step are, and how they get there.

`Engine` keeps the tables on the compute device; `Paged` loads each page's rows and writes them
back; the caches of cache.py keep rows on the GPU from page to page.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from w2v.kernels.batch import View
from w2v.kernels.cuda_cache import PageRows
from w2v.model.table import Table
from w2v.transfer.links import Link
from w2v.transfer.streams import Waits, current_stream


class TransferStats(NamedTuple):
    """What has crossed the link between CPU and GPU so far."""

    rows_used: int = 0  # unique rows of all pages
    rows_read: int = 0  # rows that were copied to the GPU
    rows_written: int = 0  # rows that were copied back
    wait_seconds: float = 0.0  # for which the computation stood still until rows had moved

    @classmethod
    def sum(cls, stats: Iterable[TransferStats]) -> TransferStats:
        """Return the sums of some stats."""
        return cls(*map(sum, zip(cls(), *stats, strict=True)))  # type: ignore[arg-type]


class Engine:
    """Loads the rows of a table to the compute device, a page at a time.

    A row is in one place at a time, so overlap changes no result. `moves_rows` says whether rows
    have to be prefetched at all. This is the engine of a table on the compute device, CPU or GPU:
    paging with nothing to move.
    """

    moves_rows = False

    def __init__(self, table: Table):
        self._table = table

    @property
    def stats(self) -> TransferStats:
        """What has crossed the link so far."""
        return TransferStats()

    def prefetch(self, page: PageRows) -> None:
        """Start to load the rows of the next page."""

    def view(self) -> View:
        """Return the records of the rows that were prefetched last, in place."""
        return self._whole_table

    @functools.cached_property
    def _whole_table(self) -> View:
        return View(self._table.records_VR, None)

    def flush(self) -> None:
        """Return when the table holds all that was computed."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()


class Paged(Engine):
    """Loads the rows of each page and writes them back: nothing is cached."""

    moves_rows = True

    def __init__(self, link: Link, table: Table, device: torch.device):
        super().__init__(table)
        self._link = link
        self._slot_of_A = torch.zeros(table.rows, dtype=torch.int32, device=device)
        self._rows_U: Tensor | None = None  # of the current page
        self._view: View | None = None
        self._marks_A: Tensor | None = None  # of the next page
        self._rows_read = 0
        self._rows_written = 0
        self._waits = Waits()

    @property
    def stats(self) -> TransferStats:
        seconds = self._waits.seconds
        return TransferStats(self._rows_read, self._rows_read, self._rows_written, seconds)

    def prefetch(self, page: PageRows) -> None:
        """Remember the rows: some may be on the current page until it is done."""
        self._marks_A = page.marks_A

    def view(self) -> View:
        if self._marks_A is not None:
            with self._waits.counted(self._slot_of_A.device):
                self._write_back()
                self._read(self._marks_A)
            if self._marks_A.is_cuda:
                # They are memory of the planning stream, which must not reuse it before they are
                # read: `nonzero` returns when it knows the number of rows, not yet the rows.
                self._marks_A.record_stream(current_stream())
            self._marks_A = None
        if self._view is None:
            raise RuntimeError("no page was prefetched")
        return self._view

    def flush(self) -> None:
        self._write_back()
        super().flush()

    def _read(self, marks_A: Tensor) -> None:
        rows_U = torch.nonzero(marks_A).flatten()
        shape = len(rows_U), self._table.width
        records_UR = torch.empty(shape, dtype=self._table.dtype, device=rows_U.device)
        self._link.read(self._table, rows_U, records_UR)
        slots_U = torch.arange(len(rows_U), dtype=torch.int32, device=rows_U.device)
        self._slot_of_A[rows_U] = slots_U
        self._rows_U = rows_U
        self._view = View(records_UR, self._slot_of_A)
        self._rows_read += len(rows_U)

    def _write_back(self) -> None:
        if self._rows_U is not None and self._view is not None:
            self._link.write(self._table, self._rows_U, self._view.records_SR)
            self._rows_written += len(self._rows_U)
