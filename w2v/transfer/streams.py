"""CUDA streams at little cost, and how long a stream waits for rows."""

from __future__ import annotations

import contextlib
import functools
from collections import deque
from collections.abc import Iterator

import torch


def current_stream() -> torch.cuda.Stream:
    """Return the stream that this thread's work goes to.

    torch.cuda.current_stream takes as long as launching a kernel; this takes a tenth.
    """
    return _stream(*torch._C._cuda_getCurrentStream(torch._C._cuda_getDevice()))


@functools.cache
def _stream(stream_id: int, device_index: int, device_type: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(
        stream_id=stream_id, device_index=device_index, device_type=device_type
    )


def on_stream(stream: torch.cuda.Stream | None) -> contextlib.AbstractContextManager:
    """Send the work of a block to a stream; without a GPU there is none."""
    return stream or contextlib.nullcontext()


class Waits:
    """Time that a stream has waited for moves, by events around each."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._open: deque[list[torch.cuda.Event]] = deque()
        self._reusable: list[list[torch.cuda.Event]] = []

    @contextlib.contextmanager
    def counted(self, device: torch.device, is_timed: bool = True) -> Iterator[None]:
        """Count the time that a GPU's current stream takes for the block."""
        if device.type == "cpu" or not is_timed:
            yield
            return
        stream = current_stream()
        if not self._reusable:
            self._reusable.append([torch.cuda.Event(enable_timing=True) for _ in range(2)])
        before, after = self._reusable.pop()
        before.record(stream)
        yield
        after.record(stream)
        self._open.append([before, after])
        self._collect()

    @property
    def seconds(self) -> float:
        """Seconds of all waits that are over."""
        over = (before.elapsed_time(after) for before, after in self._open if after.query())
        return self._seconds + sum(over) / 1000

    def _collect(self) -> None:
        while self._open and self._open[0][1].query():
            before, after = self._open.popleft()
            self._seconds += before.elapsed_time(after) / 1000
            self._reusable.append([before, after])
