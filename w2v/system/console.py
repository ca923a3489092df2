"""What the program says: on its standard output, above the progress bar, and in a run's train.log."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from tqdm import tqdm

log = logging.getLogger("w2v")


def log_to_console(quiet: bool = False) -> None:
    """Show the program's messages on standard output, above the progress bar where there is one; if `quiet`, only of what fails."""
    escape_what_it_lacks()
    handler = _AboveTheBar()
    handler.setFormatter(logging.Formatter("%(message)s"))
    log.handlers[:] = [handler] if sys.stdout else []  # who started the program may have closed it
    log.setLevel(logging.ERROR if quiet else logging.INFO)


def escape_what_it_lacks() -> None:
    """Have characters that standard output's encoding lacks written as escapes; they would be errors."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


@contextlib.contextmanager
def log_to_file(path: Path, quiet: bool = False) -> Iterator[None]:
    """Keep the program's messages, for as long as the block runs, with the time of each; not at all if `quiet`."""
    if quiet:
        yield
        return
    handler = logging.FileHandler(path, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    log.addHandler(handler)
    try:
        yield
    finally:
        log.removeHandler(handler)
        handler.close()


class _AboveTheBar(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        try:
            tqdm.write(self.format(record))
            sys.stdout.flush()  # into a file or a pipe at once, too
        except OSError:  # who read it has ended, or its disk is full, which is no reason to end training; train.log has it all
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
