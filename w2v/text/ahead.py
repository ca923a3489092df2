"""A new text is read by a process of its own while this one imports torch, for which it would wait otherwise.

A thread would not do: importing keeps the interpreter's lock, which reading needs now and then.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
import sys
from collections.abc import Iterator
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from types import FrameType

from w2v.config import Config
from w2v.distributed import launcher as torchrun
from w2v.system import console
from w2v.system import process as host
from w2v.text.sources import CorpusError


@contextlib.contextmanager
def reading(config: Config, resume: str | None = None) -> Iterator[None]:
    """Have the text's ids in the cache when the block is left; raises what `opening.read` raises.

    Does nothing where torch is there already, where ranks have to agree which of them reads, where a run goes on, which says itself
    what its text is, or where a process cannot safely be forked.
    """
    if resume or torchrun.started() or "torch" in sys.modules or sys.platform != "linux":
        yield
        return
    forking = multiprocessing.get_context("fork")  # as there are no threads yet, and no GPU in use
    receiver, sender = forking.Pipe(duplex=False)
    reader = forking.Process(target=_read, args=(config, sender))
    reader.start()
    sender.close()
    try:
        yield
        if error := _told(reader, receiver, config.corpus.path):
            raise error
    except BaseException:
        reader.terminate()
        raise
    finally:
        reader.join()


def _told(reader: BaseProcess, receiver: Connection, path: str) -> Exception | None:
    """What went wrong, once the reader is done."""
    try:
        return receiver.recv()
    except EOFError:
        reader.join()
        ended = f"the process that read it ended with status {reader.exitcode}"
        return CorpusError(
            f"corpus.path={path}: {ended}; where that is -9, see that there is memory enough"
        )


def _read(config: Config, sender: Connection) -> None:
    """Tell `sender` what went wrong that a user can mend, or None."""
    signal.signal(signal.SIGTERM, _leave)
    for number in (signal.SIGINT, signal.SIGHUP):  # the program itself sees to them
        signal.signal(number, signal.SIG_IGN)
    host.end_with_parent()
    from w2v.text import opening  # and numpy and numba, but not torch

    console.log_to_console()
    error = None
    try:
        opening.read(config)
    except (ValueError, MemoryError, OSError) as failed:
        error = failed
    sender.send(error)


def _leave(number: int, frame: FrameType | None) -> None:
    """End, but leave nothing half-written, however often that is asked for."""
    signal.signal(number, signal.SIG_IGN)
    raise SystemExit(128 + number)
