"""Tables go to disk and come back as they were, or are refused."""

import pytest
import torch

from w2v.checkpoint import load_table, save_table
from w2v.config import OptimizerConfig
from w2v.optim import RowOptimizer
from w2v.table import Table


def random_table(name="NAdam", rows=9, dim=5, step="table"):
    optimizer = RowOptimizer(OptimizerConfig(name=name, step=step))
    table = Table("input", rows, dim, optimizer.states(dim), optimizer.scalars, "cpu")
    for field in table.columns:
        table[field].normal_()
    for value in table.scalars.values():
        value.fill_(0.375)
    return table


@pytest.mark.parametrize("step", ["table", "row"])
def test_round_trip(tmp_path, step):
    saved, loaded = random_table(step=step), random_table(step=step)
    assert save_table(saved, tmp_path / "tables") == tmp_path / "tables" / "input.safetensors"
    load_table(loaded, tmp_path / "tables")
    assert all(torch.equal(saved[name], loaded[name]) for name in saved.columns)
    assert saved.scalars == loaded.scalars
    assert [path.name for path in (tmp_path / "tables").iterdir()] == ["input.safetensors"]


@pytest.mark.parametrize("other", [{"name": "Adamax"}, {"rows": 8}, {"dim": 6}, {"step": "row"}])
def test_tables_of_another_model_are_refused_and_nothing_is_loaded(tmp_path, other):
    save_table(random_table(), tmp_path)
    table = random_table(**other)
    before = table.records_VR.clone()
    with pytest.raises(ValueError, match=r"input.safetensors holds .*weight 9x5.* but this model has .*; use the config"):
        load_table(table, tmp_path)
    assert torch.equal(table.records_VR, before)
