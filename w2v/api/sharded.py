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

import functools
import itertools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from w2v.api.look_up import Ids, Later, LookUp, UniqueRows, look_up_together
from w2v.distributed.ranks import SINGLE, JoinedGroup, Ranks
from w2v.kernels.cuda import Bags, gather_bags
from w2v.system.files import one_line
from w2v.transfer.cache import RowUses

if TYPE_CHECKING:
    from w2v.api.embedding import PagedEmbedding, _Page

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
    """The unique rows of ids, among the rows of all ranks."""

    look_up: RoutedLookUp

    def __init__(self, table: PagedEmbedding, ids: Ids, first_row: int = 0):
        super().__init__(_WholeTable(table, first_row), ids, table.padding_idx, alone=False)
        self._table = table

    @property
    def owned(self) -> UniqueRows:
        return self.look_up.owned[self.index]

    def is_of(self, ids: Ids) -> bool:
        return super().is_of(ids) and self.owned.look_up.group is self._table.store.group

    def borrow(self) -> _Page:
        """Return the page of this rank's rows; `look_up` has borrowed weights."""
        look_up = self.look_up
        if self.index not in look_up.pages:  # other uses of the same ids borrow anew
            borrow(look_up.batch or [look_up])
        page = look_up.pages.pop(self.index)
        page.route = self
        return page


class RoutedLookUp(LookUp):
    """Look-up of tables that share an owner's memory, and what ranks request.

    Args:
        routes: The ids of each table.
        tables: The tables.

    Attributes:
        order_U: Places of the rows, by owner.
        sent: Number of the rows by owner.
        received: Number of rows that each rank requests of this one.
        owned: For each table, those of them that this rank has.
        batch: The look-ups whose weights are borrowed with these, itself among them.
        pages: The pages of `owned` whose weights have been borrowed and not used.
    """

    sent: list[int]
    received: list[int]
    owned: list[UniqueRows]

    def __init__(self, routes: Sequence[Route], tables: Sequence[PagedEmbedding]):
        super().__init__(routes)
        self.tables = list(tables)
        self.batch: list[RoutedLookUp] = []
        self.pages: dict[int, _Page] = {}
        self._weights_UD: Tensor | None = None  # borrowed

    def order_by_owner(self) -> Tensor:
        """Order the rows; return how many of each table go to each rank: [N, T]."""
        rows_U, size, tables = self.rows, self.tables[0]._ranks.size, len(self.tables)
        first_T = _tensor_of(tuple(store.first_row for store in self.stores), rows_U.device)
        table_U = torch.bucketize(rows_U, first_T, right=True) - 1
        its_U = rows_U - first_T.index_select(0, table_U)
        key_U, self.order_U = (its_U % size * tables + table_U).sort(stable=True)
        # By their numbers at the owners.
        self.ids_U = its_U.index_select(0, self.order_U) // size
        edges = _tensor_of(tuple(range(size * tables + 1)), rows_U.device)
        return torch.searchsorted(key_U, edges).diff().view(size, tables)

    def receive(
        self, ids_M: Tensor, sent_NT: list[list[int]], received_NT: list[list[int]], is_ahead: bool
    ) -> None:
        """Look up the ids that all ranks request of this one."""
        self.sent, self.received = ([sum(its) for its in of] for of in (sent_NT, received_NT))
        self._received_TN = [list(its) for its in zip(*received_NT, strict=True)]
        by_table = _turned(ids_M, received_NT).split([sum(its) for its in self._received_TN])
        self.owned = [
            UniqueRows(table.store, ids_m, alone=False)
            for table, ids_m in zip(self.tables, by_table, strict=True)
        ]
        look_up_together(self.owned, is_ahead)

    def read(self) -> Tensor:
        """Return the weights that ranks request of this one: [M, D]."""
        users = list(zip(self.tables, self.owned, strict=True))
        self._owned_ends = [0, *itertools.accumulate(len(its.rows) for its in self.owned)]
        if shared := self._shared:
            places_M = shared.places_N
        else:
            parts = zip(self.owned, self._owned_ends, strict=False)
            places_M = torch.cat([its.places_N + begin for its, begin in parts])
        self._places_M = _turned(places_M, self._received_TN)
        if shared and all(table._sums_gradients for table in self.tables):
            self.pages = {index: table._page_of(its) for index, (table, its) in enumerate(users)}
            return shared.group.read_weights(shared.rows, shared.narrow_N, self._places_M)
        read = [table._read(its) for table, its in users]
        self.pages = {index: page for index, (page, _) in enumerate(read)}
        return _joined([weight_LD for _, weight_LD in read]).index_select(0, self._places_M)

    @property
    def _shared(self) -> LookUp | None:
        """The look-up of all of `owned`, unless a table has left the others."""
        first = self.owned[0].look_up
        return first if all(its.look_up is first for its in self.owned) else None

    def take(self, weight_UD: Tensor) -> None:
        """Keep borrowed weights, which come by owner."""
        self._weights_UD = torch.empty_like(weight_UD).index_copy_(0, self.order_U, weight_UD)
        self.batch = []

    def weights(self, index: int) -> Tensor:
        return self._weights_UD[self.begins[index] : self.begins[index + 1]]

    def vectors(self, index: int | None, bags: Bags | None = None) -> Tensor:
        (places_N, padding), dim = self._places(index), self._weights_UD.shape[1]
        return gather_bags(self._weights_UD, None, None, places_N, dim, bags, padding)

    def _new_sums(self, rows: int) -> Tensor:
        return self._weights_UD.new_zeros(rows, self._weights_UD.shape[1])

    def by_owner(self, grads: dict[int, Tensor]) -> Tensor:
        """Return the gradients [U, D] of tables by owner; 0 for other tables."""
        if self.has_all(grads):
            grad_UD = self.sums_UD
        else:
            parts = [grads.get(index) for index in range(len(self.tables))]
            grad_UD = _joined(
                [
                    torch.zeros_like(self.weights(index)) if part is None else part
                    for index, part in enumerate(parts)
                ]
            )
        self.sums_UD = None
        self._sums.clear()
        return grad_UD.index_select(0, self.order_U)

    def sum_by_row(self, grad_MD: Tensor, tables: Sequence[int]) -> dict[int, Tensor]:
        """Return the means over ranks of the gradients of each table's rows."""
        ranks = self.tables[0]._ranks.size
        if self.tables[0]._fused and self._shared:  # the sums lie side by side, for one step
            return self._shared.add_at(tables, grad_MD.div_(ranks), self._places_M)
        sum_LD = grad_MD.new_zeros(self._owned_ends[-1], grad_MD.shape[1])
        # Rows of one rank differ: rank after rank, the order of sums is fixed on a GPU too.
        of_ranks = (its.split(self.received) for its in (self._places_M, grad_MD))
        for places_m, grad_mD in zip(*of_ranks, strict=True):
            sum_LD.index_add_(0, places_m, grad_mD)
        sum_LD.div_(ranks)
        return {
            index: sum_LD[self._owned_ends[index] : self._owned_ends[index + 1]] for index in tables
        }


class Requests:
    """The ids of a batch on their way to the owners of the rows.

    Args:
        tables: T tables, on ranks of one process group.
        look_up: Returns the batch and a route for each. What it raises is told to all ranks.
        is_ahead: Whether the ids are those of a page.
    """

    def __init__(
        self,
        tables: Sequence[PagedEmbedding],
        look_up: Callable[[], tuple[Any, list[Route]]],
        is_ahead: bool,
    ):
        self._ranks, self._device, self._tables = tables[0]._ranks, tables[0].device, len(tables)
        self._is_ahead = is_ahead
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
                self._look_ups = list(dict.fromkeys(its.look_up for its in self.routes))
                counts = [look_up.order_by_owner() for look_up in self._look_ups]
                sent_NT[:, 1:] = torch.cat(counts, dim=1)
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
        sent_NT, received_NT = self._counts.view(2, self._ranks.size, -1).tolist()
        status_N = [its[0] for its in received_NT]
        if FAILED in status_N:
            failed, kind = status_N.index(FAILED), type(self._error).__name__
            told = self._ranks.all_gather(f"{kind}: {one_line(self._error)}")[failed]
            if self._error and not isinstance(self._error, StopIteration):
                raise self._error
            copied = IndexError if told.startswith("IndexError") else RuntimeError
            raise copied(f"{told} (rank {failed})")
        if ENDED in status_N:
            return False
        start, counts = 1, []  # of each look-up's tables
        for look_up in self._look_ups:
            part = slice(start, start + len(look_up.tables))
            counts.append([[its[part] for its in of] for of in (sent_NT, received_NT)])
            start = part.stop
        totals = [[[sum(its) for its in of] for of in pair] for pair in counts]
        ids = [look_up.ids_U for look_up in self._look_ups]
        requested = self._ranks.all_to_all_tensors(ids, *zip(*totals, strict=True))
        for look_up, ids_M, pair in zip(self._look_ups, requested, counts, strict=True):
            look_up.receive(ids_M, pair[0], pair[1], self._is_ahead)
            look_up.batch = self._look_ups
        return True


def look_up(tables: Sequence[PagedEmbedding], ids: Sequence[Ids]) -> list[Route]:
    """Begin to look up ids among the rows of all ranks.

    Tables whose rows lie side by side are looked up together.
    """
    routes = []
    parts: dict[tuple[Any, int], list[tuple[Route, PagedEmbedding]]] = {}
    begun: dict[Any, tuple[int, int]] = {}  # by owner's memory: a part, and its rows so far
    for table, its_ids in zip(tables, ids, strict=True):
        group = table.store.group
        part, first_row = begun.get(group, (0, 0))
        if first_row and first_row + table.num_embeddings >= MOST_ROWS:
            part, first_row = part + 1, 0
        begun[group] = part, first_row + table.num_embeddings
        routes.append(Route(table, its_ids, first_row))
        parts.setdefault((group, part), []).append((routes[-1], table))
    for pairs in parts.values():
        RoutedLookUp(*zip(*pairs, strict=True))
    return routes


def route_of(table: PagedEmbedding, ids: Ids) -> Route:
    """Return the route of ids that were not sent ahead."""
    requests = Requests([table], lambda: (None, look_up([table], [ids])), is_ahead=False)
    requests.send_counts()
    requests.send_ids()
    return requests.routes[0]


def sent_ahead(
    tables: Sequence[PagedEmbedding], batches: Iterator[tuple[Any, list[Any]]]
) -> Iterator[tuple[Any, list[Any]]]:
    """Yield batches with their routes until a rank has no more."""
    under_way: deque[Requests] = deque()
    while True:
        under_way.append(Requests(tables, lambda: next(batches), is_ahead=True))
        if len(under_way) > 1:
            under_way[-2].send_counts()
        if len(under_way) > 2:
            requests = under_way.popleft()
            if not requests.send_ids():
                return
            yield requests.batch, requests.routes


@torch.no_grad()
def borrow(look_ups: Sequence[RoutedLookUp]) -> None:
    """Get the weights of rows from their owners."""
    read = [its.read() for its in look_ups]
    # Weights go where ids came from, so that sent and received change places.
    counts = [its.received for its in look_ups], [its.sent for its in look_ups]
    weights = look_ups[0].tables[0]._ranks.all_to_all_tensors(read, *counts)
    for look_up, weight_UD in zip(look_ups, weights, strict=True):
        look_up.take(weight_UD)


def reduce(tables: Sequence[PagedEmbedding]) -> None:
    """Send gradients to the owners of the rows, which take means over ranks."""
    # By table, of look-ups; a second use of the same ids is one more.
    sent: list[tuple[RoutedLookUp, dict[int, tuple[PagedEmbedding, _Page, Tensor]]]] = []
    for table in tables:
        for page, grad_UD in table._waiting.unsent:
            look_up, index = page.route.look_up, page.route.index
            same = (grads for its, grads in sent if its is look_up and index not in grads)
            if (grads := next(same, None)) is None:
                sent.append((look_up, grads := {}))
            grads[index] = table, page, grad_UD
        table._waiting.unsent.clear()
        if table._waiting.ahead:
            table._waiting.ahead.look_up.pages.clear()  # as the step changes the weights
    if not sent:
        return
    ordered = [
        look_up.by_owner({index: grad_UD for index, (_, _, grad_UD) in grads.items()})
        for look_up, grads in sent
    ]
    counts = [its.sent for its, _ in sent], [its.received for its, _ in sent]
    requested = tables[0]._ranks.all_to_all_tensors(ordered, *counts)
    for (look_up, grads), grad_MD in zip(sent, requested, strict=True):
        for index, sum_LD in look_up.sum_by_row(grad_MD, list(grads)).items():
            table, page, _ = grads[index]
            table._add_grad(page, sum_LD, is_owned=True)


def _turned(numbers_M: Tensor, counts: list[list[int]]) -> Tensor:
    """Return parts that come by a, then b, by b first.

    counts[a][b] are their sizes.
    """
    parts = numbers_M.split([count for its in counts for count in its])
    inner = len(counts[0])
    return _joined([part for b in range(inner) for part in parts[b::inner]])


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


@functools.lru_cache(maxsize=64)
def _tensor_of(numbers: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor(numbers).to(device)


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
