"""Kernels compiled by numba."""

import numba
import pytest

from w2v.system.jit import compiled


def test_a_compiler_that_is_turned_off_is_named(monkeypatch):
    monkeypatch.setattr(numba.config, "DISABLE_JIT", 1)
    with pytest.raises(ValueError, match="NUMBA_DISABLE_JIT=1 .*unset it"):
        compiled(abs)
