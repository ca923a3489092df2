"""Rows that ranks own and exchange, of paged embeddings and of word2vec.

Row v belongs to rank v % N, which holds its weight and state and steps it. All ranks take part in
the exchanges of a batch, each of which serves all tables at once where their ids are read ahead:

    send_counts     how many rows are requested of each rank, and whether this rank has a batch;
                    with the rows of the batch before, if there is one
    send_ids        the rows
    send_weights    from the owners, before the gradients are computed
    send_gradients  to the owners, which sum them by row before the step

`sent_ahead` makes each of the first two a batch ahead of the next, so that the CPU does not wait
for the GPU. The trainer's page of several batches is one here.

Shapes: U unique rows of this rank's ids, M that all ranks request of this one, L unique ones among
these, D dimensions, N ranks, T tables.
"""

from __future__ import annotations

import functools
import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from w2v.distributed.ranks import SINGLE, JoinedGroup, Ranks
from w2v.rows import lookup, ops
from w2v.rows.lookup import Ids, LookUp, Readback, RowPage
from w2v.rows.paged_table import PagedTable
from w2v.system.files import one_line

ENDED, FAILED = 1, 2  # status of a rank that has no page; 0 with one
Page = TypeVar("Page")


def ranks_of(process_group: Any) -> Ranks:
    """Return the ranks of a process group; of None this process alone."""
    size = 1 if process_group is None else dist.get_world_size(process_group)
    if size < 1:
        raise ValueError("process_group does not have this process; make the table on its ranks")
    return SINGLE if size == 1 else JoinedGroup(process_group)


class RoutedLookUp(LookUp):
    """Look-up of ids among the rows of all ranks, sorted by owner.

    Attributes:
        ranks: Those that own the rows.
        rows_M: The rows that they request of this one, rank after rank.
        received: How many each requests.
        owned: The same rows of each table.
        batch: The look-ups whose weights are borrowed with these, itself among them.
        unused: Indices of the tables whose weights have been borrowed and not used.
        weights_UD: Weights that `borrow` got from their owners.
    """

    tables: list[PagedTable]
    ranks: Ranks
    rows_M: Tensor
    received: list[int]
    owned: list[RowPage]
    batch: Sequence[RoutedLookUp] = ()
    unused: set[int]
    weights_UD: Tensor

    def sent(self) -> list[int]:
        """Wait for the rows; return how many of them each rank owns."""
        self.wait()
        of_ranks = self.begins[:: len(self.spans)]
        return [end - begin for begin, end in itertools.pairwise(of_ranks)]

    def receive(self, ranks: Ranks, rows_M: Tensor, received: list[int]) -> None:
        """Take the rows that all ranks request of this one."""
        self.ranks, self.rows_M, self.received = ranks, rows_M, received
        self.unused = set()
        self.owned = [RowPage(table.store, self.own, n) for n, table in enumerate(self.tables)]

    @functools.cached_property
    def own(self) -> LookUp:
        """The look-up of the rows that all ranks request of this one."""
        spans = [
            ops.Span(self.ranks.shard_rows(span.rows), None, (span.first_rows[self.ranks.rank],))
            for span in self.spans
        ]
        with self.group.lock:
            return LookUp(self.group, spans, [self.rows_M], are_rows=True)

    def read(self) -> Tensor:
        """Return the weights that ranks request of this one: [M, D]."""
        self.unused = set(range(len(self.tables)))
        if all(table.uses_kernels for table in self.tables):
            return self.own.vectors(None)
        weights = []
        for index, (table, page) in enumerate(zip(self.tables, self.owned, strict=True)):
            if table.store.group is self.group:
                self.owned[index], weight_LD = table.read(page, is_used=False)
            else:  # it has left the others, and its ids are looked up anew
                weight_LD = table.parameter.new_zeros(len(page.rows()), table.embedding_dim)
            weights.append(weight_LD)
        return torch.cat(weights).index_select(0, self.own.places_N)

    def fetch(self, pages: Sequence[RowPage]) -> None:
        for page in pages:
            if page.index not in self.unused:  # other uses of the same ids borrow anew
                borrow(self.batch or [self])
            self.unused.remove(page.index)
            if (table := self.tables[page.index]).max_norm is not None:
                self.owned[page.index], _ = table.read(self.owned[page.index])

    def weights(self) -> tuple[ops.View, Tensor | None]:
        return ops.View(self.weights_UD, None), None

    def part(self, index: int) -> tuple[Tensor, Tensor, int | None]:
        """Return a table's weights [U, D], and places of ids and padding."""
        which_U, padding = self._which(index), self.paddings[index]
        places_N = torch.searchsorted(which_U, self.places_of(index))
        if padding is not None:
            padding = sum(
                min(padding, end) - min(padding, begin) for begin, end in self.pieces(index)
            )
        return self.weights_UD.index_select(0, which_U), places_N, padding

    def add_rows(self, index: int, grad_UD: Tensor, pending: Tensor | None) -> Tensor:
        """Add gradients of a table's weights; return what waits to be sent."""
        self.sums_for({index: pending}).index_add_(0, self._which(index), grad_UD)
        return self.sums[index]

    def _which(self, index: int) -> Tensor:
        """Return the places of a table's rows."""
        device = self.places_N.device
        return torch.cat([torch.arange(*piece, device=device) for piece in self.pieces(index)])

    def new_sums(self) -> tuple[Tensor, Sequence[Tensor]]:
        # They are sent as one: `sums` shows only which tables have some.
        sums_UD = torch.zeros_like(self.weights_UD)
        return sums_UD, [sums_UD] * len(self.spans)

    def mean_gradients(self, grad_MD: Tensor, indices: Sequence[int]) -> Iterable[Tensor]:
        """Return the means over ranks of the gradients of these tables' rows."""
        ranks, found = self.ranks.size, self.own
        if self.tables[0].fused:  # the sums lie side by side, for one step
            pending = {index: self.tables[index].parameter.grad_UD for index in indices}
            return found.add_gradients(None, [grad_MD.div_(ranks)], None, pending)
        mean_LD = self.sum_by_row(grad_MD, len(found.wait())).div_(ranks)
        return [mean_LD[found.begins[index] : found.begins[index + 1]] for index in indices]

    def sum_by_row(self, grad_MX: Tensor, rows: int) -> Tensor:
        """Return sums of what ranks have sent, in the order of the ranks."""
        sum_LX = grad_MX.new_zeros(rows, *grad_MX.shape[1:])
        places = self.own.places_N.split(self.received)
        for places_m, grad_mX in zip(places, grad_MX.split(self.received), strict=True):
            # Of one rank they differ: the order is fixed on a GPU too.
            sum_LX.index_add_(0, places_m, grad_mX)
        return sum_LX


class Requests(Generic[Page]):
    """Send the ids of a page to the owners of the rows.

    Args:
        ranks: All make the same calls.
        device: Of the rows.
        lists: The most lists of rows that a page has, equal on all ranks.
        draw: Returns a page and its lists. What it raises is raised by all ranks; StopIteration
            ends the pages of all.
        group: As in `Ranks.all_to_all`.
    """

    page: Page

    def __init__(
        self,
        ranks: Ranks,
        device: torch.device,
        lists: int,
        draw: Callable[[], tuple[Page, Sequence[RoutedLookUp]]],
        group: str = "main",
    ):
        self._ranks, self._device, self._group = ranks, device, group
        self._columns = 1 + lists  # status and numbers of rows
        self._error: Exception | None = None
        self._readback: Readback | None = None
        try:
            self.page, self._lists = draw()
        except Exception as error:  # other ranks would wait for this one
            self._error = error

    def send_counts(self) -> None:
        """Send each rank the number of its rows that will be requested."""
        one_each = [1] * self._ranks.size
        counts_NC = self._counts_to_send()
        self._receive_counts(self._ranks.all_to_all(counts_NC, one_each, one_each, self._group))

    def _counts_to_send(self) -> Tensor:
        """Return a status and numbers of rows for each rank: [N, C]."""
        sent_NC = [[0] * self._columns for _ in range(self._ranks.size)]
        try:
            if self._error is None:
                for column, rows in enumerate(self._lists, start=1):
                    for of_rank, count in zip(sent_NC, rows.sent(), strict=True):
                        of_rank[column] = count
        except IndexError as error:
            self._error = error
        if self._error:
            status = ENDED if isinstance(self._error, StopIteration) else FAILED
            sent_NC = [[status] * self._columns for _ in sent_NC]
        counts_NC = torch.tensor(sent_NC, device="cpu")
        if self._device.type == "cuda":
            self._readback = Readback(counts_NC.numel())
            pinned = self._readback.numbers.copy_(counts_NC.flatten())
            counts_NC = pinned.to(self._device, non_blocking=True).view(counts_NC.shape)
        return counts_NC

    def _receive_counts(self, counts_NC: Tensor) -> None:
        self._counts = counts_NC.flatten()
        if self._readback:
            self._counts = self._readback.numbers.copy_(self._counts, non_blocking=True)
            self._readback.launched()

    def send_ids(self, following: Requests | None = None) -> bool:
        """Send the ids; return False if a rank has no page any more.

        The counts of the page after it are sent with them.

        Raises:
            Exception: The error of this rank, or a copy of another rank's.
        """
        if self._readback:
            self._readback.read()  # waits for them
        received_NC = self._counts.view(self._ranks.size, -1).tolist()
        status_N, *received = map(list, zip(*received_NC, strict=True))
        if FAILED in status_N:  # this rank raises its own error, or a copy of the first one's
            failed, kind = status_N.index(FAILED), type(self._error).__name__
            message = self._ranks.all_gather(f"{kind}: {one_line(self._error)}")[failed]
            if self._error and not isinstance(self._error, StopIteration):
                raise self._error
            copied = IndexError if message.startswith("IndexError") else RuntimeError
            raise copied(f"{message} (rank {failed})")
        if ENDED in status_N:
            return False
        del received[len(self._lists) :]
        rows = [each.wait() for each in self._lists]
        counts = [each.sent() for each in self._lists], received.copy()
        if following:  # one more tensor, with a row for each rank
            rows.append(following._counts_to_send())
            for numbers in counts:
                numbers.append([1] * self._ranks.size)
        requested = self._ranks.all_to_all_tensors(rows, *counts, group=self._group)
        if following:
            following._receive_counts(requested.pop())
        for each, rows_M, of_ranks in zip(self._lists, requested, received, strict=True):
            each.receive(self._ranks, rows_M, of_ranks)
        return True


def sent_ahead(draw: Callable[[], Requests[Page]]) -> Iterator[Page]:
    """Yield pages whose ids the owners have, until a rank has no more.

    While a page is used, the counts of the next are under way.
    """
    under_way: deque[Requests[Page]] = deque()
    while True:
        under_way.append(draw())
        if len(under_way) == 2:  # the first pages
            under_way[0].send_counts()
        elif len(under_way) == 3:
            requests = under_way.popleft()
            if not requests.send_ids(following=under_way[0]):
                return
            yield requests.page


def send_weights(look_ups: Sequence[RoutedLookUp], weights: Sequence[Tensor]) -> list[Tensor]:
    """Send weights [M, D] of requested rows; return those of borrowed ones."""
    # Weights go where ids came from, so that sent and received change places.
    sent, received = [each.received for each in look_ups], [each.sent() for each in look_ups]
    return look_ups[0].ranks.all_to_all_tensors(weights, sent, received)


def send_gradients(look_ups: Sequence[RoutedLookUp], grads: Sequence[Tensor]) -> list[Tensor]:
    """Send gradients [U, D] to the owners; return those of requested rows."""
    sent, received = [each.sent() for each in look_ups], [each.received for each in look_ups]
    return look_ups[0].ranks.all_to_all_tensors(grads, sent, received)


class LookedUpBatch(NamedTuple):
    """A batch of a loader, with its rows in each table."""

    batch: Any
    pages: list[RowPage]

    @property
    def look_ups(self) -> list[LookUp]:
        """The look-ups that the rows are from, one for each group of tables."""
        return [*dict.fromkeys(page.look_up for page in self.pages)]


def request(tables: Sequence[PagedTable], draw: Callable[[], LookedUpBatch]) -> Requests:
    """Return the requests of a batch, whose ids `draw` looks up."""

    def look_up() -> tuple[LookedUpBatch, list[RoutedLookUp]]:
        found = draw()
        routed = [each for each in found.look_ups if isinstance(each, RoutedLookUp)]
        for each in routed:
            each.batch = routed
        return found, routed

    groups = len({table.store.group for table in tables})
    return Requests(tables[0].ranks, tables[0].device, groups, look_up)


def look_up_ahead(tables: Sequence[PagedTable], ids: Sequence[Ids]) -> list[RowPage]:
    """Begin to look up ids that are read ahead, among the rows of all ranks."""
    stores, spans = [table.store for table in tables], [table.span for table in tables]
    kind = RoutedLookUp if tables[0].ranks.size > 1 else LookUp
    pages = lookup.look_up(stores, ids, spans, kind)
    for table, page in zip(tables, pages, strict=True):
        page.look_up.tables.append(table)
    return pages


def look_up_alone(table: PagedTable, ids: Ids) -> RowPage:
    """Look up ids that were not sent ahead."""
    requests = request([table], lambda: LookedUpBatch(None, look_up_ahead([table], [ids])))
    requests.send_counts()
    requests.send_ids()
    return requests.page.pages[0]


@torch.no_grad()
def borrow(look_ups: Sequence[RoutedLookUp]) -> None:
    """Get the weights of rows from their owners."""
    weights = send_weights(look_ups, [look_up.read() for look_up in look_ups])
    for look_up, weight_UD in zip(look_ups, weights, strict=True):
        look_up.weights_UD = weight_UD
        look_up.batch = ()  # has this one: memory of a cycle is freed late


def reduce(tables: Sequence[PagedTable]) -> None:
    """Send gradients to the owners of the rows, which take means over ranks."""
    indices: dict[RoutedLookUp, list[int]] = {}  # of tables that have gradients
    for table in tables:
        for look_up in table.unsent:
            if isinstance(look_up, RoutedLookUp):
                indices.setdefault(look_up, []).append(look_up.tables.index(table))
        table.unsent.clear()
        if table.announced and isinstance(table.announced.look_up, RoutedLookUp):
            table.announced.look_up.unused.clear()  # as the step changes the weights
    if not indices:
        return
    grads = send_gradients(list(indices), [look_up.take_sums() for look_up in indices])
    for (look_up, its_tables), grad_MD in zip(indices.items(), grads, strict=True):
        means = look_up.mean_gradients(grad_MD, its_tables)
        for index, mean_LD in zip(its_tables, means, strict=True):
            look_up.tables[index].add_grad(look_up.owned[index], mean_LD)
