"""Compilation of the CPU kernels by numba, kept on disk."""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numba
from numba.core.caching import IndexDataCacheFile

from w2v.system.files import kernel_folder, remove_damaged

DIGEST_BYTES = 16


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
    others_folder = config.CACHE_DIR
    config.CACHE_DIR = str(kernel_folder("NUMBA_CACHE_DIR"))
    try:
        dispatcher.enable_caching()
    finally:
        config.CACHE_DIR = others_folder
    cache, source = dispatcher._cache, dispatcher._cache._impl
    os.chmod(cache.cache_path, 0o700)
    stamp = source.locator.get_source_stamp()
    cache._cache_file = CheckedFiles(cache.cache_path, source.filename_base, stamp)
    return dispatcher


class CheckedFiles(IndexDataCacheFile):
    """numba's files of a function, each followed by a digest."""

    def _load_index(self) -> dict:
        self._check(self._index_path)
        return super()._load_index()

    def _load_data(self, name: str) -> Any:
        self._check(self._data_path(name))
        return super()._load_data(name)  # numba compiles where there is no file

    @contextlib.contextmanager
    def _open_for_write(self, path: str) -> Iterator[io.BytesIO]:
        with super()._open_for_write(path) as file:
            content = io.BytesIO()
            yield content
            file.write(content.getvalue() + self._digest(path, content.getvalue()))

    def _check(self, path: str) -> None:
        def is_whole(content: bytes) -> bool:
            return content[-DIGEST_BYTES:] == self._digest(path, content[:-DIGEST_BYTES])

        remove_damaged(Path(path), is_whole)

    def _digest(self, path: str, content: bytes) -> bytes:
        """Return the digest of a file, which depends on its name."""
        salt = os.path.basename(path)
        if path != self._index_path:  # machine code of an older source may have the same name
            salt += repr(self._source_stamp)
        return hashlib.blake2b(salt.encode() + content, digest_size=DIGEST_BYTES).digest()
