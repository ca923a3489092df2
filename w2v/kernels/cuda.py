"""The CUDA kernels, compiled by CuPy when one is first used and launched on torch's current stream."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

BLOCKS, THREADS = 132, 512  # more blocks do not move host memory faster


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
        _launch("rows.cu", kernel, table_VR, rows_U, records_SR, slots_U, np.int64(len(rows_U)), np.int32(record_bytes // 16))


def _launch(source: str, kernel: str, *args: Tensor | np.generic | None) -> None:
    """Launch on torch's current stream; a tensor is passed as the pointer to its data, None as a null pointer."""
    passed = tuple(np.intp(0 if arg is None else arg.data_ptr()) if arg is None or isinstance(arg, Tensor) else arg for arg in args)
    with _stream(torch.cuda.current_stream().cuda_stream):
        _module(source).get_function(kernel)((BLOCKS,), (THREADS,), passed)


@functools.cache
def _stream(pointer: int) -> Any:
    """CuPy's view of one of torch's streams."""
    import cupy

    class TorchStream:
        def __cuda_stream__(self) -> tuple[int, int]:
            return 0, pointer

    return cupy.cuda.Stream.from_external(TorchStream())


@functools.cache
def _module(source: str) -> Any:
    import cupy

    return cupy.RawModule(code=(Path(__file__).parent / source).read_text(), options=("-std=c++17",))
