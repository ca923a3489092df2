"""The loss that is reported is the mean since the last report, and a loss that is no number stops the run."""

import json
import logging
import sys
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from w2v.config import ConfigError, RunConfig
from w2v.training import loggers
from w2v.training.metrics import TOGETHER, Metrics, Total


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_loss_is_the_mean_over_pairs_since_the_last_line(tmp_path):
    with Metrics(tmp_path / "m.jsonl", total_words=400, log_seconds=1e9) as metrics:
        metrics.update(torch.tensor(10.0, dtype=torch.float64), torch.tensor(4), 100, 0.1)
        metrics.update(torch.tensor(2.0, dtype=torch.float64), torch.tensor(2), 200, 0.1)
        metrics.log(0.1)
        metrics.update(torch.tensor(3.0, dtype=torch.float64), torch.tensor(1), 400, 0.05)
        metrics.log(0.05)
    first, second = lines(tmp_path / "m.jsonl")
    assert (first["loss"], first["words"], first["step"], first["lr"]) == (2.0, 200, 2, 0.1)
    assert (second["loss"], second["words"], second["step"], second["lr"]) == (3.0, 400, 3, 0.05)
    assert (
        metrics.seconds == pytest.approx(second["seconds"], abs=0.001) and second["words_per_s"] > 0
    )


def test_time_that_is_paused_is_none_of_the_training(tmp_path, monkeypatch):
    now = 100.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    with Metrics(tmp_path / "m.jsonl", total_words=100, log_seconds=1e9) as metrics:
        now += 2
        metrics.update(torch.tensor(1.0, dtype=torch.float64), torch.tensor(1), 50, 0.1)
        with metrics.paused():
            assert metrics.seconds == 2
            now += 30
        now += 3
        metrics.update(torch.tensor(1.0, dtype=torch.float64), torch.tensor(1), 100, 0.1)
        metrics.log(0.1)
    assert metrics.seconds == 5 and lines(tmp_path / "m.jsonl")[0]["words_per_s"] == 20


def test_the_time_that_a_run_takes_is_told_once_without_what_its_first_step_waited_for(
    tmp_path, monkeypatch, caplog
):
    caplog.set_level(logging.INFO, "w2v")
    now = 100.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    with Metrics(tmp_path / "m.jsonl", total_words=3_000_000, log_seconds=12) as metrics:
        for words, took in (
            (100_000, 20),
            (200_000, 0.5),
            (300_000, 0.5),
            (400_000, 0.5),
            (500_000, 0.5),
            (600_000, 10),
        ):
            now += took
            metrics.update(torch.tensor(1.0), torch.tensor(1), words, 0.1)
    assert [record.message for record in caplog.records] == [
        "  3% of the words  0.005 Mw/s  loss 1.0000  lr 0.1",
        "time      about 15 s of training: 0.2 M words/s at its beginning",
        " 20% of the words  0.042 Mw/s  loss 1.0000  lr 0.1  58 s left",
    ]


@given(
    st.lists(st.tuples(st.floats(-1e9, 1e9), st.booleans()), max_size=3 * TOGETHER),
    st.floats(0, 1e9),
)
def test_a_sum_is_the_same_to_the_last_bit_however_often_it_is_read(numbers, start):
    total, expected = Total(start), start
    for number, read in numbers:
        total.add(torch.tensor(number, dtype=torch.float64))
        expected += number
        if read:
            assert total.read() == expected
    assert total.read() == total.read() == expected


def test_whole_numbers_are_summed_as_such():
    total = Total()
    for number in [2**60, *range(TOGETHER)]:
        total.add(torch.tensor(number))
    assert total.read() == 2**60 + sum(range(TOGETHER)) and isinstance(total.read(), int)


def test_sums_do_not_saturate(tmp_path):
    """A float32 sum stands still at 2**24; gensim's loss is known for it."""
    with Metrics(tmp_path / "m.jsonl", 10, 1e9) as metrics:
        metrics.update(torch.tensor(2.0**40, dtype=torch.float64), torch.tensor(2**40), 1, 0.1)
        for _ in range(3):
            metrics.update(torch.tensor(1.0, dtype=torch.float64), torch.tensor(0), 1, 0.1)
        metrics.log(0.1)
    assert lines(tmp_path / "m.jsonl")[0]["loss"] == 1 + 3 / 2**40


def test_plain_lines_without_a_terminal(tmp_path, caplog):
    caplog.set_level(logging.INFO, "w2v")
    logging.getLogger("w2v").propagate = True
    with Metrics(tmp_path / "m.jsonl", 1_000_000, 1e-9) as metrics:
        metrics.update(torch.tensor(5.0, dtype=torch.float64), torch.tensor(2), 250_000, 0.5)
    assert (
        " 25% of the words" in caplog.text
        and "loss 2.5000" in caplog.text
        and "lr 0.5" in caplog.text
    )


def test_the_link_is_shown_where_something_crosses_it(tmp_path, caplog, monkeypatch):
    now, moved = 100.0, 5_000_000_000
    monkeypatch.setattr("time.monotonic", lambda: now)
    caplog.set_level(logging.INFO, "w2v")
    waited = 3.0
    with Metrics(
        tmp_path / "m.jsonl", 400, 1e9, moved=lambda: moved, waited=lambda: waited, link_rate=60e9
    ) as metrics:
        for seconds, nbytes in ((2, 30e9), (1, 0)):
            now, moved, waited = now + seconds, moved + nbytes, waited + seconds / 4
            metrics.update(
                torch.tensor(1.0, dtype=torch.float64), torch.tensor(1), metrics.words + 100, 0.1
            )
            metrics.log(0.1)
    first, second = lines(tmp_path / "m.jsonl")
    assert {key: first[key] for key in first if key.startswith("link")} == {
        "link_gb_per_s": 15,
        "link_share": 0.25,
        "link_wait": 0.5,
    }
    assert not [key for key in second if key.startswith("link")]
    assert (
        caplog.text.count("link 15.0 GB/s (25% of its most), waited for 0.5 s")
        == caplog.text.count("link")
        == 1
    )


@pytest.mark.parametrize("package, wanted", [("tensorboard", True), ("wandb", "mine")])
def test_a_logger_that_is_not_there_is_said(tmp_path, monkeypatch, package, wanted):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(
        ConfigError,
        match=f"run.{package}={wanted} needs a package that is not installed; pip install {package}",
    ):
        loggers.opened(RunConfig(**{package: wanted}), tmp_path, 0, {})


def test_weights_and_biases_gets_every_line_under_the_name_of_the_run(tmp_path, monkeypatch):
    said = []

    class Run:
        def log(self, values, step):
            said.append((step, values))

        def finish(self):
            said.append("finished")

    monkeypatch.setitem(
        sys.modules,
        "wandb",
        SimpleNamespace(init=lambda **asked: said.append(asked) or Run(), __spec__="found"),
    )
    opened = loggers.opened(RunConfig(wandb="mine"), tmp_path, 0, {"model.window": 5})
    with Metrics(tmp_path / "m.jsonl", 100, 1e9, loggers=opened) as metrics:
        metrics.update(torch.tensor(4.0, dtype=torch.float64), torch.tensor(2), 50, 0.1)
        metrics.log(0.1)
        metrics.write(held_out_loss=None, analogies=0.5)
    metrics.tell(analogies=0.6)
    opened[0].close()
    asked, *written, last = said
    assert (asked["project"], asked["id"], asked["resume"], asked["config"]) == (
        "mine",
        tmp_path.name,
        "allow",
        {"model.window": 5},
    )
    (step, first), *scores = written
    assert (
        step == 1
        and first["loss"] == 2
        and scores == [(1, {"analogies": 0.5}), (1, {"analogies": 0.6})]
        and last == "finished"
    )
    assert "0.6" not in (tmp_path / "m.jsonl").read_text()
