"""Tables of more than 2^31 elements: what is done to rows at their end is what is done to a small table of these rows.

Elements are of two bytes, to be cheap.
"""

import pytest
import torch

from w2v.config import OptimizerConfig
from w2v.kernels.batch import Batch
from w2v.model.optim import RowOptimizer
from w2v.model.table import Table
from w2v.training.memory import free_host_bytes, lockable_bytes
from w2v.training.step import FusedPipeline, Planned
from w2v.transfer.cache_mapped import CachedMapped
from w2v.transfer.mapped import Mapped
from w2v.transfer.resident import Resident

ROWS, FEW, DIM, DTYPE = 18_000_000, 1000, 128, torch.float16
FIRST = ROWS - FEW  # the rows from here on are those of the small tables
assert FIRST * DIM > 2**31
pytestmark = pytest.mark.gpu


def table(rows, storage, seed=0, states=None):
    """Its last rows are random."""
    nbytes = rows * DIM * DTYPE.itemsize * (1 + len(states or {}))
    free = (
        torch.cuda.mem_get_info()[0]
        if storage == "cuda"
        else min(free_host_bytes(), lockable_bytes())
    )
    if 1.1 * nbytes > free:
        pytest.skip(
            f"a {storage} table of {nbytes / 2**30:.1f} GiB has no room in {free / 2**30:.1f} GiB"
        )
    made = Table("large", rows, DIM, states or {}, {}, storage, DTYPE)
    made["weight"][-FEW:] = torch.randn(FEW, DIM, generator=torch.Generator().manual_seed(seed)).to(
        made.records_VR
    )
    return made


def some_rows(count, seed):
    return torch.randperm(FEW, generator=torch.Generator().manual_seed(seed))[:count].sort().values


@pytest.mark.parametrize("storage", ["cuda", "pinned"])
def test_records_are_gathered_and_scattered(storage):
    large, rows = table(ROWS, storage), some_rows(300, 1).cuda()
    before = large.records_VR[FIRST:].cpu().clone()
    records = torch.zeros(300, DIM, dtype=DTYPE, device="cuda")
    Mapped().read(large, rows + FIRST, records)
    assert torch.equal(records.cpu(), before[rows.cpu()])
    records += 1
    Mapped().write(large, rows + FIRST, records)
    torch.cuda.synchronize()
    before[rows.cpu()] += 1
    assert torch.equal(large.records_VR[FIRST:].cpu(), before)


def test_slots_far_apart():
    """Records move between a table and slots on the GPU that lie beyond 2^31 elements, too."""
    large, rows, slots = (
        table(FEW, "pinned"),
        some_rows(300, 2).cuda(),
        some_rows(300, 3).cuda() + FIRST,
    )
    records = table(ROWS, "cuda", seed=1).records_VR
    before, expected = large.records_VR.clone(), records[FIRST:].cpu().clone()
    Mapped().read(large, rows, records, slots)
    expected[slots.cpu() - FIRST] = before[rows.cpu()]
    assert torch.equal(records[FIRST:].cpu(), expected)
    records[FIRST:] *= 2
    Mapped().write(large, rows, records, slots)
    torch.cuda.synchronize()
    before[rows.cpu()] *= 2
    assert torch.equal(large.records_VR, before)


def test_rows_change_places():
    """Pages of rows at the end of two tables, and none kept: each is doubled, as often as it has a page."""
    tables = [table(ROWS, "pinned", seed) for seed in (1, 2)]
    expected = [large.records_VR[FIRST:].clone() for large in tables]
    engine = CachedMapped(tables, 700, torch.device("cuda"))
    marks_TV = torch.zeros(2, ROWS, dtype=torch.bool, device="cuda")
    for seed in range(6):
        both = some_rows(300, seed), some_rows(250, seed + 50)
        marks_TV.zero_()
        for marks_V, rows in zip(marks_TV, both, strict=True):
            marks_V[rows.cuda() + FIRST] = True
        torch.cuda.synchronize()
        engine.prefetch(marks_TV)
        for large, rows, mine in zip(tables, both, expected, strict=True):
            page = engine.fetch(large, rows.cuda() + FIRST)
            assert torch.equal(page.records_UR.cpu(), mine[rows].float())
            page.records_UR *= 2
            engine.write_back(page)
            mine[rows] *= 2
    engine.flush()
    assert engine.rows_read > 1500 and engine.rows_written > 800
    for large, mine in zip(tables, expected, strict=True):
        assert torch.equal(large.records_VR[FIRST:], mine)


@pytest.mark.parametrize("name", ["SGD", "Adagrad"])
def test_steps_in_place(name):
    """Claims, gradients and the optimizer's kernel, for words at the end of the vocabulary."""
    g, device = torch.Generator().manual_seed(3), torch.device("cuda")
    words, negatives = (
        torch.randint(FEW, shape, generator=g, dtype=torch.int32).to(device)
        for shape in ((3000,), (2000, 5))
    )
    windows, sentences = (
        torch.randint(1, 6, (2000,), generator=g, dtype=torch.int32).to(device),
        torch.arange(3000).int().to(device) // 20,
    )

    def stepped(rows):
        optimizer, first = RowOptimizer(OptimizerConfig(name=name, lr=0.1), fused=True), rows - FEW
        tables = [table(rows, "cuda", seed, optimizer.states(DIM)) for seed in (1, 2)]
        pipeline = FusedPipeline(*tables, Resident(), optimizer, device)
        batch = Batch(words + first, sentences, 400, windows, negatives + first, 5, 0.0)
        losses = torch.stack([pipeline.step(Planned(batch, None), 0.1).loss for _ in range(3)])
        assert not pipeline.fault
        return losses.cpu(), [made.records_VR[first:].cpu() for made in tables]

    (losses, large), (expected, small) = stepped(ROWS), stepped(FEW)
    torch.testing.assert_close(losses, expected, rtol=1e-3, atol=0)
    for mine, other in zip(large, small, strict=True):
        torch.testing.assert_close(mine.float(), other.float(), rtol=1e-2, atol=1e-2)
