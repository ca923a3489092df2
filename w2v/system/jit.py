"""Compilation of the CPU kernels by numba."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba


def compiled(function: Callable | None = None, **options: Any) -> Any:
    """Compile a function with numba, without the GIL; `options` are numba's.

    The machine code is cached on disk for the next run, where a folder for it can be written.
    """
    if function is None:
        return lambda function: compiled(function, **options)
    try:
        return numba.njit(nogil=True, cache=True, **options)(function)
    except RuntimeError:  # no folder for the cache is writable
        return numba.njit(nogil=True, **options)(function)
