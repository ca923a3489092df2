"""Exchange of weights and gradients between the ranks that own them.

The rows of word w belong to rank w % N. For each batch, a rank borrows the weights of its rows from
their owners and sends the gradients back; the owners sum them and step the optimizer, whose state
never travels. With one process, both are the identity.

The rows of a batch are listed on the planning stream, two pages ahead:

    list page n + 1     its rows by owner, and how many ids go to each rank (`list_following`)
    send ids of page n  with headers that say how many ids page n + 1 will send (`next_page`)
    page n computes     weights come from the owners, gradients go to them (`borrow`, `reduce`)

So the CPU knows the counts of a page long before it needs them, and no step waits. Loss, pairs and
fault of a step travel in the headers of its gradients.

Shapes: U rows that a batch of this rank touches, M rows that all ranks request of this one, both
with headers; N ranks, K batches of a page.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Generic, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from w2v.distributed.ranks import Ranks
from w2v.rows.ops import View
from w2v.word2vec.batch import Batch, Counts, Grads, IdsByRank, StepShape, StepState, zeros_by_step
from w2v.word2vec.kernels import Kernels, ShardKernels

Rows = TypeVar("Rows")  # what an exchange knows of a batch's rows


@dataclass(frozen=True, eq=False)
class PlannedBatch(Generic[Rows]):
    """A batch whose page is planned."""

    batch: Batch
    rows: Rows


class Exchange(Protocol[Rows]):
    """Plans pages, and exchanges weights and gradients with other ranks."""

    def start(self, batches: Iterator[Batch]) -> None:
        """List the rows of the first pages of an epoch, on the planning stream."""
        return

    def next_page(self, batches: Iterator[Batch]) -> list[PlannedBatch[Rows]]:
        """Return the next page's batches; an empty list at the end."""

    def list_following(self, batches: Iterator[Batch]) -> None:
        """List the rows of the page after the one that `next_page` returned."""
        return

    def mark(self, page: list[PlannedBatch[Rows]], marks_A: Tensor) -> None:
        """Set the marks of this rank's rows that the page touches on any rank."""

    def borrow(self, planned: PlannedBatch[Rows], view: View) -> tuple[Grads, View]:
        """Return zero gradients of a batch's rows, and where their weights are."""

    def reduce(self, grads: Grads) -> Grads:
        """Return the gradients of this rank's own rows, summed over all ranks."""

    @property
    def bytes_sent(self) -> int:
        """Bytes of rows that have gone to other ranks so far."""


@dataclass(eq=False)
class LocalExchange(Exchange[Grads | None]):
    """Exchange of one process, which owns every row.

    Rows of a batch are None where the step finds them.
    """

    kernels: Kernels
    batches_per_page: int
    bytes_sent = 0

    def next_page(self, batches: Iterator[Batch]) -> list[PlannedBatch[Grads | None]]:
        page = islice(batches, self.batches_per_page)
        if not self.kernels.plans_rows:
            return [PlannedBatch(batch, None) for batch in page]
        return [PlannedBatch(batch, self.kernels.unique_rows(batch)) for batch in page]

    def mark(self, page: list[PlannedBatch[Grads | None]], marks_A: Tensor) -> None:
        for planned in page:
            if planned.rows is None:
                self.kernels.mark(planned.batch, marks_A)
            else:
                marks_A.index_fill_(0, planned.rows.rows.unique_rows().long(), True)

    def borrow(self, planned: PlannedBatch[Grads | None], view: View) -> tuple[Grads, View]:
        if planned.rows is None:
            return self.kernels.unique_rows(planned.batch), view
        return planned.rows, view

    def reduce(self, grads: Grads) -> Grads:
        return grads


class OwnerLists(NamedTuple):
    """A batch's rows by owner, from `ShardKernels.list_requests`."""

    rows_U: Tensor
    ids_U: Tensor
    counts: Counts


class Route(NamedTuple):
    """A batch's rows by owner, and the rows that ranks request of this one."""

    rows_U: Tensor
    send: list[int]  # rows requested of each rank
    ids_M: Tensor
    recv: list[int]  # rows requested by each rank
    counts: Counts

    @property
    def received(self) -> IdsByRank:
        """The ids of `ids_M`, with their counts on the device."""
        return IdsByRank(self.ids_M, self.counts.recv_N)


@dataclass(eq=False)
class RankExchange(Exchange[Route]):
    """Exchange of several ranks, by all-to-all; all make the same calls."""

    kernels: ShardKernels
    batches_per_page: int
    state: StepState  # its fault is shared with the other ranks
    ranks: Ranks
    shape: StepShape  # of the whole tables
    planning: torch.cuda.Stream | None  # on which pages are planned; None without a GPU
    _route: Route = field(init=False)  # of the current batch
    _owned: Grads = field(init=False)  # this rank's rows that are requested for it

    def __post_init__(self) -> None:
        # Counts of the next page in CPU memory, which have arrived after the event `_counts_known`.
        # They are read before those of the page after it replace them.
        size = self.batches_per_page, 2, self.ranks.size
        on_gpu = self.planning is not None
        self._host_K2N = torch.empty(size, dtype=torch.int32, pin_memory=on_gpu)
        self._counts_known: torch.cuda.Event | None = None
        self._zeros = zeros_by_step(self.shape.device, *[(torch.int32, (self.ranks.size,))] * 3)
        # The page that `next_page` returns, and the page after it.
        self._batches: list[Batch] = []
        self._batches_after: list[Batch] = []
        self._lists: list[OwnerLists] = []
        self._lists_after: list[OwnerLists] = []

    def start(self, batches: Iterator[Batch]) -> None:
        # An empty page comes first: the headers of its ids carry the counts of the first real page.
        headers = self.shape.header_rows
        self._host_K2N.fill_(headers)
        self._counts_known = None
        device, size = self.shape.device, self.ranks.size
        counts_N = torch.full((size,), headers, dtype=torch.int32, device=device)
        no_rows_U = torch.full((size * headers,), -1, device=device)
        counts = Counts(counts_N, counts_N)
        self._lists = [
            OwnerLists(no_rows_U, no_rows_U.int(), counts) for _ in range(self.batches_per_page)
        ]
        self.list_following(batches)
        self._send_ids()
        self.list_following(batches)

    def next_page(self, batches: Iterator[Batch]) -> list[PlannedBatch[Route]]:
        page = self._batches
        routes = self._send_ids()
        return [PlannedBatch(batch, route) for batch, route in zip(page, routes, strict=True)]

    def _send_ids(self) -> list[Route]:
        """Exchange the ids of a page, and go on to the next."""
        lists = self._lists
        if not lists:
            return []
        if self._counts_known:
            self._counts_known.synchronize()
        send_KN, recv_KN = zip(*self._host_K2N[: len(lists)].tolist(), strict=True)
        # Lists have room for more rows; only now does the CPU know how many they have.
        ids_KU = [listed.ids_U[: sum(send)] for listed, send in zip(lists, send_KN, strict=True)]
        # A process group of its own: ids need not wait for the weights and gradients of steps.
        requested = self.ranks.all_to_all_tensors(ids_KU, send_KN, recv_KN, group="prefetch")
        routes = [
            Route(listed.rows_U[: sum(send)], send, ids_M, recv, listed.counts)
            for listed, send, ids_M, recv in zip(lists, send_KN, requested, recv_KN, strict=True)
        ]
        # The headers of these ids carry the counts of the page after this one. The last page of an
        # epoch may have fewer batches.
        for route, listed, host_2N in zip(routes, self._lists_after, self._host_K2N, strict=False):
            self.kernels.read_counts(route.received, listed.counts, host_2N)
        self._counts_known = self.planning.record_event() if self.planning else None
        self._batches, self._lists = self._batches_after, self._lists_after
        return routes

    def list_following(self, batches: Iterator[Batch]) -> None:
        self._batches_after = list(islice(batches, self.batches_per_page))
        self._lists_after = []
        # The last page of an epoch may have fewer batches.
        for batch, listed in zip(self._batches_after, self._lists, strict=False):
            send_N, recv_N, scratch_N = next(self._zeros)
            before = IdsByRank(listed.ids_U, listed.counts.send_N)
            rows_U, ids_U = self.kernels.list_requests(batch, send_N, scratch_N, before)
            self._lists_after.append(OwnerLists(rows_U, ids_U, Counts(send_N, recv_N)))

    def mark(self, page: list[PlannedBatch[Route]], marks_A: Tensor) -> None:
        for planned in page:
            self.kernels.mark_requested(planned.rows.ids_M, marks_A)

    def borrow(self, planned: PlannedBatch[Route], view: View) -> tuple[Grads, View]:
        self._route = route = planned.rows
        self._owned = self.kernels.own(route.ids_M)
        weights_MD = self.kernels.gather_weights(route.ids_M, view)
        # Weights go back to where ids came from: send and recv are exchanged.
        weights_UD = self.ranks.all_to_all(weights_MD, route.recv, route.send)
        return self.kernels.borrow(route.rows_U, weights_UD, self._owned)

    def reduce(self, grads: Grads) -> Grads:
        route, owned = self._route, self._owned
        self.kernels.write_headers(grads, self.state.fault, route.counts.send_N)
        grad_MD = self.ranks.all_to_all(grads.rows.grad_UD, route.send, route.recv)
        pairs_M = None
        if grads.rows.pairs_U is not None:
            pairs_M = self.ranks.all_to_all(grads.rows.pairs_U, route.send, route.recv)
        self.kernels.collect(route.received, (grad_MD, pairs_M), owned, self.state.fault)
        return owned

    @property
    def bytes_sent(self) -> int:
        return self.ranks.bytes_sent
