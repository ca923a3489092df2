"""Subwords on a CPU: composed vectors and steps of their rows, by numba.

The composed vectors of a batch and the gradients of these fit into a core's cache; those of their
rows do not. So each row is stepped with the gradients of its words, whose sum is not written.

Shapes: V words, W unique words of a batch, N rows of words, D dimensions.
"""

from __future__ import annotations

import math
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from w2v.rows.ops import View
from w2v.system import simd
from w2v.word2vec.batch import Batch, Grads, StepState, Update
from w2v.word2vec.cpu import CpuKernels, ThreadGrads, note_fault, step_arguments
from w2v.word2vec.cpu_loops import (
    PREFETCH_ROWS,
    ROWS_PER_OWNER,
    _prefetch_row,
    compiled,
    one,
    step_owned,
    sum_owned,
    zero,
)
from w2v.word2vec.subwords import SubwordKernels, Subwords


class WordGrads(NamedTuple):
    """Gradients of composed and output vectors, and the words of a batch."""

    words_W: np.ndarray  # int64
    rows: ThreadGrads


class CpuSubwordKernels(SubwordKernels):
    """Subwords of `CpuKernels`, for optimizers with a formula.

    The same number of threads gives the same bits.
    """

    inner: CpuKernels

    @cached_property
    def _memory(self) -> tuple[Any, ...]:
        """Bags of each owner, and room for the place of each word's gradient."""
        owners, subwords = self.inner.threads.count, self.subwords
        bags = [owned_bags(owner, owners, subwords) for owner in range(owners)]
        return bags, np.empty(subwords.words, np.int32)

    def unique_rows(self, batch: Batch) -> Any:
        return self.inner.unique_rows(batch)

    def gradients(self, batch: Batch, view: View, grads: Any, lr: float) -> Any:
        """Compose the batch's words, then add the gradients of their vectors."""
        threads = self.inner.threads
        # Words that no window holds, at the edges of sentences, are composed too.
        end = batch.first + len(batch.windows_B) + batch.window
        is_near_V = np.zeros(self.subwords.words, np.bool_)
        is_near_V[batch.words_n.numpy()[max(0, batch.first - batch.window) : end]] = True
        words_W = np.flatnonzero(is_near_V)
        bags = self.subwords.begin_V.numpy(), self.subwords.rows_N.numpy()
        records_AR, dim = view.records_SR.numpy(), self.shape.dim

        def compose_share(thread: int) -> None:
            compose(thread, threads.count, words_W, bags, records_AR, dim)

        threads.run(compose_share)
        grads = self.inner.gradients(batch, view, grads, lr)
        return grads._replace(rows=WordGrads(words_W, grads.rows))

    def optimizer_step(self, update: Update, view: View, grads: Grads, state: StepState) -> None:
        """Step output vectors, then the rows of words."""
        note_fault(state, 1, math.isfinite(grads.loss))
        if state.fault:
            return
        words_W, rows = grads.rows  # type: ignore[misc]
        threads, (bags, place_V) = self.inner.threads, self._memory
        arguments = step_arguments(update, view, rows)
        place_V[words_W] = -1

        def step_output_rows(owner: int) -> bool:
            return step_outputs(owner, rows.listing, place_V, arguments)

        are_sound = threads.run(step_output_rows)
        words_W = words_W[place_V[words_W] >= 0]

        def step_rows_of_words(owner: int) -> bool:
            begin_V, _ = bags[owner]
            count = int((begin_V[words_W + 1] - begin_V[words_W]).sum())
            rows_1N, places_1N = np.empty((2, 1, count), np.int32)
            list_rows(words_W, bags[owner], place_V, rows_1N, places_1N)
            # As if one thread had found them all, in one part.
            found = rows_1N, places_1N, np.array([[0, count]])
            listing = found, 0, rows.listing[2], np.empty((3, count + 1), np.int32)
            return step_owned(owner, (0, 1), listing, arguments)

        are_sound += threads.run(step_rows_of_words)
        note_fault(state, 2, all(are_sound))


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


def owned_bags(owner: int, owners: int, subwords: Subwords) -> tuple[np.ndarray, np.ndarray]:
    """Return where the rows of each word begin, and the rows, of an owner."""
    begin_V, rows_N = subwords.begin_V.numpy(), subwords.rows_N.numpy()
    is_owned_N = rows_N // ROWS_PER_OWNER % owners == owner
    count_N = np.concatenate([[0], is_owned_N.cumsum(dtype=np.int64)])
    return count_N[begin_V], rows_N[is_owned_N]


@compiled
def list_rows(words_W, bags, place_V, rows_1N, places_1N):
    """List an owner's rows of words, with the places of the words' gradients."""
    begin_V, rows_N = bags
    n = 0
    for word in words_W:
        for i in range(begin_V[word], begin_V[word + 1]):
            rows_1N[0, n] = rows_N[i]
            places_1N[0, n] = place_V[word]
            n += 1
