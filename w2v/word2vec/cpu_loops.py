"""Loops that numba compiles for cpu.py.

Each function works on one thread's share without the interpreter's lock. The machine code is kept
on disk if a folder for it can be written. Parts of a loop are small functions, which the compiler
inlines. Loops over part of a row become vector instructions only if they run from 0 over a view of
that part: a column of the whole row might be negative, which Python counts from the end.

Shapes: n words of a text, B centers, K negatives, T targets of a center, V words, A rows, U unique
rows of a thread, C positions of a window, D dimensions, P = D padded to whole vectors,
N = C * T pairs of a center.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch

from w2v.system import simd
from w2v.system.jit import compiled as jit
from w2v.system.simd import LANES

BLOCK = 256  # centers that a thread of sequential SGD takes at a time
FACTORS = 64  # each at most 2, whose product float32 can hold
PREFETCH_CENTERS = 3  # centers by which rows are fetched into the CPU's cache early
# The same for the output rows of sequential SGD, and the parts of a center over which they are
# spread: all at once hold a core up (docs/dev/log.md). With summed gradients parts are slower.
SGD_PREFETCH_CENTERS = 5
SGD_PREFETCH_PARTS = 4
PREFETCH_ROWS = 4  # rows by which an owner of rows fetches them early
ROWS_PER_OWNER = 64  # adjacent rows of one thread, so that threads do not share cache lines
SGD, ADAGRAD, RMSPROP, ADADELTA, ADAM, ADAMW, ADAMAX, ROWWISE_ADAGRAD, ROWWISE_ADAM = range(9)
# Their names in `RowOptimizer.formula`.
FORMULAS = "sgd adagrad rmsprop adadelta adam adamw adamax rowwiseadagrad rowwiseadam".split()
zero, half, one = np.float32(0), np.float32(0.5), np.float32(1)
FAST: dict[str, Any] = {"fastmath": {*simd.FAST}, "error_model": "numpy"}
# Nothing is allocated, so that references to arrays need no counts: those took half of the time,
# and numba's runtime, which keeps them, takes 20 ms to start.
compiled = jit(_nrt=False, **FAST)
inlined = jit(inline="always", **FAST)  # into its caller; a call costs 3 to 14 % in hot loops


@inlined
def _prefetch_row(matrix, row, dim, writes):
    for d in range(0, dim, LANES):
        simd.prefetch(matrix, row, d, writes)


@compiled
def _sigmoids(count, logits_N, sigmoids_N, factors_N, bits_N):
    """Compute sigmoid(logit) and the factor 1 + exp(-|logit|).

    The logarithm of the factor is softplus(-|logit|). exp(x) is 2 ** n * exp(rest), by the
    polynomial of Cephes' expf, in operations that become vectors. `bits_N` is the memory of
    `factors_N`, where 2 ** n is built as a bit pattern.
    """
    for i in range(count):
        x = max(-abs(logits_N[i]), np.float32(-87))
        n = np.int32(np.floor(x * np.float32(1.44269504) + half))
        bits_N[i] = (n + np.int32(127)) << np.int32(23)
    for i in range(count):
        x = max(-abs(logits_N[i]), np.float32(-87))
        r = x - np.floor(x * np.float32(1.44269504) + half) * np.float32(0.69314718)
        p = np.float32(1.9875691e-4) * r + np.float32(1.3981999e-3)
        p = p * r + np.float32(8.3334519e-3)
        p = p * r + np.float32(4.1665796e-2)
        p = p * r + np.float32(1.6666666e-1)
        e = ((p * r + half) * r * r + r + one) * factors_N[i]
        factors_N[i] = one + e
        sigmoids_N[i] = (one if logits_N[i] >= 0 else e) / (one + e)


@compiled
def _window(sentences_n, at, reach):
    """Return the window [left, right) of `at` inside its sentence."""
    left, right = max(at - reach, 0), min(at + reach + 1, len(sentences_n))
    while sentences_n[left] != sentences_n[at]:
        left += 1
    while sentences_n[right - 1] != sentences_n[at]:
        right -= 1
    return left, right


class UniqueRows(NamedTuple):
    """A thread's unique rows, with the summed gradient of each."""

    index_A: np.ndarray  # int32, where each row is among the unique ones, or -1
    rows_U: np.ndarray  # int32
    grad_UP: np.ndarray
    pairs_U: np.ndarray  # int32, how many pairs each gradient sums
    count_1: np.ndarray  # int64, how many unique rows there are
    owned_rows_U: np.ndarray  # int32, the rows sorted by the thread that owns them
    owned_indices_U: np.ndarray  # int32, their indices
    starts_P: np.ndarray  # int64, where each part of the rows begins among these, see `_part`


@inlined
def _index(row, pairs, unique):
    """Return the index of a row among the unique rows; count its pairs.

    A row that the thread has not touched yet is added, with a gradient of zero.
    """
    index = unique.index_A[row]
    if index < 0:
        index = unique.count_1[0]
        unique.count_1[0] += 1
        unique.index_A[row] = index
        unique.rows_U[index] = row
        unique.pairs_U[index] = 0
        unique.grad_UP[index] = zero
    unique.pairs_U[index] += pairs
    return index


@inlined
def _add(row, values_NP, place, pairs, unique):
    """Add values_NP[place] to the gradient of a row, a sum over pairs."""
    padded = values_NP.shape[1]  # or not, of a gradient from another rank
    index = _index(row, pairs, unique)
    simd.blend(one, unique.grad_UP, index, one, values_NP, place, padded)


class BatchArrays(NamedTuple):
    """A batch, the records of rows and factors of gradients."""

    words_n: np.ndarray
    sentences_n: np.ndarray
    first: int  # the first center's place in the text
    windows_B: np.ndarray
    negatives_BK: np.ndarray
    window: int  # the largest one
    begin_V: np.ndarray  # of a `Tree`, as are the next two; empty without a tree
    nodes_P: np.ndarray
    codes_P: np.ndarray
    records_AR: np.ndarray
    place_A: np.ndarray  # int32, where rows borrowed from other ranks are in these
    dim: int
    mean: bool  # whether CBOW predicts by the mean of the context words' vectors, or by their sum
    weight_d: np.ndarray  # a factor by the distance of the context word; in place, lr is in it
    factors_V: np.ndarray  # of gradients of input rows in place: for each row, or one for all


class Buffers(NamedTuple):
    """A thread's memory for a center, and for gradients of words near it."""

    context_CP: np.ndarray  # rows of the context words; of CBOW, their mean or sum
    grad_CP: np.ndarray  # gradients of these
    ring_CP: np.ndarray  # summed gradients of context words, by the word's place in the text
    labels_T: np.ndarray
    times_T: np.ndarray  # how often each target counts
    losses_T: np.ndarray
    products_T: np.ndarray  # of the factors of a target's pairs, see `_sigmoids`
    logits_N: np.ndarray
    errors_N: np.ndarray
    factors_N: np.ndarray
    bits_N: np.ndarray  # the memory of factors_N
    ids_T: np.ndarray  # int64
    indices_T: np.ndarray  # int64, of the targets among the thread's unique rows
    ring_pairs_C: np.ndarray  # int64, how many pairs a row of the ring sums, or -1 for no word


def padded(dim: int) -> int:
    """Return a number of dimensions rounded up to whole vectors."""
    return -(-dim // LANES) * LANES


def make_buffers(dim: int, window: int, targets: int, cbow: bool) -> tuple[np.ndarray, ...]:
    """Return the `Buffers` of a thread.

    Each begins at a cache line, as torch has it: vectors that lie in two lines take two loads, and
    threads that write to the same line wait for each other.
    """
    contexts = 1 if cbow else 2 * window
    places = 2 * window + 1  # of the ring

    def filled(*shape: int, value: float = 0) -> np.ndarray:
        return torch.full(shape, value, dtype=torch.float32).numpy()

    matrices = (filled(height, padded(dim)) for height in (contexts, contexts, places))
    of_targets = *(filled(targets) for _ in range(3)), filled(targets, value=1)
    logits_N, errors_N, factors_N = (filled(contexts * targets + LANES) for _ in range(3))
    of_pairs = logits_N, errors_N, factors_N, factors_N.view(np.int32)
    ids = (torch.zeros(targets, dtype=torch.int64).numpy() for _ in range(2))
    return (*matrices, *of_targets, *of_pairs, *ids, torch.full((places,), -1).numpy())


@inlined
def _place(row, borrowed, batch):
    """Return where a row is in the records."""
    return np.int64(batch.place_A[row]) if borrowed else np.int64(row)


@inlined
def _list_targets(center, borrowed, batch, memory):
    """List the places of a center's targets, their labels and their counts.

    A negative that is drawn twice counts twice; one that is the center does not count. Returns how
    many targets there are, which all differ, and how many count.
    """
    ids_T, labels_T, times_T = memory.ids_T, memory.labels_T, memory.times_T
    word = batch.words_n[batch.first + center]
    targets = counted = 0
    if batch.negatives_BK.shape[1]:
        ids_T[0], labels_T[0], times_T[0] = _place(2 * word + 1, borrowed, batch), one, one
        targets = counted = 1
        for k in range(batch.negatives_BK.shape[1]):
            row = _place(2 * batch.negatives_BK[center, k] + 1, borrowed, batch)
            t = 0
            while t < targets and ids_T[t] != row:
                t += 1
            if t == targets:
                ids_T[t], labels_T[t], times_T[t] = row, zero, one
                targets += 1
            elif t > 0:
                times_T[t] += one
            counted += t > 0
    if len(batch.begin_V):
        for p in range(batch.begin_V[word], batch.begin_V[word + 1]):
            ids_T[targets] = _place(2 * batch.nodes_P[p] + 1, borrowed, batch)
            times_T[targets] = one
            labels_T[targets] = one - np.float32(batch.codes_P[p])
            targets += 1
            counted += 1
    return targets, counted


@inlined
def _add_losses(loss, product, targets, memory):
    """Add the losses of a center's targets, and the factors to a product.

    The logarithm of the product is a part of the loss: the loss of a pair is softplus(x), or
    softplus(-x) = softplus(x) - x, and softplus(x) = max(0, x) + log(1 + exp(-|x|)).
    """
    for t in range(targets):
        loss += memory.times_T[t] * memory.losses_T[t]
        for _ in range(int(memory.times_T[t])):
            product *= memory.products_T[t]
            if product > 1e200:
                loss += math.log(product)
                product = 1.0
        memory.losses_T[t] = zero
        memory.products_T[t] = one
    return loss, product


@inlined
def _errors(loss, product, contexts, targets, before, batch, memory):
    """Compute the errors of all pairs, times their weights; add their losses.

    `before`: how many context words are before the center.
    """
    labels_T, logits_N, errors_N = memory.labels_T, memory.logits_N, memory.errors_N
    numbers = (contexts * targets + LANES - 1) // LANES * LANES  # in whole vectors
    _sigmoids(numbers, logits_N, errors_N, memory.factors_N, memory.bits_N)
    for c in range(contexts):
        n = c * targets
        weight = batch.weight_d[abs(c + (c >= before) - before)]
        for t in range(targets):
            memory.losses_T[t] += max(logits_N[n + t], zero) - labels_T[t] * logits_N[n + t]
            memory.products_T[t] *= memory.factors_N[n + t]
            errors_N[n + t] = (errors_N[n + t] - labels_T[t]) * memory.times_T[t] * weight
        if c % FACTORS == FACTORS - 1 or c == contexts - 1:
            loss, product = _add_losses(loss, product, targets, memory)
    return loss, product


def _prefetching(in_place: bool, borrowed: bool) -> tuple[Callable, Callable]:
    """Return functions that fetch rows of later centers into the CPU's cache."""
    subtracts = int(in_place)
    early = SGD_PREFETCH_CENTERS if in_place else PREFETCH_CENTERS
    parts = SGD_PREFETCH_PARTS if in_place else 1

    @inlined
    def fetch_targets(part, center, batch, unique):
        """Prefetch a part of the rows of a center and its negatives."""
        negatives_K = batch.negatives_BK[center]
        rows = len(negatives_K) + (len(negatives_K) > 0)
        for t in range(part * rows // parts, min((part + 1) * rows // parts, rows)):
            word = batch.words_n[batch.first + center]
            if t > 0:
                word = negatives_K[t - 1]
            row = _place(2 * word + 1, borrowed, batch)
            _prefetch_row(batch.records_AR, row, batch.dim, subtracts)
            if not in_place and unique.index_A[row] >= 0:
                _prefetch_row(unique.grad_UP, unique.index_A[row], batch.dim, 0)

    @inlined
    def fetch_path_and_context(at, batch):
        """Prefetch the path of a center, and the word that enters its window."""
        if len(batch.begin_V):
            word = batch.words_n[at]
            for p in range(batch.begin_V[word], batch.begin_V[word + 1]):
                row = _place(2 * batch.nodes_P[p] + 1, borrowed, batch)
                _prefetch_row(batch.records_AR, row, batch.dim, subtracts)
        if at + batch.window < len(batch.words_n):
            row = _place(2 * batch.words_n[at + batch.window], borrowed, batch)
            _prefetch_row(batch.records_AR, row, batch.dim, subtracts)

    @inlined
    def fetch_early(center, end, batch, unique):
        """Begin to prefetch for a later center; return that of `fetch_targets`."""
        later = min(center + early, end - 1)
        fetch_targets(0, later, batch, unique)
        if center + PREFETCH_CENTERS < end:
            fetch_path_and_context(batch.first + center + PREFETCH_CENTERS, batch)
        return later

    return fetch_early, fetch_targets


def _contexts(in_place: bool, cbow: bool, borrowed: bool) -> tuple[Callable, Callable]:
    """Return functions that load context words, and add their gradients."""

    @inlined
    def load_contexts(left, at, right, share, batch, memory):
        """Load the rows of context words; those of CBOW become one."""
        if cbow:
            memory.context_CP[0] = zero
        for c in range(left, right):
            if c == at:
                continue
            row = _place(2 * batch.words_n[c], borrowed, batch)
            if cbow:
                scale = share if batch.mean else one
                simd.blend(one, memory.context_CP, 0, scale, batch.records_AR, row, batch.dim)
            else:
                n = c - left - (c > at)
                simd.blend(0, memory.context_CP, n, one, batch.records_AR, row, batch.dim)

    @inlined
    def add_context_gradients(left, at, right, share, counted, batch, memory):
        """Add the gradients of context words to their rows, or to the ring."""
        scale = share if cbow and not batch.mean else one  # see `Objective`
        for c in range(left, right):
            if c == at:
                continue
            n = 0 if cbow else c - left - (c > at)
            if in_place:
                word = batch.words_n[c]
                factor = scale * batch.factors_V[min(word, len(batch.factors_V) - 1)]
                row = 2 * word
                simd.blend(one, batch.records_AR, row, -factor, memory.grad_CP, n, batch.dim)
                continue
            ring_CP, ring_pairs_C = memory.ring_CP, memory.ring_pairs_C
            place = c % len(ring_pairs_C)
            keep = one if ring_pairs_C[place] >= 0 else zero  # of what an earlier word left
            ring_pairs_C[place] = max(ring_pairs_C[place], 0) + counted
            simd.blend(keep, ring_CP, place, scale, memory.grad_CP, n, ring_CP.shape[1])

    return load_contexts, add_context_gradients


def _ring(borrowed: bool) -> tuple[Callable, Callable]:
    """Return functions that add what is in the ring to gradients of rows."""

    @inlined
    def take_from_ring(c, batch, memory, unique):
        """Add what the ring has of a word to the gradient of its row."""
        place = c % len(memory.ring_pairs_C)
        if memory.ring_pairs_C[place] >= 0:
            pairs = memory.ring_pairs_C[place]
            row = _place(2 * batch.words_n[c], borrowed, batch)
            _add(row, memory.ring_CP, place, pairs, unique)
            memory.ring_pairs_C[place] = -1

    @inlined
    def empty_ring(end, batch, memory, unique):
        """Take the rest from the ring, once the centers before `end` are trained."""
        for c in range(max(end - batch.window - 1, 0), min(end + batch.window, len(batch.words_n))):
            take_from_ring(c, batch, memory, unique)

    return take_from_ring, empty_ring


def _schedule(in_place: bool) -> Callable:
    """Return the function that gives centers to a thread."""

    @inlined
    def next_centers(thread, shares_nL):
        """Take a thread's next centers [begin, end), if some are left.

        The batch is cut into a stretch for each thread, as neighboring centers have words in
        common, whose rows stay in the core's cache. In place, a thread takes the blocks of its own
        stretch, then those left of others'; otherwise its stretch as a whole. shares_nL: first
        where the centers of each stretch begin that no thread has taken, then where they end.
        """
        begin, end = shares_nL[thread, 0], shares_nL[thread, 1]
        if not in_place:
            shares_nL[thread, 0] = end
            return begin, end
        for n in range(len(shares_nL)):
            stretch = (thread + n) % len(shares_nL)
            begin, end = simd.fetch_add(shares_nL, stretch, 0, BLOCK), shares_nL[stretch, 1]
            if begin < end:
                return begin, min(begin + BLOCK, end)
        return 0, 0

    return next_centers


@functools.cache
def compile_gradients(most: int, in_place: bool, cbow: bool, borrowed: bool) -> Callable:
    """Compile the loop of a thread over its centers, as in reference.py.

    CBOW is skip-gram with one context row, the mean or the sum of the context words, whose gradient
    each of them gets. `most` targets are taken at a time: their rows stay in registers. To compile
    the dimensions in gains 3 to 9 %, and takes 3 s for each vector size.

    With `borrowed`, rows are those of other ranks, which are found by `BatchArrays.place_A`. With
    `in_place`, each center's gradients are subtracted from the rows at once. Otherwise they
    are added to those of the thread's unique rows. Gradients of context words are then first summed
    in a ring, until the windows have passed the word: a word is in many windows, one after another.

    The function takes the number of the thread, the centers that are left (see `next_centers`),
    and as plain tuples (named ones take longer to pass) `BatchArrays`, and the thread's `Buffers`
    and `UniqueRows`. It returns the summed loss and the number of positive pairs.
    """
    fetch_early, fetch_targets = _prefetching(in_place, borrowed)
    load_contexts, add_context_gradients = _contexts(in_place, cbow, borrowed)
    (take_from_ring, empty_ring), next_centers = _ring(borrowed), _schedule(in_place)

    # One function: what it calls and is not inlined here, LLVM would compile twice.
    @compiled
    def loop(thread, shares_nL, batch, memory, unique):
        """Train a thread's centers; return their loss and pairs."""
        batch, memory, unique = BatchArrays(*batch), Buffers(*memory), UniqueRows(*unique)
        dim, records_AR = batch.dim, batch.records_AR
        context_CP, grad_CP, errors_N = memory.context_CP, memory.grad_CP, memory.errors_N
        ids_T, indices_T = memory.ids_T, memory.indices_T
        grad_UP = None if in_place else unique.grad_UP
        loss, product, pairs = 0.0, 1.0, 0
        center = end = 0
        while True:
            center += 1
            if center >= end:
                center, end = next_centers(thread, shares_nL)
                if center >= end:
                    break
            at = batch.first + center
            later = fetch_early(center, end, batch, unique)
            if not in_place and at > batch.window:  # the windows have passed this word
                take_from_ring(at - batch.window - 1, batch, memory, unique)

            left, right = _window(batch.sentences_n, at, batch.windows_B[center])
            if right - left < 2:
                continue
            contexts = 1 if cbow else right - left - 1
            pairs += contexts
            share = one / np.float32(right - left - 1)

            # List the targets, load the contexts, and compute the logits of all pairs.
            targets, counted = _list_targets(center, borrowed, batch, memory)
            load_contexts(left, at, right, share, batch, memory)
            simd.dots(context_CP, contexts, records_AR, ids_T, targets, most, dim, memory.logits_N)
            if in_place:
                fetch_targets(1, later, batch, unique)

            # Their errors, losses and gradients; loops are unrolled for the usual number of them.
            if targets == most:
                loss, product = _errors(loss, product, contexts, most, at - left, batch, memory)
            else:
                loss, product = _errors(loss, product, contexts, targets, at - left, batch, memory)
            if in_place:
                fetch_targets(2, later, batch, unique)
            else:
                for t in range(targets):
                    times = contexts * int(memory.times_T[t])
                    indices_T[t] = _index(ids_T[t], times, unique)
            simd.pair_gradients(
                errors_N,
                context_CP,
                contexts,
                records_AR,
                ids_T,
                targets,
                most,
                dim,
                grad_CP,
                grad_UP,
                indices_T,
            )
            if in_place:
                fetch_targets(3, later, batch, unique)
            add_context_gradients(left, at, right, share, counted, batch, memory)
        if not in_place:
            empty_ring(batch.first + shares_nL[thread, 1], batch, memory, unique)
            sort_by_owner(unique, len(shares_nL))
        return loss + math.log(product), pairs

    return loop


@inlined
def _part(row, owners):
    """Return the part that has a row: owners have even rows, then odd."""
    return row // ROWS_PER_OWNER % owners * 2 + row % 2


@compiled
def sort_by_owner(unique, owners):
    """Sort a thread's unique rows and their indices by owner, even rows first.

    The rows are forgotten in `index_A` and `count_1`. Those of part p, see `_part`, are at places
    starts_P[p] to starts_P[p + 1].
    """
    unique = UniqueRows(*unique)
    rows_U, starts_P = unique.rows_U, unique.starts_P
    starts_P[: 2 * owners + 1] = 0
    for u in range(unique.count_1[0]):
        starts_P[_part(rows_U[u], owners)] += 1
        unique.index_A[rows_U[u]] = -1
    for part in range(2 * owners):  # at first, where the rows of each part end
        starts_P[part + 1] += starts_P[part]
    for u in range(unique.count_1[0] - 1, -1, -1):
        part = _part(rows_U[u], owners)
        starts_P[part] -= 1
        unique.owned_rows_U[starts_P[part]] = rows_U[u]
        unique.owned_indices_U[starts_P[part]] = u
    unique.count_1[0] = 0


@compiled
def list_places(parts, listing):
    """List the rows of parts [begin, end) and their gradients' places.

    The gradients of row u are at places_M[begin_U[u]] to places_M[begin_U[u + 1] - 1] of `grad_NP`,
    sorted by thread. Returns where the lists begin in their memory, for `listed_rows`, and the
    number of rows and that of gradients.

    listing: the last three of `UniqueRows`, of all threads; for how many gradients each has room;
    -1 for each row; and the memory of the lists, [3, N], of which each part has its own.
    """
    begin, end = parts
    (owned_rows_nU, owned_indices_nU, starts_nP), most, first_A, lists_3N = listing
    start = begin  # each list of beginnings has one entry more than there are rows
    for n in range(len(starts_nP)):
        start += starts_nP[n, begin]
    rows_U, begin_U, places_M = lists_3N[0, start:], lists_3N[1, start:], lists_3N[2, start:]
    count = 0
    for n in range(len(starts_nP)):
        for i in range(starts_nP[n, begin], starts_nP[n, end]):
            row = owned_rows_nU[n, i]
            if first_A[row] < 0:
                first_A[row] = count
                rows_U[count] = row
                begin_U[count + 1] = 0
                count += 1
            begin_U[first_A[row] + 1] += 1  # at first, how many gradients it has
    total = 0
    begin_U[0] = 0
    for u in range(count):
        gradients = begin_U[u + 1]
        begin_U[u + 1] = total  # then where the next one goes
        total += gradients
    for n in range(len(starts_nP)):
        for i in range(starts_nP[n, begin], starts_nP[n, end]):
            u = first_A[owned_rows_nU[n, i]]
            places_M[begin_U[u + 1]] = n * most + owned_indices_nU[n, i]
            begin_U[u + 1] += 1
    for u in range(count):
        first_A[rows_U[u]] = -1
    return start, count, total


@inlined
def listed_rows(lists, start, count, total):
    """Return rows, beginnings and places of what `list_places` has listed."""
    rows_U, begin_U = lists[0, start : start + count], lists[1, start : start + count + 1]
    return rows_U, begin_U, lists[2, start : start + total]


@inlined
def _sum_gradients(begin, end, places_M, grads, sums_UP, u):
    """Set sums_UP[u] to the sum of gradients; return their pairs."""
    grad_NP, pairs_N = grads
    padded, pairs = grad_NP.shape[1], np.int32(0)
    for m in range(begin, end):
        if m + PREFETCH_ROWS < len(places_M):
            _prefetch_row(grad_NP, places_M[m + PREFETCH_ROWS], padded, 0)
        place = places_M[m]
        if m == begin:
            simd.blend(0, sums_UP, u, one, grad_NP, place, padded)
        else:
            simd.blend(one, sums_UP, u, one, grad_NP, place, padded)
        if len(pairs_N):
            pairs += pairs_N[place]
    return pairs


@compiled
def sum_owned(parts, listing, grads):
    """Sum the gradients of the rows of parts [begin, end), and their pairs.

    Each sum is in the place of the row's first gradient. Returns where rows and places begin in the
    first two lists of the memory, see `list_places`, and how many there are.
    """
    grad_NP, pairs_N = grads
    start, count, total = list_places(parts, listing)
    _, begin_U, places_M = listed_rows(listing[3], start, count, total)
    for u in range(count):
        place = places_M[begin_U[u]]
        pairs = _sum_gradients(begin_U[u], begin_U[u + 1], places_M, grads, grad_NP, place)
        if len(pairs_N):
            pairs_N[place] = pairs
        begin_U[u] = place
    return start, count


@inlined
def _step_row(record_R, grad_D, step, formula, states, dim, constants):
    """Step a row by a formula; `step` is the count that corrects bias."""
    lr, eps, weight_decay, lr_decay = constants[:4]
    beta1, rest1, log_beta1, beta2, rest2, log_beta2 = constants[4:10]
    rate = np.float32(lr / -math.expm1(step * log_beta1))  # lr / (1 - beta1 ** step)
    unbias = np.float32(-1 / math.expm1(step * log_beta2))  # 1 / (1 - beta2 ** step)
    if formula == ADAGRAD:
        rate = np.float32(lr / (1 + (step - 1) * lr_decay))
    lr, eps, weight_decay = np.float32(lr), np.float32(eps), np.float32(weight_decay)
    beta1, rest1 = np.float32(beta1), np.float32(rest1)
    beta2, rest2 = np.float32(beta2), np.float32(rest2)
    # The weight, and the first and the last of its states.
    weight_D, first_D = record_R[:dim], record_R[dim : 2 * dim]
    last_D = record_R[states * dim : (states + 1) * dim]
    if formula == ADAMW:
        for d in range(dim):
            weight_D[d] *= one - lr * weight_decay
    elif weight_decay != 0:
        for d in range(dim):
            grad_D[d] += weight_decay * weight_D[d]
    mean_square = zero
    if formula >= ROWWISE_ADAGRAD:
        for d in range(dim):
            mean_square += grad_D[d] * grad_D[d]
        mean_square /= np.float32(dim)

    if formula == SGD:
        for d in range(dim):
            weight_D[d] -= lr * grad_D[d]
    elif formula == ADAGRAD:
        for d in range(dim):
            square = first_D[d] + grad_D[d] * grad_D[d]
            first_D[d] = square
            weight_D[d] -= rate * grad_D[d] / (np.sqrt(square) + eps)
    elif formula == RMSPROP:  # beta1 is its alpha
        for d in range(dim):
            square = beta1 * first_D[d] + rest1 * grad_D[d] * grad_D[d]
            first_D[d] = square
            weight_D[d] -= lr * grad_D[d] / (np.sqrt(square) + eps)
    elif formula == ADADELTA:  # beta1 is its rho
        for d in range(dim):
            square = beta1 * first_D[d] + rest1 * grad_D[d] * grad_D[d]
            first_D[d] = square
            delta = np.sqrt(last_D[d] + eps) / np.sqrt(square + eps) * grad_D[d]
            last_D[d] = beta1 * last_D[d] + rest1 * delta * delta
            weight_D[d] -= lr * delta
    elif formula == ROWWISE_ADAGRAD:
        record_R[dim] += mean_square
        root = np.sqrt(record_R[dim]) + eps
        for d in range(dim):
            weight_D[d] -= lr * grad_D[d] / root
    else:
        mean_D = grad_D
        if states == 2:
            mean_D = first_D
            for d in range(dim):
                first_D[d] += rest1 * (grad_D[d] - first_D[d])
        if formula == ADAMAX:
            for d in range(dim):
                last_D[d] = max(beta2 * last_D[d], abs(grad_D[d]) + eps)
                weight_D[d] -= rate * mean_D[d] / last_D[d]
        elif formula == ROWWISE_ADAM:
            square = beta2 * record_R[2 * dim] + rest2 * mean_square
            record_R[2 * dim] = square
            root = np.sqrt(square * unbias) + eps
            for d in range(dim):
                weight_D[d] -= rate * mean_D[d] / root
        else:
            for d in range(dim):
                square = beta2 * last_D[d] + rest2 * grad_D[d] * grad_D[d]
                last_D[d] = square
                weight_D[d] -= rate * mean_D[d] / (np.sqrt(square * unbias) + eps)


@compiled
def step_owned(owner, parts, listing, arguments):
    """Step the rows of an owner's parts; see `list_places` and `step_rows`."""
    start, count, total = list_places(parts, listing)
    return step_rows(owner, listed_rows(listing[3], start, count, total), *arguments)


@compiled
def step_rows(owner, rows, grads, spare, formula, states, records_AR, step_column, constants, cap):
    """Step unique rows of an owner with the sums of their gradients.

    The formulas are those of optim.cu, which says what a single state of Adam is. The gradient is
    scaled by cap / pairs if it sums more than `cap` pairs and cap is not 0. A row that would not
    stay finite is left as it was; returns whether there was none.

    rows: the unique rows and where their gradients are, see `list_places`; grads: the gradients,
    and their pairs, empty if cap is 0. spare: of each owner a record and a gradient, and its size.
    """
    rows_U, begin_U, places_M = rows
    before_nR, sums_nP, dim = spare
    before_R, grad_D = before_nR[owner], sums_nP[owner, :dim]
    width = records_AR.shape[1]
    are_sound = True
    for u in range(len(rows_U)):
        if u + PREFETCH_ROWS < len(rows_U):
            _prefetch_row(records_AR, rows_U[u + PREFETCH_ROWS], width, 0)
        row = rows_U[u]
        record_R = records_AR[row]
        pairs = _sum_gradients(begin_U[u], begin_U[u + 1], places_M, grads, sums_nP, owner)
        if 0 < cap < pairs:
            scale = np.float32(cap / pairs)
            for d in range(dim):
                grad_D[d] *= scale
        for r in range(width):
            before_R[r] = record_R[r]

        step = constants[10]  # the count of steps: the table's, or the row's own
        if step_column >= 0:
            step = record_R[step_column] + 1.0
            record_R[step_column] = step
        _step_row(record_R, grad_D, step, formula, states, dim, constants)

        # Zero times a number is zero, unless that is infinite or NaN.
        zeros = zero
        for r in range(width):
            zeros += record_R[r] * zero
        if zeros != 0:
            are_sound = False
            for r in range(width):
                record_R[r] = before_R[r]
    return are_sound


@compiled
def add_received(begin, end, owners, ids_M, grad_MD, pairs_M, unique):
    """Add the gradients [begin, end) of other ranks to a thread's unique rows."""
    unique = UniqueRows(*unique)
    for m in range(begin, end):
        _add(ids_M[m], grad_MD, m, pairs_M[m] if len(pairs_M) else 0, unique)
    sort_by_owner(unique, owners)


@inlined
def _splitmix64(counter, mixed_seed):
    """Return 64 random bits, as random.py does."""
    bits = np.uint64(counter) * np.uint64(0x9E3779B97F4A7C15) + mixed_seed
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> np.uint64(31))


@inlined
def _unit(bits):
    """Return a number of [0, 1) from random bits."""
    return np.float64(bits >> np.uint64(11)) * 2.0**-53


@compiled
def draw(begin, end, key, lowest, widest, pool, cdf_V, starts, windows_B, negatives_BK):
    """Draw windows and negatives of centers [begin, end), see reference.py.

    starts: for equal parts of [0, 1), the entry at which the search of the distribution begins.
    There is a power of two of them, so that rounding cannot lead past the entry.
    """
    centers, negatives = negatives_BK.shape
    pool_size, pool_key, own, fresh, part, parts = pool
    length = len(cdf_V) // parts
    for b in range(begin, end):
        bits = _splitmix64(b, key) >> np.uint64(11)
        windows_B[b] = lowest + np.int64(bits % np.uint64(widest - lowest + 1))
        for k in range(negatives):
            bits = _splitmix64(centers + b * negatives + k, key)
            uniform = _unit(bits)
            if pool_size:
                place = np.int64((bits >> np.uint64(11)) % np.uint64(pool_size))
                pooled = place + _unit(_splitmix64(place, pool_key))
                if place >= own:
                    uniform = (pooled - own) / (pool_size - own)
                else:
                    uniform = (part + (uniform if fresh else pooled / own)) / parts
            entry = starts[min(np.int64(uniform * len(starts)), len(starts) - 1)]
            while entry < len(cdf_V) - 1 and cdf_V[entry] <= uniform:
                entry += 1
            if parts > 1:  # divisions take long
                entry = entry % length * parts + (parts - 1 - entry // length)
            negatives_BK[b, k] = entry


@compiled
def subsample(begin, end, key, words_N, edges_S, keep_V, trained_S, kept_n, sentences_n):
    """Keep some words of the sentences [begin, end).

    They are written from place edges_S[begin] on. Returns how many words are kept.
    """
    n = edges_S[begin]
    for sentence in range(begin, end):
        if not trained_S[sentence]:
            continue
        for i in range(edges_S[sentence], edges_S[sentence + 1]):
            word = words_N[i]
            kept_n[n] = word
            sentences_n[n] = sentence
            n += _unit(_splitmix64(i, key)) < keep_V[word]
    return n - edges_S[begin]


@compiled
def interleave(words_n, sentences_n, block_words, batches, mixed_words_n, mixed_sentences_n):
    """Distribute the blocks of a text over its batches in turn.

    As `reference.interleave`, whose last block stays in place if it is not full.
    """
    blocks = len(words_n) // block_words
    number = n = 0  # of blocks and of words that are written
    for batch in range(batches):
        for block in range(batch, blocks, batches):
            for i in range(block * block_words, (block + 1) * block_words):
                mixed_words_n[n] = words_n[i]
                mixed_sentences_n[n] = 2 * sentences_n[i] + number % 2
                n += 1
            number += 1
    for i in range(n, len(words_n)):
        mixed_words_n[i] = words_n[i]
        mixed_sentences_n[i] = 2 * sentences_n[i] + number % 2
