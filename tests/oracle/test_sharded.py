"""Ranks that train together leave what one rank with the whole batch leaves: every engine, every optimizer."""

import numpy as np
import pytest
import torch

from tests.oracle.test_cached import HostLink
from tests.support.joined import Pool
from w2v.config import OptimizerConfig
from w2v.distributed.ranks import SINGLE
from w2v.kernels.batch import Batch
from w2v.model.optim import RowOptimizer, rowwise_optimizers
from w2v.model.table import Table
from w2v.training.step import FAULTS, Pipeline
from w2v.transfer.cache import Cached
from w2v.transfer.mapped import Mapped
from w2v.transfer.paged import Paged
from w2v.transfer.resident import Resident
from w2v.transfer.sharded import Sharded

ROWS, DIM, STEPS, CENTERS = 23, 6, 6, 12
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(
    scope="module", params=["2 CPUs", "4 CPUs", pytest.param("2 GPUs", marks=pytest.mark.gpu)]
)
def pool(request):
    size, device = int(request.param[0]), "cuda" if "GPU" in request.param else "cpu"
    if device == "cuda" and torch.cuda.device_count() < size:
        pytest.skip(f"needs {size} GPUs, and there are {torch.cuda.device_count()}")
    pool = Pool(size, device)
    yield pool
    pool.close()


def make_engine(name, tables, device):
    link, many = Mapped() if device == "cuda" else HostLink(), 2 * tables[0].rows
    match name:
        case "resident":
            return Resident()
        case "paged":
            return Paged(link)
        case "cached":
            return Cached(link, tables, many, torch.device(device))
        case "cached with little room":
            return Cached(link, tables, max(1, int(0.95 * many)), torch.device(device))


def storage(name, device):
    """Where the tables of an engine lie."""
    return device if name == "resident" or device == "cpu" else "pinned"


def some_batches(rank, size, device):
    """A rank's part of the batches: one of several ranks has them apart, with no text in common."""
    draw = np.random.default_rng(5)
    for _ in range(STEPS):
        lengths = [CENTERS // 4] * 4
        words = torch.from_numpy(draw.integers(0, ROWS, CENTERS)).int()
        sentences = torch.repeat_interleave(torch.arange(4), torch.tensor(lengths)).int()
        windows = torch.from_numpy(draw.integers(1, 3, CENTERS)).int()
        negatives = torch.from_numpy(draw.integers(0, ROWS, (CENTERS, 3))).int()
        mine = slice(CENTERS * rank // size, CENTERS * (rank + 1) // size)
        parts = [part[mine].to(device) for part in (words, sentences, windows, negatives)]
        yield Batch(*parts[:2], 0, *parts[2:], 2, 0.0)


def start(row_numbers, seed):
    """Weights that a row's number says, to the last bit on every device."""
    weights = torch.sin(row_numbers.cpu()[:, None] * (seed + 1) * 1.7 + torch.arange(DIM) * 0.9)
    return weights.to(row_numbers.device)


def trained(ranks, name, optimizer, dtype, cap=0, steps_per_page=1, device="cpu"):
    """The whole records of this rank's rows of both tables after some steps, the losses, and the sums of pairs."""
    torch.use_deterministic_algorithms(True)
    optimizer = RowOptimizer(OptimizerConfig(name=optimizer, lr=0.05, occurrence_cap=cap))
    rows, place = ranks.shard_rows(ROWS), storage(name, device)
    tables = [
        Table(key, rows, DIM, optimizer.states(DIM), optimizer.scalars, place, dtype)
        for key in ("input", "output")
    ]
    for seed, table in enumerate(tables):
        table.initialise(lambda rows, seed=seed: start(ranks.global_rows(rows), seed).to(dtype))
    engine = make_engine(name, tables, device)
    if ranks.size > 1:
        engine = Sharded(engine, ranks)
    pipeline = Pipeline(
        *tables, engine, optimizer, torch.device(device), steps_per_page, ranks=ranks, rows=ROWS
    )
    results = [
        pipeline.step(planned, 0.05)
        for planned in pipeline.ahead(some_batches(ranks.rank, ranks.size, device))
    ]
    engine.flush()
    return (
        [table.records_VR.cpu() for table in tables],
        [float(loss) for loss, _ in results],
        [int(pairs) for _, pairs in results],
    )


def together(shards):
    """The rows of all ranks in one."""
    whole = torch.empty(ROWS, shards[0].shape[1], dtype=shards[0].dtype)
    for rank, shard in enumerate(shards):
        whole[rank :: len(shards)] = shard
    return whole


def check(pool, name, optimizer, dtype=torch.float64, cap=0, steps_per_page=1):
    tables, losses, pairs = trained(SINGLE, "resident", optimizer, dtype, cap)
    several = pool.run(trained, name, optimizer, dtype, cap, steps_per_page, pool.device)
    close = (
        {"rtol": 1e-9, "atol": 1e-11} if dtype == torch.float64 else {"rtol": 2e-4, "atol": 2e-6}
    )
    for number, table in enumerate(tables):
        torch.testing.assert_close(
            together([ours[number] for ours, _, _ in several]), table, **close
        )
    for _, our_losses, our_pairs in several:
        assert our_losses == pytest.approx(losses, rel=1e-5) and our_pairs == pairs


@pytest.mark.parametrize("name", ["resident", "paged", "cached", "cached with little room"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_every_engine(pool, name, dtype):
    check(pool, name, "Adamax", dtype=dtype)


@pytest.mark.parametrize("optimizer", rowwise_optimizers())
def test_every_optimizer(pool, optimizer):
    check(pool, "resident", optimizer)


@pytest.mark.parametrize("name", ["resident", "cached"])
def test_pages_that_serve_several_steps(pool, name):
    check(pool, name, "Adam", steps_per_page=3)


def test_capped_occurrences_are_counted_over_all_ranks(pool):
    check(pool, "resident", "SGD", cap=2)


def diverged(ranks, at_rank, device):
    """Who has seen the fault, and whether its rows are as they were, when one rank's text meets a row that is not finite."""
    optimizer = RowOptimizer(OptimizerConfig(name="SGD", lr=0.05))
    tables = [
        Table(key, ranks.shard_rows(ROWS), DIM, {}, {}, device) for key in ("input", "output")
    ]
    for table in tables:
        table["weight"].fill_(1.0)
    if ranks.rank == 0:
        tables[0]["weight"][0] = torch.nan  # row 0, which belongs to rank 0
    before = [table.records_VR.clone() for table in tables]
    pipeline = Pipeline(
        *tables, Sharded(Resident(), ranks), optimizer, torch.device(device), ranks=ranks, rows=ROWS
    )
    parts = [0 if ranks.rank == at_rank else 5, 7], [0, 0], [1, 1], [[9], [9]]
    words, sentences, windows, noise = (
        torch.tensor(part, dtype=torch.int32, device=device) for part in parts
    )
    batch = Batch(words, sentences, 0, windows, noise, 1, 0.0)
    for planned in pipeline.ahead([batch]):
        pipeline.step(planned, 0.05)
    kept = [
        torch.equal(old.nan_to_num(), table.records_VR.nan_to_num())
        for old, table in zip(before, tables, strict=True)
    ]
    return int(pipeline.fault) >> len(FAULTS), kept


def test_a_fault_of_one_rank_stops_all_before_they_write(pool):
    for step, untouched in pool.run(diverged, 1, pool.device):
        assert step == 1 and all(untouched)


def test_rows_are_dealt_in_turn():
    ranks = [type("Some", (type(SINGLE),), {"rank": rank, "size": 3})() for rank in range(3)]
    shards = [some.global_rows(torch.arange(some.shard_rows(ROWS))) for some in ranks]
    assert torch.equal(torch.cat(shards).sort().values, torch.arange(ROWS)) and [
        len(shard) for shard in shards
    ] == [8, 8, 7]
    assert all(
        torch.equal(shard % 3, torch.full_like(shard, rank)) for rank, shard in enumerate(shards)
    )
