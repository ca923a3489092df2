"""Training loop: learning rates, checks, determinism, time estimate."""

import re
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.support.each_case import each_case
from tests.support.zipf import zipf_text
from w2v.config import load_config
from w2v.rows.checkpoint import Checkpoints
from w2v.rows.optim import learning_rate
from w2v.training import build, plan, save_timer, trainer
from w2v.training.trainer import Diverged, Trainer, Trial
from w2v.word2vec.batch import FAULTS
from w2v.word2vec.step import TrainingStep

EPOCHS = 2


def make_loop(*assignments, words=1000):
    """Return the loop of a small run on the CPU, without a folder."""
    model = "vocab.min_count=1", "model.vector_size=4", "model.sample=0", "train.device=cpu"
    schedule = "optimizer.lr=0.1", "optimizer.schedule=linear", f"train.epochs={EPOCHS}"
    config = load_config([], [*model, *schedule, "train.batch_size=50", *assignments])
    return build.build(plan.make_plan(config, zipf_text(100, words)))


class Clock:
    """A clock that moves a second each time it is read."""

    now = 0.0

    def monotonic(self):
        self.now += 1
        return self.now


@pytest.fixture
def rates(monkeypatch):
    """Learning rates of the steps, as they are made."""
    rates, call = [], TrainingStep.__call__

    def recorded(self, planned, lr):
        rates.append(lr)
        return call(self, planned, lr)

    monkeypatch.setattr(TrainingStep, "__call__", recorded)
    return rates


def test_learning_rate_follows_the_progress_of_the_run(rates):
    loop = make_loop()
    assert loop.lr == 0.1
    epochs_done = 0.0
    for epoch in range(EPOCHS):
        for done in loop.epoch():
            assert rates[-1] == learning_rate(loop.config.optimizer, epochs_done / EPOCHS)
            epochs_done = loop.epochs_done
            assert epochs_done == done.batch.epochs_done
        assert epochs_done == loop.sampler.position.epoch == epoch + 1
    assert loop.epochs_done == EPOCHS and loop.lr == 0


def test_steps_learn_and_are_counted():
    loop = make_loop("train.epochs=20", "optimizer.lr=0.05")
    losses = []
    for epoch in range(20):
        done = list(loop.epoch())
        assert loop.step.state.step == (epoch + 1) * len(done)
        losses.append(float(sum(step.loss for step in done) / sum(step.pairs for step in done)))
    assert losses[-1] < 0.9 * losses[0]
    loop.check_finite(lambda: "none is needed")


def test_given_batches_are_trained_in_place_of_the_samplers():
    loop = make_loop()
    batches = list(loop.sampler.epoch())[:3]
    assert [done.batch for done in loop.epoch(batches)] == batches
    assert list(loop.epoch([])) == []


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@each_case("name, kernels", [("Adam", "auto"), ("Adam", "reference"), ("SGD", "auto")])
def test_divergence_names_step_learning_rate_and_remedy(name, kernels, device, rates):
    settings = f"optimizer.name={name}", f"train.kernels={kernels}", f"train.device={device}"
    loop = make_loop(*settings)
    loop.step.state.step = 1000  # as of a resumed run
    for number, _ in enumerate(loop.epoch(), start=1):
        if number == 3:
            loop.check_finite(lambda: "none is needed")
        if number == 6:
            loop.step.inputs["weight"].fill_(torch.inf)
        if number == 9:
            break
    with pytest.raises(Diverged) as raised:
        loop.check_finite(lambda: "train more slowly")
    message = str(raised.value)
    for part in ("step 1,007 ", name, f"lr {rates[6]:.4g})", FAULTS[0], "train more slowly"):
        assert part in message


@each_case("bits", range(1, 4))
def test_divergence_names_all_parts_that_are_not_finite(bits):
    loop = make_loop()
    next(loop.epoch())
    state = loop.step.state
    state.fault.fill_((state.step << len(FAULTS)) + bits)
    with pytest.raises(Diverged) as raised:
        loop.check_finite(str)
    assert [part in str(raised.value) for part in FAULTS] == [
        bool(bits >> bit & 1) for bit in range(2)
    ]


@pytest.mark.parametrize("before", [False, True])
def test_deterministic_mode_lasts_as_long_as_an_epoch(before, monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # as `build` would leave it set
    is_on = torch.are_deterministic_algorithms_enabled
    torch.use_deterministic_algorithms(before)
    try:
        for wanted in ("true", "false"):
            loop = make_loop(f"train.deterministic={wanted}")
            assert is_on() == before  # planning and building change nothing
            assert {is_on() for _ in loop.epoch()} == {before or wanted == "true"}
            assert is_on() == before
            with pytest.raises(KeyboardInterrupt):
                for _ in loop.epoch():
                    raise KeyboardInterrupt
            assert is_on() == before
    finally:
        torch.use_deterministic_algorithms(False)


def test_ranks_ask_once_an_interval_while_a_checkpoint_is_written(tmp_path, monkeypatch):
    """A checkpoint that is due then is left out until the next interval."""
    clock, asked = Clock(), []
    monkeypatch.setattr(save_timer, "time", clock)
    monkeypatch.setattr(Checkpoints, "busy", property(lambda self: asked.append(clock.now) or True))
    loop = make_loop("run.checkpoint_minutes=1", words=20_000)
    (tmp_path / "checkpoints").mkdir()
    with Trainer(loop, *zipf_text(100, 20_000), tmp_path) as run:
        run.train()
    intervals = clock.now / 60
    assert 10 < intervals < loop.step.state.step / 50
    assert intervals - 3 < len(asked) < 2 * intervals  # between epochs, and at the end, once more
    assert not list(tmp_path.glob("checkpoints/step-*"))


def test_a_run_is_done_where_the_last_words_have_no_batch(tmp_path):
    loop = make_loop(words=10_000)
    text = loop.sampler.text
    sentences = len(text.offsets_S) - 1
    loop.sampler.text = replace(text, held_out=np.arange(sentences - 4, sentences))
    (tmp_path / "checkpoints").mkdir()
    with Trainer(loop, *zipf_text(100, 10_000), tmp_path) as run:
        run.train()
    assert loop.epochs_done == EPOCHS and loop.lr == 0
    assert run.metrics.curve.words == EPOCHS * run.corpus.raw_words


def test_time_is_estimated_from_the_steps_after_the_first(monkeypatch):
    clock = iter(range(100))
    monkeypatch.setattr(trainer, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    loop = make_loop()
    progress = [batch.epochs_done for batch in make_loop().sampler.epoch()]
    # The clock moves a second at a time: steps 4 to 6 are timed, and the end is read once more.
    found = re.match(r"about (\d+) s of training: .* 3 steps", str(Trial.of(loop, 1000)))
    epoch_seconds = 5 / (progress[5] - progress[2])
    assert float(found[1]) == pytest.approx(EPOCHS * epoch_seconds, abs=0.51)


def test_time_of_a_tiny_text_is_unknown():
    assert "unknown" in str(Trial.of(make_loop("train.batch_size=500"), 1000))
