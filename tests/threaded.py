"""Ranks that are threads of one process, for tests of what they tell each other and leave; quick, and of any number."""

import threading

import torch

from w2v.ranks import Ranks


class Threads(Ranks):
    """Ranks that are threads of this process: what is told here is what processes would tell each other."""

    def __init__(self, rank, size, common):
        self.rank, self.size, self._common = rank, size, common

    def gather(self, fact, behind=False):
        facts, barrier = self._common[behind]
        facts[self.rank] = fact
        barrier.wait(20)
        told = list(facts)
        barrier.wait(20)
        return told

    def send(self, rows_NX, sent, received, ahead=False):
        parts = [given[self.rank] for given in self.gather([part.clone() for part in rows_NX.split(sent)])]
        assert [len(part) for part in parts] == list(received)
        return torch.cat(parts)

    def add(self, numbers):
        return numbers.copy_(sum(self.gather(numbers.clone())))

    def leads(self, folder):
        return self.gather(folder).index(folder) == self.rank


def together(size, body, *arguments):
    """What `body(ranks, *arguments)` gives in each of so many ranks."""
    common = [([None] * size, threading.Barrier(size)) for _ in range(2)]
    answers = [None] * size

    def run(rank):
        try:
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
    for answer in answers:
        if isinstance(answer, BaseException):
            raise answer
    return answers
