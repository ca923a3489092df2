"""Kernels compiled by numba."""

import numba
import pytest

from tests.support.processes import run_python
from w2v.system.jit import compiled


def test_a_compiler_that_is_turned_off_is_named(monkeypatch):
    monkeypatch.setattr(numba.config, "DISABLE_JIT", 1)
    with pytest.raises(ValueError, match="NUMBA_DISABLE_JIT=1 .*unset it"):
        compiled(abs)


RUN = """
import os, runpy, sys
os.environ["NUMBA_CACHE_DIR"] = sys.argv[1]
runpy.run_path(sys.argv[2])
"""
CLOSURES = """
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
    print(add(40), add.stats.cache_hits.total())
"""


def test_functions_that_get_compiled_ones_are_loaded_by_the_next_process(tmp_path):
    script = tmp_path / "closures.py"
    script.write_text(CLOSURES)

    def run():
        return run_python(RUN, tmp_path, script).stdout.splitlines()

    assert run() == ["41 0", "42 0"]
    assert run() == ["41 1", "42 1"]
    script.write_text(CLOSURES.replace("x + number", "x - number"))
    assert run() == ["39 0", "38 0"]
