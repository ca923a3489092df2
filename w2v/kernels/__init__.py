"""Arithmetic on rows: one protocol, three implementations.

reference.py   plain torch on any device: the specification that the others are tested against
cpu.py         numba loops on all CPU cores
cuda.py        CUDA kernels, compiled by CuPy
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from w2v.kernels.batch import (
    Batch,
    Draw,
    Grads,
    Inversion,
    OptimizerLike,
    Page,
    StepState,
    TableLike,
)


class Kernels(Protocol):
    """Operations of a training step, for tables of one shape on one device.

    rows_ahead: whether `unique_rows` waits for the device, so that it is called on the planning
        stream, while the steps before are computed.
    draw: draws windows and negatives in place of torch's generator (`reference.draw`), or None.
    inversion: maps a cumulative distribution to a faster `sampler.search`, or None.
    """

    rows_ahead: bool
    draw: Draw | None
    inversion: Inversion | None

    def mark(self, batch: Batch, marks_TV: Tensor) -> None:
        """Set the marks, bool [2, V], of the rows that the batch touches."""

    def unique_rows(self, batch: Batch) -> Grads:
        """Return the batch's unique rows in both tables, with zero gradients.

        Only rows of a pair count: a center without context words touches no row.
        """

    def skipgram(self, batch: Batch, page: Page, rows: Grads, lr: float) -> Grads:
        """Return loss and gradients of the batch, added to those of `rows`.

        `lr` is for kernels that make a step of plain SGD at each center (cpu.py).
        """

    def optimizer_step(
        self,
        optimizer: OptimizerLike,
        tables: Sequence[TableLike],
        page: Page,
        grads: Grads,
        lr: float,
        state: StepState,
    ) -> None:
        """Update rows in place; or note in `state` what is not finite."""

    def finish(self) -> None:
        """Free the buffers, when training is over."""


class ShardKernels(Kernels, Protocol):
    """Further operations, for `w2v.distributed.exchange.RankExchange`.

    Row v belongs to rank v % N as its row v // N. Its owner knows it by an id: that row, plus
    `stride` in the output table. Ids and gradients for a rank begin with `header_rows` rows, in
    which the next page's counts, and loss, pairs and fault of the step, travel along.

    Shapes: U rows that this rank's batch touches, M rows that all ranks request of this one,
    headers included; N ranks.
    """

    def list_requests(
        self, batch: Batch, send_N: Tensor, scratch_N: Tensor, before: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor]:
        """List the batch's rows by owner, as rows and as ids.

        `send_N`, int32 zeros as is `scratch_N`, becomes how many ids go to each rank. This is also
        written into the headers of `before`: the ids of the batch a page earlier, and their number
        for each rank. Returns rows, int64 with -1 for a header, and ids, int32.
        """

    def read_counts(
        self,
        ids_M: Tensor,
        recv_N: Tensor,
        next_send_N: Tensor,
        next_recv_N: Tensor,
        host_2N: Tensor,
    ) -> None:
        """Read from headers how many ids each rank sends a page later.

        `host_2N`, pinned, becomes `next_send_N` and `next_recv_N`, for the CPU.
        """

    def mark_requested(self, ids_M: Tensor, marks_TV: Tensor) -> None:
        """Set the marks, bool [2, rows of the shard], of the requested rows."""

    def lend(self, ids_M: Tensor, page: Page) -> tuple[Tensor, Grads]:
        """Return the requested weights [M, D], and zero gradients for them."""

    def borrow(self, rows_U: Tensor, weights_UD: Tensor, owned: Grads) -> tuple[Page, Grads]:
        """Return a page of the borrowed weights, and zero gradients for them."""

    def write_headers(self, borrowed: Grads, fault: Tensor, send_N: Tensor) -> None:
        """Write loss, pairs and fault into the headers of the gradients."""

    def collect(
        self,
        ids_M: Tensor,
        recv_N: Tensor,
        grad_MD: Tensor,
        pairs_M: Tensor | None,
        owned: Grads,
        fault: Tensor,
    ) -> None:
        """Add the received gradients; sum loss and pairs; join the faults."""
