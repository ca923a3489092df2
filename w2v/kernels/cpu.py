"""The CPU's kernels: what numba compiles (compiled.py), called with torch's tensors from as many threads as there are.

Needs numba. Each thread keeps the gradients of its own centers, and each row is stepped by one thread with the gradients of all, so
that nothing is locked and the same number of threads gives the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from torch import Tensor

from w2v.kernels import cpu_loops as compiled
from w2v.kernels.batch import Batch, Held
from w2v.kernels.cuda import Hyper


class Threads:
    """So many threads, to call a function with the number of each."""

    def __init__(self, count: int):
        self.count = count
        self._pool = ThreadPoolExecutor(count)

    def run(self, function: Callable[[int], Any]) -> list[Any]:
        return (
            list(self._pool.map(function, range(self.count))) if self.count > 1 else [function(0)]
        )


class Claims:
    """The rows of a table that the centers of each of n threads touch, `most` at most, and the gradients of these rows.

    number_nV: int32, the number of each row, or -1; rows_nU: int32, the row of each number; grad_nUD: its gradient;
    pairs_nU: int32, how many pairs a gradient sums; count_n: how many rows.
    """

    def __init__(self, rows: int, most: int, dim: int, threads: int):
        most = min(rows, most)
        self.number_nV = np.full((threads, rows), -1, np.int32)
        self.rows_nU = np.empty((threads, most), np.int32)
        self.grad_nUD = np.empty(
            (threads, most, dim), np.float32
        )  # takes memory only where it is touched
        self.pairs_nU = np.empty((threads, most), np.int32)
        self.count_n = np.zeros(threads, np.int64)

    def hold(self, most: int) -> bool:
        """Whether there is room for so many rows."""
        return self.rows_nU.shape[1] >= min(self.number_nV.shape[1], most)

    def of(self, thread: int) -> tuple[np.ndarray, ...]:
        return *(
            part[thread] for part in (self.number_nV, self.rows_nU, self.grad_nUD, self.pairs_nU)
        ), self.count_n[thread : thread + 1]

    def take(self) -> tuple[Tensor, Tensor, Tensor]:
        """The sorted unique rows (int64), the gradient of each and how many pairs it sums (int64), which ends the claims."""
        rows, grads, pairs = (
            torch.from_numpy(
                np.concatenate(
                    [
                        of_thread[:count]
                        for of_thread, count in zip(parts, self.count_n, strict=True)
                    ]
                )
            )
            for parts in (self.rows_nU, self.grad_nUD, self.pairs_nU)
        )
        rows_U, slots = torch.unique(rows.long(), return_inverse=True)
        self.number_nV[:, rows_U.numpy()] = -1
        self.count_n[:] = 0
        grad_UD = grads.new_zeros(len(rows_U), grads.shape[1]).index_add_(0, slots, grads)
        return rows_U, grad_UD, torch.zeros_like(rows_U).index_add_(0, slots, pairs.long())


def skipgram(
    threads: Threads,
    batch: Batch,
    inputs: Held,
    input_claims: Claims,
    outputs: Held,
    output_claims: Claims,
) -> tuple[Tensor, Tensor]:
    """Add the gradients of the batch's summed loss to the claims; give that loss (float64) and its number of positive pairs (int64)."""
    dim = input_claims.grad_nUD.shape[2]
    return _pass_over(
        threads,
        batch,
        inputs,
        outputs,
        dim,
        None,
        lambda thread: (*input_claims.of(thread), *output_claims.of(thread)),
    )


def descend(
    threads: Threads, batch: Batch, inputs: Held, outputs: Held, dim: int, lr: float
) -> tuple[Tensor, Tensor]:
    """A step of gradient descent for each center, straight into the tables; threads overtake each other as they come (Niu et al. 2011,
    Hogwild, arXiv 1106.5730), one thread takes the centers in their order. Gives what `skipgram` gives."""
    nothing = Claims(0, 0, dim, 1).of(0)
    return _pass_over(threads, batch, inputs, outputs, dim, lr, lambda _: (*nothing, *nothing))


def _pass_over(
    threads: Threads,
    batch: Batch,
    inputs: Held,
    outputs: Held,
    dim: int,
    lr: float | None,
    claims: Callable[[int], tuple],
) -> tuple[Tensor, Tensor]:
    """Have each thread take an equal share of the centers, to descend by `lr` where one is given."""
    kernel = compiled.skipgram(dim, 1 + batch.negatives_BK.shape[1], lr is not None)
    size, scale = len(batch.windows_B), np.float32(1 if lr is None else lr)
    text = (
        batch.words_n.numpy(),
        batch.sentences_n.numpy(),
        batch.first,
        batch.windows_B.numpy(),
        batch.negatives_BK.numpy(),
        batch.window,
    )
    records = inputs.records_SR.numpy(), outputs.records_SR.numpy()

    def share(thread: int) -> tuple[float, int]:
        begin, end = (size * part // threads.count for part in (thread, thread + 1))
        return kernel(*text, begin, end, *records, scale, *claims(thread))

    losses, pairs = zip(*threads.run(share), strict=True)
    return torch.tensor(sum(losses), dtype=torch.float64), torch.tensor(sum(pairs))


def step_rows(
    threads: Threads,
    formula: str,
    held: Held,
    claims: Claims,
    step: float,
    step_column: int,
    hyper: Hyper,
    cap: int,
) -> bool:
    """One optimizer step of the claimed rows, the table's `step`th, which ends the claims. Gives whether all rows stayed finite; those
    that would not are left as they were.

    A row's own count of steps is at `step_column` of its record, if that is not negative. A gradient that sums more than `cap` pairs is
    scaled by cap / pairs, if cap is not 0.
    """
    number, constants = getattr(compiled, formula.upper()), np.array([*hyper, step], np.float64)
    claimed = claims.number_nV, claims.rows_nU, claims.grad_nUD, claims.pairs_nU, claims.count_n
    arguments = number, held.records_SR.numpy(), step_column, constants, *claimed, cap
    faults = threads.run(lambda thread: compiled.step_rows(thread, threads.count, *arguments))
    claims.count_n[:] = 0
    return not any(faults)


def inversion(cdf_V: Tensor) -> Callable[[Tensor], Tensor]:
    """`sampler.search` by a table of where to begin looking, which leaves a step or two for each number.

    It has a power of two of entries, so that rounding cannot lead past the word.
    """
    cdf = cdf_V.numpy()
    entries = 1 << len(cdf).bit_length()
    starts = np.searchsorted(cdf, np.arange(entries) / entries, side="right").astype(np.int32)

    def invert(uniform: Tensor) -> Tensor:
        words = torch.empty(uniform.shape, dtype=torch.int32)
        compiled.invert(cdf, starts, uniform.numpy().reshape(-1), words.numpy().reshape(-1))
        return words

    return invert
