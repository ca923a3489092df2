"""Kernels of an NVIDIA GPU: the sources in cu/, on records in place.

Gradients are added in the order in which threads come, so bits differ from run to run.

Shapes: B centers, K negatives, V rows of a table, U unique rows, D dimensions, S slots.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from w2v.kernels.batch import (
    FAULT_BITS,
    Batch,
    Draw,
    Grads,
    Inversion,
    OptimizerLike,
    Page,
    StepShape,
    StepState,
    TableGrads,
    TableLike,
)
from w2v.kernels.launch import blocks_for, launch
from w2v.kernels.random import signed

ELEMENTS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # as element.cuh knows them
SUMS_AT_ONCE = 64  # steps whose sums are zeroed together
MOVE_BLOCKS = 64  # enough for the link; more would let one direction starve the other


class CudaKernels:
    """The operations of `w2v.kernels.Kernels` by CUDA kernels."""

    rows_ahead = False  # batches share one set of buffers, which is free after the optimizer's step
    inversion: Inversion | None = None

    def __init__(self, shape: StepShape):
        self.shape = shape
        self.draw: Draw | None = draw
        self._rows: tuple[TableGrads, TableGrads] | None = None
        self._sums = zero_sums(shape.device)

    def mark(self, batch: Batch, marks_TV: Tensor) -> None:
        launch(
            "claim.cu", "mark", _macros(batch), _blocks(batch), *_text(batch), *marks_TV.unbind()
        )

    def unique_rows(self, batch: Batch) -> Grads:
        self._rows = with_room(self._rows, most_rows(batch), self.shape.rows, self.shape)
        rows = zero_grads(self._rows, self._sums)
        find_unique_rows(batch, rows)
        return rows

    def skipgram(self, batch: Batch, page: Page, rows: Grads, lr: float) -> Grads:
        inputs, outputs = page
        row_width, dtype = inputs.records_SR.shape[1], inputs.records_SR.dtype
        macros = _macros(batch)
        macros |= {"DIM": self.shape.dim, "ELEMENT": ELEMENTS[dtype]}
        macros["COUNTED"] = int(self.shape.count_pairs)
        launch(
            "sgns.cu",
            "skipgram",
            macros,
            blocks_for(32 * batch.windows_B.shape[0]),
            *_text(batch),
            inputs.records_SR,
            inputs.slot_of_V,
            rows.inputs.number_V,
            rows.inputs.grad_UD,
            rows.inputs.pairs_U,
            outputs.records_SR,
            outputs.slot_of_V,
            rows.outputs.number_V,
            rows.outputs.grad_UD,
            rows.outputs.pairs_U,
            row_width,
            rows.loss,
            rows.pairs,
        )
        return rows

    def optimizer_step(
        self,
        optimizer: OptimizerLike,
        tables: Sequence[TableLike],
        page: Page,
        grads: Grads,
        lr: float,
        state: StepState,
    ) -> None:
        dim, dtype = self.shape.dim, page.inputs.records_SR.dtype
        # Both tables count their steps, and count alike: the kernel needs one number.
        steps = [optimizer.count_step(table) for table in tables]
        step, step_column = steps[0]
        macros: dict[str, int | str] = {
            "STEP": optimizer.formula,
            "STATES": optimizer.state_count,
            "ELEMENT": ELEMENTS[dtype],
            "WIDE": 1 if dim % 4 else 4,
        }
        # An upper bound: the number of rows is known on the device alone.
        rows = grads.inputs.rows_U.shape[0] + grads.outputs.rows_U.shape[0]
        by_table = [
            (
                view.records_SR,
                view.slot_of_V,
                its.grad_UD,
                its.pairs_U,
                its.rows_U,
                its.number_V,
                signed(table.next_noise()),
                its.row_count,
            )
            for table, view, its in zip(tables, page, grads[:2], strict=True)
        ]
        launch(
            "optim.cu",
            "step",
            macros,
            blocks_for(32 * rows),
            *by_table[0],
            *by_table[1],
            state.rows_updated,
            page.inputs.records_SR.shape[1],
            dim,
            step_column,
            step,
            optimizer.occurrence_cap,
            *optimizer.hyper(lr),
            grads.loss,
            state.fault,
            state.step << FAULT_BITS,
            2,  # the fault bit of the input table; the output table has the next
        )

    def finish(self) -> None:
        self._rows = None


def draw(
    key: int,
    centers: int,
    lowest: int,
    widest: int,
    negatives: int,
    pool: int,
    pool_key: int,
    cdf_V: Tensor,
) -> tuple[Tensor, Tensor]:
    """Draw windows and negatives as `reference.draw` does, by one kernel."""
    windows_B = torch.empty(centers, dtype=torch.int32, device=cdf_V.device)
    negatives_BK = torch.empty(centers, negatives, dtype=torch.int32, device=cdf_V.device)
    launch(
        "draw.cu",
        "draw",
        {},
        blocks_for(centers * (1 + negatives)),
        signed(key),
        centers,
        negatives,
        lowest,
        widest,
        pool,
        signed(pool_key),
        cdf_V,
        cdf_V.shape[0],
        windows_B,
        negatives_BK,
    )
    return windows_B, negatives_BK


def gather_records(
    table_VR: Tensor, rows_U: Tensor, records_SR: Tensor, slots_U: Tensor | None = None
) -> None:
    """Copy records[slots[u]] = table[rows[u]]; without slots, u is the slot.

    The table may be in pinned CPU memory. Rows and slots are int64 on the GPU, inside their bounds;
    rows are unique, and best sorted. A record is a multiple of 16 bytes.
    """
    _move("gather_records", table_VR, rows_U, records_SR, slots_U)


def scatter_records(
    table_VR: Tensor, rows_U: Tensor, records_SR: Tensor, slots_U: Tensor | None = None
) -> None:
    """Copy table[rows[u]] = records[slots[u]]; otherwise as `gather_records`."""
    _move("scatter_records", table_VR, rows_U, records_SR, slots_U)


def _move(
    kernel: str, table_VR: Tensor, rows_U: Tensor, records_SR: Tensor, slots_U: Tensor | None
) -> None:
    assert table_VR.shape[1] == records_SR.shape[1] and table_VR.dtype == records_SR.dtype
    assert table_VR.stride(1) == 1 and records_SR.is_contiguous()
    for ids in (rows_U, slots_U):
        assert ids is None or (ids.dtype == torch.int64 and ids.is_contiguous() and ids.is_cuda)
    itemsize = table_VR.element_size()
    assert table_VR.shape[1] * itemsize % 16 == 0
    width = table_VR.shape[1] * itemsize // 16
    stride = table_VR.stride(0) * itemsize // 16
    if len(rows_U):
        count = len(rows_U)
        where = table_VR, stride, rows_U, records_SR, slots_U, count, width
        launch("rows.cu", kernel, {}, MOVE_BLOCKS, *where)


def find_unique_rows(batch: Batch, rows: Grads) -> None:
    """Number the unique rows of both tables that the batch touches."""
    inputs, outputs = rows.inputs, rows.outputs
    launch(
        "claim.cu",
        "claim",
        _macros(batch),
        _blocks(batch),
        *_text(batch),
        inputs.number_V,
        inputs.rows_U,
        inputs.row_count,
        outputs.number_V,
        outputs.rows_U,
        outputs.row_count,
    )


def most_rows(batch: Batch) -> tuple[int, int]:
    """Return the most rows of each table that the batch may touch."""
    centers, negatives = batch.negatives_BK.shape
    # A center is a target too. Of a pool, no more words can be drawn than it holds.
    drawn = centers * negatives
    return centers + 2 * batch.window, centers + min(drawn, batch.pool or drawn)


def with_room(
    rows: tuple[TableGrads, TableGrads] | None,
    most: tuple[int, int],
    table_rows: int,
    shape: StepShape,
    dim: int | None = None,
) -> tuple[TableGrads, TableGrads]:
    """Return buffers for so many unique rows: those given, if they fit."""
    most = min(table_rows, most[0]), min(table_rows, most[1])
    if rows and all(its.rows_U.shape[0] >= n for its, n in zip(rows, most, strict=True)):
        return rows
    dim = shape.dim if dim is None else dim

    def buffers(n: int) -> TableGrads:
        number_V = torch.full((table_rows,), -1, dtype=torch.int32, device=shape.device)
        rows_U = torch.empty(n, dtype=torch.int32, device=shape.device)
        grad_UD = torch.zeros(n, dim, device=shape.device)
        return TableGrads(number_V, rows_U, grad_UD, torch.zeros_like(rows_U), None)

    return buffers(most[0]), buffers(most[1])


def zero_grads(rows: tuple[TableGrads, TableGrads], sums: Iterator[Sequence[Tensor]]) -> Grads:
    """Return the buffers, zero after each optimizer step, with new sums."""
    loss, pairs, inputs, outputs = next(sums)
    return Grads(
        rows[0]._replace(row_count=inputs), rows[1]._replace(row_count=outputs), loss, pairs
    )


def zero_sums(device: torch.device) -> Iterator[Sequence[Tensor]]:
    """Yield zeros for each step: loss, pairs, unique rows of both tables.

    Made for many steps at a time: zeroing takes the CPU longer than launching a kernel.
    """
    while True:
        zeros = torch.zeros(4, SUMS_AT_ONCE, dtype=torch.int64, device=device)
        loss_n, *counts = zeros.unbind()
        columns = [loss_n.view(torch.float64), *counts]
        yield from zip(*(column.unbind() for column in columns), strict=True)


def _macros(batch: Batch) -> dict[str, int | str]:
    return {"WINDOW": batch.window, "TARGETS": 1 + batch.negatives_BK.shape[1]}


def _blocks(batch: Batch) -> int:
    items = 2 * batch.window + 1 + batch.negatives_BK.shape[1]
    return blocks_for(batch.windows_B.shape[0] * items)


def _text(batch: Batch) -> tuple[Tensor | int, ...]:
    """Return the parameters BATCH of batch.cuh."""
    words_n, sentences_n, first, windows_B, negatives_BK = batch[:5]
    text = words_n, sentences_n, words_n.shape[0], first
    return *text, windows_B.shape[0], windows_B, negatives_BK
