"""Ranks that are threads of one process, and of its GPU where they have one; for tests of what they tell each other and leave; quick, and
of any number."""

import threading
from contextlib import nullcontext

import torch

from w2v.distributed.ranks import Ranks

PATIENCE = 60  # seconds; kernels may have to be compiled meanwhile


class Threads(Ranks):
    """Ranks that are threads of this process: what is told here is what processes would tell each other."""

    def __init__(self, rank, size, common):
        self.rank, self.size, self._common = rank, size, common

    def all_gather(self, fact, behind=False):
        facts, barrier = self._common[behind]
        facts[self.rank] = fact
        barrier.wait(PATIENCE)
        told = list(facts)
        barrier.wait(PATIENCE)
        return told

    def all_to_all(self, rows_NX, sent, received, ahead=False):
        assert len(sent) == len(received) == self.size
        parts = [given[self.rank] for given in self._exchange(rows_NX.split(list(sent)))]
        assert [len(part) for part in parts] == list(received)
        return self._kept_until_read(torch.cat(parts))

    def all_reduce(self, numbers):
        return numbers.copy_(self._kept_until_read(sum(self._exchange(numbers))))

    def _exchange(self, given):
        """What each rank gives, once the work that makes it is done before what comes next on this rank's stream."""
        stream = torch.cuda.current_stream() if torch.cuda.is_available() else None
        given, events = zip(
            *self.all_gather((given, stream and stream.record_event())), strict=True
        )
        for event in filter(None, events):
            stream.wait_event(event)
        return given

    def _kept_until_read(self, result):
        """What was given stays as it is until all ranks have read it."""
        self._exchange(None)
        return result

    def leads(self, folder):
        return self.all_gather(folder).index(folder) == self.rank


def together(size, body, *arguments):
    """What `body(ranks, *arguments)` gives in each of so many ranks."""
    common = [([None] * size, threading.Barrier(size)) for _ in range(2)]
    answers = [None] * size

    def run(rank):
        try:
            with (
                torch.cuda.stream(torch.cuda.Stream())
                if torch.cuda.is_available()
                else nullcontext()
            ):
                answers[rank] = body(Threads(rank, size, common), *arguments)
        except BaseException as error:
            answers[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return answers


def raised(answers):
    assert all(isinstance(answer, Exception) for answer in answers), answers
    return answers


def checked(answers):
    errors = [answer for answer in answers if isinstance(answer, BaseException)]
    for error in sorted(errors, key=lambda error: isinstance(error, threading.BrokenBarrierError)):
        raise error  # of a rank that others have waited for, rather than theirs
    return answers
