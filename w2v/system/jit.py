"""Compilation of the CPU kernels by numba, kept on disk."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable
from pathlib import Path
from types import FunctionType
from typing import Any

import numba
from numba.core.caching import FunctionCache
from numba.core.compiler_lock import global_compiler_lock

from w2v.system.files import exclusive, kernel_folder


def compiled(function: Callable | None = None, **options: Any) -> Any:
    """Compile a function with numba, without the GIL; `options` are numba's.

    The machine code is kept on disk for the next run.
    """
    if function is None:
        return lambda function: compiled(function, **options)
    config: Any = numba.config
    if config.DISABLE_JIT:
        raise ValueError("NUMBA_DISABLE_JIT=1 turns off the compiler of the CPU kernels; unset it")
    dispatcher = numba.njit(nogil=True, **options)(function)
    if "inline" in options:  # it is a part of its callers
        return dispatcher
    # numba takes the folder from its settings, which other threads and packages may use too.
    with global_compiler_lock:
        others_folder = config.CACHE_DIR
        config.CACHE_DIR = str(kernel_folder("NUMBA_CACHE_DIR"))
        try:
            dispatcher._cache = KernelCache(function)
        finally:
            config.CACHE_DIR = others_folder
    dispatcher.compile = functools.partial(_compile_once, dispatcher.compile, dispatcher._cache)
    return dispatcher


def _compile_once(compile: Callable, cache: KernelCache, signature: Any) -> Any:
    """Compile or load a function while other processes wait to load it.

    Ranks would otherwise compile the same loops at the same time.
    """
    # The compiler lock comes first in all threads; else two could wait for each other.
    with global_compiler_lock, exclusive(cache.lock_file(), lambda: None):
        return compile(signature)


class KernelCache(FunctionCache):
    """numba's cache of a function, with a key that is equal in all processes.

    numba's own key has a random number for each compiled function among the captured variables:
    such a function would be compiled in every process, 10 s for the loops of cpu_loops.py.
    """

    def lock_file(self) -> Path:
        """Create the empty lock file beside the machine code; return it."""
        self._impl.locator.ensure_cache_path()
        file = Path(self.cache_path, self._impl.filename_base + ".lock")
        file.touch()
        return file

    def _index_key(self, signature: Any, codegen: Any) -> tuple:
        return signature, codegen.magic_tuple(), repr(_content(self._py_func)), _intrinsics()


@functools.cache
def _intrinsics() -> str:
    """Return a hash of the operations that other files' loops contain."""
    return hashlib.blake2b(Path(__file__).with_name("simd.py").read_bytes()).hexdigest()


def _content(value: Any) -> Any:
    """Return name, code and captured values of a function; other values as is."""
    function = getattr(value, "py_func", value)  # of a compiled function
    if not isinstance(function, FunctionType):
        return value
    cells = [_content(cell.cell_contents) for cell in function.__closure__ or ()]
    return function.__qualname__, function.__code__.co_code, cells
