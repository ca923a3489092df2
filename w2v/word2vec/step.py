"""One training step, and the pages of rows that are prefetched for it.

A page holds the rows of several batches. While these compute, the next page is planned: its batches
are drawn, the rows that they touch are found, and the engine begins to move them. On a GPU this
happens on a stream of its own. Called in order, without overlap, it gives the same result.

Shape: A rows of this rank.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from w2v.distributed.ranks import SINGLE, Ranks
from w2v.rows.cache import Engine
from w2v.rows.link import current_stream, on_stream
from w2v.rows.moves import WantedRows
from w2v.rows.optim import RowOptimizer
from w2v.rows.table import Table
from w2v.word2vec.batch import Batch, StepState, Update
from w2v.word2vec.exchange import Exchange, PlannedBatch
from w2v.word2vec.kernels import Kernels
from w2v.word2vec.subwords import Subwords


class StepResult(NamedTuple):
    """Batch, loss and pairs of a step; the numbers stay on the device."""

    batch: Batch  # of this step; the sampler may be pages ahead
    loss: Tensor  # float64, summed over the positive pairs and their negatives
    pairs: Tensor  # int64, number of positive pairs


class Waits:
    """Time that a stream has waited for moves, by events around each."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._open: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()

    @contextlib.contextmanager
    def counted(self, device: torch.device) -> Iterator[None]:
        """Count the time that a GPU's current stream takes for the block."""
        if device.type == "cpu":
            yield
            return
        stream = current_stream()
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        before.record(stream)
        yield
        after.record(stream)
        self._open.append((before, after))
        self._collect()

    @property
    def seconds(self) -> float:
        """Seconds of all waits that are over."""
        self._collect()
        return self._seconds

    def _collect(self) -> None:
        while self._open and self._open[0][1].query():
            before, after = self._open.popleft()
            self._seconds += before.elapsed_time(after) / 1000


@dataclass(eq=False)
class TrainingStep:
    """The step of a run: its table, and the parts that work on it.

    table: This rank's rows, those of input and output vectors in turn.
    tables: Views of the same rows as two tables, `inputs` and `outputs`.
    """

    table: Table
    kernels: Kernels  # arithmetic on rows
    engine: Engine  # where rows are
    exchange: Exchange  # who owns them
    optimizer: RowOptimizer  # how they are updated
    state: StepState  # step number, and the first fault
    planning: torch.cuda.Stream | None  # on which pages are planned; None without a GPU
    subwords: Subwords | None = None  # that input vectors are composed of
    ranks: Ranks = SINGLE

    def __post_init__(self) -> None:
        self.tables = self.table.interleaved("input", "output")
        self.inputs, self.outputs = self.tables
        # For each of the last two pages, an event after its steps.
        self._computed: deque[torch.cuda.Event] = deque(maxlen=2)
        # The planning stream reuses the memory of a tensor as soon as Python frees it, even while a
        # step reads it. So three pages are kept: planned, computing, and the one before.
        self._kept: deque[list[PlannedBatch]] = deque(maxlen=3)
        self.waits = Waits()  # until the rows of a page had moved
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
        # Find the batch's rows, unless that was done when its page was planned. Get their weights,
        # some of them from other ranks, and a zero gradient for each.
        own = self.engine.view
        grads, view = self.exchange.borrow(planned, own)
        # Add loss and gradients.
        grads = self.kernels.gradients(batch, view, grads, lr)
        # Replace them by the rows that this rank owns, with gradients summed over all ranks.
        grads = self.exchange.reduce(grads)
        # Update these rows.
        update = Update(self.optimizer, self.table, lr)
        self.kernels.optimizer_step(update, own, grads, self.state)
        return StepResult(batch, grads.loss, grads.pairs)

    def plan_pages(self, batches: Iterable[Batch]) -> Iterator[PlannedBatch]:
        """Yield the batches, each page planned while the one before computes."""
        pages = self.exchange.pages(batches)
        # A GPU still computes the steps of a page while the next one is planned.
        while planned := self._next_page(pages):
            if self.engine.moves_rows:
                with self.waits.counted(self.state.device):
                    self.engine.wait()
            yield from planned

    def flush(self) -> None:
        """Write all rows back to the table, with all composed vectors."""
        self.engine.flush()
        if self.subwords:
            self.subwords.compose_all(self.table, self.ranks)

    @property
    def peak_gpu_bytes(self) -> int:
        """The most GPU memory that tensors have taken since the step was made."""
        return torch.cuda.max_memory_allocated(self.state.device) if self.planning else 0

    def finish(self) -> None:
        """Free all memory but that of the tables. Call after `flush()`."""
        self.engine = Engine(self.table)
        del self.kernels, self.exchange

    def _next_page(self, pages: Iterator[list[PlannedBatch]]) -> list[PlannedBatch]:
        """Draw a page's batches, find their rows and begin to move them."""
        if self.planning:
            self._computed.append(current_stream().record_event())  # behind the last page's steps
        with on_stream(self.planning):
            planned = next(pages, [])
            marks_A = None
            if planned and self.engine.moves_rows:
                rows = self.table.rows
                marks_A = torch.zeros(rows, dtype=torch.bool, device=self.state.device)
                self.exchange.mark(planned, marks_A)
            if self.planning:
                # Wait for the page before the one that computes: the engine may evict its rows.
                self.planning.wait_event(self._computed[0])
            if marks_A is not None:
                lookahead = planned[-1].batch.lookahead
                soon_A = self.kernels.with_subwords(lookahead.soon_A) if lookahead else None
                self.engine.prefetch(WantedRows(marks_A, soon_A))
        if self.planning:
            current_stream().wait_stream(self.planning)
            self._kept.append(planned)
        return planned
