"""Kernels of an NVIDIA GPU: the sources in cu/, on records in place.

Gradients are added in the order in which threads come, so bits differ from run to run.

Shapes: B centers, K negatives, V words, A rows, U unique rows, D dimensions, S slots.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Hashable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from w2v.rows import launch
from w2v.rows.launch import ELEMENTS, THREADS, Kernel, blocks_for, c_struct, kernel, shared_bytes
from w2v.rows.ops import View, no_places, step_kernel
from w2v.system.random import signed
from w2v.word2vec import reference
from w2v.word2vec.batch import (
    FAULT_BITS,
    SUMS,
    Batch,
    BatchSeed,
    Grads,
    Pool,
    RowGrads,
    StepShape,
    StepState,
    Update,
    max_batch_rows,
    zeros_by_step,
)
from w2v.word2vec.kernels import Kernels

launch.SOURCES.append(Path(__file__).parent / "cu")
# Dimensions of CBOW: a row and a count in the 48 KiB of shared memory that a block has by itself.
MOST_CBOW_DIM = 12_287
DRAWN_AT_ONCE = 1 << 19  # centers
BLOCKS_AT_ONCE = 2  # of skip-gram, that run on a processor
WARP_WORDS = 1024  # of a text that one warp of draw.cu subsamples
INPUT_FAULT = 2  # bit of FAULTS; that of output vectors is the next


def batch_struct(batch: Batch) -> Any:
    """Return a batch for launches."""
    tree = batch.objective.tree
    begin_V, nodes_P, codes_P, _ = tree or (None, None, None, 0)
    return c_struct("batch.cuh", "Batch")(
        words=batch.words_n,
        sentences=batch.sentences_n,
        length=batch.words_n.shape[0],
        first=batch.first,
        centers=batch.windows_B.shape[0],
        windows=batch.windows_B,
        negatives=batch.negatives_BK,
        path_begin=begin_V,
        nodes=nodes_P,
        codes=codes_P,
    )


def draw(
    seeds: Sequence[BatchSeed], widths: tuple[int, int], negatives: int, pool: Pool, cdf_V: Tensor
) -> Iterator[tuple[Tensor, Tensor]]:
    """Draw as `reference.draw` does, many batches by one kernel."""
    device = cdf_V.device
    at_once = max(1, DRAWN_AT_ONCE // max((seed.centers for seed in seeds), default=1))
    for first in range(0, len(seeds), at_once):
        drawn = seeds[first : first + at_once]
        sizes = [seed.centers for seed in drawn]
        keys = [signed(seed.key) for seed in drawn] + [signed(seed.pool_key) for seed in drawn]
        centers = sum(sizes)
        windows_B = torch.empty(centers, dtype=torch.int32, device=device)
        negatives_BK = torch.empty(centers, negatives, dtype=torch.int32, device=device)
        # From pinned memory, as copies from other memory wait for the GPU.
        edges = itertools.accumulate(sizes, initial=0)
        numbers = torch.tensor([*edges, *keys], device="cpu").pin_memory()
        edges_N, keys_N = numbers.to(device, non_blocking=True).split([1 + len(sizes), len(keys)])
        kernel("draw.cu", "draw")(
            blocks_for(centers * (1 + negatives)),
            edges=edges_N,
            keys=keys_N,
            batches=len(sizes),
            count=negatives,
            lowest=widths[0],
            widest=widths[1],
            pool=pool,
            cdf=cdf_V,
            entries=cdf_V.shape[0],
            windows=windows_B,
            negatives=negatives_BK,
        )
        yield from zip(windows_B.split(sizes), negatives_BK.split(sizes), strict=True)


def subsample(
    key: int,
    words_N: Tensor,
    edges_S: np.ndarray,
    keep_V: Tensor,
    trained_S: np.ndarray,
    block_words: int,
    batch_size: int,
) -> tuple[Tensor, Tensor]:
    """Draw the words that are kept, the same as `CpuKernels.subsample`."""
    device, count = words_N.device, words_N.shape[0]
    edges = torch.from_numpy(edges_S.astype(np.int64)).to(device)
    trained = None if trained_S.all() else torch.from_numpy(trained_S).to(device)
    stretches = -(-count // WARP_WORDS)
    kept = torch.empty(stretches, WARP_WORDS // 32, dtype=torch.int32, device=device)
    counts = torch.zeros(stretches + 2, dtype=torch.int32, device=device)
    sentences = len(trained_S)
    text = c_struct("draw.cu", "Text")(
        words=words_N, length=count, edges=edges, sentences=sentences
    )
    blocks = max(1, -(-32 * stretches // THREADS))
    kernel("draw.cu", "choose_kept")(
        blocks,
        key=key,
        text=text,
        keep=keep_V,
        trained=trained,
        kept=kept,
        counts=counts,
        stretches=stretches,
        done=counts[stretches + 1 :],
    )
    size = int(counts[stretches])  # waits for the device
    words_n, sentences_n = torch.empty(2, size, dtype=torch.int32, device=device).unbind()
    kernel("draw.cu", "list_kept")(
        blocks,
        text=text,
        kept=kept,
        counts=counts,
        stretches=stretches,
        block_words=block_words,
        batches=max(1, -(-size // batch_size)),
        kept_words=words_n,
        kept_sentences=sentences_n,
    )
    return words_n, sentences_n


class CudaKernels(Kernels):
    """The operations of `w2v.word2vec.kernels.Kernels` by CUDA kernels."""

    plans_rows = False  # batches share one set of buffers, which is free after the optimizer's step
    draw = staticmethod(draw)
    subsample = staticmethod(subsample)
    _peers = 0  # ranks that read each other's memory
    further_rows = 0  # of subwords, for which the buffers of unique rows have room

    def __init__(self, shape: StepShape):
        self.shape = shape
        self._borrowed = c_struct("gradients.cu", "Borrowed")(begin=0, me=0)
        self._places = no_places()
        self._rows: RowGrads | None = None
        # The planning stream, which lists rows, must not share zeros with the steps.
        self._listed: RowGrads | None = None
        self._listed_counts = zeros_by_step(shape.device, (torch.int64, ()))
        self._sums = zeros_by_step(shape.device, *SUMS)
        self._done = torch.zeros((), dtype=torch.int32, device=shape.device)  # blocks of a step
        self._bound: dict[Hashable, tuple[tuple, Kernel]] = {}

    def list_rows(self, batch: Batch) -> Tensor:
        shape = self.shape
        most = max_batch_rows(batch, shape.vectors)
        self._listed = with_room(self._listed, most, shape.rows, shape, dim=0)
        (count,) = next(self._listed_counts)
        index_A, listed_X = self._listed[:2]
        assert index_A is not None and listed_X is not None
        find_unique_rows(batch, self._listed._replace(row_count=count))
        is_row_X = torch.arange(len(listed_X), device=shape.device) < count
        rows_X = torch.where(is_row_X, listed_X, -1).long()
        index_A.index_fill_(0, rows_X.clamp(min=0), -1)
        return rows_X

    def mark(self, batch: Batch, marks_A: Tensor) -> None:
        _list_kernel("mark", batch)(_blocks(batch), batch=batch_struct(batch), marks=marks_A)

    def unique_rows(self, batch: Batch) -> Grads:
        most = max_batch_rows(batch, self.shape.vectors) + self.further_rows
        self._rows = with_room(self._rows, most, self.shape.rows, self.shape)
        self._list_unique(batch, self._rows)
        return self._with_sums(self._rows)

    def gradients(self, batch: Batch, view: View, grads: Grads, lr: float) -> Grads:
        cbow, mean, tree, weighted = batch.objective
        targets = _word_targets(batch)
        if tree and not (tree.depth or targets):  # one word, which nothing predicts
            mask_BC = reference.expand(batch).context_mask_BC
            return grads._replace(pairs=(mask_BC.any(1) if cbow else mask_BC).sum())

        shared = 0 if cbow or tree else window_bytes(batch.window, self.shape.dim)

        def bind() -> Kernel:
            launch = kernel(
                "gradients.cu",
                "cbow" if cbow else "skipgram",
                WINDOW=batch.window,
                TARGETS=targets,
                PATHS=int(tree is not None),
                DIM=self.shape.dim,
                ELEMENT=ELEMENTS[view.records_SR.dtype],
                COUNTED=int(self.shape.count_pairs),
                MEAN=int(mean),
                RANKS=max(1, self._peers),
                SHARED=shared,
                WEIGHTED=weighted,
                CBOW=int(cbow),
            )
            return launch.bind(
                view=view,
                rows=grads.rows,
                row_width=view.records_SR.shape[1],
                borrowed=self._borrowed,
            )

        what = batch.window, targets, batch.objective, view, grads.rows
        launch = self._bind("gradients", what, bind)
        # Windows slide over consecutive centers of a warp, so no more blocks than run at a time.
        # Kernels that move rows may keep a block waiting: then they are many, and short.
        per_processor = BLOCKS_AT_ONCE if shared and view.slot_of_A is None else 8
        blocks = blocks_for(32 * batch.windows_B.shape[0], per_processor)
        launch(blocks, batch=batch_struct(batch), loss=grads.loss, pairs=grads.pairs)
        return grads

    def optimizer_step(self, update: Update, view: View, grads: Grads, state: StepState) -> None:
        optimizer, table, lr = update
        step, step_column = optimizer.count_step(table)

        def bind() -> Kernel:
            dtype = view.records_SR.dtype
            launch = step_kernel(optimizer, dtype, self.shape.dim, self._peers)
            return launch.bind(
                view=view,
                rows=grads.rows,
                row_width=view.records_SR.shape[1],
                dim=self.shape.dim,
                step_column=step_column,
                cap=optimizer.occurrence_cap,
                hyper=optimizer.hyper(lr),
                places=self._places,
                stepped=state.rows_updated,
                fault=state.fault,
                bit=INPUT_FAULT,
                outputs_end=self.shape.outputs_end,
                done=self._done,
            )

        launch = self._bind("step", (optimizer, state, view, grads.rows), bind)
        launch(
            # An upper bound: the number of rows is known on the device alone.
            blocks_for(32 * grads.rows.grad_UD.shape[0]),
            lr=float(lr),
            table_step=step,
            seed=table.next_rounding_seed(),
            loss=grads.loss,
            this_step=state.step << FAULT_BITS,
        )

    def _list_unique(self, batch: Batch, rows: RowGrads, slot: int = 0) -> None:
        """List the unique rows of a batch, in the buffers of a slot."""

        def bind() -> Kernel:
            return _list_kernel("unique_rows", batch).bind(rows=rows)

        form = batch.window, _word_targets(batch), batch.objective
        launch = self._bind(slot, (*form, rows), bind)
        launch(_blocks(batch), batch=batch_struct(batch))

    def _with_sums(self, rows: RowGrads) -> Grads:
        """Return buffers with the sums of a step, which are zero."""
        loss, pairs = next(self._sums)
        return Grads(rows, loss, pairs)

    def _bind(self, use: Hashable, what: tuple, bind: Callable[[], Kernel]) -> Kernel:
        """Return the launcher of a use, bound anew if it was for other objects."""
        bound = self._bound.get(use)
        if bound is None or not all(map(operator.is_, bound[0], what)):
            bound = self._bound[use] = what, bind()
        return bound[1]


class TorchStepKernels(CudaKernels):
    """CUDA kernels with torch's own step, for optimizers without a formula."""

    plans_rows = True  # torch has to know how many rows there are

    def unique_rows(self, batch: Batch) -> Grads:
        shape = self.shape
        # A list of its own, as the batches before may still be on their way.
        listed = with_room(None, max_batch_rows(batch, shape.vectors), shape.rows, shape, dim=0)
        find_unique_rows(batch, listed)
        rows_U = listed.unique_rows()
        grad_UD = torch.zeros(rows_U.shape[0], shape.dim, device=shape.device)
        pairs_U = torch.zeros_like(rows_U)
        return self._with_sums(listed._replace(rows_U=rows_U, grad_UD=grad_UD, pairs_U=pairs_U))

    def optimizer_step(self, update: Update, view: View, grads: Grads, state: StepState) -> None:
        reference.ReferenceKernels(self.shape).optimizer_step(update, view, grads, state)


def window_bytes(window: int, dim: int) -> int:
    """Return the bytes of a block's `Window`s in gradients.cu; 0: too many."""
    span, align = 2 * window + 1, 4 if dim % 4 else 16
    size = THREADS // 32 * -(-span * (4 * dim + 4) // align) * align
    return size if span < 64 and size <= shared_bytes(BLOCKS_AT_ONCE) else 0


def find_unique_rows(batch: Batch, rows: RowGrads) -> None:
    """List the unique rows that the batch touches, in buffers.

    Before, indices are -1 and the count 0.
    """
    launch = _list_kernel("unique_rows", batch)
    launch(_blocks(batch), rows=rows, batch=batch_struct(batch))


def with_room(
    rows: RowGrads | None, most: int, all_rows: int, shape: StepShape, dim: int | None = None
) -> RowGrads:
    """Return buffers for that many unique rows: those given, if they fit."""
    if rows and rows.grad_UD.shape[0] >= most:
        return rows
    dim = shape.dim if dim is None else dim
    index_A = torch.full((all_rows,), -1, dtype=torch.int32, device=shape.device)
    rows_U = torch.empty(most, dtype=torch.int32, device=shape.device)
    grad_UD = torch.zeros(most, dim, device=shape.device)
    row_count = torch.zeros((), dtype=torch.int64, device=shape.device)
    return RowGrads(index_A, rows_U, grad_UD, torch.zeros_like(rows_U), row_count)


def _list_kernel(name: str, batch: Batch) -> Kernel:
    """Return a kernel of unique.cu for batches such as this one."""
    paths = int(batch.objective.tree is not None)
    targets = _word_targets(batch)
    return kernel("unique.cu", name, WINDOW=batch.window, TARGETS=targets, PATHS=paths)


def _word_targets(batch: Batch) -> int:
    """Return the targets of a center that are words: itself and its negatives."""
    negatives = batch.negatives_BK.shape[1]
    return 1 + negatives if negatives or not batch.objective.tree else 0


def _blocks(batch: Batch) -> int:
    """Return the blocks for the rows that a batch touches, repeats included."""
    centers = batch.windows_B.shape[0]
    return blocks_for(centers * (_word_targets(batch) + 2) + 2 * batch.window)
