"""Engines: fetch the marked rows of both tables and write them back."""

import pytest
import torch

from w2v.model.table import RowState, Table
from w2v.transfer.engine import Engine, Paged
from w2v.transfer.links import link_between, measure_copy_rate

ROWS, DIM = 400, 30
GPU = pytest.mark.gpu
PLACES = [
    ("cpu", "cpu"),
    pytest.param(("pinned", "cuda"), marks=GPU),
    pytest.param(("cpu", "cuda"), marks=GPU),
]


def make_tables(storage, rows=ROWS, dim=DIM):
    tables = []
    for seed, name in enumerate(("input", "output")):
        table = Table(name, rows, dim, {"state": RowState(dim, 0.0)}, {}, storage)
        generator = torch.Generator().manual_seed(seed)
        table["weight"].copy_(torch.randn(rows, dim, generator=generator))
        tables.append(table)
    return tables


def random_marks(seed, share=0.1):
    return torch.rand(2, ROWS, generator=torch.Generator().manual_seed(seed)) < share


@pytest.mark.parametrize("place", PLACES)
def test_pages_bring_and_write_back_exactly_the_marked_rows(place):
    storage, device = place
    tables = make_tables(storage)
    expected = [table.records_VR.cpu().clone() for table in tables]
    engine = Paged(link_between(tables[0], torch.device(device)), tables, torch.device(device))
    page = None
    rows_T = []
    used = 0
    marked = [random_marks(1), random_marks(2), random_marks(3, share=0.0), random_marks(4)]
    for marks_TV in marked:
        engine.prefetch(marks_TV.to(device))
        if page:  # the current page is computed while the next one is prefetched
            for view, records, rows in zip(page, expected, rows_T, strict=True):
                view.records_SR[view.slots(rows.to(device))] *= 2
                records[rows] *= 2
        page = engine.page()
        assert engine.page() is page
        rows_T = [torch.nonzero(marks_V).flatten() for marks_V in marks_TV]
        for view, records, rows in zip(page, expected, rows_T, strict=True):
            assert len(view.records_SR) == len(rows)
            found = view.records_SR[view.slots(rows.to(device))]
            assert torch.equal(found.cpu(), records[rows])
        used += int(marks_TV.sum())
    engine.flush()
    for table, records in zip(tables, expected, strict=True):
        assert torch.equal(table.records_VR.cpu(), records)
    assert engine.stats[:3] == (used, used, used)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=GPU)])
def test_resident_page_is_the_tables_themselves(device):
    tables = make_tables(device)
    engine = Engine(tables)
    engine.prefetch(random_marks(1).to(device))
    rows = torch.tensor([3, 5], device=device)
    for view, table in zip(engine.page(), tables, strict=True):
        assert view.records_SR is table.records_VR
        assert view.slots(rows) is rows
    engine.flush()
    assert engine.stats == (0, 0, 0, 0.0) and not engine.moves_rows


@GPU
def test_wait_is_as_long_as_the_moves_take():
    rows, device = 1 << 19, torch.device("cuda")
    tables = make_tables("pinned", rows, 64)
    engine = Paged(link_between(tables[0], device), tables, device)

    def wait_seconds(count):
        """Return the stream's wait for a page of `count` rows per table."""
        before = engine.stats.wait_seconds
        engine.prefetch(torch.arange(rows, device=device).lt(count).expand(2, -1))
        engine.page()
        torch.cuda.synchronize()
        return engine.stats.wait_seconds - before

    wait_seconds(1)  # kernels are compiled
    # A page after one of a row is read; the next page also writes it back.
    waits = [[wait_seconds(count) for count in (1, rows, rows)] for _ in range(3)]
    _, read, read_and_write = map(min, zip(*waits, strict=True))
    tables_bytes = sum(table.bytes for table in tables)
    rate = measure_copy_rate(device)
    assert rate > 1e9 and 0.2 < read * rate / tables_bytes < 20
    assert read_and_write > 1.2 * read
