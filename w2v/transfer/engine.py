"""Engines: where the rows of a training step are, and how they get there.

`Engine` keeps the tables on the compute device; `Paged` loads each page's rows and writes them
back; the caches of cache.py keep rows on the GPU from page to page.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from w2v.kernels.batch import Page, View
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
    """Loads the rows of both tables to the compute device, a page at a time.

    A row is in one place at a time, so overlap changes no result. `moves_rows` says whether rows
    have to be prefetched at all. This is the engine of tables on the compute device, CPU or GPU:
    paging with nothing to move.
    """

    moves_rows = False

    def __init__(self, tables: Sequence[Table]):
        self._tables = tables

    @property
    def stats(self) -> TransferStats:
        """What has crossed the link so far."""
        return TransferStats()

    def prefetch(self, marks_TV: Tensor, soon_V: Tensor | None = None) -> None:
        """Start to load the rows of each table that the next page touches.

        Marks are bool. A cache evicts rows in the lookahead window, `soon_V`, last.
        """

    def page(self) -> Page:
        """Return the records of the rows that were prefetched last, in place."""
        return self._whole_tables

    @functools.cached_property
    def _whole_tables(self) -> Page:
        inputs, outputs = self._tables
        return Page(View(inputs.records_VR, None), View(outputs.records_VR, None))

    def flush(self) -> None:
        """Return when the tables hold all that was computed."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()


class Paged(Engine):
    """Loads the rows of each page and writes them back: nothing is cached."""

    moves_rows = True

    def __init__(self, link: Link, tables: Sequence[Table], device: torch.device):
        super().__init__(tables)
        self._link = link
        shape = len(tables), tables[0].rows
        self._slot_of_TV = torch.zeros(shape, dtype=torch.int32, device=device)
        self._rows: list[Tensor] = []  # of the current page, by table
        self._page: Page | None = None
        self._marks_TV: Tensor | None = None  # of the next page
        self._rows_read = 0
        self._rows_written = 0
        self._waits = Waits()

    @property
    def stats(self) -> TransferStats:
        seconds = self._waits.seconds
        return TransferStats(self._rows_read, self._rows_read, self._rows_written, seconds)

    def prefetch(self, marks_TV: Tensor, soon_V: Tensor | None = None) -> None:
        """Remember the rows: some may be on the current page until it is done."""
        self._marks_TV = marks_TV

    def page(self) -> Page:
        if self._marks_TV is not None:
            with self._waits.counted(self._slot_of_TV.device):
                self._write_back()
                self._read(self._marks_TV)
            if self._marks_TV.is_cuda:
                # They are memory of the planning stream, which must not reuse it before they are
                # read: `nonzero` returns when it knows the number of rows, not yet the rows.
                self._marks_TV.record_stream(current_stream())
            self._marks_TV = None
        if self._page is None:
            raise RuntimeError("no page was prefetched")
        return self._page

    def flush(self) -> None:
        self._write_back()
        super().flush()

    def _read(self, marks_TV: Tensor) -> None:
        self._rows = [torch.nonzero(marks_V).flatten() for marks_V in marks_TV]
        views = []
        for table, rows, slot_of_V in zip(self._tables, self._rows, self._slot_of_TV, strict=True):
            shape = len(rows), table.width
            records = torch.empty(shape, dtype=table.records_VR.dtype, device=rows.device)
            self._link.read(table, rows, records)
            slot_of_V[rows] = torch.arange(len(rows), dtype=torch.int32, device=rows.device)
            views.append(View(records, slot_of_V))
            self._rows_read += len(rows)
        self._page = Page(*views)

    def _write_back(self) -> None:
        if self._page is None:
            return
        for table, rows, view in zip(self._tables, self._rows, self._page, strict=True):
            self._link.write(table, rows, view.records_SR)
            self._rows_written += len(rows)
