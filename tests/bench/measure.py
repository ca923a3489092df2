"""Times of GPU work, rates of transfers, and use of GPU memory."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from importlib.util import find_spec
from statistics import median

import torch
from torch import Tensor

Run = Callable[[int], object]  # called with 0, 1, 2, ... so that each repeat may use other rows

WARMUPS = 3
REPEATS = 11
CALLS = WARMUPS + REPEATS
SPIN_CYCLES = 2_000_000  # about a millisecond
POLL_SECONDS = 0.002


def require_gpu(benchmark: str) -> None:
    """Exit with one line where there is no GPU or no CuPy."""
    missing = "no CuPy" if torch.cuda.is_available() else "no GPU"
    if not torch.cuda.is_available() or find_spec("cupy") is None:
        sys.exit(f"{benchmark} needs a CUDA GPU and CuPy, and finds {missing}")


def milliseconds(run: Run, queued: bool = True) -> float:
    """Return the median time of a call, after a few calls to warm up.

    Args:
        run: the work to time.
        queued: let the GPU spin until `run` has returned, so that the CPU's time to launch the
            work does not count. Must be False where the CPU does part of the work.
    """
    times = []
    for i in range(CALLS):
        start = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        if queued:
            torch.cuda._sleep(SPIN_CYCLES)
        start.record()
        run(i)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return median(times[WARMUPS:])


def at_once(first: Run, second: Run) -> Run:
    """Return a run of both at once, `second` on a stream of its own."""
    side = torch.cuda.Stream()

    def run(i: int) -> None:
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            second(i)
        first(i)
        torch.cuda.current_stream().wait_stream(side)

    return run


def gigabytes(nbytes: float, ms: float) -> float:
    """Return a rate in GB/s (1e9 bytes a second)."""
    return nbytes / ms / 1e6


def row_sets(table_rows: int, count: int, device: str = "cuda") -> list[Tensor]:
    """Return disjoint sets of `count` random rows, at most one per call."""
    sets = min(CALLS, table_rows // count)
    return list(torch.randperm(table_rows, device=device)[: sets * count].view(sets, count))


class GpuMemory:
    """Watches how much memory of the GPU is in use, while entered.

    bytes: the most that has come to what was in use before, by any process; 0 without a GPU.
    """

    def __enter__(self) -> GpuMemory:
        self.bytes = 0
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        if torch.cuda.is_available():
            self._free = torch.cuda.mem_get_info()[0]
            self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._done.set()
        if self._thread.ident:
            self._thread.join()

    def _watch(self) -> None:
        while not self._done.wait(POLL_SECONDS):
            self.bytes = max(self.bytes, self._free - torch.cuda.mem_get_info()[0])
