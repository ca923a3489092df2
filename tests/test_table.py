"""Records: their layout, their first values, and memory that is exactly as large as it must be."""

import pytest
import torch

from w2v.table import ALIGNMENT, CHUNK_ROWS, RowState, Table, record_columns, record_width, uniform

STATES = {"exp_avg": RowState(100, 0.0), "exp_inf": RowState(100, 0.25), "step": RowState(1, 3.0)}


def test_record_holds_weight_then_states_in_whole_cache_lines():
    assert record_columns(100, STATES) == {
        "weight": slice(0, 100), "exp_avg": slice(100, 200), "exp_inf": slice(200, 300), "step": slice(300, 301),
    }  # fmt: skip
    assert record_width(100, STATES) == 320
    assert [record_width(dim, {}) for dim in (1, 32, 33)] == [32, 32, 64]


def test_first_values_and_scalars_are_the_tables_own():
    scalars = {"step": torch.tensor(0.0)}
    table, other = (Table("input", 5, 100, STATES, scalars, "cpu") for _ in range(2))
    table.scalars["step"] += 1
    table["weight"].fill_(7)
    assert other.scalars["step"] == 0 and not other["weight"].any()
    assert (table["exp_inf"] == 0.25).all() and (table["step"] == 3).all() and table["step"].shape == (5, 1)
    assert table.bytes == 5 * 320 * 4


def test_uniform_depends_on_seed_row_and_column_alone():
    rows = torch.arange(3 * CHUNK_ROWS // 2)
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
    assert ((counts - 12_800) ** 2 / 12_800).sum() < 160  # chi-square, 99 degrees of freedom, p = 1e-4
    assert torch.corrcoef(values.T).fill_diagonal_(0).abs().max() < 0.035
    assert torch.corrcoef(values[:200]).fill_diagonal_(0).abs().max() < 0.7


@pytest.mark.gpu
def test_uniform_is_the_same_on_the_gpu():
    rows = torch.arange(1000)
    assert torch.equal(uniform(96, 0.1, 5)(rows), uniform(96, 0.1, 5)(rows.cuda()).cpu())


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
