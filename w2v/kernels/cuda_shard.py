"""CUDA kernels for rows that belong to several ranks (cu/shard.cu).

`w2v.kernels.ShardKernels` describes each operation, and `reference.ReferenceKernels` specifies it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from w2v.kernels.batch import Batch, Grads, Page, StepShape, TableGrads, View
from w2v.kernels.cuda import (
    ELEMENTS,
    CudaKernels,
    find_unique_rows,
    most_rows,
    with_room,
    zero_grads,
    zero_sums,
)
from w2v.kernels.launch import blocks_for, launch

ROOM = 1 << 15  # rows by which buffers for requested rows grow


class CudaShardKernels(CudaKernels):
    """The operations of `w2v.kernels.ShardKernels` by CUDA kernels."""

    def __init__(self, shape: StepShape):
        super().__init__(shape)
        assert 2 * shape.stride < 2**31, "ids of rows are int32"
        self._listed: tuple[TableGrads, TableGrads] | None = None
        self._owned: tuple[TableGrads, TableGrads] | None = None
        # Requests are listed on the planning stream, which must not share zeros with the steps.
        self._listed_sums = zero_sums(shape.device)
        # Where each row of the batch at hand is among the borrowed weights.
        size = 2, shape.rows
        self._number_TV = torch.empty(size, dtype=torch.int32, device=shape.device)

    def list_requests(
        self, batch: Batch, send_N: Tensor, scratch_N: Tensor, before: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor]:
        shape, device = self.shape, self.shape.device
        # Room for numbers alone: these rows get no gradients.
        self._listed = with_room(self._listed, most_rows(batch), shape.rows, shape, dim=0)
        rows = zero_grads(self._listed, self._listed_sums)
        find_unique_rows(batch, rows)
        inputs, outputs = rows.inputs, rows.outputs
        room = inputs.rows_U.shape[0] + outputs.rows_U.shape[0]
        room += shape.world_size * shape.header_rows
        rows_U = torch.empty(room, dtype=torch.int64, device=device)
        ids_U = torch.empty(room, dtype=torch.int32, device=device)
        unique = inputs.rows_U, inputs.row_count, outputs.rows_U, outputs.row_count
        launch("shard.cu", "count_owners", self._macros(), blocks_for(room), *unique, send_N)
        ids_before, send_before = before
        launch(
            "shard.cu",
            "deal",
            self._macros(),
            blocks_for(room),
            *unique,
            inputs.number_V,
            outputs.number_V,
            shape.rows,
            shape.stride,
            send_N,
            scratch_N,
            rows_U,
            ids_U,
            send_before,
            ids_before,
        )
        return rows_U, ids_U

    def read_counts(
        self,
        ids_M: Tensor,
        recv_N: Tensor,
        next_send_N: Tensor,
        next_recv_N: Tensor,
        host_2N: Tensor,
    ) -> None:
        counts = ids_M, recv_N, next_send_N, next_recv_N, host_2N
        launch("shard.cu", "hear", self._macros(), 1, *counts)

    def mark_requested(self, ids_M: Tensor, marks_TV: Tensor) -> None:
        blocks = blocks_for(ids_M.shape[0])
        requested = self._requested(ids_M)
        launch("shard.cu", "mark_lent", self._macros(), blocks, *requested, *marks_TV.unbind())

    def lend(self, ids_M: Tensor, page: Page) -> tuple[Tensor, Grads]:
        shape, count = self.shape, ids_M.shape[0]
        room = -(-count // ROOM) * ROOM
        self._owned = with_room(self._owned, (room, room), shape.stride, shape)
        owned = zero_grads(self._owned, self._sums)
        by_table = [
            (view.records_SR, view.slot_of_V, its.number_V, its.rows_U, its.row_count)
            for view, its in zip(page, owned[:2], strict=True)
        ]
        weights_MD = torch.empty(count, shape.dim, dtype=shape.dtype, device=shape.device)
        row_width = page.inputs.records_SR.shape[1]
        launch(
            "shard.cu",
            "lend",
            self._macros(shape.dtype),
            blocks_for(32 * count),
            *self._requested(ids_M),
            *by_table[0],
            *by_table[1],
            row_width,
            shape.dim,
            weights_MD,
        )
        return weights_MD, owned

    def borrow(self, rows_U: Tensor, weights_UD: Tensor, owned: Grads) -> tuple[Page, Grads]:
        shape, count = self.shape, rows_U.shape[0]
        grad_UD = torch.empty(count, shape.dim, device=shape.device)
        pairs_U = None
        if shape.count_pairs:
            pairs_U = torch.empty(count, dtype=torch.int32, device=shape.device)
        launch(
            "shard.cu",
            "place",
            self._macros(),
            blocks_for(32 * count),
            rows_U,
            count,
            self._number_TV,
            grad_UD,
            pairs_U,
            shape.dim,
        )
        page = Page(*(View(weights_UD, number_V) for number_V in self._number_TV))
        inputs, outputs = (TableGrads(n_V, None, grad_UD, pairs_U, None) for n_V in self._number_TV)
        return page, Grads(inputs, outputs, owned.loss, owned.pairs)

    def write_headers(self, borrowed: Grads, fault: Tensor, send_N: Tensor) -> None:
        facts = borrowed.loss, borrowed.pairs, fault
        grad_UD = borrowed.inputs.grad_UD
        launch("shard.cu", "report", self._macros(), 1, *facts, send_N, self.shape.dim, grad_UD)

    def collect(
        self,
        ids_M: Tensor,
        recv_N: Tensor,
        grad_MD: Tensor,
        pairs_M: Tensor | None,
        owned: Grads,
        fault: Tensor,
    ) -> None:
        by_table = [(its.number_V, its.grad_UD, its.pairs_U) for its in owned[:2]]
        launch(
            "shard.cu",
            "collect",
            self._macros(),
            blocks_for(32 * ids_M.shape[0]),
            *self._requested(ids_M),
            recv_N,
            grad_MD,
            pairs_M,
            *by_table[0],
            *by_table[1],
            self.shape.dim,
            owned.loss,
            owned.pairs,
            fault,
        )

    def finish(self) -> None:
        super().finish()
        self._listed = self._owned = None

    def _requested(self, ids_M: Tensor) -> tuple[Tensor, int, int]:
        return ids_M, ids_M.shape[0], self.shape.stride

    def _macros(self, dtype: torch.dtype = torch.float32) -> dict[str, int | str]:
        shape = self.shape
        return {
            "RANKS": shape.world_size,
            "HEADS": shape.header_rows,
            "ELEMENT": ELEMENTS[dtype],
            "WIDE": 1 if shape.dim % 4 else 4,
        }
