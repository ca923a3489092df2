"""Exchange of weights and gradients between the ranks that own them.

Rows are dealt in turn: row v belongs to rank v % N. For each batch, a rank borrows the weights of
its rows from their owners, and sends the gradients back, which the owners sum and step. Optimizer
state never travels. With one process, both are the identity.

Which rows a batch needs is found on the planning stream, two pages ahead: the ids of a page's rows
carry, in headers, how many ids the next page will send, so that the CPU knows these counts long
before it needs them and no step waits. Loss, pairs and fault of a step travel in the headers of its
gradients.

Shapes: U rows that a batch of this rank touches, M rows that all ranks request of this one, both
with headers; N ranks, K batches of a page.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from w2v.distributed.ranks import Ranks
from w2v.kernels import Kernels, ShardKernels
from w2v.kernels.batch import Batch, Grads, Page, StepShape, StepState

COUNTS_AT_ONCE = 64  # batches whose counts are zeroed together


class PlannedBatch(NamedTuple):
    """A batch whose page is planned, and its rows if they are known."""

    batch: Batch
    rows: Any = None


class Exchange(Protocol):
    """Plans pages, and brings weights and gradients where they are needed."""

    def start(self, batches: Iterator[Batch]) -> None:
        """Prepare the first pages of an epoch, on the planning stream."""

    def next_page(self, batches: Iterator[Batch]) -> list[PlannedBatch]:
        """Return the next page's batches; an empty list at the end."""

    def look_further(self, batches: Iterator[Batch]) -> None:
        """Prepare the page after the next one, once the next one is prefetched."""

    def mark(self, page: list[PlannedBatch], marks_TV: Tensor) -> None:
        """Set the marks of this rank's rows that the page needs."""

    def borrow(self, rows: Any, page: Page) -> tuple[Any, Page]:
        """Return the batch's rows, and a page with their weights."""

    def reduce(self, grads: Grads) -> Grads:
        """Return the gradients of this rank's own rows, summed over all ranks."""


class SingleProcess:
    """The exchange of one process: every row is its own."""

    def __init__(self, kernels: Kernels, batches_per_page: int):
        self._kernels = kernels
        self._batches_per_page = batches_per_page

    def start(self, batches: Iterator[Batch]) -> None:
        """Do nothing: no rank has to be told."""

    def next_page(self, batches: Iterator[Batch]) -> list[PlannedBatch]:
        page = islice(batches, self._batches_per_page)
        if not self._kernels.rows_ahead:
            return [PlannedBatch(batch) for batch in page]
        return [PlannedBatch(batch, self._kernels.unique_rows(batch)) for batch in page]

    def look_further(self, batches: Iterator[Batch]) -> None:
        """Do nothing: no rank has to be told."""

    def mark(self, page: list[PlannedBatch], marks_TV: Tensor) -> None:
        for planned in page:
            self._kernels.mark(planned.batch, marks_TV)

    def borrow(self, rows: Any, page: Page) -> tuple[Any, Page]:
        return rows, page

    def reduce(self, grads: Grads) -> Grads:
        return grads


class Counts(NamedTuple):
    """Numbers of a batch's ids sent and received: int32 [N] on the device."""

    send_N: Tensor
    recv_N: Tensor  # known once the ids of the page before have arrived


class Listed(NamedTuple):
    """The batches of a page, with the rows of each listed by owner."""

    batches: list[Batch]
    lists: list[tuple[Tensor, Tensor]]  # rows_U and ids_U of `list_requests`
    counts: list[Counts]


class Announced(NamedTuple):
    """A page whose counts are on their way to the CPU."""

    page: Listed
    host_K: Sequence[Tensor]  # for each batch, send and receive counts: int32 [2, N]
    known: torch.cuda.Event | None  # when they have arrived; without a GPU they are there


class Route(NamedTuple):
    """A batch's rows by owner, and the rows that ranks request of this one."""

    rows_U: Tensor
    send: list[int]  # rows requested of each rank
    ids_M: Tensor
    recv: list[int]  # rows requested by each rank
    counts: Counts


class RankExchange:
    """Exchange of several ranks, by all-to-all.

    All ranks make the same calls.

    Args:
        ranks: The process group.
        kernels: Operations on rows of several ranks.
        shape: Shape of the whole tables.
        batches_per_page: Batches of a page.
        state: Its fault is shared with the other ranks.
        planning: The stream on which pages are planned; None without a GPU.
    """

    def __init__(
        self,
        ranks: Ranks,
        kernels: ShardKernels,
        shape: StepShape,
        batches_per_page: int,
        state: StepState,
        planning: torch.cuda.Stream | None,
    ):
        self._ranks = ranks
        self._kernels = kernels
        self._shape = shape
        self._batches_per_page = batches_per_page
        self._state = state
        self._planning = planning
        # The CPU reads a page's counts here before it is told those of the next page.
        size = batches_per_page, 2, ranks.size
        pinned = planning is not None
        self._host_K = torch.empty(size, dtype=torch.int32, pin_memory=pinned).unbind()
        self._zero_counts = self._make_zero_counts()
        self._announced: Announced | None = None  # the next page
        self._listed: Listed | None = None  # the page after it
        self._route: Route | None = None  # of the batch at hand
        self._owned: Grads | None = None  # this rank's rows that are lent for it

    def start(self, batches: Iterator[Batch]) -> None:
        # A page without rows comes first: its ids bring the counts of the first real one.
        size, headers = self._ranks.size, self._shape.header_rows
        counts_2N = torch.full((2, size), headers, dtype=torch.int32)
        steps = range(self._batches_per_page)
        no_rows_U = torch.full((size * headers,), -1, device=self._shape.device)
        lists = [(no_rows_U, no_rows_U.int()) for _ in steps]
        counts = [Counts(*counts_2N.to(self._shape.device)) for _ in steps]
        page = Listed([], lists, counts)
        self._announced = Announced(page, [counts_2N for _ in steps], None)
        # Two pages must be listed before the first of them can be announced.
        self.look_further(batches)
        self.next_page(batches)
        self.look_further(batches)

    def next_page(self, batches: Iterator[Batch]) -> list[PlannedBatch]:
        (drawn, lists, counts), host_K, known = self._announced
        if not lists:
            return []
        if known:
            known.synchronize()
        send_KN, recv_KN = zip(*(host_2N.tolist() for host_2N in host_K[: len(lists)]), strict=True)
        # The lists are longer than what they hold, which the CPU did not know when it made them.
        ids_KU = [ids_U[: sum(send)] for (_, ids_U), send in zip(lists, send_KN, strict=True)]
        requested = self._send_ids(ids_KU, send_KN, recv_KN)
        routes = [
            Route(rows_U[: sum(send)], send, ids_M, recv, its)
            for (rows_U, _), send, ids_M, recv, its in zip(
                lists, send_KN, requested, recv_KN, counts, strict=True
            )
        ]
        # The headers of these ids have the counts of the page after this one.
        for route, following, host_2N in zip(
            routes, self._listed.counts, self._host_K, strict=False
        ):
            self._kernels.read_counts(route.ids_M, route.counts.recv_N, *following, host_2N)
        known = self._planning.record_event() if self._planning else None
        self._announced = Announced(self._listed, self._host_K, known)
        return [PlannedBatch(*planned) for planned in zip(drawn, routes, strict=False)]

    def look_further(self, batches: Iterator[Batch]) -> None:
        before = self._announced.page
        drawn = list(islice(batches, self._batches_per_page))
        lists, counts = [], []
        # The last page may be shorter than the one before it.
        for batch, (_, ids_before), its_before in zip(
            drawn, before.lists, before.counts, strict=False
        ):
            its, scratch_N = next(self._zero_counts)
            told = ids_before, its_before.send_N
            lists.append(self._kernels.list_requests(batch, its.send_N, scratch_N, told))
            counts.append(its)
        self._listed = Listed(drawn, lists, counts)

    def mark(self, page: list[PlannedBatch], marks_TV: Tensor) -> None:
        for planned in page:
            self._kernels.mark_requested(planned.rows.ids_M, marks_TV)

    def borrow(self, rows: Route, page: Page) -> tuple[Grads, Page]:
        self._route = rows
        weights_MD, self._owned = self._kernels.lend(rows.ids_M, page)
        # Weights go where ids came from, so that recv and send change places.
        weights_UD = self._ranks.all_to_all(weights_MD, rows.recv, rows.send)
        borrowed_page, borrowed = self._kernels.borrow(rows.rows_U, weights_UD, self._owned)
        return borrowed, borrowed_page

    def reduce(self, grads: Grads) -> Grads:
        route, owned, fault = self._route, self._owned, self._state.fault
        self._kernels.write_headers(grads, fault, route.counts.send_N)
        # The borrowed rows of both tables have one tensor of gradients (`ShardKernels.borrow`).
        grad_MD = self._ranks.all_to_all(grads.inputs.grad_UD, route.send, route.recv)
        pairs_M = None
        if grads.inputs.pairs_U is not None:
            pairs_M = self._ranks.all_to_all(grads.inputs.pairs_U, route.send, route.recv)
        self._kernels.collect(route.ids_M, route.counts.recv_N, grad_MD, pairs_M, owned, fault)
        return owned

    def _send_ids(
        self, ids_KU: list[Tensor], send_KN: Sequence[list[int]], recv_KN: Sequence[list[int]]
    ) -> Sequence[Tensor]:
        """Exchange the ids of a page at once; return those of each batch."""
        if len(ids_KU) == 1:
            # In a group of its own: ids are not to wait for the rows of steps on another stream.
            return [self._ranks.all_to_all(ids_KU[0], send_KN[0], recv_KN[0], group="prefetch")]
        # By rank first, then by batch, as the all-to-all wants it; and back.
        parts_KN = [ids_U.split(send) for ids_U, send in zip(ids_KU, send_KN, strict=True)]
        send_NK = list(zip(*send_KN, strict=True))
        recv_NK = list(zip(*recv_KN, strict=True))
        sent = torch.cat([ids for parts_K in zip(*parts_KN, strict=True) for ids in parts_K])
        sums = list(map(sum, send_NK)), list(map(sum, recv_NK))
        received = self._ranks.all_to_all(sent, *sums, group="prefetch")
        parts = received.split([count for recv_K in recv_NK for count in recv_K])
        steps = len(ids_KU)
        by_batch = torch.cat([ids for step in range(steps) for ids in parts[step::steps]])
        return by_batch.split(list(map(sum, recv_KN)))

    def _make_zero_counts(self) -> Iterator[tuple[Counts, Tensor]]:
        """Yield zeros for the counts of each batch, and scratch memory."""
        while True:
            size = 3, COUNTS_AT_ONCE, self._ranks.size
            zeros = torch.zeros(size, dtype=torch.int32, device=self._shape.device)
            columns = (column.unbind() for column in zeros)
            for send_N, recv_N, scratch_N in zip(*columns, strict=True):
                yield Counts(send_N, recv_N), scratch_N
