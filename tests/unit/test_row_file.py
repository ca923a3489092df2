"""Memory-mapped tables: reopened, refused, and intact after a failure."""

import errno
import gc
import json
import os

import numpy as np
import pytest
import torch

from tests.support.each_case import each_case
from tests.support.processes import run_python
from w2v import PagedEmbedding, PagedOptimizer, RowStore
from w2v.rows import file
from w2v.rows.file import save_npy
from w2v.rows.table import RowState, Table, normal, uniform

pytestmark = pytest.mark.filterwarnings("error")
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
    records_VR, step = table.records_VR.clone(), table.scalars["step"]
    del table
    again = file_table(tmp_path / "input")
    assert again.continued
    assert torch.equal(again.records_VR, records_VR)
    assert torch.equal(again.scalars["step"], step)
    assert (tmp_path / "input").stat().st_size == again.bytes


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_rows_without_state_may_be_an_npy_file(tmp_path, dtype):
    path, settings = tmp_path / "x.npy", {"states": {}, "dtype": dtype, "scalars": ()}
    table = file_table(path, **settings)
    table.initialise(normal(100, 1.0, 1))
    table.flush()
    assert np.array_equal(np.load(path), table["weight"].numpy())
    assert os.listdir(tmp_path) == ["x.npy"]
    records_VR = table.records_VR.clone()
    del table
    assert torch.equal(file_table(path, **settings).records_VR, records_VR)
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
    wrong_scalars = [{"rows": 5, "scalars": scalars} for scalars in (["step"], {"step": "1"})]
    for content in ("{", "[]", json.dumps({"rows": 5}), *map(json.dumps, wrong_scalars)):
        (tmp_path / "input.json").write_text(content)
        with pytest.raises(ValueError, match="input.json does not say what it holds; remove"):
            file_table(tmp_path / "input")


def test_a_full_disk_is_noticed_before_anything_is_written(tmp_path, monkeypatch):
    def disk_is_full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as full:
        full.setattr(os, "posix_fallocate", disk_is_full)
        with pytest.raises(OSError, match="No space left on device: .*input") as failed:
            file_table(tmp_path / "input")
    assert not list(tmp_path.iterdir())
    table = file_table(tmp_path / "input")
    del failed  # and with it what has failed, whose file is another one's now
    gc.collect()
    table.flush()
    with monkeypatch.context() as full:
        full.setattr(file, "atomic_write", disk_is_full)
        with pytest.raises(OSError):
            table.begin_step()
    table.begin_step()
    assert json.loads((tmp_path / "input.json").read_text())[file.OLDER]


def test_a_failed_save_keeps_the_old_file(tmp_path, monkeypatch):
    save_npy(tmp_path / "x.npy", torch.ones(3, 2))

    def disk_is_full(_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", disk_is_full)
    with pytest.raises(OSError):
        save_npy(tmp_path / "x.npy", torch.zeros(3, 2))
    assert np.load(tmp_path / "x.npy").all()
    assert os.listdir(tmp_path) == ["x.npy"]


OPENS = """
import sys
from w2v import RowStore
RowStore(5, 100, storage="mmap", path=sys.argv[1])
"""


@pytest.mark.parametrize("is_new", [True, False], ids=["new", "existing"])
@pytest.mark.parametrize("name", ["rows", "rows.npy"])
def test_a_file_is_open_in_one_table_at_a_time(tmp_path, name, is_new):
    path = tmp_path / name
    settings = {"states": {}, "scalars": ()}
    if not is_new:
        file_table(path, **settings).flush()
    table = file_table(path, **settings)
    table["weight"].fill_(3)
    with pytest.raises(ValueError, match="rows(.npy)? is open in another table"):
        file_table(path, **settings)
    other = run_python(OPENS, path)
    assert other.returncode == 1 and "is open in another table" in other.stderr
    table.flush()  # a new file has its name from here on
    with pytest.raises(ValueError, match="is open in another table"):
        file_table(path, **settings)
    view_VD = table["weight"]
    del table
    with pytest.raises(ValueError, match="is open in another table"):  # a view may write to it
        file_table(path, **settings)
    del view_VD
    assert (file_table(path, **settings)["weight"] == 3).all()
    assert run_python(OPENS, path).returncode == 0


def test_a_deleted_store_that_awaits_garbage_collection_is_no_obstacle(tmp_path):
    gc.disable()
    try:
        for _ in range(2):
            RowStore(5, 100, storage="mmap", path=tmp_path / "rows")
    finally:
        gc.enable()


def test_a_file_that_a_table_has_open_is_not_replaced(tmp_path):
    for name in ("x.npy", "x.safetensors"):
        store = RowStore(5, 100, storage="mmap", path=tmp_path / name)
        with pytest.raises(ValueError, match="is open in another table"):
            RowStore(5, 100).save(tmp_path / name)
        del store
    store = RowStore(5, 100, storage="mmap", path=tmp_path / "x.npy")
    store.put([2], torch.ones(1, 100))
    store.save(tmp_path / "x.npy")
    assert np.load(tmp_path / "x.npy")[2].all()


def test_a_new_file_takes_the_place_of_one_that_a_killed_process_left(tmp_path):
    (tmp_path / "input.part").write_bytes(b"x" * 10_000)
    table = file_table(tmp_path / "input")
    table.flush()
    assert sorted(os.listdir(tmp_path)) == ["input", "input.json"]
    assert (tmp_path / "input").stat().st_size == table.bytes
    assert not table["weight"].any()


KILLED = """
import os, signal, sys
from w2v import PagedEmbedding, PagedOptimizer
table = PagedEmbedding(5, 100, storage="mmap", path=sys.argv[1])
optimizer = PagedOptimizer(table, "Adamax", lr=0.1)
for step in range(9):
    table([step % 3, 4]).sum().backward()
    optimizer.step()
    if step == 2:
        table.store.flush()
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_table_whose_process_was_killed_says_that_its_scalars_are_older(tmp_path):
    def opened():
        table = PagedEmbedding(5, 100, storage="mmap", path=tmp_path / "rows")
        return table, PagedOptimizer(table, "Adamax", lr=0.1)

    assert run_python(KILLED, tmp_path / "rows").returncode == -9
    for _ in range(2):  # the mark stays until a flush
        with pytest.warns(UserWarning, match="rows are newer than step"):
            table, optimizer = opened()
        assert table.store.table.scalars["step"] == 3
        del table, optimizer
    with pytest.warns(UserWarning, match="rows are newer than step"):
        table, optimizer = opened()
    state = optimizer.state_dict()["state"][0]  # which flushes
    assert state.keys() == {"step", "exp_avg", "exp_inf"}
    assert (state["exp_inf"][:3] > 0).all() and not state["exp_inf"][3].any()
    del table, optimizer
    table, optimizer = opened()  # without a warning
    table([1]).sum().backward()
    optimizer.step()
    assert optimizer.state_dict()["state"][0]["step"] == 4


KILLED_TABLE = """
import os, signal, sys, torch
from w2v.rows.table import RowState, Table
states, scalars = {"exp_inf": RowState(100, 0.25)}, {"step": torch.tensor(0.0)}
table = Table("input", 5, 100, states, scalars, "mmap", path=sys.argv[1])
if not (child := os.fork()):
    del table  # a copy, whose file is its parent's
    os._exit(0)
os.waitpid(child, 0)
table["weight"].fill_(1); table.scalars["step"].fill_(1); table.flush()
table["weight"][3:].fill_(2); table.scalars["step"].fill_(2)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_after_a_kill_rows_are_whole_and_scalars_as_of_the_last_flush(tmp_path):
    assert run_python(KILLED_TABLE, tmp_path / "input").returncode == -9
    table = file_table(tmp_path / "input", states={"exp_inf": RowState(100, 0.25)})
    assert table.scalars["step"] == 1
    assert (table["weight"][:3] == 1).all()
    assert (table["exp_inf"] == 0.25).all()
    assert all(row.unique().tolist() in ([1.0], [2.0]) for row in table["weight"])
