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
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

PAUSE_SECONDS = 5.0  # in which torchrun sees which rank has died, before those that miss it end as well


class RankLost(RuntimeError):
    """Another rank has ended or does not answer; the message says which, as far as that can be known here."""


def started() -> bool:
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


def job() -> str:
    """What torchrun calls the job, or where it is, if it bears no name; empty without torchrun."""
    name = os.environ.get("TORCHELASTIC_RUN_ID", "")
    return ":".join(os.environ[key] for key in ("MASTER_ADDR", "MASTER_PORT")) if name == "none" else name


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
    if started():
        from torch.distributed.elastic.multiprocessing.errors import get_error_handler

        get_error_handler().record_exception(error)


def leave(status: int) -> NoReturn:
    """End without waiting for anything that a lost rank would have to answer."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    time.sleep(PAUSE_SECONDS)
    sys.stdout.flush()
    os._exit(status)


def recorded(main: Callable[..., int]) -> Callable[..., int]:
    """`main`, with the traceback of a bug in torchrun's summary; a rank on a CPU that is done leaves the others before Python ends."""
    if not started():
        return main
    import torch.distributed as dist
    from torch.distributed.elastic.multiprocessing.errors import record

    def leaving(*arguments: Any) -> int:
        status = main(*arguments)
        if status == 0 and dist.is_initialized() and dist.get_backend() == "gloo":
            dist.destroy_process_group()  # threads of Gloo that are left abort the process, once in a dozen times
        return status

    return record(leaving)
