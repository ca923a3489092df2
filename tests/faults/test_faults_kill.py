"""Runs that get signals or SIGKILL resume; no checkpoint is ever invalid.

`make test-faults` kills 50 times.
"""

import contextlib
import itertools
import json
import math
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.joined import PROCESSES
from tests.support.saving import check_checkpoints, run_folder, saving_run
from w2v.config import load_config, save_config
from w2v.model.table import Table
from w2v.training import checkpoint, shards
from w2v.training import run_folder as run_folders
from w2v.training.checkpoint import Checkpoint, Checkpoints

ROOT = Path(__file__).parents[2]
KILLS = int(os.environ.get("W2V_KILLS", "2"))


@pytest.fixture(scope="module")
def arguments(tmp_path_factory):
    """Arguments of a deterministic run that saves as often as it can."""
    folder = tmp_path_factory.mktemp("corpus")
    return saving_run(folder, 700, "train.epochs=2", "train.batch_size=64")


def test_kills_at_random_moments(programs, arguments, tmp_path):
    began = time.monotonic()
    status, output = programs.run(*arguments, f"run.dir={tmp_path / 'whole'}")
    duration = time.monotonic() - began
    assert status == 0, output
    whole = run_folder(tmp_path / "whole")

    rng, kills, finished, attempt = random.Random(KILLS), 0, 0, 0
    while kills < KILLS or not finished:
        folder = tmp_path / str(attempt)
        begun = [path.parent for path in folder.glob("20*/config.yaml")]
        command = ["--resume", begun[0]] if begun else [*arguments, f"run.dir={folder}"]
        began = time.monotonic()
        process = programs.start(*command)
        if kills < KILLS:
            time.sleep(rng.uniform(0, 1.05 * duration))
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        status, output = programs.wait()
        assert status in (0, -signal.SIGKILL), output
        kills += status != 0
        for run in folder.glob("20*"):
            check_checkpoints(run)
        if status == 0:
            (run,) = {path.parent for path in folder.glob("20*/vectors.bin")}
            assert_finished_like(run, whole)
            finished += 1
            # The first run may have waited for kernels to be compiled.
            duration = min(duration, time.monotonic() - began)
        # A finished run is done with, and one killed before its settings were written never began.
        if status == 0 or not list(folder.glob("20*/config.yaml")):
            attempt += 1
    print(f"{kills} kills, {finished} runs finished")


def assert_finished_like(run, whole):
    """Both runs end with the same vectors, and nothing temporary is left."""
    assert (run / "vectors.bin").read_bytes() == (whole / "vectors.bin").read_bytes()
    ends = []
    for folder in (run, whole):
        lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
        ends.append([(line["step"], line["words"]) for line in lines if "step" in line][-1])
    assert ends[0] == ends[1]
    names = [path.name for path in run.rglob("*")]
    assert not [name for name in names if name.endswith((".partial", ".part")) or ".saving" in name]
    assert len(list((run / "checkpoints").iterdir())) <= 2


def make_tables():
    return [Table(name, 256, 32, {}, {}, "cpu") for name in ("input", "output")]


def save_at_each_step(folder):
    """Save without end; three of the tables' eight files are copied first."""
    shards.FILE_BYTES, tables = 8 << 10, make_tables()
    keeper = Checkpoints(folder, tables, 3 * shards.FILE_BYTES)
    for step in itertools.count(1):
        for table in tables:
            table.records_VR.fill_(step)
        keeper.save({"step": step})


def test_kills_while_copies_are_written(tmp_path, monkeypatch):
    monkeypatch.setattr(shards, "FILE_BYTES", 8 << 10)
    rng, partial = random.Random(KILLS), 0
    for number in range(2 * KILLS):
        folder = tmp_path / str(number)
        process = PROCESSES.Process(target=save_at_each_step, args=(folder,))
        process.start()
        while not checkpoint.latest(folder):
            time.sleep(0.01)
        time.sleep(rng.uniform(0, 0.2))
        process.kill()
        process.join()
        partial += bool(list(folder.glob("*.partial")))
        saved, tables = checkpoint.latest(folder), make_tables()
        saved.load(tables)
        assert all((table.records_VR == saved.state["step"]).all() for table in tables)
    print(f"{2 * KILLS} kills, {partial} of them while a checkpoint was written")


def wait_for(folder, pattern):
    end = time.monotonic() + 60
    while not list(folder.glob(pattern)):
        assert time.monotonic() < end, f"no {pattern}"
        time.sleep(0.01)


@pytest.mark.parametrize(
    "number, status", [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
def test_signal_saves_and_the_run_goes_on(programs, arguments, tmp_path, number, status):
    long = ["run.checkpoint_minutes=0", "train.epochs=200", "run.log_seconds=1000"]
    process = programs.start(*arguments, f"run.dir={tmp_path}", *long)
    wait_for(tmp_path, "20*/env.txt")  # the last file before training
    time.sleep(0.3)
    os.kill(process, number)
    found, output = programs.wait()
    run = run_folder(tmp_path)
    assert found == status, output
    assert "stopping at step" in output and f"w2v train --resume {run}" in output
    (saved,) = check_checkpoints(run)
    state = Checkpoint(saved).state
    assert 0 < state["epochs_done"] < 200 and not (run / "vectors.bin").exists()
    epochs = f"train.epochs={math.ceil(state['epochs_done'])}"
    found, output = programs.run("--resume", "latest", f"run.dir={tmp_path}", epochs)
    assert found == 0 and f"resuming from {saved}, after {state['step']:,} steps" in output, output
    assert (run / "vectors.bin").exists()


def test_second_signal_ends_the_program_at_once(programs, arguments, tmp_path):
    long = ["train.epochs=1000", "run.checkpoint_minutes=0"]
    process = programs.start(*arguments, f"run.dir={tmp_path}", *long)
    wait_for(tmp_path, "20*/train.log")
    os.kill(process, signal.SIGTERM)
    os.kill(process, signal.SIGINT)
    status, output = programs.wait()
    assert status in (130, 143) and "Traceback" not in output, output


SECOND_SIGNAL = """
import os, signal
from w2v.system.process import Signals
signal.signal(signal.SIGINT, signal.default_int_handler)  # scripts in the background ignore it
try:
    with Signals():
        os.kill(os.getpid(), signal.SIGTERM)
finally:
    os.kill(os.getpid(), signal.SIGINT)
"""


def test_second_signal_counts_while_the_program_ends_by_the_first():
    command = [sys.executable, "-c", SECOND_SIGNAL]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (130, "")


def test_signal_before_training_leaves_nothing_half_written(programs, arguments, tmp_path):
    text, data, runs = tmp_path / "text.txt", tmp_path / "data", tmp_path / "runs"
    text.write_text("some words that are read for a while " * 1_000_000)
    paths = [f"corpus.path={text}", f"corpus.data_dir={data}", f"run.dir={runs}"]
    process = programs.start(*arguments, *paths)
    while "reading" not in programs.output.read_text():
        time.sleep(0.01)
    os.kill(process, signal.SIGTERM)
    status, output = programs.wait()
    assert status == 143 and "Traceback" not in output, output
    assert not list(tmp_path.rglob("vocab.tsv")) and not runs.exists()


def test_two_processes_do_not_share_a_run(programs, arguments, tmp_path):
    run = tmp_path / "2026-run"
    run.mkdir()
    save_config(load_config([], arguments), run / "config.yaml")
    with run_folders.lock(run):
        status, output = programs.run("--resume", run)
    expected = f"error: {run} is in use by process {os.getpid()}; wait for it"
    assert status == 2 and output.splitlines()[-1].startswith(expected), output
    assert "Traceback" not in output
    assert not checkpoint.latest(run / "checkpoints")
