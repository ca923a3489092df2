"""Several ranks leave what one rank leaves, and stop together.

Ranks are threads, which share a GPU where one is used, or processes, each with a GPU of its own.
"""

import contextlib
from functools import partial

import numpy as np
import pytest
import torch

from tests.support.each_case import each_case
from tests.support.pairwise import pairwise
from tests.support.rank_processes import Pool
from tests.support.rank_threads import checked, together
from tests.support.steps import (
    make_kernels,
    make_step,
    moved,
    part_of,
    problem,
    records,
    sorted_grads,
    train,
)
from w2v.config import OPTIMIZERS, OptimizerConfig
from w2v.distributed.ranks import SINGLE, Ranks
from w2v.rows.group import RowGroup
from w2v.rows.optim import FUSED_BETAS, optimizer_name
from w2v.rows.table import Table
from w2v.word2vec import cpu
from w2v.word2vec.batch import FAULT_BITS, SKIPGRAM, Batch, Objective, StepShape
from w2v.word2vec.exchange import BatchRows
from w2v.word2vec.huffman import make_tree
from w2v.word2vec.reference import ReferenceKernels

ROWS, DIM, BATCHES, CENTERS, LR = 301, 52, 6, 64, 0.01
EPOCHS = 2
GPU = pytest.mark.gpu
KERNELS = [
    ("reference", "cpu"),
    ("cpu", "cpu"),
    pytest.param("reference", "cuda", marks=GPU),
    pytest.param("cuda", "cuda", marks=GPU),
]
# The scope is that of processes on a device.
BACKENDS = pytest.mark.parametrize("kernels, device", KERNELS, scope="module")
# Largest difference by the tables' type: that of sums in another order.
NEAR = {torch.float64: 1e-9, torch.float32: 1e-3, torch.bfloat16: 3e-2, torch.float16: 3e-2}
pytestmark = pytest.mark.usefixtures("one_thread")


def some_batches(ranks, device, objective=SKIPGRAM):
    """Yield a rank's part of each batch, which may be empty."""
    rng = np.random.default_rng(6)
    for number in range(BATCHES):
        batch, _ = problem(number, CENTERS, window=3, negative=5, rows=ROWS, sentence=7)
        batch = batch._replace(objective=objective)
        cuts = sorted(rng.integers(0, CENTERS + 1, ranks.size - 1))
        if number % 3 == 0:
            cuts = [0] * (ranks.size - 1)  # only the last rank has centers
        edges = [0, *map(int, cuts), CENTERS]
        yield moved(part_of(batch, *edges[ranks.rank : ranks.rank + 2]), device)


def trained(
    ranks,
    name="Adam",
    dtype=None,
    dim=DIM,
    cap=0,
    device="cpu",
    room=0,
    cbow=False,
    tree=False,
    **how,
):
    """Return this rank's rows of both tables by field, losses and pairs.

    A cache's capacity is `room`, as a share of the rows.
    """
    objective = Objective(cbow)
    if tree:
        objective = Objective(cbow, tree=make_tree(range(1, ROWS + 1)))
    config = OptimizerConfig(name=name, lr=LR, occurrence_cap=cap)
    how["slots"] = int(room * 2 * ranks.shard_rows(ROWS))
    step = make_step(config, ROWS, dim, device=device, dtype=dtype, ranks=ranks, **how)
    results = [train(step, some_batches(ranks, device, objective), LR) for _ in range(EPOCHS)]
    assert not int(step.state.fault)
    tables = [{key: table[key].cpu() for key in table.columns} for table in step.tables]
    return tables, *map(torch.cat, zip(*results, strict=True))


def check(run, device="cpu", dtype=None, engine="resident", room=0, **how):
    """Compare several ranks with one; `run` runs a body on each of them."""
    is_exact = device == "cpu" and how.get("kernels") != "cpu"
    how |= {"device": device, "dtype": dtype or (torch.float64 if is_exact else torch.float32)}
    several = run(partial(trained, engine=engine, room=room, **how))
    tables, losses, pairs = trained(SINGLE, **how)
    near = NEAR[how["dtype"]]
    for number, fields in enumerate(tables):
        if how["dtype"].itemsize == 2:  # rounding makes states differ by more
            fields = {"weight": fields["weight"]}
        for key, expected in fields.items():
            whole = torch.empty_like(expected)
            for rank, (shards, _, _) in enumerate(several):
                whole[rank :: len(several)] = shards[number][key]
            assert (whole - expected).double().norm() <= near * expected.double().norm(), key
    for _, our_losses, our_pairs in several:
        assert torch.equal(our_losses, several[0][1])  # the same bits on all ranks
        torch.testing.assert_close(our_losses, losses, rtol=10 * near, atol=0)
        assert torch.equal(our_pairs, pairs)


def threads(size):
    return lambda body: checked(together(size, body))


CASES = {
    "1 rank": (1, {}),
    "2 ranks": (2, {}),
    "4 ranks": (4, {}),
    "1 dimension": (3, {"dim": 1, "steps_per_page": 5}),  # headers of several rows
    "2 dimensions": (3, {"dim": 2, "steps_per_page": 5}),
    "5 dimensions": (3, {"dim": 5, "steps_per_page": 5}),
    "pages": (2, {"steps_per_page": 4}),
    "cap": (2, {"cap": 8}),
    "cbow": (3, {"cap": 8, "cbow": True}),
    "tree": (3, {"cap": 8, "tree": True}),
    "tree, cbow and pages": (2, {"cbow": True, "tree": True, "steps_per_page": 4}),
    "cap and pages": (2, {"cap": 8, "steps_per_page": 5}),
    "cache": (2, {"engine": "cache", "room": 1}),
    "tight cache": (2, {"engine": "cache", "room": 0.9}),
    "tight cache and pages": (2, {"engine": "cache", "room": 0.95, "steps_per_page": 4}),
    "float32": (2, {"dtype": torch.float32}),
    "bfloat16": (2, {"dtype": torch.bfloat16}),
    "float16 products": (2, {"name": "SGD", "dtype": torch.float16, "product": torch.float16}),
    "bfloat16 and cache": (2, {"dtype": torch.bfloat16, "engine": "cache", "room": 0.9}),
}


@pairwise(
    {
        "size, how": [pytest.param(*case, id=name) for name, case in CASES.items()],
        "kernels, device": KERNELS,
    },
    # On a GPU the reference differs from that on a CPU by its pages and engines alone.
    lambda how, kernels, device, **_: (
        how.keys().isdisjoint({"engine", "dtype"})
        if kernels == "cpu"
        else kernels == "cuda" or device == "cpu" or how.keys() & {"engine", "steps_per_page"}
    ),
)
def test_ranks_in_threads(kernels, device, size, how):
    check(threads(size), kernels=kernels, device=device, **how)


@pytest.mark.parametrize("kernels", ["reference", "cpu"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer(name, kernels):
    check(threads(2), name=name, kernels=kernels)


def test_threads_of_ranks_change_the_order_of_sums_alone():
    check(threads(2), kernels="cpu", threads=3, cap=8)


@pytest.mark.gpu
@each_case("name", [*map(optimizer_name, FUSED_BETAS)])
def test_every_formula(name):
    check(threads(3), name=name, kernels="cuda", device="cuda")


def in_deterministic_mode(ranks, body):
    """Return what a body returns; on GPUs in torch's deterministic mode."""
    if torch.cuda.is_available():  # else the call only imports torch's compiler
        torch.use_deterministic_algorithms(True)
    return body(ranks)


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.alone)])
def pool(device, request):
    """Two processes with a GPU each, or four, which share what GPUs there are.

    Four need GPUs that no other process uses: kernels that wait for the other ranks' kernels are
    given the GPU in turn.
    """
    if device == "cuda" and torch.cuda.device_count() < request.param == 2:
        pytest.skip(f"needs 2 GPUs, and there are {torch.cuda.device_count()}")
    with contextlib.closing(Pool(request.param, device)) as processes:
        yield processes


@BACKENDS
@pytest.mark.parametrize("engine, room", [("resident", 0), ("cache", 0.95)])
def test_ranks_in_processes(pool, kernels, device, engine, room):
    if kernels == "cpu" and engine == "cache":
        pytest.skip("numba's kernels step tables where they are")
    how = {"kernels": kernels, "engine": engine, "room": room, "cap": 8, "steps_per_page": 2}
    check(partial(pool.run, in_deterministic_mode), device, **how)


PEERS = {
    "resident": {},
    "5 dimensions and pages": {"dim": 5, "steps_per_page": 5},
    "cap, cache and pages": {"cap": 8, "steps_per_page": 4, "engine": "cache", "room": 0.95},
    "bfloat16 and cache": {"dtype": torch.bfloat16, "engine": "cache", "room": 0.9},
    "tree and cbow": {"cbow": True, "tree": True, "name": "RMSprop"},
}


@pytest.mark.gpu
@pytest.mark.parametrize("device", ["cuda"], scope="module")
@pytest.mark.parametrize("how", PEERS.values(), ids=PEERS)
def test_ranks_that_read_the_memory_of_peers(pool, device, how):
    check(partial(pool.run, in_deterministic_mode), device, kernels="cuda", peers=True, **how)


def count_exchanges(ranks, **how):
    """Return how often a rank sends rows, and numbers, while it trains."""
    calls = {"all_to_all": 0, "all_reduce": 0}

    def counted(name, call):
        def count(*arguments, **more):
            calls[name] += 1
            return call(*arguments, **more)

        return count

    for name in calls:
        setattr(ranks, name, counted(name, getattr(ranks, name)))
    trained(ranks, dtype=torch.float32, **how)
    return tuple(calls.values())


@BACKENDS
@pytest.mark.parametrize("steps_per_page, cap, each_step", [(1, 0, 2), (1, 8, 3), (5, 0, 2)])
def test_number_of_exchanges(kernels, device, steps_per_page, cap, each_step):
    """One a page, two a step, and one more a step where pairs are counted."""
    pages = 1 + -(-BATCHES // steps_per_page)  # the counts of the first go alone
    how = {"kernels": kernels, "device": device, "steps_per_page": steps_per_page, "cap": cap}
    calls = threads(2)(partial(count_exchanges, **how))
    assert calls == [(EPOCHS * (pages + each_step * BATCHES), EPOCHS * BATCHES)] * 2


def after_a_fault(ranks, kernels, device, value, found):
    """Return this rank's fault after each of three steps, and which wrote.

    Row 0, which belongs to rank 0 and is in the text of rank 1, begins with `value`. `found` are
    bits of the fault that each rank finds in its own rows at the first step.
    """
    config = OptimizerConfig(name="SGD", lr=LR)
    step = make_step(config, ROWS, DIM, kernels, device, ranks=ranks)
    if ranks.rank == 0:
        step.inputs["weight"][0] = value
    words_n = torch.tensor([0 if ranks.rank == 1 else 5, 7]).int()
    ones, negatives_BK = torch.ones(2).int(), torch.full((2, 1), 9).int()
    batch = moved(Batch(words_n, ones, 0, ones, negatives_BK, 1, 0.0), device)
    if device == "cuda":
        torch.cuda.synchronize()  # other streams read the batch
    faults, wrote = [], []
    for planned in step.plan_pages([batch] * 3):
        before = [table.nan_to_num() for table in records(step)]
        step(planned, LR)
        if found[ranks.rank] and step.state.step == 1:
            step.state.fault.fill_((1 << FAULT_BITS) + found[ranks.rank])
        faults.append(int(step.state.fault))
        after = [table.nan_to_num() for table in records(step)]
        wrote.append(not all(map(torch.equal, before, after)))
    return faults, wrote


FIRST = 1 << FAULT_BITS  # step 1


@BACKENDS
@pytest.mark.parametrize(
    "value, found, faults, wrote",
    [
        # A loss stops all ranks before they write, rows of a rank stop all at the next step.
        (torch.nan, (0, 0), [[FIRST + 1] * 3] * 2, [False] * 3),
        (0.5, (0, 2), [[0, FIRST + 2, FIRST + 2], [FIRST + 2] * 3], [True, False, False]),
        # Faults of two ranks in one step are joined.
        (
            0.5,
            (1, 2),
            [[FIRST + 1, FIRST + 3, FIRST + 3], [FIRST + 2, FIRST + 3, FIRST + 3]],
            [True, False, False],
        ),
    ],
    ids=["loss", "rows", "rows of both"],
)
def test_numbers_that_are_not_finite_stop_all_ranks(kernels, device, value, found, faults, wrote):
    body = partial(after_a_fault, kernels=kernels, device=device, value=value, found=found)
    assert threads(2)(body) == [(faults[0], wrote), (faults[1], wrote)]


def test_row_v_belongs_to_rank_v_modulo_n():
    shards = []
    for rank in range(3):
        ranks = Ranks()
        ranks.rank, ranks.size = rank, 3
        shards.append(ranks.global_rows(torch.arange(ranks.shard_rows(23))).tolist())
    assert shards == [list(range(rank, 23, 3)) for rank in range(3)]


def rows_of_ranks(kernels, batch, seed):
    """Return the rows of a batch, and sums of gradients that ranks send."""
    shape, device = kernels.shape, kernels.shape.device
    g = torch.Generator().manual_seed(seed)
    table = Table("rows", shape.shard_rows, shape.dim, {}, {}, device.type, shape.dtype)
    ranks = Ranks()
    ranks.size = shape.world_size
    batch_rows = BatchRows(kernels.list_rows(batch), RowGroup(table, device), shape)
    counts = [min(count, shape.shard_rows) for count in (50, 0, 1, 2000)]
    rows_M = torch.cat([torch.randperm(shape.shard_rows, generator=g)[:count] for count in counts])
    grad_MD = torch.randn(len(rows_M), shape.dim, generator=g)
    pairs_M = torch.randint(1, 9, (len(rows_M),), generator=g).int()
    batch_rows.receive(ranks, rows_M.to(device), counts)
    sums = kernels.sum_by_row(batch_rows, grad_MD.to(device), pairs_M.to(device))
    return batch_rows.sent(), batch_rows.listed.cpu(), batch_rows.wait().cpu(), sorted_grads(sums)


@pytest.mark.parametrize(
    "kernels, device", [("cpu", "cpu"), pytest.param("cuda", "cuda", marks=GPU)]
)
@pytest.mark.parametrize("size, dim", [(1, 48), (2, 33), (7, 128), (300, 1)])
def test_shard_kernels_equal_the_reference(size, dim, kernels, device, monkeypatch):
    monkeypatch.setattr(cpu, "MARKED_AT_ONCE", 300)  # fewer than the centers
    for seed in range(2):
        batch, _ = problem(seed, 300, 3, 5, 2000)
        batch = moved(batch._replace(objective=Objective(tree=make_tree(range(1, 2001)))), device)
        shape = StepShape(2000, dim, torch.float32, torch.device(device), True, size)
        of_reference = rows_of_ranks(ReferenceKernels(shape), batch, seed)
        for _ in range(2):  # buffers are used again
            found = rows_of_ranks(make_kernels(kernels, shape), batch, seed)
            torch.testing.assert_close(found, of_reference, rtol=1e-5, atol=1e-5)
