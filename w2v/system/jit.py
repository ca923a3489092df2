"""Compilation of the CPU kernels by numba, kept on disk."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FunctionType
from typing import Any

import numba
from llvmlite import binding
from numba.core.caching import CompileResultCacheImpl, FunctionCache, IndexDataCacheFile
from numba.core.runtime import rtsys

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
    # At the first call numba would look for extensions in all installed packages, for 2 ms.
    dispatcher._compilation_chain_init_hook = lambda: None
    if "inline" in options:  # it is a part of its callers
        return dispatcher
    # numba takes the folder from its settings, which other packages in the process may use too.
    others_folder = config.CACHE_DIR
    config.CACHE_DIR = str(kernel_folder("NUMBA_CACHE_DIR"))
    try:
        dispatcher._cache = KernelCache(function)
    finally:
        config.CACHE_DIR = others_folder
    return dispatcher


class MachineCode(CompileResultCacheImpl):
    """What numba's cache keeps of a function, loaded as far as calls need it."""

    def rebuild(self, target_context: Any, payload: Any) -> Any:
        """Load machine code; parse bitcode once a caller is compiled with it."""
        (name, kind, (machine_code, bitcode)), function, *rest = payload
        if b"NRT_" in machine_code:  # it allocates arrays or counts references to them
            rtsys.initialize(target_context)
        wrapper = function.llvm_cpython_wrapper_name  # which calls look for
        declared = f'define void @"{wrapper}"() {{ ret void }}'
        no_code = binding.parse_assembly(declared).as_bitcode()
        payload = (name, kind, (machine_code, no_code)), function, *rest
        result = super().rebuild(target_context, payload)
        # To parse the bitcode takes longer than all else.
        inlined = functools.cache(lambda: binding.parse_bitcode(bitcode))
        result.library._get_module_for_linking = inlined
        return result


class KernelCache(FunctionCache):
    """numba's cache of a function, in checked files and by keys that last.

    numba's own key has a random number for each compiled function among the captured variables:
    such a function would be compiled in every process, which would write another file each time.
    """

    _impl_class = MachineCode

    def __init__(self, function: Callable):
        super().__init__(function)
        os.chmod(self.cache_path, 0o700)
        stamp = _source_stamp(Path(function.__code__.co_filename).parent)
        self._cache_file = CheckedFiles(self.cache_path, self._impl.filename_base, stamp)

    def load_overload(self, signature: Any, target_context: Any) -> Any:
        """Load machine code, without 0.3 s of imports for the compiler."""
        return self._load_overload(signature, target_context)

    def _index_key(self, signature: Any, codegen: Any) -> tuple:
        return signature, codegen.magic_tuple(), repr(_content(self._py_func))


def _content(value: Any) -> Any:
    """Return name, code and captured values of a function; other values as is."""
    function = getattr(value, "py_func", value)  # of a compiled function
    if not isinstance(function, FunctionType):
        return value
    cells = [_content(cell.cell_contents) for cell in function.__closure__ or ()]
    return function.__qualname__, function.__code__.co_code, cells


@functools.cache
def _source_stamp(folder: Path) -> str:
    """Return a digest of the sources that numba compiles, in two folders."""
    files = sorted({*folder.glob("*.py"), *Path(__file__).parent.glob("*.py")})
    code = map(Path.read_bytes, files)
    compiled_code = b"".join(text for text in code if b"numba" in text or b"system.jit" in text)
    return hashlib.blake2b(compiled_code).hexdigest()


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
