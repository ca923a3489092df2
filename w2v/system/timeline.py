"""Where the time of a run goes, from the start of the process."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path


def process_start() -> float:
    """Return when this process began, on the clock of `time.monotonic`."""
    # The name, in brackets, may hold spaces; field 22 counts ticks since the machine started.
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    ticks = int(fields[22 - 3])
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return time.monotonic() - age


class Timeline:
    """Seconds of each phase since the process began.

    Their sum is the wall time: time counts for the phase that began last. The first phase is
    "starting".
    """

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._phase = "starting"
        self._since = process_start()

    def begin(self, phase: str) -> None:
        """Count the time from now on for this phase."""
        now = time.monotonic()
        self._seconds[self._phase] = self._seconds.get(self._phase, 0.0) + now - self._since
        self._phase = phase
        self._since = now

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the time of the block for this phase, then for the one before."""
        before = self._phase
        self.begin(name)
        try:
            yield
        finally:
            self.begin(before)

    def seconds(self) -> dict[str, float]:
        """Return the seconds of each phase so far, in order of first end."""
        self.begin(self._phase)
        return dict(self._seconds)
