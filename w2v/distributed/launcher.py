"""Start ranks on this host, read torchrun's variables, and report errors.

An error that every rank raises has an attribute `failed_rank`, the rank where it came up, and is
printed once. This module imports torch only in jobs of several ranks.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import multiprocessing
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import synchronize
from typing import Any, NoReturn

from w2v.system import console
from w2v.system.files import error_message
from w2v.system.process import terminate_with_parent

CHECKPOINT_SECONDS = 4 * 3600  # that ranks may take from a signal to their end
NUMBERS = "WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT"
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

    torchrun's agent forks the ranks: they have torch, which is imported once. Signals go to all
    ranks, and one that fails ends the others.
    """
    # torch asks NVML for GPUs: a process that has opened the driver cannot fork others that use it.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # as torchrun does
    # Rank 0 and not the agent has the store, which NCCL needs to the end.
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.api import MultiprocessContext
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    gc.freeze()  # ranks need not look for garbage among torch's modules
    logging.getLogger("torch").setLevel(logging.CRITICAL)  # ranks report their errors themselves
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=count,
        run_id="w2v",
        max_restarts=0,
        start_method="fork",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr="localhost",  # the name of this host may not resolve
        logs_specs=DefaultLogsSpecs(os.devnull),
        signals_to_handle=",".join(signum.name for signum in _signals_to_handle()),
    )
    # The agent kills ranks 30 s after a signal; torch can be told otherwise from 2.13 on.
    close = MultiprocessContext._close

    def close_late(context: Any, death_sig: signal.Signals, timeout: int = 0) -> None:
        close(context, death_sig, CHECKPOINT_SECONDS)

    MultiprocessContext._close = close_late  # type: ignore[assignment, method-assign]
    try:
        elastic_launch(config, _rank)(os.getpid(), main, arguments)
    except SignalException as signaled:
        for process in multiprocessing.active_children():  # after a third signal
            process.kill()
        exit_now(128 + signaled.sigval)  # threads of the agent may still run
    except ChildFailedError as failed:
        status = failed.get_first_failure()[1].exitcode
        if status > 0:
            return status
        console.show(f"error: a rank was ended by signal {-status}", file=sys.stderr)
        return 2
    return 0


def _rank(parent: int, main: Callable[..., int | None], arguments: Sequence[Any]) -> int:
    """Run a function in this rank, forked by `start_ranks`; exit if it fails."""
    os.setpgid(0, 0)  # or the terminal would send Ctrl-C too, and two end a run at once
    del os.environ["TORCHELASTIC_RUN_ID"]  # the job is not restarted
    with default_signals():  # and not the agent's
        terminate_with_parent(parent)
        status = run(main, *arguments)

    # A rank that is killed in torch's own wait for the other ranks would leave the agent waiting.
    def wait(event: synchronize.Event) -> None:
        while not event.is_set():
            time.sleep(0.01)

    synchronize.Event.wait = wait  # type: ignore[assignment, method-assign]
    return status


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
    if not os.environ.get("TORCHELASTIC_ERROR_FILE"):
        return
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler

    get_error_handler().record_exception(error)


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
