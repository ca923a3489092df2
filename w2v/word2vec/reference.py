"""The arithmetic of a step in plain torch: the specification of kernels.

Optimizers are specified by torch's own classes, see `RowOptimizer.step_rows` (rows/optim.py).

Shapes: B centers, C = 2 * window context positions, K negatives, T targets (see `Pairs`), V words,
A rows, U unique rows, D dimensions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from w2v.rows.ops import View
from w2v.system.random import shift_right, splitmix64
from w2v.word2vec.batch import (
    SKIPGRAM,
    Batch,
    BatchSeed,
    Grads,
    Objective,
    Pairs,
    Pool,
    RowGrads,
    StepShape,
    StepState,
    Update,
)
from w2v.word2vec.kernels import Kernels

# Factor of the errors in float16 products, so that small gradients are not lost. A constant is
# enough: errors are at most 1, so that 20 targets overflow only with weights above 12.
FLOAT16_SCALE = 2.0**8


def draw(
    seeds: Sequence[BatchSeed], widths: tuple[int, int], negatives: int, pool: Pool, cdf_V: Tensor
) -> Iterator[tuple[Tensor, Tensor]]:
    """Draw windows and negatives of batches, on every device the same.

    Negatives are drawn by inverting their cumulative distribution. With a pool, that many are
    drawn, stratified, and those of the centers are picked from them.

    Args:
        seeds: Of B centers each.
        widths: Smallest and largest window.
        negatives: Negatives of each center, K.
        pool: Words that negatives are picked from, if any.
        cdf_V: Cumulative distribution of the negatives, float64, in parts of equal length: entry n
            of the last part is word n * parts, of the one before n * parts + 1, and so on.

    Yields:
        Window sizes, int32 [B], and negatives, int32 [B, K], of each batch.
    """

    def bits(key: int, begin: int, end: int) -> Tensor:  # 53 of them for each number
        return shift_right(splitmix64(torch.arange(begin, end, device=cdf_V.device), key), 11)

    lowest, widest = widths
    length = len(cdf_V) // pool.parts
    for centers, key, pool_key in seeds:
        windows_B = lowest + bits(key, 0, centers) % (widest - lowest + 1)
        drawn = bits(key, centers, centers * (1 + negatives))
        uniform = drawn.double() / 2**53
        if pool.size:
            # A number is drawn from each of equal stretches of [0, 1), or of those of the part.
            place = drawn % pool.size
            pooled = place + (bits(pool_key, 0, pool.size).double() / 2**53)[place]
            of_part = (pool.part + (uniform if pool.fresh else pooled / pool.own)) / pool.parts
            of_all = (pooled - pool.own) / (pool.size - pool.own)
            uniform = torch.where(place < pool.own, of_part, of_all)
        entry = torch.searchsorted(cdf_V, uniform, right=True, out_int32=True)
        entry.clamp_(max=len(cdf_V) - 1)
        words = entry % length * pool.parts + (pool.parts - 1 - entry // length)
        yield windows_B.int(), words.view(centers, negatives)


def subsample(
    key: int,  # 64 random bits, unsigned, of the text
    words_N: Tensor,  # of whole sentences, int32
    edges_S: np.ndarray,  # where each sentence begins in `words_N`, and N
    keep_V: Tensor,  # probability that an occurrence of each word is kept, float32
    trained_S: np.ndarray,  # whether any word of each sentence is kept, bool
    block_words: int,  # of the blocks that batches mix; 0: batches are consecutive text
    batch_size: int,  # the most words of a batch
) -> tuple[Tensor, Tensor]:
    """Draw by torch's generator the words of a text that are kept.

    Returns these words, in the order in which batches have them, and the number of the sentence of
    each, int32 [n].
    """
    device = words_N.device
    edges = torch.from_numpy(edges_S).to(device)
    generator = torch.Generator(device).manual_seed(key >> 1)
    uniform_N = torch.rand(len(words_N), generator=generator, device=device)
    kept_N = uniform_N < keep_V.index_select(0, words_N)
    if not trained_S.all():
        trained = torch.from_numpy(trained_S).to(device)
        kept_N &= torch.repeat_interleave(trained, edges.diff(), output_size=len(words_N))
    kept = torch.nonzero(kept_N).flatten()  # the only wait for the device
    words_n = words_N[kept]
    places = torch.searchsorted(kept, edges)
    del uniform_N, kept_N, kept  # they would add to the peak of memory
    sentences = torch.arange(len(trained_S), dtype=torch.int32, device=device)
    sentences_n = torch.repeat_interleave(sentences, places.diff(), output_size=len(words_n))
    return interleave(words_n, sentences_n, block_words, batch_size)


def interleave(
    words_n: Tensor, sentences_n: Tensor, block_words: int, batch_size: int
) -> tuple[Tensor, Tensor]:
    """Distribute the blocks of a text over its batches in turn.

    Each block is a sentence of its own, so that windows end at its edges.
    """
    if not block_words:
        return words_n, sentences_n
    batches = max(1, -(-len(words_n) // batch_size))
    places_n = torch.arange(len(words_n), dtype=torch.int32, device=words_n.device)
    blocks = len(words_n) // block_words
    order = torch.argsort(places_n[:blocks] % batches, stable=True)

    def reordered(numbers_n: Tensor) -> Tensor:  # a last block that is not full stays in place
        whole_n, rest_n = numbers_n.tensor_split([blocks * block_words])
        return torch.cat([whole_n.view(blocks, block_words)[order].flatten(), rest_n])

    # Blocks of one sentence may come to lie side by side; neighbours differ in the last bit.
    parity_n = places_n // block_words % 2
    return reordered(words_n), 2 * reordered(sentences_n) + parity_n


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

    targets = []
    tree, centers_B1 = batch.objective.tree, words_n[centers].long()[:, None]
    if batch.negatives_BK.shape[1] or not tree:
        sampled_BT = torch.cat([centers_B1, batch.negatives_BK.long()], dim=1)
        labels_BT = torch.zeros_like(sampled_BT, dtype=torch.bool)
        labels_BT[:, 0] = True
        # A negative that is the center itself does not count.
        targets.append((sampled_BT, labels_BT | (sampled_BT != centers_B1), labels_BT))
    if tree:
        at_BL = tree.begin_V[centers_B1] + torch.arange(tree.depth, device=words_n.device)
        counts_BL = at_BL < tree.begin_V[centers_B1 + 1]
        at_BL = torch.where(counts_BL, at_BL, 0)
        targets.append((tree.nodes_P[at_BL].long(), counts_BL, tree.codes_P[at_BL] == 0))
    targets_BT, counts_BT, labels_BT = (torch.cat(parts, 1) for parts in zip(*targets, strict=True))
    # A center without context words has no pairs.
    counts_BT &= context_mask_BC.any(dim=1, keepdim=True)
    contexts_BC = 2 * words_n[at_BC].long()
    return Pairs(contexts_BC, context_mask_BC, 2 * targets_BT + 1, counts_BT, labels_BT)


def mark_pairs(pairs: Pairs, rows: int) -> Tensor:
    """Return whether each of so many rows takes part in a pair: bool [A]."""
    marks_A = torch.zeros(rows + 1, dtype=torch.bool, device=pairs.contexts_BC.device)
    for ids, mask in pairs[:2], pairs[2:4]:  # contexts, targets
        # Other ids mark one more row, which is cut off: to select ids would wait for their number.
        marks_A.index_fill_(0, torch.where(mask, ids, rows).flatten(), True)
    return marks_A[:rows]


def unique_rows(marks_A: Tensor) -> tuple[Tensor, Tensor]:
    """Return the marked rows, and each row's place among them.

    The places are int32 [A], -1 for other rows.
    """
    index_A = torch.cumsum(marks_A, 0, dtype=torch.int32) - 1
    return torch.nonzero(marks_A).flatten(), torch.where(marks_A, index_A, -1)


def all_finite(values: Tensor) -> Tensor:
    """Return whether all values are finite: bool scalar, by one pass."""
    if not values.numel():
        return torch.ones((), dtype=torch.bool, device=values.device)
    # isfinite().all() makes five passes and takes ten times as long.
    return torch.stack(values.aminmax()).isfinite().all()


def gradients(
    weight_UD: Tensor,  # of context words and targets
    places: Pairs,  # with the place of each row in these instead of its number
    grad_UD: Tensor,  # what the gradients are added to
    product: torch.dtype | None = None,  # that matrix products take and give; by default float32
    objective: Objective = SKIPGRAM,
) -> Tensor:
    """Return the summed loss of the pairs; add its gradients.

    For a predicting vector x and a target's vector y the loss is -log s(x.y) if the target's label
    is 1, and -log s(-x.y) if it is 0, with s the logistic function; its gradient along the logit
    x.y is s(x.y) - label (Mikolov et al. 2013, arXiv 1310.4546). The contexts of a window share the
    center's targets, so the logits of a center are one small matrix product (Ji et al. 2016,
    arXiv 1604.04661). CBOW has one predicting vector a center, and one row of that product.
    Sums over more than a window stay in the vectors' type, whatever that of products.
    """
    contexts_BC, context_mask_BC, targets_BT, target_mask_BT, labels_BT = places
    (B, C), T = context_mask_BC.shape, target_mask_BT.shape[1]
    D = weight_UD.shape[1]  # view() cannot find it where a rank's batch is empty
    if not len(weight_UD):  # no center has a context word
        return weight_UD.new_zeros((), dtype=torch.float64)
    product = product or weight_UD.dtype
    factor_UD = weight_UD.to(product)
    context_BCD = factor_UD.index_select(0, contexts_BC.flatten()).view(B, C, D)
    target_BTD = factor_UD.index_select(0, targets_BT.flatten()).view(B, T, D)
    # H vectors predict a center: those of the C context words, or one.
    predicting_BHD, predicts_BH = context_BCD, context_mask_BC
    if objective.cbow:
        words_B11 = context_mask_BC.sum(1)[:, None, None].clamp(min=1)
        counted_BCD = torch.where(context_mask_BC[:, :, None], context_BCD, 0)
        sum_B1D = counted_BCD.sum(1, keepdim=True, dtype=weight_UD.dtype)
        predicting_BHD = (sum_B1D / (words_B11 if objective.mean else 1)).to(product)
        predicts_BH = context_mask_BC.any(1, keepdim=True)
    counted_BHT = predicts_BH[:, :, None] & target_mask_BT[:, None, :]
    logits_BHT = torch.bmm(predicting_BHD, target_BTD.transpose(1, 2)).to(weight_UD.dtype)

    # The loss is softplus of the logits, negated where the label is 1.
    labels_B1T = labels_BT[:, None, :]
    signed_BHT = torch.where(labels_B1T, -logits_BHT, logits_BHT)
    loss = torch.where(counted_BHT, F.softplus(signed_BHT), 0).sum(dtype=torch.float64)
    error_BHT = torch.where(counted_BHT, logits_BHT.sigmoid() - labels_B1T.to(logits_BHT), 0)
    if objective.weighted:
        weight_d = torch.from_numpy(objective.weights(C // 2)[1:]).to(error_BHT)
        error_BHT = error_BHT * torch.cat([weight_d.flip(0), weight_d])[:, None]
    scale = FLOAT16_SCALE if product == torch.float16 else 1
    error_BHT = (error_BHT * scale).to(product)

    grad_context_BCD = torch.bmm(error_BHT, target_BTD)
    grad_target_BTD = torch.bmm(error_BHT.transpose(1, 2), predicting_BHD)
    if objective.cbow:  # see `Objective`
        grad_context_BCD = grad_context_BCD / (1 if objective.mean else words_B11)
        grad_context_BCD = torch.where(context_mask_BC[:, :, None], grad_context_BCD, 0)
    for places_BN, grad_BND in (contexts_BC, grad_context_BCD), (targets_BT, grad_target_BTD):
        grad_ND = grad_BND.flatten(0, 1).to(weight_UD.dtype)
        if scale != 1:  # index_add_ is slow with a factor
            grad_ND /= scale
        grad_UD.index_add_(0, places_BN.flatten(), grad_ND)
    return loss


def count_pairs(places: Pairs, count_U: Tensor, cbow: bool = False) -> None:
    """Add the number of pairs of each row.

    All context words make one pair with each target of CBOW.
    """
    contexts_B1 = places.context_mask_BC.sum(1, keepdim=True, dtype=torch.int32)
    contexts_B1 = contexts_B1.clamp(max=1) if cbow else contexts_B1
    targets_B1 = places.target_mask_BT.sum(1, keepdim=True, dtype=torch.int32)
    if len(count_U):  # some center has a context word
        of_contexts_BC = places.context_mask_BC * targets_B1
        of_targets_BT = places.target_mask_BT * contexts_B1
        count_U.index_add_(0, places.contexts_BC.flatten(), of_contexts_BC.flatten())
        count_U.index_add_(0, places.targets_BT.flatten(), of_targets_BT.flatten())


def zero_grads(marks_A: Tensor, shape: StepShape) -> Grads:
    """Return zero gradients of marked rows."""
    rows_U, index_A = unique_rows(marks_A)
    grad_dtype = torch.promote_types(shape.dtype, torch.float32)
    grad_UD = torch.zeros(len(rows_U), shape.dim, dtype=grad_dtype, device=shape.device)
    pairs_U = torch.zeros_like(rows_U, dtype=torch.int32) if shape.count_pairs else None
    loss, pairs = torch.zeros(2, dtype=torch.float64, device=shape.device)
    rows = RowGrads(index_A, rows_U.int(), grad_UD, pairs_U, None)
    return Grads(rows, loss, pairs.long())


class ReferenceKernels(Kernels):
    """The kernels of `w2v.word2vec.kernels.Kernels` in plain torch.

    Args:
        shape: Shape of the tables.
        product: Type of matrix products, as in `gradients`; by default that of the vectors.
    """

    plans_rows = True
    draw = staticmethod(draw)
    subsample = staticmethod(subsample)

    def __init__(self, shape: StepShape, product: torch.dtype | None = None):
        self.shape = shape
        self._product = product

    def mark(self, batch: Batch, marks_A: Tensor) -> None:
        marks_A |= mark_pairs(expand(batch), len(marks_A))

    def unique_rows(self, batch: Batch) -> Grads:
        pairs = expand(batch)
        grads = zero_grads(mark_pairs(pairs, self.shape.rows), self.shape)
        return grads._replace(expanded=pairs)

    def gradients(self, batch: Batch, view: View, grads: Grads, lr: float) -> Grads:
        rows, loss, pairs, expanded = grads
        assert rows.index_A is not None
        places = expanded or expand(batch)
        contexts_BC, context_mask_BC, targets_BT, target_mask_BT, _ = places
        places = places._replace(
            contexts_BC=torch.where(context_mask_BC, rows.index_A[contexts_BC], 0).long(),
            targets_BT=torch.where(target_mask_BT, rows.index_A[targets_BT], 0).long(),
        )
        slots_U = view.slots(rows.unique_rows().long())
        weight_UD = view.records_SR[:, : self.shape.dim].index_select(0, slots_U)
        weight_UD = weight_UD.to(rows.grad_UD.dtype)
        cbow = batch.objective.cbow
        batch_loss = gradients(weight_UD, places, rows.grad_UD, self._product, batch.objective)
        if rows.pairs_U is not None:
            count_pairs(places, rows.pairs_U, cbow)
        predicting = (context_mask_BC.any(1) if cbow else context_mask_BC).sum()
        # Sums of their own: `grads` may be memory of the planning stream, which reuses it early.
        return grads._replace(loss=loss + batch_loss, pairs=pairs + predicting)

    def optimizer_step(self, update: Update, view: View, grads: Grads, state: StepState) -> None:
        optimizer, table, lr = update
        state.mark_fault(1, grads.loss.isfinite())
        rows_U = grads.rows.unique_rows().long()
        slots_U = view.slots(rows_U)
        before_UR = view.records_SR.index_select(0, slots_U)
        records_UR = table.decode(before_UR.clone())
        optimizer.step_rows(table, records_UR, grads.rows.grad_UD, grads.rows.pairs_U, lr)
        after_UR = table.encode(rows_U, records_UR)
        state.mark_fault(2, all_finite(after_UR))
        # It stays set, so that later steps write nothing, although the CPU has not seen it yet.
        kept_UR = torch.where(state.fault == 0, after_UR, before_UR)
        view.records_SR.index_copy_(0, slots_U, kept_UR)
        state.rows_updated += rows_U.shape[0]
