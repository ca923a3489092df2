"""Several ranks with fused kernels leave what one with the whole batch leaves: in threads that share a GPU, and on GPUs of their own. The
same bodies run without a GPU by plain twins of the kernels."""

import numpy as np
import pytest
import torch

from tests.support import plain_kernels
from tests.support.joined import Pool
from tests.support.threaded import checked, together
from w2v.config import OptimizerConfig
from w2v.distributed.exchange import ShardedPipeline
from w2v.distributed.ranks import SINGLE
from w2v.kernels import cuda
from w2v.kernels import cuda_shard as shard
from w2v.kernels.batch import Batch, Held
from w2v.model.optim import FUSED, RowOptimizer
from w2v.model.table import Table, uniform
from w2v.training.step import FAULTS, FusedPipeline
from w2v.transfer.cache_mapped import CachedMapped
from w2v.transfer.resident import Resident

ROWS, DIM, STEPS, CENTERS, WINDOW, LR = 301, 48, 12, 64, 3, 0.01
TWINS = {
    cuda: ("claim", "skipgram"),
    shard: ("deal", "hear", "mark_lent", "lend", "place", "report", "collect"),
}


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request, monkeypatch):
    """Where steps are computed; without a GPU by plain twins of the kernels."""
    if request.param == "cpu":
        for module, names in TWINS.items():
            for name in names:
                monkeypatch.setattr(module, name, getattr(plain_kernels, name))
    return request.param


def some_batches(ranks, device, sentences=9):
    """A rank's part of each batch, sometimes no center at all; a rank alone has the whole."""
    draw, cut = np.random.default_rng(5), np.random.default_rng(6)
    for number in range(STEPS):
        words = torch.from_numpy(draw.zipf(1.3, CENTERS) % ROWS).int()
        sentence = torch.from_numpy(np.sort(draw.integers(0, sentences, CENTERS))).int()
        windows = torch.from_numpy(draw.integers(1, WINDOW + 1, CENTERS)).int()
        negatives = torch.from_numpy(draw.integers(0, ROWS, (CENTERS, 4))).int()
        inner = (
            sorted(cut.integers(0, CENTERS + 1, ranks.size - 1))
            if number % 3
            else [0] * (ranks.size - 1)
        )
        begin, end = [0, *inner, CENTERS][ranks.rank : ranks.rank + 2]
        windows, negatives = windows[begin:end], negatives[begin:end]
        yield Batch(
            words.to(device),
            sentence.to(device),
            int(begin),
            windows.to(device),
            negatives.to(device),
            WINDOW,
            0.0,
        )


def make(ranks, name, device, dtype, slots, steps_per_page, cap):
    """A pipeline with the rows of this rank; one rank alone has all."""
    config = OptimizerConfig(name=name, lr=LR, occurrence_cap=cap)
    optimizer = (RowOptimizer if device == "cuda" else plain_kernels.InPlace)(config, fused=True)
    states, scalars, rows = optimizer.states(DIM), optimizer.scalars, ranks.shard_rows(ROWS)
    storage = "pinned" if slots else device
    tables = [Table(key, rows, DIM, states, scalars, storage, dtype) for key in ("input", "output")]
    for seed, table in enumerate(tables):
        whole = uniform(DIM, 0.5, seed)
        table.initialise(lambda rows, whole=whole: whole(ranks.global_rows(rows)))
    engine = (
        CachedMapped(tables, int(slots * 2 * rows), torch.device(device)) if slots else Resident()
    )
    kind = FusedPipeline if ranks is SINGLE else ShardedPipeline
    return kind(
        *tables, engine, optimizer, torch.device(device), steps_per_page, ranks=ranks, rows=ROWS
    )


def trained(ranks, name, device, dtype=torch.float32, slots=0.0, steps_per_page=1, cap=0):
    """The weights of this rank's rows, the losses and the numbers of pairs."""
    pipeline = make(ranks, name, device, dtype, slots, steps_per_page, cap)
    results = [
        pipeline.step(planned, LR)
        for _ in range(2)
        for planned in pipeline.ahead(some_batches(ranks, device))
    ]
    pipeline.engine.flush()
    weights = [table["weight"].float().cpu() for table in (pipeline.inputs, pipeline.outputs)]
    assert not int(pipeline.fault)
    return weights, [float(loss) for loss, _ in results], [int(pairs) for _, pairs in results]


def check(several, alone, near):
    weights, losses, pairs = alone
    for number, expected in enumerate(weights):
        whole = torch.empty_like(expected)
        for rank, (shards, _, _) in enumerate(several):
            whole[rank :: len(several)] = shards[number]
        assert (whole - expected).norm() < near * expected.norm()
    for _, our_losses, our_pairs in several:
        assert (
            our_losses == several[0][1] == pytest.approx(losses, rel=10 * near)
            and our_pairs == pairs
        )


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("name", [cls.__name__ for cls in FUSED])
def test_every_optimizer(device, name, size):
    check(checked(together(size, trained, name, device)), trained(SINGLE, name, device), 1e-3)


@pytest.mark.parametrize("steps_per_page", [1, 5])
def test_occurrences_are_counted_over_all_ranks(device, steps_per_page):
    case = ("Adam", device, torch.float32, 0.0, steps_per_page, 8)
    check(checked(together(2, trained, *case)), trained(SINGLE, *case), 1e-3)


@pytest.mark.parametrize("dim", [1, 2, 5])
def test_what_ranks_report_takes_several_rows_of_short_vectors(device, dim, monkeypatch):
    monkeypatch.setitem(globals(), "DIM", dim)
    check(
        checked(together(3, trained, "Adam", device, torch.float32, 0.0, 5)),
        trained(SINGLE, "Adam", device),
        1e-3,
    )


def exchanges(ranks, *case):
    """How many times a rank sends rows or sums numbers."""
    counted, send = [], ranks.all_to_all
    ranks.all_to_all = lambda *arguments, **how: (counted.append(1), send(*arguments, **how))[1]
    ranks.all_reduce = None  # nothing is summed by itself
    trained(ranks, *case)
    return len(counted)


@pytest.mark.parametrize("steps_per_page, cap, of_a_step", [(1, 0, 2), (1, 8, 3), (5, 0, 2)])
def test_a_page_takes_one_exchange_and_a_step_two_and_one_for_numbers_of_pairs(
    device, steps_per_page, cap, of_a_step
):
    passes, pages = (
        2,
        -(-STEPS // steps_per_page),
    )  # a pass begins with the numbers of its first page
    sent = passes * (1 + pages + of_a_step * STEPS)
    assert (
        checked(together(2, exchanges, "Adam", device, torch.float32, 0.0, steps_per_page, cap))
        == [sent] * 2
    )


@pytest.mark.gpu
@pytest.mark.parametrize("dtype, near", [(torch.float32, 1e-3), (torch.bfloat16, 3e-2)], ids=str)
@pytest.mark.parametrize("slots, steps_per_page", [(0.0, 4), (1.0, 1), (0.9, 1), (0.95, 4)])
def test_every_engine_and_element(dtype, near, slots, steps_per_page):
    case = ("Adam", "cuda", dtype, slots, steps_per_page)
    check(checked(together(2, trained, *case)), trained(SINGLE, *case), near)


@pytest.mark.gpu
@pytest.mark.parametrize("slots", [0.0, 0.95])
def test_gpus_of_their_own(slots):
    if torch.cuda.device_count() < 2:
        pytest.skip(f"needs 2 GPUs, and there are {torch.cuda.device_count()}")
    case = ("Adam", "cuda", torch.float32, slots, 2, 8)
    pool = Pool(2, "cuda")
    try:
        check(pool.run(trained, *case), trained(SINGLE, *case), 1e-3)
    finally:
        pool.close()


def after_a_fault(ranks, device, value, found=(0, 0)):
    """The step of the fault that this rank knows after each of three, and whether each wrote anything.

    value: what rank 0's row 0 begins with; found: the bits of the fault that each rank finds in its rows at the first step.
    """
    pipeline = make(ranks, "SGD", device, torch.float32, 0.0, 1, 0)
    tables, faults, wrote = (pipeline.inputs, pipeline.outputs), [], []
    if ranks.rank == 0:
        pipeline.inputs["weight"][0] = value

    def batches():  # made on the stream that draws them, as a sampler does
        for _ in range(3):
            words = torch.tensor([0, 7], device=device).int()
            yield Batch(
                words,
                torch.zeros_like(words),
                0,
                torch.ones_like(words),
                torch.full((2, 1), 9, device=device).int(),
                1,
                0.0,
            )

    for planned in pipeline.ahead(batches()):
        before = [table.records_VR.clone() for table in tables]
        pipeline.step(planned, LR)
        if found[ranks.rank] and pipeline.steps == 1:
            pipeline.fault.fill_(1 << len(FAULTS) | found[ranks.rank])
        faults.append(int(pipeline.fault))
        wrote.append(
            any(
                not torch.equal(x.nan_to_num(), t.records_VR.nan_to_num())
                for x, t in zip(before, tables, strict=True)
            )
        )
    return faults, wrote


def test_a_loss_that_is_not_finite_is_written_by_no_rank(device):
    for faults, wrote in checked(together(2, after_a_fault, device, float("nan"))):
        assert faults == [1 << len(FAULTS) | 1] * 3 and wrote == [False] * 3


def test_rows_that_are_not_finite_stop_all_ranks_at_the_next_step(device):
    fault = 1 << len(FAULTS) | 16
    (faults, wrote), (other_faults, other_wrote) = checked(
        together(2, after_a_fault, device, 0.5, (0, 16))
    )
    assert faults == [0, fault, fault] and other_faults == [fault] * 3
    assert wrote == other_wrote == [True, False, False]


def test_faults_of_two_ranks_in_one_step_are_those_of_both(device):
    step = 1 << len(FAULTS)
    (faults, _), (other_faults, _) = checked(together(2, after_a_fault, device, 0.5, (8, 16)))
    assert faults == [step | 8, step | 24, step | 24] and other_faults == [
        step | 16,
        step | 24,
        step | 24,
    ]


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    "size, dim, dtype",
    [
        (1, 48, torch.float32),
        (2, 33, torch.bfloat16),
        (3, 5, torch.float32),
        (7, 128, torch.float16),
        (300, 1, torch.float32),
    ],
)
def test_kernels_equal_their_plain_twins(seed, size, dim, dtype):
    """As sets: the order in which rows are listed for an owner, or claimed, is that in which threads come."""
    g, rows, cuda_device = torch.Generator().manual_seed(seed), 2_000, torch.device("cuda")
    stride, heads = -(-rows // size), shard.heads(dim)
    found = {}
    for module in (shard, plain_kernels):
        g.manual_seed(seed)
        claims = tuple(cuda.Claims(rows, rows, 0, cuda_device) for _ in range(2))
        counts = torch.zeros(2, dtype=torch.int64, device="cuda")
        for number, its in enumerate(claims):
            some = torch.randperm(rows, generator=g)[
                : int(torch.randint(0, rows, (), generator=g))
            ].int()
            its.rows_U[: len(some)], counts[number] = some, len(some)
            its.number_V[some.long()] = torch.arange(len(some), device="cuda").int()
        tally_2N = torch.zeros(2, size, dtype=torch.int32, device="cuda")
        none_U, none_N = (
            torch.full((size * heads,), -1, device="cuda").int(),
            torch.full((size,), heads, device="cuda").int(),
        )
        rows_U, ids_U = module.deal(
            claims, counts.unbind(), stride, heads, tally_2N.unbind(), (none_U, none_N)
        )
        asked_N, total = tally_2N[0], int(counts.sum()) + size * heads
        rows_U, ids_U = rows_U[:total], ids_U[:total].long()
        segments = [ids_u.sort().values for ids_u in ids_U.split(asked_N.tolist())]
        assert all((ids_u[:heads] == -1).all() and (ids_u[heads:] >= 0).all() for ids_u in segments)
        assert (rows_U.split(asked_N.tolist())[-1][:heads] == -1).all() and all(
            (its.number_V == -1).all() for its in claims
        )
        ours = rows_U >= 0
        owners = torch.arange(size, device="cuda").repeat_interleave(asked_N)
        assert torch.equal(rows_U[ours] % rows % size, owners[ours])
        assert torch.equal(
            ids_U[ours], rows_U[ours] % rows // size + stride * (rows_U[ours] >= rows)
        )
        place_TV = torch.full((2, rows), -1, dtype=torch.int32, device="cuda")
        zeros_UD, zeros_U = module.place(rows_U, place_TV, dim, counted=True)
        assert torch.equal(
            place_TV.view(-1)[rows_U[ours]].long(), torch.arange(total, device="cuda")[ours]
        )
        assert (
            zeros_UD.shape == (total, dim)
            and not zeros_UD.any()
            and zeros_U.shape == (total,)
            and not zeros_U.any()
        )
        lent_N, known_2N = (
            torch.zeros_like(asked_N),
            torch.zeros(2, size, dtype=torch.int32).pin_memory(),
        )
        module.hear(none_U, none_N, asked_N, lent_N, known_2N)
        torch.cuda.synchronize()
        assert (
            torch.equal(lent_N, asked_N)
            and torch.equal(known_2N[0], known_2N[1])
            and torch.equal(known_2N[0], asked_N.cpu())
        )

        ids_M = torch.cat(segments).int()
        marks_TV = torch.zeros(2, stride, dtype=torch.bool, device="cuda")
        module.mark_lent(ids_M, stride, marks_TV)
        slots = torch.randperm(2 * stride, generator=g).int().cuda().view(2, stride)
        records_SR = torch.randn(2 * stride, dim + 8, generator=g).to("cuda", dtype)
        owned, counts = (
            tuple(cuda.Claims(stride, 2_000, dim, cuda_device) for _ in range(2)),
            torch.zeros_like(counts),
        )
        weights_MD = module.lend(
            ids_M,
            stride,
            (Held(records_SR, slots[0]), Held(records_SR, None)),
            dim,
            owned,
            counts.unbind(),
        )
        grad_MD, pairs_M = (
            torch.randn(total, dim, generator=g).cuda(),
            torch.randint(1, 9, (total,), generator=g).int().cuda(),
        )
        facts = (
            torch.tensor(-0.1).double().cuda(),
            torch.tensor(2**40 + 3).cuda(),
            torch.tensor(7 << 35 | 0b10010).cuda(),
        )
        sums, fault = cuda.Sums(facts[0], facts[1], None), facts[2]
        module.report(sums, fault, lent_N, grad_MD)
        module.collect(ids_M, stride, lent_N, grad_MD, pairs_M, owned, sums, fault)
        order = [
            its.rows_U[: int(count)].argsort() for its, count in zip(owned, counts, strict=True)
        ]
        steps = [
            (its.rows_U[u], its.grad_UD[u], its.pairs_U[u])
            for its, u in zip(owned, order, strict=True)
        ]
        assert int(sums.pairs) == size * (2**40 + 3) and int(fault) == 7 << 35 | 0b10010
        found[module] = (
            tally_2N[0],
            rows_U.sort().values,
            marks_TV,
            weights_MD[ids_M >= 0],
            counts,
            *steps[0],
            *steps[1],
            sums.loss,
        )
    for ours, theirs in zip(*found.values(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
