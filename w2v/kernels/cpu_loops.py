"""What numba compiles for cpu.py, when it is first called; kept on disk for the next process where there is a folder to write to.

A function runs on one thread's share of the work, and lets Python go on meanwhile. Arrays are named in full and not cut into views, whose
references numba would count, and what a loop does not change is read before it, or it would not become vector instructions.

Shapes: n words of a text, B centers, K negatives, T = 1 + K targets, V rows of a table, U rows that a thread has claimed, C places
of a window, D dimensions, P the same padded to whole vectors, N logits of a window.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import numpy as np
from llvmlite import ir
from numba import types
from numba.core.cgutils import get_item_pointer
from numba.extending import intrinsic

from w2v.system.jit import compiled as jit

LANES = 16  # float32 numbers of the widest vectors, and of a cache line
JAMMED = 3  # targets that one pass over a context serves
AHEAD = 2  # centers by which rows are brought to the cache before they are needed
OWNED = 64  # neighbouring rows that one thread steps, so that no two write to one cache line of what is kept for each row
# Sums may be reordered and products fused, as vectors need; NaN and infinity stay what they are.
SGD, ADAGRAD, RMSPROP, ADAM, ADAMW, ADAMAX = range(6)
zero, half, one = np.float32(0), np.float32(0.5), np.float32(1)
compiled = jit(fastmath={"reassoc", "contract", "nsz", "arcp"}, error_model="numpy")


@intrinsic
def _prefetch(typing_context, matrix, row, column):
    """Have the cache line of matrix[row, column] brought."""

    def generate(context, builder, signature, arguments):
        kind, place, number = signature.args[0], arguments[1:], ir.IntType(32)
        array = context.make_array(kind)(context, builder, arguments[0])
        line = builder.bitcast(
            get_item_pointer(context, builder, kind, array, place), ir.IntType(8).as_pointer()
        )
        prefetch = ir.FunctionType(ir.VoidType(), [line.type, number, number, number])
        to_write, in_every_cache, data = (ir.Constant(number, value) for value in (1, 3, 1))
        builder.call(
            builder.module.declare_intrinsic("llvm.prefetch", [line.type], prefetch),
            [line, to_write, in_every_cache, data],
        )
        return context.get_dummy_value()

    return types.void(matrix, types.intp, types.intp), generate


@compiled
def _bring(matrix, row, dim):
    for d in range(0, dim, LANES):
        _prefetch(matrix, row, d)


@compiled
def _sigmoids(count, logits_N, errors_N, factors_N, bits_N):
    """The logistic function of each logit, and 1 + exp(-|logit|), whose logarithm is softplus(-|logit|).

    exp is 2 ** n * exp(rest), by the polynomial of Cephes' expf, in operations that become vectors; `bits_N` is the memory of
    `factors_N`, where 2 ** n is put together.
    """
    for i in range(count):
        x = max(-abs(logits_N[i]), np.float32(-87))
        bits_N[i] = (
            np.int32(np.floor(x * np.float32(1.44269504) + half)) + np.int32(127)
        ) << np.int32(23)
    for i in range(count):
        x = max(-abs(logits_N[i]), np.float32(-87))
        r = x - np.floor(x * np.float32(1.44269504) + half) * np.float32(0.69314718)
        p = (
            (np.float32(1.9875691e-4) * r + np.float32(1.3981999e-3)) * r + np.float32(8.3334519e-3)
        ) * r + np.float32(4.1665796e-2)
        e = (((p * r + np.float32(1.6666666e-1)) * r + half) * r * r + r + one) * factors_N[i]
        factors_N[i] = one + e
        errors_N[i] = (one if logits_N[i] >= 0 else e) / (one + e)


@compiled
def _add(row, values_CP, place, dim, pairs, number_V, rows_U, grad_UD, pairs_U, count_1):
    """Add values[place], the sum over so many pairs, to the gradient of a row, which is claimed if it was not yet."""
    number = number_V[row]
    if number >= 0:
        pairs_U[number] += pairs
        for d in range(dim):
            grad_UD[number, d] += values_CP[place, d]
        return
    number = count_1[0]
    count_1[0] += 1
    number_V[row], rows_U[number], pairs_U[number] = number, row, pairs
    for d in range(dim):
        grad_UD[number, d] = values_CP[place, d]


@functools.cache
def skipgram(dim: int, targets: int, descends: bool) -> Callable:
    """A pass over a share of the centers, compiled for these sizes: reference.py::skipgram for each center by itself.

    The function gives the summed loss and the number of positive pairs. If it descends, a center's gradients, times lr, are taken from
    the rows at once. If not, they are added to the claims; those of a context gather in a ring until the windows have passed it by.
    """
    padded = -(-dim // LANES) * LANES
    jammed = -(-targets // JAMMED) * JAMMED  # with targets that do not count

    @compiled
    def pass_over(
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
        number_in,
        rows_in,
        grad_in,
        pairs_in,
        count_in,
        number_out,
        rows_out,
        grad_out,
        pairs_out,
        count_out,
    ):
        places = 2 * window + 1
        ids_T, counts_T, error_T = (
            np.zeros(targets, np.int64),
            np.zeros(jammed, np.float32),
            np.zeros(jammed, np.float32),
        )
        target_TP, grad_target_TP = (
            np.zeros((jammed, padded), np.float32),
            np.zeros((jammed, padded), np.float32),
        )
        context_CP, waiting_CP = (
            np.zeros((places, padded), np.float32),
            np.zeros((places, padded), np.float32),
        )
        waits_C = np.zeros(places, np.int64)  # pairs whose gradients wait
        logits_N, errors_N = (
            np.zeros(places * jammed, np.float32),
            np.zeros(places * jammed, np.float32),
        )
        factors_N = np.zeros(places * jammed, np.float32)
        bits_N = factors_N.view(np.int32)
        loss, pairs = 0.0, 0

        for center in range(begin, end):
            at, reach = first + center, windows_B[center]
            if center + AHEAD < end:
                _bring(output_VR, words_n[at + AHEAD], dim)
                for k in range(targets - 1):
                    word = negatives_BK[center + AHEAD, k]
                    _bring(output_VR, word, dim)
                    if not descends and number_out[word] >= 0:
                        _bring(grad_out, number_out[word], dim)
                if at + AHEAD + window < len(words_n):
                    _bring(input_VR, words_n[at + AHEAD + window], dim)
            passed = at - window - 1
            place = passed % places
            if passed >= 0 and waits_C[place]:
                _add(
                    words_n[passed],
                    waiting_CP,
                    place,
                    dim,
                    waits_C[place],
                    number_in,
                    rows_in,
                    grad_in,
                    pairs_in,
                    count_in,
                )
                waits_C[place] = 0

            left, right = max(at - reach, 0), min(at + reach + 1, len(words_n))
            while sentences_n[left] != sentences_n[at]:
                left += 1
            while sentences_n[right - 1] != sentences_n[at]:
                right -= 1
            if right - left < 2:
                continue
            pairs += right - left - 1
            counted = 0
            for t in range(targets):
                word = words_n[at] if t == 0 else negatives_BK[center, t - 1]
                counts = t == 0 or word != words_n[at]
                ids_T[t], counts_T[t] = word, one if counts else zero
                counted += counts
                for d in range(dim):
                    target_TP[t, d] = output_VR[word, d]
                for d in range(padded):
                    grad_target_TP[t, d] = zero

            n = 0
            for c in range(left, right):
                if c == at:
                    continue
                place, word = c % places, words_n[c]
                for d in range(dim):
                    context_CP[place, d] = input_VR[word, d]
                for t in range(0, jammed, JAMMED):
                    dot0 = dot1 = dot2 = zero
                    for d in range(padded):
                        x = context_CP[place, d]
                        dot0 += x * target_TP[t, d]
                        dot1 += x * target_TP[t + 1, d]
                        dot2 += x * target_TP[t + 2, d]
                    logits_N[n + t], logits_N[n + t + 1], logits_N[n + t + 2] = dot0, dot1, dot2
                n += jammed
            _sigmoids(n, logits_N, errors_N, factors_N, bits_N)

            n, product = 0, 1.0
            for c in range(left, right):
                if c == at:
                    continue
                errors_N[n] -= one
                loss -= logits_N[n]
                for t in range(
                    targets
                ):  # softplus is max(0, logit) + log(1 + exp(-|logit|)); the logarithms are taken of a product
                    loss += 0.5 * counts_T[t] * (abs(logits_N[n + t]) + logits_N[n + t])
                    product *= factors_N[n + t] if counts_T[t] > 0 else one
                    if product > 1e300:
                        loss, product = loss + math.log(product), 1.0
                for t in range(jammed):
                    error_T[t] = errors_N[n + t] * counts_T[t] * lr
                n += jammed
                place, word = c % places, words_n[c]
                for d in range(padded):
                    x, grad = context_CP[place, d], zero
                    for t in range(jammed):
                        grad += error_T[t] * target_TP[t, d]
                        grad_target_TP[t, d] += error_T[t] * x
                    context_CP[place, d] = grad
                if descends:
                    for d in range(dim):
                        input_VR[word, d] -= context_CP[place, d]
                    continue
                keep = one if waits_C[place] else zero
                waits_C[place] += counted
                for d in range(padded):
                    waiting_CP[place, d] = keep * waiting_CP[place, d] + context_CP[place, d]
            loss += math.log(product)
            for t in range(targets):
                word = ids_T[t]
                if counts_T[t] == 0:
                    continue
                if descends:
                    for d in range(dim):
                        output_VR[word, d] -= grad_target_TP[t, d]
                else:
                    _add(
                        word,
                        grad_target_TP,
                        t,
                        dim,
                        right - left - 1,
                        number_out,
                        rows_out,
                        grad_out,
                        pairs_out,
                        count_out,
                    )

        for c in range(max(first + end - window - 1, 0), min(first + end + window, len(words_n))):
            place = c % places
            if waits_C[place]:
                _add(
                    words_n[c],
                    waiting_CP,
                    place,
                    dim,
                    waits_C[place],
                    number_in,
                    rows_in,
                    grad_in,
                    pairs_in,
                    count_in,
                )
                waits_C[place] = 0
        return loss, pairs

    return pass_over


@compiled
def step_rows(
    owner,
    owners,
    formula,
    records_VR,
    step_column,
    constants,
    number_nV,
    rows_nU,
    grad_nUD,
    pairs_nU,
    count_n,
    cap,
):
    """Step the rows that a thread owns by a formula of optim.cu: a row when the first thread that claimed it has its turn, with the
    gradients of all threads, which ends the claims. The gradients of n threads are summed in the threads' order.

    A row that would not stay finite is left as it was; gives how many such rows there were.
    """
    (
        lr,
        eps,
        weight_decay,
        lr_decay,
        beta1,
        rest1,
        log_beta1,
        beta2,
        rest2,
        log_beta2,
        table_step,
    ) = constants
    lr, eps, weight_decay = np.float32(lr), np.float32(eps), np.float32(weight_decay)
    beta1, rest1, beta2, rest2 = (
        np.float32(beta1),
        np.float32(rest1),
        np.float32(beta2),
        np.float32(rest2),
    )
    dim = grad_nUD.shape[2]
    first, second = dim, 2 * dim  # where a record's states begin
    grad_D, before_R, width, faults = (
        np.empty(dim, np.float32),
        np.empty_like(records_VR[0]),
        records_VR.shape[1],
        0,
    )
    for n in range(len(count_n)):
        for u in range(count_n[n]):
            row = rows_nU[n, u]
            if row // OWNED % owners != owner or number_nV[n, row] < 0:
                continue
            number_nV[n, row] = -1
            pairs = pairs_nU[n, u]
            for d in range(dim):
                grad_D[d] = grad_nUD[n, u, d]
            for other in range(n + 1, len(count_n)):
                number = number_nV[other, row]
                if number >= 0:
                    number_nV[other, row] = -1
                    pairs += pairs_nU[other, number]
                    for d in range(dim):
                        grad_D[d] += grad_nUD[other, number, d]
            if 0 < cap < pairs:
                scale = np.float32(cap / pairs)
                for d in range(dim):
                    grad_D[d] *= scale

            for r in range(width):
                before_R[r] = records_VR[row, r]
            step = table_step
            if step_column >= 0:
                step = records_VR[row, step_column] + 1.0
                records_VR[row, step_column] = step
            rate = np.float32(
                lr / -math.expm1(step * log_beta1)
            )  # over 1 - beta1 ** step, which is 1 for beta1 = 0
            bias = np.float32(-math.expm1(step * log_beta2))
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
                    mean = records_VR[row, first + d] + rest1 * (
                        grad_D[d] - records_VR[row, first + d]
                    )
                    largest = max(beta2 * records_VR[row, second + d], abs(grad_D[d]) + eps)
                    records_VR[row, first + d], records_VR[row, second + d] = mean, largest
                    records_VR[row, d] -= rate * mean / largest
            else:
                for d in range(dim):
                    mean = records_VR[row, first + d] + rest1 * (
                        grad_D[d] - records_VR[row, first + d]
                    )
                    square = beta2 * records_VR[row, second + d] + rest2 * grad_D[d] * grad_D[d]
                    records_VR[row, first + d], records_VR[row, second + d] = mean, square
                    records_VR[row, d] -= rate * mean / (np.sqrt(square / bias) + eps)

            nothing = zero
            for r in range(width):
                nothing += records_VR[row, r] * zero
            if nothing != 0:
                faults += 1
                for r in range(width):
                    records_VR[row, r] = before_R[r]
    return faults


@compiled
def invert(cdf_V, starts, uniform_N, words_N):
    """The first word whose cumulative probability is above each number; at most the last."""
    for i in range(len(uniform_N)):
        word = starts[min(int(uniform_N[i] * len(starts)), len(starts) - 1)]
        while word < len(cdf_V) - 1 and cdf_V[word] <= uniform_N[i]:
            word += 1
        words_N[i] = word
