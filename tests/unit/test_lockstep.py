"""Lockstep: ranks with unequal batches step, stop and save together."""

import pytest
import torch

from tests.support.each_case import each_case
from tests.support.rank_threads import checked, together
from w2v.distributed.ranks import SINGLE
from w2v.training.lockstep import BATCHES_PER_VOTE, Decision, Lockstep
from w2v.word2vec.batch import Batch

NO_WORDS = torch.zeros(0, dtype=torch.int32)


def batch(epochs_done):
    return Batch(NO_WORDS, NO_WORDS, 0, NO_WORDS, NO_WORDS.view(0, 1), 5, epochs_done)


def drawn(count, epoch):
    return [batch(epoch + (number + 1) / count) for number in range(count)]


def run_epochs(ranks, counts_EN, votes_N):
    """Return the progress and decision of each step by epoch on this rank.

    `votes_N[rank]` maps the number of a vote, counted through all epochs, to the vote.
    """
    number = -1

    def vote():
        nonlocal number
        number += 1
        return votes_N[ranks.rank].get(number, Decision(0, 0))

    lockstep = Lockstep(ranks, vote)
    steps = []
    for epoch, count_N in enumerate(counts_EN):
        batches = iter(drawn(count_N[ranks.rank], epoch))
        given = lockstep.batches(batches, batch(epoch + 1))
        steps.append([(one.epochs_done, lockstep.decision()) for one in given])
    return steps


@each_case(
    "count_N",
    [
        (3, 3),
        (5, 2, 9),
        (0, 1),
        (1, BATCHES_PER_VOTE, 3 * BATCHES_PER_VOTE + 1),
        (0, 2 * BATCHES_PER_VOTE),
    ],
)
def test_all_ranks_make_as_many_steps_as_the_one_with_the_most_batches(count_N):
    size = len(count_N)
    counts_EN = [count_N, count_N[::-1]]
    steps_N = checked(together(size, run_epochs, counts_EN, [{}] * size))
    assert all(steps == steps_N[0] for steps in steps_N)
    for epoch, steps in enumerate(steps_N[0]):
        # Progress is the mean over the ranks.
        of_ranks = [[one.epochs_done for one in drawn(count, epoch)] for count in counts_EN[epoch]]
        padded = [done + [epoch + 1] * (max(count_N) - len(done)) for done in of_ranks]
        means = [sum(column) / size for column in zip(*padded, strict=True)]
        assert [done for done, _ in steps] == pytest.approx(means)
        assert {decision for _, decision in steps} == {Decision(0, 0)}


def test_all_ranks_stop_and_save_after_the_same_step():
    # Any rank's status counts, the highest one; of the wishes to save, only that of rank 0.
    votes_N = [{1: Decision(0, 1)}, {0: Decision(0, 7), 2: Decision(130, 0)}, {2: Decision(143, 0)}]
    steps_N = checked(together(3, run_epochs, [(9, 3, 3 * BATCHES_PER_VOTE - 1)], votes_N))
    expected = [Decision(0, 0)] * BATCHES_PER_VOTE
    expected += [Decision(0, 1)] * BATCHES_PER_VOTE
    expected += [Decision(143, 0)] * (BATCHES_PER_VOTE - 1)
    for steps in steps_N:
        assert [decision for _, decision in steps[0]] == expected


def test_rank_without_batches_left_can_still_stop_the_others():
    votes_N = [{}, {1: Decision(130, 0)}]
    steps_N = checked(together(2, run_epochs, [(BATCHES_PER_VOTE + 2, 2)], votes_N))
    for steps in steps_N:
        statuses = [decision.status for _, decision in steps[0]]
        assert statuses == [0] * BATCHES_PER_VOTE + [130] * 2


def test_batches_of_the_ranks_own_text_are_given_unchanged():
    def body(ranks):
        own = drawn([4, 2][ranks.rank], 0)
        end = batch(1.0)
        lockstep = Lockstep(ranks, lambda: Decision(0, 0))
        given = list(lockstep.batches(iter(own), end))
        for number, one in enumerate(given):
            source = own[number] if number < len(own) else end
            assert one.negatives_BK is source.negatives_BK and one.after == source.after

    checked(together(2, body))


def test_single_process_votes_for_itself_at_once():
    decision = Decision(0, 0)
    lockstep = Lockstep(SINGLE, lambda: decision)
    own = drawn(3, 0)
    for one, expected in zip(lockstep.batches(iter(own), batch(1.0)), own, strict=True):
        assert one is expected
        assert lockstep.decision() == decision
        decision = Decision(130, decision.save + 1)
