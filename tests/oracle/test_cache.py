"""Paging equals dense training bit for bit, also where moves overlap.

Weights, gradients and learning rates are whole numbers, so that sums are exact on any device.
Without a GPU the same plans are made, and moves follow one another.
"""

import os
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.each_case import each_case
from tests.support.steps import make_step, records, train
from w2v.config import ConfigError, OptimizerConfig
from w2v.rows.cache import RowCache
from w2v.rows.moves import AGE, HIGHEST_LIMIT, GpuPlanner, TorchPlanner, WantedRows
from w2v.rows.table import Table
from w2v.word2vec.batch import Lookahead
from w2v.word2vec.reference import ReferenceKernels, zero_grads

ROWS, DIM = 24, 3
STRESS_STEPS = int(os.environ.get("W2V_STRESS_STEPS", "2000"))
SGD = OptimizerConfig(name="SGD", lr=1.0)
# By name: the device, the engine, and where the tables are stored.
ENGINES = {
    "cache": ("cpu", "torch cache", "cpu"),
    "cache, pinned": ("cuda", "torch cache", "pinned"),
    "cache, staged": ("cuda", "torch cache", "cpu"),
    "cache, mapped": ("cuda", "cache", "pinned"),
}


def each(names):
    """Run a test with each of these engines."""
    marks = {name: pytest.mark.gpu if ENGINES[name][0] == "cuda" else () for name in names}
    return pytest.mark.parametrize("name", [pytest.param(n, marks=m) for n, m in marks.items()])


CACHES = [name for name in ENGINES if name.startswith("cache")]


class RowBatch(NamedTuple):
    """A batch that names the rows that it touches."""

    rows: torch.Tensor
    number: int
    lookahead: Lookahead | None = None


class WholeNumberKernels(ReferenceKernels):
    """Kernels whose gradients are whole numbers, by row, column and batch."""

    def mark(self, batch, marks_A):
        marks_A[batch.rows.to(marks_A.device)] = True

    def unique_rows(self, batch):
        return zero_grads(self.marks(batch), self.shape)

    def gradients(self, batch, view, grads, lr):
        rows = grads.rows
        rows.grad_UD.copy_(gradient(rows.rows_U, batch.number, self.shape.dim))
        return grads


def gradient(rows_U, number, dim):
    columns_D = torch.arange(dim, device=rows_U.device)
    return ((rows_U[:, None] * 7 + columns_D * 3 + number * 5) % 11 - 5).float()


def make(name=None, slots=0, config=SGD, rows=ROWS, dim=DIM, device="cpu", **how):
    """Return a step on tables of whole numbers; they are resident by default."""
    where = ENGINES.get(name, (device, "resident", device))
    step = make_step(config, rows, dim, WholeNumberKernels, *where, slots=slots, **how)
    for number, table in enumerate(step.tables):
        table["weight"].copy_(torch.arange(rows * dim).view(rows, dim) % 19 - number)
    return step


def trained(step, batches, seed=None):
    """Return the records after the batches; a seed adds lookahead windows."""
    if seed is not None:
        batches = with_windows(batches, step.inputs.rows, step.state.device, seed)
    train(step, batches, lr=1.0)
    assert not int(step.state.fault)
    return records(step)


def with_windows(batches, rows, device, seed):
    """Yield the batches, most of them with random rows in a lookahead window."""
    g = torch.Generator().manual_seed(seed)
    for batch in batches:
        share = float(torch.rand((), generator=g))
        is_soon_V = torch.rand(rows, generator=g) < share
        lookahead = Lookahead(is_soon_V.int().to(device), 1)
        yield batch if share < 0.1 else batch._replace(lookahead=lookahead)


def batches_of(*words):
    """Return batches of input and output vectors of these sets of words."""
    return [RowBatch(rows_of(*both), number) for number, both in enumerate(words)]


def rows_of(inputs, outputs=()):
    return torch.cat([2 * ids(inputs), 2 * ids(outputs) + 1]).sort().values


def ids(rows):
    return torch.tensor(sorted(rows), dtype=torch.int64)


def marks(step, inputs, outputs=()):
    """Return marks of these words' rows, bool [A]."""
    marks_A = torch.zeros(2 * ROWS, dtype=torch.bool)
    marks_A[rows_of(inputs, outputs)] = True
    return marks_A.to(step.state.device)


def rows_needed(rows, steps_per_page):
    """Return the most rows that a page touches."""
    starts = range(0, len(rows), steps_per_page)
    pages = [zip(*rows[start : start + steps_per_page], strict=True) for start in starts]
    return max(sum(len(set().union(*of_table)) for of_table in page) for page in pages)


some_rows = st.sets(st.integers(0, ROWS - 1))


@each(ENGINES)
@settings(max_examples=30)
@given(
    rows=st.lists(st.tuples(some_rows, some_rows), min_size=1, max_size=12),
    steps_per_page=st.integers(1, 3),
    spare=st.integers(0, 2 * ROWS),
    seed=st.none() | st.integers(0, 2**31),
    optimizer=st.sampled_from([("SGD", {"momentum": 2.0}), ("Adamax", {})]),
)
def test_paged_training_equals_dense_training(name, rows, steps_per_page, spare, seed, optimizer):
    config = OptimizerConfig(name=optimizer[0], lr=1.0, args=optimizer[1])
    slots = min(2 * ROWS, max(1, rows_needed(rows, steps_per_page) + spare))
    step = make(name, slots, config, steps_per_page=steps_per_page)
    dense = make(config=config, device=ENGINES[name][0])
    found = trained(step, batches_of(*rows), seed)
    assert all(map(torch.equal, found, trained(dense, batches_of(*rows))))
    stats = step.engine.stats
    assert stats.rows_read <= stats.rows_used
    assert stats.rows_read - stats.rows_written <= slots


def test_cache_reads_a_row_once_and_writes_it_back_at_the_flush():
    step = make("cache", slots=2 * ROWS)
    trained(step, batches_of(({1, 2, 3}, {1}), ({2, 3, 4}, {1, 2}), ({1, 4}, {2})))
    assert step.engine.stats == (12, 6, 0)


def test_least_frequent_rows_are_evicted_first():
    step = make("cache", slots=6)
    trained(step, batches_of(({0, 20}, {1}), ({5}, ()), ({7}, ()), ({8}, ()), ({9}, ())))
    assert step.engine.stats[1:3] == (7, 1)
    step.engine.prefetch(WantedRows(marks(step, [0, 5], [1])))
    assert step.engine.stats.rows_read == 7  # so it was row 20 that was evicted


def list_cache(planner, slots, rows=ROWS, device="cpu"):
    """Return a cache of one table whose records are their rows' numbers."""
    storage = "pinned" if device == "cuda" else "cpu"
    table = Table("rows", rows, 4, {}, {}, storage, torch.float32)
    table["weight"].copy_(torch.arange(rows)[:, None])
    return RowCache(table, slots, torch.device(device), planner)


def cached(cache):
    """Return the rows that are in a cache."""
    return set(torch.nonzero(cache.view.slot_of_A != cache.slots).flatten().tolist())


def page_of(*rows, soon=(), is_counted=True):
    return WantedRows(None, None, [ids(rows)], [ids(soon)], is_counted)


def use(cache, *pages):
    for page in pages:
        cache.prefetch(page)
        cache.wait()


def test_rows_with_few_uses_are_evicted_first():
    cache = list_cache(TorchPlanner, 4)
    use(cache, page_of(20), page_of(20), page_of(5), page_of(3), page_of(1), page_of(0))
    assert cached(cache) == {0, 1, 3, 20}  # without counts, row 20 would go
    use(cache, page_of(7, is_counted=False), page_of(8, is_counted=False))
    assert cached(cache) == {1, 7, 8, 20} or cached(cache) == {0, 7, 8, 20}


def test_rows_of_pages_to_come_are_evicted_last():
    cache = list_cache(TorchPlanner, 4)
    use(cache, page_of(20), page_of(5), page_of(3), page_of(1), page_of(0, soon=[20, 9]))
    assert cached(cache) == {0, 1, 3, 20}
    use(cache, page_of(2))  # nothing is said of row 20 now
    assert cached(cache) == {0, 1, 2, 3}


def test_uses_are_halved_where_rows_with_few_do_not_suffice():
    cache = list_cache(TorchPlanner, 3)
    pages = iter([page_of(row) for _ in range(3) for row in range(6) for _ in range(20)])
    while cache.planner._limit < HIGHEST_LIMIT:
        use(cache, next(pages))
    assert cache.planner._uses_A.max() == 15
    use(cache, next(pages))
    assert cache.planner._uses_A.max() == 8  # 7, and a use
    assert cache.planner._limit == HIGHEST_LIMIT // 2


def test_uses_are_halved_as_time_goes_by():
    cache = list_cache(TorchPlanner, 3)
    use(cache, *[page_of(1)] * (AGE - 1))
    assert cache.planner._uses_A.max() == 15
    use(cache, page_of(2))
    assert cache.planner._uses_A[:3].tolist() == [0, 7, 1]


@pytest.mark.gpu
@pytest.mark.parametrize("rows, slots", [(300, 70), (5000, 900), (300_000, 40_000)])
def test_lists_planned_on_the_gpu_equal_those_of_plain_torch(rows, slots):
    """Both cache the same rows, page after page."""
    g = torch.Generator().manual_seed(rows)
    caches = [list_cache(kind, slots, rows, "cuda") for kind in (TorchPlanner, GpuPlanner)]
    every_V = torch.arange(rows, device="cuda")

    def some_rows(most):
        drawn = rows * torch.rand(int(torch.randint(most, (), generator=g)), generator=g) ** 3
        return drawn.long().unique().cuda()

    for turn in range(200):
        lists, later = [some_rows(slots // 5) for _ in range(2)], some_rows(slots // 4)
        soon = [[], [later], [torch.cat([later, later.new_full((9,), -1)])]][turn % 3]
        masks = []
        for cache in caches:
            use(cache, WantedRows(None, None, lists, soon, turn % 7 > 0))
            slots_V = cache.view.slot_of_A
            masks.append(slots_V != slots)
            slots_U = slots_V[masks[-1]].long()
            assert len(slots_U.unique()) == len(slots_U)
            assert torch.equal(cache.records_SR[slots_U, 0], every_V[masks[-1]].float())
        assert torch.equal(*masks)
        assert masks[0][torch.cat(lists)].all()
    torch_cache, listed = caches
    assert torch_cache.stats == listed.stats
    assert torch_cache.stats.rows_written > 1000
    assert torch_cache.planner._limit == listed.planner.counters[4] > 1
    assert int((listed.planner.slot_of_A != slots).sum()) == slots
    for cache in caches:
        cache.records_SR *= -1
        cache.flush()
    first, second = (cache._table["weight"] for cache in caches)
    assert torch.equal(first, second)
    assert (first[1:] < 0).any(1).sum() >= slots - 1


@each(CACHES)
@each_case(
    "soon, cached",
    [
        (None, {0, 5, 6, 7, 8, 20}),
        (set(), {0, 5, 6, 7, 8, 20}),
        ({21, 22}, {0, 6, 7, 8, 21, 22}),
        ({5, 20, 21, 22}, {5, 6, 7, 8, 20, 21}),  # more than there is room for
        ({0, 5, 20, 21, 22}, {0, 5, 6, 7, 8, 20}),
    ],
)
def test_rows_of_the_lookahead_window_are_evicted_last(name, soon, cached):
    """Two of rows 0, 5, 20, 21 and 22, which no page uses, are evicted."""
    step = make(name, slots=6)
    soon_A = None if soon is None else marks(step, soon)
    for words, window_A in (({0, 20, 21, 22}, None), ({5}, None), ({6}, None), ({7, 8}, soon_A)):
        step.engine.prefetch(WantedRows(marks(step, words), window_A))
        step.engine.wait()
    slot_of_A = step.engine.view.slot_of_A
    assert {*torch.nonzero(slot_of_A != 6).flatten().tolist()} == {2 * word for word in cached}


@each(CACHES)
def test_page_that_does_not_fit_is_refused(name):
    batches = batches_of(*[({1, 2, 3}, {1, 2, 3})] * 5)
    with pytest.raises(ConfigError, match="room for 4 rows .* 6 are needed at once; raise it"):
        trained(make(name, slots=4), batches)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [2000, 60_000])  # surveyed by one block and by many
def test_plans_made_on_the_gpu_equal_those_of_plain_torch(rows):
    """Both move the same rows if each page fits beside the one before."""
    g = torch.Generator().manual_seed(3)
    chosen = [
        [torch.randint(rows, (n,), generator=g).tolist() for n in (90, 60)] for _ in range(60)
    ]
    batches = batches_of(*[(set(inputs), set(outputs)) for inputs, outputs in chosen])
    stats = []
    for name in ("cache, pinned", "cache, mapped"):
        step = make(name, slots=700, rows=rows, steps_per_page=2)
        trained(step, batches, seed=2)
        stats.append(step.engine.stats)
    assert stats[0] == stats[1]
    assert stats[0][2] > 1000


@pytest.mark.gpu
@each(CACHES[1:])
@pytest.mark.parametrize("slots", [1000, 4000])
def test_stress(name, slots):
    """Thousands of overlapped steps leave what dense training leaves."""
    rows, dim = 3000, 32
    steps = STRESS_STEPS // 20 if name == "cache, staged" else STRESS_STEPS
    g = torch.Generator().manual_seed(7)
    popular = torch.randint(rows, (64,), generator=g)

    def some_rows():
        often = popular[torch.rand(64, generator=g) < 0.7]
        return set(torch.cat([torch.randint(rows, (150,), generator=g), often]).tolist())

    batches = batches_of(*[(some_rows(), some_rows()) for _ in range(steps)])
    dense = make(rows=rows, dim=dim)
    for batch in batches:
        dense.table["weight"][batch.rows] -= gradient(batch.rows, batch.number, dim)
    step = make(name, slots, rows=rows, dim=dim)
    assert all(map(torch.equal, trained(step, batches, seed=8), records(dense)))
