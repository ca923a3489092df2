"""The objective on pages: skip-gram with negative sampling, its gradients left on the pages."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from w2v.batch import Batch, Page
from w2v.kernels import reference

Kernel = Callable[..., reference.SkipgramResult]  # reference.skipgram, or one that is tested equal to it


class Slots(NamedTuple):
    """A batch's sorted unique rows, and where each of its words lies among them.

    Only words that take part in a pair count: a center without context words touches no row, nor does a masked noise word.
    """

    input_rows_U: Tensor
    context_slots_BC: Tensor
    output_rows_V: Tensor
    target_slots_BT: Tensor
    target_mask_BT: Tensor


def find_slots(batch: Batch, rows: int) -> Slots:
    """Which of so many rows of the input table (context words) and of the output table (centers and noise words) the batch touches."""
    targets_BT = torch.cat([batch.centers_B[:, None], batch.negatives_BK], dim=1)
    has_context_B1 = batch.context_mask_BC.any(dim=1, keepdim=True)
    target_mask_BT = torch.cat([has_context_B1, batch.negative_mask_BK & has_context_B1], dim=1)
    input_rows_U, context_slots_BC = reference.unique_rows(batch.contexts_BC, batch.context_mask_BC, rows)
    output_rows_V, target_slots_BT = reference.unique_rows(targets_BT, target_mask_BT, rows)
    return Slots(input_rows_U, context_slots_BC, output_rows_V, target_slots_BT, target_mask_BT)


def backward(inputs: Page, outputs: Page, batch: Batch, slots: Slots, kernel: Kernel = reference.skipgram) -> tuple[Tensor, Tensor]:
    """Leave the gradients of the batch's summed loss on both pages; give that loss (float64) and its number of positive pairs."""
    result = kernel(
        inputs["weight"], outputs["weight"], slots.context_slots_BC, batch.context_mask_BC, slots.target_slots_BT, slots.target_mask_BT
    )
    inputs.grad_UD, outputs.grad_UD = result.grad_input_UD, result.grad_output_VD
    return result.loss, result.pairs
