"""Exchange of weights and gradients between the ranks that own them.

The rows of word w belong to rank w % N. For each batch, a rank borrows the weights of its rows from
their owners and sends the gradients back; the owners sum them and step the optimizer, whose state
never travels. With one process, both are the identity.

The rows of a page are listed on the planning stream, and their ids go to the owners, with the
counts of the page after it (`w2v.rows.shard.Requests`): so the CPU knows the counts of a page long
before it needs them, and no step waits.

Shapes: U rows that a batch of this rank touches, M rows that all ranks request of this one, X rows
of a buffer, N ranks.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor

from w2v.distributed.ranks import Ranks
from w2v.rows.group import RowGroup
from w2v.rows.ops import Span, View
from w2v.rows.shard import Requests, RoutedLookUp, send_gradients, send_weights, sent_ahead
from w2v.rows.table import Table
from w2v.word2vec.batch import Batch, Grads, RowGrads, StepShape, StepState, zeros_by_step
from w2v.word2vec.kernels import Kernels


class PlannedBatch(NamedTuple):
    """A batch whose page is planned."""

    batch: Batch
    rows: Any  # what the exchange knows of them


@dataclass(eq=False)
class Exchange:
    """Plans pages, and exchanges rows with other ranks: here with none.

    Rows of a batch are None where the step finds them.
    """

    kernels: Kernels
    batches_per_page: int

    def pages(self, batches: Iterable[Batch]) -> Iterator[list[PlannedBatch]]:
        """Yield the batches of an epoch, page by page."""
        batches = iter(batches)
        while page := list(islice(batches, self.batches_per_page)):
            yield self.plan(page)

    def plan(self, page: Sequence[Batch]) -> list[PlannedBatch]:
        """Begin to find the rows of a page."""
        if not self.kernels.plans_rows:
            return [PlannedBatch(batch, None) for batch in page]
        return [PlannedBatch(batch, self.kernels.unique_rows(batch)) for batch in page]

    def mark(self, page: list[PlannedBatch], marks_A: Tensor) -> None:
        """Set the marks of this rank's rows that the page touches on any rank."""
        for planned in page:
            if planned.rows is None:
                self.kernels.mark(planned.batch, marks_A)
            else:
                marks_A.index_fill_(0, planned.rows.rows.unique_rows().long(), True)

    def borrow(self, planned: PlannedBatch, view: View) -> tuple[Grads, View]:
        """Return zero gradients of a batch's rows, and where their weights are."""
        return planned.rows or self.kernels.unique_rows(planned.batch), view

    def reduce(self, grads: Grads) -> Grads:
        """Return the gradients of this rank's own rows, summed over all ranks."""
        return grads

    @property
    def bytes_sent(self) -> int:
        """Bytes of rows that have gone to other ranks so far."""
        return 0


class BatchRows(RoutedLookUp):
    """Look-up of the unique rows of a batch, both of word w at rank w % N.

    Attributes:
        listed: The rows, and -1 in the rest of a buffer; once those of other ranks are received, in
            the order of their weights: int64 [U].
    """

    def __init__(self, listed_X: Tensor, group: RowGroup, shape: StepShape):
        self.listed = listed_X
        # Numbered so that row v is row v // N of rank v % N; -1 stays -1.
        size, words_X = shape.world_size, listed_X // 2
        numbers_X = (words_X // size * 2 + listed_X % 2) * size + words_X % size
        span = Span(shape.shard_rows * size, None, (0,) * size)
        super().__init__(group, [span], [numbers_X], has_gaps=True)

    def receive(self, ranks: Ranks, rows_M: Tensor, received: list[int]) -> None:
        super().receive(ranks, rows_M, received)
        listed_U = self.listed[: len(self.wait())]
        places_U = self.places_N[: len(listed_U)]
        self.listed = torch.empty_like(listed_U).index_copy_(0, places_U, listed_U)


@dataclass(eq=False)
class RankExchange(Exchange):
    """Exchange of several ranks, by all-to-all; all make the same calls."""

    state: StepState  # its fault is shared with the other ranks
    ranks: Ranks
    table: Table  # this rank's rows
    _rows: BatchRows = field(init=False)  # of the current batch

    def __post_init__(self) -> None:
        shape = self.kernels.shape
        self._group = RowGroup(self.table, shape.device)
        # Where each row of the current batch is among the borrowed ones.
        self._index_A = torch.zeros(shape.rows, dtype=torch.int32, device=shape.device)
        self._losses = zeros_by_step(shape.device, torch.float64)
        self._pairs = zeros_by_step(shape.device, torch.int64)

    def pages(self, batches: Iterable[Batch]) -> Iterator[list[PlannedBatch]]:
        planned = super().pages(batches)
        ranks, device, lists = self.ranks, self.kernels.shape.device, self.batches_per_page

        def draw() -> tuple[list[PlannedBatch], list[BatchRows]]:
            page = next(planned)
            return page, [each.rows for each in page]

        # A process group of its own: ids need not wait for the weights and gradients of steps.
        return sent_ahead(lambda: Requests(ranks, device, lists, draw, group="prefetch"))

    def plan(self, page: Sequence[Batch]) -> list[PlannedBatch]:
        kernels = self.kernels
        rows = [BatchRows(kernels.list_rows(batch), self._group, kernels.shape) for batch in page]
        return list(map(PlannedBatch, page, rows))

    def mark(self, page: list[PlannedBatch], marks_A: Tensor) -> None:
        for planned in page:
            marks_A.index_fill_(0, planned.rows.rows_M, True)

    def borrow(self, planned: PlannedBatch, view: View) -> tuple[Grads, View]:
        self._rows = found = planned.rows
        weight_SD = view.records_SR[:, : self.kernels.shape.dim]
        weight_MD = weight_SD.index_select(0, view.slots(found.rows_M))
        (weight_UD,) = send_weights([found], [weight_MD])
        rows_U = found.listed
        index_U = torch.arange(len(rows_U), dtype=torch.int32, device=rows_U.device)
        self._index_A.index_copy_(0, rows_U, index_U)
        grad_dtype = torch.promote_types(weight_UD.dtype, torch.float32)
        grad_UD = torch.zeros(weight_UD.shape, dtype=grad_dtype, device=rows_U.device)
        pairs_U = torch.zeros_like(index_U) if self.kernels.shape.count_pairs else None
        rows = RowGrads(self._index_A, rows_U.int(), grad_UD, pairs_U, None)
        return Grads(rows, next(self._losses), next(self._pairs)), View(weight_UD, self._index_A)

    def reduce(self, grads: Grads) -> Grads:
        (grad_MD,) = send_gradients([self._rows], [grads.rows.grad_UD])
        pairs_M = None
        if grads.rows.pairs_U is not None:
            (pairs_M,) = send_gradients([self._rows], [grads.rows.pairs_U])
        rows = self.kernels.sum_by_row(self._rows, grad_MD, pairs_M)
        loss, pairs = self._share_facts(grads)
        return Grads(rows, loss, pairs)

    def _share_facts(self, grads: Grads) -> tuple[Tensor, Tensor]:
        """Return loss and pairs of all ranks, and join their faults."""
        # Every rank sums in the order of the ranks, so that all get the same bits.
        facts_NF = grads.loss.new_zeros(self.ranks.size, 3)
        facts_NF[self.ranks.rank] = torch.stack([grads.loss, grads.pairs, self.state.fault])
        loss, pairs, _ = self.ranks.all_reduce(facts_NF).sum(0)
        faults_N = facts_NF[:, 2].long()
        self.state.fault.copy_(functools.reduce(torch.bitwise_or, faults_N))
        return loss, pairs.long()

    @property
    def bytes_sent(self) -> int:
        return self.ranks.bytes_sent
