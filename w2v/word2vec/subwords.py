"""Subwords: input vectors that are means of rows, as in fastText.

The first row of a word is its own, the others are of its character n-grams, which are hashed into
buckets (Bojanowski et al. 2017, arXiv 1607.04606). Each row gets the whole gradient of each of its
words, as in fastText. Rows of one table are, in this order:

    2 w, 2 w + 1    composed input vector and output vector of word w, and of nodes
    first + w       own vector of word w
    first + V + b   the b-th of the B buckets that n-grams of words are in

Kernels of words run on the composed vectors as on others. These are written to their rows, before
the gradients of each batch, for its unique words; their optimizer state is unused. So the V records
of composed vectors are what subwords cost in memory beside own vectors and buckets.

Shapes: V words, B buckets in use, W unique words of a batch, N rows of words one after the other,
A rows, U unique rows, D dimensions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from w2v.distributed.ranks import SINGLE, Ranks
from w2v.rows.ops import View
from w2v.rows.shard import RoutedLookUp
from w2v.rows.table import Table
from w2v.text.ngrams import hash_words
from w2v.word2vec.batch import Batch, Grads, StepShape, StepState, Update
from w2v.word2vec.kernels import Kernels
from w2v.word2vec.reference import zero_grads

COMPOSED_BYTES = 16 << 20  # of rows of words that are composed at a time


@dataclass(frozen=True, eq=False)
class Subwords:
    """The rows of each word."""

    vectors: int  # composed input vectors, and as many output vectors
    limits: tuple[int, int, int]  # min_n, max_n and the number of buckets
    used_B: np.ndarray  # int64, the buckets in use, by first appearance
    begin_V: Tensor  # int64 [V + 1], where the rows of each word begin, and N
    rows_N: Tensor  # int32, of each word its own, then those of its n-grams, which may repeat

    @classmethod
    def of(cls, words: Sequence[str], limits: tuple[int, int, int], vectors: int) -> Subwords:
        """Return the rows of words; vectors: of words and nodes."""
        min_n, max_n, buckets = limits
        begin_V, hashes_N = hash_words(words, min_n, max_n)
        buckets_N = (hashes_N % np.uint32(buckets)).astype(np.int64)
        # Where each bucket is first: the last one of equal places is kept.
        first_B = np.full(buckets, len(buckets_N))
        first_B[buckets_N[::-1]] = np.arange(len(buckets_N))[::-1]
        used_B = np.flatnonzero(first_B < len(buckets_N))
        used_B = used_B[np.argsort(first_B[used_B])]
        first_B[used_B] = np.arange(len(used_B))
        rows_N = 2 * vectors + len(words) + first_B[buckets_N]
        own_V = 2 * vectors + np.arange(len(words))
        rows_N = np.insert(rows_N, begin_V[:-1], own_V).astype(np.int32)
        begin_V = begin_V + np.arange(len(words) + 1)
        return cls(vectors, limits, used_B, torch.from_numpy(begin_V), torch.from_numpy(rows_N))

    def to(self, device: torch.device) -> Subwords:
        """Return the rows on a device."""
        return replace(self, begin_V=self.begin_V.to(device), rows_N=self.rows_N.to(device))

    @property
    def words(self) -> int:
        return self.begin_V.shape[0] - 1

    @property
    def first(self) -> int:
        """The row of the first word's own vector."""
        return 2 * self.vectors

    @property
    def rows(self) -> int:
        """How many rows words are composed of."""
        return self.words + len(self.used_B)

    def expected_rows(self, uses_V: np.ndarray) -> float:
        """Return the expected unique rows of words drawn so often on average."""
        uses_N = np.repeat(uses_V, np.diff(self.begin_V.numpy()))
        return float(-np.expm1(-np.bincount(self.rows_N - self.first, uses_N)).sum())

    def rows_of(self, words_W: Tensor) -> tuple[Tensor, Tensor]:
        """Return the rows of words, and each row's place in `words_W`: int64 [N]."""
        begin_W = self.begin_V[words_W]
        count_W = self.begin_V[words_W + 1] - begin_W
        numbers_W = torch.arange(len(words_W), device=words_W.device)
        place_N = numbers_W.repeat_interleave(count_W)
        shift_W = begin_W - (count_W.cumsum(0) - count_W)
        at_N = shift_W[place_N] + torch.arange(len(place_N), device=words_W.device)
        return self.rows_N[at_N].long(), place_N

    def words_among(self, rows_U: Tensor) -> Tensor:
        """Return the words whose input vectors are among rows: int64 [W]."""
        is_word_U = (rows_U % 2 == 0) & (rows_U < 2 * self.words)
        return rows_U[is_word_U].long() // 2

    def mark(self, marks_A: Tensor) -> None:
        """Set also the marks of the rows of marked words."""
        words_W = self.words_among(marks_A[: self.first].nonzero().flatten())
        marks_A.index_fill_(0, self.rows_of(words_W)[0], True)

    def compose(self, view: View, dim: int, words_W: Tensor) -> None:
        """Write the input vectors of words: means of their rows, in float32."""
        records_SR = view.records_SR
        for words_n in self.in_parts(words_W, dim):
            rows_N, place_N = self.rows_of(words_n)
            weight_ND = records_SR[view.slots(rows_N), :dim].float()
            sums_nD = weight_ND.new_zeros(len(words_n), dim).index_add_(0, place_N, weight_ND)
            means_nD = sums_nD / place_N.bincount(minlength=len(words_n))[:, None]
            records_SR[view.slots(2 * words_n), :dim] = means_nD.to(records_SR.dtype)

    def compose_all(self, table: Table, ranks: Ranks = SINGLE) -> None:
        """Write the input vectors of all words to a table, or its shards."""
        device = table.records_VR.device
        words_V = torch.arange(self.words, device=device)
        here = self.to(device)
        if ranks.size == 1:
            here.compose(View(table.records_VR, None), table.dim, words_V)
            return
        shards = table.interleaved("input", "output")
        index_A = torch.empty(self.first + self.rows, dtype=torch.int32, device=device)
        for words_n in here.in_parts(words_V, table.dim):
            rows_U = here.rows_of(words_n)[0].unique()
            weight_UD = torch.empty(len(rows_U), table.dim, dtype=table.dtype, device=device)
            for parity, shard in enumerate(shards):
                is_there_U = rows_U % 2 == parity
                fetched = ranks.fetch_rows(shard["weight"], rows_U[is_there_U] // 2)
                weight_UD[is_there_U] = fetched.to(table.dtype)
            rows_U = torch.cat([rows_U, 2 * words_n])
            index_A[rows_U] = torch.arange(len(rows_U), dtype=torch.int32, device=device)
            weight_UD = torch.cat([weight_UD, weight_UD.new_zeros(len(words_n), table.dim)])
            here.compose(View(weight_UD, index_A), table.dim, words_n)
            own_n = words_n[words_n % ranks.size == ranks.rank]
            shards[0]["weight"][own_n // ranks.size] = weight_UD[index_A[2 * own_n].long()]

    def in_parts(self, words_W: Tensor, dim: int) -> Sequence[Tensor]:
        """Return words in parts whose rows take about COMPOSED_BYTES."""
        rows = COMPOSED_BYTES // (4 * dim)
        return words_W.split(max(1, rows * self.words // len(self.rows_N)))


class SubwordKernels(Kernels):
    """Kernels of words, whose input vectors are composed; in plain torch."""

    def __init__(self, inner: Kernels, subwords: Subwords, shape: StepShape):
        self.inner = inner
        self.subwords = subwords.to(shape.device)
        self.shape = shape
        self.plans_rows = inner.plans_rows
        self.draw = inner.draw
        self.subsample = inner.subsample

    def mark(self, batch: Batch, marks_A: Tensor) -> None:
        self.inner.mark(batch, marks_A)
        self._mark(marks_A)

    def with_subwords(self, marks_A: Tensor) -> Tensor:
        marks_A = F.pad(marks_A, (0, self.shape.rows - len(marks_A)))
        self._mark(marks_A)
        return marks_A

    def _mark(self, marks_A: Tensor) -> None:
        self.subwords.mark(marks_A)

    def unique_rows(self, batch: Batch) -> Grads:
        return zero_grads(self.marks(batch), self.shape)

    def gradients(self, batch: Batch, view: View, grads: Grads, lr: float) -> Grads:
        """Compose the batch's words, and add the gradient of each to its rows."""
        rows, index_A = grads.rows, grads.rows.index_A
        assert index_A is not None, "rows of a batch"
        words_W = self.subwords.words_among(rows.unique_rows())
        self.subwords.compose(view, self.shape.dim, words_W)
        grads = self.inner.gradients(batch, view, grads, lr)
        for words_n in self.subwords.in_parts(words_W, self.shape.dim):
            rows_N, place_N = self.subwords.rows_of(words_n)
            from_n, to_N = index_A[2 * words_n].long(), index_A[rows_N].long()
            for sums in (rows.grad_UD, rows.pairs_U):
                if sums is not None:
                    sums.index_add_(0, to_N, sums[from_n][place_N])
                    sums[from_n] = 0  # of the composed vector
        return grads

    def sum_by_row(self, requested: RoutedLookUp, grad_MD: Tensor, pairs_M: Tensor | None) -> Any:
        return self.inner.sum_by_row(requested, grad_MD, pairs_M)

    def optimizer_step(self, update: Update, view: View, grads: Grads, state: StepState) -> None:
        self.inner.optimizer_step(update, view, grads, state)
