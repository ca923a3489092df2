"""Launchers of the kernels for rows that belong to several ranks: shard.cu says what an id is.

Shapes: U rows of both tables that a batch touches, and heads; M ids that other ranks and this one ask of this one; D dimensions, N ranks.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from w2v.kernels.batch import Held
from w2v.kernels.cuda import ELEMENTS, Claims, Sums, enough_blocks, launch

REPORT = 6  # numbers of 4 bytes: loss, pairs and fault


class Gradients(NamedTuple):
    """What `cuda.skipgram` needs of claims; both tables may share all but the numbers."""

    number_V: Tensor
    grad_UD: Tensor
    pairs_U: Tensor | None


def heads(dim: int) -> int:
    """How many ids that are no row's stand before those that a rank is asked for: a report has room in as many rows."""
    return -(-REPORT // dim)


def deal(
    claims: tuple[Claims, Claims],
    claimed: tuple[Tensor, Tensor],
    stride: int,
    heads: int,
    tally: tuple[Tensor, Tensor],
    before: tuple[Tensor, Tensor],
) -> tuple[Tensor, Tensor]:
    """End the claims and list their rows owner by owner, after so many heads each: as rows, int64, those of the output table after all of
    the input table and -1 for a head; and as ids, int32. The lists have room for all rows that the claims have room for.

    claimed: as `cuda.claim` leaves them; tally: int32 [N], zeros before, which become how many ids are asked of each rank, and some other
    numbers; before: the ids of the batch a page before, whose heads are told these numbers, and how many of them are asked of each rank.
    """
    (inputs, outputs), (asked_N, dealt_N) = claims, tally
    rows_all, size, device = inputs.number_V.shape[0], asked_N.shape[0], asked_N.device
    room = inputs.rows_U.shape[0] + outputs.rows_U.shape[0] + size * heads
    assert 2 * stride < 2**31 and outputs.number_V.shape[0] == rows_all
    rows_U, ids_U = (
        torch.empty(room, dtype=kind, device=device) for kind in (torch.int64, torch.int32)
    )
    listed, made_for, (ids_before, asked_before) = (
        (inputs.rows_U, claimed[0], outputs.rows_U, claimed[1]),
        _made_for(size, heads),
        before,
    )
    launch("shard.cu", "count_owners", made_for, enough_blocks(room), *listed, asked_N)
    launch(
        "shard.cu",
        "deal",
        made_for,
        enough_blocks(room),
        *listed,
        inputs.number_V,
        outputs.number_V,
        rows_all,
        stride,
        asked_N,
        dealt_N,
        rows_U,
        ids_U,
        asked_before,
        ids_before,
    )
    return rows_U, ids_U


def hear(
    ids_M: Tensor, lent_N: Tensor, next_asked_N: Tensor, next_lent_N: Tensor, told_2N: Tensor
) -> None:
    """Learn from the heads of ids, of which so many came from each rank, how many each will ask for of the batch a page later.

    told: in pinned memory, becomes how many are asked of each rank then, and those that it asks for. All int32.
    """
    launch(
        "shard.cu",
        "hear",
        _made_for(lent_N.shape[0]),
        1,
        ids_M,
        lent_N,
        next_asked_N,
        next_lent_N,
        told_2N,
    )


def mark_lent(ids_M: Tensor, stride: int, marks_TV: Tensor) -> None:
    """Set the marks, bool [2, V of the shard], of the rows that are asked for."""
    launch(
        "shard.cu",
        "mark_lent",
        _made_for(),
        enough_blocks(ids_M.shape[0]),
        *_lent(ids_M, stride),
        *marks_TV.unbind(),
    )


def lend(
    ids_M: Tensor,
    stride: int,
    held: tuple[Held, Held],
    dim: int,
    claims: tuple[Claims, Claims],
    claimed: tuple[Tensor, Tensor],
) -> Tensor:
    """The weights that are asked for, as the tables hold them: [M, D], anything for heads. Claims the rows of the shard, and adds their
    numbers to those `claimed`, int64."""
    (inputs, slot_in), (outputs, slot_out) = held
    weights_MD = torch.empty(ids_M.shape[0], dim, dtype=inputs.dtype, device=ids_M.device)
    launch(
        "shard.cu",
        "lend",
        _made_for(dim=dim, dtype=inputs.dtype),
        enough_blocks(32 * ids_M.shape[0]),
        *_lent(ids_M, stride),
        inputs,
        slot_in,
        claims[0].number_V,
        claims[0].rows_U,
        claimed[0],
        outputs,
        slot_out,
        claims[1].number_V,
        claims[1].rows_U,
        claimed[1],
        inputs.shape[1],
        dim,
        weights_MD,
    )
    return weights_MD


def place(
    rows_U: Tensor, place_TV: Tensor, dim: int, counted: bool
) -> tuple[Tensor, Tensor | None]:
    """place[rows[u]] = u, counted through both tables, int32 [2, V]; and zeros for gradients, [U, D], and their pairs where counted."""
    grad_UD = torch.empty(rows_U.shape[0], dim, device=rows_U.device)
    pairs_U = (
        torch.empty(rows_U.shape[0], dtype=torch.int32, device=rows_U.device) if counted else None
    )
    made_for, blocks = _made_for(dim=dim), enough_blocks(32 * rows_U.shape[0])
    launch(
        "shard.cu",
        "place",
        made_for,
        blocks,
        rows_U,
        rows_U.shape[0],
        place_TV,
        grad_UD,
        pairs_U,
        dim,
    )
    return grad_UD, pairs_U


def report(sums: Sums, fault: Tensor, asked_N: Tensor, grad_UD: Tensor) -> None:
    """Write loss, pairs and fault, int64, to the heads of each rank's gradients, of which so many are asked, int32."""
    launch(
        "shard.cu",
        "report",
        _made_for(asked_N.shape[0]),
        1,
        sums.loss,
        sums.pairs,
        fault,
        asked_N,
        grad_UD.shape[1],
        grad_UD,
    )


def collect(
    ids_M: Tensor,
    stride: int,
    lent_N: Tensor,
    grad_MD: Tensor,
    pairs_M: Tensor | None,
    claims: tuple[Claims, Claims],
    sums: Sums,
    fault: Tensor,
) -> None:
    """Add the gradients of rows that were asked for, and the pairs that they sum where these are counted, to the claims; and make loss,
    pairs and fault those of all ranks, by their reports."""
    into = [tensor for claim in claims for tensor in (claim.number_V, claim.grad_UD, claim.pairs_U)]
    launch(
        "shard.cu",
        "collect",
        _made_for(lent_N.shape[0], dim=grad_MD.shape[1]),
        enough_blocks(32 * ids_M.shape[0]),
        *_lent(ids_M, stride),
        lent_N,
        grad_MD,
        pairs_M,
        *into,
        grad_MD.shape[1],
        sums.loss,
        sums.pairs,
        fault,
    )


def _lent(ids_M: Tensor, stride: int) -> tuple[Tensor, int, int]:
    return ids_M, ids_M.shape[0], stride


def _made_for(
    size: int = 1, heads: int = 1, dim: int = 4, dtype: torch.dtype = torch.float32
) -> dict[str, int | str]:
    return {"RANKS": size, "HEADS": heads, "ELEMENT": ELEMENTS[dtype], "WIDE": 1 if dim % 4 else 4}
