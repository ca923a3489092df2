"""Launchers of the kernels for rows that belong to several ranks: shard.cu says what an id is.

Shapes: U rows of both tables that a batch touches, M that other ranks and this one ask of this one, D dimensions, N ranks.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from w2v.batch import Held
from w2v.kernels.cuda import ELEMENTS, Claims, enough_blocks, launch


class Gradients(NamedTuple):
    """What `cuda.skipgram` needs of claims; both tables may share all but the numbers."""

    number_V: Tensor
    grad_UD: Tensor
    pairs_U: Tensor | None


def deal(claims: tuple[Claims, Claims], claimed: tuple[Tensor, Tensor], stride: int, tally_2N: Tensor) -> tuple[Tensor, Tensor]:
    """End the claims and list their rows owner by owner: as rows, int64, those of the output table after all of the input table; and
    as ids, int32. How many are asked of each rank is in either row of the tally, int32, zeros before.

    claimed: as `cuda.claim` leaves them. The lists have room for all rows that the claims have room for.
    """
    inputs, outputs = claims
    room, rows_all, (_, size) = inputs.rows_U.shape[0] + outputs.rows_U.shape[0], inputs.number_V.shape[0], tally_2N.shape
    assert 2 * stride < 2**31 and outputs.number_V.shape[0] == rows_all
    rows_U, ids_U = (torch.empty(room, dtype=kind, device=tally_2N.device) for kind in (torch.int64, torch.int32))
    listed, made_for = (inputs.rows_U, claimed[0], outputs.rows_U, claimed[1]), _made_for(size)
    launch("shard.cu", "count_owners", made_for, enough_blocks(room), *listed, tally_2N[0])
    launch(
        "shard.cu", "deal", made_for, enough_blocks(room), *listed, inputs.number_V, outputs.number_V,
        rows_all, stride, tally_2N[0], tally_2N[1], rows_U, ids_U,
    )  # fmt: skip
    return rows_U, ids_U


def place(rows_U: Tensor, place_TV: Tensor) -> None:
    """place[rows[u]] = u, counted through both tables; int32 [2, V]."""
    launch("shard.cu", "place", _made_for(), enough_blocks(rows_U.shape[0]), rows_U, rows_U.shape[0], place_TV)


def mark_lent(ids_M: Tensor, stride: int, marks_TV: Tensor) -> None:
    """Set the marks, bool [2, V of the shard], of the rows that are asked for."""
    launch("shard.cu", "mark_lent", _made_for(), enough_blocks(ids_M.shape[0]), *_lent(ids_M, stride), *marks_TV)


def claim_lent(ids_M: Tensor, stride: int, claims: tuple[Claims, Claims], claimed: tuple[Tensor, Tensor]) -> None:
    """Claim the rows of the shard that are asked for, and add their numbers to those `claimed`, int64."""
    into = [tensor for claim, count in zip(claims, claimed, strict=True) for tensor in (claim.number_V, claim.rows_U, count)]
    launch("shard.cu", "claim_lent", _made_for(), enough_blocks(ids_M.shape[0]), *_lent(ids_M, stride), *into)


def lend(ids_M: Tensor, stride: int, held: tuple[Held, Held], dim: int) -> Tensor:
    """The weights that are asked for, as the tables hold them: [M, D]."""
    (inputs, slot_in), (outputs, slot_out) = held
    weights_MD = torch.empty(ids_M.shape[0], dim, dtype=inputs.dtype, device=ids_M.device)
    launch(
        "shard.cu", "lend", _made_for(dim=dim, dtype=inputs.dtype), enough_blocks(32 * ids_M.shape[0]), *_lent(ids_M, stride),
        inputs, slot_in, outputs, slot_out, inputs.shape[1], dim, weights_MD,
    )  # fmt: skip
    return weights_MD


def collect(ids_M: Tensor, stride: int, grad_MD: Tensor, pairs_M: Tensor | None, claims: tuple[Claims, Claims]) -> None:
    """Add the gradients of rows that were asked for, and the pairs that they sum where these are counted, to the claims."""
    into = [tensor for claim in claims for tensor in (claim.number_V, claim.grad_UD, claim.pairs_U)]
    launch(
        "shard.cu", "collect", _made_for(dim=grad_MD.shape[1]), enough_blocks(32 * ids_M.shape[0]), *_lent(ids_M, stride),
        grad_MD, pairs_M, *into, grad_MD.shape[1],
    )  # fmt: skip


def report(loss: Tensor, pairs: Tensor, fault: Tensor, bits: int) -> Tensor:
    """Loss, pairs, and each of so many bits of the fault, for the sum over all ranks: float64 [2 + bits]."""
    reported = torch.empty(2 + bits, dtype=torch.float64, device=loss.device)
    launch("shard.cu", "report", _made_for(), 1, loss, pairs, fault, bits, reported)
    return reported


def heed(reported: Tensor, step_before: int, fault: Tensor) -> None:
    """Make the bits of any rank's fault, found in the step before, this rank's fault, if it has none: `step_before` with these bits."""
    launch("shard.cu", "heed", _made_for(), 1, reported, reported.shape[0] - 2, step_before, fault)


def _lent(ids_M: Tensor, stride: int) -> tuple[Tensor, int, int]:
    return ids_M, ids_M.shape[0], stride


def _made_for(size: int = 1, dim: int = 4, dtype: torch.dtype = torch.float32) -> dict[str, int | str]:
    return {"RANKS": size, "ELEMENT": ELEMENTS[dtype], "WIDE": 1 if dim % 4 else 4}
