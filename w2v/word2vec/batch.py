"""Records that a training step passes on: batch, rows, gradients.

Each word has two rows: row 2 w is the input vector of word w, and row 2 w + 1 its output vector.
Nodes of a tree have output vectors too, and are numbered as words.

Shapes: n kept words of a chunk of text, B centers, K negatives, V words, A = 2 V rows, U unique
rows, D dimensions, S slots of a cache, R elements of a record.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from w2v.rows.optim import RowOptimizer
from w2v.rows.table import Table

# What can stop being finite, as bits of a fault. The first fault stops all further writes.
FAULTS = ("the loss", "vectors")
FAULT_BITS = len(FAULTS)
# `reference.draw` and `reference.subsample`
Draw = Callable[
    [Sequence["BatchSeed"], tuple[int, int], int, "Pool", Tensor], Iterator[tuple[Tensor, Tensor]]
]
Subsample = Callable[[int, Tensor, np.ndarray, Tensor, np.ndarray, int, int], tuple[Tensor, Tensor]]
ZEROS_AT_ONCE = 64  # steps
CHUNK_BATCHES = 32  # a chunk of text has about as many raw words as this many batches have centers
FEWER_BATCHES = 8  # at least this many, where batches are larger than LARGE_BATCH
LARGE_BATCH = 1 << 16


class Position(NamedTuple):
    """Position of a sampler: the next batch that it draws."""

    epoch: int = 0
    chunk: int = 0
    batch: int = 0
    drawn: int = 0  # batches of the epoch before it


class Pool(NamedTuple):
    """Words that negatives are picked from.

    Without a pool, each negative is drawn independently. The distribution of words is cut into
    `parts`, one for each rank.
    """

    size: int = 0  # 0: no pool
    own: int = 0  # how many words, the first ones, are drawn from `part` alone
    fresh: bool = False  # whether these are drawn anew each time they are picked
    part: int = 0
    parts: int = 1


class BatchSeed(NamedTuple):
    """What the draws of a batch are made from."""

    centers: int
    key: int  # 64 random bits, unsigned
    pool_key: int = 0  # the same of its pool: batches with the same key share a pool


def chunk_words(batch_size: int) -> int:
    """Return about how many raw words a chunk of text has."""
    return max(CHUNK_BATCHES * min(batch_size, LARGE_BATCH), FEWER_BATCHES * batch_size)


class Lookahead(NamedTuple):
    """Words of the text after a batch, up to the end of the lookahead window."""

    last_piece_V: Tensor  # int32, the last piece of text that has the word, -1 for none
    next: int  # the first piece after the batch

    @property
    def soon_A(self) -> Tensor:
        """Return the rows of words that the text repeats, which are evicted last."""
        return (self.last_piece_V >= self.next).repeat_interleave(2)


class Tree(NamedTuple):
    """Huffman tree of V words: the path of each from the root, in inner nodes.

    P nodes of all paths together. A path's last node is the parent of its word.
    """

    begin_V: Tensor  # int64 [V + 1], where the path of each word begins, and P
    nodes_P: Tensor  # int32
    codes_P: Tensor  # uint8, the branch that leads on to the word; its label is 1 - code
    depth: int  # the length of the longest path


def output_vectors(words: int, hs: bool, negative: int) -> int:
    """Return the number of output vectors: of words, of nodes, or of both.

    Nodes are then numbered after the words. There are as many input vectors, of which the last ones
    are never used.
    """
    return 2 * words - 1 if hs and negative else words


class Objective(NamedTuple):
    """What predicts a center, and by which targets.

    cbow: whether it is predicted by the sum or mean of its context words' vectors, not by each of
        them (Mikolov et al. 2013, arXiv 1301.3781); mean: which of the two.
    weighted: W, if the gradients of a pair at distance d are weighed by (W + 1 - d) / W, which is
        how often windows drawn from 1 to W hold it; 0 if all pairs weigh 1. The loss counts each
        pair once. Not for CBOW.
    tree: of hierarchical softmax. The nodes of a center's path are targets, each labelled by the
        branch to take; beside the center and its negatives, if there are negatives.

    gensim's gradients of CBOW, which are not the derivatives: those of the predicting vector go to
    each context word, whole for a mean, and divided by the number of context words for a sum.
    """

    cbow: bool = False
    mean: bool = True
    tree: Tree | None = None
    weighted: int = 0

    def weights(self, window: int) -> np.ndarray:
        """Return the weight of a pair by its distance, float64 [window + 1]."""
        widest = self.weighted
        return (widest + 1 - np.arange(window + 1.0)) / widest if widest else np.ones(window + 1)

    def to(self, device: torch.device) -> Objective:
        """Return the objective with its tree on a device."""
        if self.tree is None:
            return self
        begin_V, nodes_P, codes_P = (part.to(device) for part in self.tree[:3])
        return self._replace(tree=Tree(begin_V, nodes_P, codes_P, self.tree.depth))


SKIPGRAM = Objective()


class Batch(NamedTuple):
    """Centers of a text with their windows and negatives, words by number."""

    words_n: Tensor  # int32, the text: the words of a chunk that subsampling has kept
    sentences_n: Tensor  # int32, the sentence of each word
    first: int  # the centers are words_n[first : first + B]; context words may lie outside
    windows_B: Tensor  # int32, from 1 to `window`
    negatives_BK: Tensor  # int32; a negative that is the center itself does not count; K = 0: hs
    window: int
    epochs_done: float  # passes over the corpus that are done after this batch
    after: Position = Position()  # where the sampler stands once this batch is drawn
    pool: int = 0  # the most distinct negatives, if a pool bounds them; 0: all may differ
    lookahead: Lookahead | None = None
    objective: Objective = SKIPGRAM


def max_rows(
    centers: int, negatives: int, window: int, depth: int = 0, words: int = 0
) -> tuple[int, int]:
    """Return the most input and output rows that a batch may touch.

    negatives: distinct ones of all centers; depth, words: of the tree, if there is one.
    """
    targets = centers + negatives if negatives or not depth else 0
    return centers + 2 * window, targets + min(centers * depth, words - 1 if depth else 0)


def max_batch_rows(batch: Batch, vectors: int, parts: int = 1) -> int:
    """Return the most rows that one of `parts` parts of a batch touches.

    vectors: the number of input vectors, and of output vectors.
    """
    centers = -(-batch.windows_B.shape[0] // parts)
    drawn = centers * batch.negatives_BK.shape[1]
    tree = batch.objective.tree
    depth, words = (tree.depth, tree.begin_V.shape[0] - 1) if tree else (0, 0)
    negatives = min(drawn, batch.pool or drawn)
    most = max_rows(centers, negatives, batch.window, depth, words)
    return sum(min(vectors, rows) for rows in most)


class Pairs(NamedTuple):
    """Rows of the context words and targets of each center of a batch.

    Shapes: C context positions, T targets: the center itself and its K negatives, unless K is 0;
    then the nodes of its path, if there is a tree.
    """

    contexts_BC: Tensor
    context_mask_BC: Tensor  # False where the window is smaller or leaves the sentence
    targets_BT: Tensor
    target_mask_BT: Tensor  # False for a negative that is the center, past the end of a path, or
    # without context words
    labels_BT: Tensor  # bool


class RowGrads(NamedTuple):
    """Unique rows that a batch touches, with a gradient for each.

    Buffers may be longer than the number of unique rows, `row_count`; without it they are not.
    """

    index_A: Tensor | None  # int32, where each touched row is among the unique ones
    rows_U: Tensor | None  # int32, the row of each index; None: rows read from peers
    grad_UD: Tensor
    pairs_U: Tensor | None  # int32, how many pairs each gradient sums, where they are counted
    row_count: Tensor | None  # int64 scalar on the device

    def unique_rows(self) -> Tensor:
        """Return the rows without the rest of the buffer; wait for the device."""
        if self.rows_U is None:
            raise ValueError("rows that are read from peers are not listed")
        if self.row_count is None:
            return self.rows_U
        return self.rows_U[: int(self.row_count)]


class Grads(NamedTuple):
    """Gradients of a batch's unique rows, and its loss.

    All are zero until `Kernels.gradients` adds to them.
    """

    rows: RowGrads
    loss: Tensor  # float64, summed over the positive pairs and their negatives
    pairs: Tensor  # int64, the number of positive pairs; of CBOW, that of centers
    expanded: Pairs | None = None  # the batch, where kernels have written it out


class StepShape(NamedTuple):
    """What kernels are made for, on every rank."""

    vectors: int  # input vectors of all ranks, and as many output vectors
    dim: int
    dtype: torch.dtype  # of the records
    device: torch.device
    count_pairs: bool = False  # whether to count the pairs of each row, for a cap on occurrences
    world_size: int = 1

    @property
    def rows(self) -> int:
        """Rows of all ranks."""
        return 2 * self.vectors

    @property
    def shard_rows(self) -> int:
        """Rows of the rank that owns the most."""
        return 2 * -(-self.vectors // self.world_size)


class StepState:
    """Number of the current step, and what steps count on the device.

    fault: int64 scalar, 0 or the first step that was not finite, shifted by FAULT_BITS, and its
    bits; rows_updated: int64 scalar, the unique rows of all steps so far, which cpu.py does not
    count: its tables do not move.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.step = 0
        self.fault = torch.zeros((), dtype=torch.int64, device=device)
        self.rows_updated = torch.zeros((), dtype=torch.int64, device=device)

    def mark_fault(self, bit: int, is_sound: Tensor) -> None:
        """Record a fault of this step, unless `is_sound` or there was one before."""
        fault = torch.full_like(self.fault, (self.step << FAULT_BITS) + bit)
        self.fault.copy_(torch.where((self.fault == 0) & ~is_sound, fault, self.fault))

    def first_fault(self) -> tuple[int, list[str]]:
        """Wait for the device; return its first faulty step, or 0, and faults."""
        fault = int(self.fault)
        return fault >> FAULT_BITS, [name for bit, name in enumerate(FAULTS) if fault >> bit & 1]


def zeros_by_step(device: torch.device, dtype: torch.dtype) -> Iterator[Tensor]:
    """Yield a zero for each step.

    Made for many steps at a time: zeroing takes the CPU longer than launching a kernel.
    """
    while True:
        yield from torch.zeros(ZEROS_AT_ONCE, dtype=dtype, device=device).unbind()


class Update(NamedTuple):
    """How rows are updated."""

    optimizer: RowOptimizer
    table: Table
    lr: float
