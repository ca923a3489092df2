"""Ranks that are threads of one process and share its GPU, if it has one: they send as `Joined` ranks do, by giving each other tensors."""

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import torch

from w2v.ranks import Ranks

PATIENCE = 120  # seconds; kernels are compiled meanwhile


class Threads(Ranks):
    def __init__(self, rank, size, barrier, table):
        self.rank, self.size, self._barrier, self._table = rank, size, barrier, table

    def gather(self, fact):
        self._table[self.rank] = fact
        self._barrier.wait(PATIENCE)
        facts = list(self._table)
        self._barrier.wait(PATIENCE)
        return facts

    def send(self, rows_NX, sent, received, ahead=False):
        assert len(sent) == len(received) == self.size and sum(sent) == len(rows_NX)
        parts = [parts[self.rank] for parts in self._exchange(rows_NX, list(rows_NX.split(list(sent))))]
        assert [len(part) for part in parts] == list(received)
        came = torch.cat(parts)
        self._exchange(came, None)  # until all have what this one gave, which may be overwritten then
        return came

    def add(self, numbers):
        total = torch.stack(self._exchange(numbers, numbers)).sum(0)
        self._exchange(total, None)
        return numbers.copy_(total)

    def _exchange(self, tensor, fact):
        """What each rank gives, once its stream has come so far."""
        stream = torch.cuda.current_stream() if tensor.is_cuda else None
        facts, events = zip(*self.gather((fact, stream and stream.record_event())), strict=True)
        for event in events:
            if event:
                stream.wait_event(event)
        return list(facts)


def run(size, function, *arguments):
    """What `function(ranks, *arguments)` gives in each of so many threads, each with a stream of its own."""
    barrier, table = threading.Barrier(size), [None] * size

    def one(rank):
        try:
            with torch.cuda.stream(torch.cuda.Stream()) if torch.cuda.is_available() else nullcontext():
                return function(Threads(rank, size, barrier, table), *arguments)
        except BaseException:
            barrier.abort()  # the others need not wait
            raise

    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(one, rank) for rank in range(size)]
    failures = [error for future in futures if (error := future.exception())]
    broken = [error for error in failures if not isinstance(error, threading.BrokenBarrierError)]
    if failures:
        raise (broken or failures)[0]
    return [future.result() for future in futures]
