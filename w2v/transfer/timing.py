"""How fast each link moves records of a table on this machine, found by moving some."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor

from w2v.table import Storage, Table
from w2v.transfer import Link

PROBE_BYTES = 256 << 20  # of a table that stands for a large one
MOVED_BYTES = 16 << 20  # at a time
SECONDS = 0.2  # each way


def rates(link: Link, storage: Storage, dim: int, dtype: torch.dtype, device: torch.device) -> tuple[float, float]:
    """Bytes a second to the device and from it, for random records of `dim` elements of a table in that storage.

    Raises `MemoryError` or `ValueError` where such a table cannot be made.
    """
    record_bytes = dim * dtype.itemsize
    table = Table("probe", max(2, PROBE_BYTES // record_bytes), dim, {}, {}, storage, dtype)
    rows_U = torch.randperm(table.rows, device=device)[: max(1, MOVED_BYTES // record_bytes)].sort().values
    records_UR = torch.zeros(len(rows_U), table.width, dtype=dtype, device=device)
    return tuple(_rate(move, table, rows_U, records_UR) for move in (link.read, link.write))


def _rate(move: Callable[[Table, Tensor, Tensor], None], table: Table, rows_U: Tensor, records_UR: Tensor) -> float:
    calls, start = -1, 0.0
    while calls < 1 or time.perf_counter() - start < SECONDS:
        if calls == 0:  # what came before was for warming up
            start = time.perf_counter()
        move(table, rows_U, records_UR)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        calls += 1
    return calls * records_UR.numel() * records_UR.element_size() / (time.perf_counter() - start)
