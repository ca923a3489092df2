"""The stages of a training step, in their order, for both tables; and what runs ahead of them.

On a GPU, batches are drawn and their rows found on a stream of their own while the batches before them compute, so that the waits for
the number of rows do not hold up the computation. Rows of a page serve `steps_per_page` batches: what they need together is asked of
the engine at once, before their first step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import NamedTuple

import torch
from torch import Tensor

from w2v import skipgram
from w2v.batch import Batch
from w2v.optim import RowOptimizer
from w2v.skipgram import Kernel, Slots
from w2v.table import Table
from w2v.transfer import Engine


class Planned(NamedTuple):
    """A batch whose rows are known and on their way."""

    batch: Batch
    slots: Slots


class StepResult(NamedTuple):
    """What a step learned from: the summed loss of its positive pairs (float64) and their number, on the compute device."""

    loss: Tensor
    pairs: Tensor


class Pipeline:
    """Trains the rows that a batch touches: pages them in, steps them, writes them back."""

    def __init__(
        self, inputs: Table, outputs: Table, engine: Engine, optimizer: RowOptimizer, kernel: Kernel, device: torch.device,
        steps_per_page: int = 1,
    ):  # fmt: skip
        self.inputs, self.outputs, self.engine, self.optimizer, self._kernel = inputs, outputs, engine, optimizer, kernel
        self._steps_per_page = steps_per_page
        self.rows_used = 0  # by all steps so far, each step's counted
        self._planning = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._computed: deque[torch.cuda.Event] = deque(maxlen=2)  # when the last pages' steps are done
        self._held: deque[list[Planned]] = deque(maxlen=3)  # memory of the planning stream that the computation may still read

    def ahead(self, batches: Iterable[Batch]) -> Iterator[Planned]:
        """The batches, planned a page ahead of the steps that the caller makes of them."""
        batches = iter(batches)
        page = self._plan(batches)
        while page:
            yield from page
            page = self._plan(batches)  # while the device computes the steps of the last one

    def step(self, planned: Planned, lr: float) -> StepResult:
        batch, slots = planned
        inputs = self.engine.fetch(self.inputs, slots.input_rows_U)
        outputs = self.engine.fetch(self.outputs, slots.output_rows_V)
        self.rows_used += len(slots.input_rows_U) + len(slots.output_rows_V)
        loss, pairs = skipgram.backward(inputs, outputs, batch, slots, self._kernel)
        for page in (inputs, outputs):
            self.optimizer.step(page, lr)
            self.engine.write_back(page)
        return StepResult(loss, pairs)

    def _plan(self, batches: Iterator[Batch]) -> list[Planned]:
        """Draw the next page's batches, find their rows and have the engine bring them."""
        if self._planning is None:
            return self._draw(batches)
        current = torch.cuda.current_stream()
        self._computed.append(current.record_event())
        with torch.cuda.stream(self._planning):
            page = self._draw(batches)
        current.wait_stream(self._planning)
        self._held.append(page)
        return page

    def _draw(self, batches: Iterator[Batch]) -> list[Planned]:
        page = [Planned(batch, skipgram.find_slots(batch, self.inputs.rows)) for batch in islice(batches, self._steps_per_page)]
        if page:
            if self._planning:  # the page before the one that computes now: the engine may send its rows away
                self._planning.wait_event(self._computed[0])
            rows = ([slots.input_rows_U for _, slots in page], [slots.output_rows_V for _, slots in page])
            self.engine.prefetch([(table, _union(parts)) for table, parts in zip((self.inputs, self.outputs), rows, strict=True)])
        return page


def _union(rows: list[Tensor]) -> Tensor:
    """Sorted and unique."""
    return rows[0] if len(rows) == 1 else torch.unique(torch.cat(rows))
