"""Rows dealt to several ranks: their weights are borrowed from the ranks that own them, which alone sum their gradients and step them.

Every rank makes the same calls in the same order, with rows of its own. What crosses the network are row numbers, weights and
gradients; optimizer state stays where it is, and so do records on their way between CPU memory and the owner's device, which the inner
engine moves.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from w2v.distributed.ranks import Ranks
from w2v.kernels.batch import Held, Page
from w2v.model.table import Table
from w2v.transfer.engine import Engine


class Request(NamedTuple):
    """Rows that this rank asks of all, and what all ask of it."""

    order_U: Tensor  # the rows asked for, owner by owner
    asked: list[int]  # how many of them, of each rank
    lent_M: Tensor  # rows of this rank's shard that others ask for, rank by rank, those of a rank sorted
    lent: list[int]  # how many of these, by each rank


@dataclass
class Borrowed(Page):
    """The weights of rows that other ranks may own, and `owned`: the records of this rank's rows that others have borrowed."""

    request: Request | None = None
    owned: Page | None = None
    places_M: Tensor | None = None  # where each row that was lent is among the owned ones


class Sharded(Engine):
    """Brings rows from the ranks that own them, to which an `inner` engine brings them; tables hold the rows of this rank alone."""

    def __init__(self, inner: Engine, ranks: Ranks):
        self._inner, self._ranks, self.pages = inner, ranks, inner.pages

    @property
    def rows_used(self) -> int:
        return self._inner.rows_used

    @property
    def rows_read(self) -> int:
        return self._inner.rows_read

    @property
    def rows_written(self) -> int:
        return self._inner.rows_written

    @property
    def waited(self) -> float:
        return self._inner.waited

    def prefetch(self, marks_TV: Tensor, soon_V: Tensor | None = None) -> None:
        """As `Engine.prefetch`, for marks of all rows, whoever owns them; `soon_V` are of this rank's."""
        tables, rows = marks_TV.shape
        wanted_TV = marks_TV.new_zeros(tables, self._ranks.shard_rows(rows))
        for marks_V, wanted_V in zip(marks_TV, wanted_TV, strict=True):
            wanted_V.index_fill_(
                0, self._ask(torch.nonzero(marks_V).flatten(), ahead=True).lent_M, True
            )
        self._inner.prefetch(wanted_TV, soon_V)

    def fetch(self, table: Table, rows_U: Tensor) -> Borrowed:
        request = self._ask(rows_U)
        owned_rows_O, places_M = torch.unique(request.lent_M, return_inverse=True)
        owned = self._inner.fetch(table, owned_rows_O)
        came_UD = self._ranks.all_to_all(owned["weight"][places_M], request.lent, request.asked)
        weights_UD = torch.empty_like(came_UD)
        weights_UD[request.order_U] = came_UD
        only_weight = {"weight": table.columns["weight"]}
        return Borrowed(
            table, rows_U, weights_UD, only_weight, request=request, owned=owned, places_M=places_M
        )

    def reduce(self, page: Page) -> Page:
        """The owned page, its gradients summed over the ranks in their order."""
        assert (
            isinstance(page, Borrowed)
            and page.request
            and page.owned
            and page.places_M is not None
            and page.grad_UD is not None
        )
        page.owned.grad_UD = self._sum(page, page.grad_UD)
        if page.pairs_U is not None:
            page.owned.pairs_U = self._sum(page, page.pairs_U)
        return page.owned

    def write_back(self, page: Page) -> None:
        self._inner.write_back(page)

    def hold(self, table: Table) -> Held:
        return self._inner.hold(table)

    def flush(self) -> None:
        self._inner.flush()

    def _ask(self, rows_U: Tensor, ahead: bool = False) -> Request:
        size = self._ranks.size
        owners_U = rows_U % size
        order_U = torch.argsort(owners_U, stable=True)
        asked_N = torch.bincount(owners_U, minlength=size)
        lent_N = self._ranks.all_to_all(asked_N, [1] * size, [1] * size, ahead)
        asked, lent = torch.stack([asked_N, lent_N]).tolist()
        return Request(
            order_U,
            asked,
            self._ranks.all_to_all(rows_U[order_U] // size, asked, lent, ahead),
            lent,
        )

    def _sum(self, page: Borrowed, values_UX: Tensor) -> Tensor:
        """For each owned row the sum of the values that all ranks have for it."""
        came_MX = self._ranks.all_to_all(
            values_UX[page.request.order_U], page.request.asked, page.request.lent
        )
        sums_OX = came_MX.new_zeros(len(page.owned.rows_U), *came_MX.shape[1:])
        parts = zip(
            page.places_M.split(page.request.lent), came_MX.split(page.request.lent), strict=True
        )
        for places_m, came_mX in parts:  # a rank names no row twice, so each sum has a fixed order
            sums_OX.index_add_(0, places_m, came_mX)
        return sums_OX
