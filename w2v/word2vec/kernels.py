"""Arithmetic of a training step: one protocol, three implementations."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from w2v.rows.ops import View
from w2v.word2vec.batch import Batch, Counts, Draw, Grads, IdsByRank, StepState, Subsample, Update


class Kernels(Protocol):
    """Operations of a training step on one device.

    plans_rows: whether `unique_rows` waits for the device, so that it is called when a page is
        planned, on a stream of its own, while the steps before are computed.
    draw: draws windows and negatives (`reference.draw`).
    subsample: draws which words of a text are kept (`reference.subsample`).
    """

    plans_rows: bool

    @property
    def draw(self) -> Draw: ...

    @property
    def subsample(self) -> Subsample: ...

    def mark(self, batch: Batch, marks_A: Tensor) -> None:
        """Set the marks, bool [A], of the rows that the batch touches."""

    def unique_rows(self, batch: Batch) -> Grads:
        """Return the batch's unique rows, with zero gradients.

        Only rows of a pair count: a center without context words touches no row.
        """

    def gradients(self, batch: Batch, view: View, grads: Grads, lr: float) -> Grads:
        """Return loss and gradients of the batch, added to `grads`.

        `lr` is for kernels that make a step of plain SGD at each center (cpu.py).
        """

    def optimizer_step(self, update: Update, view: View, grads: Grads, state: StepState) -> None:
        """Update rows in place; or note in `state` what is not finite."""


class ShardKernels(Kernels, Protocol):
    """Further operations, for `w2v.word2vec.exchange.RankExchange`.

    Both rows of word v belong to rank v % N, whose rows 2 (v // N) and 2 (v // N) + 1 they are:
    its ids of them. Ids and gradients for a rank begin with `header_rows` rows, in which the next
    page's counts, and loss, pairs and fault of the step, travel along.

    Shapes: U rows that this rank's batch touches, M rows that all ranks request of this one,
    headers included; N ranks.
    """

    def list_requests(
        self, batch: Batch, send_N: Tensor, scratch_N: Tensor, before: IdsByRank
    ) -> tuple[Tensor, Tensor]:
        """List the batch's rows by owner, as rows and as ids.

        `send_N`, int32 zeros as is `scratch_N`, becomes how many ids go to each rank. This is also
        written into the headers of `before`, the ids of the batch a page earlier. Returns rows,
        int64 with -1 for a header, and ids, int32.
        """

    def read_counts(self, received: IdsByRank, following: Counts, host_2N: Tensor) -> None:
        """Read from headers how many ids each rank sends a page later.

        Sets `following.recv_N`, and copies both counts to `host_2N`, pinned, for the CPU.
        """

    def mark_requested(self, ids_M: Tensor, marks_A: Tensor) -> None:
        """Set the marks, bool [rows of the shard], of the requested rows."""

    def own(self, ids_M: Tensor) -> Grads:
        """Return the unique requested rows, with zero gradients."""

    def gather_weights(self, ids_M: Tensor, view: View) -> Tensor:
        """Return the requested weights [M, D]; those of headers are not set."""

    def borrow(self, rows_U: Tensor, weights_UD: Tensor, owned: Grads) -> tuple[Grads, View]:
        """Return zero gradients of the borrowed rows, and where their weights are."""

    def write_headers(self, borrowed: Grads, fault: Tensor, send_N: Tensor) -> None:
        """Write loss, pairs and fault into the headers of the gradients."""

    def collect(
        self, received: IdsByRank, grads: tuple[Tensor, Tensor | None], owned: Grads, fault: Tensor
    ) -> None:
        """Add the received gradients; sum loss and pairs; join the faults.

        `grads`: gradients [M, D], and how many pairs each sums, where they are counted.
        """
