"""Kernels of an NVIDIA GPU: the sources in cu/, on records in place.

Gradients are added in the order in which threads come, so bits differ from run to run.

Shapes: B centers, K negatives, V rows of a table, U unique rows, D dimensions, S slots.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Hashable, Iterator, Sequence
from itertools import accumulate, chain
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from w2v.kernels import Kernels, reference
from w2v.kernels.batch import (
    FAULT_BITS,
    Batch,
    BatchSeed,
    Grads,
    Objective,
    OptimizerLike,
    Page,
    Pool,
    StepShape,
    StepState,
    TableGrads,
    Update,
    max_batch_rows,
    zeros_by_step,
)
from w2v.kernels.launch import THREADS, Kernel, blocks_for, launch
from w2v.system.random import signed

ELEMENTS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # as element.cuh knows them
SUMS = (torch.float64, ()), (torch.int64, ())  # of a step: loss and pairs
# Dimensions of CBOW: a row and a count in the 48 KiB of shared memory that a block has by itself.
MOST_CBOW_DIM = 12_287
DRAWN_AT_ONCE = 1 << 19  # centers
WARP_WORDS = 1024  # of a text that one warp of draw.cu subsamples
NO_PLACES = None, None, None, 0  # PLACES of optim.cu, with RANKS = 0
# Enough for the link; more would let one direction starve the other, and be slower.
READ_BLOCKS, WRITE_BLOCKS = 64, 48


def draw(
    seeds: Sequence[BatchSeed], widths: tuple[int, int], negatives: int, pool: Pool, cdf_V: Tensor
) -> Iterator[tuple[Tensor, Tensor]]:
    """Draw as `reference.draw` does, many batches by one kernel."""
    device = cdf_V.device
    at_once = max(1, DRAWN_AT_ONCE // max((seed.centers for seed in seeds), default=1))
    for first in range(0, len(seeds), at_once):
        sizes, *keys = zip(*seeds[first : first + at_once], strict=True)
        centers = sum(sizes)
        windows_B = torch.empty(centers, dtype=torch.int32, device=device)
        negatives_BK = torch.empty(centers, negatives, dtype=torch.int32, device=device)
        # From pinned memory, as copies from other memory wait for the GPU.
        numbers = torch.tensor([0, *accumulate(sizes), *map(signed, chain(*keys))], device="cpu")
        of_batches = numbers.pin_memory().to(device, non_blocking=True)
        edges, of_keys = of_batches.split([len(sizes) + 1, 2 * len(sizes)])
        given = edges, of_keys, len(sizes), negatives, *widths, *pool
        drawn = cdf_V, cdf_V.shape[0], windows_B, negatives_BK
        launch("draw.cu", "draw", {}, blocks_for(centers * (1 + negatives)), *given, *drawn)
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
    text = words_N, count, edges, len(trained_S)
    blocks, done = max(1, -(-32 * stretches // THREADS)), counts[stretches + 1 :]
    bits = kept, counts, stretches
    launch("draw.cu", "choose_kept", {}, blocks, signed(key), *text, keep_V, trained, *bits, done)
    size = int(counts[stretches])  # waits for the device
    words_n, sentences_n = torch.empty(2, size, dtype=torch.int32, device=device).unbind()
    order = block_words, max(1, -(-size // batch_size))
    launch("draw.cu", "list_kept", {}, blocks, *text, *bits, *order, words_n, sentences_n)
    return words_n, sentences_n


class CudaKernels(Kernels):
    """The operations of `w2v.kernels.Kernels` by CUDA kernels."""

    plans_rows = False  # batches share one set of buffers, which is free after the optimizer's step
    draw = staticmethod(draw)
    subsample = staticmethod(subsample)

    def __init__(self, shape: StepShape):
        self.shape = shape
        self._rows: tuple[TableGrads, TableGrads] | None = None
        self._sums = zeros_by_step(shape.device, *SUMS)
        self._done = torch.zeros((), dtype=torch.int32, device=shape.device)  # blocks of a step
        self._bound: dict[Hashable, tuple[tuple, Kernel]] = {}

    def mark(self, batch: Batch, marks_TV: Tensor) -> None:
        marks = marks_TV.unbind()
        launch("unique.cu", "mark", _macros(batch), _blocks(batch), *_text(batch), *marks)

    def unique_rows(self, batch: Batch) -> Grads:
        self._rows = with_room(self._rows, max_batch_rows(batch), self.shape.rows, self.shape)
        self._list_unique(batch, self._rows)
        return self._with_sums(self._rows)

    def gradients(self, batch: Batch, page: Page, rows: Grads, lr: float) -> Grads:
        cbow, mean, tree, weighted = batch.objective
        if tree and not (tree.depth or _word_targets(batch)):  # one word, which nothing predicts
            mask_BC = reference.expand(batch).context_mask_BC
            return rows._replace(pairs=(mask_BC.any(1) if cbow else mask_BC).sum())

        def bind() -> Kernel:
            ranks, borrowed = self._borrowed_at()
            macros = _macros(batch) | {
                "DIM": self.shape.dim,
                "ELEMENT": ELEMENTS[page.inputs.records_SR.dtype],
                "COUNTED": int(self.shape.count_pairs),
                "CBOW": int(cbow),
                "MEAN": int(mean),
                "RANKS": ranks,
                "WEIGHTED": weighted,
            }
            inputs, outputs = (*page.inputs, *rows.inputs), (*page.outputs, *rows.outputs)
            first = *inputs, *outputs, page.inputs.records_SR.shape[1], *borrowed
            return Kernel("gradients.cu", "cbow" if cbow else "skipgram", macros, *first)

        kernel = self._bind("gradients", (*_form(batch), *page, *rows[:2]), bind)
        blocks = blocks_for(32 * batch.windows_B.shape[0])
        kernel(blocks, *_text(batch), rows.loss, rows.pairs)
        return rows

    def optimizer_step(self, update: Update, page: Page, grads: Grads, state: StepState) -> None:
        optimizer, tables, lr = update
        # Both tables count their steps, and count alike: the kernel needs one number.
        (step, step_column), _ = map(optimizer.count_step, tables)

        def bind() -> Kernel:
            ranks, places = self._places_read()
            views = *page.inputs, *grads.inputs, *page.outputs, *grads.outputs
            record = page.inputs.records_SR.shape[1], self.shape.dim, step_column
            # 2 is the fault bit of the input table; the output table has the next.
            counters = state.rows_updated, state.fault, 2, self._done
            constants = optimizer.occurrence_cap, *optimizer.hyper(lr)[1:]
            macros = _step_macros(optimizer, page.inputs.records_SR.dtype, self.shape.dim, ranks)
            args = *views, *record, *constants, *places, *counters
            return Kernel("optim.cu", "step", macros, *args)

        kernel = self._bind("step", (optimizer, state, *page, *grads[:2]), bind)
        # An upper bound: the number of rows is known on the device alone.
        rows = grads.inputs.rows_U.shape[0] + grads.outputs.rows_U.shape[0]
        seeds = [signed(table.next_rounding_seed()) for table in tables]
        counted = grads.loss, state.step << FAULT_BITS
        kernel(blocks_for(32 * rows), float(lr), step, *seeds, *counted)

    def _list_unique(
        self, batch: Batch, rows: tuple[TableGrads, TableGrads], slot: int = 0
    ) -> None:
        """List the unique rows of a batch, in the buffers of a slot."""

        def bind() -> Kernel:
            return Kernel("unique.cu", "unique_rows", _macros(batch), *rows[0], *rows[1])

        kernel = self._bind(slot, (*_form(batch), *rows), bind)
        kernel(_blocks(batch), *_text(batch))

    def _with_sums(self, rows: tuple[TableGrads, TableGrads]) -> Grads:
        """Return buffers with the sums of a step, which are zero."""
        loss, pairs = next(self._sums)
        return Grads(*rows, loss, pairs)

    def _bind(self, use: Hashable, what: tuple, bind: Callable[[], Kernel]) -> Kernel:
        """Return the kernel of a use, bound anew if it was for other objects."""
        bound = self._bound.get(use)
        if bound is None or not all(map(operator.is_, bound[0], what)):
            bound = self._bound[use] = what, bind()
        return bound[1]

    def _borrowed_at(self) -> tuple[int, tuple[int, int, int]]:
        """Return RANKS, borrowed_in, borrowed_out and me of gradients.cu."""
        return 1, (0, 0, 0)

    def _places_read(self) -> tuple[int, Sequence[Tensor | int | None]]:
        """Return RANKS and PLACES of optim.cu: where gradients are read."""
        return 0, NO_PLACES


class TorchStepKernels(CudaKernels):
    """CUDA kernels with torch's own step, for optimizers without a formula."""

    plans_rows = True  # torch has to know how many rows there are

    def unique_rows(self, batch: Batch) -> Grads:
        shape = self.shape
        # Lists of their own, as the batches before may still be on their way.
        lists = with_room(None, max_batch_rows(batch), shape.rows, shape, dim=0)
        find_unique_rows(batch, lists)
        found = self._with_sums(lists)

        def zero_grads(table: TableGrads) -> TableGrads:
            rows_U = table.rows_U[: int(table.row_count)]
            grad_UD = torch.zeros(len(rows_U), shape.dim, device=shape.device)
            return table._replace(rows_U=rows_U, grad_UD=grad_UD, pairs_U=torch.zeros_like(rows_U))

        return found._replace(inputs=zero_grads(found.inputs), outputs=zero_grads(found.outputs))

    def optimizer_step(self, update: Update, page: Page, grads: Grads, state: StepState) -> None:
        reference.ReferenceKernels(self.shape).optimizer_step(update, page, grads, state)


def move_records(
    table_VR: Tensor,
    rows_U: Tensor,
    records_SR: Tensor,
    slots_U: Tensor | None = None,
    to_table: bool = False,
) -> None:
    """Copy records[slots[u]] = table[rows[u]], or back.

    Without slots, u is the slot. The table may be in pinned CPU memory. Rows and slots are int64 on
    the GPU, inside their bounds; rows are unique, and best sorted; negative ones are skipped. A
    record is a multiple of 16 bytes.
    """
    assert table_VR.shape[1] == records_SR.shape[1] and table_VR.dtype == records_SR.dtype
    assert table_VR.stride(1) == 1 and records_SR.is_contiguous()
    for ids in (rows_U, slots_U):
        assert ids is None or (ids.dtype == torch.int64 and ids.is_contiguous() and ids.is_cuda)
    itemsize, count = table_VR.element_size(), len(rows_U)
    assert table_VR.shape[1] * itemsize % 16 == 0
    width = table_VR.shape[1] * itemsize // 16
    stride = table_VR.stride(0) * itemsize // 16
    if count:
        where = table_VR, stride, rows_U, records_SR, slots_U, count, width, to_table
        blocks = WRITE_BLOCKS if to_table else READ_BLOCKS
        launch("rows.cu", "move_records", {}, blocks, *where)


def copy_repeated(places_N: Tensor, last_U: Tensor, records_NR: Tensor) -> None:
    """Copy the record of the last id of each row to the row's other ids.

    A record is a multiple of 16 bytes.
    """
    count, width = places_N.shape[0], records_NR.shape[1] * records_NR.element_size() // 16
    where = places_N, last_U, count, records_NR, width
    launch("rows.cu", "copy_repeated", {}, blocks_for(32 * count), *where)


class Bags(NamedTuple):
    """How the ids of a table are divided into bags whose vectors are summed.

    begins: where each bag begins, int64 on the GPU, and where the last one ends if there is one
    more than `number`; None: bags of `size` ids. is_mean: whether sums are divided by the number of
    ids that are not padding. tables: how many, one after the other, have such bags.
    """

    number: int
    begins: Tensor | None = None
    size: int = 1
    is_mean: bool = False
    tables: int = 1

    def of(self, places_N: Tensor, padding: int | None) -> tuple:
        """Return the number of all bags and the parameters BAGS of rows.cu."""
        given = 0 if self.begins is None else self.begins.shape[0]
        left_out = -1 if padding is None else padding
        ids = places_N, places_N.shape[0] // self.tables
        rules = self.begins, given, self.size, self.number, left_out, self.is_mean
        return self.tables * self.number, *ids, *rules


def gather_bags(
    records_SR: Tensor,
    slots_U: Tensor | None,  # of unique rows, int32; None: 0, 1, 2, ...
    places_N: Tensor,  # which of these rows each id is, int64
    dim: int,
    bags: Bags | None = None,  # of ids; by default each id is one
    padding: int | None = None,  # the place that is left out of bags
) -> Tensor:
    """Return weights [N, D] of ids or bags, of records on the GPU, in float32."""
    which = (bags or Bags(places_N.shape[0])).of(places_N, padding)
    weight_ND = torch.empty(which[0], dim, device=records_SR.device)
    macros: dict[str, int | str] = {"ELEMENT": ELEMENTS[records_SR.dtype]}
    records = records_SR, records_SR.shape[1], slots_U
    blocks = blocks_for(32 * which[0])
    launch("rows.cu", "gather_bags", macros, blocks, *records, *which, dim, weight_ND)
    return weight_ND


def sum_gradients(
    grads: Tensor,  # [N, D], or [T, N, D] of the bags of T tables
    places_N: Tensor,
    sums_UD: Tensor,
    bags: Bags | None = None,
    padding: int | None = None,
) -> None:
    """Add gradients of ids or bags to the sums, by place, in no fixed order."""
    *counts, dim = grads.shape
    strides = grads.stride() if len(counts) > 1 else (bags.number * dim if bags else 0, dim, 1)
    given = (bags or Bags(counts[0])).of(places_N, padding)
    blocks = blocks_for(32 * math.prod(counts))
    args = grads, *strides[:2], *given, dim, sums_UD
    launch("rows.cu", "add_gradients", {}, blocks, *args)


def step_rows(
    optimizer: OptimizerLike,
    counted: tuple[float, int],  # by `optimizer.count_step`
    seed: int,  # of the rounding to bfloat16
    records_SR: Tensor,  # on the GPU
    slots_U: Tensor | None,  # of unique rows, as above
    count: Tensor | None,  # their number, if the GPU knows it
    grad_UD: Tensor,
    lr: float,
) -> None:
    """Step stored records in place, by the fused kernel; gradients become 0.

    A number whose step is not finite keeps its value, as do those read with it.
    """
    (rows, dim), device = grad_UD.shape, grad_UD.device
    step, step_column = counted
    if slots_U is None:
        slots_U = _numbers(device, 1 << max(0, rows - 1).bit_length())
    if count is None:
        count = torch.full((), rows, dtype=torch.int64, device=device)
    # The arguments of `CudaKernels.optimizer_step`, for one table.
    no_rows, stepped, loss, faults = _zeros(device)
    # The kernel gets slots in place of rows, and no slot of each row.
    inputs = records_SR, None, None, slots_U, grad_UD, None, count
    outputs = None, None, None, None, None, None, no_rows
    record = records_SR.shape[1], dim, step_column
    # A fault would be the sum of this step and a bit, both 0. The loss has the bits of a double 0.
    counters = stepped, faults, 0, None
    hyper = optimizer.hyper(lr)
    args = *inputs, *outputs, *record, 0, *hyper[1:], *NO_PLACES, *counters, hyper.lr, step
    macros = _step_macros(optimizer, records_SR.dtype, dim, ranks=0)
    of_step = signed(seed), 0, loss, 0
    launch("optim.cu", "step", macros, blocks_for(32 * rows), *args, *of_step)


@functools.lru_cache(maxsize=4)
def _numbers(device: torch.device, count: int) -> Tensor:
    """Return the numbers 0, 1, 2, ...: int32."""
    return torch.arange(count, dtype=torch.int32, device=device)


@functools.cache
def _zeros(device: torch.device) -> tuple[Tensor, ...]:
    return torch.zeros(4, dtype=torch.int64, device=device).unbind()


def _step_macros(
    optimizer: OptimizerLike, dtype: torch.dtype, dim: int, ranks: int
) -> dict[str, int | str]:
    return {
        "STEP": optimizer.formula,
        "STATES": optimizer.state_count,
        "ELEMENT": ELEMENTS[dtype],
        "WIDE": 1 if dim % 4 else 4,
        "RANKS": ranks,
    }


def find_unique_rows(batch: Batch, rows: tuple[TableGrads, TableGrads]) -> None:
    """List the unique rows that the batch touches, in buffers.

    Before, indices are -1 and counts 0.
    """
    lists = *rows[0], *rows[1]
    launch("unique.cu", "unique_rows", _macros(batch), _blocks(batch), *lists, *_text(batch))


def with_room(
    rows: tuple[TableGrads, TableGrads] | None,
    most: tuple[int, int],
    table_rows: int,
    shape: StepShape,
    dim: int | None = None,
) -> tuple[TableGrads, TableGrads]:
    """Return buffers for that many unique rows: those given, if they fit."""
    most = min(table_rows, most[0]), min(table_rows, most[1])
    if rows and all(table.rows_U.shape[0] >= n for table, n in zip(rows, most, strict=True)):
        return rows
    dim = shape.dim if dim is None else dim

    def buffers(n: int) -> TableGrads:
        index_V = torch.full((table_rows,), -1, dtype=torch.int32, device=shape.device)
        rows_U = torch.empty(n, dtype=torch.int32, device=shape.device)
        grad_UD = torch.zeros(n, dim, device=shape.device)
        row_count = torch.zeros((), dtype=torch.int64, device=shape.device)
        return TableGrads(index_V, rows_U, grad_UD, torch.zeros_like(rows_U), row_count)

    return buffers(most[0]), buffers(most[1])


def _form(batch: Batch) -> tuple[int, int, Objective]:
    """Return what kernels are compiled for, equal for a sampler's batches."""
    return batch.window, batch.negatives_BK.shape[1], batch.objective


def _macros(batch: Batch) -> dict[str, int | str]:
    paths = int(batch.objective.tree is not None)
    return {"WINDOW": batch.window, "TARGETS": _word_targets(batch), "PATHS": paths}


def _word_targets(batch: Batch) -> int:
    """Return the targets of a center that are words: itself and its negatives."""
    negatives = batch.negatives_BK.shape[1]
    return 1 + negatives if negatives or not batch.objective.tree else 0


def _blocks(batch: Batch) -> int:
    centers = batch.windows_B.shape[0]
    return blocks_for(centers * (_word_targets(batch) + 2) + 2 * batch.window)


def _text(batch: Batch) -> tuple[Tensor | int | None, ...]:
    """Return the parameters BATCH of batch.cuh."""
    words_n, sentences_n, first, windows_B, negatives_BK = batch[:5]
    text = words_n, sentences_n, words_n.shape[0], first
    tree = batch.objective.tree
    path = tree[:3] if tree else (None, None, None)
    return *text, windows_B.shape[0], windows_B, negatives_BK, *path
