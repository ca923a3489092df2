"""The CUDA kernels, compiled by CuPy when one is first used and launched on torch's current stream."""

from __future__ import annotations

import functools
import math
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from w2v.kernels.reference import SkipgramResult

THREADS = 256
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


def skipgram(
    input_UD: Tensor, output_VD: Tensor, context_slots_BC: Tensor, context_mask_BC: Tensor, target_slots_BT: Tensor, target_mask_BT: Tensor
) -> SkipgramResult:
    """`reference.skipgram`, in one kernel. The vectors are columns of pages, whose rows are equally far apart in both."""
    (B, C), T, D = context_slots_BC.shape, target_slots_BT.shape[1], input_UD.shape[1]
    assert input_UD.stride() == output_VD.stride() and input_UD.stride(1) == 1 and input_UD.dtype == output_VD.dtype == torch.float32
    for slots in (context_slots_BC, target_slots_BT):
        assert slots.dtype == torch.int64 and slots.is_contiguous()
    grad_input_UD, grad_output_VD = (torch.zeros(len(rows), D, device=rows.device) for rows in (input_UD, output_VD))
    loss = torch.zeros((), dtype=torch.float64, device=input_UD.device)
    _launch(
        "sgns.cu", "skipgram", {"DIM": D, "CONTEXTS": C, "TARGETS": T}, _enough_blocks(B),
        input_UD, output_VD, np.int64(input_UD.stride(0)), context_slots_BC, context_mask_BC.contiguous(), target_slots_BT,
        target_mask_BT.contiguous(), np.int64(B), grad_input_UD, grad_output_VD, loss,
    )  # fmt: skip
    return SkipgramResult(loss, context_mask_BC.sum(), grad_input_UD, grad_output_VD)


def step_rows(formula: str, states: int, records_UR: Tensor, grad_UD: Tensor, step: float, step_column: int, hyper: Hyper) -> None:
    """One optimizer step of all rows in place, the table's `step`th; a row's own count of steps is at `step_column`, if not negative."""
    assert records_UR.is_contiguous() and grad_UD.is_contiguous() and records_UR.dtype == grad_UD.dtype == torch.float32
    rows, dim = grad_UD.shape
    if rows:
        _launch(
            "optim.cu", "step", {"STEP": formula, "STATES": states}, _enough_blocks(rows),
            records_UR, np.int64(records_UR.shape[1]), grad_UD, np.int64(rows), np.int32(dim), np.int32(step_column), np.float32(step),
            *map(np.float32, hyper),
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


def _enough_blocks(warps: int) -> int:
    """Blocks for so many warps, at most what fills the GPU several times over."""
    return min(-(-warps * 32 // THREADS), 8 * torch.cuda.get_device_properties().multi_processor_count)


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

    options = ("-std=c++17", *(f"-D{name}={value}" for name, value in defines))
    return cupy.RawModule(code=(Path(__file__).parent / source).read_text(), options=options)
