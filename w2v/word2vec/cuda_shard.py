"""CUDA kernels for rows that belong to several ranks (cu/shard.cu).

`CudaShardKernels` are for ranks that send rows to each other: `kernels.ShardKernels` describes each
operation, and `reference.ReferenceKernels` specifies it. `CudaPeerKernels` are for ranks that read
each other's memory.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from w2v.rows.launch import ELEMENTS, Kernel, blocks_for, c_struct, kernel
from w2v.rows.ops import View
from w2v.word2vec.batch import (
    Batch,
    Counts,
    Grads,
    IdsByRank,
    RowGrads,
    StepShape,
    max_batch_rows,
    zeros_by_step,
)
from w2v.word2vec.cuda import CudaKernels, find_unique_rows, with_room
from w2v.word2vec.kernels import ShardKernels

ROOM = 1 << 15  # rows by which buffers for requested rows grow


class RankKernels(CudaKernels):
    """CUDA kernels of a rank, which launches those of shard.cu as well."""

    def _kernel(self, name: str) -> Kernel:
        shape = self.shape
        return kernel(
            "shard.cu",
            name,
            RANKS=shape.world_size,
            HEADER_ROWS=shape.header_rows,
            ELEMENT=ELEMENTS[shape.dtype],
            WIDE=1 if shape.dim % 4 else 4,
        )


class CudaShardKernels(RankKernels, ShardKernels):
    """The operations of `w2v.word2vec.kernels.ShardKernels` by CUDA kernels."""

    def __init__(self, shape: StepShape):
        super().__init__(shape)
        assert shape.shard_rows < 2**31, "ids of rows are int32"
        self._listed: RowGrads | None = None
        self._owned: RowGrads | None = None
        # IdsByRank are listed on the planning stream, which must not share zeros with the steps.
        self._listed_counts = zeros_by_step(shape.device, (torch.int64, ()))
        # Where each row of the batch at hand is among the borrowed weights.
        self._number_A = torch.empty(shape.rows, dtype=torch.int32, device=shape.device)

    def list_requests(
        self, batch: Batch, send_N: Tensor, scratch_N: Tensor, before: IdsByRank
    ) -> tuple[Tensor, Tensor]:
        shape = self.shape
        # Room for numbers alone: these rows get no gradients.
        most = max_batch_rows(batch, shape.vectors)
        self._listed = with_room(self._listed, most, shape.rows, shape, dim=0)
        (count,) = next(self._listed_counts)
        rows = self._listed._replace(row_count=count)
        find_unique_rows(batch, rows)
        room = rows.grad_UD.shape[0] + shape.world_size * shape.header_rows
        rows_U = torch.empty(room, dtype=torch.int64, device=shape.device)
        ids_U = torch.empty(room, dtype=torch.int32, device=shape.device)
        blocks = blocks_for(room)
        self._kernel("count_owners")(blocks, rows=rows, sent=send_N)
        self._kernel("group_by_owner")(
            blocks,
            rows=rows,
            sent=send_N,
            listed=scratch_N,
            listed_rows=rows_U,
            ids=ids_U,
            before=before,
        )
        return rows_U, ids_U

    def read_counts(self, received: IdsByRank, following: Counts, host_2N: Tensor) -> None:
        self._kernel("read_counts")(1, received=received, following=following, both=host_2N)

    def mark_requested(self, ids_M: Tensor, marks_A: Tensor) -> None:
        blocks = blocks_for(ids_M.shape[0])
        self._kernel("mark_requested")(blocks, requests=self._requests(ids_M), marks=marks_A)

    def own(self, ids_M: Tensor) -> Grads:
        shape, blocks = self.shape, blocks_for(ids_M.shape[0])
        room = min(shape.shard_rows, -(-ids_M.shape[0] // ROOM) * ROOM)
        self._owned = with_room(self._owned, room, shape.shard_rows, shape)
        self._kernel("own")(blocks, requests=self._requests(ids_M), rows=self._owned)
        return self._with_sums(self._owned)

    def gather_weights(self, ids_M: Tensor, view: View) -> Tensor:
        shape, count = self.shape, ids_M.shape[0]
        weights_MD = torch.empty(count, shape.dim, dtype=shape.dtype, device=shape.device)
        self._kernel("gather_weights")(
            blocks_for(32 * count),
            requests=self._requests(ids_M),
            view=view,
            row_width=view.records_SR.shape[1],
            dim=shape.dim,
            weights=weights_MD,
        )
        return weights_MD

    def borrow(self, rows_U: Tensor, weights_UD: Tensor, owned: Grads) -> tuple[Grads, View]:
        shape, count = self.shape, rows_U.shape[0]
        grad_UD = torch.empty(count, shape.dim, device=shape.device)
        pairs_U = None
        if shape.count_pairs:
            pairs_U = torch.empty(count, dtype=torch.int32, device=shape.device)
        self._kernel("index_borrowed")(
            blocks_for(32 * count),
            rows=rows_U,
            count=count,
            place_of=self._number_A,
            grads=grad_UD,
            pairs=pairs_U,
            dim=shape.dim,
        )
        rows = RowGrads(self._number_A, None, grad_UD, pairs_U, None)
        return Grads(rows, owned.loss, owned.pairs), View(weights_UD, self._number_A)

    def write_headers(self, borrowed: Grads, fault: Tensor, send_N: Tensor) -> None:
        self._kernel("write_headers")(
            1,
            loss=borrowed.loss,
            pairs=borrowed.pairs,
            fault=fault,
            sent=send_N,
            dim=self.shape.dim,
            grads=borrowed.rows.grad_UD,
        )

    def collect(
        self, received: IdsByRank, grads: tuple[Tensor, Tensor | None], owned: Grads, fault: Tensor
    ) -> None:
        ids_M, recv_N = received
        grad_MD, pairs_M = grads
        self._kernel("collect")(
            blocks_for(32 * ids_M.shape[0]),
            requests=self._requests(ids_M),
            received=recv_N,
            grads=grad_MD,
            grad_pairs=pairs_M,
            rows=owned.rows,
            dim=self.shape.dim,
            loss=owned.loss,
            pairs=owned.pairs,
            fault=fault,
        )

    def _bind(self, use: Hashable, what: tuple, bind: Callable[[], Kernel]) -> Kernel:
        return bind()  # weights are borrowed into other memory in each step

    def _requests(self, ids_M: Tensor) -> Any:
        requests = c_struct("shard.cu", "RequestedIds")
        return requests(ids=ids_M, length=ids_M.shape[0])


class CudaPeerKernels(RankKernels):
    """Kernels of a rank on whose GPU the memory of the others is mapped.

    The CPU never knows how many rows a batch has.

    Args:
        shape: Shape of the whole tables.
        most: The most rows that a batch touches.
        batches: Those of a page, at most.
        pages: Whether rows are paged.
    """

    def __init__(self, shape: StepShape, most: int, batches: int, pages: bool):
        super().__init__(shape)
        size, device = shape.world_size, shape.device
        self._buffers = with_room(None, most, shape.rows, shape)
        self._most = most
        # While a page is listed, lists of the two pages before it may be read; and the count of the
        # list after the last becomes 0.
        slots = 3 * batches + 1
        self._row_lists = torch.empty(slots, most, dtype=torch.int32, device=device)
        self._counts = torch.zeros(slots, dtype=torch.int64, device=device)
        self._lists = [
            self._buffers._replace(rows_U=self._row_lists[slot], row_count=self._counts[slot])
            for slot in range(slots)
        ]
        self._facts = torch.zeros(3, dtype=torch.int64, device=device)
        self._flags = torch.zeros(2, size, dtype=torch.int32, device=device)
        self._marks: Tensor | None = None
        if pages:
            marks = 2, size, shape.shard_rows
            self._marks = torch.zeros(marks, dtype=torch.bool, device=device)
        # Of the batch at hand: gradients, weights of other ranks' rows, and where a row has both.
        number_A = torch.empty(shape.rows, dtype=torch.int32, device=device)
        grad_UD, pairs_U = self._buffers.grad_UD, self._buffers.pairs_U
        self._weights = grad_UD.to(shape.dtype, copy=True)
        self._grads = RowGrads(number_A, None, grad_UD, pairs_U, None)
        # This rank's rows that any rank touches, and where each rank has their gradients.
        room = min(shape.shard_rows, size * most)
        self._owned = with_room(None, room, shape.shard_rows, shape, dim=0)
        places = torch.full((size, room), -1, dtype=torch.int32, device=device)
        self._own_places = places, room
        self.rows_borrowed = torch.zeros((), dtype=torch.int64, device=device)  # so far
        self._listed = self._pages = self._meetings = 0  # so far

    def shared(self, view: View) -> Sequence[Tensor | None]:
        """Return struct Peer of this rank, whose records are in the view."""
        return c_struct("unique.cuh", "Peer")(
            records=view.records_SR,
            slot_of=view.slot_of_A,
            grads=self._buffers.grad_UD,
            pairs=self._buffers.pairs_U,
            rows=self._row_lists,
            counts=self._counts,
            facts=self._facts,
            flags=self._flags,
            marks=self._marks,
        )

    def join(self, rank: int, addresses: list[list[int]], view: View) -> None:
        """Begin to work with the other ranks.

        Args:
            rank: This one.
            addresses: Of the tensors of each rank's `shared`; 0 for None.
            view: This rank's records.
        """
        shape = self.shape
        self._rank, self._peers = rank, shape.world_size
        self._peers_N = torch.tensor(addresses, device=shape.device)
        places, room = self._own_places
        self._places = c_struct("unique.cuh", "Places")(
            peers=self._peers_N, places=places, room=room
        )
        begin = self._weights.data_ptr() - view.records_SR.data_ptr()
        self._borrowed = c_struct("gradients.cu", "Borrowed")(
            begin=begin // self._weights.element_size(), me=rank
        )
        self._borrow = self._kernel("borrow_from_peers").bind(
            index=self._grads.index_A,
            weights=self._weights,
            row_width=view.records_SR.shape[1],
            dim=shape.dim,
            own=self._owned,
            borrowed=self.rows_borrowed,
            places=self._places,
            me=rank,
            most=self._most,
        )
        self._mark_listed = [
            self._kernel("mark_listed").bind(
                rows=rows,
                next_count=self._counts[(slot + 1) % len(self._lists)],
                rows_each=shape.shard_rows,
            )
            for slot, rows in enumerate(self._lists)
        ]
        self._mark_blocks, self._borrow_blocks = blocks_for(self._most), blocks_for(4 * self._most)

    def list_rows(self, page: Sequence[Batch]) -> list[int]:
        """List the unique rows of a page's batches; return the slot of each."""
        if not page:
            return []
        self._pages += 1
        marks_NA = None
        if self._marks is not None:
            marks_NA = self._marks[self._pages % 2].zero_()
        return [self._list(batch, marks_NA) for batch in page]

    def mark_owned(self, marks_A: Tensor) -> None:
        """Mark the rows of this rank that any rank has listed for the page."""
        # One block waits for the other ranks. More would leave no room for the steps that they wait
        # for before they plan.
        self._kernel("meet_to_plan")(1, peers=self._peers_N, me=self._rank, turn=self._pages)
        self._kernel("gather_marks")(
            blocks_for(marks_A.shape[0]),
            peers=self._peers_N,
            me=self._rank,
            page=self._pages % 2,
            rows_each=self.shape.shard_rows,
            rows=marks_A.shape[0],
            marks=marks_A,
        )

    def borrow(self, slot: int) -> Grads:
        """Read weights from the owners, once all ranks have stepped their rows.

        Also lists the rows of this rank that any rank's batch touches.

        Returns:
            Zero gradients of the rows of a batch.
        """
        self._meetings += 1
        self._borrow(self._borrow_blocks, slot=slot, turn=self._meetings)
        return self._with_sums(self._grads)

    def find_gradients(self, grads: Grads, fault: Tensor) -> Grads:
        """Return the rows of this rank, once all ranks have their gradients.

        `optimizer_step` reads those. Loss, pairs and fault become those of all ranks.
        """
        self._meetings += 1
        self._kernel("meet_to_step")(
            1,
            peers=self._peers_N,
            me=self._rank,
            fault=fault,
            loss=grads.loss,
            pairs=grads.pairs,
            turn=self._meetings,
        )
        return grads._replace(rows=self._owned)

    def _list(self, batch: Batch, marks_NA: Tensor | None) -> int:
        rows = max_batch_rows(batch, self.shape.vectors)
        assert rows <= self._most, "a larger batch than planned"
        slot = self._listed % len(self._lists)
        self._listed += 1
        self._list_unique(batch, self._lists[slot], slot)
        self._mark_listed[slot](self._mark_blocks, marks=marks_NA)
        return slot
