"""Kernels compiled by numba."""

import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numba
import pytest

from tests.support.processes import run_python
from w2v.system import jit
from w2v.system.jit import compiled


def test_threads_share_numbas_settings_and_a_compiler_that_is_off_is_named(monkeypatch):
    folders = []

    def cache_of(function):
        before = numba.config.CACHE_DIR
        time.sleep(0.02)
        folders.append((before, numba.config.CACHE_DIR))

    monkeypatch.setattr(jit, "KernelCache", cache_of)
    with ThreadPoolExecutor(3) as threads:
        list(threads.map(lambda _: compiled(lambda x: x), range(3)))
    assert len({*folders, folders[0][::-1]}) == 1 and folders[0][0]
    monkeypatch.undo()
    code = SimpleNamespace(magic_tuple=tuple)
    cache = compiled(lambda x: x)._cache
    key = cache._index_key((), code)
    assert key == cache._index_key((), code)
    monkeypatch.setattr(jit, "_intrinsics", lambda: "of another simd.py")
    assert key != cache._index_key((), code)
    monkeypatch.setattr(numba.config, "DISABLE_JIT", 1)
    with pytest.raises(ValueError, match="NUMBA_DISABLE_JIT=1 .*unset it"):
        compiled(abs)


RUN = """
import os, runpy, sys
os.environ["NUMBA_CACHE_DIR"] = sys.argv[1]
child = os.fork()  # two processes at the same time
runpy.run_path(sys.argv[2])
if child: os.wait()
"""
CLOSURES = """
import os
from w2v.system.jit import compiled

def adder(number):
    @compiled
    def inner(x):
        return x + number

    @compiled
    def outer(x):
        return inner(x)

    return outer

for number in (1, 2):
    add = adder(number)
    line = f"{add(40)} {add.stats.cache_hits.total()}\\n"
    os.write(1, line.encode())  # as one: the other process writes too
"""


def test_a_function_that_gets_a_compiled_one_is_compiled_by_one_process(tmp_path):
    script = tmp_path / "closures.py"
    script.write_text(CLOSURES)

    def run():
        return sorted(run_python(RUN, tmp_path, script).stdout.splitlines())

    assert run() == ["41 0", "41 1", "42 0", "42 1"]
    assert run() == ["41 1", "41 1", "42 1", "42 1"]
    script.write_text(CLOSURES.replace("x + number", "x - number"))
    assert run() == ["38 0", "38 1", "39 0", "39 1"]
