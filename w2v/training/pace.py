"""When a checkpoint by time is due: so many minutes after the last, and later where that one has held training up for long."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager

log = logging.getLogger("w2v")
HELD_SECONDS = 1.0  # that a checkpoint may hold training up without a word
HELD_SHARE = 0.1  # of the time, at most, for checkpoints by time that hold it up for longer


class Pace:
    """Counts the checkpoints of a run and the seconds for which they have held training up; minutes: between two by time, 0 for none."""

    def __init__(self, minutes: float):
        self.saves = 0
        self._minutes, self._saved_at = minutes, time.monotonic()
        self._held, self._held_in_all, self._said = (
            0.0,
            0.0,
            HELD_SECONDS / 2,
        )  # by the last one, if that was long; by all; when last said

    @property
    def due(self) -> bool:
        return self._minutes > 0 and time.monotonic() - self._saved_at >= max(
            60 * self._minutes, self._held / HELD_SHARE
        )

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Count the block, which saves; and say how long that took from training where it is long, and again when it has doubled."""
        began = time.monotonic()
        yield
        self._saved_at, self.saves = time.monotonic(), self.saves + 1
        seconds = self._saved_at - began
        self._held, self._held_in_all = (
            seconds if seconds > HELD_SECONDS else 0.0,
            self._held_in_all + seconds,
        )
        if self._held > 2 * self._said:
            self._said, apart = self._held, self._held / HELD_SHARE / 60
            later = (
                f"; the next by time comes {apart:.1f} minutes later"
                if apart > self._minutes
                else ""
            )
            log.info(f"saving    this checkpoint held training up for {seconds:.1f} s{later}")

    def sum_up(self) -> None:
        """Say what all of them took, where that is long."""
        if self._held_in_all > HELD_SECONDS:
            log.info(f"checkpoints held training up for {self._held_in_all:.1f} s in all")
