"""The CUDA kernels, compiled by CuPy when one is first used and launched on torch's current stream."""

from __future__ import annotations

import functools
import math
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from w2v.batch import Batch, Held

KERNELS = Path(__file__).parent
THREADS = 256
ELEMENTS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # as element.cuh knows them
MOVING_BLOCKS = 64  # enough for the link, and no more, so that reads and writes at once get about the same share


def gather_records(table_VR: Tensor, rows_U: Tensor, records_SR: Tensor, slots_U: Tensor | None = None) -> None:
    """records[slots[u]] = table[rows[u]], slots[u] being u where none are given; the table may lie in pinned CPU memory.

    Rows and slots are int64 on the GPU, inside their bounds; rows are unique, and best sorted. A record is a multiple of 16 bytes.
    """
    _move("gather_records", table_VR, rows_U, records_SR, slots_U)


def scatter_records(table_VR: Tensor, rows_U: Tensor, records_SR: Tensor, slots_U: Tensor | None = None) -> None:
    """table[rows[u]] = records[slots[u]]; otherwise as `gather_records`."""
    _move("scatter_records", table_VR, rows_U, records_SR, slots_U)


def _move(kernel: str, table_VR: Tensor, rows_U: Tensor, records_SR: Tensor, slots_U: Tensor | None) -> None:
    assert table_VR.shape[1] == records_SR.shape[1] and table_VR.dtype == records_SR.dtype
    assert table_VR.is_contiguous() and records_SR.is_contiguous()
    for ids in (rows_U, slots_U):
        assert ids is None or (ids.dtype == torch.int64 and ids.is_contiguous() and ids.is_cuda and len(ids) == len(rows_U))
    record_bytes = table_VR.shape[1] * table_VR.element_size()
    assert record_bytes % 16 == 0
    if len(rows_U):
        count, width = np.int64(len(rows_U)), np.int32(record_bytes // 16)
        _launch("rows.cu", kernel, {}, MOVING_BLOCKS, table_VR, rows_U, records_SR, slots_U, count, width)


class Claims:
    """The rows of a table that the batch at hand touches, `most` at most, with a gradient of each; all on the GPU.

    number_V: int32, the number of each row, or -1; rows_U: int32, the row of each number; grad_UD: float32; pairs_U: int32, how many pairs
    a gradient sums, where they are counted.
    """

    def __init__(self, rows: int, most: int, dim: int, device: torch.device):
        self.number_V = torch.full((rows,), -1, dtype=torch.int32, device=device)
        self.rows_U = torch.empty(min(rows, most), dtype=torch.int32, device=device)
        self.grad_UD = torch.zeros(len(self.rows_U), dim, device=device)
        self.pairs_U = torch.zeros_like(self.rows_U)


def claim(batch: Batch, inputs: Claims, outputs: Claims, counts: Tensor) -> None:
    """Claim the rows of both tables that take part in a pair of the batch; counts: int32 [2], of input and output rows so far."""
    items = len(batch.windows_B) * (2 * batch.window + 1 + batch.negatives_BK.shape[1])
    _launch(
        "claim.cu", "claim", _shape(batch), _enough_blocks(items), *_arguments(batch),
        inputs.number_V, inputs.rows_U, outputs.number_V, outputs.rows_U, counts,
    )  # fmt: skip


def mark(batch: Batch, marks_TV: Tensor) -> None:
    """Set the marks, bool [2, V], of the rows of the input and the output table that take part in a pair of the batch."""
    items = len(batch.windows_B) * (2 * batch.window + 1 + batch.negatives_BK.shape[1])
    _launch("claim.cu", "mark", _shape(batch), _enough_blocks(items), *_arguments(batch), *marks_TV)


class Slots(NamedTuple):
    """Where the rows of T tables are in S slots, on the GPU; see kernels/cache.cu. Rows are counted through all tables, t * V + v.

    count: S; slot_of_TV: int32, S for a row that is in none; wanted_TV: int32, the last plan that wanted a row; order_N: int64, the rows,
    the most used first; book: int64 [4], slots that were ever used, and rows used, read and written so far.
    """

    count: int
    slot_of_TV: Tensor
    wanted_TV: Tensor
    order_N: Tensor
    book: Tensor


class Moves(NamedTuple):
    """Rows that come to slots, some of them in place of rows that leave, in lists on the GPU; rows are counted through all tables.

    coming, leaving: int64; slots: int32, of those that come; numbers: int64, how many come, and how many of them to slots that nobody
    leaves: these are first in the list, and the others take the places of those that leave, in order.
    """

    coming: Tensor
    leaving: Tensor
    slots: Tensor
    numbers: Tensor


class Orders:
    """The moves of a plan for `slots`, and what it tells the CPU.

    notice: int64 [2] in pinned memory, the rows for which there was no room beside those in use, and how many were refused since there
    was none at all.
    """

    def __init__(self, slots: Slots):
        device, rows = slots.book.device, len(slots.order_N)
        self.stretch = max(256, -(-rows // (64 * THREADS)))  # rows that one warp surveys
        self.stretches = -(-rows // self.stretch)
        self.missing, self.idle = (torch.empty(self.stretches + 1, dtype=torch.int64, device=device) for _ in range(2))
        lists = [torch.empty(min(slots.count, rows), dtype=dtype, device=device) for dtype in (torch.int64, torch.int64, torch.int32)]
        self.moves = Moves(*lists, torch.zeros(4, dtype=torch.int64, device=device))
        self.notice = torch.zeros(2, dtype=torch.int64, pin_memory=True)


def plan_moves(slots: Slots, orders: Orders, marks_TV: Tensor | None, plan: int, in_use: int) -> None:
    """Give slots to the marked rows, or to those that `plan` has marked, and list the moves; rows wanted since plan `in_use` stay."""
    over = [slots.slot_of_TV, slots.wanted_TV, slots.order_N, *map(np.int64, (len(slots.order_N), orders.stretch, slots.count))]
    over += [np.int32(plan), np.int32(in_use)]
    coming, leaving, given, numbers = orders.moves
    counts = orders.missing, orders.idle, np.int64(orders.stretches), np.int64(slots.count)
    blocks, final = -(-32 * orders.stretches // THREADS), np.bool_(in_use == plan)
    _launch("cache.cu", "survey", {}, blocks, *over, marks_TV, orders.missing, orders.idle, slots.book)
    _launch("cache.cu", "decide", {}, 1, *counts, final, slots.book, numbers, orders.notice)
    _launch("cache.cu", "leave", {}, blocks, *over, orders.idle, numbers, leaving, given)
    _launch("cache.cu", "come", {}, blocks, *over, orders.missing, numbers, coming, given)


def exchange(moves: Moves, tables: Tensor, rows: int, records_SR: Tensor) -> None:
    """Read the records that come into their slots, and write to their tables those that leave them.

    tables: the addresses of the tables' records, int64 [T] on the GPU, of so many rows each.
    """
    width = np.int32(records_SR.shape[1] * records_SR.element_size() // 16)
    _launch("rows.cu", "exchange", {}, MOVING_BLOCKS, tables, np.int64(rows), records_SR, width, *moves)


def skipgram(
    batch: Batch, inputs: Held, input_claims: Claims, outputs: Held, output_claims: Claims, counted: bool = False
) -> tuple[Tensor, Tensor]:
    """Add the gradients of the batch's summed loss to the claims; give that loss (float64) and its number of positive pairs (int64).

    counted: whether to count the pairs of each row too.
    """
    (_, row_width), dim, dtype = inputs.records_SR.shape, input_claims.grad_UD.shape[1], inputs.records_SR.dtype
    assert outputs.records_SR.shape[1] == row_width and outputs.records_SR.dtype == dtype
    loss, pairs = (torch.zeros((), dtype=kind, device=inputs.records_SR.device) for kind in (torch.float64, torch.int64))
    made_for = _shape(batch) | {"DIM": dim, "ELEMENT": ELEMENTS[dtype], "COUNTED": int(counted)}
    _launch(
        "sgns.cu", "skipgram", made_for, _enough_blocks(32 * len(batch.windows_B)), *_arguments(batch),
        inputs.records_SR, inputs.slot_of_V, input_claims.number_V, input_claims.grad_UD, input_claims.pairs_U,
        outputs.records_SR, outputs.slot_of_V, output_claims.number_V, output_claims.grad_UD, output_claims.pairs_U,
        np.int64(row_width), loss, pairs,
    )  # fmt: skip
    return loss, pairs


class Guard(NamedTuple):
    """What keeps numbers that are not finite out of the tables; loss: float64, fault: int64, both on the GPU.

    A step whose `loss` is not finite sets `fault` to `step` + 1, and one that would write a row which is not sets it to `step` + `bit`,
    unless it is set already; from then on no row is written.
    """

    loss: Tensor
    fault: Tensor
    step: int
    bit: int


def step_rows(
    formula: str, states: int, held: Held, claims: Claims, count: Tensor, step: float, step_column: int, hyper: Hyper, cap: int, noise: int,
    guard: Guard,
) -> None:  # fmt: skip
    """One optimizer step of the claimed rows, the table's `step`th, which ends the claims and zeroes gradients and counts of pairs.

    A row's own count of steps is at `step_column` of its record, if that is not negative. A gradient that sums more than `cap` pairs is
    scaled by cap / pairs, if cap is not 0. `noise` is the seed, mixed, of rounding to bfloat16.
    """
    dim, row_width = claims.grad_UD.shape[1], held.records_SR.shape[1]
    made_for = {"STEP": formula, "STATES": states, "ELEMENT": ELEMENTS[held.records_SR.dtype], "WIDE": 1 if dim % 4 else 4}
    _launch(
        "optim.cu", "step", made_for, _enough_blocks(32 * len(claims.rows_U)),
        held.records_SR, held.slot_of_V, np.int64(row_width), claims.grad_UD, claims.pairs_U, claims.rows_U, count, claims.number_V,
        *map(np.int32, (dim, step_column)), np.float32(step), np.int32(cap), np.uint64(noise), *map(np.float32, hyper),
        guard.loss, guard.fault, np.int64(guard.step), np.int64(guard.bit),
    )  # fmt: skip


class Hyper(NamedTuple):
    """What the formulas in optim.cu take, in the order of their struct; `rest` is 1 - beta."""

    lr: float
    eps: float = 0.0
    weight_decay: float = 0.0
    lr_decay: float = 0.0
    beta1: float = 0.0
    rest1: float = 1.0
    log_beta1: float = -math.inf
    beta2: float = 0.0
    rest2: float = 1.0
    log_beta2: float = -math.inf


def _shape(batch: Batch) -> dict[str, int | str]:
    return {"WINDOW": batch.window, "TARGETS": 1 + batch.negatives_BK.shape[1]}


def _arguments(batch: Batch) -> list[Tensor | np.generic]:
    text = [batch.words_n, batch.sentences_n, np.int64(len(batch.words_n)), np.int64(batch.first), np.int64(len(batch.windows_B))]
    return [*text, batch.windows_B, batch.negatives_BK]


def _enough_blocks(threads: int) -> int:
    """Blocks for so many threads, at most what fills the GPU several times over."""
    return max(1, min(-(-threads // THREADS), 8 * _processors()))


@functools.cache
def _processors() -> int:
    return torch.cuda.get_device_properties().multi_processor_count


def _launch(source: str, kernel: str, defines: dict[str, int | str], blocks: int, *args: Tensor | np.generic | None) -> None:
    """Launch on torch's current stream; a tensor is passed as the pointer to its data, None as a null pointer."""
    passed = tuple(np.intp(0 if arg is None else arg.data_ptr()) if arg is None or isinstance(arg, Tensor) else arg for arg in args)
    with _stream(torch.cuda.current_stream().cuda_stream):
        _module(source, tuple(defines.items())).get_function(kernel)((blocks,), (THREADS,), passed)


@functools.cache
def _stream(pointer: int) -> Any:
    """CuPy's view of one of torch's streams."""
    import cupy

    class TorchStream:
        def __cuda_stream__(self) -> tuple[int, int]:
            return 0, pointer

    return cupy.cuda.Stream.from_external(TorchStream())


@functools.cache
def _module(source: str, defines: tuple[tuple[str, int | str], ...]) -> Any:
    import cupy

    options = ("-std=c++17", f"-I{KERNELS}", *(f"-D{name}={value}" for name, value in defines))
    return cupy.RawModule(code=(KERNELS / source).read_text(), options=options)
