"""Start ranks on this host, read torchrun's variables, and report errors.

An error that every rank raises has an attribute `failed_rank`, the rank where it came up, and is
printed once. This module imports torch only in jobs of several ranks.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

from w2v.system import console
from w2v.system.process import terminate_with_parent

TERMINATED_SECONDS = 30.0  # from a signal to the end of a rank, as torchrun has it
NUMBERS = "WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT"
PAUSE_SECONDS = 5.0  # before a rank exits because of another one, which reports its error first
listener: socket.socket | None = None  # of rank 0 of `fork_ranks`: the other ranks connect to it


class RankLost(RuntimeError):
    """Another rank has exited or does not answer."""


def started() -> bool:
    """Return whether this process is one of several ranks."""
    return os.environ.get("WORLD_SIZE", "1") not in ("", "0", "1")


def number(name: str) -> int:
    """Return one of torchrun's numbers; 0 where it is not set."""
    value = os.environ.get(name, "")
    return int(value) if value.isdecimal() else 0


def fork_ranks(count: int) -> int | None:
    """Fork the ranks of a job on this host, and wait for them.

    Ranks import torch in parallel; torchrun imports it before it starts them. Signals are forwarded
    to all ranks; one that fails ends the others. Returns None in each rank, and the exit status in
    the process that has started them.
    """
    global listener
    parent = os.getpid()
    running: set[int] = set()  # processes
    failed = 0  # exit status of the first one that failed
    signaled = False

    def send(signum: int) -> None:
        for process in running:
            # A signal may come just after `os.wait` has returned this process.
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signum)

    def forward(signum: int, frame: object) -> None:
        nonlocal signaled
        signaled = True
        send(signum)

    os.environ |= {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count)}
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # as torchrun does
    # Listens before any rank connects: one that is refused tries again after half a second.
    with socket.create_server(("localhost", 0)) as server:
        os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(server.getsockname()[1])}
        for rank in range(count):
            if not (process := os.fork()):
                os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                os.setpgid(0, 0)  # or the terminal would send Ctrl-C too, and two end a run at once
                terminate_with_parent(parent)
                if rank == 0:
                    listener = server.dup()
                return None
            running.add(process)
    for signum in _signals_to_handle():
        signal.signal(signum, forward)
    signal.signal(signal.SIGALRM, lambda signum, frame: send(signal.SIGKILL))
    while running:
        process, status = os.wait()
        running.discard(process)
        if status and not failed:
            failed = os.waitstatus_to_exitcode(status)
            if failed < 0:
                console.show(f"error: a rank was ended by signal {-failed}", file=sys.stderr)
            if not signaled:  # they are stopping by themselves
                send(signal.SIGTERM)
                signal.setitimer(signal.ITIMER_REAL, TERMINATED_SECONDS)
    return 2 if failed < 0 else failed


def require_environment() -> None:
    """Raise ValueError unless torchrun's variables are set and agree."""
    wrong = [name for name in NUMBERS if not os.environ.get(name, "").isdecimal()]
    if wrong:
        raise ValueError(
            f"WORLD_SIZE={os.environ['WORLD_SIZE']} is set, but these are no numbers: "
            f"{', '.join(wrong)}; start ranks with torchrun, or unset WORLD_SIZE for one"
        )
    for count, name in ("WORLD_SIZE", "RANK"), ("LOCAL_WORLD_SIZE", "LOCAL_RANK"):
        if number(name) >= number(count):
            raise ValueError(
                f"{name}={os.environ[name]} must be below {count}={os.environ[count]}; "
                "ranks are numbered from 0"
            )


def job() -> str:
    """Return the name or address of torchrun's job; "" without torchrun."""
    name = os.environ.get("TORCHELASTIC_RUN_ID", "")
    if name == "none":
        return f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    return name


def restarts() -> int:
    """Return how often torchrun has restarted the ranks after a failure."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


@contextlib.contextmanager
def on_all_ranks() -> Iterator[None]:
    """Mark a user error in the block as one that every rank raises."""
    try:
        yield
    except (ValueError, OSError) as error:
        failure: Any = error
        failure.failed_rank = 0
        raise


@contextlib.contextmanager
def default_signals() -> Iterator[None]:
    """Let signals end the process at once while it has nothing to save."""
    handlers = {signum: signal.signal(signum, signal.SIG_DFL) for signum in _signals_to_handle()}
    try:
        yield
    finally:
        for signum, handler in handlers.items():
            signal.signal(signum, handler)


def _signals_to_handle() -> list[signal.Signals]:
    """Return the signals that end a run, without those that are ignored."""
    # With nohup, or in the background of a script, signals stay ignored.
    ending = signal.SIGINT, signal.SIGTERM, signal.SIGHUP
    return [signum for signum in ending if signal.getsignal(signum) is not signal.SIG_IGN]


def report_error(error: Exception, message: str) -> None:
    """Print the message, and record the error for torchrun's summary."""
    rank = int(os.environ.get("RANK", "0"))
    failed_rank = getattr(error, "failed_rank", None)
    # Name the rank: of an error of all ranks the one where it came up, else this one.
    if failed_rank:
        message += f" (rank {failed_rank})"
    elif started() and failed_rank is None:
        message = f"rank {rank} on {socket.gethostname()}: {message}"
    if rank == 0 or failed_rank is None:
        console.show(f"error: {message}", file=sys.stderr)
    else:
        # Rank 0 is ended as soon as this rank exits. Let it print the error first.
        time.sleep(PAUSE_SECONDS)
    record(error)


def record(error: BaseException) -> None:
    """Record an error for torchrun's summary, if there is torchrun."""
    if "TORCHELASTIC_ERROR_FILE" not in os.environ:
        return
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler

    get_error_handler().record_exception(error)


def run(main: Callable[..., int], *arguments: Sequence[str]) -> int:
    """Return the exit status of `main`; exit at once if a rank fails."""
    status: Any
    try:
        status = main(*arguments)
    except BaseException as error:
        if not started():
            raise
        status = 1
        if isinstance(error, SystemExit):
            status = error.code
        elif isinstance(error, RankLost):
            status = 2
            report_error(error, str(error))
            time.sleep(PAUSE_SECONDS)  # the lost rank should be seen to fail first
        else:
            traceback.print_exc()
            record(error)
    if status and started():
        exit_now(status)
    return status


def exit_now(status: int) -> NoReturn:
    """Exit without Python's teardown.

    Gloo's threads would abort in it, and NCCL's would wait for other ranks.
    """
    sys.stdout.flush()
    os._exit(status)
