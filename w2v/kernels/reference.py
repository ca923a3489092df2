"""The arithmetic of a step in plain torch, on any device: the specification that every faster kernel is tested against.

Shapes: B centers, C context positions, T = 1 + K targets (the center, then its negatives), U and V unique rows of the input
and of the output table, D dimensions. A slot is a row's place in a page.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from w2v.kernels.random import shift_right, splitmix64


class SkipgramResult(NamedTuple):
    """The summed loss (float64), how many positive pairs it counts, and the gradients of that sum."""

    loss: Tensor
    pairs: Tensor
    grad_input_UD: Tensor
    grad_output_VD: Tensor


def draw(
    key: int,
    centers: int,
    lowest: int,
    widest: int,
    noise: int,
    pool: int,
    pool_key: int,
    cdf_V: Tensor,
) -> tuple[Tensor, Tensor]:
    """How far each center's window reaches, int32 [B], and its noise words, int32 [B, K], the same on every device for the same key.

    Noise words are drawn by inversion of their cumulative distribution; if `pool` is not 0, that many are, `spread` over it, and those of
    the centers picked from them. key, pool_key: 64 bits, unsigned; batches with the same pool and pool_key pick from the same words.
    """

    def bits(
        key: int, begin: int, end: int
    ) -> Tensor:  # 53 of them, for the numbers of draws in this range
        return shift_right(splitmix64(torch.arange(begin, end, device=cdf_V.device), key), 11)

    windows_B, own = (
        lowest + bits(key, 0, centers) % (widest - lowest + 1),
        bits(key, centers, centers * (1 + noise)),
    )
    uniform = (
        spread(bits(pool_key, 0, pool).double() / 2**53)[own % pool]
        if pool
        else own.double() / 2**53
    )
    drawn = torch.searchsorted(cdf_V, uniform, right=True, out_int32=True).clamp_(
        max=len(cdf_V) - 1
    )
    return windows_B.int(), drawn.view(centers, noise)


def spread(uniform_S: Tensor) -> Tensor:
    """S numbers from [0, 1), each moved to an S-th part of its own: a stratified sample, which has each word as often as it should."""
    return (torch.arange(len(uniform_S), device=uniform_S.device) + uniform_S) / len(uniform_S)


def unique_rows(ids: Tensor, mask: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """The sorted unique ids where `mask` holds, all below `rows`, and each id's slot among them (0 where the mask does not hold)."""
    ids = torch.where(mask, ids, rows)
    if (
        rows > 16 * ids.numel()
    ):  # a table so large that marking its rows costs more than sorting the ids
        rows_U, slots = torch.unique(ids, sorted=True, return_inverse=True)
        rows_U = rows_U[: len(rows_U) - int(rows_U[-1] == rows)] if len(rows_U) else rows_U
    else:
        marked = torch.zeros(rows + 1, dtype=torch.bool, device=ids.device)
        marked.index_fill_(0, ids.flatten(), True)
        rows_U = torch.nonzero(marked[:rows]).flatten()
        slots = (torch.cumsum(marked, 0) - 1)[ids]
    return rows_U, torch.where(mask, slots, 0)


def skipgram(
    input_UD: Tensor,
    output_VD: Tensor,
    context_slots_BC: Tensor,
    context_mask_BC: Tensor,
    target_slots_BT: Tensor,
    target_mask_BT: Tensor,
    product: torch.dtype | None = None,
    scale: Tensor | None = None,
) -> SkipgramResult:
    """Skip-gram with negative sampling (Mikolov et al. 2013, arXiv 1310.4546), loss and both gradients in closed form.

    For a context's vector x, its center's vector y_0 and noise vectors y_k the loss is -log s(x.y_0) - sum_k log s(-x.y_k), with
    s the logistic function; its gradient along a logit is s(logit) - label. A window's contexts share the center's noise words, so
    the logits of a center are one small matrix product (Ji et al. 2016, arXiv 1604.04661).

    product: what the matrix products take and give, such as torch.bfloat16; sums of more than a window stay in the vectors' type.
    scale: by how much the loss is scaled for the products that give gradients, whose small numbers float16 would lose.
    """
    (B, C), T = context_slots_BC.shape, target_slots_BT.shape[1]
    if not len(input_UD):  # no center has a context word
        return SkipgramResult(
            input_UD.new_zeros((), dtype=torch.float64), context_mask_BC.sum(), input_UD, output_VD
        )
    product = product or input_UD.dtype
    context_BCD = input_UD.to(product).index_select(0, context_slots_BC.flatten()).view(B, C, -1)
    target_BTD = output_VD.to(product).index_select(0, target_slots_BT.flatten()).view(B, T, -1)
    counted_BCT = context_mask_BC[:, :, None] & target_mask_BT[:, None, :]
    logits_BCT = torch.bmm(context_BCD, target_BTD.transpose(1, 2)).to(input_UD.dtype)

    signed_BCT = torch.cat(
        [-logits_BCT[:, :, :1], logits_BCT[:, :, 1:]], dim=2
    )  # the loss is softplus of these
    loss = torch.where(counted_BCT, F.softplus(signed_BCT), 0).sum(dtype=torch.float64)
    error_BCT = logits_BCT.sigmoid()
    error_BCT[:, :, 0] -= 1
    error_BCT = torch.where(counted_BCT, error_BCT, 0)
    error_BCT = (error_BCT if scale is None else error_BCT * scale).to(product)

    grad_context_BCD = torch.bmm(error_BCT, target_BTD).to(input_UD.dtype)
    grad_target_BTD = torch.bmm(error_BCT.transpose(1, 2), context_BCD).to(input_UD.dtype)
    if scale is not None:
        grad_context_BCD, grad_target_BTD = grad_context_BCD / scale, grad_target_BTD / scale
    return SkipgramResult(
        loss,
        context_mask_BC.sum(),
        sum_rows(grad_context_BCD, context_slots_BC, len(input_UD)),
        sum_rows(grad_target_BTD, target_slots_BT, len(output_VD)),
    )


def sum_rows(values_BND: Tensor, slots_BN: Tensor, slots: int) -> Tensor:
    """The sum of the values of each slot: [slots, D]. The order of summation is fixed on the CPU, and in torch's deterministic mode."""
    values_ND = values_BND.flatten(0, 1)
    return values_ND.new_zeros(slots, values_ND.shape[1]).index_add_(
        0, slots_BN.flatten(), values_ND
    )


def count_pairs(
    context_slots_BC: Tensor,
    context_mask_BC: Tensor,
    target_slots_BT: Tensor,
    target_mask_BT: Tensor,
    rows: tuple[int, int],
) -> tuple[Tensor, Tensor]:
    """In how many pairs of a context and a target each row takes part: int64 [U] and [V], for so many rows of both tables."""

    def count(slots_BN: Tensor, counts_BN: Tensor, slots: int) -> Tensor:
        return counts_BN.new_zeros(max(1, slots)).index_add_(
            0, slots_BN.flatten(), counts_BN.flatten()
        )[:slots]

    contexts_B, targets_B = (
        context_mask_BC.sum(1, keepdim=True),
        target_mask_BT.sum(1, keepdim=True),
    )
    return count(context_slots_BC, context_mask_BC * targets_B, rows[0]), count(
        target_slots_BT, target_mask_BT * contexts_B, rows[1]
    )
