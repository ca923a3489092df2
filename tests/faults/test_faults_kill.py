"""Ctrl-C, SIGTERM, and kill -9 at any moment: the run goes on and ends with the same bits, and no checkpoint is ever invalid.

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
from w2v.training.checkpoint import Checkpoint, Checkpoints

ROOT = Path(__file__).parents[2]
KILLS = int(os.environ.get("W2V_KILLS", "3"))


@pytest.fixture(scope="module")
def arguments(tmp_path_factory):
    """A run of a thousand steps over a small text, deterministic, that saves as often as it can."""
    return saving_run(
        tmp_path_factory.mktemp("corpus"), 1_500, "train.epochs=3", "train.batch_size=64"
    )


def test_kill_at_random_moments(programs, arguments, tmp_path):
    started = time.monotonic()
    status, said = programs.run(*arguments, f"run.dir={tmp_path / 'whole'}")
    duration = time.monotonic() - started
    assert status == 0, said
    vectors = (run_folder(tmp_path / "whole") / "vectors.bin").read_bytes()
    curve = (run_folder(tmp_path / "whole") / "metrics.jsonl").read_text().splitlines()[-1]

    rng, kills, finished, seen, runs = random.Random(KILLS), 0, 0, set(), 0
    while kills < KILLS or not finished:
        folder = tmp_path / str(runs)
        begun = list(folder.glob("20*/config.yaml"))
        process = programs.start(
            *(["--resume", begun[0].parent] if begun else [*arguments, f"run.dir={folder}"])
        )
        if kills < KILLS:
            time.sleep(rng.uniform(0, 1.05 * duration))
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        status, said = programs.wait()
        assert status in (0, -9), said
        kills += status == -9
        for run in folder.glob("20*"):
            check_checkpoints(run)
            seen |= {path.name.partition("-")[0] for path in run.rglob("*")}
        if status == 0:
            (run,) = {path.parent for path in folder.glob("20*/vectors.bin")}
            assert (run / "vectors.bin").read_bytes() == vectors
            last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
            assert {key: last[key] for key in ("step", "words")} == {
                key: json.loads(curve)[key] for key in ("step", "words")
            }
            leftovers = {
                path.name
                for path in run.rglob("*")
                if path.name.endswith((".partial", ".part")) or ".saving" in path.name
            }
            assert not leftovers and len(list((run / "checkpoints").iterdir())) <= 2
            finished, runs = finished + 1, runs + 1
        elif not list(folder.glob("20*/config.yaml")):
            runs += 1  # killed before there was a run
    print(f"{kills} kills, {finished} runs finished")


def two_tables():
    return [Table(name, 256, 32, {}, {}, "cpu") for name in ("input", "output")]


def saves_at_each_step(folder):
    """Each table has four files, of which three of all eight are copied; all numbers are that of the step."""
    shards.FILE_BYTES, tables = 8 << 10, two_tables()
    keeper = Checkpoints(folder, tables, 3 * shards.FILE_BYTES)
    for step in itertools.count(1):
        for table in tables:
            table.records_VR.fill_(step)
        keeper.save({"step": step})


def test_kill_while_a_part_is_written_behind(tmp_path, monkeypatch):
    monkeypatch.setattr(shards, "FILE_BYTES", 8 << 10)
    rng, steps, halves = random.Random(KILLS), [], 0
    for folder in [tmp_path / str(number) for number in range(2 * KILLS)]:
        process = PROCESSES.Process(target=saves_at_each_step, args=(folder,))
        process.start()
        while not checkpoint.latest(folder):
            time.sleep(0.01)
        time.sleep(rng.uniform(0, 0.2))
        process.kill()
        process.join()
        halves += bool(list(folder.glob("*.partial")))
        saved, tables = checkpoint.latest(folder), two_tables()
        saved.load(tables)
        assert all((table.records_VR == saved.state["step"]).all() for table in tables)
        steps.append(saved.state["step"])
    print(
        f"{len(steps)} kills after steps {steps}, {halves} of them while a checkpoint was written"
    )


@pytest.mark.parametrize(
    "number, status", [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
def test_a_signal_saves_and_the_run_goes_on(programs, arguments, tmp_path, number, status):
    more = [
        *arguments,
        f"run.dir={tmp_path}",
        "run.checkpoint_minutes=0",
        "train.epochs=200",
        "run.log_seconds=1000",
    ]
    process = programs.start(*more)
    while not list(tmp_path.glob("20*/env.txt")):  # the last file before training
        time.sleep(0.01)
    time.sleep(0.3)
    os.kill(process, number)
    found, said = programs.wait()
    run = run_folder(tmp_path)
    assert found == status, said
    assert "stopping at step" in said and f"go on with   python train.py --resume {run}" in said
    (saved,) = check_checkpoints(run)
    steps, done = Checkpoint(saved).state["step"], Checkpoint(saved).state["epochs_done"]
    assert 0 < done < 200 and not (run / "vectors.bin").exists()
    found, said = programs.run(
        "--resume", "latest", f"run.dir={tmp_path}", f"train.epochs={math.ceil(done)}"
    )
    assert found == 0 and f"going on from {saved}, after {steps:,} steps" in said, said
    assert (run / "vectors.bin").exists()


def test_a_second_signal_ends_it_at_once_while_it_ends_by_the_first():
    code = "try:\n with Signals(): os.kill(os.getpid(), signal.SIGTERM)\nfinally: os.kill(os.getpid(), signal.SIGINT)"
    restored = "signal.signal(signal.SIGINT, signal.default_int_handler)"  # which a script's background ignores
    program = f"import os, signal\nfrom w2v.system.signals import Signals\n{restored}\n{code}"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (130, "")


def test_a_second_signal_ends_it_at_once(programs, arguments, tmp_path):
    process = programs.start(
        *arguments, f"run.dir={tmp_path}", "train.epochs=1000", "run.checkpoint_minutes=0"
    )
    while not list(tmp_path.glob("20*/train.log")):
        time.sleep(0.01)
    os.kill(process, signal.SIGTERM)
    os.kill(process, signal.SIGINT)
    status, said = programs.wait()
    assert status in (130, 143) and "Traceback" not in said, said


def test_a_signal_before_training_leaves_nothing_half_written(programs, arguments, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("some words that are read for a while " * 3_000_000)
    process = programs.start(
        *arguments,
        f"corpus.path={text}",
        f"corpus.data_dir={tmp_path / 'data'}",
        f"run.dir={tmp_path / 'runs'}",
    )
    while "reading" not in programs.output.read_text():
        time.sleep(0.01)
    os.kill(process, signal.SIGTERM)
    status, said = programs.wait()
    assert status == 143 and "Traceback" not in said, said
    assert not list(tmp_path.rglob("vocab.tsv")) and not (tmp_path / "runs").exists()


def test_two_processes_do_not_share_a_run(programs, arguments, tmp_path):
    from w2v.training import run_folder as runfolder

    run = tmp_path / "2026-run"
    run.mkdir()
    save_config(load_config([], arguments), run / "config.yaml")
    with runfolder.lock(run):
        status, said = programs.run("--resume", run)
    assert (
        status == 2
        and f"error: {run} is in use by process {os.getpid()}; wait for it" in said
        and said.count("\n") == 1
    )
    assert not checkpoint.latest(run / "checkpoints")
