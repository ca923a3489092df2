"""How numba compiles the kernels of the CPU: without the interpreter's lock, and once, where the machine code can be kept."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba


def compiled(function: Callable | None = None, **options: Any) -> Any:
    """A decorator; `options` are numba's. The code is kept for the next run where a folder for it can be written."""
    if function is None:
        return lambda function: compiled(function, **options)
    try:
        return numba.njit(nogil=True, cache=True, **options)(function)
    except RuntimeError:  # there is no folder to write to
        return numba.njit(nogil=True, **options)(function)
