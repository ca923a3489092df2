"""Benchmark of transfers: its parts on the CPU, and a small run on a GPU."""

import json

import pytest
import torch

from tests.bench import measure, transfer
from tests.support.each_case import each_case


@each_case("count, sets", [(10, measure.CALLS), (300, 3), (1000, 1)])
def test_row_sets_share_no_row(count, sets):
    drawn = measure.row_sets(1000, count, device="cpu")
    assert [len(rows) for rows in drawn] == [count] * sets
    assert len(torch.cat(drawn).unique()) == sets * count


@pytest.mark.gpu
def test_small_sizes_run(tmp_path):
    small = "--gib 0.25 --counts 1024 --tables 100000 --moved 8192 --plot".split()
    transfer.main([*small, str(tmp_path / "transfer.png"), "--results", str(tmp_path / "results")])
    (file,) = (tmp_path / "results").iterdir()
    cases = json.loads(file.read_text())["figures"]
    assert "records 1536 B x 1024 rows of 0.25 GiB" in cases
    assert all(value > 0 for figures in cases.values() for value in figures.values())
