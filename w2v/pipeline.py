"""The stages of a training step, in their order, for both tables."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from w2v import skipgram
from w2v.batch import Batch
from w2v.optim import RowOptimizer
from w2v.table import Table
from w2v.transfer import Engine


class StepResult(NamedTuple):
    """What a step learned from: the summed loss of its positive pairs (float64) and their number, on the compute device."""

    loss: Tensor
    pairs: Tensor


class Pipeline:
    """Trains the rows that a batch touches: pages them in, steps them, writes them back."""

    def __init__(self, inputs: Table, outputs: Table, engine: Engine, optimizer: RowOptimizer):
        self.inputs, self.outputs, self.engine, self.optimizer = inputs, outputs, engine, optimizer

    def step(self, batch: Batch, lr: float) -> StepResult:
        slots = skipgram.find_slots(batch)
        inputs = self.engine.fetch(self.inputs, slots.input_rows_U)
        outputs = self.engine.fetch(self.outputs, slots.output_rows_V)
        loss, pairs = skipgram.backward(inputs, outputs, batch, slots)
        for page in (inputs, outputs):
            self.optimizer.step(page, lr)
            self.engine.write_back(page)
        return StepResult(loss, pairs)
