"""A training step on the CPU, by kernels compiled for it, on the tables in place and with all of torch's threads.

Needs numba; without it `Pipeline` trains in plain torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch

from w2v.kernels import cpu
from w2v.kernels.batch import Batch
from w2v.training.step import FAULTS, Pipeline, Planned, StepResult


class CompiledPipeline(Pipeline):
    """The steps of `Pipeline`, the same for the same number of threads, with gradients summed in the order of the centers.

    But an optimizer that is gradient descent and no more steps once for each center, as in word2vec.c and gensim; with more than one
    thread, what comes of that depends on their timing. torch's deterministic mode gives it one. And its rows have been written when its
    loss shows that they are no longer finite.
    """

    def __init__(self, *args: Any):
        super().__init__(*args)
        in_order = self.optimizer.descends and torch.are_deterministic_algorithms_enabled()
        self._threads = cpu.Threads(1 if in_order else torch.get_num_threads())
        self._claims: tuple[cpu.Claims, ...] = ()

    def step(self, planned: Planned, lr: float) -> StepResult:
        batch, tables = planned.batch, (self.inputs, self.outputs)
        held = [self.engine.hold(table) for table in tables]
        self.steps += 1
        if self.optimizer.descends:
            loss, pairs = cpu.descend(self._threads, batch, held[0], held[1], self.inputs.dim, lr)
            self._note(bool(loss.isfinite()), 0)
            return StepResult(loss, pairs)
        self._claims = self._enough(batch)
        loss, pairs = cpu.skipgram(
            self._threads, batch, held[0], self._claims[0], held[1], self._claims[1]
        )
        self._note(bool(loss.isfinite()), 0)
        for number, (table, records, claims) in enumerate(
            zip(tables, held, self._claims, strict=True)
        ):
            if self.fault:
                claims.take()
            elif self.optimizer.fused:
                step = self.optimizer.next_step(table, lr)
                sound = cpu.step_rows(
                    self._threads,
                    self.optimizer.formula,
                    records,
                    claims,
                    *step,
                    self.optimizer.occurrence_cap,
                )
                self._note(sound, number - 2)
            else:
                rows_U, grad_UD, pairs_U = claims.take()
                page = self.engine.fetch(table, rows_U)
                page.grad_UD, page.pairs_U = grad_UD, pairs_U
                self.optimizer.step(page, lr)
                self._note(bool(page.records_UR.isfinite().all()), number - 2)
                if not self.fault:
                    self.engine.write_back(page)
        return StepResult(loss, pairs)

    def finish(self) -> None:
        self._claims = ()
        super().finish()

    def _note(self, sound: bool, which: int) -> None:
        """Keep the first fault, of `FAULTS[which]`."""
        if not sound and not self.fault:
            self.fault += (self.steps << len(FAULTS)) + (1 << which % len(FAULTS))

    def _draw(self, batches: Iterator[Batch]) -> list[Planned]:
        return [Planned(batch, None) for batch in islice(batches, self._steps_per_page)]

    def _enough(self, batch: Batch) -> tuple[cpu.Claims, ...]:
        """Claims with room for the rows of this batch: those of the batch before, if they have it."""
        centers, noise = batch.negatives_BK.shape
        share = -(-centers // self._threads.count)
        most = share + 2 * batch.window, share * (1 + noise)
        tables = self.inputs, self.outputs
        if self._claims and all(
            claims.hold(rows) for claims, rows in zip(self._claims, most, strict=True)
        ):
            return self._claims
        return tuple(
            cpu.Claims(table.rows, rows, table.dim, self._threads.count)
            for table, rows in zip(tables, most, strict=True)
        )
