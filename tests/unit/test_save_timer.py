"""Checkpoints by time, and at the ends of epochs."""

import logging

from w2v.training import save_timer
from w2v.training.save_timer import SaveTimer


class Clock:
    """Stands for the module `time`; passes only when told to."""

    now = 0.0

    def monotonic(self):
        return self.now


def test_blocking_saves_take_a_tenth_of_the_time(monkeypatch, caplog):
    """One is due every 10 minutes; after one of 155 s the next is due later."""
    clock = Clock()
    monkeypatch.setattr(save_timer, "time", clock)
    caplog.set_level(logging.INFO, "w2v")
    timer, waits = SaveTimer(10), []
    for seconds in (0.5, 50, 50, 155, 0.5):
        began = clock.now
        while not timer.due():
            clock.now += 1
        waits.append(clock.now - began)
        with timer.saving():
            clock.now += seconds
    assert waits == [600, 600, 600, 600, 1550] and timer.saves == 5
    first, again, long = caplog.messages
    assert first == again and "waited 50.0 s" in first and "10.0 minutes later" in first
    assert "waited 155.0 s" in long and "25.8 minutes later" in long


def test_epochs_of_a_minute_wait_after_a_long_save(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(save_timer, "time", clock)
    timer = SaveTimer(10)
    with timer.saving():
        clock.now += 50
    due = []
    for after in (60, 499, 500):
        clock.now = 50 + after
        due.append(timer.due(60))
    assert due == [False, False, True]


def test_no_checkpoint_by_time_is_due_with_zero_minutes(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(save_timer, "time", clock)
    timer = SaveTimer(0)
    clock.now = 1e9
    assert not timer.due() and not timer.due(60)


def test_an_epoch_of_a_minute_is_worth_a_checkpoint(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(save_timer, "time", clock)
    timer, seldom = SaveTimer(0.5), SaveTimer(10)
    due = []
    for clock.now in (29, 30, 59, 60):
        due.append((timer.due(60), seldom.due(60)))
    assert due == [(False, False), (True, False), (True, False), (True, True)]
    with seldom.saving():
        pass
    assert not seldom.due(60)
