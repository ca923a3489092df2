"""A resumed run equals an uninterrupted one, bit for bit."""

import contextlib
import json
import logging
import math
import shlex
import weakref
from dataclasses import replace
from pathlib import Path
from tempfile import mkdtemp
from typing import NamedTuple
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from tests.support.each_case import each_case
from tests.support.steps import make_step, make_subword_step
from w2v.config import OPTIMIZERS, ConfigError, load_config, save_config
from w2v.rows import checkpoint
from w2v.rows.checkpoint import CheckpointError, Checkpoints, latest
from w2v.system.files import sealed
from w2v.system.process import Signals
from w2v.text.corpus import Corpus
from w2v.text.vocab import Vocab
from w2v.training import save_timer
from w2v.training.trainer import Diverged, Trainer, TrainingLoop
from w2v.vectors import export
from w2v.word2vec.batch import Position, output_vectors
from w2v.word2vec.huffman import make_tree
from w2v.word2vec.sampler import Sampler, TrainingText, negative_distribution
from w2v.word2vec.subwords import Subwords


@pytest.fixture(autouse=True)
def after_each_epoch(monkeypatch):
    """Write a checkpoint after each epoch, however short."""
    monkeypatch.setattr(save_timer, "EPOCH_SECONDS", 0)
    monkeypatch.setattr(Checkpoints, "busy", False)  # wait for the one before; skip none


ROWS, DIM = 60, 6
WORDS = 1_360
STEPS = 68  # in 2 epochs, each of which has a second chunk from its step 33
TIGHT = 108  # slots of a cache that does not hold all 120 rows


class Place(NamedTuple):
    """An engine, its slots, where the tables are, and the compute device."""

    engine: str
    slots: int = 0
    storage: str = "cpu"
    device: str = "cpu"


PLACES = {
    "resident": Place("resident"),
    "roomy": Place("torch cache", 4 * ROWS),  # also for the nodes of a tree
    "tight": Place("torch cache", TIGHT),
    "file": Place("torch cache", TIGHT, "mmap"),
    "gpu": Place("resident", 0, "cuda", "cuda"),
    "mapped": Place("cache", TIGHT, "pinned", "cuda"),
    "staged": Place("torch cache", TIGHT, "cpu", "cuda"),
}
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def deterministic_products(monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def on_gpu(place):
    return [pytest.mark.gpu] if PLACES[place].device == "cuda" else []


# Every optimizer in one place of the CPU and one of the GPU, and one optimizer in all places.
COMBINATIONS = [
    pytest.param(name, place, marks=on_gpu(place))
    for place in PLACES
    for name in OPTIMIZERS
    if place in ("tight", "mapped") or name == "NAdam"
]


class DisturbedLoop(TrainingLoop):
    """A loop that gets SIGTERM after one step, or meets a NaN in another."""

    signals = Signals()
    stop_after = None
    poisoned_step = None

    def epoch(self, batches=None):
        for done in super().epoch(batches):
            if self.step.state.step == self.stop_after:
                self.signals.status = 143
            if self.step.state.step + 1 == self.poisoned_step:
                self.step.outputs["weight"][0].fill_(torch.nan)
            yield done


def make(
    folder,
    *more,
    place="resident",
    dtype=torch.float32,
    steps_per_page=1,
    kernels="reference",
    stop_after=None,
    poisoned_step=None,
):
    """Return a trainer over a small text."""
    settings = ["train.epochs=2", "train.batch_size=40", "train.deterministic=true"]
    settings += ["optimizer.lr=0.05", "run.log_seconds=1000", "model.sample=1e-4"]
    config = load_config([], [*settings, *more])
    ids = (np.random.default_rng(4).zipf(1.4, WORDS) % ROWS).astype(np.int32)
    counts = np.bincount(ids, minlength=ROWS) + 1
    vocab = Vocab([f"w{i}" for i in range(ROWS)], counts, len(ids), ROWS)
    folder.mkdir(exist_ok=True)
    engine, slots, storage, device = PLACES[place]
    model = config.model
    make_it, rows = make_step, output_vectors(ROWS, model.hs, model.negative)
    if model.subwords:
        limits = model.min_n, model.max_n, model.buckets
        make_it, rows = make_subword_step, Subwords.of(vocab.words, limits, rows)
    step = make_it(
        config.optimizer,
        rows,
        DIM,
        kernels,
        device=device,
        engine=engine,
        storage=storage,
        dtype=dtype,
        slots=slots,
        steps_per_page=steps_per_page,
        folder=Path(mkdtemp(dir=folder)) if storage == "mmap" else None,
    )
    negative_prob_V = negative_distribution(vocab.counts, config.model.ns_exponent)
    text = TrainingText(ids, np.arange(0, len(ids) + 1, 20), np.ones(ROWS), negative_prob_V)
    if model.hs:
        text = replace(text, tree=make_tree(counts, ROWS if model.negative else 0))
    sampler = Sampler(
        text,
        config.model,
        config.train.batch_size,
        seed=1,
        device=torch.device(device),
        block_words=max(0, config.train.block_words),  # 0 for auto
        subsample=step.kernels.subsample,
        draw=step.kernels.draw,
    )
    loop = DisturbedLoop(config, sampler, step)
    loop.signals = Signals()
    loop.stop_after = stop_after
    loop.poisoned_step = poisoned_step
    return Trainer(loop, vocab, Corpus(ids, text.offsets_S, len(ids)), folder, signals=loop.signals)


def trained(folder, *more, **what):
    with make(folder, *more, **what) as trainer:
        trainer.train()
        trainer.checkpoints.wait()  # a thread may still write the last one between epochs
    return trainer


def stopped(folder, *more, **what):
    with pytest.raises(SystemExit) as stop:
        trained(folder, *more, **what)
    assert stop.value.code == 143


def content(trainer):
    tables = trainer.loop.step.inputs, trainer.loop.step.outputs
    return [table.records_VR.cpu() for table in tables], [table.scalars for table in tables]


def assert_same(ours, theirs, steps=STEPS):
    (our_records, our_scalars), (their_records, their_scalars) = content(ours), content(theirs)
    assert all(torch.equal(a, b) for a, b in zip(our_records, their_records, strict=True))
    assert our_scalars == their_scalars
    assert ours.metrics.curve.step == theirs.metrics.curve.step == steps
    assert ours.metrics.curve.mean_loss == theirs.metrics.curve.mean_loss


@pytest.mark.parametrize("name, place", COMBINATIONS)
def test_28_steps_and_6_more_are_34(tmp_path, name, place):
    more = [f"optimizer.name={name}", "optimizer.schedule=cosine", "optimizer.lr=0.002"]
    more.append("train.epochs=1")
    what = {"place": place, "steps_per_page": 3}
    whole = trained(tmp_path / "whole", *more, **what)
    stopped(tmp_path / "run", *more, stop_after=28, **what)
    assert_same(trained(tmp_path / "run", *more, **what), whole, steps=34)


@pytest.mark.parametrize("kernels", ["reference", "cpu"])
@pytest.mark.parametrize("name", ["Adam", "NAdam"])
def test_subwords_resume(tmp_path, kernels, name):
    more = ["model.subwords=true", "model.buckets=50", "model.min_n=2", "train.epochs=2"]
    more.append(f"optimizer.name={name}")
    whole = trained(tmp_path / "whole", *more, kernels=kernels)
    stopped(tmp_path / "run", *more, kernels=kernels, stop_after=40)
    assert_same(trained(tmp_path / "run", *more, kernels=kernels), whole)


@pytest.mark.parametrize(
    "negative, what",
    [(0, {"kernels": "cpu"}), (3, {"kernels": "cpu"}), (3, {"place": "roomy"})],
    ids=str,
)
def test_hierarchical_softmax_resumes(tmp_path, negative, what):
    more = ["model.hs=true", f"model.negative={negative}", "train.batch_size=80"]
    whole = trained(tmp_path / "whole", *more, **what)
    stopped(tmp_path / "run", *more, stop_after=19, **what)
    assert_same(trained(tmp_path / "run", *more, **what), whole, steps=34)


@pytest.mark.parametrize(
    "place, kernels",
    [
        ("resident", "cpu"),
        ("tight", "reference"),
        pytest.param("gpu", "reference", marks=pytest.mark.gpu),
        pytest.param("mapped", "reference", marks=pytest.mark.gpu),
    ],
)
def test_weighed_windows_and_mixed_blocks_resume(tmp_path, place, kernels):
    more = ["model.shrink_by=weigh", "train.block_words=7", "train.epochs=1"]
    what = {"place": place, "kernels": kernels, "steps_per_page": 3}
    whole = trained(tmp_path / "whole", *more, **what)
    stopped(tmp_path / "run", *more, stop_after=28, **what)
    assert_same(trained(tmp_path / "run", *more, **what), whole, steps=34)


def test_run_may_be_stopped_at_any_step_and_twice(tmp_path):
    what = {"dtype": torch.bfloat16, "place": "tight", "steps_per_page": 4}
    whole = trained(tmp_path / "whole", **what)
    for at in (1, 33, 34, 59):
        stopped(tmp_path / str(at), stop_after=at, **what)
        stopped(tmp_path / str(at), stop_after=at + 7, **what)
        assert_same(trained(tmp_path / str(at), **what), whole)


def test_command_to_resume_can_be_pasted(tmp_path, caplog):
    with caplog.at_level(logging.INFO, "w2v"):
        stopped(tmp_path / "my run", stop_after=1)
    assert shlex.split(caplog.messages[-1])[-2:] == ["--resume", str(tmp_path / "my run")]


@pytest.mark.gpu
def test_fused_training_resumes_within_rounding(tmp_path):
    """Its sums have no fixed order."""
    what = {"place": "mapped", "kernels": "cuda", "steps_per_page": 3}
    whole = trained(tmp_path / "whole", **what)
    stopped(tmp_path / "run", stop_after=41, **what)  # in the middle of a page
    again = trained(tmp_path / "run", **what)
    for ours, theirs in zip(content(again)[0], content(whole)[0], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)
    assert content(again)[1] == content(whole)[1] and again.metrics.curve.step == STEPS


def saved_position(folder):
    return latest(folder / "checkpoints").state["samplers"][0]["position"]


def test_checkpoints_change_nothing(tmp_path):
    never = trained(tmp_path / "never", "run.checkpoint_minutes=0")
    assert latest(tmp_path / "never" / "checkpoints") is None
    by_epoch = trained(tmp_path / "epochs")
    assert saved_position(tmp_path / "epochs") == [1, 0, 0, 0]
    by_step = trained(tmp_path / "steps", "run.checkpoint_minutes=1e-9", place="tight")
    assert saved_position(tmp_path / "steps") == [1, 1, 2, 34]
    assert_same(by_epoch, never)
    assert_same(by_step, never)


@pytest.mark.parametrize(
    "place", [pytest.param(place, marks=on_gpu(place)) for place in ("tight", "mapped", "staged")]
)
def test_checkpoints_while_rows_move_change_nothing(tmp_path, monkeypatch, place):
    """Steps save while later ones of their page, and the next, are ready."""
    monkeypatch.setattr(save_timer, "LONG_SECONDS", math.inf)  # a save on a busy machine
    what = {"place": place, "steps_per_page": 4}
    never = trained(tmp_path / "never", "run.checkpoint_minutes=0", **what)
    often = make(tmp_path / "often", "run.checkpoint_minutes=1e-9", **what)
    save = often.checkpoints.save
    saved = []

    def save_at_first(state):
        if state["step"] < 40:
            save(state)
            saved.append(state["step"])

    often.checkpoints.save = save_at_first
    with often:
        often.train()
        often.checkpoints.wait()
    assert len(saved) > 25 and saved[-1] % 4 and latest(often.folder / "checkpoints")
    assert_same(often, never)
    assert_same(trained(tmp_path / "often", **what), never)


def read_curve(folder):
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if "step" in line]


def test_curve_goes_on_without_a_gap_or_a_second_line(tmp_path):
    def curve(folder):
        keys = ("step", "words", "loss", "lr")
        return [[line[key] for key in keys] for line in read_curve(folder)]

    every_step = "run.log_seconds=1e-9"
    trained(tmp_path / "whole", every_step)
    stopped(tmp_path / "run", every_step, stop_after=40)
    with (tmp_path / "run" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 41, "wor')  # as if it had been killed
    trained(tmp_path / "run", every_step)
    assert curve(tmp_path / "run") == curve(tmp_path / "whole")
    assert len(curve(tmp_path / "run")) == STEPS


def test_tensorboard_curve_goes_on_and_ends_with_the_scores(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    more = ["run.log_seconds=1e-9", "run.tensorboard=true"]
    stopped(tmp_path, *more, stop_after=40)
    # As if it had been killed after step 34.
    (tmp_path / "checkpoints" / "step-00000040").rename(tmp_path / "gone")
    with make(tmp_path, *more) as trainer:
        save_config(trainer.config, tmp_path / "config.yaml")
        trainer.train()
        trainer.export(trainer.finish())
    shown = EventAccumulator(str(tmp_path)).Reload()
    lines = [line for line in read_curve(tmp_path) if "loss" in line]
    training = {f"training/{name}" for name in ("loss", "lr", "words_per_s")}
    assert set(shown.Tags()["scalars"]) == {*training, "scores/analogies"}
    events = shown.Scalars("training/loss")
    assert [event.step for event in events] == list(range(1, STEPS + 1))
    assert [event.value for event in events] == pytest.approx([line["loss"] for line in lines])
    scores = shown.Scalars("scores/analogies")
    assert [(event.step, event.value) for event in scores] == [(STEPS, 0)]


def test_finished_run_trains_nothing_and_more_epochs_go_on(tmp_path):
    first = trained(tmp_path / "run")
    first.checkpoints.save(first._final)
    first.checkpoints.wait()
    assert_same(trained(tmp_path / "run"), first)
    longer = trained(tmp_path / "run", "train.epochs=3")
    assert longer.metrics.curve.step == 102 and longer.loop.sampler.position == Position(3)
    with pytest.raises(ConfigError, match="train.epochs=1, but 2 passes are done"):
        trained(tmp_path / "run", "train.epochs=1")


def test_the_last_checkpoint_and_the_binary_file_can_be_left_out(tmp_path):
    options = "run.final_checkpoint=false", "run.checkpoint_minutes=0", "run.formats=kv"
    with make(tmp_path, *options) as trainer:
        save_config(trainer.config, tmp_path / "config.yaml")
        trainer.train()
        trainer.export(trainer.finish())
    assert latest(tmp_path / "checkpoints") is None
    assert {path.suffix for path in tmp_path.glob("vectors.*")} == {".kv", ".npy", ".sha256"}


@pytest.mark.parametrize("kernels", ["reference", "cpu"])
def test_export_frees_the_kernels(tmp_path, kernels):
    with make(tmp_path, "run.checkpoint_minutes=0", kernels=kernels) as trainer:
        trainer.train()
        used = weakref.ref(trainer.loop.step.kernels)
        save_config(trainer.config, tmp_path / "config.yaml")
        trainer.export(trainer.finish())
    assert used() is None


def test_whole_checkpoint_is_written_if_vectors_cannot_be(tmp_path, monkeypatch):
    monkeypatch.setattr(export, "_write_words", Mock(side_effect=OSError(28, "No space left")))
    with make(tmp_path) as trainer:
        trainer.train()
        with pytest.raises(OSError, match="No space left"):
            trainer.export(trainer.finish())
    saved = latest(tmp_path / "checkpoints")
    assert saved.state["epochs_done"] == 2
    assert_same(trained(tmp_path), trainer)


def test_an_unwanted_last_checkpoint_does_not_replace_one_that_fails(tmp_path, monkeypatch):
    """One by time is under way; it and the vectors find the disk full."""
    full = OSError(28, "No space left")
    monkeypatch.setattr(export, "save_run", Mock(side_effect=full))
    monkeypatch.setattr(checkpoint, "write_synced", Mock(side_effect=full))
    options = "run.final_checkpoint=false", "run.checkpoint_minutes=0"
    with make(tmp_path, *options) as trainer:
        trainer.train()
        trainer.checkpoints.save(trainer._final, copied=False)
        with pytest.raises(OSError, match="No space left"):
            trainer.export(trainer.finish())
    assert latest(tmp_path / "checkpoints") is None


def test_rows_that_have_moved_since_the_start_are_reported(tmp_path, caplog):
    caplog.set_level(logging.INFO, "w2v")
    stopped(tmp_path / "run", place="tight", stop_after=48)
    assert "rows moved" not in caplog.text
    again = trained(tmp_path / "run", place="tight")
    used, read, written = again._step.engine.stats
    words = WORDS * again.config.train.epochs - again._words_before
    assert used > read > 0 and 0 < again._words_before < words + again._words_before
    shown = f"{read:,} read ({read / used:.1%} of those used) and {written:,} written; "
    assert f"{shown}{read / words:.3f} reads a word" in caplog.text


def test_another_text_is_refused(tmp_path):
    stopped(tmp_path / "run", stop_after=10)
    other = make(tmp_path / "other")
    other.vocab.words[3] = "another"
    refused = pytest.raises(CheckpointError, match="step-00000010 .*another text .*corpus.path=")
    with refused, Trainer(other.loop, other.vocab, other.corpus, tmp_path / "run"):
        pass


def changes(content, at=()):
    """Yield the paths of all values in JSON."""
    entries = []
    if isinstance(content, dict):
        entries = content.items()
    if isinstance(content, list):
        entries = enumerate(content)
    for key, value in entries:
        yield (*at, key)
        yield from changes(value, (*at, key))


@each_case("value", [None, "x", [], {}, [[]], -1, 0.5, 1e300, 1 << 70, "missing"])
def test_a_manifest_of_other_values_is_refused_or_read(tmp_path, value):
    """Each value of a manifest, with its checksum, is replaced in turn."""
    run = tmp_path / "run"
    stopped(run, stop_after=10)
    file = run / "checkpoints" / "step-00000010" / "manifest.json"
    whole = json.loads(file.read_text())
    fresh = make(tmp_path / "other")
    for *path, key in list(changes(whole)):
        if path[:1] == ["config"]:
            continue  # which settings it had is compared elsewhere
        other = json.loads(json.dumps(whole))
        holder = other
        for name in path:
            holder = holder[name]
        holder[key] = value
        if value == "missing":
            del holder[key]
        file.write_text(sealed(other))
        with contextlib.suppress(ValueError), Trainer(fresh.loop, fresh.vocab, fresh.corpus, run):
            pass


@pytest.mark.parametrize("place", ["resident", pytest.param("gpu", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("saved", [False, True])
def test_numbers_that_are_not_finite_stop_the_run_and_are_not_written(tmp_path, saved, place):
    """The output row of the most frequent word is spoilt after step 51."""
    minutes = f"run.checkpoint_minutes={10 if saved else 0}"
    trainer = make(tmp_path, minutes, poisoned_step=52, place=place)
    with pytest.raises(Diverged) as stop, trainer:
        trainer.train()
    message = str(stop.value)
    assert "at step 52 (Adam, lr 0.0125)" in message and "the loss" in message
    good = f"{tmp_path}/checkpoints/step-00000034"
    command = f"w2v train --resume {tmp_path} optimizer.lr=0.0125"
    remedies = [good, command] if saved else ["no checkpoint yet"]
    assert all(part in message for part in remedies) and "\n" not in message
    assert trainer.loop.step.inputs["weight"].isfinite().all()
    assert trainer.loop.step.outputs["weight"][1:].isfinite().all()
    assert "NaN" not in (tmp_path / "metrics.jsonl").read_text()
    if saved:
        again = trained(tmp_path, minutes, place=place)
        assert_same(again, trained(tmp_path / "whole", minutes, place=place))


@pytest.mark.parametrize("name", ["SGD", "Adagrad", "Adadelta", "NAdam"])
def test_learning_rate_far_too_high_writes_only_finite_numbers(tmp_path, name):
    more = ["optimizer.lr=1e36", "optimizer.schedule=constant"]
    trainer = make(tmp_path, f"optimizer.name={name}", *more)
    with pytest.raises(Diverged, match=r"diverged at step \d+ .*no longer finite: the "), trainer:
        trainer.train()
    for table in (trainer.loop.step.inputs, trainer.loop.step.outputs):
        assert table.records_VR.isfinite().all()
