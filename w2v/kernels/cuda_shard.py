"""CUDA kernels for rows that belong to several ranks (cu/shard.cu).

`w2v.kernels.ShardKernels` describes each operation, and `reference.ReferenceKernels` specifies it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from w2v.kernels import ShardKernels
from w2v.kernels.batch import (
    Batch,
    Counts,
    Grads,
    Page,
    Requests,
    StepShape,
    TableGrads,
    View,
    zeros_ahead,
)
from w2v.kernels.cuda import ELEMENTS, SUMS, CudaKernels, find_unique_rows, most_rows, with_room
from w2v.kernels.launch import blocks_for, launch

ROOM = 1 << 15  # rows by which buffers for requested rows grow


class CudaShardKernels(CudaKernels, ShardKernels):
    """The operations of `w2v.kernels.ShardKernels` by CUDA kernels."""

    def __init__(self, shape: StepShape):
        super().__init__(shape)
        assert 2 * shape.stride < 2**31, "ids of rows are int32"
        self._listed: tuple[TableGrads, TableGrads] | None = None
        self._owned: tuple[TableGrads, TableGrads] | None = None
        # Requests are listed on the planning stream, which must not share zeros with the steps.
        self._listed_sums = zeros_ahead(shape.device, *SUMS)
        # Where each row of the batch at hand is among the borrowed weights.
        size = 2, shape.rows
        self._number_TV = torch.empty(size, dtype=torch.int32, device=shape.device)

    def list_requests(
        self, batch: Batch, send_N: Tensor, scratch_N: Tensor, before: Requests
    ) -> tuple[Tensor, Tensor]:
        shape = self.shape
        # Room for numbers alone: these rows get no gradients.
        self._listed = with_room(self._listed, most_rows(batch), shape.rows, shape, dim=0)
        unique = find_unique_rows(batch, self._listed, self._listed_sums)
        room = unique.inputs.rows_U.shape[0] + unique.outputs.rows_U.shape[0]
        room += shape.world_size * shape.header_rows
        rows_U = torch.empty(room, dtype=torch.int64, device=shape.device)
        ids_U = torch.empty(room, dtype=torch.int32, device=shape.device)
        rows = *unique.inputs, *unique.outputs
        self._launch("count_owners", room, *rows, send_N)
        lists = scratch_N, rows_U, ids_U
        sizes = shape.rows, shape.stride
        self._launch("group_by_owner", room, *rows, *sizes, send_N, *lists, *before)
        return rows_U, ids_U

    def read_counts(self, received: Requests, following: Counts, host_2N: Tensor) -> None:
        self._launch("read_counts", 1, *received, *following, host_2N)

    def mark_requested(self, ids_M: Tensor, marks_TV: Tensor) -> None:
        self._launch("mark_requested", len(ids_M), *self._requests(ids_M), *marks_TV.unbind())

    def gather_weights(self, ids_M: Tensor, page: Page) -> tuple[Tensor, Grads]:
        shape, count = self.shape, ids_M.shape[0]
        room = -(-count // ROOM) * ROOM
        self._owned = with_room(self._owned, (room, room), shape.stride, shape)
        loss, pairs, *counts = next(self._sums)
        inputs, outputs = (
            its._replace(row_count=count) for its, count in zip(self._owned, counts, strict=True)
        )
        weights_MD = torch.empty(count, shape.dim, dtype=shape.dtype, device=shape.device)
        tables = *page.inputs, *inputs, *page.outputs, *outputs
        weights = page.inputs.records_SR.shape[1], shape.dim, weights_MD
        self._launch("gather_weights", 32 * count, *self._requests(ids_M), *tables, *weights)
        return weights_MD, Grads(inputs, outputs, loss, pairs)

    def borrow(self, rows_U: Tensor, weights_UD: Tensor, owned: Grads) -> tuple[Page, Grads]:
        shape, count = self.shape, rows_U.shape[0]
        grad_UD = torch.empty(count, shape.dim, device=shape.device)
        pairs_U = None
        if shape.count_pairs:
            pairs_U = torch.empty(count, dtype=torch.int32, device=shape.device)
        zeroed = grad_UD, pairs_U, shape.dim
        self._launch("index_borrowed", 32 * count, rows_U, count, self._number_TV, *zeroed)
        page = Page(*(View(weights_UD, number_V) for number_V in self._number_TV))
        inputs, outputs = (TableGrads(n_V, None, grad_UD, pairs_U, None) for n_V in self._number_TV)
        return page, Grads(inputs, outputs, owned.loss, owned.pairs)

    def write_headers(self, borrowed: Grads, fault: Tensor, send_N: Tensor) -> None:
        facts = borrowed.loss, borrowed.pairs, fault
        self._launch("write_headers", 1, *facts, send_N, self.shape.dim, borrowed.inputs.grad_UD)

    def collect(
        self, received: Requests, grads: tuple[Tensor, Tensor | None], owned: Grads, fault: Tensor
    ) -> None:
        ids_M, recv_N = received
        added = recv_N, *grads, *owned.inputs, *owned.outputs
        facts = self.shape.dim, owned.loss, owned.pairs, fault
        self._launch("collect", 32 * len(ids_M), *self._requests(ids_M), *added, *facts)

    def finish(self) -> None:
        super().finish()
        self._listed = self._owned = None

    def _requests(self, ids_M: Tensor) -> tuple[Tensor, int, int]:
        """Return the parameters REQUESTS of shard.cu."""
        return ids_M, ids_M.shape[0], self.shape.stride

    def _launch(self, kernel: str, threads: int, *args: Tensor | float | None) -> None:
        shape = self.shape
        macros: dict[str, int | str] = {
            "RANKS": shape.world_size,
            "HEADER_ROWS": shape.header_rows,
            "ELEMENT": ELEMENTS[shape.dtype],
            "WIDE": 1 if shape.dim % 4 else 4,
        }
        launch("shard.cu", kernel, macros, blocks_for(threads), *args)
