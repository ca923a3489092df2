"""Loops that numba compiles for cpu.py.

Each function works on one thread's share without the interpreter's lock. The machine code is kept
on disk if a folder for it can be written. Parts of a loop are small functions, which the compiler
inlines. Loops become vectors only over views that begin at 0: numba counts a column of a matrix
from its end if it is negative.

Shapes: n words of a text, B centers, K negatives, T targets of a center, V rows of a table, U
unique rows of a thread, C positions of a window, D dimensions, P = D padded to whole vectors,
N = C * T pairs of a center.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from w2v.system import simd
from w2v.system.jit import compiled as jit
from w2v.system.simd import LANES

BLOCK = 256  # centers that a thread of sequential SGD takes at a time
LOGARITHMS = 64  # contexts after which the logarithm of a product of factors is due
PREFETCH_CENTERS = 3  # centers by which rows are fetched into the CPU's cache early
# The same for the output rows of sequential SGD, and the parts of a center over which they are
# spread: all at once hold a core up (docs/log.md). With summed gradients parts are slower.
SGD_PREFETCH_CENTERS = 5
SGD_PREFETCH_PARTS = 4
PREFETCH_ROWS = 4  # rows by which an owner of rows fetches them early
ROWS_PER_OWNER = 64  # adjacent rows of one thread, so that threads do not share cache lines
SGD, ADAGRAD, RMSPROP, ADAM, ADAMW, ADAMAX = range(6)
zero, half, one = np.float32(0), np.float32(0.5), np.float32(1)
# Vectors need sums in any order and fused products. NaN and infinity stay what they are.
FAST: dict[str, Any] = {"fastmath": {"reassoc", "contract", "nsz", "arcp"}, "error_model": "numpy"}
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


@inlined
def _add(row, values_NP, place, pairs, unique):
    """Add values_NP[place] to the gradient of a row, a sum over pairs.

    A row that the thread has not touched yet is added to its unique rows.
    """
    index_V, rows_U, grad_UP, pairs_U, count_1, _, _, _ = unique
    padded = grad_UP.shape[1]
    index = index_V[row]
    if index >= 0:
        pairs_U[index] += pairs
        simd.blend(one, grad_UP, index, one, values_NP, place, padded)
    else:
        index = count_1[0]
        count_1[0] += 1
        index_V[row] = index
        rows_U[index] = row
        pairs_U[index] = pairs
        simd.blend(0, grad_UP, index, one, values_NP, place, padded)


def buffers(dim: int, window: int, targets: int, cbow: bool) -> tuple:
    """Return a thread's matrices, and arrays of targets, pairs and ids.

    Each begins at a cache line, as torch has it: vectors that lie in two lines take two loads, and
    threads that write to the same line wait for each other.
    """
    contexts, places = 1 if cbow else 2 * window, 2 * window + 1
    padded = (dim + LANES - 1) // LANES * LANES

    def numbers(*shape: int, fill: float = 0) -> np.ndarray:
        return torch.full(shape, fill, dtype=torch.float32).numpy()

    matrices = tuple(numbers(height, padded) for height in (contexts, contexts, targets, places))
    of_targets = *(numbers(targets) for _ in range(3)), numbers(targets, fill=1)
    of_pairs = (*(numbers(contexts * targets + LANES) for _ in range(3)),)
    ids = torch.zeros(targets, dtype=torch.int64).numpy(), torch.full((places,), -1).numpy()
    return matrices, of_targets, (*of_pairs, of_pairs[2].view(np.int32)), ids


@inlined
def _list_targets(center, word, negatives_BK, path, ids_T, labels_T, times_T):
    """List a center's targets, their labels, and how often each counts.

    A negative that is drawn twice counts twice; one that is the center does not count. Returns how
    many targets there are, which all differ, and how many count.
    """
    begin_V, nodes_P, codes_P = path
    targets = counted = 0
    if negatives_BK.shape[1]:
        ids_T[0], labels_T[0], times_T[0] = word, one, one
        targets = counted = 1
        for k in range(negatives_BK.shape[1]):
            negative = negatives_BK[center, k]
            t = 0
            while t < targets and ids_T[t] != negative:
                t += 1
            if t == targets:
                ids_T[t], labels_T[t], times_T[t] = negative, zero, one
                targets += 1
            elif t > 0:
                times_T[t] += one
            counted += t > 0
    if len(begin_V):
        for p in range(begin_V[word], begin_V[word + 1]):
            ids_T[targets], times_T[targets] = nodes_P[p], one
            labels_T[targets] = one - np.float32(codes_P[p])
            targets += 1
            counted += 1
    return targets, counted


@inlined
def _add_losses(loss, product, targets, times_T, losses_T, products_T):
    """Add the losses of a center's targets, and the factors to a product.

    The logarithm of the product is a part of the loss: the loss of a pair is softplus(x), or
    softplus(-x) = softplus(x) - x, and softplus(x) = max(0, x) + log(1 + exp(-|x|)).
    """
    for t in range(targets):
        loss += times_T[t] * losses_T[t]
        for _ in range(int(times_T[t])):
            product *= products_T[t]
            if product > 1e200:
                loss += math.log(product)
                product = 1.0
        losses_T[t] = zero
        products_T[t] = one
    return loss, product


@inlined
def _errors(loss, product, contexts, targets, weights, of_targets, of_pairs):
    """Compute the errors of all pairs, times their weights; add their losses.

    `weights`: how many context words are before the center, and the weight of each distance.
    """
    before, weight_d = weights
    labels_T, times_T, losses_T, products_T = of_targets
    logits_N, errors_N, factors_N, bits_N = of_pairs
    numbers = (contexts * targets + LANES - 1) // LANES * LANES  # in whole vectors
    _sigmoids(numbers, logits_N, errors_N, factors_N, bits_N)
    for c in range(contexts):
        if c % LOGARITHMS == 0:
            loss, product = _add_losses(loss, product, targets, times_T, losses_T, products_T)
        n = c * targets
        weight = weight_d[abs(c + (c >= before) - before)]
        for t in range(targets):
            losses_T[t] += max(logits_N[n + t], zero) - labels_T[t] * logits_N[n + t]
            products_T[t] *= factors_N[n + t]
            errors_N[n + t] = (errors_N[n + t] - labels_T[t]) * times_T[t] * weight
    return _add_losses(loss, product, targets, times_T, losses_T, products_T)


@functools.cache
def gradients(most: int, in_place: bool, cbow: bool) -> Callable:
    """Compile the loop of a thread over its centers, as in reference.py.

    CBOW is skip-gram with one context row, the mean or the sum of the context words, whose gradient
    each of them gets. `most` targets are taken at a time: their rows stay in registers. To compile
    the dimensions in gains 3 to 9 %, and takes 3 s for each vector size.

    The function returns the summed loss and the number of positive pairs. It gets the edges of the
    thread's centers, and `buffers` of its own. With `in_place` it gets a counter of the centers
    that any thread has taken, and their number; each center's gradients are subtracted from the
    rows at once; those of input rows are also scaled by `factors_V`: a factor for each row, or one
    for all. Otherwise they are added to those of the thread's unique rows. Gradients of context
    words are first summed in a ring, until the windows have passed the word: a word is in many
    windows, one after another. `weight_d` are factors of all gradients by the distance of the
    context word, with lr in them.
    """
    subtracts = int(in_place)
    early = SGD_PREFETCH_CENTERS if in_place else PREFETCH_CENTERS
    parts = SGD_PREFETCH_PARTS if in_place else 1

    @inlined
    def fetch(part, later):
        """Prefetch a part of the rows of a later center and its negatives."""
        word, negatives_K, unique_out, output_VR, dim = later
        rows = len(negatives_K) + (len(negatives_K) > 0)
        for t in range(part * rows // parts, min((part + 1) * rows // parts, rows)):
            row = word
            if t > 0:
                row = negatives_K[t - 1]
            _prefetch_row(output_VR, row, dim, subtracts)
            if not in_place and unique_out[0][row] >= 0:
                _prefetch_row(unique_out[2], unique_out[0][row], dim, 1)

    @compiled
    def loop(begin, end, shape, unique, memory, text, drawn, records, rates, path):
        dim, window, _ = shape
        unique_in, unique_out = unique
        context_CP, grad_CP, grad_TP, ring_CP = memory[0]
        of_targets, of_pairs = memory[1], memory[2]
        ids_T, ring_pairs_C = memory[3]
        words_n, sentences_n, first = text
        windows_B, negatives_BK = drawn
        input_VR, output_VR = records
        weight_d, mean, factors_V = rates
        begin_V, nodes_P = path[0], path[1]
        padded = context_CP.shape[1]
        places = len(ring_pairs_C)
        loss, product, pairs = 0.0, 1.0, 0

        for center in range(begin, end):
            at = first + center
            # Prefetch the rows of a later center, and its new context word.
            number = min(center + early, end - 1)
            later = words_n[first + number], negatives_BK[number], unique_out, output_VR, dim
            fetch(0, later)
            if center + PREFETCH_CENTERS < end:
                word = words_n[at + PREFETCH_CENTERS]
                if len(begin_V):
                    for p in range(begin_V[word], begin_V[word + 1]):
                        _prefetch_row(output_VR, nodes_P[p], dim, subtracts)
                if at + PREFETCH_CENTERS + window < len(words_n):
                    _prefetch_row(input_VR, words_n[at + PREFETCH_CENTERS + window], dim, subtracts)

            # Take the word from the ring that the windows have passed.
            if not in_place:
                passed = at - window - 1
                place = passed % places
                if passed >= 0 and ring_pairs_C[place] >= 0:
                    _add(words_n[passed], ring_CP, place, ring_pairs_C[place], unique_in)
                    ring_pairs_C[place] = -1

            left, right = _window(sentences_n, at, windows_B[center])
            words = right - left - 1
            if words < 1:
                continue
            contexts = 1 if cbow else words
            pairs += contexts

            # List the targets, load the contexts, and compute the logits of all pairs.
            targets, counted = _list_targets(
                center, words_n[at], negatives_BK, path, ids_T, of_targets[0], of_targets[1]
            )
            share = one / np.float32(words)
            if cbow:
                context_CP[0] = zero
            for c in range(left, right):
                if c == at:
                    continue
                if cbow:
                    scale = share if mean else one
                    simd.blend(one, context_CP, 0, scale, input_VR, words_n[c], dim)
                else:
                    simd.blend(0, context_CP, c - left - (c > at), one, input_VR, words_n[c], dim)
            simd.dots(context_CP, contexts, output_VR, ids_T, targets, most, dim, of_pairs[0])
            fetch(1, later)

            # Their errors, losses and gradients; loops are unrolled for the usual number of them.
            weights = at - left, weight_d
            if targets == most:
                sums = _errors(loss, product, contexts, most, weights, of_targets, of_pairs)
            else:
                sums = _errors(loss, product, contexts, targets, weights, of_targets, of_pairs)
            loss, product = sums
            fetch(2, later)
            simd.pair_gradients(
                of_pairs[1],
                context_CP,
                contexts,
                output_VR,
                ids_T,
                targets,
                most,
                dim,
                grad_CP,
                subtracts,
                grad_TP,
            )
            fetch(3, later)

            # Each context's gradient goes to its row, or to the ring.
            scale = share if cbow and not mean else one  # see `Objective`
            for c in range(left, right):
                if c == at:
                    continue
                n = 0 if cbow else c - left - (c > at)
                if in_place:
                    factor = scale * factors_V[min(words_n[c], len(factors_V) - 1)]
                    simd.blend(one, input_VR, words_n[c], -factor, grad_CP, n, dim)
                    continue
                place = c % places
                keep = one if ring_pairs_C[place] >= 0 else zero  # of what an earlier word left
                ring_pairs_C[place] = max(ring_pairs_C[place], 0) + counted
                simd.blend(keep, ring_CP, place, scale, grad_CP, n, padded)
            if not in_place:
                for t in range(targets):
                    _add(ids_T[t], grad_TP, t, contexts * int(of_targets[1][t]), unique_out)

        # Empty the ring.
        for c in range(max(first + end - window - 1, 0), min(first + end + window, len(words_n))):
            place = c % places
            if ring_pairs_C[place] >= 0:
                _add(words_n[c], ring_CP, place, ring_pairs_C[place], unique_in)
                ring_pairs_C[place] = -1
        return loss + math.log(product), pairs

    @compiled
    def own(begin, end, shape, unique, *more):
        """Run the thread's own centers, and sort its rows by owner."""
        for table in unique:
            table[4][0] = 0
        found = loop(begin, end, shape, unique, *more)
        for table in unique:
            sort_by_owner(*table)
        return found

    @compiled
    def shared(taken_1, centers, shape, unique, *more):
        """Run blocks of centers that no thread has taken."""
        loss, pairs = 0.0, 0
        while True:
            begin = simd.fetch_add(taken_1, 0, BLOCK)
            if begin >= centers:
                return loss, pairs
            its = loop(begin, min(begin + BLOCK, centers), shape, unique, *more)
            loss += its[0]
            pairs += its[1]

    return shared if in_place else own


@compiled
def sort_by_owner(index_V, rows_U, _, __, count_1, owned_rows_U, owned_numbers_U, starts_O):
    """Sort the thread's unique rows and their numbers by owner.

    The numbers are forgotten in `index_V`.
    Those of owner o are at places starts_O[o] to starts_O[o + 1].
    """
    owners = len(starts_O) - 1
    starts_O[:] = 0
    for u in range(count_1[0]):
        starts_O[rows_U[u] // ROWS_PER_OWNER % owners + 1] += 1
        index_V[rows_U[u]] = -1
    for owner in range(owners):
        starts_O[owner + 1] += starts_O[owner]
    for u in range(count_1[0]):
        owner = rows_U[u] // ROWS_PER_OWNER % owners
        owned_rows_U[starts_O[owner]] = rows_U[u]
        owned_numbers_U[starts_O[owner]] = u
        starts_O[owner] += 1
    for owner in range(owners, 0, -1):  # each has come to where the next one begins
        starts_O[owner] = starts_O[owner - 1]
    starts_O[0] = 0


@compiled
def _sum_threads(
    owner, grad_NP, pairs_N, owned_rows_nU, owned_numbers_nU, starts_nO, first_V, rows_U, sums_U
):
    """Sum the gradients of an owner's rows over the threads, in their order.

    Sets `rows_U` to these rows and `sums_U` to where in `grad_NP` the sum of each is: in the place
    of its first thread. Returns their number. first_V: -1, memory that all owners share.
    """
    threads, most = owned_rows_nU.shape
    padded = grad_NP.shape[1]
    count = 0
    for n in range(threads):
        end = starts_nO[n, owner + 1]
        for i in range(starts_nO[n, owner], end):
            if i + PREFETCH_ROWS < end:
                later = n * most + owned_numbers_nU[n, i + PREFETCH_ROWS]
                _prefetch_row(grad_NP, later, padded, 0)
            row, number = owned_rows_nU[n, i], n * most + owned_numbers_nU[n, i]
            first = first_V[row]
            if first < 0:
                first_V[row] = number
                rows_U[count] = row
                sums_U[count] = number
                count += 1
            else:
                simd.blend(one, grad_NP, first, one, grad_NP, number, padded)
                if len(pairs_N):
                    pairs_N[first] += pairs_N[number]
    for u in range(count):
        first_V[rows_U[u]] = -1
    return count


@compiled
def step_rows(
    owner,
    formula,
    states,
    records_VR,
    step_column,
    constants,
    grad_NP,
    pairs_N,
    owned_rows_nU,
    owned_numbers_nU,
    starts_nO,
    first_V,
    summed_nU,
    spare_nR,
    cap,
    dim,
):
    """Step the unique rows of which thread `owner` is the owner.

    The formulas are those of optim.cu, which says what a single state of Adam is. A row is stepped
    with the sum of the gradients of all threads, scaled by cap / pairs if it sums more than `cap`
    pairs and cap is not 0. A row that would not stay finite is left as it was; returns the number
    of such rows. summed_nU, spare_nR: memory for the owner's rows and sums, and for a record.
    """
    rows_U, sums_U = summed_nU[2 * owner], summed_nU[2 * owner + 1]
    owned = owned_rows_nU, owned_numbers_nU, starts_nO, first_V
    count = _sum_threads(owner, grad_NP, pairs_N, *owned, rows_U, sums_U)
    lr, eps, weight_decay, lr_decay = constants[:4]
    beta1, rest1, log_beta1, beta2, rest2, log_beta2, table_step = constants[4:]
    lr, eps, weight_decay = np.float32(lr), np.float32(eps), np.float32(weight_decay)
    beta1, rest1 = np.float32(beta1), np.float32(rest1)
    beta2, rest2 = np.float32(beta2), np.float32(rest2)
    width = records_VR.shape[1]
    before_R = spare_nR[owner]
    faults = 0
    for u in range(count):
        if u + PREFETCH_ROWS < count:
            _prefetch_row(records_VR, rows_U[u + PREFETCH_ROWS], width, 1)
        row, number = rows_U[u], sums_U[u]
        grad_D, record_R = grad_NP[number, :dim], records_VR[row]
        # The weight, and the first and the last of its states.
        weight_D, first_D = record_R[:dim], record_R[dim : 2 * dim]
        last_D = record_R[states * dim : (states + 1) * dim]
        if 0 < cap < pairs_N[number]:
            scale = np.float32(cap / pairs_N[number])
            for d in range(dim):
                grad_D[d] *= scale
        for r in range(width):
            before_R[r] = record_R[r]

        # The count of steps, the row's own or the table's, and what it corrects.
        step = table_step
        if step_column >= 0:
            step = record_R[step_column] + 1.0
            record_R[step_column] = step
        rate = np.float32(lr / -math.expm1(step * log_beta1))  # lr / (1 - beta1 ** step)
        bias = np.float32(-math.expm1(step * log_beta2))  # 1 - beta2 ** step
        if formula == ADAMW:
            for d in range(dim):
                weight_D[d] *= one - lr * weight_decay
        elif weight_decay != 0:
            for d in range(dim):
                grad_D[d] += weight_decay * weight_D[d]

        if formula == SGD:
            for d in range(dim):
                weight_D[d] -= lr * grad_D[d]
        elif formula == ADAGRAD:
            rate = np.float32(lr / (1 + (step - 1) * lr_decay))
            for d in range(dim):
                square = first_D[d] + grad_D[d] * grad_D[d]
                first_D[d] = square
                weight_D[d] -= rate * grad_D[d] / (np.sqrt(square) + eps)
        elif formula == RMSPROP:
            for d in range(dim):
                square = beta1 * first_D[d] + rest1 * grad_D[d] * grad_D[d]
                first_D[d] = square
                weight_D[d] -= lr * grad_D[d] / (np.sqrt(square) + eps)
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
            else:
                for d in range(dim):
                    square = beta2 * last_D[d] + rest2 * grad_D[d] * grad_D[d]
                    last_D[d] = square
                    weight_D[d] -= rate * mean_D[d] / (np.sqrt(square / bias) + eps)

        # Zero times a number is zero, unless that is infinite or NaN.
        zeros = zero
        for r in range(width):
            zeros += record_R[r] * zero
        if zeros != 0:
            faults += 1
            for r in range(width):
                record_R[r] = before_R[r]
    return faults


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
def draw(begin, end, key, lowest, widest, of_pool, cdf_V, starts, windows_B, negatives_BK):
    """Draw windows and negatives of centers [begin, end), see reference.py.

    starts: for equal parts of [0, 1), the word at which the search of the distribution begins.
    There is a power of two of them, so that rounding cannot lead past the word.
    """
    centers, negatives = negatives_BK.shape
    pool, pool_key = of_pool
    for b in range(begin, end):
        bits = _splitmix64(b, key) >> np.uint64(11)
        windows_B[b] = lowest + np.int64(bits % np.uint64(widest - lowest + 1))
        for k in range(negatives):
            bits = _splitmix64(centers + b * negatives + k, key)
            uniform = _unit(bits)
            if pool:
                place = (bits >> np.uint64(11)) % np.uint64(pool)
                uniform = (np.float64(place) + _unit(_splitmix64(place, pool_key))) / pool
            word = starts[min(np.int64(uniform * len(starts)), len(starts) - 1)]
            while word < len(cdf_V) - 1 and cdf_V[word] <= uniform:
                word += 1
            negatives_BK[b, k] = word


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
