"""Arithmetic of a training step: one protocol for all devices."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from w2v.rows.ops import View
from w2v.rows.shard import RoutedLookUp
from w2v.word2vec.batch import Batch, Draw, Grads, RowGrads, StepShape, StepState, Subsample, Update


class Kernels(Protocol):
    """Operations of a training step on one device.

    shape: of the whole tables.
    plans_rows: whether `unique_rows` waits for the device, so that it is called when a page is
        planned, on a stream of its own, while the steps before are computed.
    draw: draws windows and negatives (`reference.draw`).
    subsample: draws which words of a text are kept (`reference.subsample`).
    """

    shape: StepShape
    plans_rows: bool
    draw: Draw
    subsample: Subsample

    def list_rows(self, batch: Batch) -> Tensor:
        """Return the batch's unique rows, int64; -1 in the rest of a buffer."""
        return self.marks(batch).nonzero().flatten()

    def marks(self, batch: Batch) -> Tensor:
        """Return whether the batch touches each row, as `mark`: bool [A]."""
        marks_A = torch.zeros(self.shape.rows, dtype=torch.bool, device=self.shape.device)
        self.mark(batch, marks_A)
        return marks_A

    def mark(self, batch: Batch, marks_A: Tensor) -> None:
        """Set the marks, bool [A], of the rows that the batch touches.

        Only rows of a pair count: a center without context words touches no row.
        """

    def with_subwords(self, marks_A: Tensor) -> Tensor:
        """Return marks of rows, with those of the subwords of marked words."""
        return marks_A

    def unique_rows(self, batch: Batch) -> Grads:
        """Return the batch's unique rows, with zero gradients."""

    def gradients(self, batch: Batch, view: View, grads: Grads, lr: float) -> Grads:
        """Return loss and gradients of the batch, added to `grads`.

        `lr` is for kernels that make a step of plain SGD at each center (cpu.py). For rows borrowed
        from other ranks, `grads` and the view have one index.
        """

    def sum_by_row(self, requested: RoutedLookUp, grad_MD: Tensor, pairs_M: Tensor | None) -> Any:
        """Return the summed gradients of requested rows, for `optimizer_step`.

        pairs_M: how many pairs each gradient sums, int32, where they are counted.
        """
        own = requested.own
        if self.plans_rows or own.row_count is None:
            rows_U = own.wait().int()
            # `unique_rows` would wait for a number on the device.
            count = None if self.plans_rows else torch.full((), len(rows_U), device=rows_U.device)
        else:  # the number of rows is known on the device alone
            rows_U, count = own.narrow_N, own.row_count[0]
        grad_UD = requested.sum_by_row(grad_MD, len(rows_U))
        if pairs_M is not None:
            pairs_M = requested.sum_by_row(pairs_M, len(rows_U))
        return RowGrads(None, rows_U, grad_UD, pairs_M, count)

    def optimizer_step(self, update: Update, view: View, grads: Grads, state: StepState) -> None:
        """Update rows in place; or note in `state` what is not finite."""
