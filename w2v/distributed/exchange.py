"""The fused steps of several GPUs together, each with the rows of its own shard of the tables.

As in transfer/sharded.py, owners lend the weights of rows and sum the gradients that come back; one exchange serves both tables. What a
rank has to report of a step comes with the gradients. Who is asked for which rows is found on the planning stream two pages ahead: the
ids of a page's rows bring the numbers of the next one's, so that these have long been there when the CPU must know them, and no step is
waited for.

Shapes: U rows of both tables that a batch of this rank touches, and M that all ranks ask of this one, both with the heads of
kernels/shard.cu; N ranks, K batches of a page.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from itertools import islice
from typing import NamedTuple

import torch
from torch import Tensor

from w2v.kernels import cuda
from w2v.kernels import cuda_shard as shard
from w2v.kernels.batch import Batch, Held
from w2v.kernels.cuda import SUMMED
from w2v.training.step import Both, FusedPipeline, StepResult, most_rows, with_room
from w2v.transfer import streams

ROOM = 1 << 15  # rows by which the claims grow


class Numbers(NamedTuple):
    """How many ids of a batch this rank asks of each rank, and each of it: int32 on the GPU."""

    asked_N: Tensor
    lent_N: Tensor  # known once the ids of the page before have come


class Dealt(NamedTuple):
    """The batches of a page, and the rows of each, owner by owner."""

    batches: list[Batch]
    lists: list[tuple[Tensor, Tensor]]  # rows_U and ids_U of `shard.deal`, with room behind them
    numbers: list[Numbers]


class Asked(NamedTuple):
    """A page whose numbers are on their way to the CPU."""

    page: Dealt
    numbers_K: Sequence[
        Tensor
    ]  # for each batch, how many ids this rank asks of each, and each of it: [2, N]
    known: torch.cuda.Event | None  # when they are there; at once without a GPU


class Route(NamedTuple):
    """The way of a batch's rows: those it touches, owner by owner, and the ids of those that this rank lends, rank by rank."""

    rows_U: Tensor
    asked: list[int]  # how many rows, of each rank
    ids_M: Tensor
    lent: list[int]  # how many ids, by each rank
    numbers: Numbers


class Routed(NamedTuple):
    """A batch whose owners of rows know what they have to lend."""

    batch: Batch
    route: Route


class ShardedPipeline(FusedPipeline):
    """The steps of `FusedPipeline`, made by all `ranks` at once: they must make equally many, with batches that may be empty.

    Tables and engine are those of this rank's shards, of which the engine knows nothing else; `rows` are those of a whole table.
    """

    _asking: Both | None = None
    _asked: Asked  # the next page
    _dealt: Dealt  # the page after it

    @cached_property
    def _heads(self) -> int:
        return shard.heads(self.inputs.dim)

    @cached_property
    def _counters(self) -> Iterator[tuple[tuple[Tensor, Tensor], Numbers]]:
        """Zeros to count the rows of one batch after another, of each table and of each rank; made for many at a time, as `cuda.Sums`."""
        while True:
            claimed = torch.zeros(2, SUMMED, dtype=torch.int64, device=self._device)
            numbers = torch.zeros(
                2, SUMMED, self._ranks.size, dtype=torch.int32, device=self._device
            )
            inputs, outputs, asked, lent = (column.unbind() for column in (*claimed, *numbers))
            yield from zip(
                zip(inputs, outputs, strict=True), map(Numbers, asked, lent), strict=True
            )

    @cached_property
    def _told_K(self) -> Sequence[Tensor]:
        """What the CPU is told of a page's numbers, and reads before it is told those of the next one."""
        shape = self._steps_per_page, 2, self._ranks.size
        return torch.empty(shape, dtype=torch.int32, pin_memory=self._planning is not None).unbind()

    @cached_property
    def _stride(self) -> int:
        return -(-self._rows // self._ranks.size)  # the rows of the longest shard

    @cached_property
    def _place_TV(self) -> Tensor:
        """Where each row of the batch at hand is among the weights that were lent for it."""
        return torch.empty(2, self._rows, dtype=torch.int32, device=self._device)

    def ahead(self, batches: Iterable[Batch]) -> Iterator[Routed]:
        batches = iter(batches)
        with streams.on(self._planning):
            self._ask_for_nothing()
            self._deal(batches)
            self._draw(batches)
            self._deal(batches)
        yield from super().ahead(batches)

    def step(self, planned: Routed, lr: float) -> StepResult:
        batch, (rows_U, asked, ids_M, lent, (asked_N, lent_N)) = planned
        held, dim, capped = self._hold(), self.inputs.dim, self.optimizer.occurrence_cap > 0
        most = -(-ids_M.shape[0] // ROOM) * ROOM
        claims = self._work = with_room(
            self._work, (most, most), self.inputs.rows, dim, self._device
        )
        sums = next(self._sums)

        weights_UD = self._ranks.all_to_all(
            shard.lend(ids_M, self._stride, held, dim, claims, sums.claimed), lent, asked
        )
        grad_UD, pairs_U = shard.place(rows_U, self._place_TV, dim, counted=capped)
        (weights_in, grads_in), (weights_out, grads_out) = (
            (Held(weights_UD, place_V), shard.Gradients(place_V, grad_UD, pairs_U))
            for place_V in self._place_TV
        )
        cuda.skipgram(batch, weights_in, grads_in, weights_out, grads_out, sums, counted=capped)

        shard.report(sums, self.fault, asked_N, grad_UD)
        grad_MD = self._ranks.all_to_all(grad_UD, asked, lent)
        pairs_M = self._ranks.all_to_all(pairs_U, asked, lent) if pairs_U is not None else None
        shard.collect(ids_M, self._stride, lent_N, grad_MD, pairs_M, claims, sums, self.fault)
        self._step_rows(held, claims, sums.claimed, sums.loss, lr)
        return StepResult(sums.loss, sums.pairs)

    def _plan(self, batches: Iterator[Batch]) -> list[Routed]:
        page = super()._plan(batches)
        with streams.on(self._planning):
            self._deal(batches)
        return page

    def _ask_for_nothing(self) -> None:
        """Begin with a page without rows, whose ids bring the numbers of the first one."""
        heads_2N = torch.full((2, self._ranks.size), self._heads, dtype=torch.int32)
        none_U, steps = (
            torch.full((self._ranks.size * self._heads,), -1, device=self._device),
            range(self._steps_per_page),
        )
        page = Dealt(
            [],
            [(none_U, none_U.int()) for _ in steps],
            [Numbers(*heads_2N.to(self._device)) for _ in steps],
        )
        self._asked = Asked(page, [heads_2N for _ in steps], None)

    def _deal(self, batches: Iterator[Batch]) -> None:
        """Draw the page after the one that is asked for, and list its rows owner by owner."""
        (_, lists_before, numbers_before), _, _ = self._asked
        drawn, lists, numbers = list(islice(batches, self._steps_per_page)), [], []
        for batch, (_, ids_before), before in zip(
            drawn, lists_before, numbers_before, strict=False
        ):  # the last page may be shorter
            claims = self._asking = with_room(
                self._asking, most_rows(batch), self._rows, 0, self._device
            )
            claimed, tally = next(self._counters)
            cuda.claim(batch, *claims, claimed)
            lists.append(
                shard.deal(
                    claims, claimed, self._stride, self._heads, tally, (ids_before, before.asked_N)
                )
            )
            numbers.append(tally)
        self._dealt = Dealt(drawn, lists, numbers)

    def _draw(self, batches: Iterator[Batch]) -> list[Routed]:
        """The page that was asked for; its ids, which go to the owners of its rows, bring the numbers of the page after it."""
        (drawn, lists, numbers), told_K, known = self._asked
        if not lists:
            return []
        if known:
            known.synchronize()
        asked_KN, lent_KN = zip(
            *(told_2N.tolist() for told_2N in told_K[: len(lists)]), strict=True
        )
        came = self._send(
            [ids_U[: sum(asked)] for (_, ids_U), asked in zip(lists, asked_KN, strict=True)],
            asked_KN,
            lent_KN,
        )
        routes = [
            Route(rows_U[: sum(asked)], asked, ids_M, lent, its)
            for (rows_U, _), asked, ids_M, lent, its in zip(
                lists, asked_KN, came, lent_KN, numbers, strict=True
            )
        ]
        for route, its_next, told_2N in zip(
            routes, self._dealt.numbers, self._told_K, strict=False
        ):
            shard.hear(route.ids_M, route.numbers.lent_N, *its_next, told_2N)
        self._asked = Asked(
            self._dealt, self._told_K, self._planning.record_event() if self._planning else None
        )
        return [
            Routed(*planned) for planned in zip(drawn, routes, strict=False)
        ]  # none of the page without rows

    def _send(
        self, ids_KU: list[Tensor], asked_KN: Sequence[list[int]], lent_KN: Sequence[list[int]]
    ) -> Sequence[Tensor]:
        """The ids that come for each batch of a page, when those of all batches go to the owners at once, rank by rank."""
        if len(ids_KU) == 1:
            return [self._ranks.all_to_all(*ids_KU, *asked_KN, *lent_KN, ahead=True)]
        dealt_KN = [ids_U.split(asked) for ids_U, asked in zip(ids_KU, asked_KN, strict=True)]
        asked_NK, lent_NK = (
            list(zip(*numbers_KN, strict=True)) for numbers_KN in (asked_KN, lent_KN)
        )
        sent = torch.cat([ids_u for dealt_K in zip(*dealt_KN, strict=True) for ids_u in dealt_K])
        came = self._ranks.all_to_all(
            sent, list(map(sum, asked_NK)), list(map(sum, lent_NK)), ahead=True
        )
        parts, steps = came.split([number for lent_K in lent_NK for number in lent_K]), len(ids_KU)
        in_batches = torch.cat([ids_m for step in range(steps) for ids_m in parts[step::steps]])
        return in_batches.split(list(map(sum, lent_KN)))

    def _marks(self, page: list[Routed]) -> Tensor:
        marks_TV = torch.zeros(2, self.inputs.rows, dtype=torch.bool, device=self._device)
        for _, route in page:
            shard.mark_lent(route.ids_M, self._stride, marks_TV)
        return marks_TV
