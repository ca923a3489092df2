"""Ranks in lockstep: equally many steps, and the same step to stop at.

Votes to save or stop are exchanged several batches ahead, so no step waits for the network.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from itertools import islice
from typing import NamedTuple

from w2v.distributed.ranks import Ranks
from w2v.word2vec.batch import Batch

BATCHES_PER_VOTE = 8  # a vote takes the CPU 60 us
VOTES_AHEAD = 2  # votes in flight


class Decision(NamedTuple):
    """What all ranks do after a step, or what one of them votes for."""

    status: int  # exit status to stop with; 0 to go on
    save: int  # number of the checkpoint to save, counted from 1 in this run; 0 for none


class Lockstep:
    """Keeps ranks at the same step.

    `vote` is called when a group of batches is drawn, or by one process after each step. The
    decision holds for every step of that group: the highest status of all ranks, and rank 0's vote
    to save.
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
        in_flight: deque[tuple[list[Batch], Callable[[], list[list[float]]]]] = deque()
        steps = BATCHES_PER_VOTE
        while steps == BATCHES_PER_VOTE:  # with fewer, the text of all ranks has ended
            while len(in_flight) < VOTES_AHEAD:
                group = list(islice(drawn, BATCHES_PER_VOTE))
                epochs = [batch.epochs_done for batch in group]
                epochs += [end.epochs_done] * (BATCHES_PER_VOTE - len(group))
                votes = self._ranks.all_gather_async([len(group), *self._vote(), *epochs])
                in_flight.append((group, votes))
            group, votes = in_flight.popleft()
            counts, status, save, *epochs_by_step = zip(*votes(), strict=True)
            steps = int(max(counts))
            decision = Decision(int(max(status)), int(save[0]))
            # The text of this rank may end before that of others.
            group += [end] * (steps - len(group))
            for batch, epochs_of_ranks in zip(group, epochs_by_step, strict=False):
                self._decisions.append(decision)
                yield batch._replace(epochs_done=sum(epochs_of_ranks) / len(epochs_of_ranks))
        for _, votes in in_flight:  # every collective call must be completed
            votes()

    def decision(self) -> Decision:
        """Return what to do after a step. Call it once after each, in order."""
        return self._decisions.popleft() if self._decisions else self._vote()
