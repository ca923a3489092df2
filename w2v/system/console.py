"""Messages on the console and in train.log."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import sys
from collections.abc import Iterator
from logging.handlers import MemoryHandler
from pathlib import Path

from tqdm import tqdm

log = logging.getLogger("w2v")
# Messages of before the run folder exists, which train.log begins with: the plan, for example.
_early = MemoryHandler(capacity=1000, flushLevel=logging.CRITICAL + 1)


def log_to_console(quiet: bool = False) -> None:
    """Show messages on standard output; only errors if `quiet`."""
    escape_unencodable()
    _early.buffer.clear()
    log.handlers[:] = [_early]
    if sys.stdout:  # None if the parent process closed it
        log.addHandler(_ConsoleHandler())
    log.setLevel(logging.ERROR if quiet else logging.INFO)


def escape_unencodable() -> None:
    r"""Escape characters that standard output cannot encode, as \u65e5."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


@contextlib.contextmanager
def log_to_file(path: Path, quiet: bool = False) -> Iterator[None]:
    """Append all messages to a file during the block, unless `quiet`."""
    handler = logging.FileHandler(os.devnull if quiet else path, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    _early.setTarget(handler)
    _early.flush()
    log.removeHandler(_early)
    log.addHandler(handler)
    try:
        yield
    finally:
        log.removeHandler(handler)
        handler.close()


class _ConsoleHandler(logging.Handler):
    """Print through tqdm, so that a message does not break the progress bar."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            tqdm.write(self.format(record))
            sys.stdout.flush()  # at once, into files and pipes too
        except OSError:
            # The reader has ended or its disk is full. Training goes on; train.log has everything.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
