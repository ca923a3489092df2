"""Engines: fetch the marked rows of a table and write them back."""

import pytest
import torch

from w2v.rows.cache import Engine, RowCache
from w2v.rows.moves import WantedRows
from w2v.rows.table import RowState, Table
from w2v.word2vec.step import Waits

ROWS, DIM = 800, 30
GPU = pytest.mark.gpu
PLACES = [
    ("cpu", "cpu"),
    pytest.param(("pinned", "cuda"), marks=GPU),
    pytest.param(("cpu", "cuda"), marks=GPU),
]


def make_table(storage, rows=ROWS, dim=DIM):
    table = Table("vectors", rows, dim, {"state": RowState(dim, 0.0)}, {}, storage)
    table["weight"].copy_(torch.randn(rows, dim, generator=torch.Generator().manual_seed(0)))
    return table


def random_marks(seed, share=0.1):
    return torch.rand(ROWS, generator=torch.Generator().manual_seed(seed)) < share


@pytest.mark.parametrize("place", PLACES)
def test_pages_bring_and_write_back_exactly_the_marked_rows(place):
    """The cache has room for one page at a time."""
    storage, device = place
    table = make_table(storage)
    expected_AR = table.records_VR.cpu().clone()
    marked = [random_marks(1), random_marks(2), random_marks(3, share=0.0), random_marks(4)]
    slots = max(int(marks_A.sum()) for marks_A in marked)
    engine = RowCache(table, slots, torch.device(device))
    view = rows_U = None
    used = 0
    for marks_A in marked:
        engine.prefetch(WantedRows(marks_A.to(device)))
        if view:  # the current page is computed while the next one is prefetched
            view.records_SR[view.slots(rows_U.to(device))] *= 2
            expected_AR[rows_U] *= 2
        engine.wait()
        view = engine.view
        rows_U = torch.nonzero(marks_A).flatten()
        found_UR = view.records_SR[view.slots(rows_U.to(device))]
        assert torch.equal(found_UR.cpu(), expected_AR[rows_U])
        used += len(rows_U)
    engine.flush()
    assert torch.equal(table.records_VR.cpu(), expected_AR)
    assert engine.stats.rows_used == used and used - slots <= engine.stats.rows_read <= used


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=GPU)])
def test_the_view_of_a_resident_table_is_the_table_itself(device):
    table = make_table(device)
    engine = Engine(table)
    engine.prefetch(WantedRows(random_marks(1).to(device)))
    rows_U = torch.tensor([3, 5], device=device)
    assert engine.view.records_SR is table.records_VR
    assert engine.view.slots(rows_U) is rows_U
    engine.flush()
    assert engine.stats == (0, 0, 0) and not engine.moves_rows


@GPU
@pytest.mark.alone  # others use the link too
def test_wait_is_as_long_as_the_moves_take():
    rows, device = 1 << 20, torch.device("cuda")
    table = make_table("pinned", 2 * rows, 64)
    every_A = torch.arange(2 * rows, device=device)

    def waits_of_pages():
        """Return the waits for half of the rows, again, and for the others."""
        engine, waits, seconds = RowCache(table, rows, device), Waits(), []
        for is_wanted_A in (every_A < 1, every_A < rows, every_A < rows, every_A >= rows):
            before = waits.seconds
            engine.prefetch(WantedRows(is_wanted_A))
            with waits.counted(device):
                engine.wait()
            torch.cuda.synchronize()
            seconds.append(waits.seconds - before)
        return seconds[1:]

    waits_of_pages()  # kernels are compiled
    read, nothing, both_ways = map(min, zip(*[waits_of_pages() for _ in range(3)], strict=True))
    assert 5e9 < table.bytes / 2 / read < 5e11  # bytes/s of the link
    assert nothing < 0.2 * min(read, both_ways)
