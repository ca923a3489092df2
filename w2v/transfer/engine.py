"""Engines that bring rows of a table to the device that computes, and links that carry them over."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from w2v.kernels.batch import Held, Page
from w2v.model.table import Table


class Engine(Protocol):
    """What a training step asks for."""

    pages: bool  # whether rows have to be prefetched before they are held
    rows_used: int  # by pages so far, each page's counted once
    rows_read: int  # that crossed the link to the GPU, so far
    rows_written: int  # that went back
    waited: float = (
        0.0  # seconds for which the computation stood still until rows had come or gone, so far
    )

    def prefetch(self, marks_TV: Tensor, soon_V: Tensor | None = None) -> None:
        """Rows that the steps after the current ones will fetch, bool, of tables of equal size: an engine may begin to bring them.

        soon_V: those that steps soon after will fetch, in each table, which an engine may keep where they are rather than others.
        """

    def fetch(self, table: Table, rows_U: Tensor) -> Page:
        """The records of the given rows, which are sorted and unique."""

    def reduce(self, page: Page) -> Page:
        """The page that is to be stepped, now that this one has its gradients: another where rows belong to other ranks."""
        return page

    def write_back(self, page: Page) -> None:
        """Put the page's records into its table; the page is spent."""

    def hold(self, table: Table) -> Held:
        """Where the records lie that were prefetched, for kernels that work on them in place."""

    def flush(self) -> None:
        """Return when the tables hold everything that was written back; here, when the GPU has done all that it was given."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()


class Link(Protocol):
    """Moves records between a table in CPU memory and GPU memory, in the order of torch's current stream.

    rows_U: sorted and unique, int64, on the GPU. slots_U: where in `records_SR` each of them lies; None for 0, 1, 2, ...
    """

    def read(
        self, table: Table, rows_U: Tensor, records_SR: Tensor, slots_U: Tensor | None = None
    ) -> None:
        """records[slots[u]] = table[rows[u]]"""

    def write(
        self, table: Table, rows_U: Tensor, records_SR: Tensor, slots_U: Tensor | None = None
    ) -> None:
        """table[rows[u]] = records[slots[u]]"""
