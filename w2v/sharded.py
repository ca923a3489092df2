"""The fused steps of several GPUs together, each with the rows of its own shard of the tables.

As in transfer/sharded.py, owners lend the weights of rows and sum the gradients that come back; one exchange serves both tables. Who is
asked for which rows is found on the planning stream two pages ahead, so that the numbers of rows have long been there when the CPU must
know them, and no step is waited for.

Shapes: U rows of both tables that a batch of this rank touches, M rows that all ranks ask of this one, N ranks, K batches of a page.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cached_property
from itertools import islice
from typing import NamedTuple

import torch
from torch import Tensor

from w2v.batch import Batch, Held
from w2v.kernels import cuda, shard
from w2v.pipeline import FAULTS, Both, FusedPipeline, StepResult, most_rows, with_room
from w2v.transfer import streams

ROOM = 1 << 15  # rows by which the claims grow

class Asked(NamedTuple):
    """The batches of a page, and how many rows of each this rank asks of each rank, and each of it, on their way to the CPU."""

    batches: list[Batch]
    lists: list[tuple[Tensor, Tensor]]  # rows_U and ids_U of `shard.deal`, with room behind them
    numbers_2NK: Tensor
    known: torch.cuda.Event | None  # when they are there; at once without a GPU


class Route(NamedTuple):
    """A batch and the way of its rows: those it touches, owner by owner, and the ids of those that this rank lends, rank by rank."""

    batch: Batch
    rows_U: Tensor
    asked: list[int]  # how many rows, of each rank
    ids_M: Tensor
    lent: list[int]  # how many ids, by each rank


class ShardedPipeline(FusedPipeline):
    """The steps of `FusedPipeline`, made by all `ranks` at once: they must make equally many, with batches that may be empty.

    Tables and engine are those of this rank's shards, of which the engine knows nothing else; `rows` are those of a whole table.
    """

    _asking: Both | None = None
    _asked: Asked | None = None

    @cached_property
    def _stride(self) -> int:
        return -(-self._rows // self._ranks.size)  # the rows of the longest shard

    @cached_property
    def _place_TV(self) -> Tensor:
        """Where each row of the batch at hand is among the weights that were lent for it."""
        return torch.empty(2, self._rows, dtype=torch.int32, device=self._device)

    def ahead(self, batches: Iterable[Batch]) -> Iterator[Route]:
        batches = iter(batches)
        self._ask(batches)
        yield from super().ahead(batches)

    def step(self, planned: Route, lr: float) -> StepResult:
        batch, rows_U, asked, ids_M, lent = planned
        held, capped = self._hold(), self.optimizer.occurrence_cap > 0
        most = -(-ids_M.shape[0] // ROOM) * ROOM
        claims = self._work = with_room(self._work, (most, most), self.inputs.rows, self.inputs.dim, self._device)
        sums = next(self._sums)
        shard.claim_lent(ids_M, self._stride, claims, sums.claimed)

        weights_UD = self._ranks.send(shard.lend(ids_M, self._stride, held, self.inputs.dim), lent, asked)
        shard.place(rows_U, self._place_TV)
        grad_UD = torch.zeros(weights_UD.shape, device=self._device)
        pairs_U = torch.zeros(grad_UD.shape[0], dtype=torch.int32, device=self._device) if capped else None
        (weights_in, grads_in), (weights_out, grads_out) = (
            (Held(weights_UD, place_V), shard.Gradients(place_V, grad_UD, pairs_U)) for place_V in self._place_TV
        )
        cuda.skipgram(batch, weights_in, grads_in, weights_out, grads_out, sums, counted=capped)

        grad_MD = self._ranks.send(grad_UD, asked, lent)
        pairs_M = self._ranks.send(pairs_U, asked, lent) if capped else None
        shard.collect(ids_M, self._stride, grad_MD, pairs_M, claims)
        reported = self._ranks.add(shard.report(sums.loss, sums.pairs, self.fault, len(FAULTS)))
        shard.heed(reported, self.steps << len(FAULTS), self.fault)
        self._step_rows(held, claims, sums.claimed, reported[0], lr)
        return StepResult(reported[0], reported[1])

    def _plan(self, batches: Iterator[Batch]) -> list[Route]:
        page = super()._plan(batches)
        self._ask(batches)
        return page

    def _ask(self, batches: Iterator[Batch]) -> None:
        """Draw a page's batches and find out who is asked for how many rows."""
        with streams.on(self._planning):
            drawn, size, lists = list(islice(batches, self._steps_per_page)), self._ranks.size, []
            if not drawn:
                self._asked = None
                return
            counters = torch.zeros(len(drawn), 2 + size, dtype=torch.int64, device=self._device)
            for batch, counter in zip(drawn, counters, strict=True):
                claims = self._asking = with_room(self._asking, most_rows(batch), self._rows, 0, self._device)
                claimed, tally_2N = counter[:2].unbind(), counter[2:].view(torch.int32).view(2, size)
                cuda.claim(batch, *claims, claimed)
                lists.append(shard.deal(claims, claimed, self._stride, tally_2N))
            asked_NK = counters[:, 2:].view(torch.int32)[:, :size].T.contiguous()
            lent_NK = self._ranks.send(asked_NK, [1] * size, [1] * size, ahead=True)
            numbers_2NK = torch.stack([asked_NK, lent_NK]).to("cpu", non_blocking=True)
            self._asked = Asked(drawn, lists, numbers_2NK, self._planning.record_event() if self._planning else None)

    def _draw(self, batches: Iterator[Batch]) -> list[Route]:
        """The page that was asked for while the one before it was planned."""
        if self._asked is None:
            return []
        drawn, lists, numbers_2NK, known = self._asked
        if known:
            known.synchronize()
        page = []
        for batch, (rows_U, ids_U), (asked, lent) in zip(drawn, lists, numbers_2NK.permute(2, 0, 1).tolist(), strict=True):
            total = sum(asked)
            page.append(Route(batch, rows_U[:total], asked, self._ranks.send(ids_U[:total], asked, lent, ahead=True), lent))
        return page

    def _marks(self, page: list[Route]) -> Tensor:
        marks_TV = torch.zeros(2, self.inputs.rows, dtype=torch.bool, device=self._device)
        for route in page:
            shard.mark_lent(route.ids_M, self._stride, marks_TV)
        return marks_TV
