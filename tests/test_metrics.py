"""The loss that is reported is the mean since the last report, and a loss that is no number stops the run."""

import json
import logging
import sys

import pytest
import torch

from w2v.config import ConfigError
from w2v.metrics import Metrics


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
    assert metrics.seconds == pytest.approx(second["seconds"], abs=0.001) and second["words_per_s"] > 0


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
    assert " 25% of the words" in caplog.text and "loss 2.5000" in caplog.text and "lr 0.5" in caplog.text


def test_tensorboard_that_is_not_there_is_said(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ConfigError, match="run.tensorboard=true needs a package that cannot be imported; pip install tensorboard"):
        Metrics(tmp_path / "m.jsonl", 10, 1e9, tensorboard=True)
