"""Subwords on a GPU: cu/subwords.cu, on records in place.

Gradients are added in the order in which threads come, so bits differ from run to run.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from w2v.rows.launch import ELEMENTS, Kernel, blocks_for, c_struct, kernel
from w2v.rows.ops import View
from w2v.word2vec.batch import Batch, Grads, StepShape
from w2v.word2vec.cuda import CudaKernels
from w2v.word2vec.kernels import Kernels
from w2v.word2vec.subwords import SubwordKernels, Subwords


class CudaSubwordKernels(SubwordKernels):
    """Subwords of `CudaKernels`, in the buffers of the unique rows of words."""

    inner: CudaKernels

    def __init__(self, inner: Kernels, subwords: Subwords, shape: StepShape):
        super().__init__(inner, subwords, shape)
        rows = self.subwords
        self.inner.further_rows = rows.rows  # no batch may touch more
        self._struct: Any = c_struct("subwords.cu", "Subwords")(
            begin=rows.begin_V, rows=rows.rows_N, words=rows.words
        )

    def _mark(self, marks_A: Tensor) -> None:
        blocks = blocks_for(32 * self.subwords.words)
        self._kernel("mark_rows")(blocks, marks=marks_A, subwords=self._struct)

    def unique_rows(self, batch: Batch) -> Grads:
        grads = self.inner.unique_rows(batch)
        rows = grads.rows
        assert rows.row_count is not None, "counted on the device"
        self._kernel("add_rows")(
            self._blocks(grads), rows=rows, listed=rows.row_count.clone(), subwords=self._struct
        )
        return grads

    def gradients(self, batch: Batch, view: View, grads: Grads, lr: float) -> Grads:
        rows = grads.rows
        if rows.row_count is None:  # borrowed from other ranks
            count = torch.full((), len(rows.unique_rows()), device=self.shape.device)
            grads = grads._replace(rows=rows._replace(row_count=count))
        blocks, width = self._blocks(grads), view.records_SR.shape[1]
        compose = self._kernel("compose", ELEMENTS[view.records_SR.dtype])
        compose(blocks, view=view, rows=grads.rows, row_width=width, subwords=self._struct)
        grads = self.inner.gradients(batch, view, grads, lr)
        self._kernel("spread")(blocks, rows=grads.rows, subwords=self._struct)
        return grads

    def _kernel(self, name: str, element: int = 0) -> Kernel:
        return kernel("subwords.cu", name, DIM=self.shape.dim, ELEMENT=element)

    def _blocks(self, grads: Grads) -> int:
        return blocks_for(32 * grads.rows.grad_UD.shape[0])
