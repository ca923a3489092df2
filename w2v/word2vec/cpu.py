"""Kernels of the CPU: the numba loops of cpu_loops.py on all threads.

Each thread keeps the gradients of its own centers, and each row is stepped by one thread with the
gradients of all: nothing is locked, and the same number of threads gives the same bits.

Shapes: n threads, V words, A rows, U unique rows of a thread, D dimensions.
"""

from __future__ import annotations

import itertools
import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from queue import SimpleQueue
from threading import Lock, Thread
from typing import Any

import numpy as np
import torch
from torch import Tensor

from w2v.rows.ops import View
from w2v.rows.shard import RoutedLookUp
from w2v.system.simd import AT_ONCE, LANES
from w2v.word2vec import cpu_loops
from w2v.word2vec.batch import (
    Batch,
    BatchSeed,
    Grads,
    Pool,
    RowGrads,
    StepShape,
    StepState,
    Update,
    max_batch_rows,
)
from w2v.word2vec.cpu_loops import padded
from w2v.word2vec.kernels import Kernels
from w2v.word2vec.reference import ReferenceKernels, expand, mark_pairs

MARKED_AT_ONCE = 1 << 20  # centers times their window
DRAWING_THREADS = 4  # more take as long to start, and delay the steps
NOTHING = torch.zeros(())  # loss and pairs before there are any
NO_PLACE = np.zeros(0, np.int32)  # of rows that are not borrowed
NO_PATH = tuple(np.zeros(0, kind) for kind in (np.int64, np.int32, np.uint8))  # without a tree


class Threads:
    """The caller and threads of a pool, which each call a function once.

    On 16 cores a step takes 8 to 15 % less time than with `ThreadPoolExecutor`.
    """

    def __init__(self, count: int):
        self.count = count
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        for _ in range(count - 1):
            Thread(target=_serve, args=(self._calls,), daemon=True).start()
        weakref.finalize(self, _end, self._calls, count - 1)

    def run(self, function: Callable[[int], Any], threads: int | None = None) -> list[Any]:
        """Call the function with the number of each thread; return results.

        threads: how many take part, by default all.
        """
        threads = threads or self.count
        results: list[Any] = [None] * threads
        errors: list[BaseException] = []
        finished, all_finished = itertools.count(1), Lock()
        all_finished.acquire()

        def call(number: int) -> None:
            try:
                results[number] = function(number)
            except BaseException as error:
                errors.append(error)
            if next(finished) == threads:
                all_finished.release()

        for number in range(1, threads):
            self._calls.put(partial(call, number))
        call(0)
        all_finished.acquire()  # waits for the other threads
        if errors:
            raise errors[0]
        return results


def _serve(calls: SimpleQueue) -> None:
    """Make calls until there is None."""
    while call := calls.get():
        call()
        del call  # it refers to arrays


def _end(calls: SimpleQueue, threads: int) -> None:
    """End the threads that serve."""
    for _ in range(threads):
        calls.put(None)


def share(part: int, parts: int, count: int) -> tuple[int, int]:
    """Return the edges [begin, end) of one of equal parts of range(count)."""
    return count * part // parts, count * (part + 1) // parts


class ThreadGrads:
    """Unique rows by thread, with a gradient for each.

    of_all: `UniqueRows` with a further dimension, the threads; of_thread: those of each thread;
    grad_NP: the gradients of all; listing: for `cpu_loops.list_places`. An owner of rows has two
    parts: even rows, then odd ones.
    """

    def __init__(self, rows: int, most: int, dim: int, threads: int):
        self.dim = dim
        index_nA = np.full((threads, rows), -1, np.int32)
        rows_nU, pairs_nU, owned_rows_nU, owned_nU = np.empty((4, threads, most), np.int32)
        # np.empty takes memory only where it is written, in huge pages. Rows are cache lines.
        size = threads * most * padded(dim)
        memory = np.empty(size + LANES, np.float32)
        first = -(memory.ctypes.data // memory.itemsize) % LANES
        self.grad_NP = memory[first : first + size].reshape(-1, padded(dim))
        grad_nUP = self.grad_NP.reshape(threads, most, padded(dim))
        # What threads write often is in cache lines of their own.
        count_n1 = np.zeros((threads, LANES), np.int64)[:, :1]
        starts_nP = np.zeros((threads, 2 * threads + 1 + LANES), np.int64)
        self.of_all = cpu_loops.UniqueRows(
            index_nA, rows_nU, grad_nUP, pairs_nU, count_n1, owned_rows_nU, owned_nU, starts_nP
        )
        # Sliced once: it takes longer than the centers of a small batch.
        self.of_thread = [*zip(*self.of_all, strict=True)]
        lists_3N = np.empty((3, threads * (most + 2) + 1), np.int32)
        self.listing = self.of_all[-3:], most, np.full(rows, -1, np.int32), lists_3N

    def has_room(self, rows: int) -> bool:
        return self.of_all.rows_U.shape[1] >= rows

    def gradients(self, count_pairs: bool) -> tuple[np.ndarray, np.ndarray]:
        """Return the gradients, and their pairs if these count."""
        return self.grad_NP, self.of_all.pairs_U.reshape(-1)[: None if count_pairs else 0]

    def sum_owned(self, owner: int) -> np.ndarray:
        """Sum gradients of an owner's rows; return rows and places of sums."""
        parts, grads = (2 * owner, 2 * owner + 2), self.gradients(count_pairs=True)
        start, count = cpu_loops.sum_owned(parts, self.listing, grads)
        return self.listing[3][:2, start : start + count]

    def merge(self, threads: Threads) -> RowGrads:
        """Return the rows, sorted, with sums over all threads."""
        found_2U = np.concatenate(threads.run(self.sum_owned), axis=1)
        rows_U, places_U = torch.from_numpy(found_2U[:, found_2U[0].argsort()])
        grad_NP, pairs_N = map(torch.from_numpy, self.gradients(True))
        grad_UD = grad_NP.index_select(0, places_U)[:, : self.dim]
        return RowGrads(None, rows_U, grad_UD, pairs_N.index_select(0, places_U), None)


class CpuKernels(Kernels):
    """The operations of `w2v.word2vec.kernels.Kernels` by numba.

    Until rows are stepped, `Grads` have `ThreadGrads` in place of `RowGrads`, but for rows that are
    borrowed from other ranks or composed in torch.
    """

    plans_rows = False
    in_place = False  # whether gradients, times lr, are subtracted from rows after each center
    input_factors = np.ones(1, np.float32)  # then, of gradients of input rows: [V], or [1] for all

    def __init__(self, shape: StepShape, threads: int):
        self.shape = shape
        self.threads = Threads(threads)
        self._rows: Any = None  # `ThreadGrads`
        self._owned: Any = None  # of the rows that other ranks have sent gradients of
        self._buffers: dict[tuple, list] = {}  # of each thread, by shape
        self._cdf_V = torch.empty(0)  # the distribution that `_starts` are of
        self._starts = np.empty(0, np.int32)

    def draw(
        self,
        seeds: Sequence[BatchSeed],
        widths: tuple[int, int],
        negatives: int,
        pool: Pool,
        cdf_V: Tensor,
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Draw windows and negatives as `reference.draw` does, on all threads."""
        cdf, threads = cdf_V.numpy(), min(self.threads.count, DRAWING_THREADS)
        if cdf_V is not self._cdf_V:
            parts = 1 << len(cdf).bit_length()
            starts = np.searchsorted(cdf, np.arange(parts) / parts, side="right")
            self._starts = starts.astype(np.int32)
            self._cdf_V = cdf_V
        for centers, key, pool_key in seeds:
            windows_B = np.empty(centers, np.int32)
            negatives_BK = np.empty((centers, negatives), np.int32)
            of_pool = pool.size, np.uint64(pool_key), *pool[1:]
            drawn = windows_B, negatives_BK
            arguments = np.uint64(key), *widths, of_pool, cdf, self._starts, *drawn
            self.threads.run(partial(_draw_share, arguments, centers, threads), threads)
            yield torch.from_numpy(windows_B), torch.from_numpy(negatives_BK)

    def subsample(
        self,
        key: int,
        words_N: Tensor,
        edges_S: np.ndarray,
        keep_V: Tensor,
        trained_S: np.ndarray,
        block_words: int,
        batch_size: int,
    ) -> tuple[Tensor, Tensor]:
        """Draw which words are kept, on all threads; see `reference.subsample`.

        The random bits are those of `splitmix64`, so the number of threads changes nothing.
        """
        edges_S = edges_S.astype(np.int64)
        kept_n = np.empty(len(words_N), np.int32)
        sentences_n = np.empty(len(words_N), np.int32)
        arguments = np.uint64(key), words_N.numpy(), edges_S, keep_V.numpy(), trained_S
        # Each thread takes about as many words, and leaves gaps behind the words that it keeps.
        shares = np.searchsorted(edges_S, np.linspace(0, edges_S[-1], self.threads.count + 1))

        def keep(thread: int) -> slice:
            begin, end = shares[thread], shares[thread + 1]
            count = cpu_loops.subsample(begin, end, *arguments, kept_n, sentences_n)
            return slice(edges_S[begin], edges_S[begin] + count)

        parts = self.threads.run(keep)
        kept, sentences = (
            np.concatenate([array[part] for part in parts]) for array in (kept_n, sentences_n)
        )
        mixed = kept, sentences
        if block_words:  # without torch's threads, which spin for a while after each operation
            mixed = np.empty_like(kept), np.empty_like(sentences)
            batches = max(1, -(-len(kept) // batch_size))
            cpu_loops.interleave(kept, sentences, block_words, batches, *mixed)
        return torch.from_numpy(mixed[0]), torch.from_numpy(mixed[1])

    def mark(self, batch: Batch, marks_A: Tensor) -> None:
        # In parts, as wide windows take memory. Called for several ranks, and subwords in torch.
        at_once = max(1, MARKED_AT_ONCE // batch.window)
        for begin in range(0, len(batch.windows_B), at_once):
            part = batch._replace(
                first=batch.first + begin,
                windows_B=batch.windows_B[begin : begin + at_once],
                negatives_BK=batch.negatives_BK[begin : begin + at_once],
            )
            marks_A |= mark_pairs(expand(part), len(marks_A))

    def unique_rows(self, batch: Batch) -> Any:
        """Return room for the rows, which `gradients` finds in its own pass."""
        shape, threads = self.shape, self.threads.count
        most = max_batch_rows(batch, shape.vectors, threads)
        if not (self._rows and self._rows.has_room(most)):
            self._rows = ThreadGrads(shape.rows, most, shape.dim, threads)
        return Grads(self._rows, NOTHING, NOTHING)

    def gradients(self, batch: Batch, view: View, grads: Any, lr: float) -> Any:
        """Run the compiled loop over the centers, on all threads."""
        cbow, mean, tree, _ = batch.objective
        in_place = self.in_place
        dim, threads = self.shape.dim, self.threads
        records_AR = view.records_SR.numpy()
        if in_place and records_AR.shape[1] == padded(dim):
            dim = padded(dim)  # the padding is zero and stays so; vectors of fewer lanes are slow
        drawn = batch.windows_B.numpy(), batch.negatives_BK.numpy()
        path = tuple(part.numpy() for part in tree[:3]) if tree else NO_PATH
        nodes = tree.depth if tree else 0
        centers, targets = drawn[0].shape[0], 1 + drawn[1].shape[1] + nodes
        most = AT_ONCE if tree else min(targets, AT_ONCE)
        place_A, is_borrowed = NO_PLACE, view.slot_of_A is not None
        if view.slot_of_A is not None:
            place_A = view.slot_of_A.numpy()
        given = rows = grads.rows
        if isinstance(given, RowGrads):
            rows = self.unique_rows(batch).rows
        kernel = cpu_loops.compile_gradients(most, in_place, cbow, is_borrowed)
        text = batch.words_n.numpy(), batch.sentences_n.numpy(), batch.first
        weight_d = batch.objective.weights(batch.window) * (lr if in_place else 1)
        factors = mean, weight_d.astype(np.float32), self.input_factors
        arrays = *text, *drawn, batch.window, *path, records_AR, place_A, dim, *factors
        shape = dim, batch.window, targets, cbow
        if shape not in self._buffers:
            self._buffers = {shape: [cpu_loops.make_buffers(*shape) for _ in range(threads.count)]}
        buffers = self._buffers[shape]
        # Begin and end of each, in cache lines of their own: all threads may change a begin. Arrays
        # have one layout for any number of threads, as loops are compiled for each layout.
        shares_nL = np.zeros((threads.count, LANES), np.int64)
        shares_nL[:, :2] = [share(n, threads.count, centers) for n in range(threads.count)]

        def run_share(thread: int) -> tuple[float, int]:
            unique = rows.of_thread[0 if in_place else thread]
            return kernel(thread, shares_nL, arrays, buffers[thread], unique)

        losses, pairs = zip(*threads.run(run_share), strict=True)
        # torch.tensor takes three times as long.
        loss, count = (torch.from_numpy(np.array(sum(parts))) for parts in (losses, pairs))
        if isinstance(given, RowGrads):
            assert given.index_A is not None, "rows of a batch"
            found_U, grad_UD, pairs_U = rows.merge(self.threads)[1:4]
            at_U = (found_U if is_borrowed else given.index_A[found_U]).long()
            given.grad_UD.index_copy_(0, at_U, grad_UD)
            if given.pairs_U is not None:
                given.pairs_U.index_copy_(0, at_U, pairs_U)
        return Grads(given, loss, count)

    def sum_by_row(self, requested: RoutedLookUp, grad_MD: Tensor, pairs_M: Tensor | None) -> Any:
        shape, threads = self.shape, self.threads.count
        ids, grads = requested.rows_M.numpy(), grad_MD.numpy()
        most = min(-(-len(ids) // threads), shape.shard_rows)
        if not (self._owned and self._owned.has_room(most)):
            self._owned = ThreadGrads(shape.shard_rows, most, shape.dim, threads)
        pairs = np.empty(0, np.int32) if pairs_M is None else pairs_M.numpy()

        def add(thread: int) -> None:
            begin, end = share(thread, threads, len(ids))
            unique = self._owned.of_thread[thread]
            cpu_loops.add_received(begin, end, threads, ids, grads, pairs, unique)

        self.threads.run(add)
        return self._owned

    def optimizer_step(self, update: Update, view: View, grads: Any, state: StepState) -> None:
        note_fault(state, 1, math.isfinite(grads.loss))
        if state.fault:
            return
        rows = grads.rows
        if not update.optimizer.formula:  # only the torch.optim class has it
            if isinstance(rows, ThreadGrads):
                rows = rows.merge(self.threads)
            summed = grads._replace(rows=rows)
            ReferenceKernels(self.shape).optimizer_step(update, view, summed, state)
            return
        arguments = step_arguments(update, view, rows)

        def step_owned(owner: int) -> bool:
            return cpu_loops.step_owned(owner, (2 * owner, 2 * owner + 2), rows.listing, arguments)

        note_fault(state, 2, all(self.threads.run(step_owned)))


def _draw_share(arguments: tuple, centers: int, threads: int, thread: int) -> None:
    """Draw windows and negatives of a thread's share of the centers."""
    cpu_loops.draw(*share(thread, threads, centers), *arguments)


class SequentialSgdKernels(CpuKernels):
    """Plain SGD with a step at each center, as word2vec.c and gensim make it.

    Threads write to the tables without locks (Niu et al. 2011, Hogwild, arXiv 1106.5730): with more
    than one, the result depends on their timing. Rows have been written when the loss shows that
    they are not finite.
    """

    in_place = True

    def unique_rows(self, batch: Batch) -> Any:
        no_rows: Any = ThreadGrads(0, 0, self.shape.dim, 1)
        return Grads(no_rows, NOTHING, NOTHING)

    def optimizer_step(self, update: Update, view: View, grads: Any, state: StepState) -> None:
        note_fault(state, 1, math.isfinite(grads.loss))


def note_fault(state: StepState, bit: int, is_sound: bool) -> None:
    """Record a fault of this step, unless `is_sound`.

    Sound steps call no torch operation, which would take longer than this check.
    """
    if not is_sound:
        state.mark_fault(bit, torch.tensor(False))


def step_arguments(update: Update, view: View, grads: ThreadGrads) -> tuple[Any, ...]:
    """Count a step; return the last arguments of `cpu_loops.step_rows`."""
    optimizer, table, lr = update
    step, step_column = optimizer.count_step(table)
    constants = np.array([*optimizer.hyper(lr), step], np.float64)
    formula, cap = cpu_loops.FORMULAS.index(optimizer.formula), optimizer.occurrence_cap
    records_SR = view.records_SR.numpy()
    # By torch, they begin at a cache line.
    widths = padded(records_SR.shape[1]), padded(grads.dim)
    threads = len(grads.of_thread)
    spare = (torch.empty(threads, width, dtype=torch.float32).numpy() for width in widths)
    given = grads.gradients(count_pairs=cap > 0), (*spare, grads.dim), formula
    row = optimizer.state_count, records_SR, step_column, constants, cap
    return *given, *row
