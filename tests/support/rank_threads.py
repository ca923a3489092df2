"""Ranks that are threads of one process, on the CPU or on one GPU."""

import threading
from contextlib import nullcontext

import torch

from w2v.distributed.ranks import Ranks

TIMEOUT = 60  # seconds; another rank may have to compile kernels first


class Threads(Ranks):
    """Ranks that exchange data through the memory that they share."""

    def __init__(self, rank, size, groups):
        self.rank, self.size, self._groups = rank, size, groups

    def all_gather(self, fact, group="main"):
        facts, barrier = self._groups[group]
        facts[self.rank] = fact
        barrier.wait(TIMEOUT)
        gathered = list(facts)
        barrier.wait(TIMEOUT)  # before a rank overwrites its entry
        return gathered

    def all_gather_async(self, numbers):
        gathered = self.all_gather([float(number) for number in numbers])
        return lambda: gathered

    def all_to_all(self, rows_NX, sent, received, group="main"):
        assert len(sent) == len(received) == self.size
        parts = [given[self.rank] for given in self._exchange(rows_NX.split(list(sent)))]
        assert [len(part) for part in parts] == list(received)
        return self._after_all_have_read(torch.cat(parts))

    def all_reduce(self, numbers):
        return numbers.copy_(self._after_all_have_read(sum(self._exchange(numbers))))

    def _exchange(self, given):
        """Return what each rank gives, and order this rank's stream after it."""
        stream = torch.cuda.current_stream() if torch.cuda.is_available() else None
        event = stream and stream.record_event()
        given, events = zip(*self.all_gather((given, event)), strict=True)
        for event in filter(None, events):
            stream.wait_event(event)
        return given

    def _after_all_have_read(self, result):
        """Return the result when no rank reads its sources any more."""
        self._exchange(None)
        return result


def together(size, body, *arguments):
    """Return what `body(ranks, *arguments)` returns or raises, by rank."""
    groups = {name: ([None] * size, threading.Barrier(size)) for name in ("main", "background")}
    answers = [None] * size

    def run(rank):
        cuda = torch.cuda.is_available()
        try:
            with torch.cuda.stream(torch.cuda.Stream()) if cuda else nullcontext():
                answers[rank] = body(Threads(rank, size, groups), *arguments)
        except BaseException as error:
            answers[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return answers


def raised(answers):
    """Return the answers of `together`, all of which must be exceptions."""
    assert all(isinstance(answer, Exception) for answer in answers), answers
    return answers


def checked(answers):
    """Return the answers of `together`, or raise the first error among them."""
    errors = [answer for answer in answers if isinstance(answer, BaseException)]
    # A broken barrier is the consequence of another rank's error: raise the cause.
    for error in sorted(errors, key=lambda error: isinstance(error, threading.BrokenBarrierError)):
        raise error
    return answers
