"""train.py under torchrun: ranks that finish, fail or are killed.

A job never hangs and never loses a checkpoint. Each test runs on two CPUs with Gloo and on two GPUs
with NCCL. `make test-faults` kills 20 ranks, on GPUs it alone does, and runs the torchrun command.
With W2V_RANKS=4 and W2V_SHARED_GPUS=1 four ranks run, on two GPUs as well.
"""

import contextlib
import math
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch

from tests.support.processes import ROOT
from tests.support.programs import Programs, is_alive
from tests.support.rank_processes import Pool
from tests.support.saving import check_checkpoints, run_folder, saving_run
from w2v.distributed import launcher
from w2v.distributed.ranks import ProcessGroup
from w2v.rows.checkpoint import Checkpoint

KILLS = int(os.environ.get("W2V_RANK_KILLS", "1"))
RANKS = int(os.environ.get("W2V_RANKS", "2"))
FUSED = ["train.deterministic=false"]  # on GPUs with the kernels made for several ranks


GPU = pytest.mark.gpu


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=GPU)])
def device(request):
    if request.param == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip(f"needs 2 GPUs, and there are {torch.cuda.device_count()}")
    return request.param


@pytest.fixture(scope="module")
def programs(programs, device, tmp_path_factory):
    """The programs of all tests; with GPUs, others that see them."""
    if device == "cpu":
        yield programs
        return
    with contextlib.closing(Programs(tmp_path_factory.mktemp("programs"), gpus=True)) as seeing:
        yield seeing


@pytest.fixture(scope="module")
def arguments(device, tmp_path_factory):
    """Arguments of a short deterministic run with many checkpoints."""
    more = "train.epochs=2", "train.batch_size=256", f"train.device={device}"
    return saving_run(tmp_path_factory.mktemp("corpus"), 750, *more)


def trains(folder):
    """Return whether a line is logged: before, there is nothing to save."""
    return any(file.stat().st_size for file in folder.glob("20*/metrics.jsonl"))


def training_ranks(programs, folder, *arguments):
    """Start ranks by --gpus; return job and processes, once they train."""
    options = "train.epochs=500", "run.log_seconds=0.1", f"run.dir={folder}"
    job = programs.start(*arguments, *options, "--gpus", RANKS, forked=True)
    programs.wait_for(lambda: trains(folder))
    return job, programs.ranks()


def vectors(folder):
    return (run_folder(folder) / "vectors.bin").read_bytes()


@pytest.fixture(scope="module")
def undisturbed(programs, device, arguments, tmp_path_factory):
    """The vectors of a run of some ranks without faults, and its seconds."""
    for _ in range(2 if device == "cuda" else 1):  # the first may compile kernels for a minute
        folder = tmp_path_factory.mktemp("undisturbed")
        more = f"run.dir={folder}", "run.score_epochs=true", "train.held_out_words=0"
        programs.start(*arguments, *more, ranks=RANKS)
        begun = time.monotonic()  # the first start also loads modules, for seconds
        status, output = programs.wait()
    assert status == 0, output
    assert output.count("run folder") == 1, output  # rank 0 alone writes to the console
    assert "destroy_process_group" not in output  # NCCL's warning when nobody called it
    return vectors(folder), time.monotonic() - begun


def start(programs, *arguments, ranks=RANKS, **more):
    """Start a job; return its process and those of its ranks."""
    job = programs.start(*arguments, ranks=ranks, **more)
    programs.wait_for(lambda: len(programs.ranks()) == ranks)
    return job, programs.ranks()


@pytest.mark.parametrize(
    "device", ["cpu", pytest.param("cuda", marks=[GPU, pytest.mark.slow])], indirect=True
)
def test_resuming_after_killed_ranks_ends_with_the_same_vectors(
    programs, arguments, tmp_path, undisturbed
):
    expected, duration = undisturbed
    rng = random.Random(KILLS)
    # Each pass of the loop starts or resumes a run, and may kill one of its ranks.
    kills = finished = runs = 0
    while kills < KILLS or not finished:
        folder = tmp_path / str(runs)
        configs = list(folder.glob("20*/config.yaml"))
        resume = ["--resume", configs[0].parent] if configs else None
        _, ranks = start(programs, *(resume or [*arguments, f"run.dir={folder}"]))
        killed_at = math.inf
        if kills < KILLS:
            time.sleep(rng.uniform(0, duration))
            with contextlib.suppress(ProcessLookupError):
                os.kill(rng.choice(ranks), signal.SIGKILL)
                killed_at = time.monotonic()
        status, output = programs.wait()
        assert time.monotonic() - killed_at < 60, output
        assert status == 0 or (status == 1 and "exitcode  : -9" in output), output
        kills += status
        for run in folder.glob("20*"):
            check_checkpoints(run, "step-*")
        if status == 0:
            run = run_folder(folder)
            assert vectors(folder) == expected
            assert not [path for path in run.rglob("*") if path.suffix in (".partial", ".part")]
            assert len(list((run / "checkpoints").iterdir())) == 2
            finished += 1
        if status == 0 or not list(folder.glob("20*/config.yaml")):
            runs += 1  # finished, or killed before there was anything to resume
    print(f"{kills} kills, {finished} runs finished")


def test_run_resumes_when_torchrun_restarts_its_ranks(programs, arguments, tmp_path):
    more = [*arguments, *FUSED, "train.epochs=4", f"run.dir={tmp_path}"]
    _, ranks = start(programs, *more, restarts=1)
    programs.wait_for(lambda: list(tmp_path.glob("20*/checkpoints/step-????????")))
    os.kill(ranks[1], signal.SIGKILL)
    status, output = programs.wait()
    assert status == 0, output
    assert len(list(tmp_path.glob("20*"))) == 1  # and not a new run
    assert len(vectors(tmp_path)) > 200 * 8 * 4


@pytest.mark.parametrize("number, ranks", [(signal.SIGINT, 0), (signal.SIGTERM, 4)])
def test_signal_to_the_job_saves_and_other_ranks_resume(
    programs, device, arguments, tmp_path, number, ranks
):
    ranks = ranks if device == "cpu" else min(ranks, torch.cuda.device_count())
    options = "run.checkpoint_minutes=0", "train.epochs=500", "run.log_seconds=0.1"
    job, _ = start(programs, *arguments, *FUSED, *options, f"run.dir={tmp_path}")
    programs.wait_for(lambda: trains(tmp_path))
    os.kill(job, number)
    _, output = programs.wait()
    assert output.count("--resume") == 1 and "rror" not in output, output
    assert "destroy_process_group" not in output, output
    run = run_folder(tmp_path)
    (saved,) = map(Checkpoint, (run / "checkpoints").iterdir())
    done = saved.state["epochs_done"]
    assert 0 < done < 500 and len(saved.state["samplers"]) == RANKS
    epochs = f"train.epochs={math.floor(done) + 1}"
    status, output = programs.run("--resume", run, epochs, ranks=ranks)
    assert status == 0 and str(saved.path) in output and (run / "vectors.bin").exists(), output
    last = Checkpoint(max((run / "checkpoints").iterdir()))
    assert len(last.state["samplers"]) == (ranks or 1)


@pytest.mark.parametrize(
    "setting, message, times",
    [
        ("train.seed=${local_rank}", "train.seed is 0 for rank 0, but 1 for rank 1", {1}),
        ("train.epochs=0", "train.epochs=0", {1}),
        ("--gpus=2", "--gpus and torchrun both start ranks", {1}),
        ("corpus.path=none.txt", "'none.txt'", {1}),
        ("optimizer.lr=1e30", "diverged at step", {1, 2}),  # ranks may notice on their own
    ],
)
def test_error_ends_all_ranks_and_is_printed_once(
    programs, arguments, tmp_path, setting, message, times
):
    status, output = programs.run(*arguments, f"run.dir={tmp_path}", setting, ranks=RANKS)
    assert status == 1 and "exitcode  : 2" in output and "host  " in output, output
    errors = [line for line in output.splitlines() if line.startswith("error: ")]
    assert len([line for line in errors if message in line]) in times, output


def test_dry_run_times_ranks_and_leaves_nothing(programs, arguments, tmp_path):
    its = *arguments, f"run.dir={tmp_path}", "train.batch_size=64", "--gpus", RANKS, "--dry-run"
    status, output = programs.run(*its, forked=True)
    assert status == 0 and len(re.findall(r"^time +about .* M words/s", output, re.M)) == 1, output
    assert not list(tmp_path.iterdir()), output


def test_option_gpus_starts_ranks(programs, arguments, tmp_path, undisturbed):
    its = *arguments, "--gpus", RANKS
    status, output = programs.run(*its, "train.epochs=0", forked=True)
    assert status == 2 and output.count("error: ") == 1, output
    programs.start(*its, f"run.dir={tmp_path}", forked=True)
    saved = f"20*/checkpoints/{'step-' + '?' * 8}"
    programs.wait_for(lambda: list(tmp_path.glob(saved)))
    os.kill(programs.ranks()[-1], signal.SIGKILL)
    status, output = programs.wait()
    assert status == 2 and "a rank was ended by signal 9" in output, output
    resumed = "--resume", run_folder(tmp_path), "--gpus", RANKS
    status, output = programs.run(*resumed, forked=True)
    assert status == 0 and vectors(tmp_path) == undisturbed[0], output
    stopped = tmp_path / "stopped"
    job, _ = training_ranks(programs, stopped, *arguments)
    os.kill(job, signal.SIGTERM)
    status, output = programs.wait()
    assert status == 143 and output.count("--resume") == 1 and "rror" not in output, output


# The other tests start ranks by torchrun's own agent, which forks them.
@pytest.mark.slow
def test_torchrun_command_gives_the_same_vectors(
    programs, device, arguments, tmp_path, undisturbed
):
    if device == "cuda":
        pytest.skip("the other tests start ranks by torchrun there")
    status, output = programs.run(*arguments, f"run.dir={tmp_path}", ranks=RANKS, forked=False)
    assert status == 0 and vectors(tmp_path) == undisturbed[0], output


def test_ranks_end_with_the_process_that_has_started_them(programs, arguments, tmp_path):
    job, ranks = training_ranks(programs, tmp_path, *arguments)
    os.kill(job, signal.SIGKILL)
    status, _ = programs.wait()
    end = time.monotonic() + 30
    while any(map(is_alive, ranks)):
        assert time.monotonic() < end
        time.sleep(0.01)
    output = programs.output.read_text()
    assert status == -signal.SIGKILL and output.count("--resume") == 1, output  # they have saved


def test_third_signal_ends_ranks_that_do_not_answer(programs, arguments, tmp_path):
    job, ranks = training_ranks(programs, tmp_path, *arguments)
    for rank in ranks:
        os.kill(rank, signal.SIGSTOP)
    for _ in range(3):  # ranks that answer save at the first, and end at once at the second
        assert all(map(is_alive, ranks))
        os.kill(job, signal.SIGINT)
        time.sleep(0.2)
    status, output = programs.wait()
    assert status == 130 and not any(map(is_alive, ranks)) and "rror" not in output, output


ENDING_RANK = """
import os, signal, socket, sys
from w2v.distributed import launcher
parent, waitpid = os.getpid(), os.waitpid

def interrupted(process, options):
    found = waitpid(process, options)
    if found[0] and os.getpid() == parent:
        os.waitpid = waitpid
        signal.raise_signal(signal.SIGTERM)
    return found

def main():
    with socket.socket() as other:
        try:
            other.bind(("", int(os.environ["MASTER_PORT"])))
        except OSError as error:
            print(error.strerror, flush=True)

os.waitpid = interrupted
sys.exit(launcher.start_ranks(1, main))
"""


def test_a_signal_just_when_a_rank_ends_and_a_port_that_others_want():
    command = [sys.executable, "-c", ENDING_RANK]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=30)
    expected = (143, "Address already in use\n", "")
    assert (done.returncode, done.stdout, done.stderr) == expected


def test_hosts_that_do_not_connect_are_told_to_name_the_network():
    group = object.__new__(ProcessGroup)
    group.size = 4
    refused = "Gloo connectFullMesh failed with timed out connecting, remote=[127.0.0.1]:28045"
    named = pytest.raises(launcher.RankLost, match="127.0.0.1.*GLOO_SOCKET_IFNAME")
    with named, group._raising_rank_lost():
        raise RuntimeError(refused)


def wait_forever(ranks, folder):
    """Exit on rank 1; on rank 0, wait as for a GPU that waits for rank 1."""
    launcher.PAUSE_SECONDS = 0.1
    sys.stderr = open(folder / "stderr.txt", "a")  # noqa: SIM115 - open until the process ends
    if ranks.rank:
        os._exit(1)
    threading.Event().wait()


def test_rank_that_waits_for_its_gpu_exits_when_another_is_lost(tmp_path):
    pool, begun = Pool(2), time.monotonic()
    with pytest.raises(EOFError):
        pool.run(wait_forever, tmp_path)
    assert pool.close() == [2, 1] and time.monotonic() - begun < 30
    assert "another of 2 ranks is lost: " in (tmp_path / "stderr.txt").read_text()
