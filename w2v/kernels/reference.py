"""The arithmetic of a step in plain torch: the specification of kernels.

Shapes: B centers, C = 2 * window context positions, K negatives, T = 1 + K targets (the center,
then its negatives), V rows of a table, U unique rows, D dimensions, M requested rows, N ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import reduce
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from w2v.kernels.batch import (
    Batch,
    Draw,
    Grads,
    Inversion,
    OptimizerLike,
    Page,
    StepShape,
    StepState,
    TableGrads,
    TableLike,
    View,
)
from w2v.kernels.random import shift_right, splitmix64

HEADER_WORDS = 6  # int32 words of a header: loss, pairs and fault, 8 bytes each


class Pairs(NamedTuple):
    """A batch written out: context words and targets of each center."""

    contexts_BC: Tensor
    context_mask_BC: Tensor  # False where the window is smaller or leaves the sentence
    targets_BT: Tensor
    target_mask_BT: Tensor  # False for a negative that is the center, or without context words


class SkipgramResult(NamedTuple):
    """Summed loss (float64), its positive pairs, and its gradients."""

    loss: Tensor
    pairs: Tensor
    grad_input_UD: Tensor
    grad_output_UD: Tensor


def draw(
    key: int,
    centers: int,
    lowest: int,
    widest: int,
    negatives: int,
    pool: int,
    pool_key: int,
    cdf_V: Tensor,
) -> tuple[Tensor, Tensor]:
    """Draw windows and negatives, the same on every device for a key.

    Negatives are drawn by inverting their cumulative distribution. With a pool, that many are
    drawn, stratified, and those of the centers are picked from them.

    Args:
        key: 64 random bits, unsigned, of the batch.
        centers: Number of centers, B.
        lowest: Smallest window.
        widest: Largest window.
        negatives: Negatives of each center, K.
        pool: Size of the pool; 0 for none.
        pool_key: 64 random bits of the pool: batches with the same ones share a pool.
        cdf_V: Cumulative distribution of the negatives, float64.

    Returns:
        Window sizes, int32 [B], and negatives, int32 [B, K].
    """

    def bits(key: int, begin: int, end: int) -> Tensor:  # 53 of them for each number
        return shift_right(splitmix64(torch.arange(begin, end, device=cdf_V.device), key), 11)

    windows_B = lowest + bits(key, 0, centers) % (widest - lowest + 1)
    own = bits(key, centers, centers * (1 + negatives))
    if pool:
        uniform = stratify(bits(pool_key, 0, pool).double() / 2**53)[own % pool]
    else:
        uniform = own.double() / 2**53
    drawn = torch.searchsorted(cdf_V, uniform, right=True, out_int32=True)
    return windows_B.int(), drawn.clamp_(max=len(cdf_V) - 1).view(centers, negatives)


def stratify(uniform_S: Tensor) -> Tensor:
    """Move each of S uniform numbers to an S-th part of [0, 1) of its own."""
    return (torch.arange(len(uniform_S), device=uniform_S.device) + uniform_S) / len(uniform_S)


def expand(batch: Batch) -> Pairs:
    """Write out the windows of a batch."""
    words_n, size = batch.words_n, len(batch.windows_B)
    distances = torch.arange(1, batch.window + 1, device=words_n.device)
    offsets_C = torch.cat([-distances.flip(0), distances])
    centers = slice(batch.first, batch.first + size)
    at_BC = torch.arange(centers.start, centers.stop, device=words_n.device)[:, None] + offsets_C
    inside_BC = (at_BC >= 0) & (at_BC < len(words_n))
    at_BC = at_BC.clamp_(0, max(0, len(words_n) - 1))
    same_sentence_BC = batch.sentences_n[at_BC] == batch.sentences_n[centers, None]
    in_window_BC = offsets_C.abs() <= batch.windows_B[:, None]
    context_mask_BC = in_window_BC & inside_BC & same_sentence_BC

    centers_B1 = words_n[centers].long()[:, None]
    negatives_BK = batch.negatives_BK.long()
    has_context_B1 = context_mask_BC.any(dim=1, keepdim=True)
    # A negative that is the center itself does not count, nor does a center without context.
    counts_BT = torch.cat([torch.ones_like(has_context_B1), negatives_BK != centers_B1], dim=1)
    targets_BT = torch.cat([centers_B1, negatives_BK], dim=1)
    return Pairs(words_n[at_BC].long(), context_mask_BC, targets_BT, counts_BT & has_context_B1)


def unique_rows(ids: Tensor, mask: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Return the sorted unique ids under the mask, and each id's place.

    Places are 0 where the mask does not hold. All ids are below `rows`.
    """
    marked = torch.zeros(rows + 1, dtype=torch.bool, device=ids.device)
    # Masked ids mark the row behind the last, which is cut off: the number of ids is not needed.
    marked.index_fill_(0, torch.where(mask, ids, rows).flatten(), True)
    rows_U = torch.nonzero(marked[:rows]).flatten()
    places = (torch.cumsum(marked, 0) - 1)[ids]
    return rows_U, torch.where(mask, places, 0)


def skipgram(
    input_UD: Tensor,
    output_UD: Tensor,
    contexts_BC: Tensor,
    context_mask_BC: Tensor,
    targets_BT: Tensor,
    target_mask_BT: Tensor,
    product: torch.dtype | None = None,
    scale: Tensor | None = None,
) -> SkipgramResult:
    """Return loss and gradients of skip-gram with negative sampling.

    For a context's vector x, its center's vector y_0 and negatives y_k the loss is
    -log s(x.y_0) - sum_k log s(-x.y_k), with s the logistic function; its gradient along a logit
    is s(logit) - label (Mikolov et al. 2013, arXiv 1310.4546). The contexts of a window share the
    center's negatives, so the logits of a center are one small matrix product (Ji et al. 2016,
    arXiv 1604.04661).

    Args:
        input_UD: Vectors of context words.
        output_UD: Vectors of targets.
        contexts_BC: Place of each context word in `input_UD`.
        context_mask_BC: Which of them count.
        targets_BT: Place of each target in `output_UD`.
        target_mask_BT: Which of them count.
        product: Type that matrix products take and give, such as torch.bfloat16. Sums over more
            than a window stay in the vectors' type.
        scale: Factor of the loss in the products that give gradients, whose small numbers
            float16 would lose.
    """
    (B, C), T = context_mask_BC.shape, target_mask_BT.shape[1]
    D = input_UD.shape[1]  # view() cannot find it where a rank's batch is empty
    pairs = context_mask_BC.sum()
    if not len(input_UD):  # no center has a context word
        zero = input_UD.new_zeros((), dtype=torch.float64)
        return SkipgramResult(zero, pairs, input_UD, output_UD)
    product = product or input_UD.dtype
    context_BCD = input_UD.to(product).index_select(0, contexts_BC.flatten()).view(B, C, D)
    target_BTD = output_UD.to(product).index_select(0, targets_BT.flatten()).view(B, T, D)
    counted_BCT = context_mask_BC[:, :, None] & target_mask_BT[:, None, :]
    logits_BCT = torch.bmm(context_BCD, target_BTD.transpose(1, 2)).to(input_UD.dtype)

    # The loss is softplus of the logits, negated for the positive pair.
    signed_BCT = torch.cat([-logits_BCT[:, :, :1], logits_BCT[:, :, 1:]], dim=2)
    loss = torch.where(counted_BCT, F.softplus(signed_BCT), 0).sum(dtype=torch.float64)
    error_BCT = logits_BCT.sigmoid()
    error_BCT[:, :, 0] -= 1
    error_BCT = torch.where(counted_BCT, error_BCT, 0)
    error_BCT = (error_BCT if scale is None else error_BCT * scale).to(product)

    grad_context_BCD = torch.bmm(error_BCT, target_BTD).to(input_UD.dtype)
    grad_target_BTD = torch.bmm(error_BCT.transpose(1, 2), context_BCD).to(input_UD.dtype)
    if scale is not None:
        grad_context_BCD = grad_context_BCD / scale
        grad_target_BTD = grad_target_BTD / scale
    grad_input_UD = sum_rows(grad_context_BCD, contexts_BC, len(input_UD))
    grad_output_UD = sum_rows(grad_target_BTD, targets_BT, len(output_UD))
    return SkipgramResult(loss, pairs, grad_input_UD, grad_output_UD)


def sum_rows(values_BND: Tensor, places_BN: Tensor, rows: int) -> Tensor:
    """Sum the values of each place: [rows, D]."""
    values_ND = values_BND.flatten(0, 1)
    sums_UD = values_ND.new_zeros(rows, values_ND.shape[1])
    return sums_UD.index_add_(0, places_BN.flatten(), values_ND)


def count_pairs(
    contexts_BC: Tensor,
    context_mask_BC: Tensor,
    targets_BT: Tensor,
    target_mask_BT: Tensor,
    rows: tuple[int, int],
) -> tuple[Tensor, Tensor]:
    """Return the number of pairs of each row of both tables: int64."""

    def count(places_BN: Tensor, counts_BN: Tensor, rows: int) -> Tensor:
        zeros_U = counts_BN.new_zeros(max(1, rows))
        return zeros_U.index_add_(0, places_BN.flatten(), counts_BN.flatten())[:rows]

    contexts_B1 = context_mask_BC.sum(1, keepdim=True)
    targets_B1 = target_mask_BT.sum(1, keepdim=True)
    return (
        count(contexts_BC, context_mask_BC * targets_B1, rows[0]),
        count(targets_BT, target_mask_BT * contexts_B1, rows[1]),
    )


class LossScale:
    """Dynamic loss scaling for float16, without waiting for the device.

    A step whose gradients overflow halves the scale and is skipped; INTERVAL steps without
    overflow double it (Micikevicius et al. 2018, arXiv 1710.03740). Its two numbers are kept among
    a table's `scalars`, so that checkpoints have them.
    """

    INTERVAL = 2000
    FIRST = 2.0**16

    def __init__(self, scalars: dict[str, Tensor], device: torch.device):
        self.scale = torch.tensor(self.FIRST, device=device)
        self._steps = torch.tensor(0.0, device=device)
        scalars |= {"loss_scale": self.scale, "loss_scale_steps": self._steps}

    def update(self, overflowed: Tensor) -> None:
        """Set the next scale by whether gradients overflowed (bool)."""
        steps = torch.where(overflowed, 0, self._steps + 1)
        is_doubled = steps == self.INTERVAL
        self.scale.mul_(torch.where(overflowed, 0.5, torch.where(is_doubled, 2.0, 1.0)))
        self._steps.copy_(torch.where(is_doubled, 0, steps))


class ReferenceKernels:
    """The kernels of `w2v.kernels.ShardKernels` in plain torch.

    Args:
        shape: Shape of the tables.
        product: Type of matrix products, as in `skipgram`; by default that of the vectors.
        loss_scale: Loss scaling for float16 products.
        all_reduce: Sums a small tensor over all ranks, for the loss scale.
    """

    rows_ahead = True
    draw: Draw | None = None
    inversion: Inversion | None = None

    def __init__(
        self,
        shape: StepShape,
        product: torch.dtype | None = None,
        loss_scale: LossScale | None = None,
        all_reduce=lambda numbers: numbers,
    ):
        self.shape = shape
        self._product = product
        self._loss_scale = loss_scale
        self._all_reduce = all_reduce
        wide = shape.dtype == torch.float64
        self._grad_dtype = torch.float64 if wide else torch.float32

    def mark(self, batch: Batch, marks_TV: Tensor) -> None:
        pairs = expand(batch)
        marks_TV[0].index_fill_(0, pairs.contexts_BC[pairs.context_mask_BC], True)
        marks_TV[1].index_fill_(0, pairs.targets_BT[pairs.target_mask_BT], True)

    def unique_rows(self, batch: Batch) -> Grads:
        pairs = expand(batch)
        inputs_U, _ = unique_rows(pairs.contexts_BC, pairs.context_mask_BC, self.shape.rows)
        outputs_U, _ = unique_rows(pairs.targets_BT, pairs.target_mask_BT, self.shape.rows)
        return self._zero_grads(inputs_U, outputs_U, self.shape.rows)

    def skipgram(self, batch: Batch, page: Page, rows: Grads, lr: float) -> Grads:
        pairs = expand(batch)
        masks = pairs.context_mask_BC, pairs.target_mask_BT
        contexts_BC = torch.where(masks[0], rows.inputs.number_V[pairs.contexts_BC], 0).long()
        targets_BT = torch.where(masks[1], rows.outputs.number_V[pairs.targets_BT], 0).long()
        places = contexts_BC, masks[0], targets_BT, masks[1]
        weights = self._weights(page.inputs, rows.inputs), self._weights(page.outputs, rows.outputs)
        scale = self._loss_scale.scale if self._loss_scale else None
        result = skipgram(*weights, *places, self._product, scale)
        rows.inputs.grad_UD.add_(result.grad_input_UD)
        rows.outputs.grad_UD.add_(result.grad_output_UD)
        if self.shape.count_pairs:
            counts = count_pairs(*places, (len(weights[0]), len(weights[1])))
            rows.inputs.pairs_U.add_(counts[0])
            rows.outputs.pairs_U.add_(counts[1])
        # Sums of their own: `rows` may be memory of the planning stream, which reuses it early.
        return rows._replace(loss=rows.loss + result.loss, pairs=rows.pairs + result.pairs)

    def optimizer_step(
        self,
        optimizer: OptimizerLike,
        tables: Sequence[TableLike],
        page: Page,
        grads: Grads,
        lr: float,
        state: StepState,
    ) -> None:
        skipped = self._skip_overflow([grads.inputs.grad_UD, grads.outputs.grad_UD])
        state.mark_fault(1, grads.loss.isfinite())
        for number, (table, view, its) in enumerate(zip(tables, page, grads[:2], strict=True)):
            rows_U = its.rows_U.long()
            slots_U = view.slots(rows_U)
            before_UR = view.records_SR.index_select(0, slots_U)
            records_UR = table.decode(before_UR.clone())
            # Without gradients the rows stay finite: an overflow of the loss scale is no fault.
            grad_UD = its.grad_UD if skipped is None else torch.where(skipped, 0, its.grad_UD)
            optimizer.step_rows(table, records_UR, grad_UD, its.pairs_U, lr)
            after_UR = table.encode(rows_U, records_UR)
            is_finite = after_UR.isfinite().all()
            state.mark_fault(2 << number, is_finite)
            # It stays set, so that later steps write nothing, although the CPU has not seen it yet.
            keep = state.fault == 0
            if skipped is not None:
                keep &= ~skipped
            view.records_SR.index_copy_(0, slots_U, torch.where(keep, after_UR, before_UR))
        state.rows_updated += len(grads.inputs.rows_U) + len(grads.outputs.rows_U)

    def finish(self) -> None:
        pass

    def list_requests(
        self, batch: Batch, send_N: Tensor, scratch_N: Tensor, before: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor]:
        shape, size = self.shape, self.shape.world_size
        rows = self.unique_rows(batch)
        inputs_U, outputs_U = rows.inputs.rows_U.long(), rows.outputs.rows_U.long()
        headers = torch.arange(size, device=shape.device).repeat_interleave(shape.header_rows)
        owners = torch.cat([headers, inputs_U % size, outputs_U % size])
        # Stable, so that the part of each owner begins with its header.
        order = torch.argsort(owners, stable=True)
        send_N.add_(torch.bincount(owners, minlength=size))
        ids_before, send_before = before
        # The counts travel in the headers of the page before; ~count is negative, as no id is.
        ids_before[_starts(send_before)] = ~send_N
        no_row = torch.full_like(headers, -1)
        rows_U = torch.cat([no_row, inputs_U, outputs_U + shape.rows])
        ids_U = torch.cat([no_row, inputs_U // size, outputs_U // size + shape.stride])
        return rows_U[order], ids_U.int()[order]

    def read_counts(
        self,
        ids_M: Tensor,
        recv_N: Tensor,
        next_send_N: Tensor,
        next_recv_N: Tensor,
        host_2N: Tensor,
    ) -> None:
        next_recv_N.copy_(~ids_M[_starts(recv_N)])
        host_2N.copy_(torch.stack([next_send_N, next_recv_N]))

    def mark_requested(self, ids_M: Tensor, marks_TV: Tensor) -> None:
        for marks_V, (_, rows) in zip(marks_TV, self._by_table(ids_M), strict=True):
            marks_V[rows] = True

    def lend(self, ids_M: Tensor, page: Page) -> tuple[Tensor, Grads]:
        dim = self.shape.dim
        weights_MD = page.inputs.records_SR.new_zeros(len(ids_M), dim)
        owned = []
        for view, (is_here_M, rows) in zip(page, self._by_table(ids_M), strict=True):
            weights_MD[is_here_M] = view.records_SR[view.slots(rows), :dim]
            owned.append(torch.unique(rows))
        return weights_MD, self._zero_grads(owned[0], owned[1], self.shape.stride)

    def borrow(self, rows_U: Tensor, weights_UD: Tensor, owned: Grads) -> tuple[Page, Grads]:
        is_row_U = rows_U >= 0
        number_TV = torch.full((2, self.shape.rows), -1, dtype=torch.int32, device=rows_U.device)
        numbers = torch.arange(len(rows_U), dtype=torch.int32, device=rows_U.device)
        # Output ids begin at shape.rows, so one flat index serves both tables. They share their
        # weights and gradients, and so one all-to-all.
        number_TV.view(-1)[rows_U[is_row_U]] = numbers[is_row_U]
        grad_UD = torch.zeros(weights_UD.shape, dtype=self._grad_dtype, device=rows_U.device)
        pairs_U = torch.zeros_like(numbers) if self.shape.count_pairs else None
        inputs, outputs = (TableGrads(n_V, None, grad_UD, pairs_U, None) for n_V in number_TV)
        page = Page(View(weights_UD, number_TV[0]), View(weights_UD, number_TV[1]))
        return page, Grads(inputs, outputs, owned.loss, owned.pairs)

    def write_headers(self, borrowed: Grads, fault: Tensor, send_N: Tensor) -> None:
        facts = torch.stack([borrowed.loss.view(torch.int64), borrowed.pairs, fault])
        words_UD = borrowed.inputs.grad_UD.view(torch.int32)
        for start in _starts(send_N).tolist():
            words_UD[start:].view(-1)[:HEADER_WORDS] = facts.view(torch.int32)

    def collect(
        self,
        ids_M: Tensor,
        recv_N: Tensor,
        grad_MD: Tensor,
        pairs_M: Tensor | None,
        owned: Grads,
        fault: Tensor,
    ) -> None:
        for its, (is_here_M, rows) in zip(owned[:2], self._by_table(ids_M), strict=True):
            numbers = its.number_V[rows].long()
            its.grad_UD.index_add_(0, numbers, grad_MD[is_here_M])
            if pairs_M is not None:
                its.pairs_U.index_add_(0, numbers, pairs_M[is_here_M])
        words_MD = grad_MD.view(torch.int32)
        headers = [
            words_MD[start:].reshape(-1)[:HEADER_WORDS] for start in _starts(recv_N).tolist()
        ]
        facts = [header.clone().view(torch.int64) for header in headers]
        # Added in the order of the ranks, so that all of them have the same bits.
        owned.loss.copy_(reduce(torch.add, (fact[0].view(torch.float64) for fact in facts)))
        owned.pairs.copy_(reduce(torch.add, (fact[1] for fact in facts)))
        fault.copy_(reduce(torch.bitwise_or, (fact[2] for fact in facts)))

    def _by_table(self, ids_M: Tensor) -> Iterable[tuple[Tensor, Tensor]]:
        """Give for each table which ids are its rows, and these rows of the shard."""
        stride = self.shape.stride
        for number, is_here_M in enumerate(((ids_M >= 0) & (ids_M < stride), ids_M >= stride)):
            yield is_here_M, ids_M[is_here_M].long() - number * stride

    def _zero_grads(self, inputs_U: Tensor, outputs_U: Tensor, rows: int) -> Grads:
        shape = self.shape

        def table_grads(rows_U: Tensor) -> TableGrads:
            number_V = torch.full((rows,), -1, dtype=torch.int32, device=shape.device)
            number_V[rows_U] = torch.arange(len(rows_U), dtype=torch.int32, device=shape.device)
            grad_UD = torch.zeros(
                len(rows_U), shape.dim, dtype=self._grad_dtype, device=shape.device
            )
            pairs_U = torch.zeros_like(rows_U, dtype=torch.int32) if shape.count_pairs else None
            return TableGrads(number_V, rows_U.int(), grad_UD, pairs_U, None)

        loss = torch.zeros((), dtype=torch.float64, device=shape.device)
        pairs = torch.zeros((), dtype=torch.int64, device=shape.device)
        return Grads(table_grads(inputs_U), table_grads(outputs_U), loss, pairs)

    def _weights(self, view: View, rows: TableGrads) -> Tensor:
        """Return the weights [U, D] in the order of the rows' numbers."""
        if rows.rows_U is None:  # borrowed rows lie in that order
            records = view.records_SR
        else:
            records = view.records_SR.index_select(0, view.slots(rows.rows_U.long()))
        return records[:, : self.shape.dim].to(self._grad_dtype)

    def _skip_overflow(self, grads: Sequence[Tensor]) -> Tensor | None:
        """Update the loss scale; return whether any rank's gradients overflowed."""
        if self._loss_scale is None:
            return None
        overflows = torch.stack([~grad.isfinite().all() for grad in grads]).any()
        overflowed = self._all_reduce(overflows.int()) > 0
        self._loss_scale.update(overflowed)
        return overflowed


def _starts(count_N: Tensor) -> Tensor:
    """Return where each rank's part of a list begins."""
    return count_N.cumsum(0) - count_N
