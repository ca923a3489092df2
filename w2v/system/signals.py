"""Ctrl-C, SIGTERM and a closed terminal: the first stops the program where that is safe, a second ends it at once."""

from __future__ import annotations

import contextlib
import os
import signal
import stat
from collections.abc import Iterator
from types import FrameType
from typing import Any


class Signals:
    """While entered, SIGINT, SIGTERM and SIGHUP raise `SystemExit` with the status 130, 143 or 129; within `held` and `put_off`, the first
    only sets `status`."""

    def __init__(self) -> None:
        self.status = 0  # to exit with; 0: none came
        self._held = False
        self._before: dict[signal.Signals, Any] = {}  # handlers

    def __enter__(self) -> Signals:
        self._process = os.getpid()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if (
                signal.getsignal(number) is not signal.SIG_IGN
            ):  # as in the background of a script, and with nohup
                self._before[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *error: object) -> None:
        if error[0] is not SystemExit:  # else the program ends, at once if another signal comes
            for number, handler in self._before.items():
                signal.signal(number, handler)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """The block looks at `status` itself."""
        self._held = True
        try:
            yield
        finally:
            self._held = False

    @contextlib.contextmanager
    def put_off(self) -> Iterator[None]:
        """Raise at the end of the block, which may swallow what is raised in it, as imports do that try one thing and then another."""
        with self.held():
            yield
        if self.status:
            raise SystemExit(self.status)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.status or os.getpid() != self._process:  # a worker process has nothing to save
            os._exit(128 + number)
        self.status = 128 + number
        if number == signal.SIGHUP:
            _write_no_more_to_terminals()
        if not self._held:
            raise SystemExit(self.status)


def _write_no_more_to_terminals() -> None:
    """As what is written to one that is closed is an error."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for output in (1, 2):
        if stat.S_ISCHR(os.fstat(output).st_mode):
            os.dup2(nowhere, output)
