"""Kernels of an NVIDIA GPU: the sources in cu/, on records in place.

Gradients are added in the order in which threads come, so bits differ from run to run.

Shapes: B centers, K negatives, V words, A rows, U unique rows, D dimensions, S slots.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from w2v.rows import launch
from w2v.rows.launch import ELEMENTS, StructBuffer, blocks_for, c_struct, kernel, shared_bytes
from w2v.rows.ops import View, no_places, step_kernel
from w2v.word2vec import reference
from w2v.word2vec.batch import (
    FAULT_BITS,
    Batch,
    BatchSeed,
    Grads,
    Objective,
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
# Of unique.cu: threads that start together all try to add a frequent row.
LISTING_BLOCKS = 2
WARP_WORDS = 1024  # of a text that one warp of draw.cu subsamples
VECTORS_FAULT = 2  # bit of FAULTS
Chunk, Drawn = (c_struct("batch.cuh", name) for name in ("Chunk", "Drawn"))
NO_TREE = c_struct("batch.cuh", "Tree")(begin_V=None, nodes_P=None, codes_P=None, depth=0)


def draw(
    seeds: Sequence[BatchSeed], widths: tuple[int, int], negatives: int, pool: Pool, cdf_V: Tensor
) -> Iterator[tuple[Tensor, Tensor]]:
    """Draw as `reference.draw` does, many batches by one kernel."""
    device = cdf_V.device
    at_once = max(1, DRAWN_AT_ONCE // max((seed.centers for seed in seeds), default=1))
    for first in range(0, len(seeds), at_once):
        drawn = seeds[first : first + at_once]
        sizes = [seed.centers for seed in drawn]
        keys = [seed.key for seed in drawn] + [seed.pool_key for seed in drawn]
        centers = sum(sizes)
        windows_B = torch.empty(centers, dtype=torch.int32, device=device)
        negatives_BK = torch.empty(centers, negatives, dtype=torch.int32, device=device)
        # From pinned memory, as copies from other memory wait for the GPU.
        edges = itertools.accumulate(sizes, initial=0)
        numbers = torch.from_numpy(np.array([*edges, *keys], np.uint64).view(np.int64)).pin_memory()
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
    blocks = max(1, -(-32 * stretches // launch.THREADS))
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
        self._losses = zeros_by_step(shape.device, torch.float64)
        self._pairs = zeros_by_step(shape.device, torch.int64)
        self._done = torch.zeros((), dtype=torch.int32, device=shape.device)  # blocks of a step
        # What launches read.
        self._batch: Batch | None = None
        self._chunk = StructBuffer("batch.cuh", "Chunk")
        self._drawn = StructBuffer("batch.cuh", "Drawn")
        self._view = StructBuffer("element.cuh", "View", ELEMENTS[shape.dtype])
        self._listed_rows, self._grad_rows, self._step_rows = (
            StructBuffer("unique.cuh", "RowGrads") for _ in range(3)
        )
        # What launches were bound for.
        self._form: tuple = ()
        self._objective: Objective | None = None
        self._most_centers = -1
        self._stepped: tuple = ()

    def list_rows(self, batch: Batch) -> Tensor:
        marks_A = self.marks(batch)
        # `nonzero` would wait for their number.
        return torch.nonzero_static(marks_A, size=self._most_rows, fill_value=-1).flatten()

    def mark(self, batch: Batch, marks_A: Tensor) -> None:
        self._read(batch)
        self._launch_mark(self._list_blocks, marks=marks_A)

    def unique_rows(self, batch: Batch) -> Grads:
        self._read(batch)
        most = self._most_rows + self.further_rows
        self._rows = with_room(self._rows, most, self.shape.rows, self.shape)
        self._list_unique(self._rows)
        return Grads(self._rows, next(self._losses), next(self._pairs))

    def gradients(self, batch: Batch, view: View, grads: Grads, lr: float) -> Grads:
        self._read(batch)
        cbow, _, tree, _ = batch.objective
        if tree and not (tree.depth or self._targets):  # one word, which nothing predicts
            mask_BC = reference.expand(batch).context_mask_BC
            return grads._replace(pairs=(mask_BC.any(1) if cbow else mask_BC).sum())

        # Windows slide over consecutive centers of a warp, so no more blocks than run at a time.
        # Kernels that move rows may keep a block waiting: then they are many, and short.
        per_processor = BLOCKS_AT_ONCE if self._shared and view.slot_of_A is None else 8
        self._view.set(view)
        self._grad_rows.set(grads.rows)
        self._launch_gradients(
            blocks_for(32 * batch.windows_B.shape[0], per_processor),
            row_width=view.records_SR.shape[1],
            loss=grads.loss,
            pairs=grads.pairs,
        )
        return grads

    def optimizer_step(self, update: Update, view: View, grads: Grads, state: StepState) -> None:
        optimizer, table, lr = update
        step, step_column = optimizer.count_step(table)
        if self._stepped != (optimizer, table, state):
            shape = self.shape
            launch = step_kernel(optimizer, shape.dtype, shape.dim, self._peers)
            self._launch_step = launch.bind(
                view=self._view,
                rows=self._step_rows,
                row_width=table.width,
                dim=shape.dim,
                step_column=step_column,
                cap=optimizer.occurrence_cap,
                hyper=optimizer.hyper(lr),  # the rate is given at each launch
                places=self._places,
                stepped=state.rows_updated,
                fault=state.fault,
                bit=VECTORS_FAULT,
                done=self._done,
            )
            self._stepped = optimizer, table, state
        self._view.set(view)
        self._step_rows.set(grads.rows)
        self._launch_step(
            # An upper bound: the number of rows is known on the device alone.
            blocks_for(32 * grads.rows.grad_UD.shape[0]),
            lr=float(lr),
            table_step=step,
            seed=table.next_rounding_seed(),
            loss=grads.loss,
            this_step=state.step << FAULT_BITS,
        )

    def _read(self, batch: Batch) -> None:
        """Set the batch that launches read; bind them anew for another form."""
        if batch is self._batch:
            return
        centers, negatives = batch.negatives_BK.shape
        text, words_n = self._chunk.value, batch.words_n
        if not text or text.words is not words_n or text.sentences is not batch.sentences_n:
            self._chunk.set(Chunk(words=words_n, sentences=batch.sentences_n, length=len(words_n)))
        form = batch.window, negatives, batch.pool
        is_bound = form == self._form and batch.objective is self._objective
        if centers > self._most_centers or not is_bound:
            self._bind(batch)
            self._form, self._objective, self._most_centers = form, batch.objective, centers
        drawn = {"windows": batch.windows_B, "negatives": batch.negatives_BK}
        self._drawn.set(Drawn(first=batch.first, centers=centers, **drawn))
        self._batch = batch

    def _bind(self, batch: Batch) -> None:
        """Bind launches for batches of a form that are not larger than this one."""
        cbow, mean, tree, weighted = batch.objective
        centers, negatives = batch.negatives_BK.shape
        # The targets of a center that are words: itself and its negatives.
        self._targets = 1 + negatives if negatives or not tree else 0
        self._most_rows = max_batch_rows(batch, self.shape.vectors)
        touched = centers * (self._targets + 2) + 2 * batch.window  # rows, repeats included
        self._list_blocks = blocks_for(touched, LISTING_BLOCKS)
        macros = {"WINDOW": batch.window, "TARGETS": self._targets, "PATHS": int(tree is not None)}
        read = {"chunk": self._chunk, "drawn": self._drawn, "tree": tree or NO_TREE}
        self._launch_mark = kernel("unique.cu", "mark", **macros).bind(**read)
        listing = kernel("unique.cu", "unique_rows", **macros)
        self._launch_list = listing.bind(rows=self._listed_rows, **read)
        self._shared = 0 if cbow or tree else window_bytes(batch.window, self.shape.dim)
        self._launch_gradients = kernel(
            "gradients.cu",
            "cbow" if cbow else "skipgram",
            **macros,
            DIM=self.shape.dim,
            ELEMENT=ELEMENTS[self.shape.dtype],
            COUNTED=int(self.shape.count_pairs),
            MEAN=int(mean),
            RANKS=max(1, self._peers),
            SHARED=self._shared,
            WEIGHTED=weighted,
            CBOW=int(cbow),
        ).bind(view=self._view, rows=self._grad_rows, borrowed=self._borrowed, **read)

    def read_peers(self, ranks: int, places: Any, borrowed: Any) -> None:
        """Have launches read other ranks' rows: structs Places, Borrowed."""
        self._peers, self._places, self._borrowed = ranks, places, borrowed

    def list_unique(self, batch: Batch, rows: RowGrads) -> None:
        """List the batch's unique rows, where indices are -1 and the count 0."""
        self._read(batch)
        assert self._most_rows <= rows.grad_UD.shape[0], "a larger batch than planned"
        self._list_unique(rows)

    def _list_unique(self, rows: RowGrads) -> None:
        self._listed_rows.set(rows)
        self._launch_list(self._list_blocks)


class TorchStepKernels(CudaKernels):
    """CUDA kernels with torch's own step, for optimizers without a formula."""

    plans_rows = True  # torch has to know how many rows there are

    def unique_rows(self, batch: Batch) -> Grads:
        shape = self.shape
        # A list of its own, as the batches before may still be on their way.
        self._read(batch)
        listed = with_room(None, self._most_rows, shape.rows, shape, dim=0)
        self._list_unique(listed)
        rows_U = listed.unique_rows()
        grad_UD = torch.zeros(rows_U.shape[0], shape.dim, device=shape.device)
        pairs_U = torch.zeros_like(rows_U)
        rows = listed._replace(rows_U=rows_U, grad_UD=grad_UD, pairs_U=pairs_U)
        return Grads(rows, next(self._losses), next(self._pairs))

    def optimizer_step(self, update: Update, view: View, grads: Grads, state: StepState) -> None:
        reference.ReferenceKernels(self.shape).optimizer_step(update, view, grads, state)


def window_bytes(window: int, dim: int) -> int:
    """Return the bytes of a block's `Window`s in gradients.cu; 0: too many."""
    span, align = 2 * window + 1, 4 if dim % 4 else 16
    size = launch.THREADS // 32 * -(-span * (4 * dim + 4) // align) * align
    return size if span < 64 and size <= shared_bytes(BLOCKS_AT_ONCE) else 0


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
