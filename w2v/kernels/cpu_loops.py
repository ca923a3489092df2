"""Loops that numba compiles for cpu.py.

Each function works on one thread's share without the interpreter's lock. The machine code is kept
on disk if a folder for it can be written. Arrays are passed whole with an index, as numba would
count references to views; parts of a loop are small functions, which the compiler inlines.

Shapes: n words of a text, B centers, K negatives, T = 1 + K targets, V rows of a table, U unique
rows of a thread, C positions of a window, D dimensions, P = D padded to whole vectors, N logits of
a window.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core.cgutils import get_item_pointer
from numba.extending import intrinsic

from w2v.system.jit import compiled as jit

LANES = 16  # float32 numbers of the widest vectors, and of a cache line
TARGETS_PER_PASS = 3  # dot products computed while a context row is read once
PREFETCH = 2  # centers by which rows are fetched into the CPU's cache early
ROWS_PER_OWNER = 64  # adjacent rows of one thread, so that threads do not share cache lines
SGD, ADAGRAD, RMSPROP, ADAM, ADAMW, ADAMAX = range(6)
zero, half, one = np.float32(0), np.float32(0.5), np.float32(1)
# Vectors need sums in any order and fused products. NaN and infinity stay what they are.
FAST: dict[str, Any] = {"fastmath": {"reassoc", "contract", "nsz", "arcp"}, "error_model": "numpy"}
compiled = jit(**FAST)
inlined = jit(inline="always", **FAST)  # into its caller; a call costs 3 to 14 % in hot loops


@intrinsic
def _prefetch(typing_context, matrix, row, column):
    """Fetch the cache line of matrix[row, column], to be written."""

    def generate(context, builder, signature, arguments):
        kind = signature.args[0]
        array = context.make_array(kind)(context, builder, arguments[0])
        address = builder.bitcast(
            get_item_pointer(context, builder, kind, array, arguments[1:]),
            ir.IntType(8).as_pointer(),
        )
        int32 = ir.IntType(32)
        prefetch = ir.FunctionType(ir.VoidType(), [address.type, int32, int32, int32])
        write, all_caches, data = (ir.Constant(int32, value) for value in (1, 3, 1))
        builder.call(
            builder.module.declare_intrinsic("llvm.prefetch", [address.type], prefetch),
            [address, write, all_caches, data],
        )
        return context.get_dummy_value()

    return types.void(matrix, types.intp, types.intp), generate


@compiled
def _prefetch_row(matrix, row, dim):
    for d in range(0, dim, LANES):
        _prefetch(matrix, row, d)


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


@compiled
def _add(row, values_CP, place, scale, dim, pairs, unique):
    """Add scale * values_CP[place] to the gradient of a row, a sum over pairs.

    A row that the thread has not touched yet is added to its unique rows.
    """
    index_V, rows_U, grad_UD, pairs_U, count_1 = unique
    index = index_V[row]
    if index >= 0:
        pairs_U[index] += pairs
        for d in range(dim):
            grad_UD[index, d] += scale * values_CP[place, d]
        return
    index = count_1[0]
    count_1[0] += 1
    index_V[row] = index
    rows_U[index] = row
    pairs_U[index] = pairs
    for d in range(dim):
        grad_UD[index, d] = scale * values_CP[place, d]


@inlined
def _subtract(records_VR, row, values_CP, place, scale, dim):
    for d in range(dim):
        records_VR[row, d] -= scale * values_CP[place, d]


@inlined
def _load_targets(center, word, negatives_BK, dim, output_VR, buffers, cbow):
    """Load a center and its negatives; return how many targets count."""
    ids_T, counts_T, _, target_TP, grad_target_TP = buffers
    counted = 0
    for t in range(len(ids_T)):
        target = word if t == 0 else negatives_BK[center, t - 1]
        counts = t == 0 or target != word  # a negative that equals the center does not
        ids_T[t] = target
        counts_T[t] = one if counts else zero
        counted += counts
        for d in range(dim):
            target_TP[t, d] = output_VR[target, d]
        if not cbow:
            for d in range(target_TP.shape[1]):
                grad_target_TP[t, d] = zero
    return counted


@inlined
def _logits(n, place, context_CP, target_TP, logits_N):
    """Compute the logits of a context row, from number n on."""
    padded_targets, padded = target_TP.shape
    for t in range(0, padded_targets, TARGETS_PER_PASS):
        dot0 = dot1 = dot2 = zero
        for d in range(padded):
            x = context_CP[place, d]
            dot0 += x * target_TP[t, d]
            dot1 += x * target_TP[t + 1, d]
            dot2 += x * target_TP[t + 2, d]
        logits_N[n + t] = dot0
        logits_N[n + t + 1] = dot1
        logits_N[n + t + 2] = dot2


@inlined
def _load_sum(words_n, left, right, at, dim, input_VR, scale, context_CP):
    """Load the scaled sum of the context words into the first context row."""
    for d in range(dim):
        context_CP[0, d] = zero
    for c in range(left, right):
        if c == at:
            continue
        word = words_n[c]
        for d in range(dim):
            context_CP[0, d] += input_VR[word, d]
    for d in range(dim):
        context_CP[0, d] *= scale


@inlined
def _add_loss(loss, count, targets, logits_N, factors_N, counts_T):
    """Return `loss` plus the loss of a center: softplus of its logits."""
    product = 1.0
    for n in range(0, count, len(counts_T)):
        loss -= logits_N[n]  # softplus(-x) of the positive pair is softplus(x) - x
        for t in range(targets):
            # softplus(x) is max(0, x) + log(1 + exp(-|x|)); the logarithm is taken of a product.
            loss += 0.5 * counts_T[t] * (abs(logits_N[n + t]) + logits_N[n + t])
            product *= factors_N[n + t] if counts_T[t] > 0 else one
            if product > 1e300:
                loss += math.log(product)
                product = 1.0
    return loss + math.log(product)


@inlined
def _gradients(n, place, grad_place, lr, errors_N, context_CP, buffers, cbow):
    """Write the gradient of a context row; add to those of the targets.

    All gradients are times lr. n: the first of its logits, that of the center. CBOW has one context
    row: the gradients of its targets are that row times `error_T`, and not computed here.
    """
    _, counts_T, error_T, target_TP, grad_target_TP = buffers
    padded_targets, padded = target_TP.shape
    errors_N[n] -= one  # the label of the center; negatives have 0
    for t in range(padded_targets):
        error_T[t] = errors_N[n + t] * counts_T[t] * lr
    for d in range(padded):
        x, grad = context_CP[place, d], zero
        for t in range(padded_targets):
            grad += error_T[t] * target_TP[t, d]
            if not cbow:
                grad_target_TP[t, d] += error_T[t] * x
        context_CP[grad_place, d] = grad


@functools.cache
def gradients(targets: int, in_place: bool, cbow: bool) -> Callable:
    """Compile the loop of a thread over its centers, as in reference.py.

    CBOW is skip-gram with one context row, the mean or the sum of the context words, whose gradient
    each of them gets. The number of targets is compiled in, as the loops over them must be unrolled
    within those over the dimensions. To compile those in too gains 3 to 9 %, and takes 3 s for each
    vector size.

    The function returns the summed loss and the number of positive pairs. With `in_place`, each
    center's gradients, times lr, are subtracted from the rows at once; those of input rows are also
    scaled by `factors_V`: a factor for each row, or one for all. Otherwise they are added to those
    of the thread's unique rows. Gradients of context words are first summed in a ring, until
    the windows have passed the word: a word is in many windows, one after another.
    """
    padded_targets = -(-targets // TARGETS_PER_PASS) * TARGETS_PER_PASS

    @compiled
    def loop(
        dim,
        words_n,
        sentences_n,
        first,
        windows_B,
        negatives_BK,
        window,
        begin,
        end,
        input_VR,
        output_VR,
        lr,
        mean,
        factors_V,
        *unique,
    ):
        # For each table, the thread's index_V, rows_U, grad_UD, pairs_U and count_1.
        unique_in, unique_out = unique[:5], unique[5:]
        index_out, _, grad_out, _, _ = unique_out
        padded = (dim + LANES - 1) // LANES * LANES
        # Targets that pad T, and negatives that equal the center, have counts_T = 0.
        ids_T = np.zeros(targets, np.int64)
        counts_T = np.zeros(padded_targets, np.float32)
        error_T = np.zeros(padded_targets, np.float32)
        target_TP = np.zeros((padded_targets, padded), np.float32)
        grad_target_TP = np.zeros((padded_targets, padded), np.float32)
        buffers = ids_T, counts_T, error_T, target_TP, grad_target_TP
        # Word c of the text has place c % places among the contexts and in the ring.
        places = 2 * window + 1
        context_CP = np.zeros((places, padded), np.float32)  # rows, then their gradients
        ring_CP = np.zeros((places, padded), np.float32)
        ring_pairs_C = np.zeros(places, np.int64)
        logits_N = np.zeros(places * padded_targets, np.float32)
        errors_N = np.zeros(places * padded_targets, np.float32)
        factors_N = np.zeros(places * padded_targets, np.float32)
        bits_N = factors_N.view(np.int32)
        loss, pairs = 0.0, 0

        for center in range(begin, end):
            at = first + center
            # Prefetch the rows of a later center, and its new context word.
            if center + PREFETCH < end:
                _prefetch_row(output_VR, words_n[at + PREFETCH], dim)
                for k in range(targets - 1):
                    word = negatives_BK[center + PREFETCH, k]
                    _prefetch_row(output_VR, word, dim)
                    if not in_place and index_out[word] >= 0:
                        _prefetch_row(grad_out, index_out[word], dim)
                if at + PREFETCH + window < len(words_n):
                    _prefetch_row(input_VR, words_n[at + PREFETCH + window], dim)

            # Take the word from the ring that the windows have passed.
            passed = at - window - 1
            place = passed % places
            if passed >= 0 and ring_pairs_C[place]:
                _add(words_n[passed], ring_CP, place, one, dim, ring_pairs_C[place], unique_in)
                ring_pairs_C[place] = 0

            left, right = _window(sentences_n, at, windows_B[center])
            contexts = right - left - 1
            if contexts < 1:
                continue
            predictions = 1 if cbow else contexts
            pairs += predictions
            counted = _load_targets(
                center, words_n[at], negatives_BK, dim, output_VR, buffers, cbow
            )
            n = 0
            share = one / np.float32(contexts)
            if cbow:
                scale = share if mean else one
                _load_sum(words_n, left, right, at, dim, input_VR, scale, context_CP)
                _logits(0, 0, context_CP, target_TP, logits_N)
                n = padded_targets
            else:
                for c in range(left, right):
                    if c == at:
                        continue
                    place, word = c % places, words_n[c]
                    for d in range(dim):
                        context_CP[place, d] = input_VR[word, d]
                    _logits(n, place, context_CP, target_TP, logits_N)
                    n += padded_targets
            _sigmoids(n, logits_N, errors_N, factors_N, bits_N)
            loss = _add_loss(loss, n, targets, logits_N, factors_N, counts_T)

            # Each context's gradient goes to its row, or to the ring.
            n = 0
            scale = one
            if cbow:
                _gradients(0, 0, 1, lr, errors_N, context_CP, buffers, cbow)
                scale = one if mean else share  # see `Objective`
            for c in range(left, right):
                if c == at:
                    continue
                place = c % places
                grad_place = 1 if cbow else place
                if not cbow:
                    _gradients(n, place, place, lr, errors_N, context_CP, buffers, cbow)
                    n += padded_targets
                if in_place:
                    factor = scale * factors_V[min(words_n[c], len(factors_V) - 1)]
                    _subtract(input_VR, words_n[c], context_CP, grad_place, factor, dim)
                    continue
                keep = one if ring_pairs_C[place] else zero  # zero for what an earlier word left
                ring_pairs_C[place] += counted
                for d in range(padded):
                    grad = scale * context_CP[grad_place, d]
                    ring_CP[place, d] = keep * ring_CP[place, d] + grad
            for t in range(targets):
                if counts_T[t] == 0:
                    continue
                if cbow and in_place:
                    _subtract(output_VR, ids_T[t], context_CP, 0, error_T[t], dim)
                elif cbow:
                    _add(ids_T[t], context_CP, 0, error_T[t], dim, predictions, unique_out)
                elif in_place:
                    _subtract(output_VR, ids_T[t], grad_target_TP, t, one, dim)
                else:
                    _add(ids_T[t], grad_target_TP, t, one, dim, predictions, unique_out)

        # Empty the ring.
        for c in range(max(first + end - window - 1, 0), min(first + end + window, len(words_n))):
            place = c % places
            if ring_pairs_C[place]:
                _add(words_n[c], ring_CP, place, one, dim, ring_pairs_C[place], unique_in)
                ring_pairs_C[place] = 0
        return loss, pairs

    return loop


@inlined
def _sum_gradients(n, u, row, index_nV, grad_nUD, pairs_nU, count_n, cap, grad_D):
    """Sum the gradients of a row over the threads from `n` on.

    The sum goes to `grad_D`, scaled by cap / pairs if it sums more than `cap` pairs and cap is not
    0. The row's indices are reset to -1.
    """
    dim = len(grad_D)
    index_nV[n, row] = -1
    pairs = pairs_nU[n, u]
    for d in range(dim):
        grad_D[d] = grad_nUD[n, u, d]
    for other in range(n + 1, len(count_n)):
        index = index_nV[other, row]
        if index >= 0:
            index_nV[other, row] = -1
            pairs += pairs_nU[other, index]
            for d in range(dim):
                grad_D[d] += grad_nUD[other, index, d]
    if 0 < cap < pairs:
        scale = np.float32(cap / pairs)
        for d in range(dim):
            grad_D[d] *= scale


@compiled
def step_rows(
    owner,
    owners,
    formula,
    records_VR,
    step_column,
    constants,
    index_nV,
    rows_nU,
    grad_nUD,
    pairs_nU,
    count_n,
    cap,
):
    """Step the unique rows of which thread `owner` is the owner.

    The formulas are those of optim.cu. A row is stepped where the first thread that touched it
    lists it, with the gradients of all threads, summed in their order; its indices are reset to
    -1. A row that would not stay finite is left as it was; returns the number of such rows.
    """
    lr, eps, weight_decay, lr_decay = constants[:4]
    beta1, rest1, log_beta1, beta2, rest2, log_beta2, table_step = constants[4:]
    lr, eps, weight_decay = np.float32(lr), np.float32(eps), np.float32(weight_decay)
    beta1, rest1 = np.float32(beta1), np.float32(rest1)
    beta2, rest2 = np.float32(beta2), np.float32(rest2)
    dim = grad_nUD.shape[2]
    first, second = dim, 2 * dim  # columns where a record's states begin
    width = records_VR.shape[1]
    grad_D = np.empty(dim, np.float32)
    before_R = np.empty_like(records_VR[0])
    faults = 0
    for n in range(len(count_n)):
        for u in range(count_n[n]):
            row = rows_nU[n, u]
            if row // ROWS_PER_OWNER % owners != owner or index_nV[n, row] < 0:
                continue
            _sum_gradients(n, u, row, index_nV, grad_nUD, pairs_nU, count_n, cap, grad_D)
            for r in range(width):
                before_R[r] = records_VR[row, r]

            # The count of steps, the row's own or the table's, and what it corrects.
            step = table_step
            if step_column >= 0:
                step = records_VR[row, step_column] + 1.0
                records_VR[row, step_column] = step
            rate = np.float32(lr / -math.expm1(step * log_beta1))  # lr / (1 - beta1 ** step)
            bias = np.float32(-math.expm1(step * log_beta2))  # 1 - beta2 ** step
            if formula == ADAMW:
                for d in range(dim):
                    records_VR[row, d] *= one - lr * weight_decay
            elif weight_decay != 0:
                for d in range(dim):
                    grad_D[d] += weight_decay * records_VR[row, d]

            if formula == SGD:
                for d in range(dim):
                    records_VR[row, d] -= lr * grad_D[d]
            elif formula == ADAGRAD:
                rate = np.float32(lr / (1 + (step - 1) * lr_decay))
                for d in range(dim):
                    square = records_VR[row, first + d] + grad_D[d] * grad_D[d]
                    records_VR[row, first + d] = square
                    records_VR[row, d] -= rate * grad_D[d] / (np.sqrt(square) + eps)
            elif formula == RMSPROP:
                for d in range(dim):
                    square = beta1 * records_VR[row, first + d] + rest1 * grad_D[d] * grad_D[d]
                    records_VR[row, first + d] = square
                    records_VR[row, d] -= lr * grad_D[d] / (np.sqrt(square) + eps)
            elif formula == ADAMAX:
                for d in range(dim):
                    mean = records_VR[row, first + d]
                    mean += rest1 * (grad_D[d] - mean)
                    largest = max(beta2 * records_VR[row, second + d], abs(grad_D[d]) + eps)
                    records_VR[row, first + d] = mean
                    records_VR[row, second + d] = largest
                    records_VR[row, d] -= rate * mean / largest
            else:
                for d in range(dim):
                    mean = records_VR[row, first + d]
                    mean += rest1 * (grad_D[d] - mean)
                    square = beta2 * records_VR[row, second + d] + rest2 * grad_D[d] * grad_D[d]
                    records_VR[row, first + d] = mean
                    records_VR[row, second + d] = square
                    records_VR[row, d] -= rate * mean / (np.sqrt(square / bias) + eps)

            # Zero times a number is zero, unless that is infinite or NaN.
            zeros = zero
            for r in range(width):
                zeros += records_VR[row, r] * zero
            if zeros != 0:
                faults += 1
                for r in range(width):
                    records_VR[row, r] = before_R[r]
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
def draw(begin, end, key, lowest, widest, pool, pool_key, cdf_V, starts, windows_B, negatives_BK):
    """Draw windows and negatives of centers [begin, end), see reference.py.

    starts: for equal parts of [0, 1), the word at which the search of the distribution begins.
    There is a power of two of them, so that rounding cannot lead past the word.
    """
    centers, negatives = negatives_BK.shape
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
