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
    """Batch, loss and pairs of a step; the numbers stay on the device."""

    batch: Batch  # the sampler is further on, as pages are drawn ahead
    loss: Tensor  # float64, summed over the positive pairs and their negatives
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
    state: StepState  # step number, and the first fault
    planning: torch.cuda.Stream | None  # on which pages are planned; None without a GPU

    def __post_init__(self) -> None:
        self.tables = self.inputs, self.outputs
        # One event for each of the last two pages: its steps are computed.
        self._computed: deque[torch.cuda.Event] = deque(maxlen=2)
        # The planning stream may reuse the memory of its tensors once they are freed. So they are
        # kept for three pages: the one just planned, the one that computes and the one before.
        self._in_use: deque[list[PlannedBatch]] = deque(maxlen=3)
        if self.planning:
            torch.cuda.reset_peak_memory_stats(self.state.device)

    def __call__(self, planned: PlannedBatch, lr: float) -> StepResult:
        """Train on one batch, which `plan_pages` has yielded.

        A number that is not finite sets `state.fault` and is not written, nor is anything by later
        steps. The exception is sequential SGD, which updates rows in `gradients`, with `lr`, after
        each center: its bad values are already written.
        """
        batch = planned.batch
        self.state.step += 1
        # Find the rows that this batch touches, unless that was done when its page was planned.
        rows = planned.rows if planned.rows is not None else self.kernels.unique_rows(batch)
        # Get their weights, also those that other ranks own, and a zero gradient for each.
        grads, page = self.exchange.borrow(rows, self.engine.page())
        # Add loss and gradients.
        grads = self.kernels.gradients(batch, page, grads, lr)
        # Sum over all ranks the gradients of the rows that this rank owns.
        grads = self.exchange.reduce(grads)
        # Update these rows, not the borrowed ones.
        update = Update(self.optimizer, self.tables, lr)
        self.kernels.optimizer_step(update, self.engine.page(), grads, self.state)
        return StepResult(batch, grads.loss, grads.pairs)

    def plan_pages(self, batches: Iterable[Batch]) -> Iterator[PlannedBatch]:
        """Yield the batches, each page planned while the one before computes."""
        batches = iter(batches)
        with on_stream(self.planning):
            self.exchange.start(batches)
        planned = self._next_page(batches)
        while planned:
            yield from planned
            # The steps of these batches are launched but not computed: the CPU is ahead of the GPU.
            planned = self._next_page(batches)

    @property
    def peak_gpu_bytes(self) -> int:
        """The most GPU memory that tensors have taken since the step was made."""
        return torch.cuda.max_memory_allocated(self.state.device) if self.planning else 0

    def finish(self) -> None:
        """Free all memory but that of the tables. Call after `engine.flush()`."""
        self.engine = Engine(self.tables)
        del self.kernels, self.exchange

    def _next_page(self, batches: Iterator[Batch]) -> list[PlannedBatch]:
        """Draw a page's batches, find their rows and begin to move them."""
        if self.planning:
            self._computed.append(current_stream().record_event())  # behind the last page's steps
        with on_stream(self.planning):
            planned = self.exchange.next_page(batches)
            marks_TV = None
            if planned and self.engine.moves_rows:
                size = 2, self.inputs.rows
                marks_TV = torch.zeros(size, dtype=torch.bool, device=self.state.device)
                self.exchange.mark(planned, marks_TV)
            if self.planning:
                # The last page computes now. From here on the one before it is done: the engine may
                # evict its rows. The first page has none before it, and nothing to wait for.
                page_before_last = self._computed[0]
                self.planning.wait_event(page_before_last)
            if marks_TV is not None:
                window = planned[-1].batch.lookahead
                self.engine.prefetch(marks_TV, None if window is None else window.soon_V)
        if self.planning:
            current_stream().wait_stream(self.planning)
            self._in_use.append(planned)
        with on_stream(self.planning):
            # Several ranks list the rows of the page after it: only now, so that moves begin first.
            self.exchange.look_further(batches)
        return planned
