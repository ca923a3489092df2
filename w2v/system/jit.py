"""How numba compiles the kernels of the CPU: without the interpreter's lock, and once, where the machine code can be kept.

Before its first kernel numba imports scipy.linalg, to see whether it is there, and compiles a runtime of its own, even where all kernels
are read from the disk: 37 MiB. Both wait here until something needs them.
"""

from __future__ import annotations

import contextlib
import functools
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


class Late:
    """What `make` returns, made when one of its attributes is first asked for."""

    def __init__(self, make: Callable[[], Any]):
        self._made = functools.cache(make)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._made(), name)


def _wait_for_need() -> None:
    from numba.core.runtime import nrtdynmod
    from numba.np import linalg

    compile_runtime = nrtdynmod.compile_nrt_functions
    nrtdynmod.compile_nrt_functions = lambda context: Late(lambda: compile_runtime(context))
    import_scipy, linalg.ensure_blas = linalg.ensure_blas, lambda: None
    try:
        import numba.np.arraymath  # noqa: F401  what looks for scipy; np.dot will import it
    finally:
        linalg.ensure_blas = import_scipy


with contextlib.suppress(
    ImportError, AttributeError
):  # another numba may have other names for its parts; it takes more memory then
    _wait_for_need()
