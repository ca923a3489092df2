"""Ctrl-C and SIGTERM: the first stops the program where that is safe, a second ends it at once."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from types import FrameType
from typing import Any


class Signals:
    """While entered, SIGINT and SIGTERM raise `SystemExit` with the status 130 or 143; within `held`, the first only sets `status`."""

    def __init__(self) -> None:
        self.status = 0  # to exit with; 0: none came
        self._held = False
        self._before: dict[signal.Signals, Any] = {}  # handlers

    def __enter__(self) -> Signals:
        self._process = os.getpid()
        for number in (signal.SIGINT, signal.SIGTERM):
            if signal.getsignal(number) is not signal.SIG_IGN:  # as in the background of a script
                self._before[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *error: object) -> None:
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

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.status or os.getpid() != self._process:  # a worker process has nothing to save
            os._exit(128 + number)
        self.status = 128 + number
        if not self._held:
            raise SystemExit(self.status)
