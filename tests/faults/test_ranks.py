"""train.py as torchrun starts it: ranks that go on, that fail and that are killed; a job never hangs and never loses a checkpoint.

On two CPUs with Gloo, and on two GPUs with NCCL. `make test-faults` kills 20 times.
"""

import contextlib
import math
import os
import random
import signal
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from tests.support.forked import Programs
from tests.support.joined import Pool
from tests.support.saving import check_checkpoints, run_folder, saving_run
from w2v.distributed import launcher as torchrun
from w2v.training.checkpoint import Checkpoint

KILLS = int(os.environ.get("W2V_RANK_KILLS", "3"))
AS_IT_COMES = ["train.deterministic=false"]  # on GPUs by kernels made for several


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    if request.param == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip(f"needs 2 GPUs, and there are {torch.cuda.device_count()}")
    return request.param


@pytest.fixture(scope="module")
def programs(device, tmp_path_factory):
    """As ever, but that there they see the GPUs."""
    running = Programs(tmp_path_factory.mktemp("programs"), gpus=device == "cuda")
    yield running
    running.close()


@pytest.fixture(scope="module")
def arguments(device, tmp_path_factory):
    """A run of some steps over a small text, deterministic, that saves as often as it can."""
    more = "train.epochs=2", "train.batch_size=256", f"train.device={device}"
    return saving_run(tmp_path_factory.mktemp("corpus"), 750, *more)


def vectors(folder):
    return (run_folder(folder) / "vectors.bin").read_bytes()


@pytest.fixture(scope="module")
def whole(programs, arguments, tmp_path_factory):
    """The vectors of two ranks that nothing happened to, and how long they took."""
    folder, begun = tmp_path_factory.mktemp("whole"), time.monotonic()
    status, said = programs.run(
        *arguments, f"run.dir={folder}", "run.score_epochs=true", "train.held_out_words=0", ranks=2
    )
    assert status == 0 and said.count("trained 15,000 words") == said.count("run folder  ") == 1, (
        said
    )
    assert (
        all(said.count(f"rank {rank}    ") == 1 for rank in (0, 1))
        and said.count(" GB/s sent to the others") == 2
    ), said
    assert "destroy_process_group" not in said, said  # as NCCL warns where it was left out
    return vectors(folder), time.monotonic() - begun


def children(process):
    return [
        int(child) for child in Path(f"/proc/{process}/task/{process}/children").read_text().split()
    ]


def wait_for(process, what, seconds=60):
    end = time.monotonic() + seconds
    while not (found := what()) and time.monotonic() < end and Path(f"/proc/{process}").exists():
        time.sleep(0.01)
    return found


def started(programs, *arguments, **more):
    """The job's process, and those of its ranks once they are there."""
    job = programs.start(*arguments, **more)
    return job, wait_for(job, lambda: len(found := children(job)) == more["ranks"] and found)


def test_a_killed_rank_ends_the_job_and_it_goes_on(programs, arguments, tmp_path, whole):
    vectors_whole, duration = whole
    rng, kills, finished, runs = random.Random(KILLS), 0, 0, 0
    while kills < KILLS or not finished:
        folder = tmp_path / str(runs)
        begun = list(folder.glob("20*/config.yaml"))
        _, ranks = started(
            programs,
            *(["--resume", begun[0].parent] if begun else [*arguments, f"run.dir={folder}"]),
            ranks=2,
        )
        killed, moment = time.monotonic() + 600, kills < KILLS
        if moment:
            time.sleep(rng.uniform(0, duration))
            with contextlib.suppress(ProcessLookupError):
                os.kill(rng.choice(ranks), signal.SIGKILL)
                killed = time.monotonic()
        status, said = programs.wait()
        assert (
            time.monotonic() - killed < 60
            and status in (0, 1)
            and (status == 0 or "exitcode  : -9" in said)
        ), said
        kills += status
        for run in folder.glob("20*"):
            check_checkpoints(run, "step-*")
        if status == 0:
            assert vectors(folder) == vectors_whole
            names = [path.name for path in run_folder(folder).rglob("*")]
            assert not [
                name for name in names if name.endswith((".partial", ".part")) or ".rank-" in name
            ]
            assert len(list((run_folder(folder) / "checkpoints").iterdir())) == 2
            finished, runs = finished + 1, runs + 1
        elif not list(folder.glob("20*/config.yaml")):
            runs += 1  # killed before there was a run
    print(f"{kills} kills, {finished} runs finished")


def test_torchrun_starts_the_ranks_again_and_the_run_goes_on(programs, arguments, tmp_path):
    more = [*arguments, *AS_IT_COMES, "train.epochs=4", f"run.dir={tmp_path}"]
    job, ranks = started(programs, *more, ranks=2, restarts=1)
    wait_for(job, lambda: list(tmp_path.glob("20*/checkpoints/step-????????")))
    os.kill(ranks[1], signal.SIGKILL)
    status, said = programs.wait()
    assert (
        status == 0 and said.count("going on from") == 1 and len(vectors(tmp_path)) > 200 * 8 * 4
    ), said


@pytest.mark.parametrize("number, others", [(signal.SIGINT, 0), (signal.SIGTERM, 4)])
def test_a_signal_to_the_job_saves_and_other_ranks_go_on(
    programs, device, arguments, tmp_path, number, others
):
    others = others if device == "cpu" else min(others, torch.cuda.device_count())
    more = [
        *arguments,
        *AS_IT_COMES,
        f"run.dir={tmp_path}",
        "run.checkpoint_minutes=0",
        "train.epochs=500",
        "run.log_seconds=1000",
    ]
    job, _ = started(programs, *more, ranks=2)
    wait_for(job, lambda: list(tmp_path.glob("20*/metrics.jsonl")))
    time.sleep(0.5)
    os.kill(job, number)
    _, said = programs.wait()
    assert (
        said.count("stopping at step") == said.count("go on with   python train.py --resume") == 1
        and "rror" not in said
    ), said
    assert "destroy_process_group" not in said, said
    run = run_folder(tmp_path)
    (saved,) = (run / "checkpoints").iterdir()
    done = Checkpoint(saved).state["epochs_done"]
    assert 0 < done < 500 and Checkpoint(saved).ranks == 2
    found, said = programs.run(
        "--resume", run, f"train.epochs={math.floor(done) + 1}", ranks=others
    )
    assert found == 0 and f"going on from {saved}" in said and (run / "vectors.bin").exists(), said
    assert Checkpoint(max((run / "checkpoints").iterdir())).ranks == (others or 1)


@pytest.mark.parametrize(
    "more, words",
    [
        (
            ["train.seed=${local_rank}"],
            "error: train.seed is 0 for rank 0, but 1 for rank 1; start all ranks alike",
        ),
        (["train.epochs=0"], "error: train.epochs=0 is out of range; it must be at least 1"),
        (["corpus.path=none.txt"], "error: corpus.path='none.txt' is no file"),
        (["optimizer.lr=1e30"], "training diverged at step "),
    ],
    ids=["differ", "config", "text", "diverged"],
)
def test_errors_are_said_once_and_end_all_ranks(programs, arguments, tmp_path, more, words):
    status, said = programs.run(*arguments, f"run.dir={tmp_path}", *more, ranks=2)
    assert status == 1 and "exitcode  : 2" in said and "host  " in said, said
    said_so = [line for line in said.splitlines() if line.startswith("error: ") and words in line]
    assert len(said_so) == 1 or (words.startswith("training") and len(said_so) == 2), said


def test_torchrun_itself_leaves_what_its_parts_do(programs, device, arguments, tmp_path, whole):
    if device == "cuda":
        pytest.skip("there it is what starts the ranks anyway")
    status, said = programs.run(*arguments, f"run.dir={tmp_path}", ranks=2, forked=False)
    assert status == 0 and vectors(tmp_path) == whole[0], said


def stuck(ranks, folder):
    torchrun.PAUSE_SECONDS = 0.1
    sys.stderr = open(folder / "said.txt", "a")  # noqa: SIM115 - open until the process ends
    if ranks.rank:
        os._exit(1)
    threading.Event().wait()  # as for a GPU that waits for the other rank's


def test_a_rank_that_waits_for_its_gpu_hears_that_another_is_lost(tmp_path):
    pool, begun = Pool(2), time.monotonic()
    with pytest.raises(EOFError):
        pool.run(stuck, tmp_path)
    assert pool.close() == [2, 1] and time.monotonic() - begun < 30
    assert "another of 2 ranks is lost: " in (tmp_path / "said.txt").read_text()
