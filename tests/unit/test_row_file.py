"""Memory-mapped tables: reopened, refused, and intact after a failure."""

import errno
import gc
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.support.each_case import each_case
from w2v.model.row_file import save_npy
from w2v.model.table import RowState, Table, normal, uniform

STATES = {"exp_inf": RowState(100, 0.25), "step": RowState(1, 3.0)}


def file_table(path, rows=5, dim=100, states=STATES, dtype=torch.float32, scalars=("step",)):
    values = {key: torch.tensor(0.0) for key in scalars}
    return Table("input", rows, dim, states, values, "mmap", dtype, path)


def test_a_file_is_continued(tmp_path):
    table = file_table(tmp_path / "input")
    table.initialise(uniform(100, 1.0, 1))
    assert not table.continued
    assert not (tmp_path / "input").exists()  # before it is complete
    table.flush()
    assert sorted(os.listdir(tmp_path)) == ["input", "input.json"]
    table["exp_inf"][3] = 7
    table.scalars["step"] += 0.1
    table.flush()
    again = file_table(tmp_path / "input")
    assert again.continued
    assert torch.equal(again.records_VR, table.records_VR)
    assert torch.equal(again.scalars["step"], table.scalars["step"])
    assert (tmp_path / "input").stat().st_size == table.bytes


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_rows_without_state_may_be_an_npy_file(tmp_path, dtype):
    path, settings = tmp_path / "x.npy", {"states": {}, "dtype": dtype, "scalars": ()}
    table = file_table(path, **settings)
    table.initialise(normal(100, 1.0, 1))
    table.flush()
    assert np.array_equal(np.load(path), table["weight"].numpy())
    assert os.listdir(tmp_path) == ["x.npy"]
    assert torch.equal(file_table(path, **settings).records_VR, table.records_VR)
    with pytest.raises(ValueError, match=r"x.npy holds \(5, 100\) .*the table is \(6, 100\)"):
        file_table(path, rows=6, **settings)


OTHERS = [
    {"rows": 6},
    {"dim": 99},
    {"dtype": torch.float16, "states": {}},
    {"states": {"sum": RowState(100, 0.0)}},
    {"scalars": ("mu",)},
]


@each_case("other", OTHERS)
def test_a_file_of_another_layout_is_refused_and_unchanged(tmp_path, other):
    file_table(tmp_path / "input").flush()
    before = (tmp_path / "input").read_bytes()
    with pytest.raises(ValueError, match=r'input holds \{"rows": 5.* but the table is ') as error:
        file_table(tmp_path / "input", **other)
    assert "\n" not in str(error.value)
    assert (tmp_path / "input").read_bytes() == before


def test_damaged_files_are_refused(tmp_path):
    file_table(tmp_path / "input").flush()
    os.truncate(tmp_path / "input", 1000)
    with pytest.raises(ValueError, match="input has 1,000 bytes instead of .* damaged"):
        file_table(tmp_path / "input")
    for content in ("{", "[]", json.dumps({"rows": 5})):
        (tmp_path / "input.json").write_text(content)
        with pytest.raises(ValueError, match="input.json does not say what it holds; remove"):
            file_table(tmp_path / "input")


def test_a_full_disk_is_noticed_before_anything_is_written(tmp_path, monkeypatch):
    def disk_is_full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", disk_is_full)
    with pytest.raises(OSError, match="No space left on device: .*input"):
        file_table(tmp_path / "input")
    gc.collect()
    assert not list(tmp_path.iterdir())


def test_a_failed_save_keeps_the_old_file(tmp_path, monkeypatch):
    save_npy(tmp_path / "x.npy", torch.ones(3, 2))

    def disk_is_full(_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", disk_is_full)
    with pytest.raises(OSError):
        save_npy(tmp_path / "x.npy", torch.zeros(3, 2))
    assert np.load(tmp_path / "x.npy").all()
    assert os.listdir(tmp_path) == ["x.npy"]


KILLED = """
import os, signal, sys, torch
from w2v.model.table import RowState, Table
states, scalars = {"exp_inf": RowState(100, 0.25)}, {"step": torch.tensor(0.0)}
table = Table("input", 5, 100, states, scalars, "mmap", path=sys.argv[1])
table["weight"].fill_(1); table.scalars["step"].fill_(1); table.flush()
table["weight"][3:].fill_(2); table.scalars["step"].fill_(2)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_after_a_kill_rows_are_whole_and_scalars_as_of_the_last_flush(tmp_path):
    command = [sys.executable, "-c", KILLED, str(tmp_path / "input")]
    done = subprocess.run(command, cwd=Path(__file__).parents[2])
    assert done.returncode == -9
    table = file_table(tmp_path / "input", states={"exp_inf": RowState(100, 0.25)})
    assert table.scalars["step"] == 1
    assert (table["weight"][:3] == 1).all()
    assert (table["exp_inf"] == 0.25).all()
    assert all(row.unique().tolist() in ([1.0], [2.0]) for row in table["weight"])
