"""The stages of a training step, in their order, for both tables; and what runs ahead of them.

On a GPU, batches are drawn and their rows found on a stream of their own while the batches before them compute, so that the waits for
the number of rows do not hold up the computation. Rows of a page serve `steps_per_page` batches: what they need together is asked of
the engine at once, before their first step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from functools import cached_property
from itertools import islice
from typing import NamedTuple

import torch
from torch import Tensor

from w2v.distributed.ranks import SINGLE, Ranks
from w2v.kernels import cuda
from w2v.kernels.batch import Batch, Held
from w2v.model import skipgram
from w2v.model.optim import RowOptimizer
from w2v.model.skipgram import Slots
from w2v.model.table import Table
from w2v.transfer import streams, timing
from w2v.transfer.engine import Engine

# What can cease to be finite, as bits of a fault. Nothing of a step is written from the first fault on.
FAULTS = (
    "the loss",
    "the gradients of the input table",
    "the gradients of the output table",
    "the stepped rows of the input table",
    "the stepped rows of the output table",
)
Both = tuple[cuda.Claims, cuda.Claims]  # of the input table and of the output table


class Planned(NamedTuple):
    """A batch whose rows are on their way; the fused kernels find its slots themselves."""

    batch: Batch
    slots: Slots | None


class StepResult(NamedTuple):
    """What a step learned from: the summed loss of its positive pairs (float64) and their number, on the compute device."""

    loss: Tensor
    pairs: Tensor


class Pipeline:
    """Trains the rows that a batch touches, in plain torch: pages them in, steps them, writes them back.

    product: what matrix products are computed in; by default float32, as all else. Where several `ranks` train together, the tables are
    this one's shards, and all make their steps at once, each with a batch of its own, which may be empty.
    """

    def __init__(
        self,
        inputs: Table,
        outputs: Table,
        engine: Engine,
        optimizer: RowOptimizer,
        device: torch.device,
        steps_per_page: int = 1,
        product: torch.dtype | None = None,
        ranks: Ranks = SINGLE,
        rows: int | None = None,
    ):
        self.inputs, self.outputs, self.engine, self.optimizer = inputs, outputs, engine, optimizer
        self._device, self._steps_per_page, self._product = device, steps_per_page, product
        self._ranks, self._rows = ranks, rows or inputs.rows
        self._scale = (
            skipgram.LossScale(inputs.scalars, device) if product == torch.float16 else None
        )
        self.steps = 0
        self._rows_stepped = torch.zeros((), dtype=torch.int64, device=device)
        self.fault = torch.zeros(
            (), dtype=torch.int64, device=device
        )  # the first: its step << len(FAULTS) | bits; 0: none
        self._bits = 1 << torch.arange(len(FAULTS), device=device)
        largest = [
            torch.finfo(dtype).max
            for dtype in (torch.float64, torch.float32, torch.float32, inputs.dtype, outputs.dtype)
        ]
        self._largest = torch.tensor(largest, dtype=torch.float64, device=device)[:, None]
        self._planning = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None
        self._computed: deque[torch.cuda.Event] = deque(
            maxlen=2
        )  # when the last pages' steps are done
        self._planned: torch.cuda.Event | None = None  # when the last page is
        self._held: deque[list[Planned]] = deque(
            maxlen=3
        )  # memory of the planning stream that the computation may still read
        if self._planning:
            torch.cuda.reset_peak_memory_stats(device)

    @property
    def bytes_gpu(self) -> int:
        """The most GPU memory that tensors have taken since the pipeline was made."""
        return torch.cuda.max_memory_allocated(self._device) if self._planning else 0

    def link_rate(self) -> float:
        """Bytes a second that the link between CPU and GPU can carry, both ways together, tried out now; 0 where no rows cross it."""
        return timing.copies(self._device) if self._planning and self.engine.pages else 0.0

    @property
    def rows_stepped(self) -> int:
        """The rows of each step so far, which would all cross the link if no page served more than one step and no row stayed."""
        return int(self._rows_stepped)

    def ahead(self, batches: Iterable[Batch]) -> Iterator[Planned]:
        """The batches, planned a page ahead of the steps that the caller makes of them."""
        batches = iter(batches)
        page = self._plan(batches)
        while page:
            yield from page
            page = self._plan(batches)  # while the device computes the steps of the last one

    def step(self, planned: Planned, lr: float) -> StepResult:
        slots = planned.slots
        self.steps += 1
        self._rows_stepped += len(slots.input_rows_U) + len(slots.output_rows_V)
        pages = (
            self.engine.fetch(self.inputs, slots.input_rows_U),
            self.engine.fetch(self.outputs, slots.output_rows_V),
        )
        scale = self._scale.scale.clone() if self._scale else None
        loss, pairs = skipgram.backward(
            *pages, slots, self._product, scale, counted=self.optimizer.occurrence_cap > 0
        )
        pages = self.engine.reduce(pages[0]), self.engine.reduce(pages[1])
        loss, pairs = self._ranks.all_reduce(torch.stack([loss, pairs.double()]))
        before = (
            [page.records_UR.clone() for page in pages] if self._planning or self._scale else []
        )  # the CPU knows a fault at once
        left_out = None
        if self._scale:
            left_out = self._scale.update(
                self._ranks.all_reduce(skipgram.overflown([page.grad_UD for page in pages])) > 0
            )
        for page in pages:
            if left_out is not None:
                page.grad_UD = torch.where(left_out, 0, page.grad_UD)
            self.optimizer.step(page, lr)
        self._look(loss, [page.grad_UD for page in pages], [page.records_UR for page in pages])
        keep = self.fault == 0 if left_out is None else (self.fault == 0) & ~left_out
        for page, records_UR in zip(pages, before, strict=False):
            torch.where(keep, page.records_UR, records_UR, out=page.records_UR)
        for page in pages if before or not self.fault else []:
            self.engine.write_back(page)
        return StepResult(loss, pairs)

    def finish(self) -> None:
        """Give back the memory of all but the input vectors, when training is over and saved."""
        self.outputs.shrink(0)
        self.inputs.shrink(self.inputs.dim)

    def _look(self, loss: Tensor, grads: list[Tensor], records: list[Tensor]) -> None:
        """Note the first step whose numbers are not all finite, without waiting for the device."""
        ends = [
            torch.stack(x.aminmax()).double() if x.numel() else loss.new_zeros(2)
            for x in (*grads, *records)
        ]  # NaN is either's
        unsound = (~(torch.stack([loss.expand(2), *ends]).abs() <= self._largest)).any(dim=1)
        bits = ((self._ranks.all_reduce(unsound.int()) > 0) * self._bits).sum()
        first = (self.fault == 0) & (bits != 0)
        self.fault = torch.where(first, bits + (self.steps << len(FAULTS)), self.fault)

    def _plan(self, batches: Iterator[Batch]) -> list[Planned]:
        """Draw the next page's batches, find their rows and have the engine bring them."""
        if self._planning is None:
            page = self._draw(batches)
            if page and self.engine.pages:
                self.engine.prefetch(self._marks(page), _used_soon(page[-1].batch))
            return page
        current = streams.current()
        self._computed.append(
            current.record_event(self._computed.popleft() if len(self._computed) == 2 else None)
        )
        with streams.on(self._planning):
            page = self._draw(batches)
            marks_TV = self._marks(page) if page and self.engine.pages else None
            # The page before the one that computes now is done: its memory may be used again, and the engine may send its rows away.
            self._planning.wait_event(self._computed[0])
            if marks_TV is not None:
                self.engine.prefetch(marks_TV, _used_soon(page[-1].batch))
        self._planned = self._planning.record_event(self._planned)
        current.wait_event(self._planned)
        self._held.append(page)
        return page

    def _draw(self, batches: Iterator[Batch]) -> list[Planned]:
        drawn = islice(batches, self._steps_per_page)
        return [
            Planned(batch, skipgram.find_slots(skipgram.expand(batch), self._rows))
            for batch in drawn
        ]

    def _marks(self, page: list[Planned]) -> Tensor:
        """Which rows of both tables the page's steps touch: bool [2, V]."""
        marks_TV = self._no_marks()
        for _, slots in page:
            marks_TV[0].index_fill_(0, slots.input_rows_U, True)
            marks_TV[1].index_fill_(0, slots.output_rows_V, True)
        return marks_TV

    def _no_marks(self) -> Tensor:
        return torch.zeros(2, self._rows, dtype=torch.bool, device=self._device)


class FusedPipeline(Pipeline):
    """The same steps by kernels that work on the records where the engine holds them."""

    _work: Both | None = None

    @cached_property
    def _sums(self) -> Iterator[cuda.Sums]:
        return cuda.Sums.of_steps(self._device)

    def step(self, planned: Planned, lr: float) -> StepResult:
        batch, held = planned.batch, self._hold()
        claims = self._work = with_room(
            self._work, most_rows(batch), self.inputs.rows, self.inputs.dim, self._device
        )
        sums = next(self._sums)
        cuda.claim(batch, *claims, sums.claimed)
        cuda.skipgram(
            batch,
            held[0],
            claims[0],
            held[1],
            claims[1],
            sums,
            counted=self.optimizer.occurrence_cap > 0,
        )
        self._step_rows(held, claims, sums.claimed, sums.loss, lr)
        return StepResult(sums.loss, sums.pairs)

    def _hold(self) -> tuple[Held, Held]:
        return self.engine.hold(self.inputs), self.engine.hold(self.outputs)

    def _step_rows(
        self,
        held: tuple[Held, Held],
        claims: Both,
        claimed: tuple[Tensor, Tensor],
        loss: Tensor,
        lr: float,
    ) -> None:
        """The optimizer's step of the claimed rows of both tables, which ends the claims."""
        self.steps += 1
        guard = cuda.Guard(loss, self.fault, self.steps << len(FAULTS), 1 << len(FAULTS) - 2)
        self.optimizer.step_in_place(
            (self.inputs, self.outputs), held, claims, claimed, self._rows_stepped, lr, guard
        )

    def _draw(self, batches: Iterator[Batch]) -> list[Planned]:
        return [Planned(batch, None) for batch in islice(batches, self._steps_per_page)]

    def _marks(self, page: list[Planned]) -> Tensor:
        marks_TV = self._no_marks()
        for batch, _ in page:
            cuda.mark(batch, marks_TV)
        return marks_TV


def _used_soon(batch: Batch) -> Tensor | None:
    """Which rows the text after the batch uses, bool [V], if it is looked ahead at."""
    return batch.ahead and batch.ahead.last_piece_V >= batch.ahead.next


def most_rows(batch: Batch) -> tuple[int, int]:
    """How many rows of the input and of the output table the batch may touch."""
    centers, noise = batch.negatives_BK.shape
    return centers + 2 * batch.window, centers + min(centers * noise, batch.pool or centers * noise)


def with_room(
    claims: Both | None, most: tuple[int, int], rows: int, dim: int, device: torch.device
) -> Both:
    """Claims of tables of so many rows with room for so many of them: those given, if they have it."""
    if claims and claims[0].room >= min(rows, most[0]) and claims[1].room >= min(rows, most[1]):
        return claims
    return cuda.Claims(rows, most[0], dim, device), cuda.Claims(rows, most[1], dim, device)
