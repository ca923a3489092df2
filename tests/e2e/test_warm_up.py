"""The command warm-up."""

import os
import subprocess
import sys

import pytest

from tests.support.programs import ROOT
from w2v.api import cli


def test_it_leaves_only_kernels(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    cli.main(["warm-up"])
    assert capsys.readouterr().out.startswith("kernels are in ")
    assert not [*tmp_path.iterdir()]


@pytest.mark.slow
def test_the_next_runs_compile_nothing(tmp_path):
    folders = {"XDG_CACHE_HOME": str(tmp_path / "cache"), "CUDA_VISIBLE_DEVICES": ""}
    environment = os.environ | folders | {"PYTHONPATH": str(ROOT)}
    (tmp_path / "text.txt").write_text("a few words of a text " * 500)
    found = []
    for command in (
        ["evaluate.py", "warm-up"],
        ["train.py", str(tmp_path / "text.txt")],
        ["train.py", str(tmp_path / "text.txt"), "sgd"],
    ):
        program = [sys.executable, ROOT / command[0], *command[1:]]
        subprocess.run(program, cwd=tmp_path, env=environment, check=True, capture_output=True)
        found.append({path.name for path in (tmp_path / "cache").rglob("*.nb?")})
    assert found[0] and found[0] == found[1] == found[2]
