"""CUDA kernels for rows that belong to several ranks (cu/shard.cu).

`CudaShardKernels` are for ranks that send rows to each other: `w2v.kernels.ShardKernels` describes
each operation, and `reference.ReferenceKernels` specifies it. `CudaPeerKernels` are for ranks that
read each other's memory.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

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
    max_batch_rows,
    zeros_by_step,
)
from w2v.kernels.cuda import ELEMENTS, CudaKernels, find_unique_rows, with_room
from w2v.kernels.launch import Kernel, blocks_for, launch

ROOM = 1 << 15  # rows by which buffers for requested rows grow


class RankKernels(CudaKernels):
    """CUDA kernels of a rank, which launches those of shard.cu as well."""

    def __init__(self, shape: StepShape):
        super().__init__(shape)
        self._macros: dict[str, int | str] = {
            "RANKS": shape.world_size,
            "HEADER_ROWS": shape.header_rows,
            "ELEMENT": ELEMENTS[shape.dtype],
            "WIDE": 1 if shape.dim % 4 else 4,
        }

    def _launch(self, kernel: str, threads: int, *args: Tensor | float | None) -> None:
        launch("shard.cu", kernel, self._macros, blocks_for(threads), *args)


class CudaShardKernels(RankKernels, ShardKernels):
    """The operations of `w2v.kernels.ShardKernels` by CUDA kernels."""

    def __init__(self, shape: StepShape):
        super().__init__(shape)
        assert 2 * shape.stride < 2**31, "ids of rows are int32"
        self._listed: tuple[TableGrads, TableGrads] | None = None
        self._owned: tuple[TableGrads, TableGrads] | None = None
        # Requests are listed on the planning stream, which must not share zeros with the steps.
        self._listed_counts = zeros_by_step(shape.device, *[(torch.int64, ())] * 2)
        # Where each row of the batch at hand is among the borrowed weights.
        size = 2, shape.rows
        self._number_TV = torch.empty(size, dtype=torch.int32, device=shape.device)

    def list_requests(
        self, batch: Batch, send_N: Tensor, scratch_N: Tensor, before: Requests
    ) -> tuple[Tensor, Tensor]:
        shape = self.shape
        # Room for numbers alone: these rows get no gradients.
        self._listed = with_room(self._listed, max_batch_rows(batch), shape.rows, shape, dim=0)
        counts = next(self._listed_counts)
        inputs, outputs = (
            table._replace(row_count=count)
            for table, count in zip(self._listed, counts, strict=True)
        )
        find_unique_rows(batch, (inputs, outputs))
        room = inputs.rows_U.shape[0] + outputs.rows_U.shape[0]
        room += shape.world_size * shape.header_rows
        rows_U = torch.empty(room, dtype=torch.int64, device=shape.device)
        ids_U = torch.empty(room, dtype=torch.int32, device=shape.device)
        rows = *inputs, *outputs
        self._launch("count_owners", room, *rows, send_N)
        lists = scratch_N, rows_U, ids_U
        sizes = shape.rows, shape.stride
        self._launch("group_by_owner", room, *rows, *sizes, send_N, *lists, *before)
        return rows_U, ids_U

    def read_counts(self, received: Requests, following: Counts, host_2N: Tensor) -> None:
        self._launch("read_counts", 1, *received, *following, host_2N)

    def mark_requested(self, ids_M: Tensor, marks_TV: Tensor) -> None:
        self._launch("mark_requested", len(ids_M), *self._requests(ids_M), *marks_TV.unbind())

    def own(self, ids_M: Tensor) -> Grads:
        room = -(-ids_M.shape[0] // ROOM) * ROOM
        self._owned = with_room(self._owned, (room, room), self.shape.stride, self.shape)
        owned = self._with_sums(self._owned)
        rows = *owned.inputs, *owned.outputs
        self._launch("own", len(ids_M), *self._requests(ids_M), *rows)
        return owned

    def gather_weights(self, ids_M: Tensor, page: Page) -> Tensor:
        shape, count = self.shape, ids_M.shape[0]
        weights_MD = torch.empty(count, shape.dim, dtype=shape.dtype, device=shape.device)
        weights = (
            *page.inputs,
            *page.outputs,
            page.inputs.records_SR.shape[1],
            shape.dim,
            weights_MD,
        )
        self._launch("gather_weights", 32 * count, *self._requests(ids_M), *weights)
        return weights_MD

    def borrow(self, rows_U: Tensor, weights_UD: Tensor, owned: Grads) -> tuple[Grads, Page]:
        shape, count = self.shape, rows_U.shape[0]
        grad_UD = torch.empty(count, shape.dim, device=shape.device)
        pairs_U = None
        if shape.count_pairs:
            pairs_U = torch.empty(count, dtype=torch.int32, device=shape.device)
        zeroed = grad_UD, pairs_U, shape.dim
        self._launch("index_borrowed", 32 * count, rows_U, count, self._number_TV, *zeroed)
        numbers = self._number_TV.unbind()
        inputs, outputs = (TableGrads(n_V, None, grad_UD, pairs_U, None) for n_V in numbers)
        page = Page(*(View(weights_UD, number_V) for number_V in numbers))
        return Grads(inputs, outputs, owned.loss, owned.pairs), page

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

    def _bind(self, use: Hashable, what: tuple, bind: Callable[[], Kernel]) -> Kernel:
        return bind()  # weights are borrowed into other memory in each step

    def _requests(self, ids_M: Tensor) -> tuple[Tensor, int, int]:
        """Return the parameters REQUESTS of shard.cu."""
        return ids_M, ids_M.shape[0], self.shape.stride


class Window(NamedTuple):
    """Memory of a rank that the others read, as struct Peer in unique.cuh.

    Lists of rows have a slot for each of the last batches; marks are those of the last two pages.
    """

    grads_in: Tensor  # float32, of the rows of the batch at hand
    grads_out: Tensor
    pairs_in: Tensor  # int32, how many pairs each gradient sums
    pairs_out: Tensor
    rows_in: Tensor  # int32, the unique rows of each batch
    rows_out: Tensor
    counts: Tensor  # int64, their number in both tables
    facts: Tensor  # int64, loss, pairs and fault of this rank's step
    flags: Tensor  # int32 [2, N]: how often each rank has met all, in steps and in plans
    marks: Tensor | None  # bool [2, N, 2, V], the rows of each rank that this rank's page needs


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
        inputs, outputs = with_room(None, most, shape.rows, shape)
        self._most = inputs.rows_U.shape[0], outputs.rows_U.shape[0]
        # While a page is listed, lists of the two pages before it may be read; and the count of the
        # list after the last becomes 0.
        slots = 3 * batches + 1
        grads = inputs.grad_UD, outputs.grad_UD, inputs.pairs_U, outputs.pairs_U
        rows_in, rows_out = (
            torch.empty(slots, count, dtype=torch.int32, device=device) for count in self._most
        )
        counts = torch.zeros(slots, 2, dtype=torch.int64, device=device)
        self._lists = [
            (
                inputs._replace(rows_U=rows_in[slot], row_count=counts[slot, 0]),
                outputs._replace(rows_U=rows_out[slot], row_count=counts[slot, 1]),
            )
            for slot in range(slots)
        ]
        self._mark_listed = []
        for slot, (of_inputs, of_outputs) in enumerate(self._lists):
            next_counts = counts[(slot + 1) % slots]
            first = *of_inputs, *of_outputs, next_counts, shape.stride
            self._mark_listed.append(Kernel("shard.cu", "mark_listed", self._macros, *first))
        facts = torch.zeros(3, dtype=torch.int64, device=device)
        flags = torch.zeros(2, size, dtype=torch.int32, device=device)
        marks = None
        if pages:
            marks = torch.zeros(2, size, 2, shape.stride, dtype=torch.bool, device=device)
        self.window = Window(*grads, rows_in, rows_out, counts, facts, flags, marks)
        # Of the batch at hand: gradients, weights of other ranks' rows, and where a row has both.
        number_in, number_out = torch.empty(2, shape.rows, dtype=torch.int32, device=device)
        self._numbers = number_in, number_out
        self._weights = tuple(rows.grad_UD.to(shape.dtype, copy=True) for rows in (inputs, outputs))
        self._grads = (
            TableGrads(number_in, None, inputs.grad_UD, inputs.pairs_U, None),
            TableGrads(number_out, None, outputs.grad_UD, outputs.pairs_U, None),
        )
        # This rank's rows that any rank touches, and where each rank has their gradients.
        room = min(shape.stride, size * max(self._most))
        self._owned = with_room(None, (room, room), shape.stride, shape, dim=0)
        places = torch.full((2, size, room), -1, dtype=torch.int32, device=device)
        self._places = places[0], places[1], room
        self.rows_borrowed = torch.zeros((), dtype=torch.int64, device=device)  # so far
        self._listed = self._pages = self._meetings = 0  # so far

    def join(self, rank: int, addresses: list[list[int]], page: Page) -> None:
        """Begin to work with the other ranks.

        Args:
            rank: This one.
            addresses: The fields of struct Peer of each rank.
            page: This rank's records.
        """
        self._rank = rank
        self._peers = torch.tensor(addresses, device=self.shape.device)
        borrowed_in, borrowed_out = (
            (weights_UD.data_ptr() - view.records_SR.data_ptr()) // weights_UD.element_size()
            for view, weights_UD in zip(page, self._weights, strict=True)
        )
        self._borrowed = borrowed_in, borrowed_out, rank
        row_width = page.inputs.records_SR.shape[1]
        copies = *self._numbers, *self._weights, row_width, self.shape.dim
        owned = *self._owned[0], *self._owned[1], self.rows_borrowed
        places = self._peers, *self._places
        first = *copies, *owned, *places, rank, *self._most
        listed = sum(self._most)
        self._borrow = Kernel("shard.cu", "borrow_from_peers", self._macros, *first)
        self._mark_blocks, self._borrow_blocks = map(blocks_for, (listed, 4 * listed))

    def list_rows(self, page: Sequence[Batch]) -> list[int]:
        """List the unique rows of a page's batches; return the slot of each."""
        if not page:
            return []
        self._pages += 1
        marks_NTV = None
        if self.window.marks is not None:
            marks_NTV = self.window.marks[self._pages % 2].zero_()
        return [self._list(batch, marks_NTV) for batch in page]

    def mark_owned(self, marks_TV: Tensor) -> None:
        """Mark the rows of this rank that any rank has listed for the page."""
        # One block waits for the other ranks. More would leave no room for the steps that they wait
        # for before they plan.
        self._launch("meet_to_plan", 1, self._peers, self._rank, self._pages)
        page, rows = self._pages % 2, marks_TV.shape[1]
        sizes = page, self.shape.stride, rows
        self._launch("gather_marks", rows, self._peers, self._rank, *sizes, *marks_TV.unbind())

    def borrow(self, slot: int) -> Grads:
        """Read weights from the owners, once all ranks have stepped their rows.

        Also lists the rows of this rank that any rank's batch touches.

        Returns:
            Zero gradients of the rows of a batch.
        """
        self._meetings += 1
        self._borrow(self._borrow_blocks, slot, self._meetings)
        return self._with_sums(self._grads)

    def find_gradients(self, grads: Grads, fault: Tensor) -> Grads:
        """Return the rows of this rank, once all ranks have their gradients.

        `optimizer_step` reads those. Loss, pairs and fault become those of all ranks.
        """

        def bind() -> Kernel:
            first = self._peers, self._rank, fault
            return Kernel("shard.cu", "meet_to_step", self._macros, *first)

        self._meetings += 1
        self._bind("meet", (fault,), bind)(1, grads.loss, grads.pairs, self._meetings)
        return Grads(*self._owned, grads.loss, grads.pairs)

    def _list(self, batch: Batch, marks_NTV: Tensor | None) -> int:
        for rows, most in zip(max_batch_rows(batch), self._most, strict=True):
            assert min(rows, self.shape.rows) <= most, "a larger batch than planned"
        slot = self._listed % len(self._lists)
        self._listed += 1
        self._list_unique(batch, self._lists[slot], slot)
        self._mark_listed[slot](self._mark_blocks, marks_NTV)
        return slot

    def _borrowed_at(self) -> tuple[int, tuple[int, int, int]]:
        return self.shape.world_size, self._borrowed

    def _places_read(self) -> tuple[int, Sequence[Tensor | int | None]]:
        return self.shape.world_size, (self._peers, *self._places)
