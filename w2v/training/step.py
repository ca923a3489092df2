"""One training step, and the pages of rows that are prefetched for it.

A page holds the rows of several batches. While these compute, the next page is planned: its batches
are drawn, the rows that they touch are found, and the engine begins to move them. On a GPU this
happens on a stream of its own. Called in order, without overlap, it gives the same result.

Shapes: T = 2 tables, V rows of this rank's part of a table.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from w2v.distributed.exchange import Exchange, PlannedBatch
from w2v.kernels import Kernels
from w2v.kernels.batch import Batch, StepState, Update
from w2v.model.optim import RowOptimizer
from w2v.model.table import Table
from w2v.transfer.engine import Engine
from w2v.transfer.streams import current_stream, on_stream


class StepResult(NamedTuple):
    """What a step learned from; nobody waits for its numbers."""

    batch: Batch  # `sampler.position` is further on than `batch.after`: pages are drawn ahead
    loss: Tensor  # float64 on the device, summed over the positive pairs and their negatives
    pairs: Tensor  # int64, number of positive pairs


@dataclass(eq=False)
class TrainingStep:
    """The step of a run: its tables, and the parts that work on them."""

    inputs: Table  # this rank's rows
    outputs: Table
    kernels: Kernels  # arithmetic on rows
    engine: Engine  # where rows are
    exchange: Exchange  # who owns them
    optimizer: RowOptimizer  # how they are updated
    state: StepState  # what steps leave on the device
    planning: torch.cuda.Stream | None  # on which pages are planned; None without a GPU

    def __post_init__(self) -> None:
        # Events: the steps of the last two pages are computed.
        self._computed: deque[torch.cuda.Event] = deque(maxlen=2)
        # Tensors of the planning stream that the computation may still read: those of the page that
        # was just planned, of the one that computes and of the one before it.
        self._in_use: deque[list[PlannedBatch]] = deque(maxlen=3)
        if self.planning:
            torch.cuda.reset_peak_memory_stats(self.state.fault.device)

    def __call__(self, planned: PlannedBatch, lr: float) -> StepResult:
        """Train on one batch, whose page must have been planned by `prefetched`."""
        batch = planned.batch
        self.state.step += 1
        # Which rows does this batch touch?
        rows = planned.rows if planned.rows is not None else self.kernels.unique_rows(batch)
        # Their weights, also those that other ranks own, and a zero gradient for each.
        grads, page = self.exchange.borrow(rows, self.engine.page())
        # Loss and gradients. Only sequential SGD needs lr here, as it updates after each center.
        grads = self.kernels.gradients(batch, page, grads, lr)
        # Each rank gets the gradients of its own rows, summed over all ranks,
        grads = self.exchange.reduce(grads)
        # and updates these rows, its own and not the borrowed page. A number that is not finite
        # sets `state.fault` and is not written, nor is anything by later steps. Sequential SGD
        # alone has updated rows during `gradients`, so that bad values are already written.
        update = Update(self.optimizer, (self.inputs, self.outputs), lr)
        self.kernels.optimizer_step(update, self.engine.page(), grads, self.state)
        return StepResult(batch, grads.loss, grads.pairs)

    def prefetched(self, batches: Iterable[Batch]) -> Iterator[PlannedBatch]:
        """Yield the batches, each page planned while the one before computes."""
        batches = iter(batches)
        with on_stream(self.planning):
            self.exchange.start(batches)
        planned = self._plan(batches)
        while planned:
            yield from planned
            # The steps of these batches are launched but not computed: the CPU is ahead of the GPU.
            planned = self._plan(batches)

    @property
    def peak_gpu_bytes(self) -> int:
        """The most GPU memory that tensors have taken since the step was made."""
        return torch.cuda.max_memory_allocated(self.state.fault.device) if self.planning else 0

    def finish(self) -> None:
        """Free all memory but that of the tables, which must be flushed."""
        self.kernels.finish()
        self.engine = Engine([self.inputs, self.outputs])

    def _plan(self, batches: Iterator[Batch]) -> list[PlannedBatch]:
        """Draw the next page's batches, find their rows and start to move them."""
        if self.planning:
            # Recorded behind the steps just launched. Of the two events, [0] is behind those of
            # the page before; at the first page there is only one, with nothing to wait for.
            self._computed.append(current_stream().record_event())
        with on_stream(self.planning):
            planned = self.exchange.next_page(batches)
            moves = self.engine.pages and planned
            if moves:
                size, device = (2, self.inputs.rows), self.state.fault.device
                marks_TV = torch.zeros(size, dtype=torch.bool, device=device)
                self.exchange.mark(planned, marks_TV)
            if self.planning:
                # The page before the current one is computed: the engine may evict its rows.
                self.planning.wait_event(self._computed[0])
            if moves:
                ahead = planned[-1].batch.ahead
                # A row is used soon if its word occurs in text of the lookahead window that is not
                # drawn yet. Such rows are evicted last.
                soon_V = None if ahead is None else ahead.last_piece_V >= ahead.next
                self.engine.prefetch(marks_TV, soon_V)
        if self.planning:
            current_stream().wait_stream(self.planning)
            self._in_use.append(planned)
        with on_stream(self.planning):
            # Several ranks list the rows of the page after it: only now, so that moves begin first.
            self.exchange.look_further(batches)
        return planned
