"""Kernels of the CPU: the numba loops of cpu_loops.py on all threads.

Each thread keeps the gradients of its own centers, and each row is stepped by one thread with the
gradients of all: nothing is locked, and the same number of threads gives the same bits.

Shapes: n threads, V words, A rows, U unique rows of a thread, D dimensions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from w2v.rows.ops import View
from w2v.system.simd import AT_ONCE, LANES
from w2v.word2vec import cpu_loops, reference
from w2v.word2vec.batch import (
    Batch,
    BatchSeed,
    Grads,
    IdsByRank,
    Objective,
    Pool,
    RowGrads,
    RowOptimizer,
    StepShape,
    StepState,
    Table,
    Tree,
    Update,
    max_batch_rows,
)
from w2v.word2vec.cpu_loops import padded
from w2v.word2vec.reference import ReferenceKernels

NOTHING = torch.zeros(())  # loss and pairs before there are any
NO_PATH = tuple(np.zeros(0, kind) for kind in (np.int64, np.int32, np.uint8))  # without a tree


class Threads:
    """Pool of threads that calls a function once on each."""

    def __init__(self, count: int):
        self.count = count
        self._pool = ThreadPoolExecutor(count)

    def run(self, function: Callable[[int], Any]) -> list[Any]:
        """Call the function with the number of each thread."""
        if self.count == 1:
            return [function(0)]
        return list(self._pool.map(function, range(self.count)))


def share(part: int, parts: int, count: int) -> tuple[int, int]:
    """Return the edges [begin, end) of one of equal parts of range(count)."""
    return count * part // parts, count * (part + 1) // parts


class ThreadGrads:
    """Unique rows by thread, with a gradient for each.

    of_all: `UniqueRows` with a further dimension, the threads; of_thread: those of each thread;
    grad_NP: the gradients of all; first_A, int32 -1, and summed_nU, int32, are for `step_rows`.
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
        grads = rows_nU, self.grad_NP.reshape(threads, most, padded(dim)), pairs_nU
        # What threads write often is in cache lines of their own.
        count_n1 = np.zeros((threads, LANES), np.int64)[:, :1]
        starts_nO = np.zeros((threads, threads + 1 + LANES), np.int64)
        owned = owned_rows_nU, owned_nU, starts_nO
        self.of_all = cpu_loops.UniqueRows(index_nA, *grads, count_n1, *owned)
        # Sliced once: it takes longer than the centers of a small batch.
        self.of_thread = [*zip(*self.of_all, strict=True)]
        self.first_A = np.full(rows, -1, np.int32)
        blocks = rows // (cpu_loops.ROWS_PER_OWNER * threads) + 1  # of an owner
        self.summed_nU = np.empty((2 * threads, blocks * cpu_loops.ROWS_PER_OWNER), np.int32)

    def has_room(self, rows: int) -> bool:
        return self.of_all.rows_U.shape[1] >= rows

    def gradients(self, count_pairs: bool) -> tuple[np.ndarray, ...]:
        """Return what `cpu_loops.sum_threads` takes; pairs only if they count."""
        pairs_N = self.of_all.pairs_U.reshape(-1)[: None if count_pairs else 0]
        return self.grad_NP, pairs_N, *self.of_all[-3:]

    def merge(self, threads: Threads) -> tuple[Tensor, Tensor, Tensor]:
        """Return unique rows, their gradients summed over all threads, and pairs."""
        grads = self.gradients(count_pairs=True)

        def sum_rows(owner: int) -> np.ndarray:
            summed_2U = self.summed_nU[2 * owner : 2 * owner + 2]
            return summed_2U[:, : cpu_loops.sum_threads(owner, grads, self.first_A, *summed_2U)]

        found_2U = np.concatenate(threads.run(sum_rows), axis=1)
        rows_U, places_U = torch.from_numpy(found_2U).long()
        grad_NP, pairs_N = map(torch.from_numpy, grads[:2])
        grad_UD = grad_NP.index_select(0, places_U)[:, : self.dim]
        return rows_U, grad_UD, pairs_N.index_select(0, places_U)


class CpuKernels:
    """The operations of `w2v.word2vec.kernels.Kernels` by numba.

    Until rows are stepped, `Grads` have `ThreadGrads` in place of `RowGrads`.
    """

    plans_rows = False
    in_place = False  # whether gradients, times lr, are subtracted from rows after each center
    input_factors = np.ones(1, np.float32)  # then, of gradients of input rows: [V], or [1] for all

    def __init__(self, shape: StepShape, threads: int):
        self.shape = shape
        self.threads = Threads(threads)
        self._rows: Any = None  # `ThreadGrads`
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
        cdf = cdf_V.numpy()
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
            self.threads.run(partial(self._draw_share, arguments, centers))
            yield torch.from_numpy(windows_B), torch.from_numpy(negatives_BK)

    def _draw_share(self, arguments: tuple, centers: int, thread: int) -> None:
        cpu_loops.draw(*share(thread, self.threads.count, centers), *arguments)

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
        words_n = torch.from_numpy(kept)
        return reference.interleave(words_n, torch.from_numpy(sentences), block_words, batch_size)

    def mark(self, batch: Batch, marks_A: Tensor) -> None:
        ReferenceKernels(self.shape).mark(batch, marks_A)

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
        kernel = cpu_loops.compile_gradients(most, in_place, cbow)
        text = batch.words_n.numpy(), batch.sentences_n.numpy(), batch.first
        weight_d = batch.objective.weights(batch.window) * (lr if in_place else 1)
        factors = mean, weight_d.astype(np.float32), self.input_factors
        arrays = *text, *drawn, batch.window, *path, records_AR, dim, *factors
        shape = dim, batch.window, targets, cbow
        if shape not in self._buffers:
            self._buffers = {shape: [cpu_loops.make_buffers(*shape) for _ in range(threads.count)]}
        buffers = self._buffers[shape]
        # Begin and end of each, in cache lines of their own: all threads may change a begin. Arrays
        # have one layout for any number of threads, as loops are compiled for each layout.
        shares_nL = np.zeros((threads.count, LANES), np.int64)
        shares_nL[:, :2] = [share(n, threads.count, centers) for n in range(threads.count)]

        def run_share(thread: int) -> tuple[float, int]:
            unique = grads.rows.of_thread[0 if in_place else thread]
            return kernel(thread, shares_nL, arrays, buffers[thread], unique)

        losses, pairs = zip(*threads.run(run_share), strict=True)
        # torch.tensor takes three times as long.
        loss, count = (torch.from_numpy(np.array(sum(parts))) for parts in (losses, pairs))
        return Grads(grads.rows, loss, count)

    def optimizer_step(self, update: Update, view: View, grads: Any, state: StepState) -> None:
        note_fault(state, 1, math.isfinite(grads.loss))
        if state.fault:
            return
        optimizer, table, lr = update
        if not optimizer.formula:  # only the torch.optim class has it
            rows_U, grad_UD, pairs_U = grads.rows.merge(self.threads)
            merged = RowGrads(grads.rows.first_A, rows_U.int(), grad_UD, pairs_U, None)
            summed = grads._replace(rows=merged)
            ReferenceKernels(self.shape).optimizer_step(update, view, summed, state)
            return
        arguments = step_arguments(optimizer, table, view, grads.rows, lr)
        faults = self.threads.run(lambda thread: cpu_loops.step_rows(thread, *arguments))
        for number in range(2):
            note_fault(state, 2 << number, not any(fault >> number & 1 for fault in faults))


class CpuShardKernels(CpuKernels, ReferenceKernels):
    """The operations of `w2v.kernels.ShardKernels` by numba.

    Borrowed rows are those of L local words, on which the loop of one process runs. The gradients
    that ranks send of this one's rows are summed as those of threads are.
    """

    def __init__(self, shape: StepShape, threads: int):
        ReferenceKernels.__init__(self, shape)
        CpuKernels.__init__(self, shape, threads)
        self._is_listed_A = np.zeros(shape.rows, np.bool_)
        self._local_V = np.full(shape.vectors, -1, np.int32)  # each word's number in a batch
        self._indices_L = np.empty(0, np.int32)  # of the rows of local words, in the list of rows
        self._weights_LP = torch.empty(0, padded(shape.dim))
        self._owned: Any = None  # `ThreadGrads` of the shard

    def _by_owner(self, batch: Batch, send_N: Tensor) -> tuple[Tensor, Tensor]:
        shape, tree = self.shape, batch.objective.tree
        most = max_batch_rows(batch, shape.vectors) + shape.world_size * shape.header_rows
        rows_U, ids_U = torch.empty(most, dtype=torch.int64), torch.empty(most, dtype=torch.int32)
        text = batch.words_n.numpy(), batch.sentences_n.numpy(), batch.first
        drawn = batch.windows_B.numpy(), batch.negatives_BK.numpy()
        path = tuple(part.numpy() for part in tree[:2]) if tree else NO_PATH[:2]
        memory = self._is_listed_A, send_N.numpy(), np.empty(most, np.int64)
        listed = rows_U.numpy(), ids_U.numpy()
        cpu_loops.list_requests(text, drawn, path, shape.header_rows, *memory, *listed)
        return rows_U, ids_U

    def own(self, ids_M: Tensor) -> Any:
        """Return room for the gradients that `collect` adds."""
        shape, threads = self.shape, self.threads.count
        most = min(-(-len(ids_M) // threads), shape.shard_rows)
        if not (self._owned and self._owned.has_room(most)):
            self._owned = ThreadGrads(shape.shard_rows, most, shape.dim, threads)
        loss, pairs = torch.zeros(2, dtype=torch.float64)
        return Grads(self._owned, loss, pairs.long())

    def gather_weights(self, ids_M: Tensor, view: View) -> Tensor:
        weights_MD = torch.empty(len(ids_M), self.shape.dim)
        arrays = ids_M.numpy(), view.records_SR.numpy(), weights_MD.numpy()
        self._on_shares(len(ids_M), lambda _, *part: cpu_loops.gather_weights(*part, *arrays))
        return weights_MD

    def borrow(self, rows_U: Tensor, weights_UD: Tensor, owned: Grads) -> tuple[Grads, View]:
        if len(self._weights_LP) < 2 * len(rows_U):
            self._weights_LP = torch.empty(2 * len(rows_U), padded(self.shape.dim))
            self._indices_L = np.empty(2 * len(rows_U), np.int32)
        arrays = self._local_V, self._indices_L, self._weights_LP.numpy()
        cpu_loops.number_words(rows_U.numpy(), weights_UD.numpy(), *arrays)
        pairs_U = None
        if self.shape.count_pairs:
            pairs_U = torch.empty(len(rows_U), dtype=torch.int32)
        rows = RowGrads(rows_U, None, torch.empty_like(weights_UD), pairs_U, None)
        return Grads(rows, owned.loss, owned.pairs), View(self._weights_LP, None)

    def gradients(self, batch: Batch, view: View, grads: Any, lr: float) -> Any:
        local_V, rows_U = self._local_V, grads.rows.index_A
        centers = batch.windows_B.shape[0]
        text = slice(max(batch.first - batch.window, 0), batch.first + centers + batch.window)
        local = batch._replace(
            words_n=torch.from_numpy(local_V[batch.words_n[text].numpy()]),
            sentences_n=batch.sentences_n[text],
            first=batch.first - text.start,
            negatives_BK=torch.from_numpy(local_V[batch.negatives_BK.numpy()]),
            objective=self._local_objective(batch.objective, rows_U),
        )
        found = super().gradients(local, view, self.unique_rows(batch), lr)
        local_V[rows_U.numpy() // 2] = -1
        grad_UD, pairs_U = grads.rows[2:4]
        pairs = np.empty(0, np.int32) if pairs_U is None else pairs_U.numpy()
        sums, lists = found.rows, (self._indices_L, grad_UD.numpy(), pairs)
        arrays = sums.gradients(count_pairs=True), sums.first_A, sums.summed_nU, *lists
        self.threads.run(lambda owner: cpu_loops.copy_sums(owner, *arrays))
        return grads._replace(loss=found.loss, pairs=found.pairs)

    def _local_objective(self, objective: Objective, rows_U: Tensor) -> Objective:
        """Return the objective with the paths of local words, in local nodes."""
        if objective.tree is None:
            return objective
        begin_V, nodes_P, codes_P = (part.numpy() for part in objective.tree[:3])
        words_L = np.unique(rows_U.numpy()[rows_U.numpy() >= 0] // 2)
        words_L = words_L[np.argsort(self._local_V[words_L])]
        words_L = words_L.clip(max=len(begin_V) - 2)  # others are nodes, and have no path
        lengths_L = begin_V[words_L + 1] - begin_V[words_L]
        begin_L = np.concatenate([[0], lengths_L.cumsum()])
        at_P = np.repeat(begin_V[words_L] - begin_L[:-1], lengths_L) + np.arange(begin_L[-1])
        arrays = begin_L, self._local_V[nodes_P[at_P]], codes_P[at_P]
        begin, nodes, codes = map(torch.from_numpy, arrays)
        return objective._replace(tree=Tree(begin, nodes, codes, objective.tree.depth))

    def collect(
        self, received: IdsByRank, grads: tuple[Tensor, Tensor | None], owned: Any, fault: Tensor
    ) -> None:
        grad_MD, pairs_M = grads
        pairs = np.empty(0, np.int32) if pairs_M is None else pairs_M.numpy()
        arrays = self.threads.count, received.ids_M.numpy(), grad_MD.numpy(), pairs

        def add(thread: int, begin: int, end: int) -> None:
            cpu_loops.add_received(begin, end, *arrays, owned.rows.of_thread[thread])

        self._on_shares(len(grad_MD), add)
        self._join_headers(received, grad_MD, owned, fault)

    def _on_shares(self, count: int, function: Callable[[int, int, int], None]) -> None:
        """Call a function with each thread's number and its share of `count`."""
        threads = self.threads.count
        self.threads.run(lambda thread: function(thread, *share(thread, threads, count)))


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


def step_arguments(
    optimizer: RowOptimizer, table: Table, view: View, grads: ThreadGrads, lr: float
) -> tuple[Any, ...]:
    """Count a step of a table; return the arguments of its `step_rows`."""
    step, step_column = optimizer.count_step(table)
    constants = np.array([*optimizer.hyper(lr), step], np.float64)
    formula = cpu_loops.FORMULAS[optimizer.formula]
    cap = optimizer.occurrence_cap
    records_SR = view.records_SR.numpy()
    spare_nR = np.empty((len(grads.of_thread), records_SR.shape[1]), np.float32)
    memory = grads.first_A, grads.summed_nU, spare_nR
    records = records_SR, step_column, constants
    gradients = grads.gradients(count_pairs=cap > 0)
    return formula, optimizer.state_count, *records, gradients, memory, cap, grads.dim
