"""Ranks in lockstep: equally many steps, and the same step to stop at.

What ranks vote for is exchanged several batches ahead, so that no step waits for the network.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from itertools import islice
from typing import NamedTuple

from w2v.distributed.ranks import Ranks
from w2v.kernels.batch import Batch

TOGETHER = 8  # batches that are voted on at once: each vote takes the CPU 60 us
VOTES_AHEAD = 2  # votes that are under way at once


class Decision(NamedTuple):
    """What all ranks do after a step, or what one of them votes for."""

    status: int  # exit status to stop with; 0 to go on
    save: int  # number of the checkpoint to save, counted from 1 in this run; 0 for none


class Lockstep:
    """Keeps ranks at the same step.

    `vote` is called when batches are drawn. The highest status of all ranks, and rank 0's vote to
    save, decide, as soon as the first of these batches is trained on.
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
        voting: deque[tuple[list[Batch], Callable[[], list[list[float]]]]] = deque()
        steps = float("inf")
        while steps >= TOGETHER:
            while len(voting) < VOTES_AHEAD:
                group = list(islice(drawn, TOGETHER))
                done = [batch.epochs_done for batch in group]
                done += [end.epochs_done] * (TOGETHER - len(group))
                votes = self._ranks.all_gather_async(len(group), *self._vote(), *done)
                voting.append((group, votes))
            group, votes = voting.popleft()
            counts, status, save, *done_of_steps = zip(*votes(), strict=True)
            steps = max(counts)
            decision = Decision(int(max(status)), int(save[0]))
            # A rank's text may end within the group.
            group += [end] * (int(steps) - len(group))
            for batch, done_of_ranks in zip(group, done_of_steps, strict=False):
                self._decisions.append(decision)
                yield batch._replace(epochs_done=sum(done_of_ranks) / len(done_of_ranks))
        for _, votes in voting:  # every collective call must be completed
            votes()

    def decision(self) -> Decision:
        """Return what to do after a step. Call it once after each, in order."""
        return self._decisions.popleft() if self._decisions else self._vote()
