"""The kernels that numba compiles for the CPU against the plain ones, which specify them."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.oracle.test_kernels import OPTIMIZERS, problem
from w2v.config import ModelConfig, OptimizerConfig
from w2v.kernels import cpu, reference
from w2v.kernels.batch import Held, Page
from w2v.model.optim import RowOptimizer
from w2v.model.sampler import Sampler, search
from w2v.model.skipgram import expand, find_slots
from w2v.model.table import Table, uniform
from w2v.training.step import FAULTS, Pipeline
from w2v.training.step_cpu import CompiledPipeline
from w2v.transfer.resident import Resident

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")
EDGES = [
    {"sentence": 1},
    {"sentence": 10**6},
    {"rows": 2},
    {"spread": 20.0},
    {"centers": 1},
    {"centers": 2},
]
# Sizes that are compiled for: each takes some seconds the first time.
SIZES = pytest.mark.parametrize("dim, negative", [(1, 1), (100, 5), (33, 7)])


def held(table):
    return Held(table.records_VR, None)


def check_gradients(batch, tables, count):
    """Rows, loss and gradients are those of the reference in double precision, within rounding of sums that may cancel."""
    slots = find_slots(expand(batch), tables[0].rows)
    touched = slots.input_rows_U, slots.output_rows_V
    weights = [table["weight"].double()[rows] for table, rows in zip(tables, touched, strict=True)]
    masks = slots.context_mask_BC, slots.target_mask_BT
    expected = reference.skipgram(
        *weights, slots.context_slots_BC, masks[0], slots.target_slots_BT, masks[1]
    )

    claims = [cpu.Claims(table.rows, 10**6, table.dim, count) for table in tables]
    loss, pairs = cpu.skipgram(
        cpu.Threads(count), batch, held(tables[0]), claims[0], held(tables[1]), claims[1]
    )

    assert pairs == expected.pairs and loss.item() == pytest.approx(
        expected.loss.item(), rel=1e-5, abs=1e-6
    )
    counts = reference.count_pairs(*slots[1:3], *slots[4:], tuple(map(len, touched)))
    for claim, rows, grad, of_row in zip(
        claims, touched, (expected.grad_input_UD, expected.grad_output_VD), counts, strict=True
    ):
        claimed, mine, counted = claim.take()
        assert (
            torch.equal(claimed, rows)
            and torch.equal(counted, of_row)
            and (claim.number_nV == -1).all()
        )
        assert torch.isfinite(mine).all()
        assert (mine.double() - grad).norm() <= 1e-4 * grad.norm() + 1e-6 * expected.pairs


@SIZES
@settings(max_examples=25)
@given(
    seed=st.integers(0, 2**31),
    centers=st.integers(1, 300),
    window=st.integers(1, 20),
    rows=st.integers(1, 200),
    sentence=st.integers(1, 30),
    count=st.integers(1, 5),
)
def test_gradients_equal_the_references(
    dim, negative, seed, centers, window, rows, sentence, count
):
    check_gradients(*problem(seed, centers, window, negative, rows, dim, sentence), count)


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("case", EDGES, ids=str)
def test_gradients_at_the_edges(case, count):
    """Sentences of one word mostly, one endless sentence, one word in nearly every pair, large logits, fewer centers than threads."""
    check_gradients(
        *problem(
            **(
                {"seed": 1, "centers": 500, "window": 5, "negative": 5, "rows": 50, "dim": 100}
                | case
            )
        ),
        count,
    )


@SIZES
@settings(max_examples=10)
@given(
    seed=st.integers(0, 2**31),
    centers=st.integers(1, 60),
    window=st.integers(1, 9),
    rows=st.integers(1, 80),
)
def test_descent_equals_a_step_of_the_reference_for_each_center(
    dim, negative, seed, centers, window, rows
):
    batch, tables = problem(seed, centers, window, negative, rows, dim)
    plain = [Table(table.name, rows, dim, {}, {}, "cpu") for table in tables]
    for table, start in zip(plain, tables, strict=True):
        table["weight"].copy_(start["weight"])
    optimizer = RowOptimizer(OptimizerConfig(name="SGD", lr=0.05))
    stepwise = Pipeline(*plain, Resident(), optimizer, CPU)
    one_by_one = [
        batch._replace(
            first=batch.first + n,
            windows_B=batch.windows_B[n : n + 1],
            negatives_BK=batch.negatives_BK[n : n + 1],
        )
        for n in range(centers)
    ]
    expected = [stepwise.step(planned, 0.05) for planned in stepwise.ahead(one_by_one)]

    loss, pairs = cpu.descend(cpu.Threads(1), batch, held(tables[0]), held(tables[1]), dim, 0.05)

    assert pairs == sum(result.pairs for result in expected)
    assert loss.item() == pytest.approx(
        sum(result.loss.item() for result in expected), rel=1e-4, abs=1e-5
    )
    for mine, other in zip(tables, plain, strict=True):
        torch.testing.assert_close(mine["weight"], other["weight"], rtol=1e-3, atol=1e-4)
        assert not mine["exp_avg"].any()  # what lies beside the weights stays


def trained(name, threads=1, compiled=True, lr=0.02, cap=0):
    """Some epochs over a small text: both tables' records, and the losses."""
    rng, rows, dim = np.random.default_rng(3), 300, 48
    lengths = rng.integers(1, 60, 120)
    ids, noise = (
        (rng.zipf(1.3, lengths.sum()) % rows).astype(np.int32),
        rng.dirichlet(np.ones(rows)),
    )
    optimizer = RowOptimizer(OptimizerConfig(name=name, lr=lr, occurrence_cap=cap), compiled)
    tables = [
        Table(n, rows, dim, optimizer.states(dim), optimizer.scalars, "cpu")
        for n in ("input", "output")
    ]
    for number, table in enumerate(tables):
        table.initialise(uniform(dim, 0.5, number))
    inversion = cpu.inversion if compiled else search
    sampler = Sampler(
        ids,
        np.cumsum([0, *lengths]),
        np.ones(rows),
        noise,
        ModelConfig(negative=3),
        64,
        1,
        CPU,
        inversion=inversion,
    )
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        pipeline = (CompiledPipeline if compiled else Pipeline)(*tables, Resident(), optimizer, CPU)
        losses = [
            pipeline.step(planned, lr).loss
            for _ in range(3)
            for planned in pipeline.ahead(sampler.epoch())
        ]
    finally:
        torch.set_num_threads(before)
    return [table.records_VR.clone() for table in tables], torch.stack(losses)


@pytest.mark.parametrize(
    "name, cap",
    [("Adam", 0), ("Adamax", 0), ("RMSprop", 5), ("AdamW", 0), ("SGD", 5), ("NAdam", 5)],
)
def test_compiled_training_equals_plain_training(name, cap):
    (ours, our_losses), (theirs, their_losses) = (
        trained(name, *how, lr=0.002, cap=cap) for how in ((3, True), (1, False))
    )
    torch.testing.assert_close(our_losses, their_losses, rtol=1e-3, atol=1e-3)
    for mine, plain in zip(ours, theirs, strict=True):
        assert (mine - plain).norm() < 1e-3 * plain.norm()


@pytest.mark.parametrize("name, threads", [("Adam", 1), ("Adam", 4), ("SGD", 1), ("NAdam", 2)])
def test_training_repeats_itself_bit_for_bit(name, threads):
    (first, losses), (again, same_losses) = (trained(name, threads) for _ in range(2))
    assert torch.equal(losses, same_losses) and all(
        torch.equal(a, b) for a, b in zip(first, again, strict=True)
    )


def test_threads_that_overtake_each_other_stay_finite_and_learn():
    records, losses = trained("SGD", 4, lr=0.05)
    assert all(torch.isfinite(of_table).all() for of_table in records)
    assert losses[-20:].mean() < 0.9 * losses[:20].mean()


def test_deterministic_mode_gives_descent_one_thread():
    torch.use_deterministic_algorithms(True)
    try:
        (first, _), (again, _) = trained("SGD", 4), trained("SGD", 1)
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@pytest.mark.parametrize("name", ["SGD", "Adam", "NAdam"])
def test_the_first_step_that_is_not_finite_is_noted(name):
    batch, tables = problem(1, 200, 5, 5, 20, 100)
    optimizer = RowOptimizer(OptimizerConfig(name=name, lr=0.02), True)
    tables = [
        Table(table.name, 20, 100, optimizer.states(100), optimizer.scalars, "cpu")
        for table in tables
    ]
    pipeline = CompiledPipeline(*tables, Resident(), optimizer, CPU)
    for spoilt in (False, True, False):
        if spoilt:
            tables[1]["weight"][3, 50] = torch.nan
        before = [table.records_VR.clone() for table in tables]
        (planned,) = pipeline.ahead([batch])
        assert pipeline.step(planned, 0.02).loss.isnan() == (pipeline.steps > 1)
        assert int(pipeline.fault) == (0 if pipeline.steps == 1 else 2 << len(FAULTS) | 1)
        if name != "SGD" and pipeline.steps > 1:
            assert all(
                torch.equal(a.nan_to_num(7), table.records_VR.nan_to_num(7))
                for a, table in zip(before, tables, strict=True)
            )


def test_a_finished_pipeline_keeps_the_input_vectors_alone():
    batch, _ = problem(1, 200, 5, 5, 20, 100)
    optimizer = RowOptimizer(OptimizerConfig(name="Adam"), True)
    tables = [
        Table(kind, 20, 100, optimizer.states(100), optimizer.scalars, "cpu")
        for kind in ("input", "output")
    ]
    pipeline = CompiledPipeline(*tables, Resident(), optimizer, CPU)
    (planned,) = pipeline.ahead([batch])
    pipeline.step(planned, 0.02)
    vectors = tables[0]["weight"].clone()
    pipeline.finish()
    assert torch.equal(tables[0]["weight"], vectors) and [table.bytes for table in tables] == [
        20 * 100 * 4,
        0,
    ]


@pytest.mark.parametrize("name", ["RMSprop", "NAdam"])
def test_rows_that_would_not_stay_finite_are_not_written(name):
    batch, _ = problem(1, 200, 5, 5, 20, 100)
    optimizer = RowOptimizer(OptimizerConfig(name=name, lr=0.02), True)
    tables = [
        Table(kind, 20, 100, optimizer.states(100), optimizer.scalars, "cpu")
        for kind in ("input", "output")
    ]
    tables[0]["weight"].fill_(0.1)
    pipeline = CompiledPipeline(*tables, Resident(), optimizer, CPU)
    (planned,) = pipeline.ahead([batch])
    assert pipeline.step(planned, 1e38).loss.isfinite()
    assert int(pipeline.fault) == 1 << len(FAULTS) | 1 << FAULTS.index(
        "the stepped rows of the output table"
    )
    assert all(torch.isfinite(table.records_VR).all() for table in tables)


@pytest.mark.parametrize("step", ["table", "row"])
@pytest.mark.parametrize("name, args", OPTIMIZERS, ids=str)
def test_optimizers_equal_torchs(name, args, step):
    """Twenty steps of random rows, which two threads have claimed in part, so that some are over the cap."""
    rows, dim, generator = 170, 50, torch.Generator().manual_seed(5)
    config = OptimizerConfig(name=name, args=args, lr=0.05, step=step, occurrence_cap=4)
    optimizers = [RowOptimizer(config, fused) for fused in (True, False)]
    ours, theirs = (
        Table("input", rows, dim, optimizer.states(dim), optimizer.scalars, "cpu")
        for optimizer in optimizers
    )
    for table in (ours, theirs):
        table["weight"].copy_(torch.randn(rows, dim, generator=torch.Generator().manual_seed(6)))
    claims, threads = cpu.Claims(rows, rows, dim, 2), cpu.Threads(2)
    for number in range(20):
        lr, grads_VD, pairs_V = (
            0.05 * (1 - number / 20),
            torch.zeros(rows, dim),
            torch.zeros(rows, dtype=torch.int64),
        )
        for thread in range(2):
            touched = torch.nonzero(torch.rand(rows, generator=generator) < 0.4).flatten()
            grad = torch.randn(len(touched), dim, generator=generator)
            number_V, rows_U, grad_UD, pairs_U, count = claims.of(thread)
            number_V[touched], count[0] = np.arange(len(touched)), len(touched)
            rows_U[: len(touched)], grad_UD[: len(touched)], pairs_U[: len(touched)] = (
                touched,
                grad,
                3,
            )
            grads_VD[touched] += grad
            pairs_V[touched] += 3
        either = torch.from_numpy((claims.number_nV >= 0).any(0)).nonzero().flatten()
        cpu.step_rows(
            threads,
            optimizers[0].formula,
            held(ours),
            claims,
            *optimizers[0].next_step(ours, lr),
            4,
        )
        assert (claims.number_nV == -1).all() and not claims.count_n.any()
        page = Page(
            theirs,
            either,
            theirs.records_VR[either],
            theirs.columns,
            grads_VD[either],
            pairs_V[either],
        )
        optimizers[1].step(page, lr)
        theirs.records_VR[either] = page.records_UR
    for field in theirs.columns:
        torch.testing.assert_close(ours[field], theirs[field], rtol=2e-5, atol=2e-6)
    assert all(torch.equal(ours.scalars[key], value) for key, value in theirs.scalars.items())


def test_only_plain_descent_steps_center_by_center():
    assert RowOptimizer(OptimizerConfig(name="SGD"), True).descends
    assert not RowOptimizer(OptimizerConfig(name="SGD", occurrence_cap=16), True).descends
    bound = [("SGD", {"weight_decay": 0.1}), ("SGD", {"momentum": 0.9}), ("Adam", {})]
    assert not any(
        RowOptimizer(OptimizerConfig(name=name, args=args), True).descends for name, args in bound
    )


@given(
    st.lists(st.floats(0, 1), min_size=1, max_size=50).filter(any),
    st.lists(st.floats(0, 1, exclude_max=True), min_size=1),
)
def test_noise_words_are_those_of_the_search(noise, uniform):
    cdf = torch.from_numpy(np.cumsum(noise) / np.sum(noise))
    numbers = torch.tensor([*uniform, *cdf.clamp(max=1).tolist(), 0.0, 1.0], dtype=torch.float64)
    assert torch.equal(cpu.inversion(cdf)(numbers), search(cdf)(numbers))


def test_where_nothing_can_be_written_it_compiles_anew(tmp_path):
    """A package in a folder that is read-only, and no home to write to."""
    code = f"""
import sys; sys.path.insert(0, {str(ROOT)!r})
from numba.core import caching
caching.CacheImpl._locator_classes = []
import torch
from w2v.kernels import cpu
print(cpu.inversion(torch.tensor([0.5, 1.0]))(torch.tensor([0.7])).item())
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path
    )
    assert done.returncode == 0 and done.stdout == "1\n", done.stderr


def test_numba_gets_what_kernels_from_the_disk_can_do_without_when_it_is_needed(tmp_path):
    """20 and 17 MiB of every run: a runtime of numba's own, compiled, and scipy.linalg."""
    kernel = f"""
import sys; sys.path.insert(0, {str(ROOT)!r})
import numba, numpy as np
from numba.core.runtime import rtsys
from w2v.text import tokenize as text
def there(): return rtsys.library._made.cache_info().currsize, 'scipy.linalg' in sys.modules
print(text.last_break(np.frombuffer(b'a b', np.uint8)), *there())
"""
    users = """
vector = np.array([2.0, 1.0])
print(numba.njit(lambda: np.dot(vector, vector))(), *there())
"""
    for code, said in (
        (kernel, "2 1 False\n"),
        (kernel + users, "2 0 False\n5.0 1 True\n"),
    ):  # compiled, then found on the disk
        environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path)}
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, env=environment
        )
        assert done.stdout == said, done.stderr
