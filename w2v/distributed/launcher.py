"""What torchrun says of the job that this process is a rank of, and what it is told when that fails; without torch until it is needed.

An error that all ranks have, since they have told each other or must fail alike, says `of` which rank it is and is printed once.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

PAUSE_SECONDS = 5.0  # in which torchrun sees which rank has died, or rank 0 what has failed, before the others end as well


class RankLost(RuntimeError):
    """Another rank has ended or does not answer; the message says which, as far as that can be known here."""


def started() -> bool:
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


def job() -> str:
    """What torchrun calls the job, or where it is, if it bears no name; empty without torchrun."""
    name = os.environ.get("TORCHELASTIC_RUN_ID", "")
    return (
        ":".join(os.environ[key] for key in ("MASTER_ADDR", "MASTER_PORT"))
        if name == "none"
        else name
    )


def starts() -> int:
    """How often torchrun has started the job's ranks before, as one of them had failed."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


@contextlib.contextmanager
def on_all() -> Iterator[None]:
    """An error in the block is one that every rank has."""
    try:
        yield
    except (ValueError, OSError) as error:
        failed: Any = error
        failed.of = 0
        raise


def say(error: Exception, words: str) -> None:
    """Print what has failed, and leave it for torchrun's summary, which names ranks and hosts."""
    rank, of = int(os.environ.get("RANK", "0")), getattr(error, "of", None)
    if started() and of is None:
        words = f"rank {rank} on {socket.gethostname()}: {words}"
    if rank == 0 or of is None:
        print(f"error: {words}" + (f" (rank {of})" if of else ""), file=sys.stderr, flush=True)
    else:
        time.sleep(
            PAUSE_SECONDS
        )  # torchrun ends rank 0 when another one has failed, which may be before it could say so
    if started():
        from torch.distributed.elastic.multiprocessing.errors import get_error_handler

        get_error_handler().record_exception(error)


@contextlib.contextmanager
def ended_by_signals() -> Iterator[None]:
    """A signal ends the process at once in the block, which has nothing to save, even while it waits for a rank that is gone."""
    heeded = [
        number
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        if signal.getsignal(number) is not signal.SIG_IGN
    ]
    before = {number: signal.signal(number, signal.SIG_DFL) for number in heeded}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def leave(lost: RankLost) -> NoReturn:
    """Say that a rank is lost, and end without waiting for anything that it would have to answer."""
    say(lost, str(lost))
    with ended_by_signals():
        time.sleep(PAUSE_SECONDS)
        _end(2)


def give_up(lost: RankLost) -> NoReturn:
    """End a process whose main thread has not heard that a rank is lost, since it waits for a GPU that waits for that rank."""
    time.sleep(
        2 * PAUSE_SECONDS
    )  # in which a main thread that has heard of it, or failed itself, says so and leaves
    say(lost, str(lost))
    _end(2)


def recorded(main: Callable[..., int]) -> Callable[..., int]:
    """`main`, with the traceback of a bug in torchrun's summary; a rank that fails ends without taking apart what others may hold up."""
    if not started():
        return main
    from torch.distributed.elastic.multiprocessing.errors import record

    def leaving(*arguments: Any) -> int:
        status: Any = 1
        try:
            status = record(main)(*arguments)
        except SystemExit as stop:
            status = stop.code
        except Exception:
            traceback.print_exc()
        if status:
            _end(status)
        return 0

    return leaving


def _end(status: int) -> NoReturn:
    """Without what Python takes apart: threads of Gloo that are left abort the process, and those of NCCL wait for other ranks."""
    sys.stdout.flush()
    os._exit(status)
