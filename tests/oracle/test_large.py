"""Last rows of over 2^31 elements behave like a small table.

The elements have two bytes, to save memory.
"""

import pytest
import torch

from tests.support.steps import train
from w2v.config import OptimizerConfig
from w2v.rows.cache import Engine, RowCache
from w2v.rows.link import MappedLink
from w2v.rows.moves import WantedRows
from w2v.rows.optim import RowOptimizer
from w2v.rows.table import Table
from w2v.system.resources import free_host_bytes, lockable_bytes
from w2v.word2vec.batch import Batch, StepShape, StepState
from w2v.word2vec.cuda import CudaKernels
from w2v.word2vec.exchange import Exchange
from w2v.word2vec.step import TrainingStep

ROWS, FEW, DIM, DTYPE = 18_000_000, 2000, 128, torch.float16
FIRST = ROWS - FEW  # the rows from here on are those of the small table
assert FIRST * DIM > 2**31
pytestmark = pytest.mark.gpu


def make_table(rows, storage, seed=0, states=None):
    """Return a table whose last rows are random; skip if memory is too small."""
    nbytes = rows * DIM * DTYPE.itemsize * (1 + len(states or {}))
    if storage == "cuda":
        free = torch.cuda.mem_get_info()[0]
    else:
        free = min(free_host_bytes(), lockable_bytes())
    if 1.1 * nbytes > free:
        pytest.skip(f"a {storage} table of {nbytes:,} bytes does not fit into {free:,}")
    table = Table("large", rows, DIM, states or {}, {}, storage, DTYPE)
    generator = torch.Generator().manual_seed(seed)
    table["weight"][-FEW:] = torch.randn(FEW, DIM, generator=generator).to(table.records_VR)
    return table


def some_rows(count, seed):
    return torch.randperm(FEW, generator=torch.Generator().manual_seed(seed))[:count].sort().values


@pytest.mark.parametrize("storage", ["cuda", "pinned"])
def test_records_are_gathered_and_scattered(storage):
    large, rows = make_table(ROWS, storage), some_rows(300, 1).cuda()
    before = large.records_VR[FIRST:].cpu().clone()
    records = torch.zeros(300, DIM, dtype=DTYPE, device="cuda")
    MappedLink(large.records_VR).read(rows + FIRST, records)
    assert torch.equal(records.cpu(), before[rows.cpu()])
    records += 1
    MappedLink(large.records_VR).write(rows + FIRST, records)
    torch.cuda.synchronize()
    before[rows.cpu()] += 1
    assert torch.equal(large.records_VR[FIRST:].cpu(), before)


def test_records_move_to_and_from_distant_slots():
    large, rows = make_table(FEW, "pinned"), some_rows(300, 2).cuda()
    records, slots = make_table(ROWS, "cuda", seed=1).records_VR, some_rows(300, 3).cuda() + FIRST
    before, expected = large.records_VR.clone(), records[FIRST:].cpu().clone()
    MappedLink(large.records_VR).read(rows, records, slots)
    expected[slots.cpu() - FIRST] = before[rows.cpu()]
    assert torch.equal(records[FIRST:].cpu(), expected)
    records[FIRST:] *= 2
    MappedLink(large.records_VR).write(rows, records, slots)
    torch.cuda.synchronize()
    before[rows.cpu()] *= 2
    assert torch.equal(large.records_VR, before)


def test_rows_are_cached_and_evicted():
    """Double the rows of several pages in a cache that cannot hold them all."""
    large = make_table(ROWS, "pinned")
    expected = large.records_VR[FIRST:].clone()
    engine = RowCache(large, 700, torch.device("cuda"))
    marks_A = torch.zeros(ROWS, dtype=torch.bool, device="cuda")
    for seed in range(6):
        rows = some_rows(550, seed)
        marks_A.zero_()
        marks_A[rows.cuda() + FIRST] = True
        engine.prefetch(WantedRows(marks_A))
        engine.wait()
        view = engine.view
        slots = view.slots(rows.cuda() + FIRST)
        assert torch.equal(view.records_SR[slots].cpu(), expected[rows])
        view.records_SR[slots] *= 2
        expected[rows] *= 2
    engine.flush()
    assert engine.stats.rows_read > 1500
    assert engine.stats.rows_written > 800
    assert torch.equal(large.records_VR[FIRST:], expected)


@pytest.mark.parametrize("name", ["SGD", "Adagrad"])
def test_fused_steps_train_the_last_rows(name):
    g, device = torch.Generator().manual_seed(3), torch.device("cuda")
    words = torch.randint(FEW // 2, (3000,), generator=g, dtype=torch.int32).to(device)
    negatives = torch.randint(FEW // 2, (2000, 5), generator=g, dtype=torch.int32).to(device)
    windows = torch.randint(1, 6, (2000,), generator=g, dtype=torch.int32).to(device)
    sentences = torch.arange(3000).int().to(device) // 20

    def trained(rows):
        optimizer = RowOptimizer(OptimizerConfig(name=name, lr=0.1))
        table = make_table(rows, "cuda", states=optimizer.states(DIM))
        kernels = CudaKernels(StepShape(rows // 2, DIM, DTYPE, device))
        exchange, state = Exchange(kernels, 1), StepState(device)
        planning = torch.cuda.Stream(device)
        engine = Engine(table)
        step = TrainingStep(table, kernels, engine, exchange, optimizer, state, planning)
        first = (rows - FEW) // 2  # the word of the first row of the small table
        batch = Batch(words + first, sentences, 400, windows, negatives + first, 5, 0.0)
        losses, _ = train(step, [batch] * 3, 0.1)
        assert not state.fault
        return losses, table.records_VR[-FEW:].cpu().float()

    (losses, records), (expected_losses, expected) = trained(ROWS), trained(FEW)
    torch.testing.assert_close(losses, expected_losses, rtol=1e-3, atol=0)
    torch.testing.assert_close(records, expected, rtol=1e-2, atol=1e-2)
