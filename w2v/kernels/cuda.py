"""The CUDA kernels, compiled by CuPy when one is first used and launched on torch's current stream."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

BLOCKS, THREADS = 132, 512  # more blocks do not move host memory faster


def gather_records(table_VR: Tensor, rows_U: Tensor, page_UR: Tensor) -> None:
    """page[u] = table[rows[u]]; the table may lie in pinned CPU memory. Rows must be unique and inside the table."""
    _move("gather_records", table_VR, rows_U, page_UR)


def scatter_records(page_UR: Tensor, rows_U: Tensor, table_VR: Tensor) -> None:
    """table[rows[u]] = page[u]; the table may lie in pinned CPU memory. Rows must be unique and inside the table."""
    _move("scatter_records", table_VR, rows_U, page_UR)


def _move(kernel: str, table_VR: Tensor, rows_U: Tensor, page_UR: Tensor) -> None:
    assert rows_U.dtype == torch.int64 and rows_U.is_contiguous() and page_UR.is_contiguous() and table_VR.is_contiguous()
    bytes_R = page_UR.shape[1] * page_UR.element_size()
    assert bytes_R % 16 == 0 and table_VR.shape[1] == page_UR.shape[1]
    if len(rows_U):
        _launch("rows.cu", kernel, table_VR, rows_U, np.int64(len(rows_U)), np.int32(bytes_R // 16), page_UR)


def _launch(source: str, kernel: str, *args: Tensor | np.generic) -> None:
    """Launch on torch's current stream; a tensor is passed as the pointer to its data."""
    passed = tuple(np.intp(arg.data_ptr()) if isinstance(arg, Tensor) else arg for arg in args)
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
