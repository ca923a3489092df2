"""A run that is stopped and goes on ends as one that was not stopped: bit for bit, for every optimizer, engine and storage."""

import json
import logging
import shlex
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.oracle.test_cached import HostLink
from w2v.config import ConfigError, load_config, save_config
from w2v.kernels.batch import Position
from w2v.model import optim
from w2v.model.optim import RowOptimizer
from w2v.model.sampler import Sampler
from w2v.model.table import Table, uniform
from w2v.system.signals import Signals
from w2v.text.vocab import Vocab
from w2v.training import checkpoint, pace
from w2v.training import run_folder as runfolder
from w2v.training.checkpoint import CheckpointError, latest
from w2v.training.metrics import Diverged
from w2v.training.step import FusedPipeline, Pipeline
from w2v.training.trainer import Trainer
from w2v.transfer.cache import Cached
from w2v.transfer.cache_mapped import CachedMapped
from w2v.transfer.mapped import Mapped
from w2v.transfer.paged import Paged
from w2v.transfer.resident import Resident
from w2v.transfer.staged import Staged

ROOT = Path(__file__).parents[2]
ROWS, DIM, STEPS = 60, 6, 200
GPU = pytest.mark.gpu
PLACES = {  # engine, storage of the tables, device
    "resident": (lambda tables: Resident(), "cpu", "cpu"),
    "paged": (lambda tables: Paged(HostSide()), "cpu", "cpu"),
    "roomy": (
        lambda tables: Cached(HostSide(), tables, 2 * ROWS, torch.device("cpu")),
        "cpu",
        "cpu",
    ),
    "tight": (lambda tables: Cached(HostSide(), tables, 108, torch.device("cpu")), "cpu", "cpu"),
    "file": (lambda tables: Cached(HostSide(), tables, 108, torch.device("cpu")), "mmap", "cpu"),
    "gpu": (lambda tables: Resident(), "cuda", "cuda"),
    "mapped": (lambda tables: CachedMapped(tables, 108, torch.device("cuda")), "pinned", "cuda"),
    "paged mapped": (lambda tables: Paged(Mapped()), "pinned", "cuda"),
    "staged": (lambda tables: Cached(Staged(), tables, 108, torch.device("cuda")), "cpu", "cuda"),
}
PLACE = [
    name if where[2] == "cpu" else pytest.param(name, marks=GPU) for name, where in PLACES.items()
]
COMBINATIONS = [  # all of them on a GPU; without one, all optimizers in one place and one optimizer in all places
    pytest.param(name, place, marks=[GPU] if device == "cuda" else [])
    for place, (*_, device) in PLACES.items()
    for name in optim.rowwise_optimizers()
    if "cuda" in device or place == "tight" or name == "NAdam"
]


class HostSide(HostLink):
    """Pages without slots, too."""

    def read(self, table, rows_U, records_SR, slots_U=None):
        super().read(table, rows_U, records_SR, slice(None) if slots_U is None else slots_U)

    def write(self, table, rows_U, records_SR, slots_U=None):
        super().write(table, rows_U, records_SR, slice(None) if slots_U is None else slots_U)


def make(
    folder,
    *more,
    place="resident",
    stop_after=None,
    dtype=torch.float32,
    steps_per_page=1,
    fused=False,
    poison=None,
):
    """A trainer over a small text; it gets SIGTERM after so many steps, and numbers that are not finite at step `poison`."""
    config = load_config(
        [],
        [
            "train.epochs=4",
            "train.batch_size=40",
            "optimizer.lr=0.05",
            "run.log_seconds=1000",
            *more,
        ],
    )
    engine, storage, device = PLACES[place]
    optimizer, rng = RowOptimizer(config.optimizer, fused), np.random.default_rng(4)
    ids = (rng.zipf(1.4, 2_000) % ROWS).astype(np.int32)
    vocab = Vocab(
        [f"w{i}" for i in range(ROWS)], np.bincount(ids, minlength=ROWS) + 1, len(ids), ROWS
    )
    folder.mkdir(exist_ok=True)
    tables = []
    for number, name in enumerate(("input", "output")):
        path = folder / f"{name}-{time.monotonic_ns()}" if storage == "mmap" else None
        tables.append(
            Table(name, ROWS, DIM, optimizer.states(DIM), optimizer.scalars, storage, dtype, path)
        )
        tables[-1].initialise(uniform(DIM, 0.3, number))
    offsets = np.arange(0, len(ids) + 1, 20)
    noise = vocab.noise_distribution(config.model.ns_exponent)
    sampler = Sampler(
        ids,
        offsets,
        np.ones(ROWS),
        noise,
        config.model,
        config.train.batch_size,
        1,
        torch.device(device),
    )
    pipeline = (FusedPipeline if fused else Pipeline)(
        *tables, engine(tables), optimizer, torch.device(device), steps_per_page
    )
    signals, step = Signals(), pipeline.step

    def stopping_step(planned, lr):
        result = step(planned, lr)
        if pipeline.steps == stop_after:
            signals.status = 143
        if poison is not None and pipeline.steps == poison - 1:
            tables[1]["weight"][0].fill_(torch.nan)
        return result

    pipeline.step = stopping_step
    return Trainer(config, vocab, len(ids), sampler, pipeline, folder, signals=signals)


def trained(folder, *more, **what):
    trainer = make(folder, *more, **what)
    trainer.train()
    return trainer


def stopped(folder, *more, **what):
    with pytest.raises(SystemExit) as stop:
        trained(folder, *more, **what)
    assert stop.value.code == 143


def content(trainer):
    tables = trainer.pipeline.inputs, trainer.pipeline.outputs
    return [table.records_VR.cpu() for table in tables], [table.scalars for table in tables]


def assert_same(ours, theirs):
    (our_records, our_scalars), (their_records, their_scalars) = content(ours), content(theirs)
    assert all(torch.equal(a, b) for a, b in zip(our_records, their_records, strict=True))
    assert our_scalars == their_scalars
    assert (
        ours.metrics.step == theirs.metrics.step == STEPS
        and ours.metrics.loss == theirs.metrics.loss
    )


@pytest.fixture(autouse=True)
def deterministic(monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
    torch.set_num_threads(threads)


@pytest.mark.parametrize("name, place", COMBINATIONS)
def test_100_steps_and_100_more_are_200(tmp_path, name, place):
    more, what = (
        [f"optimizer.name={name}", "optimizer.schedule=cosine", "optimizer.lr=0.002"],
        {"place": place, "steps_per_page": 3},
    )
    whole = trained(tmp_path / "whole", *more, **what)
    stopped(tmp_path / "run", *more, stop_after=100, **what)
    assert_same(trained(tmp_path / "run", *more, **what), whole)


@pytest.mark.parametrize("at", [1, 49, 50, 51, 137, 199])
def test_any_step_will_do_and_so_will_many(tmp_path, at):
    """50 steps are an epoch."""
    what = {"dtype": torch.bfloat16, "place": "tight", "steps_per_page": 4}
    whole = trained(tmp_path / "whole", **what)
    stopped(tmp_path / "run", stop_after=at, **what)
    if at < 190:
        stopped(tmp_path / "run", stop_after=7, **what)
    assert_same(trained(tmp_path / "run", **what), whole)


def test_the_command_to_go_on_with_can_be_pasted(tmp_path, caplog):
    with caplog.at_level(logging.INFO, "w2v"):
        stopped(tmp_path / "my run", stop_after=1)
    assert shlex.split(caplog.messages[-1])[-2:] == ["--resume", str(tmp_path / "my run")]


def test_a_folder_whose_user_has_not_yet_said_who_it_is(tmp_path):
    with runfolder.lock(tmp_path):
        (tmp_path / ".lock").write_text("")
        with pytest.raises(
            runfolder.RunFolderError, match="is in use by another process; wait for it"
        ):
            runfolder.lock(tmp_path)


@pytest.mark.gpu
def test_the_counts_of_fused_training_go_on(tmp_path):
    """Its sums have no fixed order, so the vectors agree within rounding."""
    what = {"place": "mapped", "fused": True, "steps_per_page": 3}
    whole = trained(tmp_path / "whole", **what)
    stopped(tmp_path / "run", stop_after=100, **what)
    again = trained(tmp_path / "run", **what)
    for ours, theirs in zip(content(again)[0], content(whole)[0], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)
    assert content(again)[1] == content(whole)[1] and again.metrics.step == STEPS


def test_checkpoints_by_time_and_by_epoch_change_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(
        pace, "HELD_SECONDS", float("inf")
    )  # a slow disk would put the next one off
    more = ["optimizer.name=Adam"]
    whole = trained(tmp_path / "whole", *more, "run.checkpoint_minutes=0")
    assert latest(tmp_path / "whole" / "checkpoints") is None
    often = make(tmp_path / "often", *more, "run.checkpoint_minutes=1e-9", place="tight")
    save = often.checkpoints.save
    often.checkpoints.save = lambda state: save(
        state, wait=True
    )  # as none falls due while the one before is written
    often.train()
    assert_same(often, whole)
    assert latest(tmp_path / "often" / "checkpoints").state["samplers"][0]["position"] == [
        3,
        1,
        18,
        50,
    ]
    by_epoch = trained(tmp_path / "epochs", *more)
    assert latest(tmp_path / "epochs" / "checkpoints").state["samplers"][0]["position"] == [
        3,
        0,
        0,
        0,
    ]
    assert_same(by_epoch, whole)


class Clock:
    """Time that passes only when it is told to."""

    def __init__(self):
        self.now = 0.0

    def monotonic(self):
        return self.now


@pytest.mark.parametrize(
    "held, at, said",
    [
        (0.1, [11, 22, 33, 44, 50, 61, 72, 83, 94], []),
        (
            50,
            [11, 22, 33, 44, 50, 61, 72, 83, 94],
            ["this checkpoint held training up for 50.0 s", "for 450.0 s in all"],
        ),
        (
            155,
            [11, 37, 50, 76],
            ["for 155.0 s; the next by time comes 25.8 minutes later", "for 620.0 s in all"],
        ),
    ],
)
def test_checkpoints_that_hold_training_up_take_a_tenth_of_the_time(
    tmp_path, monkeypatch, caplog, held, at, said
):
    """A step takes a minute, a checkpoint is due after 10.5, and an epoch has 50 steps."""
    clock, saved = Clock(), []
    monkeypatch.setattr(pace, "time", clock)
    trainer = make(tmp_path, "run.checkpoint_minutes=10.5", "train.epochs=2")
    step = trainer.pipeline.step

    def slow_step(planned, lr):
        clock.now += 60
        return step(planned, lr)

    def slow_save(state):
        clock.now += held
        saved.append(state["step"])

    trainer.pipeline.step, trainer.checkpoints.save = slow_step, slow_save
    with caplog.at_level(logging.INFO, "w2v"):
        trainer.train()
    assert saved == at
    messages = [message for message in caplog.messages if "held training up" in message]
    assert len(messages) == len(said) and all(
        message.endswith(words) for message, words in zip(messages, said, strict=True)
    ), messages


def test_the_curve_goes_on_without_a_gap_or_a_second_line(tmp_path):
    def curve(folder):
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        return [(line["step"], line["words"], line["loss"], line["lr"]) for line in lines]

    trained(tmp_path / "whole", "run.log_seconds=1e-9")
    stopped(tmp_path / "run", "run.log_seconds=1e-9", stop_after=100)
    (tmp_path / "run" / "metrics.jsonl").open("a").write(
        '{"step": 101, "wor'
    )  # as if it had been killed
    trained(tmp_path / "run", "run.log_seconds=1e-9")
    assert curve(tmp_path / "run") == curve(tmp_path / "whole")
    assert len(curve(tmp_path / "run")) == STEPS


def test_the_curve_in_tensorboard_goes_on_and_ends_with_the_scores(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    more = ["run.log_seconds=1e-9", "run.tensorboard=true"]
    stopped(tmp_path, *more, stop_after=100)
    for path in (tmp_path / "checkpoints").glob("step-00000100"):
        path.rename(tmp_path / "gone")  # as if it had been killed after step 50
    with make(tmp_path, *more) as trainer:
        save_config(trainer.config, tmp_path / "config.yaml")
        trainer.train()
        trainer.export()
    shown = EventAccumulator(str(tmp_path)).Reload()
    assert set(shown.Tags()["scalars"]) == {
        "training/loss",
        "training/lr",
        "training/words_per_s",
        "scores/analogies",
    }
    events, lines = (
        shown.Scalars("training/loss"),
        [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()],
    )
    assert (
        [event.step for event in events]
        == [line["step"] for line in lines]
        == list(range(1, STEPS + 1))
    )
    assert [event.value for event in events] == pytest.approx([line["loss"] for line in lines])
    assert [(event.step, event.value) for event in shown.Scalars("scores/analogies")] == [
        (STEPS, 0)
    ]


def test_a_finished_run_trains_nothing_and_more_epochs_go_on(tmp_path):
    first = trained(tmp_path / "run")
    first.checkpoints.save(first._final)
    assert_same(trained(tmp_path / "run"), first)
    longer = trained(tmp_path / "run", "train.epochs=5")
    assert longer.metrics.step == 250 and longer.sampler.position == Position(5)
    with pytest.raises(ConfigError, match="train.epochs=3, but 4 passes are done; give more"):
        trained(tmp_path / "run", "train.epochs=3")


def test_a_checkpoint_from_before_there_were_ranks_goes_on(tmp_path):
    whole = trained(tmp_path / "whole")
    stopped(tmp_path / "run", stop_after=70)
    file = tmp_path / "run" / "checkpoints" / "step-00000070" / "manifest.json"
    manifest = json.loads(file.read_text())
    file.write_text(
        checkpoint._sealed(manifest | {"position": manifest.pop("samplers")[0]["position"]})
    )
    assert_same(trained(tmp_path / "run"), whole)


def test_rows_that_moved_are_counted_through(tmp_path):
    whole = trained(tmp_path / "whole", place="paged")
    stopped(tmp_path / "run", place="paged", stop_after=70)
    assert trained(tmp_path / "run", place="paged")._final["rows"] == whole._final["rows"] and all(
        whole._final["rows"]
    )


def test_another_text_is_refused(tmp_path):
    stopped(tmp_path / "run", stop_after=10)
    trainer = make(tmp_path / "other")
    trainer.vocab.words[3] = "another"
    with pytest.raises(
        CheckpointError,
        match=r"step-00000010 was trained on another text or vocabulary than corpus.path=\S+ is now",
    ):
        Trainer(
            trainer.config,
            trainer.vocab,
            2_000,
            trainer.sampler,
            trainer.pipeline,
            tmp_path / "run",
        )


def test_settings_that_may_not_change_are_named(tmp_path):
    stopped(tmp_path, stop_after=10)
    save_config(make(tmp_path / "other").config, tmp_path / "config.yaml")
    runfolder.resumed(
        tmp_path,
        [],
        ["train.epochs=9", "run.log_seconds=3", "optimizer.lr=0.01", "transfer.engine=mapped"],
    )
    said = r"step-00000010 has other settings: model.window=3 instead of 5; train.seed=2 instead of 1; leave them as they were"
    with pytest.raises(ConfigError, match=said):
        runfolder.resumed(tmp_path, [], ["train.seed=2", "model.window=3", "train.epochs=9"])


@pytest.mark.parametrize("place", PLACE)
@pytest.mark.parametrize("saved", [False, True])
def test_numbers_that_are_not_finite_stop_the_run_and_are_not_written(tmp_path, saved, place):
    """The output row of the most frequent word is spoilt after step 60, and nothing else is written after that."""
    more = ["run.log_seconds=1000", f"run.checkpoint_minutes={10 if saved else 0}"]
    if place in ("resident", "gpu"):  # elsewhere rows are on their way
        trainer = make(tmp_path, *more, poison=61, place=place)
        with pytest.raises(Diverged) as stop:
            trainer.train()
        said = str(stop.value)
        assert said.startswith(
            "training diverged at step 61 (Adamax, lr 0.035): no longer finite: the loss, the gradients of the input "
        )
        assert "optimizer.warmup" in said and "\n" not in said
        good = f"the last good checkpoint is {tmp_path}/checkpoints/step-00000050: python train.py --resume {tmp_path} optimizer.lr=0.0125"
        assert (good if saved else "no checkpoint yet") in said
        assert (
            trainer.pipeline.inputs["weight"].isfinite().all()
            and trainer.pipeline.outputs["weight"][1:].isfinite().all()
        )
    if saved:
        assert_same(
            trained(tmp_path, *more, place=place), trained(tmp_path / "whole", *more, place=place)
        )


@pytest.mark.parametrize("name", ["SGD", "Adagrad", "Adadelta", "NAdam"])
def test_a_rate_far_too_high_writes_nothing_that_is_not_finite(tmp_path, name):
    trainer = make(
        tmp_path, f"optimizer.name={name}", "optimizer.lr=1e36", "optimizer.schedule=constant"
    )
    with pytest.raises(
        Diverged,
        match=r"diverged at step \d+ .*no longer finite: the .*; no such number was written",
    ):
        trainer.train()
    for table in (trainer.pipeline.inputs, trainer.pipeline.outputs):
        assert table.records_VR.isfinite().all()
