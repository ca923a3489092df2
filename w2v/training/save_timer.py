"""When a run saves its checkpoints."""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Iterator

log = logging.getLogger("w2v")
EPOCH_SECONDS = 60.0  # at the end of an epoch, save if the last checkpoint is older
LONG_SECONDS = 1.0  # training may wait this long for a checkpoint without a message
MOST_SHARE = 0.1  # of wall time that longer waits may take


class SaveTimer:
    """Time-based checkpointing; blocking saves take at most 10 % of wall time.

    minutes: between two checkpoints; 0 for none by time.
    """

    def __init__(self, minutes: float):
        self.saves = 0  # checkpoints that were due: made or skipped
        self._minutes = minutes
        self._last = time.monotonic()
        self._waited = 0.0  # seconds for the last save, if that was long

    def due(self, longest: float = math.inf) -> bool:
        """Return whether a checkpoint is due; `longest` bounds the pause.

        It is later if saving takes long, and never if `minutes` is 0.
        """
        pause = max(min(60 * self._minutes, longest), self._waited / MOST_SHARE)
        return self._minutes > 0 and time.monotonic() - self._last >= pause

    def skip(self) -> None:
        """Skip a checkpoint that is due; wait for the next interval."""
        self.saves += 1
        self._last = time.monotonic()

    @contextlib.contextmanager
    def saving(self) -> Iterator[None]:
        """Time the save in the block, and log a long one."""
        began = time.monotonic()
        yield
        self.saves += 1
        self._last = time.monotonic()
        seconds = self._last - began
        self._waited = 0.0
        if seconds > LONG_SECONDS:
            self._waited = seconds
            minutes = max(self._minutes, seconds / MOST_SHARE / 60)
            waited = f"training waited {seconds:.1f} s for this checkpoint"
            log.info(f"saving    {waited}; the next comes {minutes:.1f} minutes later")
