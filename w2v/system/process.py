"""This process: cores, heap, signals, exit, and the versions it runs on."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import io
import math
import multiprocessing
import os
import platform
import signal
import stat
import subprocess
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from w2v.system.resources import cpu_quota

# Constants of malloc.h and prctl.h.
M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3
M_ARENA_MAX = -8
PR_SET_PDEATHSIG = 1
SAME_SECONDS = 2.0  # after a signal, in which it may come again
PACKAGES = "w2v torch numpy numba gensim safetensors cupy-cuda12x cupy-cuda13x".split()


def cores() -> int:
    """Return the number of CPU cores that this process may keep busy."""
    return math.ceil(min(len(os.sched_getaffinity(0)), cpu_quota()))


def limit_threads() -> None:
    """Let libraries that are imported from now on use `cores()` threads.

    They see the cores of the machine, and not that a container may use only part of their time.
    """
    if cores() < len(os.sched_getaffinity(0)):
        os.environ.setdefault("OMP_NUM_THREADS", str(cores()))


def on_threads(function: Callable[[Any], Any], items: Sequence, threads: int) -> list[Any]:
    """Call a function with each item, on threads if there are several items."""
    if len(items) < 2:
        return [*map(function, items)]
    return [*map_in_order(threads, function, items)]


def map_in_order(workers: int, function: Callable, items: Iterable) -> Generator[Any]:
    """Call a function with each item in threads; yield the results in order.

    At most four calls a thread and one more wait, run or have results that wait, which bounds the
    memory.
    """
    pending: deque[Future] = deque()
    with ThreadPoolExecutor(workers) as pool:
        for item in items:
            pending.append(pool.submit(function, item))
            if len(pending) > 4 * workers:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()


def _glibc(function: str, *arguments: int) -> None:
    """Call a function of glibc, where it is the C library."""
    with contextlib.suppress(OSError, AttributeError):
        getattr(ctypes.CDLL(None), function)(*arguments)


def limit_heap_fragmentation() -> None:
    """Make glibc map large arrays separately and use one heap for all threads.

    Otherwise freed arrays leave unused holes in the heap of each thread.
    """
    _glibc("mallopt", M_MMAP_THRESHOLD, 1 << 18)
    _glibc("mallopt", M_ARENA_MAX, 1)


def reuse_freed_memory() -> None:
    """Make glibc keep the memory of freed arrays for the next ones.

    So it does by itself, unless `limit_heap_fragmentation` was called. Where torch allocates
    arrays at each step, to get their pages from the system takes half of the time.
    """
    _glibc("mallopt", M_MMAP_THRESHOLD, 32 << 20)
    _glibc("mallopt", M_TRIM_THRESHOLD, 64 << 20)


def return_freed_memory() -> None:
    """Return the free memory of glibc's heap to the system."""
    _glibc("malloc_trim", 0)


def terminate_with_parent(parent: int) -> None:
    """Send SIGTERM to this process when its parent ends.

    Linux can send a signal then, but sends it again for each thread of the parent, also while the
    first one is handled, and a second SIGTERM ends a run at once.
    """
    is_told = False

    def terminate(number: int, frame: FrameType | None) -> None:
        nonlocal is_told
        if not is_told:
            is_told = True
            signal.raise_signal(signal.SIGTERM)

    signal.signal(signal.SIGUSR1, terminate)
    _glibc("prctl", PR_SET_PDEATHSIG, signal.SIGUSR1)
    if os.getppid() != parent:  # it has ended before
        signal.raise_signal(signal.SIGUSR1)


@contextlib.contextmanager
def forked(function: Callable[[], object]) -> Iterator[None]:
    """Run a function in a forked process during the block, and wait for it.

    For work that leaves its result on disk. Raises the function's user errors after the block.
    There must be no threads yet, and no GPU in use.
    """
    parent = os.getpid()
    errors, sender = multiprocessing.get_context("fork").Pipe(duplex=False)

    def run() -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent gets it too, and ends this one
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # cleans up
        terminate_with_parent(parent)
        try:
            function()
        except (ValueError, MemoryError, OSError) as error:
            sender.send(error)

    child = multiprocessing.get_context("fork").Process(target=run)
    child.start()
    try:
        yield
        child.join()
        if errors.poll():
            raise errors.recv()
    except BaseException:
        child.terminate()
        raise
    finally:
        child.join()


def finalize(owner: object, function: Callable, **options: Any) -> weakref.finalize:
    """Call a function at the end of an object, but not of a forked copy."""
    process = os.getpid()
    return weakref.finalize(owner, lambda: os.getpid() == process and function(**options))


def escape_unencodable() -> None:
    r"""Escape characters that standard output cannot encode, as \u65e5."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def open_gpu(number: int = 0) -> None:
    """Open the context of a GPU in a thread, where there is a driver.

    It takes 0.3 s, in which this process may import torch, which uses the context later. Processes
    that are forked later must not use the GPU.
    """

    def open_context() -> None:
        os.environ.setdefault("CUDA_MODULE_LOADING", "LAZY")  # as torch does
        with contextlib.suppress(OSError):
            driver, context = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p()
            if driver.cuInit(0) == 0:
                driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), number)

    threading.Thread(target=open_context, name="open_gpu", daemon=True).start()


def exit_fast(status: int) -> NoReturn:
    """Exit without Python's teardown, which takes 0.5 s with torch loaded."""
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads
    atexit._run_exitfuncs()
    for output in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):  # closed, or None
            output.flush()
    os._exit(status)


def open_closed_streams() -> None:
    """Give closed standard streams the null device.

    Otherwise the next file that is opened takes the number of standard error, and its messages.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest free number
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, "w" if number else "r", closefd=False))


def ending_signals() -> list[signal.Signals]:
    """Return the signals that end a run, without those that are ignored."""
    # With nohup, or in the background of a script, signals stay ignored.
    ending = signal.SIGINT, signal.SIGTERM, signal.SIGHUP
    return [number for number in ending if signal.getsignal(number) is not signal.SIG_IGN]


@contextlib.contextmanager
def ended_by_signals() -> Iterator[None]:
    """Let signals end the process at once while the block waits in C++.

    Handlers in Python would run after it. They stay in place, as a library that a thread loads
    meanwhile may put back later what it finds now.
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    before = signal.set_wakeup_fd(writer)

    def wait() -> None:
        with open(reader, "rb", buffering=0) as received:
            if number := received.read(1):
                os._exit(128 + number[0])

    threading.Thread(target=wait, name="signals", daemon=True).start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        os.close(writer)


class Signals:
    """Handler of SIGINT, SIGTERM and SIGHUP; a second one ends at once.

    A closed terminal, and systems that end all processes of a job, send one several times: within
    `SAME_SECONDS` the same signal counts once. While entered, a signal raises `SystemExit` with
    status 130, 143 or 129. Within `recorded` and `deferred`, it only sets `status`. Libraries may
    swallow the exception, or raise another one because of it: the block ends with `SystemExit` in
    any case.
    """

    def __init__(self) -> None:
        self.status = 0  # exit status; 0 means that no signal has come
        self._received = 0.0  # when the first one came
        self._recording = False
        self._previous: dict[signal.Signals, Any] = {}
        self._process = os.getpid()
        self._report = sys.unraisablehook

    def __enter__(self) -> Signals:
        open_closed_streams()
        for number in ending_signals():
            self._previous[number] = signal.signal(number, self._receive)
        sys.unraisablehook = self._unraisable
        return self

    def __exit__(self, *error: object) -> None:
        sys.unraisablehook = self._report
        # While the program is ending, another signal must still end it at once.
        if error[0] is SystemExit:
            return
        if self.status:
            raise SystemExit(self.status) from None
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    @contextlib.contextmanager
    def recorded(self) -> Iterator[None]:
        """Only set `status` in the block, which checks it."""
        before = self._recording
        self._recording = True
        try:
            yield
        finally:
            self._recording = before

    @contextlib.contextmanager
    def deferred(self) -> Iterator[None]:
        """Raise at the end of the block, for libraries that swallow exceptions."""
        with self.recorded():
            yield
        if self.status:
            raise SystemExit(self.status)

    def _unraisable(self, error: Any) -> None:
        """Print an error that Python cannot raise, but no `SystemExit`."""
        if not isinstance(error.exc_value, SystemExit):
            self._report(error)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.status == 128 + number and now < self._received + SAME_SECONDS:
            return
        if self.status or os.getpid() != self._process:  # a worker process has nothing to save
            os._exit(128 + number)
        self.status = 128 + number
        self._received = now
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
    """Return W2V_COMMIT if it is set, or else the commit of this program."""
    if "W2V_COMMIT" in os.environ:
        return os.environ["W2V_COMMIT"]
    root = Path(__file__).parents[2]
    if not (root / ".git").exists():  # installed, perhaps in a folder of another repository
        return "unknown"

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(root), "--no-optional-locks", *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        # `describe --dirty` locks the index, and would leave the lock behind if it were killed.
        changes = git("status", "--porcelain", "--untracked-files=no")
        return git("describe", "--always") + ("-dirty" if changes else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
