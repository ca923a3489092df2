"""Metrics report the mean loss since the last line; no step waits."""

import json
import logging
import math
import sys
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from w2v.training import metrics
from w2v.training.metrics import STACKED, Curve, LinkUse, Metrics, Total


@pytest.fixture
def clock(monkeypatch):
    """Let time pass only where a test adds to `clock.now`."""
    clock = SimpleNamespace(now=100.0)
    clock.monotonic = lambda: clock.now
    monkeypatch.setattr(metrics, "time", clock)
    return clock


@pytest.fixture
def path(tmp_path, caplog):
    caplog.set_level(logging.INFO, "w2v")
    return tmp_path / "metrics.jsonl"


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def step(metrics, words, loss=1.0, pairs=1):
    metrics.update(torch.tensor(loss, dtype=torch.float64), torch.tensor(pairs), words)


def test_loss_is_the_mean_over_pairs_since_the_last_line(path, clock):
    with Metrics(path, total_words=400, log_seconds=math.inf) as metrics:
        step(metrics, 100, loss=10.0, pairs=4)
        step(metrics, 200, loss=2.0, pairs=2)
        clock.now += 2
        metrics.log(0.1)
        step(metrics, 400, loss=3.0)
        clock.now += 1
        metrics.log(0.05)
        metrics.log(0.05)
    assert read(path) == [
        {"step": 2, "words": 200, "seconds": 2, "words_per_s": 100, "loss": 2.0, "lr": 0.1},
        {"step": 3, "words": 400, "seconds": 3, "words_per_s": 200, "loss": 3.0, "lr": 0.05},
    ]


def test_loss_of_an_epoch_is_the_mean_over_its_pairs_wherever_lines_are(path, clock):
    with Metrics(path, total_words=400, log_seconds=math.inf) as metrics:
        step(metrics, 100, loss=9.0)
        metrics.end_epoch(1, 100)
        for _ in range(sys.getrecursionlimit()):
            metrics.end_epoch(1, 100)  # no sentence has two words
        step(metrics, 200, loss=10.0, pairs=4)
        clock.now += 1
        metrics.log(0.1)
        state = metrics.state(0.1)
        step(metrics, 300, loss=2.0, pairs=2)
        metrics.end_epoch(2, 300)
        metrics.log(0.1)
    assert metrics.curve.last_epoch_loss == 2.0
    epochs = [line for line in read(path) if "epoch" in line]
    assert epochs == [
        {"epoch": 1, "words": 100, "seconds": 0, "loss": 9.0},
        {"epoch": 2, "words": 300, "seconds": 1, "loss": 2.0},
    ]
    with Metrics(path, total_words=400, log_seconds=math.inf, saved=state) as resumed:
        assert resumed.curve.last_epoch_loss == 9.0
        step(resumed, 300, loss=2.0, pairs=2)
        resumed.end_epoch(2, 300)
        resumed.state(0.1)
    assert resumed.curve.last_epoch_loss == 2.0


def test_a_line_is_due_after_log_seconds(path, clock):
    with Metrics(path, total_words=400, log_seconds=1) as metrics:
        step(metrics, 100)
        assert not metrics.due
        clock.now += 1
        assert metrics.due
        metrics.log(0.1)
        assert not metrics.due
    assert len(read(path)) == 1


def test_paused_time_does_not_count(path, clock):
    with Metrics(path, total_words=100, log_seconds=math.inf) as metrics:
        clock.now += 2
        step(metrics, 50)
        with metrics.paused():
            assert metrics.curve.seconds == 2
            clock.now += 30
        clock.now += 3
        step(metrics, 100)
        metrics.log(0.1)
    assert metrics.curve.seconds == 5 and read(path)[0]["words_per_s"] == 20


def test_time_that_is_left_is_estimated_from_the_second_line_on(path, clock, caplog):
    with Metrics(path, total_words=3_000_000, log_seconds=12) as metrics:
        words = 0
        for seconds in (20, 0.5, 0.5, 0.5, 0.5, 10):
            clock.now += seconds
            words += 100_000
            step(metrics, words)
            if metrics.due:
                metrics.log(0.1)
    assert caplog.messages == [
        "  3% of the words  0.005 M words/s  loss 1.0000  lr 0.1",
        " 20% of the words  0.042 M words/s  loss 1.0000  lr 0.1  58 s left",
    ]


@given(
    st.lists(st.tuples(st.floats(-1e9, 1e9), st.booleans()), max_size=3 * STACKED),
    st.floats(0, 1e9),
)
def test_total_does_not_depend_on_when_it_is_read(numbers, start):
    total, expected = Total(start), start
    line, expected_line = 1.5, 1.5
    for number, read_now in [*numbers, (0.1, True), (0, True)]:
        total.add(torch.tensor(number, dtype=torch.float64))
        expected += number
        expected_line += number
        if read_now:
            line = total.read(line)
            assert (total.sum, line) == (expected, expected_line)


def test_whole_numbers_are_summed_exactly():
    total = Total()
    for number in [2**60, *range(STACKED)]:
        total.add(torch.tensor(number))
    found = total.read()
    assert found == total.sum == 2**60 + sum(range(STACKED)) and isinstance(found, int)


def test_sums_do_not_saturate(path):
    """A float32 sum stands still at 2**24; gensim's loss is known for it."""
    with Metrics(path, 10, math.inf) as metrics:
        step(metrics, 1, loss=2.0**40, pairs=2**40)
        for _ in range(3):
            step(metrics, 1, loss=1.0, pairs=0)
        metrics.log(0.1)
    assert read(path)[0]["loss"] == 1 + 3 / 2**40


def test_link_is_reported_if_something_crosses_it(path, clock, caplog):
    use = LinkUse(5_000_000_000, 3.0)
    with Metrics(path, 400, math.inf, link=lambda: use) as metrics:
        for seconds, nbytes in ((2, 30e9), (1, 0)):
            clock.now += seconds
            use = LinkUse(use.bytes + nbytes, use.wait_seconds + seconds / 4)
            step(metrics, metrics.curve.words + 100)
            metrics.log(0.1)
    first, second = read(path)
    link = {key: value for key, value in first.items() if key.startswith("link")}
    assert link == {"link_gb_per_s": 15, "link_wait": 0.5}
    assert not [key for key in second if key.startswith("link")]
    assert "link 15.0 GB/s, waited for 0.5 s" in caplog.messages[0]
    assert "link" not in caplog.messages[1]


def test_curve_goes_on_after_a_resume(path, clock):
    with Metrics(path, 400, math.inf) as metrics:
        step(metrics, 100, loss=4.0)
        clock.now += 1
        metrics.log(0.1)
        step(metrics, 200, loss=3.0)
        saved = metrics.state(0.1)
        step(metrics, 300, loss=9.0)
        metrics.log(0.1)
    clock.now += 1000
    with Metrics(path, 400, math.inf, saved=saved) as metrics:
        step(metrics, 300, loss=1.0)
        clock.now += 1
        metrics.log(0.1)
    assert [(line["step"], line["loss"], line["seconds"]) for line in read(path)] == [
        (1, 4.0, 1.0),
        (3, 2.0, 2.0),
    ]


def test_words_that_are_read_again_after_a_resume_keep_rates_positive(path, clock, caplog):
    with Metrics(path, 1000, math.inf) as metrics:
        step(metrics, 400)
        metrics.log(0.1)
        step(metrics, 500)
        saved = metrics.state(0.1)
    with Metrics(path, 1000, math.inf, saved=saved) as metrics:
        for words in (300, 350):
            step(metrics, words)
        clock.now += 1
        metrics.log(0.1)
    last = read(path)[-1]
    assert last["words"] == 350 and last["words_per_s"] == 150
    assert "-" not in caplog.messages[-1]


def test_lost_lines_are_warned_about(path, caplog):
    with Metrics(path, 400, math.inf, saved=Curve(bytes=100)):
        pass
    assert "metrics.jsonl has lost lines" in caplog.text


def test_nothing_is_written_without_a_path(tmp_path, caplog):
    with Metrics(None, 400, math.inf) as metrics:
        step(metrics, 100, loss=3.0)
        metrics.log(0.1)
        assert metrics.state(0.1).mean_loss == metrics.curve.mean_loss == 3.0
    assert not list(tmp_path.iterdir())
