"""CUDA kernels for rows that belong to several ranks (cu/shard.cu).

`w2v.kernels.ShardKernels` describes each operation, and `reference.ReferenceKernels` specifies it.
"""

from __future__ import annotations

from collections.abc import Sequence
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
    zeros_ahead,
)
from w2v.kernels.cuda import ELEMENTS, SUMS, CudaKernels, find_unique_rows, most_rows, with_room
from w2v.kernels.launch import blocks_for, launch

ROOM = 1 << 15  # rows by which buffers for requested rows grow


class Window(NamedTuple):
    """Memory of a rank that the others read."""

    grad_UD: Tensor  # float32, of the rows that this rank has borrowed
    pairs_U: Tensor | None  # int32, how many pairs each sums, where they are counted
    starts_N: Tensor  # int32, where the rows of each owner begin
    flags_N: Tensor  # int32, how often each rank has waited for all; written by that rank


class Peers(NamedTuple):
    """What the ranks of a host read of each other."""

    addresses_NF: Tensor  # int64, struct Peer of unique.cuh by rank
    rank: int  # this one
    window: Window  # of this rank
    row_width: int  # elements of a record


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
        self._peers: Peers | None = None
        self._lent: Page | None = None  # weights that peers have lent, in memory of all steps,
        self._lent_grads: tuple[TableGrads, TableGrads] | None = None  # and their gradients
        self._places: tuple[Tensor, Tensor] | None = None  # PLACES of unique.cuh
        self._macros: dict[str, int | str] = {
            "RANKS": shape.world_size,
            "HEADER_ROWS": shape.header_rows,
            "ELEMENT": ELEMENTS[shape.dtype],
            "WIDE": 1 if shape.dim % 4 else 4,
        }

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

    def own(self, ids_M: Tensor) -> Grads:
        owned = self._unlisted(ids_M)
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
        page, (inputs, outputs) = self._borrowed(weights_UD, grad_UD, pairs_U)
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

    def make_window(self, rows: int) -> Window:
        """Return a window for at most so many borrowed rows, headers included."""
        shape, device = self.shape, self.shape.device
        grad_UD = torch.empty(rows, shape.dim, device=device)
        pairs_U = None
        if shape.count_pairs:
            pairs_U = torch.empty(rows, dtype=torch.int32, device=device)
        starts_N, flags_N = torch.zeros(2, shape.world_size, dtype=torch.int32, device=device)
        return Window(grad_UD, pairs_U, starts_N, flags_N)

    def join_peers(self, peers: Peers) -> None:
        """Read weights and gradients from peers from now on."""
        self._peers = peers
        weights_UD = peers.window.grad_UD.to(self.shape.dtype, copy=True)
        self._lent, self._lent_grads = self._borrowed(weights_UD, *peers.window[:2])

    def borrow_from_peers(
        self, rows_U: Tensor, send_N: Tensor, ids_M: Tensor, turn: int
    ) -> tuple[Grads, Page, Grads]:
        """Do as `own` and `borrow`, once all ranks have stepped their rows.

        Args:
            rows_U: Rows of this rank's batch by owner, as `list_requests` lists them.
            send_N: How many of them each rank owns.
            ids_M: Rows that all ranks request of this one.
            turn: How often ranks have waited for each other, this time included.

        Returns:
            Zero gradients in the window, a page of weights, and the owned rows, whose gradients
            are not in one place.
        """
        peers, owned, count = self._peers, self._unlisted(ids_M), rows_U.shape[0]
        borrowed = rows_U, count, send_N, self.shape.rows, peers.row_width, self.shape.dim
        args = *owned.inputs, *owned.outputs, *peers[:2], turn, *borrowed
        threads = max(32 * count, len(ids_M))
        lent = self._number_TV, self._lent.inputs.records_SR
        self._launch("borrow_from_peers", threads, *self._requests(ids_M), *args, *lent)
        inputs, outputs = self._lent_grads
        return Grads(inputs, outputs, owned.loss, owned.pairs), self._lent, owned

    def find_gradients(
        self, received: Requests, send_N: Tensor, owned: Grads, fault: Tensor, turn: int
    ) -> None:
        """Find the gradients of owned rows, once all ranks have theirs.

        Loss, pairs and fault become those of all ranks.

        Args:
            received: The rows that all ranks request of this one.
            send_N: How many of this rank's gradients are for each.
            owned: From `borrow_from_peers`.
            fault: Of this rank.
            turn: As in `borrow_from_peers`.
        """
        (ids_M, recv_N), (rank, room) = received, (self._peers.rank, self._room)
        numbers = owned.inputs.number_V, owned.outputs.number_V
        places = self._peers.addresses_NF, *self._places, room
        sums = self.shape.dim, owned.loss, owned.pairs, fault
        args = recv_N, *numbers, *places, rank, turn, send_N, *sums
        self._launch("find_gradients", len(ids_M), *self._requests(ids_M), *args)

    def finish(self) -> None:
        super().finish()
        self._listed = self._owned = self._places = self._lent = None

    def _unlisted(self, ids_M: Tensor) -> Grads:
        """Return buffers for the unique rows of `ids_M`, with zero gradients."""
        room = -(-ids_M.shape[0] // ROOM) * ROOM
        dim, before = 0 if self._peers else None, self._owned
        self._owned = with_room(before, (room, room), self.shape.stride, self.shape, dim)
        if self._peers and self._owned is not before:
            size, device = self.shape.world_size * self._room, self.shape.device
            places = [torch.full((size,), -1, dtype=torch.int32, device=device) for _ in "io"]
            self._places = places[0], places[1]
        loss, pairs, *counts = next(self._sums)
        inputs, outputs = (
            its._replace(row_count=count) for its, count in zip(self._owned, counts, strict=True)
        )
        return Grads(inputs, outputs, loss, pairs)

    @property
    def _room(self) -> int:
        """The most unique rows of a table that the buffers hold."""
        return self._owned[0].rows_U.shape[0]

    def _borrowed(
        self, weights_UD: Tensor, grad_UD: Tensor, pairs_U: Tensor | None
    ) -> tuple[Page, tuple[TableGrads, TableGrads]]:
        """Return borrowed rows, numbered by `index_borrowed`, and their gradients."""
        numbers = self._number_TV.unbind()
        page = Page(*(View(weights_UD, number_V) for number_V in numbers))
        inputs, outputs = (TableGrads(n_V, None, grad_UD, pairs_U, None) for n_V in numbers)
        return page, (inputs, outputs)

    def _sources(self) -> tuple[int, Sequence[Tensor | int | None]]:
        if not self._peers:
            return super()._sources()
        return self.shape.world_size, (self._peers.addresses_NF, *self._places, self._room)

    def _requests(self, ids_M: Tensor) -> tuple[Tensor, int, int]:
        """Return the parameters REQUESTS of shard.cu."""
        return ids_M, ids_M.shape[0], self.shape.stride

    def _launch(self, kernel: str, threads: int, *args: Tensor | float | None) -> None:
        launch("shard.cu", kernel, self._macros, blocks_for(threads), *args)
