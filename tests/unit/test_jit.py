"""Kernels compiled by numba."""

import os
import subprocess
import sys

import numba
import pytest

from w2v.system.jit import compiled


def test_a_compiler_that_is_turned_off_is_named(monkeypatch):
    monkeypatch.setattr(numba.config, "DISABLE_JIT", 1)
    with pytest.raises(ValueError, match="NUMBA_DISABLE_JIT=1 .*unset it"):
        compiled(abs)


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


def output_of(script, folder):
    """Return the lines that a script prints; its kernels are kept in a folder."""
    environment = os.environ | {"NUMBA_CACHE_DIR": str(folder)}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    command = [sys.executable, script]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return run.stdout.splitlines()


def test_functions_that_get_compiled_ones_are_loaded_by_the_next_process(tmp_path):
    script = tmp_path / "closures.py"
    script.write_text(CLOSURES)

    def run():
        return output_of(script, tmp_path)

    assert run() == ["41 0", "42 0"]
    assert run() == ["41 1", "42 1"]
    script.write_text(CLOSURES.replace("x + number", "x - number"))
    assert run() == ["39 0", "38 0"]
