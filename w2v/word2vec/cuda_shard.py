"""CUDA kernels of ranks that read each other's memory (cu/shard.cu)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from w2v.rows.launch import ELEMENTS, Kernel, blocks_for, c_struct, kernel
from w2v.rows.ops import View
from w2v.word2vec.batch import Batch, Grads, RowGrads, StepShape, max_batch_rows
from w2v.word2vec.cuda import CudaKernels, with_room


class CudaPeerKernels(CudaKernels):
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
        self._lists_made = self._pages = self._meetings = 0  # so far

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

    def list_page(self, page: Sequence[Batch]) -> list[int]:
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

    def _kernel(self, name: str) -> Kernel:
        shape = self.shape
        element, wide = ELEMENTS[shape.dtype], 1 if shape.dim % 4 else 4
        return kernel("shard.cu", name, RANKS=shape.world_size, ELEMENT=element, WIDE=wide)

    def _list(self, batch: Batch, marks_NA: Tensor | None) -> int:
        rows = max_batch_rows(batch, self.shape.vectors)
        assert rows <= self._most, "a larger batch than planned"
        slot = self._lists_made % len(self._lists)
        self._lists_made += 1
        self._list_unique(batch, self._lists[slot], slot)
        self._mark_listed[slot](self._mark_blocks, marks=marks_NA)
        return slot
