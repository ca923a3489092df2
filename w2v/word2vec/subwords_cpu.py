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
from w2v.word2vec.batch import Batch, Grads, RowGrads, StepState, Update
from w2v.word2vec.cpu import (
    NO_PATH,
    CpuKernels,
    ThreadGrads,
    note_fault,
    note_faults,
    step_arguments,
)
from w2v.word2vec.cpu_loops import (
    PREFETCH_ROWS,
    ROWS_PER_OWNER,
    _prefetch_row,
    compiled,
    listed_rows,
    mark,
    one,
    step_owned,
    step_rows,
    sum_owned,
    zero,
)
from w2v.word2vec.reference import ReferenceKernels
from w2v.word2vec.subwords import SubwordKernels, Subwords


class WordGrads(NamedTuple):
    """Gradients of composed and output vectors, and the words of a batch."""

    words_W: np.ndarray  # int64
    rows: ThreadGrads


class CpuSubwordKernels(SubwordKernels):
    """Subwords of `CpuKernels`, whose threads find the rows of a batch.

    The same number of threads gives the same bits.
    """

    inner: CpuKernels

    @cached_property
    def _memory(self) -> tuple[Any, ...]:
        """Bags and lists of each owner, zeros and places: see `step_words`."""
        owners, subwords = self.inner.threads.count, self.subwords
        bags = [owned_bags(owner, owners, subwords) for owner in range(owners)]
        lists = [np.empty((3, len(rows_N) + 1), np.int32) for _, rows_N in bags]
        return bags, lists, np.zeros(subwords.rows, np.int32), np.empty(subwords.words, np.int32)

    def unique_rows(self, batch: Batch) -> Any:
        return self.inner.unique_rows(batch)

    def gradients(self, batch: Batch, view: View, grads: Any, lr: float) -> Any:
        """Compose the batch's words, then add the gradients of their vectors."""
        threads, words_W = self.inner.threads, self._words(batch)
        bags = self.subwords.begin_V.numpy(), self.subwords.rows_N.numpy()
        records_AR, dim = view.records_SR.numpy(), self.shape.dim

        def compose_share(thread: int) -> None:
            compose(thread, threads.count, words_W, bags, records_AR, dim)

        threads.run(compose_share)
        grads = self.inner.gradients(batch, view, grads, lr)
        return grads._replace(rows=WordGrads(words_W, grads.rows))

    def _words(self, batch: Batch) -> np.ndarray:
        """Return the words whose vectors predict: int64 [W]."""
        text = batch.words_n.numpy(), batch.sentences_n.numpy(), batch.first
        windows_B = batch.windows_B.numpy()
        drawn = windows_B, np.empty((len(windows_B), 0), np.int32)  # no negatives
        is_used_A = np.zeros(2 * self.subwords.words, np.bool_)
        mark(text, drawn, NO_PATH[:2], is_used_A)
        return np.flatnonzero(is_used_A) // 2

    def optimizer_step(self, update: Update, view: View, grads: Grads, state: StepState) -> None:
        """Step output vectors, then the rows of words."""
        note_fault(state, 1, math.isfinite(grads.loss))
        if state.fault:
            return
        words_W, rows = grads.rows  # type: ignore[misc]
        if not update.optimizer.formula:
            summed = grads._replace(rows=self._spread_all(rows))
            ReferenceKernels(self.shape).optimizer_step(update, view, summed, state)
            return
        threads, arguments = self.inner.threads, step_arguments(update, view, rows, self.shape)
        bags, lists, counts_A, place_V = self._memory

        def step_output_rows(owner: int) -> int:
            return step_outputs(owner, rows.listing, place_V, arguments)

        def step_rows_of_words(owner: int) -> int:
            owned = owner, threads.count, self.subwords.first
            memory = bags[owner], counts_A, lists[owner]
            return step_words(owned, words_W, *memory, place_V, arguments)

        faults = threads.run(step_output_rows)
        note_faults(state, faults + threads.run(step_rows_of_words))

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
def compose(thread, threads, words_W, bags, records_AR, dim):
    """Set input vectors of a thread's words to the means of their rows.

    Threads take words in turn, as rare ones are longer. bags: where the rows of each word begin,
    and these rows.
    """
    begin_V, rows_N = bags
    for w in range(thread, len(words_W), threads):
        word = words_W[w]
        first, last = begin_V[word], begin_V[word + 1]
        share = one / np.float32(last - first)
        for i in range(first, last):
            if i + PREFETCH_ROWS < last:
                _prefetch_row(records_AR, rows_N[i + PREFETCH_ROWS], dim, 0)
            elif w + threads < len(words_W):
                later = begin_V[words_W[w + threads]] + i + PREFETCH_ROWS - last
                _prefetch_row(records_AR, rows_N[min(later, len(rows_N) - 1)], dim, 0)
            keep = zero if i == first else one
            simd.blend(keep, records_AR, 2 * word, share, records_AR, rows_N[i], dim)


@compiled
def step_outputs(owner, listing, place_V, arguments):
    """Step an owner's output vectors, and sum gradients of composed ones.

    Sets `place_V` of their words to the places of the sums.
    """
    start, count = sum_owned((2 * owner, 2 * owner + 1), listing, arguments[0])
    rows, places = listing[3][0], listing[3][1]
    for u in range(start, start + count):
        place_V[rows[u] // 2] = places[u]
    return step_owned(owner, (2 * owner + 1, 2 * owner + 2), listing, arguments)


@compiled
def step_words(owned, words_W, bags, counts_A, lists, place_V, arguments):
    """Step an owner's rows of words with the gradients of these words."""
    count = list_words(owned, words_W, bags, counts_A, lists)
    rows_U, begin_U, words_M = listed_rows(lists, 0, count, lists[1, count])
    for m in range(len(words_M)):
        words_M[m] = place_V[words_M[m]]
    return step_rows(owned[0], (rows_U, begin_U, words_M), *arguments)


def owned_bags(owner: int, owners: int, subwords: Subwords) -> tuple[np.ndarray, np.ndarray]:
    """Return where the rows of each word begin, and the rows, of an owner."""
    begin_V, rows_N = subwords.begin_V.numpy(), subwords.rows_N.numpy()
    is_owned_N = rows_N // ROWS_PER_OWNER % owners == owner
    count_N = np.concatenate([[0], is_owned_N.cumsum(dtype=np.int64)])
    return count_N[begin_V], rows_N[is_owned_N]


@compiled
def list_words(owned, words_W, bags, counts_A, lists):
    """List the rows of words that an owner has, sorted, and the words of each.

    owned: its number, how many owners there are, and the first row of words; bags: see
    `owned_bags`; counts_A: zeros, shared by owners; lists: the rows, where the words of each begin,
    and the words. Returns how many rows there are.
    """
    owner, owners, first = owned
    begin_V, rows_N = bags
    rows_U, begin_U, words_M = lists[0], lists[1], lists[2]
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
    for word in words_W:
        for i in range(begin_V[word], begin_V[word + 1]):
            words_M[counts_A[rows_N[i] - first]] = word
            counts_A[rows_N[i] - first] += 1
    for u in range(count):
        counts_A[rows_U[u] - first] = 0
    return count
