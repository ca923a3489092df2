"""Ranks in lockstep: equally many steps, and the same step to stop at.

What ranks vote for is exchanged several batches ahead, so that no step waits for the network.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import NamedTuple

from w2v.distributed.ranks import Ranks
from w2v.kernels.batch import Batch

VOTES_AHEAD = 8  # batches whose votes are under way at once


class Decision(NamedTuple):
    """What all ranks do after a step."""

    status: int  # exit status to stop with; 0 to go on
    save: int  # number of the checkpoint to save, counted from 1 in this run; 0 for none


class Lockstep:
    """Keeps ranks at the same step.

    `vote` returns this rank's wish when a batch is drawn. The highest status of all ranks, and rank
    0's wish to save, decide.
    """

    def __init__(self, ranks: Ranks, vote: Callable[[], Decision]):
        self._ranks = ranks
        self._vote = vote
        self._decisions: deque[Decision] = deque()

    def batches(self, drawn: Iterator[Batch], end: Batch) -> Iterator[Batch]:
        """Yield this rank's batches, then `end` while others have some."""
        if self._ranks.size == 1:
            yield from drawn
            return
        voting: deque[tuple[Batch | None, Callable[[], list[list[float]]]]] = deque()
        while True:
            while len(voting) < VOTES_AHEAD:
                batch = next(drawn, None)
                done = (batch or end).epochs_done
                votes = self._ranks.all_gather_async(batch is not None, done, *self._vote())
                voting.append((batch, votes))
            batch, votes = voting.popleft()
            has_batch, done_of_ranks, status, save = zip(*votes(), strict=True)
            if not any(has_batch):
                break
            self._decisions.append(Decision(int(max(status)), int(save[0])))
            yield (batch or end)._replace(epochs_done=sum(done_of_ranks) / len(done_of_ranks))
        for _, votes in voting:  # every collective call must be completed
            votes()

    def decision(self) -> Decision:
        """Return what is decided after the step of the next batch given."""
        return self._decisions.popleft() if self._decisions else self._vote()
