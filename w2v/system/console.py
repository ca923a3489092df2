"""All output for users: what commands print, messages, and train.log.

Every line goes through `show` or the logger "w2v", which escape control characters: words, names
and settings of files from elsewhere could command a terminal.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import sys
import textwrap
import threading
from collections.abc import Iterator
from logging.handlers import MemoryHandler
from pathlib import Path
from typing import Any, TextIO

from w2v.system.files import one_line, printable
from w2v.system.process import escape_unencodable

log = logging.getLogger("w2v")
DETAILS, RESULTS, ERRORS = logging.DEBUG, logging.INFO + 5, logging.ERROR  # levels of messages
logging.addLevelName(RESULTS, "RESULT")
LABEL = 10  # columns of the name before a line of the plan
COLORS = {logging.WARNING: "\033[33m", logging.ERROR: "\033[31m"}
# Messages logged before there is a run folder, such as the plan; train.log begins with them.
_early = MemoryHandler(capacity=1000, flushLevel=logging.CRITICAL + 1)


def show(*lines: object, file: TextIO | None = None) -> None:
    """Print lines, to standard output by default."""
    text = "\n".join(str(line) for line in lines)
    print(printable(text, keep="\n\t"), file=file, flush=True)


class _Formatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record), keep="\n\t")


def escape_warnings() -> None:
    """Escape warnings of commands without a log, which go to standard error."""
    if logging.lastResort:
        logging.lastResort.setFormatter(_Formatter())


def log_to_console(level: int = logging.INFO) -> None:
    """Show messages of at least this level on standard output."""
    from tqdm import tqdm  # only here, as help would wait for it

    escape_unencodable()
    # tqdm's own lock is a semaphore that forked processes share: one that is killed while it prints
    # would never release it, and the others would wait forever at their next message.
    tqdm.set_lock(threading.RLock())
    _early.buffer.clear()
    log.handlers[:] = [_early]
    if sys.stdout:  # None if the parent process closed it
        console = _ConsoleHandler(level)
        console.setFormatter(_Formatter())
        log.addHandler(console)
    log.setLevel(ERRORS if level == ERRORS else DETAILS)  # train.log has the details too


@contextlib.contextmanager
def restored_log() -> Iterator[None]:
    """Restore the log after the block, for a program that has its own."""
    handlers, level = log.handlers[:], log.level
    try:
        yield
    finally:
        log.handlers[:] = handlers
        log.setLevel(level)


@contextlib.contextmanager
def log_to_file(path: Path, quiet: bool = False) -> Iterator[None]:
    """Append all messages to a file during the block, unless `quiet`.

    An error that ends the block is one of them.
    """
    handler = _FileHandler(os.devnull if quiet else path, encoding="utf-8")
    handler.setFormatter(_Formatter("%(asctime)s %(levelname)s %(message)s"))
    _early.setTarget(handler)
    _early.flush()
    log.removeHandler(_early)
    log.addHandler(handler)
    try:
        yield
    except Exception as error:  # which others print
        handler.handle(log.makeRecord(log.name, logging.ERROR, "", 0, one_line(error), (), None))
        raise
    finally:
        log.removeHandler(handler)
        handler.close()


def is_terminal(output: TextIO) -> bool:
    """Return whether this is a terminal that has a width, so not a pipe."""
    try:
        return output.isatty() and os.get_terminal_size(output.fileno()).columns > 0
    except (OSError, AttributeError):  # None if the parent process closed it
        return False


def hang(text: str, width: int) -> str:
    """Wrap lines between words, below the first word after their label."""
    indent = " " * LABEL
    wrap = textwrap.TextWrapper(width, subsequent_indent=indent, break_on_hyphens=False)
    wrap.break_long_words = False  # such as paths
    return "\n".join(line if len(line) <= width else wrap.fill(line) for line in text.split("\n"))


def progress_bar(**options: Any) -> Any:
    """Return tqdm's bar, as wide as the terminal and erased at its end."""
    from tqdm import tqdm

    return tqdm(dynamic_ncols=True, leave=False, **options)


class _FileHandler(logging.FileHandler):
    """Write train.log; training goes on if that fails."""

    def handleError(self, record: logging.LogRecord) -> None:
        if self.stream:
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.stream.fileno())
        log.warning(f"{self.baseFilename} cannot be written ({sys.exc_info()[1]}); it ends here")


class _ConsoleHandler(logging.Handler):
    """Print through tqdm, so that a message does not break the progress bar."""

    def emit(self, record: logging.LogRecord) -> None:
        from tqdm import tqdm

        output = sys.stdout
        text = self.format(record)
        if is_terminal(output):
            text = hang(text, shutil.get_terminal_size().columns)
        if record.levelno in COLORS and is_terminal(output) and not os.environ.get("NO_COLOR"):
            text = f"{COLORS[record.levelno]}{text}\033[0m"
        try:
            tqdm.write(text)
            output.flush()  # at once, into files and pipes too
        except OSError:
            # The reader has ended or its disk is full. Training goes on; train.log has everything.
            os.dup2(os.open(os.devnull, os.O_WRONLY), output.fileno())
