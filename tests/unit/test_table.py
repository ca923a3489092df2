"""Records: their layout, their first values, and memory that is exactly as large as it must be."""

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

from w2v.config import OptimizerConfig
from w2v.model.optim import RowOptimizer, rowwise_optimizers
from w2v.model.table import (
    ALIGNMENT,
    CHUNK,
    RowState,
    Table,
    normal,
    record_columns,
    record_width,
    uniform,
)
from w2v.transfer.resident import Resident

STATES = {"exp_avg": RowState(100, 0.0), "exp_inf": RowState(100, 0.25), "step": RowState(1, 3.0)}


def test_record_holds_weight_then_states_in_whole_cache_lines():
    assert record_columns(100, STATES) == {
        "weight": slice(0, 100),
        "exp_avg": slice(100, 200),
        "exp_inf": slice(200, 300),
        "step": slice(300, 301),
    }
    assert record_width(100, STATES) == 320
    assert [record_width(dim, {}) for dim in (1, 32, 33)] == [32, 32, 64]
    assert record_width(100, STATES, aligned=False) == sum(
        [100, *(state.width for state in STATES.values())]
    )


def test_first_values_and_scalars_are_the_tables_own():
    scalars = {"step": torch.tensor(0.0)}
    table, other = (Table("input", 5, 100, STATES, scalars, "cpu") for _ in range(2))
    table.scalars["step"] += 1
    table["weight"].fill_(7)
    assert other.scalars["step"] == 0 and not other["weight"].any()
    assert (
        (table["exp_inf"] == 0.25).all()
        and (table["step"] == 3).all()
        and table["step"].shape == (5, 1)
    )
    assert table.bytes == 5 * 320 * 4


def test_what_is_not_kept_is_given_back():
    table = Table("input", 5, 100, STATES, {}, "cpu")
    table.initialise(uniform(100, 0.5, seed=1))
    weights = table["weight"].clone()
    table.shrink(100)
    assert (
        torch.equal(table["weight"], weights)
        and table.bytes == 5 * 100 * 4 == table.records_VR.untyped_storage().nbytes()
    )
    assert list(table.columns) == ["weight"]
    table.shrink(0)
    assert table.bytes == 0 == table.records_VR.untyped_storage().nbytes() and not table.columns


def test_uniform_depends_on_seed_row_and_column_alone():
    rows = torch.arange(9 * CHUNK["cpu"] // 2)
    whole = uniform(8, 0.5, seed=1)(rows)
    table = Table("input", len(rows), 8, {}, {}, "cpu")
    table.initialise(uniform(8, 0.5, seed=1))
    assert torch.equal(table["weight"], whole)
    assert torch.equal(uniform(8, 0.5, seed=1)(rows[[70_000, 3]]), whole[[70_000, 3]])
    assert not torch.equal(uniform(8, 0.5, seed=2)(rows), whole)


def test_uniform_is_uniform_and_uncorrelated():
    values = uniform(64, 0.5, seed=3)(torch.arange(20_000))
    assert -0.5 <= values.min() < -0.4999 and 0.4999 < values.max() < 0.5
    counts = torch.histc(values, bins=100, min=-0.5, max=0.5)
    assert (
        (counts - 12_800) ** 2 / 12_800
    ).sum() < 160  # chi-square, 99 degrees of freedom, p = 1e-4
    assert torch.corrcoef(values.T).fill_diagonal_(0).abs().max() < 0.035
    assert torch.corrcoef(values[:200]).fill_diagonal_(0).abs().max() < 0.7


def test_normal_is_normal_and_depends_on_seed_row_and_column_alone():
    rows = torch.arange(20_000)
    values = normal(64, 0.5, seed=3)(rows)
    assert torch.equal(normal(64, 0.5, seed=3)(rows[[17_000, 3]]), values[[17_000, 3]])
    assert not torch.equal(normal(64, 0.5, seed=4)(rows), values)
    edges = torch.special.ndtri(torch.arange(1, 100, dtype=torch.float64) / 100).float() * 0.5
    counts = torch.bincount(torch.bucketize(values.flatten(), edges), minlength=100)
    assert (
        (counts - 12_800) ** 2 / 12_800
    ).sum() < 160  # chi-square, 99 degrees of freedom, p = 1e-4
    assert (
        2.4 < values.abs().max() < 3.3
    )  # the extremes of 1.28 M draws lie near 5 standard deviations
    assert torch.corrcoef(values.T).fill_diagonal_(0).abs().max() < 0.035


def test_an_initialiser_of_the_wrong_shape_is_refused():
    with pytest.raises(ValueError, match=r"init gives \[5, 3\] for 5 rows; it must give \[5, 4\]"):
        Table("input", 5, 4, {}, {}, "cpu").initialise(uniform(3, 1.0, 1))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_elements_of_16_bits_halve_the_records(dtype):
    table = Table("input", 5, 100, {"exp_avg": RowState(100, 0.25)}, {}, "cpu", dtype)
    assert table.width == 256 and table.bytes == 5 * 512 and (table["exp_avg"] == 0.25).all()
    page = Resident().fetch(table, torch.tensor([1, 3]))
    assert page.records_UR.dtype == torch.float32
    page["weight"].fill_(1.5)  # which both types hold exactly
    Resident().write_back(page)
    assert (table["weight"] == torch.tensor([0, 1.5, 0, 1.5, 0])[:, None]).all()


def test_rounding_to_bfloat16_keeps_the_mean_and_is_repeatable():
    value = 1 + 0.3 / 128  # three tenths of the way from 1 to the next bfloat16
    table, again = (Table("input", 1000, 64, {}, {}, "cpu", torch.bfloat16) for _ in range(2))
    rows, records = torch.arange(1000), torch.full((1000, 64), value)
    first, second = table.encode(rows, records), table.encode(rows, records)
    assert set(first.unique().tolist()) == {1.0, 1 + 1 / 128}
    assert abs((first > 1).float().mean() - 0.3) < 0.009  # 5 standard deviations
    assert abs((first > 1).float().mean(0) - 0.3).max() < 0.075  # in each column
    assert not torch.equal(first, second)
    assert abs(((first > 1) & (second > 1)).float().mean() - 0.09) < 0.006  # writes are independent
    assert torch.equal(
        again.encode(rows[500:], records[500:]), first[500:]
    )  # of what else is written
    assert torch.equal(table.encode(rows, -records).abs().unique(), first.unique())
    special = torch.tensor(
        [float("nan"), float("inf"), -float("inf"), 0.0, -2.5, 2**-133.0] + [0.0] * 58
    ).view(1, 64)
    special[0, 6:7].view(torch.int32)[0] = 0x7FFFFFFF  # the NaN that a GPU makes
    assert torch.equal(
        table.encode(rows[:1], special)[0, :6].nan_to_num(7.0),
        special[0, :6].bfloat16().nan_to_num(7.0),
    )
    assert table.encode(rows[:1], special)[0, 6].isnan()


def test_small_steps_are_not_lost_in_bfloat16():
    """1,000 steps of a thousandth, from 1: to nearest, the weights would never move."""
    optimizer = RowOptimizer(OptimizerConfig(name="SGD", lr=0.001))
    table = Table("input", 4, 64, {}, {}, "cpu", torch.bfloat16)
    table["weight"].fill_(1.0)
    for _ in range(1000):
        page = Resident().fetch(table, torch.arange(4))
        page.grad_UD = -torch.ones(4, 64)
        optimizer.step(page, 0.001)
        Resident().write_back(page)
    assert abs(table["weight"].float().mean() - 2) < 0.02


@pytest.mark.parametrize("name", rowwise_optimizers())
def test_every_optimizer_steps_16_bit_rows_in_float32(name):
    optimizer = RowOptimizer(OptimizerConfig(name=name, lr=0.05))
    wide, narrow = (
        Table("input", 6, 8, optimizer.states(8), optimizer.scalars, "cpu", dtype)
        for dtype in (torch.float32, torch.bfloat16)
    )
    for table in (wide, narrow):
        table["weight"].fill_(0.5)
        for step in range(3):
            page = Resident().fetch(table, torch.arange(6))
            page.grad_UD = torch.full((6, 8), 1.0 + step)
            optimizer.step(page, 0.05)
            Resident().write_back(page)
    torch.testing.assert_close(narrow["weight"].float(), wide["weight"], rtol=0.03, atol=0.01)
    assert {key: narrow.scalars[key] for key in wide.scalars} == wide.scalars


@pytest.mark.parametrize(
    "settings, words",
    [
        ({"rows": 0}, "a table of 0 rows of 4 dimensions cannot be made"),
        ({"storage": "disk"}, "storage='disk' is unknown; choose from cpu cuda pinned mmap"),
        ({"dtype": torch.int32}, "dtype=torch.int32 cannot be stored"),
        (
            {"dtype": torch.bfloat16, "states": {"step": RowState(1, 0.0)}},
            "cannot hold the state 'step' that counts for each row; use",
        ),
        ({"storage": "mmap"}, "storage='mmap' with path=None"),
        ({"path": "x"}, "storage='cpu' with path=x"),
        (
            {"storage": "mmap", "path": "x.npy", "states": STATES},
            "path=x.npy: an .npy file holds weights alone",
        ),
        (
            {"storage": "mmap", "path": "x.npy", "dtype": torch.bfloat16},
            "path=x.npy: an .npy file holds weights alone",
        ),
    ],
)
def test_tables_that_cannot_be_are_refused(settings, words):
    with pytest.raises(ValueError, match=words):
        Table(
            **{"name": "input", "rows": 5, "dim": 4, "states": {}, "scalars": {}, "storage": "cpu"}
            | settings
        )


def file_table(path, rows=5, dim=100, states=STATES, dtype=torch.float32, scalars=("step",)):
    return Table(
        "input", rows, dim, states, {key: torch.tensor(0.0) for key in scalars}, "mmap", dtype, path
    )


def test_a_table_in_a_file_goes_on_where_it_was(tmp_path):
    table = file_table(tmp_path / "input")
    table.initialise(uniform(100, 1.0, 1))
    assert (
        not table.continued and not (tmp_path / "input").exists()
    )  # no table of that name until it is whole
    table.flush()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["input", "input.json"]
    table["exp_inf"][3] = 7
    table.scalars["step"] += 0.1
    table.flush()
    before = table.records_VR.clone()
    again = file_table(tmp_path / "input")
    assert again.continued and again.width == 320 and torch.equal(again.records_VR, before)
    assert torch.equal(again.scalars["step"], table.scalars["step"]) and (again["step"] == 3).all()
    assert (tmp_path / "input").stat().st_size == table.bytes


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_rows_without_state_may_be_an_npy_file(tmp_path, dtype):
    table = file_table(tmp_path / "x.npy", states={}, dtype=dtype, scalars=())
    table.initialise(normal(100, 1.0, 1))
    table.flush()
    assert np.array_equal(np.load(tmp_path / "x.npy"), table["weight"].numpy()) and os.listdir(
        tmp_path
    ) == ["x.npy"]
    assert torch.equal(
        file_table(tmp_path / "x.npy", states={}, dtype=dtype, scalars=()).records_VR,
        table.records_VR,
    )
    with pytest.raises(
        ValueError, match=r"x.npy holds \(5, 100\) float.*, but the table is \(6, 100\) float"
    ):
        file_table(tmp_path / "x.npy", rows=6, states={}, dtype=dtype, scalars=())


OTHERS = [
    {"rows": 6},
    {"dim": 99},
    {"dtype": torch.float16, "states": {}},
    {"states": {"sum": RowState(100, 0.0)}},
    {"scalars": ("mu",)},
]


@pytest.mark.parametrize("other", OTHERS, ids=str)
def test_files_of_another_layout_are_refused_and_stay_as_they_are(tmp_path, other):
    file_table(tmp_path / "input").flush()
    before = (tmp_path / "input").read_bytes()
    with pytest.raises(
        ValueError,
        match=r'input holds \{"rows": 5, .*"weight": 100.*, but the table is \{.*; use the settings',
    ) as error:
        file_table(tmp_path / "input", **other)
    assert "\n" not in str(error.value) and (tmp_path / "input").read_bytes() == before


def test_damaged_files_are_refused(tmp_path):
    file_table(tmp_path / "input").flush()
    os.truncate(tmp_path / "input", 1000)
    with pytest.raises(ValueError, match="input has 1,000 bytes instead of 6,400; it is damaged"):
        file_table(tmp_path / "input")
    for content in ("{", "[]", json.dumps({"rows": 5})):
        (tmp_path / "input.json").write_text(content)
        with pytest.raises(
            ValueError, match="input exists, but .*input.json does not say what it holds"
        ):
            file_table(tmp_path / "input")


def test_a_full_disk_is_noticed_before_anything_is_written(tmp_path, monkeypatch):
    def no_room(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", no_room)
    with pytest.raises(OSError, match="No space left on device: .*input needs 6,400 bytes"):
        file_table(tmp_path / "input")
    gc.collect()
    assert not list(tmp_path.iterdir())


KILLED = """
import os, signal, sys, torch
from tests.unit.test_table import file_table
table = file_table(sys.argv[1])
table["weight"].fill_(1); table.scalars["step"].fill_(1); table.flush()
table["weight"][3:].fill_(2); table.scalars["step"].fill_(2)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_process_leaves_rows_whole_and_scalars_as_of_the_last_flush(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path / "input")], cwd=Path(__file__).parents[2]
    )
    assert done.returncode == -9
    table = file_table(tmp_path / "input")
    assert (
        table.scalars["step"] == 1
        and (table["weight"][:3] == 1).all()
        and (table["exp_inf"] == 0.25).all()
    )
    assert all(row.unique().tolist() in ([1.0], [2.0]) for row in table["weight"])


@pytest.mark.gpu
def test_uniform_is_the_same_on_the_gpu():
    rows = torch.arange(1000)
    assert torch.equal(uniform(96, 0.1, 5)(rows), uniform(96, 0.1, 5)(rows.cuda()).cpu())
    torch.testing.assert_close(
        normal(96, 0.1, 5)(rows), normal(96, 0.1, 5)(rows.cuda()).cpu(), rtol=1e-6, atol=0
    )


@pytest.mark.gpu
def test_rounding_is_the_same_on_the_gpu():
    rows, records = torch.arange(1000), torch.randn(1000, 64)
    on_cpu, on_gpu = (
        Table("input", 1000, 64, {}, {}, place, torch.bfloat16) for place in ("cpu", "cuda")
    )
    assert torch.equal(
        on_cpu.encode(rows, records), on_gpu.encode(rows.cuda(), records.cuda()).cpu()
    )


@pytest.mark.gpu
def test_pinned_memory_is_aligned_pinned_and_released():
    table = Table("input", 1000, 100, STATES, {}, "pinned")
    assert table.records_VR.data_ptr() % ALIGNMENT == 0 and table.records_VR.is_pinned()
    assert (table["exp_inf"] == 0.25).all()
    from cupy.cuda.runtime import pointerGetAttributes

    pointer = table.records_VR.data_ptr()
    registered = pointerGetAttributes(pointer).type
    del table
    assert pointerGetAttributes(pointer).type != registered
