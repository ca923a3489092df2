"""How fast each link moves records of a table on this machine, found by moving some; and how long the computation waits for them."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator

import torch

from w2v.model.table import Storage, Table
from w2v.transfer.engine import Link

PROBE_BYTES = 256 << 20  # of a table that stands for a large one
MOVED_BYTES = 16 << 20  # at a time
COPIES = 8  # each way, at a time
SECONDS = 0.2  # each way


class Waits:
    """How long a stream has stood still for moves: events before and after each, which are looked at when they have passed."""

    def __init__(
        self, event: Callable[[], torch.cuda.Event] = lambda: torch.cuda.Event(enable_timing=True)
    ):
        self._event, self._seconds = event, 0.0
        self._open: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()
        self._passed: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    @contextlib.contextmanager
    def counted(self, stream: torch.cuda.Stream) -> Iterator[None]:
        """What the block has the stream do or wait for."""
        before, after = self._passed.pop() if self._passed else (self._event(), self._event())
        before.record(stream)
        yield
        after.record(stream)
        self._open.append((before, after))
        self._look()

    @property
    def seconds(self) -> float:
        """Of all waits that are over."""
        self._look()
        return self._seconds

    def _look(self) -> None:
        while self._open and self._open[0][1].query():
            before, after = self._open.popleft()
            self._seconds += before.elapsed_time(after) / 1000
            self._passed.append((before, after))


def rates(
    link: Link, storage: Storage, dim: int, dtype: torch.dtype, device: torch.device
) -> tuple[float, float]:
    """Bytes a second to the device and from it, for random records of `dim` elements of a table in that storage.

    Raises `MemoryError` or `ValueError` where such a table cannot be made.
    """
    record_bytes = dim * dtype.itemsize
    table = Table("probe", max(2, PROBE_BYTES // record_bytes), dim, {}, {}, storage, dtype)
    rows_U = (
        torch.randperm(table.rows, device=device)[: max(1, MOVED_BYTES // record_bytes)]
        .sort()
        .values
    )
    records_UR = torch.zeros(len(rows_U), table.width, dtype=dtype, device=device)
    to = _rate(lambda: link.read(table, rows_U, records_UR), records_UR.nbytes)
    return to, _rate(lambda: link.write(table, rows_U, records_UR), records_UR.nbytes)


def copies(device: torch.device) -> float:
    """Bytes a second of contiguous copies to the device and from it at once: what its link to the CPU can do at most."""
    on_gpu = device.type == "cuda"
    here, there = (
        [
            torch.empty(MOVED_BYTES, dtype=torch.uint8, device=place, pin_memory=pinned)
            for _ in range(2)
        ]
        for place, pinned in (("cpu", on_gpu), (device, False))
    )
    streams = [torch.cuda.Stream(device) if on_gpu else None for _ in range(2)]

    def move() -> None:
        for target, source, stream in (
            (there[0], here[0], streams[0]),
            (here[1], there[1], streams[1]),
        ):
            with torch.cuda.stream(stream):
                for _ in range(COPIES):
                    target.copy_(source, non_blocking=True)

    return _rate(move, 2 * COPIES * MOVED_BYTES)


def _rate(move: Callable[[], None], nbytes: int) -> float:
    """Bytes a second, where each call moves so many."""
    calls, start = -1, 0.0
    while calls < 1 or time.perf_counter() - start < SECONDS:
        if calls == 0:  # what came before was for warming up
            start = time.perf_counter()
        move()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        calls += 1
    return calls * nbytes / (time.perf_counter() - start)
