"""CUDA kernels for rows that belong to several ranks (cu/shard.cu).

`CudaShardKernels` are for ranks that send rows to each other: `w2v.kernels.ShardKernels` describes
each operation, and `reference.ReferenceKernels` specifies it. `CudaPeerKernels` are for ranks that
read each other's memory.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from w2v.kernels import ShardKernels
from w2v.kernels.batch import (
    Batch,
    Counts,
    Grads,
    IdsByRank,
    Page,
    StepShape,
    TableGrads,
    View,
    max_batch_rows,
    zeros_by_step,
)
from w2v.kernels.cuda import CudaKernels, find_unique_rows, with_room
from w2v.kernels.launch import ELEMENTS, Kernel, blocks_for, c_struct, kernel

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
    """The operations of `w2v.kernels.ShardKernels` by CUDA kernels."""

    def __init__(self, shape: StepShape):
        super().__init__(shape)
        assert 2 * shape.stride < 2**31, "ids of rows are int32"
        self._listed: tuple[TableGrads, TableGrads] | None = None
        self._owned: tuple[TableGrads, TableGrads] | None = None
        # IdsByRank are listed on the planning stream, which must not share zeros with the steps.
        self._listed_counts = zeros_by_step(shape.device, *[(torch.int64, ())] * 2)
        # Where each row of the batch at hand is among the borrowed weights.
        size = 2, shape.rows
        self._number_TV = torch.empty(size, dtype=torch.int32, device=shape.device)

    def list_requests(
        self, batch: Batch, send_N: Tensor, scratch_N: Tensor, before: IdsByRank
    ) -> tuple[Tensor, Tensor]:
        shape = self.shape
        # Room for numbers alone: these rows get no gradients.
        self._listed = with_room(self._listed, max_batch_rows(batch), shape.rows, shape, dim=0)
        counts = next(self._listed_counts)
        inputs, outputs = self._listed
        inputs, outputs = (
            inputs._replace(row_count=counts[0]),
            outputs._replace(row_count=counts[1]),
        )
        find_unique_rows(batch, (inputs, outputs))
        room = inputs.grad_UD.shape[0] + outputs.grad_UD.shape[0]
        room += shape.world_size * shape.header_rows
        rows_U = torch.empty(room, dtype=torch.int64, device=shape.device)
        ids_U = torch.empty(room, dtype=torch.int32, device=shape.device)
        blocks = blocks_for(room)
        self._kernel("count_owners")(blocks, inputs=inputs, outputs=outputs, sent=send_N)
        self._kernel("group_by_owner")(
            blocks,
            inputs=inputs,
            outputs=outputs,
            rows_all=shape.rows,
            stride=shape.stride,
            sent=send_N,
            listed=scratch_N,
            rows=rows_U,
            ids=ids_U,
            before=before,
        )
        return rows_U, ids_U

    def read_counts(self, received: IdsByRank, following: Counts, host_2N: Tensor) -> None:
        self._kernel("read_counts")(1, received=received, following=following, both=host_2N)

    def mark_requested(self, ids_M: Tensor, marks_TV: Tensor) -> None:
        inputs_V, outputs_V = marks_TV.unbind()
        self._kernel("mark_requested")(
            blocks_for(ids_M.shape[0]),
            requests=self._requests(ids_M),
            input_marks=inputs_V,
            output_marks=outputs_V,
        )

    def own(self, ids_M: Tensor) -> Grads:
        room = -(-ids_M.shape[0] // ROOM) * ROOM
        self._owned = with_room(self._owned, (room, room), self.shape.stride, self.shape)
        owned = self._with_sums(self._owned)
        self._kernel("own")(
            blocks_for(ids_M.shape[0]),
            requests=self._requests(ids_M),
            inputs=owned.inputs,
            outputs=owned.outputs,
        )
        return owned

    def gather_weights(self, ids_M: Tensor, page: Page) -> Tensor:
        shape, count = self.shape, ids_M.shape[0]
        weights_MD = torch.empty(count, shape.dim, dtype=shape.dtype, device=shape.device)
        self._kernel("gather_weights")(
            blocks_for(32 * count),
            requests=self._requests(ids_M),
            inputs=page.inputs,
            outputs=page.outputs,
            row_width=page.inputs.records_SR.shape[1],
            dim=shape.dim,
            weights=weights_MD,
        )
        return weights_MD

    def borrow(self, rows_U: Tensor, weights_UD: Tensor, owned: Grads) -> tuple[Grads, Page]:
        shape, count = self.shape, rows_U.shape[0]
        grad_UD = torch.empty(count, shape.dim, device=shape.device)
        pairs_U = None
        if shape.count_pairs:
            pairs_U = torch.empty(count, dtype=torch.int32, device=shape.device)
        self._kernel("index_borrowed")(
            blocks_for(32 * count),
            rows=rows_U,
            count=count,
            place_of=self._number_TV,
            grads=grad_UD,
            pairs=pairs_U,
            dim=shape.dim,
        )
        input_V, output_V = self._number_TV.unbind()
        page = Page(View(weights_UD, input_V), View(weights_UD, output_V))
        inputs = TableGrads(input_V, None, grad_UD, pairs_U, None)
        outputs = inputs._replace(index_V=output_V)
        return Grads(inputs, outputs, owned.loss, owned.pairs), page

    def write_headers(self, borrowed: Grads, fault: Tensor, send_N: Tensor) -> None:
        self._kernel("write_headers")(
            1,
            loss=borrowed.loss,
            pairs=borrowed.pairs,
            fault=fault,
            sent=send_N,
            dim=self.shape.dim,
            grads=borrowed.inputs.grad_UD,
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
            inputs=owned.inputs,
            outputs=owned.outputs,
            dim=self.shape.dim,
            loss=owned.loss,
            pairs=owned.pairs,
            fault=fault,
        )

    def _bind(self, use: Hashable, what: tuple, bind: Callable[[], Kernel]) -> Kernel:
        return bind()  # weights are borrowed into other memory in each step

    def _requests(self, ids_M: Tensor) -> Any:
        requests = c_struct("shard.cu", "RequestedIds")
        return requests(ids=ids_M, length=ids_M.shape[0], stride=self.shape.stride)


class CudaPeerKernels(RankKernels):
    """Kernels of a rank on whose GPU the memory of the others is mapped.

    The CPU never knows how many rows a batch has.

    Args:
        shape: Shape of the whole tables.
        most: The most rows of each table that a batch touches.
        batches: Those of a page, at most.
        pages: Whether rows are paged.
    """

    def __init__(self, shape: StepShape, most: tuple[int, int], batches: int, pages: bool):
        super().__init__(shape)
        size, device = shape.world_size, shape.device
        self._buffers = with_room(None, most, shape.rows, shape)
        inputs, outputs = self._buffers
        self._most = inputs.grad_UD.shape[0], outputs.grad_UD.shape[0]
        # While a page is listed, lists of the two pages before it may be read; and the count of the
        # list after the last becomes 0.
        slots = 3 * batches + 1
        self._rows_in, self._rows_out = (
            torch.empty(slots, count, dtype=torch.int32, device=device) for count in self._most
        )
        self._counts = torch.zeros(slots, 2, dtype=torch.int64, device=device)
        self._lists = [
            (
                inputs._replace(rows_U=self._rows_in[slot], row_count=self._counts[slot, 0]),
                outputs._replace(rows_U=self._rows_out[slot], row_count=self._counts[slot, 1]),
            )
            for slot in range(slots)
        ]
        self._facts = torch.zeros(3, dtype=torch.int64, device=device)
        self._flags = torch.zeros(2, size, dtype=torch.int32, device=device)
        self._marks: Tensor | None = None
        if pages:
            marks = 2, size, 2, shape.stride
            self._marks = torch.zeros(marks, dtype=torch.bool, device=device)
        # Of the batch at hand: gradients, weights of other ranks' rows, and where a row has both.
        number_in, number_out = torch.empty(2, shape.rows, dtype=torch.int32, device=device)
        self._weights_in, self._weights_out = (
            rows.grad_UD.to(shape.dtype, copy=True) for rows in self._buffers
        )
        self._grads = (
            TableGrads(number_in, None, inputs.grad_UD, inputs.pairs_U, None),
            TableGrads(number_out, None, outputs.grad_UD, outputs.pairs_U, None),
        )
        # This rank's rows that any rank touches, and where each rank has their gradients.
        room = min(shape.stride, size * max(self._most))
        self._owned = with_room(None, (room, room), shape.stride, shape, dim=0)
        places_in, places_out = torch.full((2, size, room), -1, dtype=torch.int32, device=device)
        self._own_places = places_in, places_out, room
        self.rows_borrowed = torch.zeros((), dtype=torch.int64, device=device)  # so far
        self._listed = self._pages = self._meetings = 0  # so far

    def shared(self, page: Page) -> Sequence[Tensor | None]:
        """Return struct Peer of this rank, whose records are on the page."""
        inputs, outputs = self._buffers
        return c_struct("unique.cuh", "Peer")(
            records_in=page.inputs.records_SR,
            slot_in=page.inputs.slot_of_V,
            records_out=page.outputs.records_SR,
            slot_out=page.outputs.slot_of_V,
            grads_in=inputs.grad_UD,
            grads_out=outputs.grad_UD,
            pairs_in=inputs.pairs_U,
            pairs_out=outputs.pairs_U,
            rows_in=self._rows_in,
            rows_out=self._rows_out,
            counts=self._counts,
            facts=self._facts,
            flags=self._flags,
            marks=self._marks,
        )

    def join(self, rank: int, addresses: list[list[int]], page: Page) -> None:
        """Begin to work with the other ranks.

        Args:
            rank: This one.
            addresses: Of the tensors of each rank's `shared`; 0 for None.
            page: This rank's records.
        """
        shape = self.shape
        self._rank, self._peers = rank, shape.world_size
        self._peers_N = torch.tensor(addresses, device=shape.device)
        places_in, places_out, room = self._own_places
        self._places = c_struct("unique.cuh", "Places")(
            peers=self._peers_N, places_in=places_in, places_out=places_out, room=room
        )
        own_in, own_out = self._owned
        grads_in, grads_out = self._grads
        self._borrowed = c_struct("gradients.cu", "Borrowed")(
            inputs=_elements_between(page.inputs.records_SR, self._weights_in),
            outputs=_elements_between(page.outputs.records_SR, self._weights_out),
            me=rank,
        )
        self._borrow = self._kernel("borrow_from_peers").bind(
            index_in=grads_in.index_V,
            index_out=grads_out.index_V,
            weights_in=self._weights_in,
            weights_out=self._weights_out,
            row_width=page.inputs.records_SR.shape[1],
            dim=shape.dim,
            own_in=own_in,
            own_out=own_out,
            borrowed=self.rows_borrowed,
            places=self._places,
            me=rank,
            most_in=self._most[0],
            most_out=self._most[1],
        )
        self._mark_listed = [
            self._kernel("mark_listed").bind(
                inputs=of_inputs,
                outputs=of_outputs,
                next_counts=self._counts[(slot + 1) % len(self._lists)],
                rows_each=shape.stride,
            )
            for slot, (of_inputs, of_outputs) in enumerate(self._lists)
        ]
        listed = sum(self._most)
        self._mark_blocks, self._borrow_blocks = blocks_for(listed), blocks_for(4 * listed)

    def list_rows(self, page: Sequence[Batch]) -> list[int]:
        """List the unique rows of a page's batches; return the slot of each."""
        if not page:
            return []
        self._pages += 1
        marks_NTV = None
        if self._marks is not None:
            marks_NTV = self._marks[self._pages % 2].zero_()
        return [self._list(batch, marks_NTV) for batch in page]

    def mark_owned(self, marks_TV: Tensor) -> None:
        """Mark the rows of this rank that any rank has listed for the page."""
        # One block waits for the other ranks. More would leave no room for the steps that they wait
        # for before they plan.
        self._kernel("meet_to_plan")(1, peers=self._peers_N, me=self._rank, turn=self._pages)
        inputs_V, outputs_V = marks_TV.unbind()
        self._kernel("gather_marks")(
            blocks_for(inputs_V.shape[0]),
            peers=self._peers_N,
            me=self._rank,
            page=self._pages % 2,
            rows_each=self.shape.stride,
            rows=inputs_V.shape[0],
            marks_in=inputs_V,
            marks_out=outputs_V,
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
        return Grads(self._owned[0], self._owned[1], grads.loss, grads.pairs)

    def _list(self, batch: Batch, marks_NTV: Tensor | None) -> int:
        for rows, most in zip(max_batch_rows(batch), self._most, strict=True):
            assert min(rows, self.shape.rows) <= most, "a larger batch than planned"
        slot = self._listed % len(self._lists)
        self._listed += 1
        self._list_unique(batch, self._lists[slot], slot)
        self._mark_listed[slot](self._mark_blocks, marks=marks_NTV)
        return slot


def _elements_between(records_SR: Tensor, weights_UD: Tensor) -> int:
    """Return the elements from the first record to the first of some weights."""
    return (weights_UD.data_ptr() - records_SR.data_ptr()) // weights_UD.element_size()
