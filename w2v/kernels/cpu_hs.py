"""The loop of hierarchical softmax that numba compiles for cpu.py.

It is one of its own, as a path may have any number of nodes, and numbers that the loop of negative
sampling has compiled in must be read from memory here.

Shapes: n words of a text, B centers, K negatives, V rows of a table, P padded dimensions, C context
words of a window, T targets of a center, padded to whole groups; N = C * T numbers of pairs.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from w2v.kernels.cpu_loops import (
    PREFETCH,
    _add,
    _prefetch_row,
    _sigmoids,
    _window,
    compiled,
    inlined,
    one,
    over_centers,
    uncounted,
    zero,
)
from w2v.system import simd
from w2v.system.simd import AT_ONCE, INT64, LANES

LOGARITHMS = 64  # contexts after which the logarithm of a product of factors is due
# Targets whose rows and gradients are in registers at a time; the most first.
GROUPS = (8, 4, 2, 1) if AT_ONCE == 8 else (AT_ONCE, 1)


def _groups(code: simd.Code, targets: Any) -> Iterator[list[Any]]:
    """Write loops over all targets; gives the numbers of each group."""
    builder, begin = code.builder, INT64(0)
    for size in GROUPS:
        groups = builder.udiv(builder.sub(targets, begin), INT64(size))
        with cgutils.for_range(builder, groups, intp=INT64) as loop:
            first = builder.add(begin, builder.mul(loop.index, INT64(size)))
            yield [builder.add(first, INT64(t)) for t in range(size)]
        begin = builder.add(begin, builder.mul(groups, INT64(size)))


def _columns(code: simd.Code, dim: Any, part: Callable) -> None:
    """Write `part` for the whole vectors of a row, and for its rest."""
    with code.blocks(dim) as column:
        part(column)
    rest = code.builder.urem(dim, INT64(LANES))
    with cgutils.if_unlikely(code.builder, code.builder.icmp_unsigned("!=", rest, INT64(0))):
        part(code.builder.sub(dim, rest), code.mask(rest))


@intrinsic
def _dots(typing, context_CP, contexts, rows_VR, ids_T, targets, dim, logits_N):
    """Set logits_N[c * targets + t] to the product of a context and a row."""

    def generate(context, builder, signature, arguments):
        code = simd.Code(context, builder, signature, arguments)
        context_CP, contexts, rows_VR, ids_T, targets, dim, logits_N = code.arguments
        for numbers in _groups(code, targets):
            rows = [ids_T.number(t) for t in numbers]
            with cgutils.for_range(builder, contexts, intp=INT64) as loop:
                c, sums = loop.index, code.zeros(len(rows))

                def part(column, mask=None, c=c, rows=rows, sums=sums):
                    x = context_CP.load(c, column)
                    for row, total in zip(rows, sums, strict=True):
                        code.add_product(total, x, rows_VR.load(row, column, mask=mask))

                _columns(code, dim, part)
                for t, total in zip(numbers, sums, strict=True):
                    place = builder.add(builder.mul(c, targets), t)
                    builder.store(code.sum(builder.load(total)), logits_N.address(place))
        return context.get_dummy_value()

    kinds = context_CP, types.int64, rows_VR, ids_T, types.int64, types.int64, logits_N
    return types.void(*kinds), generate


@intrinsic(prefer_literal=True)
def _pair_gradients(
    typing, error_N, context_CP, contexts, rows_VR, ids_T, targets, dim, grad_CP, in_place, grad_TP
):
    """Add to the gradients of contexts; subtract those of rows in place.

    Unless `in_place`, a literal, the latter are set in `grad_TP`. All targets must differ.
    """
    subtracts = in_place.literal_value

    def generate(context, builder, signature, arguments):
        code = simd.Code(context, builder, signature, arguments)
        error_N, context_CP, contexts, rows_VR, ids_T, targets, dim, *others = code.arguments
        grad_CP, _, grad_TP = others
        for numbers in _groups(code, targets):
            rows = [ids_T.number(t) for t in numbers]

            def part(column, mask=None, numbers=numbers, rows=rows):
                vectors = [rows_VR.load(row, column, mask=mask) for row in rows]
                sums = code.zeros(len(rows))
                with cgutils.for_range(builder, contexts, intp=INT64) as loop:
                    x = context_CP.load(loop.index, column)
                    grad = grad_CP.load(loop.index, column)
                    errors = builder.mul(loop.index, targets)
                    for t, vector, total in zip(numbers, vectors, sums, strict=True):
                        error = code.splat(error_N.number(builder.add(errors, t)))
                        grad = code.fma(error, vector, grad)
                        code.add_product(total, error, x)
                    grad_CP.store(grad, loop.index, column)
                for t, row, vector, total in zip(numbers, rows, vectors, sums, strict=True):
                    grad = builder.load(total)
                    if subtracts:
                        grad = builder.fsub(vector, grad, flags=simd.FAST)
                        rows_VR.store(grad, row, column, mask=mask)
                    else:
                        grad_TP.store(grad, t, column)

            _columns(code, dim, part)
        return context.get_dummy_value()

    kinds = error_N, context_CP, types.int64, rows_VR, ids_T, types.int64, types.int64, grad_CP
    return types.void(*kinds, in_place, grad_TP), generate


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
    for p in range(begin_V[word], begin_V[word + 1]):
        ids_T[targets], times_T[targets] = nodes_P[p], one
        labels_T[targets] = one - np.float32(codes_P[p])
        targets += 1
        counted += 1
    return targets, counted


@inlined
def _add_losses(loss, product, targets, times_T, losses_T, products_T):
    """Return the sum of losses and the product of factors; reset the targets'.

    The logarithm of the product is a part of the loss.
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


@functools.cache
def gradients(in_place: bool, cbow: bool) -> Callable:
    """Compile the loop over centers, as `cpu_loops.gradients` does.

    Targets are taken in groups, whose rows and gradients stay in registers while the contexts pass.
    """
    subtracts = int(in_place)

    @compiled
    def buffers(dim, window, words_n, sentences_n, first, windows_B, negatives_BK, *more):
        """Return matrices, arrays of targets, and arrays of pairs."""
        padded = (dim + LANES - 1) // LANES * LANES
        targets = 1 + negatives_BK.shape[1] + more[-1]  # more[-1]: nodes of the longest path
        contexts = 1 if cbow else 2 * window
        context_CP = np.zeros((contexts, padded), np.float32)
        grad_TP = np.zeros((1 if in_place else targets, padded), np.float32)
        numbers_T = np.zeros((3, targets), np.float32)
        of_targets = numbers_T[0], numbers_T[1], numbers_T[2], np.ones(targets, np.float32)
        factors_N = np.zeros(contexts * targets + LANES, np.float32)
        of_pairs = np.zeros_like(factors_N), np.zeros_like(factors_N), factors_N
        matrices = context_CP, np.zeros_like(context_CP), grad_TP
        return matrices, of_targets, np.zeros(targets, np.int64), of_pairs, factors_N.view(np.int32)

    @uncounted
    def loop(
        begin,
        end,
        dim,
        window,
        unique_in,
        unique_out,
        memory,
        words_n,
        sentences_n,
        first,
        windows_B,
        negatives_BK,
        input_VR,
        output_VR,
        lr,
        mean,
        factors_V,
        begin_V,
        nodes_P,
        codes_P,
        depth,
    ):
        path = begin_V, nodes_P, codes_P
        context_CP, grad_CP, grad_TP = memory[0]
        labels_T, times_T, losses_T, products_T = memory[1]
        ids_T = memory[2]
        logits_N, errors_N, factors_N = memory[3]
        bits_N = memory[4]
        padded = context_CP.shape[1]
        loss, product, pairs = 0.0, 1.0, 0

        for center in range(begin, end):
            at = first + center
            if center + PREFETCH < end:  # rows of a later center, and its new context word
                word = words_n[at + PREFETCH]
                for p in range(begin_V[word], begin_V[word + 1]):
                    _prefetch_row(output_VR, nodes_P[p], dim)
                if negatives_BK.shape[1]:
                    _prefetch_row(output_VR, word, dim)
                    for k in range(negatives_BK.shape[1]):
                        _prefetch_row(output_VR, negatives_BK[center + PREFETCH, k], dim)
                if at + PREFETCH + window < len(words_n):
                    _prefetch_row(input_VR, words_n[at + PREFETCH + window], dim)

            left, right = _window(sentences_n, at, windows_B[center])
            words = right - left - 1
            if words < 1:
                continue
            contexts = 1 if cbow else words
            pairs += contexts

            # List the targets, and load the contexts.
            targets, counted = _list_targets(
                center, words_n[at], negatives_BK, path, ids_T, labels_T, times_T
            )
            share = one / np.float32(words)
            scale = share if cbow and mean else one
            if cbow:
                for d in range(padded):
                    context_CP[0, d] = zero
            for c in range(left, right):
                if c == at:
                    continue
                if cbow:
                    simd.blend(one, context_CP, 0, scale, input_VR, words_n[c], dim)
                else:
                    n = c - left - (c > at)
                    simd.blend(0, context_CP, n, one, input_VR, words_n[c], dim)
            for c in range(contexts):
                for d in range(padded):
                    grad_CP[c, d] = zero

            # Logits, errors and losses of all pairs.
            _dots(context_CP, contexts, output_VR, ids_T, targets, dim, logits_N)
            numbers = (contexts * targets + LANES - 1) // LANES * LANES  # in whole vectors
            _sigmoids(numbers, logits_N, errors_N, factors_N, bits_N)
            for c in range(contexts):
                if c % LOGARITHMS == 0:
                    loss, product = _add_losses(
                        loss, product, targets, times_T, losses_T, products_T
                    )
                n = c * targets
                for t in range(targets):
                    # softplus(x) is max(0, x) + log(1 + exp(-|x|)); softplus(-x) is that less x.
                    x = logits_N[n + t]
                    losses_T[t] += max(x, zero) - labels_T[t] * x
                    products_T[t] *= factors_N[n + t]
                    errors_N[n + t] = (errors_N[n + t] - labels_T[t]) * times_T[t] * lr
            loss, product = _add_losses(loss, product, targets, times_T, losses_T, products_T)

            _pair_gradients(
                errors_N,
                context_CP,
                contexts,
                output_VR,
                ids_T,
                targets,
                dim,
                grad_CP,
                subtracts,
                grad_TP,
            )

            # Gradients of contexts go to their rows, and unless they have done so, of targets.
            if cbow and not mean:  # see `Objective`
                simd.blend(0, grad_CP, 0, share, grad_CP, 0, padded)
            for c in range(left, right):
                if c == at:
                    continue
                n = 0 if cbow else c - left - (c > at)
                if in_place:
                    factor = factors_V[min(words_n[c], len(factors_V) - 1)]
                    simd.blend(one, input_VR, words_n[c], -factor, grad_CP, n, dim)
                else:
                    _add(words_n[c], grad_CP, n, counted, unique_in)
            if not in_place:
                for t in range(targets):
                    times = contexts * int(times_T[t])
                    _add(ids_T[t], grad_TP, t, times, unique_out)
        return loss + math.log(product), pairs

    return over_centers(loop, buffers, in_place)
