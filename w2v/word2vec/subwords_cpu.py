"""Subwords on a CPU: composed vectors and gradients of rows, by numba.

Shapes: V words, W unique words of a batch, N rows of words, A rows, U unique rows of a thread, D
dimensions, P = D padded to whole vectors.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np

from w2v.rows.ops import View
from w2v.system import simd
from w2v.word2vec.batch import Batch, Grads, max_batch_rows
from w2v.word2vec.cpu import CpuKernels, ThreadGrads, share
from w2v.word2vec.cpu_loops import (
    PREFETCH_ROWS,
    UniqueRows,
    _add,
    _prefetch_row,
    compiled,
    one,
    padded,
    sort_by_owner,
    sum_threads,
)
from w2v.word2vec.subwords import SubwordKernels


class CpuSubwordKernels(SubwordKernels):
    """Subwords of `CpuKernels`, whose threads find the rows of a batch.

    The same number of threads gives the same bits.
    """

    inner: CpuKernels
    _rows: Any = None  # `ThreadGrads` of all rows that are stepped

    @cached_property
    def _bags(self) -> tuple[np.ndarray, np.ndarray]:
        return self.subwords.begin_V.numpy(), self.subwords.rows_N.numpy()

    @cached_property
    def _most_rows(self) -> int:
        return self.subwords.most_rows(self.subwords.words)

    def unique_rows(self, batch: Batch) -> Any:
        return self.inner.unique_rows(batch)

    def gradients(self, batch: Batch, view: View, grads: Any, lr: float) -> Any:
        first, last = batch.first - batch.window, batch.first + len(batch.windows_B) + batch.window
        is_used_V = np.zeros(self.subwords.words, np.bool_)
        is_used_V[batch.words_n[max(first, 0) : last].numpy()] = True
        words_W = np.flatnonzero(is_used_V)
        threads, dim = self.inner.threads, self.shape.dim
        records_AR = view.records_SR.numpy()
        scratch_nP = np.empty((threads.count, padded(dim)), np.float32)

        def compose_share(thread: int) -> None:
            begin, end = share(thread, threads.count, len(words_W))
            compose(words_W[begin:end], *self._bags, records_AR, dim, scratch_nP, thread)

        threads.run(compose_share)
        grads = self.inner.gradients(batch, view, grads, lr)
        of_words: ThreadGrads = grads.rows
        most = max_batch_rows(batch, self.shape.vectors) + self._most_rows
        if not (self._rows and self._rows.has_room(most)):
            self._rows = ThreadGrads(self.shape.rows, most, dim, threads.count)
        rows: ThreadGrads = self._rows
        arrays = of_words.gradients(self.shape.count_pairs), of_words.first_A, of_words.summed_nU

        def spread_owned(owner: int) -> None:
            spread(owner, threads.count, *arrays, *self._bags, rows.of_thread[owner])

        threads.run(spread_owned)
        return Grads(rows, grads.loss, grads.pairs)  # type: ignore[arg-type]


@compiled
def compose(words_W, begin_V, rows_N, records_AR, dim, scratch_nP, thread):
    """Write the mean of the rows of each word to its input row."""
    for word in words_W:
        begin, end = begin_V[word], begin_V[word + 1]
        simd.blend(0, scratch_nP, thread, one, records_AR, rows_N[begin], dim)
        for i in range(begin + 1, end):
            if i + PREFETCH_ROWS < len(rows_N):
                _prefetch_row(records_AR, rows_N[i + PREFETCH_ROWS], dim, 0)
            simd.blend(one, scratch_nP, thread, one, records_AR, rows_N[i], dim)
        sum_D, composed_D = scratch_nP[thread, :dim], records_AR[2 * word, :dim]
        rows = np.float32(end - begin)
        for d in range(dim):
            composed_D[d] = sum_D[d] / rows


@compiled
def spread(owner, owners, grads, first_A, summed_nU, begin_V, rows_N, unique):
    """Add the summed gradients of an owner's rows to rows of a thread.

    Each row of a word gets the gradient of its input vector.
    """
    unique = UniqueRows(*unique)
    unique.count_1[0] = 0
    rows_U, sums_U = summed_nU[2 * owner], summed_nU[2 * owner + 1]
    count = sum_threads(owner, grads, first_A, rows_U, sums_U)
    grad_NP, pairs_N = grads[:2]
    for u in range(count):
        row, place = rows_U[u], sums_U[u]
        pairs = pairs_N[place] if len(pairs_N) else np.int32(0)
        if row % 2:
            _add(row, grad_NP, place, pairs, unique)
            continue
        for i in range(begin_V[row // 2], begin_V[row // 2 + 1]):
            if i + PREFETCH_ROWS < len(rows_N):
                index = unique.index_A[rows_N[i + PREFETCH_ROWS]]
                if index >= 0:
                    _prefetch_row(unique.grad_UP, index, grad_NP.shape[1], 1)
            _add(rows_N[i], grad_NP, place, pairs, unique)
    sort_by_owner(unique, owners)
