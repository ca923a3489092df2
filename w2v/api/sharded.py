"""Rows of paged embeddings sharded over the ranks of a process group.

Row v belongs to rank v % N, which holds its weight and state and steps it. All ranks take part in
the exchanges of a batch, each of which serves all tables at once where their ids are read ahead:

    send_counts  how many ids go to each rank, and whether this rank has a batch
    send_ids     the ids; each owner finds the unique rows among those that it gets
    borrow       weights, from the owners, in the forward pass
    reduce       gradients, to the owners, before the step

`PagedOptimizer.pages` makes each of the first two a batch ahead of the next, so that the CPU does
not wait for the GPU.

Shapes: U unique rows of this rank's ids, M that all ranks request of this one, L unique ones among
these, D dimensions, N ranks, T tables.
"""

from __future__ import annotations

import copy
import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from w2v.api.look_up import Ids, Later, LookUp, UniqueRows, look_up_together
from w2v.distributed.ranks import SINGLE, JoinedGroup, Ranks
from w2v.system.files import one_line
from w2v.transfer.cache import RowUses

if TYPE_CHECKING:
    from w2v.api.embedding import PagedEmbedding

MOST_ROWS = 1 << 31  # that are looked up together: they are numbered in 32 bits
GATHER_ROWS = 1 << 16  # of each rank, at a time
ENDED, FAILED = 1, 2  # what a rank says that has no batch


def ranks_of(process_group: Any) -> Ranks:
    """Return the ranks of a process group; of None this process alone."""
    size = 1 if process_group is None else dist.get_world_size(process_group)
    if size < 1:
        raise ValueError("process_group does not have this process; make the table on its ranks")
    return SINGLE if size == 1 else JoinedGroup(process_group)


class _WholeTable:
    """What a look-up asks of a table, for the rows of all ranks."""

    group = None

    def __init__(self, table: PagedEmbedding, first_row: int):
        self._rows, self.first_row = table.num_embeddings, first_row
        self.device, self.uses = table.device, RowUses(0, table.device)

    def __len__(self) -> int:
        return self._rows


class Route(UniqueRows):
    """The unique rows of ids, and what ranks request of each other.

    Attributes:
        order_U: Places of the rows, by owner.
        sent: Number of the rows by owner.
        received: Number of rows that each rank requests of this one.
        batch: The routes whose weights are borrowed with these, itself among them.
        borrowed: The page that `owned` is on and weights [U, D], until they are used.
    """

    sent: list[int]
    received: list[int]
    _owned: UniqueRows

    def __init__(self, table: PagedEmbedding, ids: Ids, first_row: int = 0, is_ahead: bool = False):
        super().__init__(_WholeTable(table, first_row), ids, table.padding_idx, alone=False)
        self._table, self._is_ahead = table, is_ahead
        self.batch: list[Route] = []
        self.borrowed: tuple[Any, Tensor] | None = None

    @property
    def owned(self) -> UniqueRows:
        return self._owned

    def order_by_owner(self, edges: Tensor) -> Tensor:
        """Return where the rows of each rank begin, for edges 0 to N."""
        self._rows_U = self.rows - self.store.first_row
        owner_U, self.order_U = (self._rows_U % self._table._ranks.size).sort(stable=True)
        return torch.searchsorted(owner_U, edges)

    def ids_by_owner(self) -> Tensor:
        """Return the rows by owner, by their numbers there."""
        return (self._rows_U // self._table._ranks.size).index_select(0, self.order_U)

    @torch.no_grad()
    def borrow(self) -> tuple[Any, Tensor]:
        """Return the page of this rank's rows, and weights [U, D]."""
        if self.borrowed is None:
            batch, ranks = self.batch or [self], self._table._ranks
            read = [its._table._read(its.owned) for its in batch]
            weights = [
                weight_LD.index_select(0, its.owned.places_N)
                for its, (_, weight_LD) in zip(batch, read, strict=True)
            ]
            # Weights go where ids came from, so that sent and received change places.
            counts = [its.received for its in batch], [its.sent for its in batch]
            weights = exchange(ranks, weights, *counts)
            for its, sent_UD, (page, _) in zip(batch, weights, read, strict=True):
                weight_UD = torch.empty_like(sent_UD).index_copy_(0, its.order_U, sent_UD)
                page.route = its
                its.borrowed = page, weight_UD
                its.batch = []  # other uses of the same ids borrow their own
        found, self.borrowed = self.borrowed, None
        return found


class Requests:
    """The ids of a batch on their way to the owners of the rows.

    Args:
        tables: T tables, on ranks of one process group.
        look_up: Returns the batch and a route for each. What it raises is told to all ranks.
    """

    def __init__(
        self, tables: Sequence[PagedEmbedding], look_up: Callable[[], tuple[Any, list[Route]]]
    ):
        self._ranks, self._device, self._tables = tables[0]._ranks, tables[0].device, len(tables)
        self._error: Exception | None = None
        self._later: Later | None = None
        try:
            self.batch, self.routes = look_up()
        except Exception as error:  # other ranks would wait for this one
            self._error = error

    def send_counts(self) -> None:
        """Tell each rank how many ids of each table it will get."""
        size = self._ranks.size
        sent_NT = torch.zeros(size, 1 + self._tables, dtype=torch.int64, device=self._device)
        try:
            if self._error is None:
                edges = torch.arange(size + 1, device=self._device)
                begins = [its.order_by_owner(edges) for its in self.routes]
                sent_NT[:, 1:] = torch.stack(begins, dim=1).diff(dim=0)
        except IndexError as error:
            self._error = error
        if self._error:
            sent_NT[:, 0] = ENDED if isinstance(self._error, StopIteration) else FAILED
        received_NT = self._ranks.all_to_all(sent_NT, [1] * size, [1] * size)
        self._counts = torch.cat([sent_NT, received_NT]).flatten()
        if self._counts.is_cuda:
            self._later = Later(len(self._counts))
            self._counts = self._later.numbers.copy_(self._counts, non_blocking=True)
            self._later.launched()

    def send_ids(self) -> bool:
        """Send the ids; return False if a rank has no batch any more.

        Raises:
            Exception: The error of this rank, or a copy of another rank's.
        """
        if self._later:
            self._later.read()  # waits for them
        counts = self._counts.view(2, self._ranks.size, -1)
        (_, *sent_TN), (status_N, *received_TN) = counts.transpose(1, 2).tolist()
        if FAILED in status_N:
            failed, kind = status_N.index(FAILED), type(self._error).__name__
            told = self._ranks.all_gather(f"{kind}: {one_line(self._error)}")[failed]
            if self._error and not isinstance(self._error, StopIteration):
                raise self._error
            copied = IndexError if told.startswith("IndexError") else RuntimeError
            raise copied(f"{told} (rank {failed})")
        if ENDED in status_N:
            return False
        ids = [its.ids_by_owner() for its in self.routes]
        requested = exchange(self._ranks, ids, sent_TN, received_TN)
        for table, (its, ids_M) in enumerate(zip(self.routes, requested, strict=True)):
            its.sent, its.received, its.batch = sent_TN[table], received_TN[table], self.routes
            its._owned = UniqueRows(its._table.store, ids_M, alone=not its._is_ahead)
        look_up_together([its._owned for its in self.routes if its._is_ahead])
        return True


def look_up(
    tables: Sequence[PagedEmbedding], ids: Sequence[Ids], is_ahead: bool = False
) -> list[Route]:
    """Begin to look up ids among the rows of all ranks; tables together."""
    routes: list[Route] = []
    together: list[Route] = []
    first_row = 0
    for table, its_ids in zip(tables, ids, strict=True):
        if together and first_row + table.num_embeddings >= MOST_ROWS:
            LookUp(together)
            together, first_row = [], 0
        together.append(Route(table, its_ids, first_row, is_ahead))
        routes.append(together[-1])
        first_row += table.num_embeddings
    LookUp(together)
    return routes


def route_of(table: PagedEmbedding, ids: Ids) -> Route:
    """Return the route of ids that were not sent ahead."""
    requests = Requests([table], lambda: (None, look_up([table], [ids])))
    requests.send_counts()
    requests.send_ids()
    return requests.routes[0]


def sent_ahead(
    tables: Sequence[PagedEmbedding], batches: Iterator[tuple[Any, list[Any]]]
) -> Iterator[tuple[Any, list[Any]]]:
    """Yield batches with their routes until a rank has no more."""
    under_way: deque[Requests] = deque()
    while True:
        under_way.append(Requests(tables, lambda: next(batches)))
        if len(under_way) > 1:
            under_way[-2].send_counts()
        if len(under_way) > 2:
            requests = under_way.popleft()
            if not requests.send_ids():
                return
            yield requests.batch, requests.routes


def reduce(tables: Sequence[PagedEmbedding]) -> None:
    """Send gradients to the owners of the rows, which take means over ranks."""
    waiting = [(table, *its) for table in tables for its in table._waiting.unsent]
    if not waiting:
        return
    ranks, routes = tables[0]._ranks, [page.route for _, page, _ in waiting]
    grads = [grad_UD.index_select(0, page.route.order_U) for _, page, grad_UD in waiting]
    grads = exchange(ranks, grads, [its.sent for its in routes], [its.received for its in routes])
    for table in tables:
        table._waiting.unsent.clear()
        if table._waiting.ahead:
            table._waiting.ahead.borrowed = None  # as the step changes the weights
    for (table, page, _), its, grad_MD in zip(waiting, routes, grads, strict=True):
        if table._fused:  # sums of all tables lie side by side, for one launch of the step
            sum_LD = its.owned.look_up.add_gradients(its.owned.index, grad_MD)
        else:
            sum_LD = grad_MD.new_zeros(len(its.owned.rows), grad_MD.shape[1])
            # Rows of one rank differ: rank after rank, the order of sums is fixed on a GPU too.
            places_M = its.owned.places_N.split(its.received)
            for places, part in zip(places_M, grad_MD.split(its.received), strict=True):
                sum_LD.index_add_(0, places, part)
        page = copy.copy(page)
        page.route = None
        table._add_grad(page, sum_LD.div_(ranks.size))


def exchange(
    ranks: Ranks, rows: Sequence[Tensor], sent: list[list[int]], received: list[list[int]]
) -> list[Tensor]:
    """Send rows [n, ...] of several tables to all ranks at once.

    Args:
        ranks: The process group.
        rows: Those of each table, by the rank that gets them.
        sent: For each table, how many rows go to each rank.
        received: How many come from each.
    """
    widths_T = torch.tensor([math.prod(its.shape[1:]) for its in rows])
    sent_NT, received_NT = (torch.tensor(counts).T * widths_T for counts in (sent, received))
    # By rank first, then by table, as the all-to-all wants it; and back.
    parts = [its.flatten().split(of) for its, of in zip(rows, sent_NT.T.tolist(), strict=True)]
    numbers = torch.cat([part for of_rank in zip(*parts, strict=True) for part in of_rank])
    sizes = sent_NT.sum(1).tolist(), received_NT.sum(1).tolist()
    pieces = ranks.all_to_all(numbers, *sizes).split(received_NT.flatten().tolist())
    return [
        torch.cat(pieces[table :: len(rows)]).view(-1, *its.shape[1:]).to(its.dtype)
        for table, its in enumerate(rows)
    ]


def gather(ranks: Ranks, shard_vX: Tensor, rows: int, device: torch.device) -> Tensor | None:
    """Return the rows of all ranks on rank 0, in CPU memory; else None.

    They are sent by way of `device`.
    """
    whole_VX = torch.empty(0 if ranks.rank else rows, *shard_vX.shape[1:], dtype=shard_vX.dtype)
    counts = [len(range(rank, rows, ranks.size)) for rank in range(ranks.size)]
    for first in range(0, counts[0], GATHER_ROWS):
        part = shard_vX[first : first + GATHER_ROWS].to(device).contiguous()
        sent = [len(part)] + [0] * (ranks.size - 1)
        received = [
            0 if ranks.rank else len(range(count)[first:][:GATHER_ROWS]) for count in counts
        ]
        parts = ranks.all_to_all(part, sent, received).split(received)
        for rank, its in enumerate(parts):
            whole_VX[rank :: ranks.size][first : first + len(its)].copy_(its)
    return None if ranks.rank else whole_VX
