"""Keeping rows on the GPU, and moving them while steps compute, changes no bit of the result.

Weights, gradients and learning rate are whole numbers, so that sums are exact in any order. Without a GPU the same plans are made, and
the moves follow one another.
"""

import itertools
import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from w2v.config import ConfigError, OptimizerConfig
from w2v.model.optim import RowOptimizer
from w2v.model.table import Table, record_width, side_by_side
from w2v.transfer.cache import Cached
from w2v.transfer.cache_mapped import CachedMapped
from w2v.transfer.mapped import Mapped
from w2v.transfer.staged import Staged

ROWS, DIM = 24, 3
STRESS_STEPS = int(os.environ.get("W2V_STRESS_STEPS", "10000"))
GPU = pytest.mark.gpu
ENGINES = [
    "host",
    pytest.param("mapped", marks=GPU),
    pytest.param("staged", marks=GPU),
    pytest.param("planned on the GPU", marks=GPU),
]


class HostLink:
    """Both sides in CPU memory."""

    def read(self, table, rows_U, records_SR, slots_U=None):
        records_SR[slots_U] = table.records_VR[rows_U]

    def write(self, table, rows_U, records_SR, slots_U=None):
        table.records_VR[rows_U] = records_SR[slots_U]


LINK = {
    "host": (HostLink, "cpu", "cpu"),
    "mapped": (Mapped, "pinned", "cuda"),
    "staged": (Staged, "cpu", "cuda"),
}
PLACES = {name: (storage, device) for name, (_, storage, device) in LINK.items()} | {
    "planned on the GPU": ("pinned", "cuda")
}


def make_engine(name, tables, slots, uses_TV=None):
    device = torch.device(PLACES[name][1])
    args = tables, slots, device, None if uses_TV is None else uses_TV.to(device)
    return Cached(LINK[name][0](), *args) if name in LINK else CachedMapped(*args)


def make_tables(optimizer, storage, rows=ROWS, dim=DIM):
    states = optimizer.states(dim)
    memory = (
        side_by_side(2, rows, record_width(dim, states), torch.float32)
        if storage == "pinned"
        else [None, None]
    )
    tables = [
        Table(name, rows, dim, states, optimizer.scalars, storage, pinned_VR=pinned_VR)
        for name, pinned_VR in zip(("input", "output"), memory, strict=True)
    ]
    for number, table in enumerate(tables):
        table["weight"].copy_(torch.arange(rows * dim).view(rows, dim) % 19 - number)
    return tables


def gradient(rows, step, dim=DIM):
    return ((rows[:, None] * 7 + torch.arange(dim) * 3 + step * 5) % 11 - 5).float()


def train_dense(optimizer, tables, pages, lr):
    """Steps over whole tables in memory, one after another."""
    from w2v.transfer.resident import Resident

    return run(optimizer, tables, Resident(), pages, lr, "cpu")


def marked(rows, count):
    return torch.zeros(count, dtype=torch.bool).index_fill(0, rows, True)


def random_soon(rows, seed):
    """For each page the marks of any rows as those that are used soon, or now and then none."""
    g = torch.Generator().manual_seed(seed)
    while True:
        share = float(torch.rand((), generator=g))
        yield None if share < 0.1 else torch.rand(rows, generator=g) < share


def run(optimizer, tables, engine, pages, lr, device, soon=None):
    """`pages` is a list of lists of steps, each a pair of rows of both tables. Plans run a page ahead, on a stream of their own."""
    soon = soon or itertools.repeat(None)
    planning = torch.cuda.Stream() if device == "cuda" else None
    done, step = [], 0

    def plan(page):
        marks = torch.stack(
            [
                marked(torch.cat([both[number] for both in page]), table.rows)
                for number, table in enumerate(tables)
            ]
        )
        marks, used_soon = marks.to(device), next(soon)
        used_soon = used_soon if used_soon is None else used_soon.to(device)
        if planning is None:
            return engine.prefetch(marks, used_soon)
        done.append(torch.cuda.current_stream().record_event())
        with torch.cuda.stream(planning):
            planning.wait_stream(torch.cuda.current_stream()) if len(
                done
            ) < 2 else planning.wait_event(done[-2])
            engine.prefetch(marks, used_soon)
        torch.cuda.current_stream().wait_stream(planning)

    plan(pages[0])
    for page, following in zip(pages, [*pages[1:], None], strict=True):
        for both in page:
            for table, rows in zip(tables, both, strict=True):
                fetched = engine.fetch(table, rows.to(device))
                fetched.grad_UD = gradient(rows, step, table.dim).to(device)
                optimizer.step(fetched, lr)
                engine.write_back(fetched)
            step += 1
        if following:
            plan(following)
    engine.flush()
    return [table.records_VR.cpu().clone() for table in tables]


rows = st.sets(st.integers(0, ROWS - 1), max_size=ROWS).map(
    lambda chosen: torch.tensor(sorted(chosen), dtype=torch.int64)
)
steps = st.tuples(rows, rows)
any_pages = st.lists(st.lists(steps, min_size=1, max_size=3), min_size=1, max_size=8)


def needed(pages):
    return max(
        sum(len(torch.unique(torch.cat([both[number] for both in page]))) for number in (0, 1))
        for page in pages
    )


@pytest.mark.parametrize("name", ENGINES)
@settings(max_examples=150)
@given(pages=any_pages, spare=st.integers(0, 2 * ROWS), uses=st.none() | st.integers(0, 2**31))
def test_equals_dense_training(name, pages, spare, uses):
    optimizer = RowOptimizer(OptimizerConfig(name="SGD", lr=1.0, args={"momentum": 2.0}))
    storage, device = PLACES[name]
    expected = train_dense(optimizer, make_tables(optimizer, "cpu"), pages, lr=1.0)
    tables = make_tables(optimizer, storage)
    slots = min(2 * ROWS, max(1, needed(pages) + spare))
    uses_TV = (
        None if uses is None else torch.rand(2, ROWS, generator=torch.Generator().manual_seed(uses))
    )
    engine = make_engine(name, tables, slots, uses_TV)
    soon = None if uses is None else random_soon(ROWS, uses)
    for ours, dense in zip(
        run(optimizer, tables, engine, pages, 1.0, device, soon), expected, strict=True
    ):
        assert torch.equal(ours, dense)
    assert engine.rows_read - engine.rows_written <= slots


def page_of(*steps):
    return [tuple(torch.tensor(sorted(rows), dtype=torch.int64) for rows in step) for step in steps]


@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize(
    "pages",
    [
        [page_of(({1, 2}, {3}))] * 6,  # all rows shared
        [page_of(({n, n + 1}, {n + 2})) for n in range(0, 18, 3)],  # none
        [page_of(({n, 5}, {n + 1})) for n in range(6, 18, 2)],  # one
        [
            page_of(({n % 2}, {n % 2 + 2})) for n in range(12)
        ],  # gone and needed again at every other page
        [
            page_of((set(range(n)), set(range(n)))) for n in (1, 12, 2, 12, 3)
        ],  # pages that take all the room
    ],
    ids=["all shared", "none shared", "one shared", "to and fro", "full"],
)
@pytest.mark.parametrize("slots", [24, 27, 48])
def test_sharing_patterns(name, pages, slots):
    optimizer = RowOptimizer(OptimizerConfig(name="Adamax", lr=0.1))
    storage, device = PLACES[name]
    expected = train_dense(optimizer, make_tables(optimizer, "cpu"), pages, lr=0.1)
    tables = make_tables(optimizer, storage)
    found = run(optimizer, tables, make_engine(name, tables, slots), pages, 0.1, device)
    for ours, dense in zip(found, expected, strict=True):
        torch.testing.assert_close(
            ours, dense, rtol=0 if device == "cpu" else 1e-6, atol=0 if device == "cpu" else 1e-6
        )


def test_rows_cross_the_link_only_when_they_are_not_there():
    optimizer = RowOptimizer(OptimizerConfig(name="SGD", lr=1.0))
    tables = make_tables(optimizer, "cpu")
    engine = Cached(HostLink(), tables, 2 * ROWS, torch.device("cpu"))
    run(
        optimizer,
        tables,
        engine,
        [page_of(({1, 2, 3}, {1})), page_of(({2, 3, 4}, {1, 2})), page_of(({1, 4}, {2}))],
        1.0,
        "cpu",
    )
    assert (
        engine.rows_read == 4 + 2 and engine.rows_written == 0
    )  # each row once; they go home only when the tables are flushed


def test_the_least_frequent_rows_leave_first():
    optimizer = RowOptimizer(OptimizerConfig(name="SGD", lr=1.0))
    tables = make_tables(optimizer, "cpu")
    engine = Cached(HostLink(), tables, 6, torch.device("cpu"))
    pages = [
        page_of(step)
        for step in [({0, 20}, {1}), ({5}, set()), ({7}, set()), ({8}, set()), ({9}, set())]
    ]
    run(optimizer, tables, engine, pages, 1.0, "cpu")
    assert (engine.rows_read, engine.rows_written) == (7, 1)
    engine.prefetch(
        torch.stack([marked(torch.tensor([0, 5]), ROWS), marked(torch.tensor([1]), ROWS)])
    )
    assert engine.rows_read == 7  # so it was row 20 that left


def test_the_least_used_rows_leave_first():
    optimizer = RowOptimizer(OptimizerConfig(name="SGD", lr=1.0))
    tables = make_tables(optimizer, "cpu")
    uses_TV = torch.stack([torch.arange(ROWS), torch.full((ROWS,), 0.5)])
    engine = make_engine("host", tables, 6, uses_TV)
    pages = [
        page_of(step)
        for step in [
            ({0, 20}, {1}),
            ({5}, set()),
            ({7}, set()),
            ({8}, set()),
            ({9}, set()),
            ({10}, set()),
        ]
    ]
    run(optimizer, tables, engine, pages, 1.0, "cpu")
    assert (engine.rows_read, engine.rows_written) == (8, 2)
    engine.prefetch(
        torch.stack([marked(torch.tensor([5, 20]), ROWS), marked(torch.tensor([]).long(), ROWS)])
    )
    assert engine.rows_read == 8  # so it was input row 0 that left, and output row 1


@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize(
    "soon, there",
    [
        (None, {0, 5, 6, 7, 8, 20}),
        (set(), {0, 5, 6, 7, 8, 20}),
        ({21, 22}, {0, 6, 7, 8, 21, 22}),
        ({5, 20, 21, 22}, {5, 6, 7, 8, 20, 21}),  # more than there is room for
        ({0, 5, 20, 21, 22}, {0, 5, 6, 7, 8, 20}),
    ],
)
def test_rows_that_are_used_soon_leave_last(name, soon, there):
    """Of rows 0, 5, 20, 21 and 22, that nobody uses any more, two have to leave."""
    optimizer = RowOptimizer(OptimizerConfig(name="SGD", lr=1.0))
    storage, device = PLACES[name]
    engine = make_engine(name, make_tables(optimizer, storage), 6)
    for rows, used_soon in (({0, 20, 21, 22}, None), ({5}, None), ({6}, None), ({7, 8}, soon)):
        marks = torch.stack(
            [marked(torch.tensor(sorted(of_table)).long(), ROWS) for of_table in (rows, set())]
        )
        used_soon = (
            None
            if used_soon is None
            else marked(torch.tensor(sorted(used_soon)).long(), ROWS).to(device)
        )
        engine.prefetch(marks.to(device), used_soon)
        engine.hold(engine.tables[0])
    assert {*torch.nonzero(engine._slot_of_TV[0] != 6).flatten().tolist()} == there


@pytest.mark.parametrize("name", ENGINES)
def test_a_step_that_cannot_fit_is_refused(name):
    optimizer = RowOptimizer(OptimizerConfig(name="SGD", lr=1.0))
    storage, device = PLACES[name]
    tables = make_tables(optimizer, storage)
    with pytest.raises(
        ConfigError,
        match="transfer.gpu_bytes has room for 4 rows on the GPU, but 6 are needed at once; raise it",
    ):
        run(
            optimizer,
            tables,
            make_engine(name, tables, 4),
            [page_of(({1, 2, 3}, {1, 2, 3}))] * 5,
            1.0,
            device,
        )


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [2000, 60_000])  # surveyed by one block and by many
def test_plans_made_on_the_gpu_are_those_of_plain_torch(rows):
    """Where each page finds room beside the one before, both bring and send away the same rows."""
    g = torch.Generator().manual_seed(3)
    optimizer = RowOptimizer(OptimizerConfig(name="SGD", lr=1.0))
    pages = [
        page_of(
            *[
                (
                    {*torch.randint(rows, (90,), generator=g).tolist()},
                    {*torch.randint(rows, (60,), generator=g).tolist()},
                )
            ]
            * 2
        )
        for _ in range(60)
    ]
    moved = {}
    for name in ("mapped", "planned on the GPU"):
        tables = make_tables(optimizer, "pinned", rows=rows)
        engine = make_engine(
            name, tables, 700, torch.rand(2, rows, generator=torch.Generator().manual_seed(1))
        )
        run(optimizer, tables, engine, pages, 1.0, "cuda", random_soon(rows, 2))
        moved[name] = engine.rows_used, engine.rows_read, engine.rows_written
    assert moved["mapped"] == moved["planned on the GPU"] and moved["mapped"][2] > 1000


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["mapped", "staged", "planned on the GPU"])
def test_stress(name):
    """Thousands of overlapped steps over many rows, with little room and much: the tables end exactly as dense training leaves them."""
    total, dim, count = 3000, 32, STRESS_STEPS // 20 if name == "staged" else STRESS_STEPS
    g = torch.Generator().manual_seed(7)
    optimizer = RowOptimizer(OptimizerConfig(name="SGD", lr=1.0))
    popular = torch.randint(total, (64,), generator=g)

    def some_rows():
        return torch.unique(
            torch.cat(
                [
                    torch.randint(total, (150,), generator=g),
                    popular[torch.rand(64, generator=g) < 0.7],
                ]
            )
        )

    pages = [[(some_rows(), some_rows())] for _ in range(count)]
    storage, device = PLACES[name]
    expected = make_tables(optimizer, "cpu", total, dim)
    for step, [both] in enumerate(pages):
        for table, rows in zip(expected, both, strict=True):
            table["weight"][rows] -= gradient(rows, step, dim)
    for slots in (1000, 4000):
        tables = make_tables(optimizer, storage, total, dim)
        found = run(
            optimizer,
            tables,
            make_engine(name, tables, slots),
            pages,
            1.0,
            device,
            random_soon(total, 8),
        )
        for ours, dense in zip(found, expected, strict=True):
            assert torch.equal(ours, dense.records_VR)
