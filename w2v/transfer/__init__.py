"""Engines that move rows between a table and the device that computes."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from w2v.batch import Page
from w2v.table import Table


class Engine(Protocol):
    def fetch(self, table: Table, rows_U: Tensor) -> Page:
        """The records of the given rows, which are sorted and unique."""

    def write_back(self, page: Page) -> None:
        """Put the page's records into its table; the page is spent."""

    def flush(self) -> None:
        """Return when the tables hold everything that was written back."""
