"""Pairs of tables with known content, for tests that save and load them."""

import torch

from w2v.config import OptimizerConfig
from w2v.distributed.ranks import SINGLE
from w2v.rows.optim import RowOptimizer
from w2v.rows.table import Table


def make_tables(
    ranks=SINGLE,
    filled=True,
    name="NAdam",
    rows=23,
    dim=5,
    step="table",
    dtype=torch.float32,
    **more,
):
    """Return a rank's shards of an input and an output table.

    filled: each number then depends on the table and on row and column of the whole table alone.
    """
    optimizer = RowOptimizer(OptimizerConfig(name=name, step=step))
    tables = []
    for number, table_name in enumerate(("input", "output")):
        shard_rows, states = ranks.shard_rows(rows), optimizer.states(dim)
        table = Table(table_name, shard_rows, dim, states, optimizer.scalars, "cpu", dtype, **more)
        if filled:
            rows_n = ranks.global_rows(torch.arange(shard_rows))
            columns = sum(part.stop - part.start for part in table.columns.values())
            numbers = rows_n[:, None] * 100 + torch.arange(columns) + number * 10_000
            table.records_VR[:, :columns] = numbers.sin()
            for value in table.scalars.values():
                value.fill_(3 + number if value.dtype == torch.int64 else 0.1)
        tables.append(table)
    return tables


def same(tables, expected):
    """Whether all fields and scalars are equal."""
    for ours, theirs in zip(tables, expected, strict=True):
        if ours.scalars != theirs.scalars:
            return False
        if not all(torch.equal(ours[field], theirs[field]) for field in theirs.columns):
            return False
    return True
