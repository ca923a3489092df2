"""Paged embeddings on several ranks train as those of one process.

Gradients are small multiples of powers of 2, so that sums are exact in any order, unless a test
says otherwise.
"""

import contextlib
import copy
import gc
from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed import group
from torch.nn.parallel import DistributedDataParallel

from tests.support.each_case import each_case
from tests.support.pairwise import pairwise
from tests.support.processes import run_python
from tests.support.rank_processes import Pool
from w2v import PagedEmbedding, PagedEmbeddingBag, PagedOptimizer
from w2v.config import OPTIMIZERS
from w2v.distributed.ranks import SINGLE
from w2v.rows.shard import RoutedLookUp

ROWS, DIM, BATCH, STEPS = 31, 6, 16, 5
pytestmark = pytest.mark.usefixtures("one_thread")


CUDA = pytest.param("cuda", marks=pytest.mark.gpu)
on_cpus = pytest.mark.parametrize("pool", ["cpu"], indirect=True, scope="module")
on_gpus = pytest.mark.parametrize("pool", [CUDA], indirect=True, scope="module")


@pytest.fixture(scope="module", params=["cpu", CUDA])
def pool(request):
    """Two processes on the device."""
    if request.param == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip(f"needs 2 GPUs, and there are {torch.cuda.device_count()}")
    with contextlib.closing(Pool(2, request.param)) as processes:
        yield processes


@pytest.fixture(scope="module")
def three():
    with contextlib.closing(Pool(3)) as processes:
        yield processes


def run(pool, body, *arguments, **settings):
    """Return what a function of ranks and arguments returns in each rank."""
    return pool.run(partial(body, **settings), *arguments)


def make(ranks, device="cpu", kind=PagedEmbedding, rows=ROWS, **settings):
    """Return a table, the same in one process and on several ranks."""
    process_group = group.WORLD if ranks.size > 1 else None
    settings = {"seed": 1, "device": device, "process_group": process_group} | settings
    return kind(rows, DIM, **settings)


def part_of(ranks, batch, cut=None):
    """Return this rank's samples: equal parts, or two parts cut there."""
    count = len(batch)
    edges = [0, cut, count] if cut is not None else range(0, count + 1, count // ranks.size)
    return batch[edges[ranks.rank] : edges[ranks.rank + 1]] if ranks.size > 1 else batch


def some_batches(steps=STEPS):
    """Yield ids and targets; some rows are in both halves, some in none."""
    generator = torch.Generator().manual_seed(5)
    for _ in range(steps):
        ids = torch.randint(ROWS // 2, (BATCH, 2), generator=generator) * 2
        ids[0] = torch.randint(ROWS, (2,), generator=generator)
        yield ids, torch.randint(-8, 8, (BATCH, DIM), generator=generator).float()


def states_of(table, optimizer):
    """Return weights and states of the whole table, on rank 0."""
    found = table.state_dict() | optimizer.state_dict()["state"].get(0, {})
    return {name: value.cpu() for name, value in found.items()}


def trained(ranks, device="cpu", optimizer="Adam", how="plain", **settings):
    """Return the loss of each step, and what the table holds."""
    rules = {name: settings.pop(name) for name in ("step", "fused") if name in settings}
    table = make(ranks, device, **settings)
    paged = PagedOptimizer(table, optimizer, lr=0.125, **rules)
    batches = [
        {"ids": part_of(ranks, ids), "target": part_of(ranks, target).to(device)}
        for ids, target in some_batches()
    ]
    losses = []
    for batch in paged.pages(batches, "ids") if how == "pages" else batches:
        paged.zero_grad()
        parts = [(batch["ids"], batch["target"])]
        if how in ("accumulated", "twice"):  # rows of both parts, some of them in both
            parts = [(batch["ids"][half::2], batch["target"][half::2]) for half in range(2)]
        losses.append(torch.zeros((), device=device))
        for ids, target in parts:
            vectors = table(ids)
            vectors = vectors.sum(1) if vectors.dim() == 3 else vectors
            loss = (vectors * target).sum(1).mean() / len(parts)
            losses[-1] = losses[-1] + (loss if how == "twice" else loss.detach())
            if how != "twice":
                loss.backward()
        if how == "twice":
            losses[-1].backward()
        paged.step()
    return torch.stack(losses).detach().cpu(), states_of(table, paged)


CASES = {
    "rows count their steps": {"step": "row"},
    "padding": {"padding_idx": 4},
    "last row is padding": {"padding_idx": -1},
    "limited norm": {"max_norm": 2.0},
    "sums": {"kind": PagedEmbeddingBag, "mode": "sum"},
    "means": {"kind": PagedEmbeddingBag, "mode": "mean"},
    "maxima": {"kind": PagedEmbeddingBag, "mode": "max", "padding_idx": 0},
    "accumulated": {"how": "accumulated"},
    "twice in a forward pass": {"how": "twice"},
    "pages": {"how": "pages"},
    "pages of bags": {"how": "pages", "kind": PagedEmbeddingBag, "mode": "sum"},
    "whole cache": {"gpu_bytes": "100%"},
    "pages and cache": {"how": "pages", "gpu_bytes": "95%"},
    "pages, cache and limited norm": {"how": "pages", "gpu_bytes": "95%", "max_norm": 1.0},
    "float64": {"dtype": torch.float64},
}


def check(pool, exact=True, **how):
    (losses, several), (other_losses, nothing) = run(pool, trained, pool.device, **how)
    expected_losses, expected = trained(SINGLE, pool.device, **how)
    assert not nothing  # rank 0 has it all
    assert several.keys() == expected.keys()
    for name, value in expected.items():
        if exact:
            assert torch.equal(several[name], value), name
        torch.testing.assert_close(several[name], value, rtol=1e-5, atol=1e-6)
    mean = (losses + other_losses) / 2
    torch.testing.assert_close(mean, expected_losses, rtol=1e-5, atol=1e-5)


@each_case("name", OPTIMIZERS)
def test_every_optimizer(pool, name):
    check(pool, optimizer=name)


@pytest.mark.parametrize("how", CASES.values(), ids=CASES)
def test_two_ranks_equal_one(pool, how):
    check(pool, **how)


@on_gpus
@pytest.mark.parametrize("storage", ["cuda", "pinned"])
@pytest.mark.parametrize("how", ["plain", "pages"])
def test_two_ranks_equal_one_in_gpu_storage(pool, storage, how):
    check(pool, storage=storage, how=how)
    check(pool, storage=storage, how=how, gpu_bytes="95%")
    check(pool, storage=storage, how=how, gpu_bytes="95%", fused=True, exact=False)
    bags = {"kind": PagedEmbeddingBag, "gpu_bytes": "95%", "fused": True, "exact": False}
    check(pool, storage=storage, how=how, **bags)


class Model(nn.Module):
    """Two tables and a network."""

    def __init__(self, ranks, device="cpu", **settings):
        super().__init__()
        torch.manual_seed(0)
        self.users = make(ranks, device, **settings)
        bags = {"kind": PagedEmbeddingBag, "mode": "mean", "seed": 2}
        self.tags = make(ranks, device, rows=ROWS + 3, **bags, **settings)
        self.head = nn.Linear(2 * DIM, 1).to(device)

    def forward(self, users, ids):
        return self.head(torch.cat([self.users(users), self.tags(ids)], dim=1)).squeeze(1)


def trained_model(ranks, device="cpu", cut=None, ahead=False, **settings):
    """Return what a model holds that is trained under DDP on several ranks."""
    model = Model(ranks, device, **settings)
    whole = DistributedDataParallel(model) if ranks.size > 1 else model
    paged = PagedOptimizer(model, "Adagrad", lr=0.1)
    dense = torch.optim.Adam(model.parameters(), lr=0.01)
    parts = []
    for batch, (ids, target) in enumerate(some_batches()):
        its_cut = None if cut is None else cut[batch]
        parts.append((part_of(ranks, ids, its_cut), part_of(ranks, target[:, 0], its_cut)))
        parts[-1] = parts[-1][0][:, 0], *parts[-1]  # users of their own
    for users, ids, target in paged.pages(parts, [0, 1]) if ahead else parts:
        # Means of unequal parts would not have the weight of their samples.
        loss = (whole(users, ids) - target.to(device)).square().sum() * ranks.size / BATCH
        paged.zero_grad()
        dense.zero_grad()
        loss.backward()
        paged.step()
        dense.step()
    return {name: value.cpu() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("how", [{}, {"ahead": True}, {"ahead": True, "gpu_bytes": "95%"}], ids=str)
@pytest.mark.parametrize("cut", [None, [3, 0, 16, 15, 7]], ids=["equal", "uneven or empty"])
def test_a_model_under_ddp_with_any_parts_of_a_batch(pool, cut, how):
    several, dense_alone = run(pool, trained_model, pool.device, cut, **how)
    expected = trained_model(SINGLE, pool.device)
    assert several.keys() == expected.keys()
    assert dense_alone.keys() == {"head.weight", "head.bias"}
    for name, value in expected.items():
        torch.testing.assert_close(several[name], value, rtol=1e-5, atol=1e-6)


def count_exchanges(ranks, ahead):
    """Return how often a rank sends in each step of two tables."""
    model = Model(ranks)
    paged = PagedOptimizer(model, "Adagrad", lr=0.1)
    counts = []
    all_to_all = paged._ranks.all_to_all

    def counted(*arguments):
        counts[-1] += 1
        return all_to_all(*arguments)

    for table in (model.users, model.tags):
        table._table.ranks.all_to_all = counted
    batches = [{"ids": ids, "users": ids[:, 0]} for ids, _ in some_batches(12)]
    counts.append(0)
    for batch in paged.pages(batches, ["users", "ids"]) if ahead else batches:
        vectors = model.users(batch["users"]).sum() + model.tags(batch["ids"]).sum()
        vectors.backward()
        paged.step()
        counts.append(0)
    return counts


def test_number_of_exchanges(pool):
    """Ids with the next counts, weights, gradients: once for all tables."""
    if pool.device == "cpu":
        counts, others = run(pool, count_exchanges, True)
        assert counts == others and set(counts[1:6]) == {3}, counts
        assert set(run(pool, count_exchanges, False)[0][:-1]) == {2 * 3 + 1}


def late_steps(ranks, **settings):
    """Step the batch before between the forward passes of two tables.

    Every other batch does not use the second table.
    """
    model = Model(ranks, **settings)
    paged = PagedOptimizer(model, "SGD", lr=0.125)
    batches = [{"ids": part_of(ranks, ids)} for ids, _ in some_batches()]
    before = None
    for number, batch in enumerate(paged.pages(batches, ["ids", "ids"])):
        users = model.users(batch["ids"])
        if before is not None:
            before.backward()
            paged.step()
        before = users.sum() * ranks.size
        if number % 2:
            before = before + model.tags(batch["ids"]).square().sum() * ranks.size
    return {name: value.cpu() for name, value in model.state_dict().items()}


def test_weights_that_a_step_has_changed_are_read_anew(pool):
    """Norms are those of nn.Embedding: of rows that are looked up."""
    for settings in [{}, {"max_norm": 1.0}] if pool.device == "cpu" else []:
        (several, _), expected = run(pool, late_steps, **settings), late_steps(SINGLE, **settings)
        for name, value in expected.items():
            torch.testing.assert_close(several[name], value, rtol=1e-5, atol=1e-6)


def count_routes(ranks):
    """Return how many batches are kept at each step, without the collector."""
    table = make(ranks)
    paged = PagedOptimizer(table, "Adam", lr=0.1)
    batches = [{"ids": ids} for ids, _ in some_batches(20)]
    counts = []
    gc.collect()
    gc.disable()
    for batch in paged.pages(batches, "ids", ahead=1):
        table(batch["ids"]).sum().backward()
        paged.step()
        counts.append(sum(type(found) is RoutedLookUp for found in gc.get_objects()))
    gc.enable()
    return counts


def test_batches_are_freed_at_once(pool):
    counts, _ = run(pool, count_routes)
    assert max(counts) == counts[0] == 4  # this one, one that waits, two on their way


def dropped(ranks):
    """Drop gradients, and go through a graph twice."""
    table = make(ranks)
    paged = PagedOptimizer(table, "SGD", lr=1.0)
    before = table.weight.clone()
    table([1, 2]).sum().backward()
    with pytest.raises(ValueError, match=r"rows wait for a step; call step\(\) or zero_grad\(\)"):
        table.to("meta")
    paged.zero_grad()
    paged.step()
    assert torch.equal(table.weight, before)
    loss = table([1, 2]).sum()
    loss.backward(retain_graph=True)
    loss.backward()
    paged.step()
    loss = table([2]).sum()
    loss.backward(retain_graph=True)
    paged.step()
    loss.backward()  # again, after a step
    paged.step()
    return table.state_dict()


def test_gradients_are_dropped_and_added(pool):
    if pool.device == "cpu":
        found, _ = run(pool, dropped)
        assert torch.equal(found["weight"], make_expected()["weight"])


def make_expected():
    table = make(SINGLE)
    weights = table.state_dict()
    weights["weight"][1:3] -= 2
    weights["weight"][2] -= 1
    weights["weight"][2] -= 1
    return weights


def small(ranks):
    """Return a table of fewer rows than ranks, after a step and growth."""
    table = make(ranks, rows=2)
    paged = PagedOptimizer(table, "Adam", lr=0.125)
    torch.manual_seed(ranks.rank)
    table.reset_parameters()  # as rank 0 has drawn
    before = table.state_dict()
    table([1, 1, 0]).sum().backward()
    paged.step()
    table.grow(8)
    table([7, 2, 4]).sum().backward()
    paged.step()
    with torch.no_grad():
        assert table([[7]]).shape == (1, 1, DIM)
    return before, states_of(table, paged), len(table.weight)


def test_fewer_rows_than_ranks_and_growth(three):
    (before, after, own), *others = run(three, small)
    expected_before, expected, _ = small(SINGLE)
    assert [own, *(count for *_, count in others)] == [3, 3, 2]
    assert torch.equal(before["weight"], expected_before["weight"])
    for name, value in expected.items():
        torch.testing.assert_close(after[name], value, rtol=1e-6, atol=1e-6)


def tiny(ranks):
    """Return tables side by side of which one rank has no row."""
    tables = nn.ModuleList(make(ranks, rows=1, seed=seed) for seed in (1, 2))
    paged = PagedOptimizer(tables, "SGD", lr=1.0)
    for ids in paged.pages([[0, 0], [0]], lambda ids: [ids, ids]):
        sum((seed + 1) * table(ids).mean() for seed, table in enumerate(tables)).backward()
        paged.step()
    return tables.state_dict()


def test_a_rank_without_rows(pool):
    found, _ = run(pool, tiny)
    for name, value in tiny(SINGLE).items():
        torch.testing.assert_close(found[name], value)


def test_nobody_asks_a_rank_for_rows(pool):
    """Its table counts the step nevertheless."""
    (several, _), (alone, _) = (
        run(pool, even_rows, pool.device),
        [even_rows(SINGLE, pool.device), 0],
    )
    for name, value in alone.items():
        assert torch.equal(several[name], value), name


def even_rows(ranks, device="cpu"):
    table = make(ranks, device)
    paged = PagedOptimizer(table, "Adam", lr=0.125)
    for ids in ([0, 2], [4, 1], [2, 6]):
        table(ids).sum().backward()
        paged.step()
    return states_of(table, paged)


def saved(ranks, folder, device="cpu", **settings):
    """Train a table and save it; return what it holds."""
    table = make(ranks, device, **settings)
    paged = PagedOptimizer(table, "Adam", lr=0.125)
    table(range(ROWS)).sum().backward()
    paged.step()
    paged.save(folder / "saved", step=7)
    states = table.state_dict(), copy.deepcopy(paged.state_dict())
    if ranks.rank == 0:
        torch.save(states, folder / "x.pt")
    ranks.all_gather(None)  # the file is there
    return states_of(table, paged)


def loaded(ranks, folder, device="cpu", **settings):
    """Return what tables hold that are loaded from either kind of file."""
    found = []
    for by_states in (False, True):
        table = make(ranks, device, **settings | {"seed": 9})
        paged = PagedOptimizer(table, "Adam", lr=1.0)
        if by_states:
            weights, states = torch.load(folder / "x.pt", mmap=True)
            table.load_state_dict(weights)
            paged.load_state_dict(states)
        else:
            assert paged.load(folder / "saved") == 7
            assert paged.param_groups[0]["lr"] == 0.125
        found.append(states_of(table, paged))
    return found


@on_cpus
@pairwise({"savers": [1, 2, 3], "loaders": [1, 2, 3], "settings": [{}, {"state_storage": "cpu"}]})
def test_checkpoints_load_anywhere(pool, three, tmp_path, savers, loaders, settings):
    runs = {
        1: lambda body, *args, **how: [body(SINGLE, *args, **how)],
        2: partial(run, pool),
        3: partial(run, three),
    }
    expected, *_ = runs[savers](saved, tmp_path, "cpu", **settings)
    for found in runs[loaders](loaded, tmp_path, "cpu", **settings)[0]:
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            assert torch.equal(found[name], value), name


@on_gpus
def test_checkpoints_of_gpus(pool, tmp_path):
    expected, _ = run(pool, saved, tmp_path, "cuda", storage="pinned")
    for found in run(pool, loaded, tmp_path, "cuda", storage="cuda")[0]:
        assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_state_dicts_load_into_torch(pool, tmp_path):
    weights, _ = run(pool, saved, tmp_path, pool.device)
    dense = nn.Embedding(ROWS, DIM)
    dense.load_state_dict(torch.load(tmp_path / "x.pt")[0])
    assert torch.equal(dense.weight, weights["weight"])


WITHOUT_ASSERTS = """
import multiprocessing, sys
from contextlib import closing
from functools import partial
from importlib.machinery import SourceFileLoader
import torch

compiled = set()

def get_code(loader, name):
    compiled.add(name)
    path = loader.get_filename(name)
    return compile(loader.get_data(path), path, "exec", dont_inherit=True, optimize=1)

SourceFileLoader.get_code = get_code
for name in [name for name in sys.modules if name.split(".")[0] in ("w2v", "tests")]:
    del sys.modules[name]
from tests.oracle.test_sharded_embedding import SINGLE, trained
from tests.support import processes
from tests.support.rank_processes import Pool
assert compiled > {"w2v.rows.shard", "w2v.rows.optimizer"}
torch.set_num_threads(1)
multiprocessing.current_process()._config["daemon"] = False  # so that it may have children
processes.PROCESSES = multiprocessing.get_context("fork")
with closing(Pool(2)) as pool:
    for how in ("plain", "pages"):
        (_, several), _ = pool.run(partial(trained, how=how))
        _, expected = trained(SINGLE, how=how)
        print(all(torch.equal(several[name], value) for name, value in expected.items()))
"""


def test_ranks_train_alike_without_asserts():
    """As under python -O, which would load torch anew."""
    done = run_python(WITHOUT_ASSERTS)
    assert done.stdout.split() == ["True"] * 2, done.stderr
