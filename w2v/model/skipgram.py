"""The objective on pages: skip-gram with negative sampling, its gradients left on the pages.

Shapes: B centers, C = 2 * window context positions, K negatives, T = 1 + K targets, U and V unique rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from w2v.kernels import reference
from w2v.kernels.batch import Batch, Page


class Pairs(NamedTuple):
    """A batch written out: which context words and noise words each center is paired with (int64 and bool)."""

    centers_B: Tensor
    contexts_BC: Tensor
    context_mask_BC: Tensor  # False where the window is smaller or leaves the sentence
    negatives_BK: Tensor
    negative_mask_BK: Tensor  # False where the noise word is the center itself


class Slots(NamedTuple):
    """A batch's sorted unique rows, and where each of its words lies among them.

    Only words that take part in a pair count: a center without context words touches no row, nor does a masked noise word.
    """

    input_rows_U: Tensor
    context_slots_BC: Tensor
    context_mask_BC: Tensor
    output_rows_V: Tensor
    target_slots_BT: Tensor
    target_mask_BT: Tensor


def expand(batch: Batch) -> Pairs:
    """Write out the windows."""
    words_n, size = batch.words_n, len(batch.windows_B)
    distances = torch.arange(1, batch.window + 1, device=words_n.device)
    offsets_C = torch.cat([-distances.flip(0), distances])
    centers = slice(batch.first, batch.first + size)
    at_BC = torch.arange(centers.start, centers.stop, device=words_n.device)[:, None] + offsets_C
    inside_BC = (at_BC >= 0) & (at_BC < len(words_n))
    at_BC = at_BC.clamp_(0, len(words_n) - 1)
    same_sentence_BC = batch.sentences_n[at_BC] == batch.sentences_n[centers, None]
    context_mask_BC = (offsets_C.abs() <= batch.windows_B[:, None]) & inside_BC & same_sentence_BC
    centers_B, negatives_BK = words_n[centers].long(), batch.negatives_BK.long()
    return Pairs(
        centers_B,
        words_n[at_BC].long(),
        context_mask_BC,
        negatives_BK,
        negatives_BK != centers_B[:, None],
    )


def find_slots(pairs: Pairs, rows: int) -> Slots:
    """Which of so many rows of the input table (context words) and of the output table (centers and noise words) are touched."""
    targets_BT = torch.cat([pairs.centers_B[:, None], pairs.negatives_BK], dim=1)
    has_context_B1 = pairs.context_mask_BC.any(dim=1, keepdim=True)
    target_mask_BT = torch.cat([has_context_B1, pairs.negative_mask_BK & has_context_B1], dim=1)
    input_rows_U, context_slots_BC = reference.unique_rows(
        pairs.contexts_BC, pairs.context_mask_BC, rows
    )
    output_rows_V, target_slots_BT = reference.unique_rows(targets_BT, target_mask_BT, rows)
    return Slots(
        input_rows_U,
        context_slots_BC,
        pairs.context_mask_BC,
        output_rows_V,
        target_slots_BT,
        target_mask_BT,
    )


class LossScale:
    """Dynamic loss scaling for products in float16 (Micikevicius et al. 2018, arXiv 1710.03740), without waiting for the device.

    A step whose gradients overflow halves the scale and must be left out; INTERVAL steps in a row that do not double it. Its two numbers
    are kept among `scalars`, a table's, so that they are saved with it.
    """

    INTERVAL, FIRST = 2000, 2.0**16

    def __init__(self, scalars: dict[str, Tensor], device: torch.device):
        self.scale, self._fitting = (
            torch.tensor(self.FIRST, device=device),
            torch.tensor(0.0, device=device),
        )
        scalars |= {"loss_scale": self.scale, "loss_scale_steps": self._fitting}

    def update(self, over: Tensor) -> Tensor:
        """Make the scale the next step's, by whether this one's gradients overflowed: bool, which is given back."""
        fitting = torch.where(over, 0, self._fitting + 1)
        doubled = fitting == self.INTERVAL
        self.scale.mul_(torch.where(over, 0.5, torch.where(doubled, 2.0, 1.0)))
        self._fitting.copy_(torch.where(doubled, 0, fitting))
        return over


def overflown(grads: Sequence[Tensor]) -> Tensor:
    """1 if any of the gradients is not finite, else 0, on their device."""
    return (~torch.stack([grad.isfinite().all() for grad in grads]).all()).int()


def backward(
    inputs: Page,
    outputs: Page,
    slots: Slots,
    product: torch.dtype | None = None,
    scale: Tensor | None = None,
    counted: bool = False,
) -> tuple[Tensor, Tensor]:
    """Leave the gradients of the batch's summed loss on both pages; give that loss (float64) and its number of positive pairs.

    product, scale: see `reference.skipgram`; counted: whether to leave the number of pairs of each row on the pages, too.
    """
    pairs = (
        slots.context_slots_BC,
        slots.context_mask_BC,
        slots.target_slots_BT,
        slots.target_mask_BT,
    )
    result = reference.skipgram(inputs["weight"], outputs["weight"], *pairs, product, scale)
    inputs.grad_UD, outputs.grad_UD = result.grad_input_UD, result.grad_output_VD
    if counted:
        inputs.pairs_U, outputs.pairs_U = reference.count_pairs(
            *pairs, (len(inputs.rows_U), len(outputs.rows_U))
        )
    return result.loss, result.pairs
