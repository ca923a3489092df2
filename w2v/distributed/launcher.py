"""Start ranks on this host, read torchrun's variables, and report errors.

An error that every rank raises has an attribute `failed_rank`, the rank where it came up, and is
printed once. This module does not import torch.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing import connection
from types import FrameType
from typing import Any, NoReturn

from w2v.system import console
from w2v.system.files import error_message
from w2v.system.process import ending_signals, terminate_with_parent

NUMBERS = "WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT"
REMEDY = "start ranks with torchrun, or unset WORLD_SIZE for one"
PAUSE_SECONDS = 5.0  # before a rank exits because of another one, which reports its error first


class RankLost(RuntimeError):
    """Another rank has exited or does not answer."""


def started() -> bool:
    """Return whether this process is one of several ranks."""
    return os.environ.get("WORLD_SIZE", "1") not in ("", "0", "1")


def number(name: str) -> int:
    """Return one of torchrun's numbers; 0 where it is not set."""
    value = os.environ.get(name, "")
    return int(value) if value.isdecimal() else 0


def start_ranks(count: int, main: Callable[..., int | None], *arguments: Any) -> int:
    """Run a function in each rank on this host; return the exit status.

    Ranks are forked before torch is imported, so that each opens its GPU meanwhile. Signals go to
    all ranks, of which the third kills them; a rank that fails ends the others.
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # as torchrun does
    reserved = socket.socket()
    # Rank 0 can listen there meanwhile, as it sets this too; others get no such port.
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reserved.bind(("localhost", 0))
    shared: dict[str, object] = {"WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}
    shared |= {"MASTER_ADDR": "localhost", "MASTER_PORT": reserved.getsockname()[1]}
    fork = multiprocessing.get_context("fork").Process
    ranks = []
    for rank in range(count):
        variables = shared | {"RANK": rank, "LOCAL_RANK": rank}
        ranks.append(fork(target=_rank, args=(os.getpid(), variables, main, arguments)))
    received: list[int] = []

    def forward(signum: int, frame: FrameType | None) -> None:
        received.append(signum)
        for process in running:
            assert process.pid, "all are started"
            # Not by methods of the process: their wait may be what the signal has interrupted.
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signum if len(received) < 3 else signal.SIGKILL)

    failed = 0  # status of the rank that fails first
    running = ranks
    with reserved, default_signals():
        for process in ranks:
            process.start()
        for signum in ending_signals():
            signal.signal(signum, forward)
        while running := [process for process in ranks if process.exitcode is None]:
            connection.wait([process.sentinel for process in running])
            statuses = [process.exitcode for process in ranks if process.exitcode]
            if statuses and not (failed or received):
                failed = min(statuses)  # a signal, if one has ended a rank, is the cause
                for process in running:
                    process.terminate()
    if received:
        return 128 + received[0]
    if failed < 0:
        console.show(f"error: a rank was ended by signal {-failed}", file=sys.stderr)
        return 2
    return failed


def _rank(
    parent: int,
    variables: Mapping[str, object],
    main: Callable[..., int | None],
    arguments: Sequence[Any],
) -> None:
    """Run a function in this rank, which `start_ranks` has forked, and exit."""
    os.setpgid(0, 0)  # or the terminal would send Ctrl-C too, and two end a run at once
    os.environ.update({name: str(value) for name, value in variables.items()})
    terminate_with_parent(parent)
    sys.exit(run(main, *arguments))


def require_environment() -> None:
    """Raise ValueError unless torchrun's variables are set and agree."""
    wrong = [name for name in NUMBERS if not os.environ.get(name, "").isdecimal()]
    if wrong:
        raise ValueError(
            f"WORLD_SIZE={os.environ['WORLD_SIZE']} is set, but these are no numbers: "
            f"{', '.join(wrong)}; {REMEDY}"
        )
    for count, name in ("WORLD_SIZE", "RANK"), ("LOCAL_WORLD_SIZE", "LOCAL_RANK"):
        if number(name) >= number(count):
            raise ValueError(
                f"{name}={os.environ[name]} must be below {count}={os.environ[count]}; "
                "ranks are numbered from 0"
            )
    if not os.environ.get("MASTER_ADDR"):
        raise ValueError(f"MASTER_ADDR is not set; {REMEDY}")


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
    handlers = {signum: signal.signal(signum, signal.SIG_DFL) for signum in ending_signals()}
    try:
        yield
    finally:
        for signum, handler in handlers.items():
            signal.signal(signum, handler)


def report_error(error: Exception, message: str) -> None:
    """Print the message, with the rank of the error unless all raise it."""
    rank = os.environ.get("RANK", "0")
    failed_rank = getattr(error, "failed_rank", None)
    # Name the rank: of an error of all ranks the one where it came up, else this one.
    if failed_rank:
        message += f" (rank {failed_rank})"
    elif started() and failed_rank is None:
        message = f"rank {rank} on {socket.gethostname()}: {message}"
    if rank == "0" or failed_rank is None:
        console.show(f"error: {message}", file=sys.stderr)
    else:
        # Rank 0 is ended as soon as this rank exits. Let it print the error first.
        time.sleep(PAUSE_SECONDS)


def run(main: Callable[..., int | None], *arguments: Any) -> int:
    """Return the exit status of `main`, and print its user error as one line.

    A rank that fails exits at once. Any other error is a bug and keeps its traceback.
    """
    status: Any  # of SystemExit
    try:
        status = main(*arguments) or 0
    except (ValueError, MemoryError, OSError) as error:
        report_error(error, error_message(error))
        status = 3 if isinstance(error, MemoryError) else 2
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
    if status and started():
        exit_now(status)
    return status


def exit_now(status: int) -> NoReturn:
    """Exit without Python's teardown.

    Gloo's threads would abort in it, and NCCL's would wait for other ranks.
    """
    sys.stdout.flush()
    os._exit(status)
