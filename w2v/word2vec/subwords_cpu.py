"""Subwords on a CPU: composed vectors and steps of their rows, by numba.

The composed vectors of a batch and the gradients of these fit into a core's cache; those of their
rows do not. So both passes take the rows in order, each once: it is added to the vectors of its
words, and it is stepped with the sum of their gradients, which is not written.

Shapes: V words, W unique words of a batch, N rows of words, A rows that words are composed of, U
unique ones of these that a thread owns, M words of these, D dimensions, P = D padded to whole
vectors.
"""

from __future__ import annotations

import math
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch

from w2v.rows.ops import View
from w2v.system import simd
from w2v.system.simd import LANES
from w2v.word2vec.batch import Batch, Grads, RowGrads, StepState, Update
from w2v.word2vec.cpu import (
    NO_PATH,
    CpuKernels,
    Stepper,
    ThreadGrads,
    note_fault,
    note_faults,
    share,
)
from w2v.word2vec.cpu_loops import (
    PREFETCH_ROWS,
    ROWS_PER_OWNER,
    _prefetch_row,
    compiled,
    list_rows,
    one,
    padded,
    zero,
)
from w2v.word2vec.reference import ReferenceKernels
from w2v.word2vec.subwords import SubwordKernels, Subwords


class WordGrads(NamedTuple):
    """Gradients of composed and output vectors, and the rows of words."""

    words_W: np.ndarray  # int64, the words of a batch
    lists: list[tuple[np.ndarray, ...]]  # of each owner, see `list_words`
    rows: ThreadGrads


class CpuSubwordKernels(SubwordKernels):
    """Subwords of `CpuKernels`, whose threads find the rows of a batch.

    The same number of threads gives the same bits.
    """

    inner: CpuKernels

    @cached_property
    def _bags(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """Where each owner's rows of each word begin, and these rows."""
        return [
            owned_bags(owner, self.inner.threads.count, self.subwords)
            for owner in range(self.inner.threads.count)
        ]

    @cached_property
    def _counts_A(self) -> np.ndarray:
        return np.zeros(self.subwords.rows, np.int32)

    def unique_rows(self, batch: Batch) -> Any:
        return self.inner.unique_rows(batch)

    def gradients(self, batch: Batch, view: View, grads: Any, lr: float) -> Any:
        """Compose the batch's words, then add the gradients of their vectors."""
        words_W = self._words(batch)
        begin_V = self.subwords.begin_V.numpy()
        share_W = (1 / (begin_V[words_W + 1] - begin_V[words_W])).astype(np.float32)
        lists = self._lists(words_W)
        threads, dim = self.inner.threads, self.shape.dim
        records_AR = view.records_SR.numpy()
        # Threads share the columns, as words have rows in common; and the words, if there are more.
        parts = min(threads.count, padded(dim) // LANES)

        def compose_share(thread: int) -> None:
            part, number = thread % parts, thread // parts
            if number == threads.count // parts:
                return  # too few are left for another share of the words
            first, last = share(part, parts, padded(dim) // LANES)
            columns = first * LANES, min(last * LANES, dim)
            words = share(number, threads.count // parts, len(words_W))
            for owner, rows in enumerate(lists):
                compose(owner == 0, words_W, share_W, words, rows, records_AR, columns)

        threads.run(compose_share)
        grads = self.inner.gradients(batch, view, grads, lr)
        return grads._replace(rows=WordGrads(words_W, lists, grads.rows))

    def _words(self, batch: Batch) -> np.ndarray:
        """Return the words whose vectors predict: int64 [W]."""
        threads = self.inner.threads
        windows_B, words_n = batch.windows_B.numpy(), batch.words_n.numpy()
        no_negatives_BK = np.empty((len(windows_B), 0), np.int32)
        is_used_A = np.zeros(2 * self.subwords.words, np.bool_)

        def mark(thread: int) -> None:
            begin, end = share(thread, threads.count, len(windows_B))
            text = words_n, batch.sentences_n.numpy(), batch.first + begin
            drawn = windows_B[begin:end], no_negatives_BK[begin:end]
            list_rows(text, drawn, NO_PATH[:2], is_used_A)

        threads.run(mark)
        return np.flatnonzero(is_used_A) // 2

    def _lists(self, words_W: np.ndarray) -> list[tuple[np.ndarray, ...]]:
        """Return each owner's rows of words, see `list_words`."""
        threads, first = self.inner.threads, self.subwords.first

        def list_owned(owner: int) -> tuple[np.ndarray, ...]:
            begin_V, rows_N = self._bags[owner]
            most = int((begin_V[words_W + 1] - begin_V[words_W]).sum())
            rows_U, begin_U, words_M = np.empty((3, most + 1), np.int32)
            lists = self._counts_A, rows_U, begin_U, words_M
            owned = owner, threads.count, first
            count = list_words(owned, words_W, begin_V, rows_N, *lists)
            return rows_U[:count], begin_U[: count + 1], words_M[:most]

        return threads.run(list_owned)

    def optimizer_step(self, update: Update, view: View, grads: Grads, state: StepState) -> None:
        """Step output vectors, then the rows of words."""
        note_fault(state, 1, math.isfinite(grads.loss))
        if state.fault:
            return
        words_W, lists, rows = grads.rows  # type: ignore[misc]
        if not update.optimizer.formula:
            summed = grads._replace(rows=self._spread_all(rows))
            ReferenceKernels(self.shape).optimizer_step(update, view, summed, state)
            return
        threads, step = self.inner.threads, Stepper(update, view, rows)
        place_W = np.empty(len(words_W), np.int32)

        def step_outputs(owner: int) -> int:
            inputs_U, places_U = rows.sum(2 * owner, 2 * owner + 1, step.count_pairs)
            place_W[np.searchsorted(words_W, inputs_U // 2)] = places_U
            return step(rows.places(2 * owner + 1, 2 * owner + 2))

        def step_composing(owner: int) -> int:
            rows_U, begin_U, words_M = lists[owner]
            return step((rows_U, begin_U, place_W[words_M]))

        note_faults(state, threads.run(step_outputs) + threads.run(step_composing))

    def _spread_all(self, rows: ThreadGrads) -> RowGrads:
        """Return the gradients of output vectors and of the rows of words."""
        rows_U, grad_UD, pairs_U = rows.merge(self.inner.threads)
        is_input_U = rows_U % 2 == 0
        rows_N, place_N = self.subwords.rows_of(rows_U[is_input_U] // 2)
        composing_U, to_N = rows_N.unique(return_inverse=True)

        def spread(sums_U: torch.Tensor) -> torch.Tensor:
            sums = sums_U.new_zeros((len(composing_U), *sums_U.shape[1:]))
            sums.index_add_(0, to_N, sums_U[is_input_U][place_N])
            return torch.cat([sums_U[~is_input_U], sums])

        rows_U = torch.cat([rows_U[~is_input_U], composing_U]).int()
        return RowGrads(None, rows_U, spread(grad_UD), spread(pairs_U), None)


@compiled
def compose(is_first, words_W, share_W, words, lists, records_AR, columns):
    """Add an owner's rows to input vectors, in some columns.

    The first call sets these to zero. share_W: 1 / how many rows each word has; lists: see
    `list_words`.
    """
    rows_U, begin_U, words_M = lists
    begin, end = words
    first, last = columns
    if is_first:
        for w in range(begin, end):
            composed_D = records_AR[2 * words_W[w], first:last]
            for d in range(last - first):
                composed_D[d] = zero
    part_AD, dim = records_AR[:, first:last], last - first
    for u in range(len(rows_U)):
        if u + PREFETCH_ROWS < len(rows_U):
            _prefetch_row(part_AD, rows_U[u + PREFETCH_ROWS], dim, 0)
        for m in range(begin_U[u], begin_U[u + 1]):
            w = words_M[m]
            if begin <= w < end:
                simd.blend(one, part_AD, 2 * words_W[w], share_W[w], part_AD, rows_U[u], dim)


def owned_bags(owner: int, owners: int, subwords: Subwords) -> tuple[np.ndarray, np.ndarray]:
    """Return where the rows of each word begin, and the rows, of an owner."""
    begin_V, rows_N = subwords.begin_V.numpy(), subwords.rows_N.numpy()
    is_owned_N = rows_N // ROWS_PER_OWNER % owners == owner
    count_N = np.concatenate([[0], is_owned_N.cumsum(dtype=np.int64)])
    return count_N[begin_V], rows_N[is_owned_N]


@compiled
def list_words(owned, words_W, begin_V, rows_N, counts_A, rows_U, begin_U, words_M):
    """List the rows of words that an owner has, sorted, and the words of each.

    owned: its number, how many owners there are, and the first row of words; begin_V and rows_N:
    see `owned_bags`; words_M: places in `words_W`, those of row u from begin_U[u] on; counts_A:
    zeros, shared by owners. Returns how many rows there are.
    """
    owner, owners, first = owned
    for word in words_W:
        for i in range(begin_V[word], begin_V[word + 1]):
            counts_A[rows_N[i] - first] += 1
    count = listed = 0
    rows = first + len(counts_A)
    block = first // ROWS_PER_OWNER
    block += (owner - block) % owners  # the first that it owns
    for begin in range(block * ROWS_PER_OWNER, rows, owners * ROWS_PER_OWNER):
        for row in range(max(begin, first), min(begin + ROWS_PER_OWNER, rows)):
            words = counts_A[row - first]
            if words > 0:
                rows_U[count] = row
                begin_U[count] = listed
                counts_A[row - first] = listed  # where its next word goes
                listed += words
                count += 1
    begin_U[count] = listed
    for w in range(len(words_W)):
        for i in range(begin_V[words_W[w]], begin_V[words_W[w] + 1]):
            words_M[counts_A[rows_N[i] - first]] = w
            counts_A[rows_N[i] - first] += 1
    for u in range(count):
        counts_A[rows_U[u] - first] = 0
    return count
