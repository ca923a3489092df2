"""What the system gives this process: cores, memory, and its end."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import signal
import sys
from typing import NoReturn

MMAP_THRESHOLD, ARENA_MAX = -3, -8  # of malloc.h
LARGE = 1 << 18
PDEATHSIG = 1  # of prctl.h


def cores() -> int:
    """That this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def keep_memory_whole() -> None:
    """Have the C library, where it is glibc, give large arrays memory of their own, which the system has back when they are freed, and
    keep one heap for all threads: else freed arrays leave holes that nothing fills, in each heap."""
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        libc.mallopt(MMAP_THRESHOLD, LARGE)
        libc.mallopt(ARENA_MAX, 1)


def return_freed_memory() -> None:
    """Have the C library return what is free to the system, where it is glibc, which keeps most of it otherwise."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def end(status: int) -> NoReturn:
    """Exit, without a search for garbage among all that torch has made, which takes most of half a second."""
    gc.freeze()
    sys.exit(status)


def end_with_parent() -> None:
    """Have the system, where it is Linux, end this process by SIGTERM when the one that started it is gone, even if that was killed."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PDEATHSIG, signal.SIGTERM)
