"""This process: cores, heap, signals, exit, and the versions it runs on."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import multiprocessing
import os
import platform
import signal
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from w2v.system.files import error_message

# Constants of malloc.h and prctl.h.
M_MMAP_THRESHOLD = -3
M_ARENA_MAX = -8
PR_SET_PDEATHSIG = 1
LARGE_ARRAY_BYTES = 1 << 18
PACKAGES = "torch numpy numba gensim omegaconf safetensors cupy-cuda12x cupy-cuda13x".split()


def cores() -> int:
    """Return the number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _glibc(function: str, *arguments: int) -> None:
    """Call a function of glibc, where it is the C library."""
    with contextlib.suppress(OSError, AttributeError):
        getattr(ctypes.CDLL(None), function)(*arguments)


def limit_heap_fragmentation() -> None:
    """Make glibc map large arrays separately and use one heap for all threads.

    Otherwise freed arrays leave unused holes in the heap of each thread.
    """
    _glibc("mallopt", M_MMAP_THRESHOLD, LARGE_ARRAY_BYTES)
    _glibc("mallopt", M_ARENA_MAX, 1)


def return_freed_memory() -> None:
    """Return the free memory of glibc's heap to the system."""
    _glibc("malloc_trim", 0)


def terminate_with_parent() -> None:
    """Have Linux send SIGTERM to this process when its parent ends."""
    _glibc("prctl", PR_SET_PDEATHSIG, signal.SIGTERM)


@contextlib.contextmanager
def forked(function: Callable[[], None]) -> Iterator[None]:
    """Run a function in a forked process during the block, and wait for it.

    For work that leaves its result on disk and that the caller would do otherwise: what fails in
    the other process is left to the caller. There must be no threads yet, and no GPU in use.
    """
    child = multiprocessing.get_context("fork").Process(target=_run_forked, args=(function,))
    child.start()
    try:
        yield
    except BaseException:
        child.terminate()
        raise
    finally:
        child.join()


def _run_forked(function: Callable[[], None]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent gets it too, and ends this process
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # cleans up
    terminate_with_parent()
    function()


def with_exit_status(main: Callable[..., int | None]) -> Callable[..., int]:
    """Decorate a main function: print a user error and return 2, or 0."""

    @functools.wraps(main)
    def run(*arguments: Any) -> int:
        try:
            return main(*arguments) or 0
        except (ValueError, MemoryError, OSError) as error:  # others are bugs, with a traceback
            print(f"error: {error_message(error)}", file=sys.stderr)
            return 2

    return run


def exit_fast(status: int) -> NoReturn:
    """Exit without the final garbage collection: 0.4 s with torch loaded."""
    gc.freeze()
    sys.exit(status)


class Signals:
    """Handler of SIGINT, SIGTERM and SIGHUP; a second one ends at once.

    While entered, a signal raises `SystemExit` with status 130, 143 or 129. Within `recorded` and
    `deferred`, the first one only sets `status`.
    """

    def __init__(self) -> None:
        self.status = 0  # exit status; 0 means that no signal has come
        self._recording = False
        self._previous: dict[signal.Signals, Any] = {}
        self._process = os.getpid()

    def __enter__(self) -> Signals:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            # Signals stay ignored under nohup and in the background of a script.
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._previous[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *error: object) -> None:
        if error[0] is SystemExit:
            return  # the program is ending, and another signal must still end it at once
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    @contextlib.contextmanager
    def recorded(self) -> Iterator[None]:
        """Only set `status` in the block, which checks it."""
        self._recording = True
        try:
            yield
        finally:
            self._recording = False

    @contextlib.contextmanager
    def deferred(self) -> Iterator[None]:
        """Raise at the end of the block, which may swallow exceptions."""
        with self.recorded():
            yield
        if self.status:
            raise SystemExit(self.status)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.status or os.getpid() != self._process:  # a worker process has nothing to save
            os._exit(128 + number)
        self.status = 128 + number
        if number == signal.SIGHUP:  # writing to a closed terminal would raise
            null = os.open(os.devnull, os.O_WRONLY)
            for output in (1, 2):
                if stat.S_ISCHR(os.fstat(output).st_mode):
                    os.dup2(null, output)
        if not self._recording:
            raise SystemExit(self.status)


def describe_environment(machine: object) -> str:
    """Return Python, machine, commit and package versions, one per line."""
    lines = [f"python {platform.python_version()} on {platform.platform()}"]
    lines += [f"machine {machine}", f"commit {git_commit()}"]
    for package in PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            lines.append(f"{package} {version(package)}")
    return "\n".join(lines) + "\n"


def git_commit() -> str:
    """Return the commit of this program, or W2V_COMMIT where there is no git."""
    if "W2V_COMMIT" in os.environ:
        return os.environ["W2V_COMMIT"]
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
