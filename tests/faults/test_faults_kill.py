"""Runs that get signals or SIGKILL resume; no checkpoint is ever invalid.

`make test-faults` kills 50 times at random moments and 20 times in each phase on the CPU, and 20
times where tables are pinned on one and on two GPUs.
"""

import contextlib
import itertools
import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.support.processes import fork, run_python
from tests.support.programs import Programs
from tests.support.saving import check_checkpoints, run_folder, saving_run
from w2v.config import load_config, save_config
from w2v.rows import checkpoint
from w2v.rows.checkpoint import Checkpoint, Checkpoints
from w2v.rows.table import Table
from w2v.system.files import exclusive
from w2v.training import run_folder as run_folders

ROOT = Path(__file__).parents[2]
SIGNALS = int(os.environ.get("W2V_SIGNALS", "9"))  # moments
KILLS = int(os.environ.get("W2V_KILLS", "2"))
PHASE_KILLS = min(KILLS, 20)
TEST_KILLS = 5  # at most, so that the tests of a phase can share the cores

PAGED = ["train.device=cuda", "transfer.engine=mapped", "transfer.gpu_bytes=60%"]
PAGED += ["model.negative=2", "train.epochs=1"]


@pytest.fixture(scope="module")
def arguments(tmp_path_factory):
    """Arguments of a deterministic run that saves as often as it can."""
    folder = tmp_path_factory.mktemp("corpus")
    return saving_run(folder, 700, "train.epochs=2", "train.batch_size=64")


def on_gpus(number):
    marks = [pytest.mark.gpu, pytest.mark.alone, pytest.mark.slow]
    return pytest.param(number, marks=marks, id=f"{number}GPU")


@pytest.fixture(scope="module", params=[pytest.param(0, id="CPU"), on_gpus(1), on_gpus(2)])
def gpus(request):
    """How many GPUs train, with pinned tables; 0 for the CPU."""
    if request.param > torch.cuda.device_count():
        pytest.skip(f"needs {request.param} GPUs, and there are {torch.cuda.device_count()}")
    return request.param


@pytest.fixture(scope="module")
def job(gpus, programs, arguments, tmp_path_factory):
    """Programs, arguments, a finished run and the number of ranks."""
    with contextlib.ExitStack() as stack:
        if gpus:
            more = "train.batch_size=64", *PAGED
            arguments = saving_run(tmp_path_factory.mktemp("corpus"), 2000, *more, words=2000)
            programs = Programs(tmp_path_factory.mktemp("programs"), gpus=True)
            stack.callback(programs.close)
        folder, ranks = tmp_path_factory.mktemp("whole"), gpus if gpus > 1 else 0
        for _ in range(2):  # the first may wait for kernels to be compiled
            status, output = run_forked(programs, *arguments, f"run.dir={folder}", ranks=ranks)
            assert status == 0, output
        assert gpus != 1 or "lookahead window" in output, output
        yield programs, arguments, max(folder.iterdir()), ranks


def run_forked(programs, *arguments, ranks):
    programs.start(*arguments, ranks=ranks, forked=True)
    return programs.wait()


def parts(kills):
    """Return how many kills each test has, and from which one on."""
    each = [(first, min(TEST_KILLS, kills - first)) for first in range(0, kills, TEST_KILLS)]
    return pytest.mark.parametrize("first, kills", each)


def phases(run):
    """Return the seconds of each phase of a finished run."""
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return {line["phase"]: line["seconds"] for line in lines if "phase" in line}


def kill_and_resume(job, folder, kills, moment, prepare=lambda: None):
    """Kill runs and those that resume them; at last let one end.

    moment: Called with the folder of the runs; returns when it is time to kill.
    """
    programs, arguments, whole, ranks = job
    killed = finished = attempt = 0
    while killed < kills or not finished:
        runs = folder / str(attempt)
        begun = [path.parent for path in runs.glob("20*/config.yaml")]
        command = ["--resume", begun[0]] if begun else [*arguments, f"run.dir={runs}"]
        prepare()
        programs.start(*command, ranks=ranks, forked=True)
        if killed < kills:
            moment(runs)
        status, output = programs.kill() if killed < kills else programs.wait()
        assert status in (0, -signal.SIGKILL), output
        killed += status != 0
        for run in runs.glob("20*"):
            check_checkpoints(run)
        if status == 0:
            (run,) = {path.parent for path in runs.glob("20*/vectors.bin")}
            assert_finished_like(run, whole)
            finished += 1
        # A finished run is done with, and one killed before its settings were written never began.
        if status == 0 or not list(runs.glob("20*/config.yaml")):
            attempt += 1
    print(f"{killed} kills, {finished} runs finished")


@parts(KILLS)
def test_kills_at_random_moments(job, tmp_path, first, kills):
    rng, seconds = random.Random(first), sum(phases(job[2]).values())
    kill_and_resume(job, tmp_path, kills, lambda runs: time.sleep(rng.uniform(0, seconds)))


# What a run prints when a phase has begun; a checkpoint shows by its folder.
BEGINS = {
    "reading": "reading ",
    "set-up": "memory ",
    "training": "run  ",
    "saving": "run  ",
    "exporting": "trained ",
}


@parts(PHASE_KILLS)
@pytest.mark.parametrize("phase", BEGINS)
def test_kills_in_each_phase(job, tmp_path, phase, first, kills):
    programs, arguments, whole, _ = job
    rng, seconds = random.Random(first), phases(whole)[phase]
    cache = Path(arguments[1].partition("=")[2]) / "cache"

    def has_begun(runs):
        text = "\n" + programs.output.read_text(errors="ignore")
        partial = phase != "saving" or list(runs.glob("20*/checkpoints/*.partial"))
        return f"\n{BEGINS[phase]}" in text and partial

    def moment(runs):
        programs.wait_for(lambda: has_begun(runs), may_end=True)
        time.sleep(rng.uniform(0, seconds))

    def forget_text():
        if phase == "reading":
            shutil.rmtree(cache, ignore_errors=True)

    kill_and_resume(job, tmp_path, kills, moment, forget_text)
    assert not list(cache.glob("*.partial"))


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
    checkpoint.FILE_BYTES = 8 << 10
    tables = make_tables()
    keeper = Checkpoints(folder, tables, 3 * checkpoint.FILE_BYTES)
    for step in itertools.count(1):
        for table in tables:
            table.records_VR.fill_(step)
        keeper.save({"step": step})


def test_kills_while_copies_are_written(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "FILE_BYTES", 8 << 10)
    rng, partial = random.Random(KILLS), 0
    for number in range(2 * KILLS):
        folder = tmp_path / str(number)
        process = fork(save_at_each_step, folder)
        end = time.monotonic() + 60
        while not checkpoint.latest(folder):
            assert process.is_alive() and time.monotonic() < end
            time.sleep(0.01)
        time.sleep(rng.uniform(0, 0.2))
        process.kill()
        process.join()
        partial += bool(list(folder.glob("*.partial")))
        saved, tables = checkpoint.latest(folder), make_tables()
        saved.load(tables)
        assert all((table.records_VR == saved.state["step"]).all() for table in tables)
    print(f"{2 * KILLS} kills, {partial} of them while a checkpoint was written")


@pytest.mark.parametrize(
    "number, status", [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
def test_signal_saves_and_the_run_goes_on(programs, arguments, tmp_path, number, status):
    long = ["run.checkpoint_minutes=0", "train.epochs=200", "run.log_seconds=1000"]
    process = programs.start(*arguments, f"run.dir={tmp_path}", *long)
    programs.wait_for(lambda: list(tmp_path.glob("20*/env.txt")))  # the last file before training
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
    programs.wait_for(lambda: list(tmp_path.glob("20*/train.log")))
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
    programs.wait_for(lambda: "reading" in programs.output.read_text())
    os.kill(process, signal.SIGTERM)
    status, output = programs.wait()
    assert status == 143 and "Traceback" not in output, output
    assert not list(tmp_path.rglob("words.txt")) and not runs.exists()


SIGNAL_WITHIN = """
import signal, sys, train
from w2v.api import train as command
from w2v.training import plan
from w2v.training.trainer import Trainer

def signalled(*arguments):
    signal.raise_signal(signal.SIGTERM)
    return called(*arguments)

def join(config):
    print("joins other ranks", flush=True)
    return join_ranks(config)

place, *arguments = sys.argv[1:]
owner, name = {"loading": (command, "open_gpu"), "ending": (Trainer, "results")}[place]
called, join_ranks = getattr(owner, name), plan.join_ranks
setattr(owner, name, signalled)
plan.join_ranks = join
command.open_gpu = signalled if place == "loading" else print
sys.exit(train.main(arguments))
"""


def test_signal_before_and_after_training_loses_no_time_and_no_steps(arguments, tmp_path):
    """It does not wait for ranks that may have ended."""
    more = f"run.dir={tmp_path}", "run.checkpoint_minutes=0", "train.device=auto"
    done = run_python(SIGNAL_WITHIN, "loading", *arguments, *more)
    assert done.returncode == 143 and "joins" not in done.stdout, done.stdout + done.stderr
    done = run_python(SIGNAL_WITHIN, "ending", *arguments, *more)
    assert done.returncode == 143 and "joins" in done.stdout, done.stdout + done.stderr
    (saved,) = check_checkpoints(run_folder(tmp_path))
    assert Checkpoint(saved).state["epochs_done"] == 2


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


def test_a_program_that_hangs_fails_with_its_stack(programs, arguments, tmp_path):
    cache = tmp_path / "cache"
    cache.mkdir()
    with exclusive(cache, pytest.fail):
        programs.start(*arguments, f"corpus.data_dir={tmp_path}")
        programs.wait_for(lambda: "waiting for another run" in programs.output.read_text())
        with pytest.raises(AssertionError, match=r"files.py.* in exclusive"):
            programs.wait_for(lambda: False, seconds=0)


@pytest.mark.parametrize("victim", ["run", pytest.param("reader", marks=pytest.mark.slow)])
def test_a_run_or_the_process_that_reads_for_it_is_killed(arguments, tmp_path, victim):
    """In a run that nothing was loaded for, a forked process reads the text."""
    text, data = tmp_path / "text.txt", tmp_path / "data"
    text.write_text("some words that are read for a while " * 1_000_000)
    paths = [f"corpus.path={text}", f"corpus.data_dir={data}", f"run.dir={tmp_path}", "--dry-run"]
    command = [sys.executable, "train.py", *arguments, *paths]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as run:
        while not next(run.stdout).startswith("reading"):
            pass
        (reader,) = Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split()
        os.kill(run.pid if victim == "run" else int(reader), signal.SIGKILL)
        output = run.stdout.read()  # until both have ended
    assert run.returncode == (-signal.SIGKILL if victim == "run" else 0), output
    assert ("reading" in output) == bool(list(data.rglob("words.txt"))) == (victim == "reader")
    with exclusive(data / "cache", pytest.fail):  # the lock is free
        pass


def test_signals_in_the_first_half_second_end_with_their_status(programs, arguments, tmp_path):
    numbers = itertools.cycle([signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
    for delay, number in zip(np.linspace(0, 0.7, SIGNALS) ** 2, numbers, strict=False):
        process = programs.start(*arguments, f"run.dir={tmp_path}", "train.epochs=1000")
        time.sleep(delay)
        os.kill(process, number)
        status, output = programs.wait()
        # The system ends the program before it handles signals; shells say 128 + number then too.
        assert status in (-number, 128 + number), output
        assert "error" not in output and "Traceback" not in output, output
