"""Compile the sources in cu/ by CuPy on first use, and launch them."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import struct
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from w2v.system.files import kernel_folder, remove_damaged

SOURCES = Path(__file__).parent / "cu"
THREADS = 256  # of a block


class Kernel:
    """A kernel of a source file in cu/, compiled at its first launch.

    Arguments are most of what a launch takes on the CPU: those that stay are given once.

    Args:
        source: Name of the file.
        name: Name of the kernel.
        defines: Macros.
        first: Arguments that every launch begins with; their tensors are kept.
    """

    def __init__(
        self,
        source: str,
        name: str,
        defines: Mapping[str, int | str],
        *first: Tensor | float | None,
    ):
        self._place = source, name
        self._defines = defines
        self._first = first
        self._launchers: dict[int, Launcher] = {}  # by device

    def __call__(self, blocks: int, *args: Tensor | float | None) -> None:
        """Launch so many blocks of THREADS threads on torch's current stream.

        A tensor is passed as the pointer to its data, None as a null pointer; integers are for
        parameters of any width, floats for those of 4 bytes.
        """
        # torch's public functions for device and stream take longer than the launch itself.
        device = torch._C._cuda_getDevice()
        if getattr(_thread, "device", None) != device:
            # Gives this thread the device's context, without which the driver launches nothing.
            torch.cuda.current_stream().query()
            _thread.device = device
        launcher = self._launchers.get(device)
        if launcher is None:
            compiled = _compiled(device, *self._place, **self._defines)
            launcher = self._launchers[device] = Launcher(*compiled, _values(self._first))
        launcher(blocks, _values(args), torch._C._cuda_getCurrentRawStream(device))


def launch(
    source: str,
    kernel: str,
    defines: dict[str, int | str],
    blocks: int,
    *args: Tensor | float | None,
) -> None:
    """Launch a kernel with all its arguments, as `Kernel` does."""
    _kernel(source, kernel, **defines)(blocks, *args)


@functools.cache
def _kernel(source: str, kernel: str, **defines: int | str) -> Kernel:
    return Kernel(source, kernel, defines)


def _values(args: Sequence[Tensor | float | None]) -> list[float]:
    """Return arguments as numbers."""
    # isinstance takes twice as long to find that a number is no tensor.
    values: list[Any] = [
        arg.data_ptr() if type(arg) is Tensor else 0 if arg is None else arg for arg in args
    ]
    return values


_thread = threading.local()  # of each thread, the device whose context it has


def cuda_runtime() -> Any:
    """Return CuPy's module of CUDA's runtime.

    Raises:
        ImportError: CuPy is not installed.
    """
    # `from cupy.cuda import runtime` would not wait for a thread that is importing CuPy, and fail,
    # as it needs what that thread has not imported yet.
    import cupy

    return cupy.cuda.runtime


def blocks_for(threads: int) -> int:
    """Return the blocks for that many threads, at most 8 a processor."""
    return max(1, min(-(-threads // THREADS), 8 * _processors()))


@functools.cache
def _processors() -> int:
    return torch.cuda.get_device_properties().multi_processor_count


class Launcher:
    """Launches one kernel; memory for its arguments is allocated once.

    CuPy's own launch takes about a microsecond an argument and looks the kernel up each time, which
    was most of a step's time on the CPU.
    """

    def __init__(self, function: int, launch: Callable[..., None], first: Sequence[float] = ()):
        self._function = function  # handle of the kernel
        self._launch = launch  # the driver's cuLaunchKernel, as CuPy has it
        self._first = first  # arguments of all launches
        self._layout: struct.Struct | None = None  # of the others
        self._lock = threading.Lock()

    def __call__(self, blocks: int, values: Sequence[float], stream: int) -> None:
        with self._lock:  # until the driver has copied the arguments
            if self._layout is None:
                self._layout = self._allocate(values)
            self._layout.pack_into(self._memory, 8 * len(self._first), *values)
            grid = blocks, 1, 1, THREADS, 1, 1
            self._launch(self._function, *grid, 0, stream, self._parameters, 0)

    def _allocate(self, values: Sequence[float]) -> struct.Struct:
        """Allocate 8 bytes an argument; the driver takes what a parameter has."""
        count = len(self._first) + len(values)
        self._memory = ctypes.create_string_buffer(8 * count)
        _layout(self._first).pack_into(self._memory, 0, *self._first)
        start = ctypes.addressof(self._memory)
        self._pointers = (ctypes.c_void_p * count)(*range(start, start + 8 * count, 8))
        self._parameters = ctypes.addressof(self._pointers)
        return _layout(values)


def _layout(values: Sequence[float]) -> struct.Struct:
    """Return how numbers lie in memory, 8 bytes each."""
    return struct.Struct("".join("f4x" if isinstance(value, float) else "q" for value in values))


@functools.cache
def _compiled(
    device: int, source: str, kernel: str, **defines: int | str
) -> tuple[int, Callable[..., None]]:
    """Return the handle of a kernel, and the driver's cuLaunchKernel.

    Its module stays loaded.
    """
    function = _module(device, source, **defines).get_function(kernel).kernel
    from cupy_backends.cuda.api import driver  # after CuPy itself, which finds CUDA's libraries

    return function.ptr, driver.launchKernel


@functools.cache
def _module(device: int, source: str, **defines: int | str) -> Any:
    import cupy

    # Not as options: CuPy compiles an empty file for each new set of these, which takes 20 ms.
    macros = "".join(f"#define {name} {value}\n" for name, value in defines.items())
    code = f'{macros}#line 1 "{source}"\n{(SOURCES / source).read_text()}'
    options = ("-std=c++17", f"-I{SOURCES}", f"-DW2V_SOURCES={_check_sources()}")
    return cupy.RawModule(code=code, options=options)


@functools.cache
def _check_sources() -> str:
    """Remove damaged kernels of CuPy; return a hash of all sources.

    CuPy itself compiles a damaged kernel again without a message, and does not look at headers.
    """
    for file in kernel_folder("CUPY_CACHE_DIR").glob("*.cubin"):
        remove_damaged(file, _is_whole)
    text = b"".join(path.read_bytes() for path in sorted(SOURCES.iterdir()) if path.is_file())
    return hashlib.blake2b(text, digest_size=8).hexdigest()


def _is_whole(content: bytes) -> bool:
    """Whether CuPy's digest, which comes first, is that of the rest."""
    digests = hashlib.sha1(content[40:]), hashlib.md5(content[32:])  # the latter of older CuPy
    return any(content.startswith(digest.hexdigest().encode()) for digest in digests)
