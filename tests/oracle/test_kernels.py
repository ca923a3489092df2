"""The CUDA kernels against their plain twins, on random problems."""

import ctypes
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from w2v.config import ModelConfig, OptimizerConfig
from w2v.kernels import cuda, reference
from w2v.kernels.batch import Batch, Held, Page
from w2v.model.optim import RowOptimizer
from w2v.model.sampler import Sampler
from w2v.model.skipgram import expand, find_slots
from w2v.model.table import RowState, Table, uniform
from w2v.training.step import FusedPipeline, Pipeline
from w2v.transfer.cache_mapped import CachedMapped
from w2v.transfer.resident import Resident

KERNELS = Path(__file__).parents[2] / "w2v" / "kernels" / "cu"
FORMULAS = [("sgd", 0), ("adagrad", 1), ("rmsprop", 1), ("adam", 2), ("adamw", 2), ("adamax", 2)]
COMPILED = [
    ("rows.cu", []),
    ("claim.cu", ["-DWINDOW=5", "-DTARGETS=6"]),
    ("cache.cu", []),
    *(
        ("shard.cu", [f"-DRANKS={ranks}", f"-DHEADS={heads}", f"-DELEMENT={e}", f"-DWIDE={w}"])
        for e, (ranks, heads, w) in enumerate([(1, 1, 4), (4, 6, 1), (1000, 1, 4)])
    ),
    ("draw.cu", []),
    *(
        (
            "sgns.cu",
            [
                f"-DDIM={d}",
                f"-DWINDOW={w}",
                f"-DTARGETS={t}",
                f"-DELEMENT={e}",
                f"-DCOUNTED={e % 2}",
            ],
        )
        for e, (d, w, t) in enumerate([(128, 5, 6), (33, 20, 65), (1024, 1, 2)])
    ),
    *(
        (
            "optim.cu",
            [
                f"-DSTEP={name}",
                f"-DSTATES={states}",
                f"-DELEMENT={n % 3}",
                f"-DWIDE={1 + 3 * (n % 2)}",
            ],
        )
        for n, (name, states) in enumerate(FORMULAS)
    ),
]


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not installed")
@pytest.mark.parametrize("source, defines", COMPILED, ids=str)
def test_kernels_compile(source, defines, tmp_path):
    command = [
        "nvcc",
        "-arch=sm_90",
        "-std=c++17",
        *defines,
        "-ptx",
        str(KERNELS / source),
        "-o",
        str(tmp_path / "kernel.ptx"),
    ]
    subprocess.run(command, check=True, timeout=120)


def test_arguments_reach_the_driver_in_the_parameters_sizes():
    """Read back as a kernel would: pointers and long integers of 8 bytes, integers, floats and flags from the first of theirs."""
    seen = []

    def driver(function, *shape_and_more):
        *shape, stream, parameters, extra = shape_and_more
        pointers = (ctypes.c_void_p * 6).from_address(parameters)
        kinds = (
            ctypes.c_uint64,
            ctypes.c_int64,
            ctypes.c_int32,
            ctypes.c_float,
            ctypes.c_float,
            ctypes.c_bool,
        )
        values = [
            kind.from_address(pointer).value for kind, pointer in zip(kinds, pointers, strict=True)
        ]
        seen.append((function, shape, stream, extra, values))

    launch = cuda.Launcher(77, driver)
    launch(5, [2**48 + 8, -(2**40), -1, 0.5, float("-inf"), True], 9)
    launch(6, [0, 3, 2**31 - 1, 0.0, 1.0, False], 0)
    assert seen[0] == (
        77,
        [5, 1, 1, cuda.THREADS, 1, 1, 0],
        9,
        0,
        [2**48 + 8, -(2**40), -1, 0.5, float("-inf"), True],
    )
    assert seen[1] == (
        77,
        [6, 1, 1, cuda.THREADS, 1, 1, 0],
        0,
        0,
        [0, 3, 2**31 - 1, 0.0, 1.0, False],
    )


def problem(seed, centers, window, negative, rows, dim, sentence=12, spread=1.0):
    """A text of random words with centers somewhere in its middle; and two tables."""
    g = torch.Generator().manual_seed(seed)
    length = centers + int(torch.randint(0, 3 * window, (), generator=g))
    words = torch.randint(rows, (length,), generator=g, dtype=torch.int32)
    sentences = torch.cumsum(torch.rand(length, generator=g) < 1 / sentence, 0).int()
    windows = torch.randint(1, window + 1, (centers,), generator=g, dtype=torch.int32)
    negatives = torch.randint(rows, (centers, negative), generator=g, dtype=torch.int32)
    first = int(torch.randint(0, length - centers + 1, (), generator=g))
    tables = [
        Table(name, rows, dim, {"exp_avg": RowState(dim, 0.0)}, {}, "cpu")
        for name in ("input", "output")
    ]
    for table in tables:
        table["weight"].copy_(spread * torch.randn(rows, dim, generator=g) / dim**0.25)
    return Batch(words, sentences, first, windows, negatives, window, 0.0), tables


def check_skipgram(batch, tables, dtype=torch.float32):
    """The kernels' rows, loss, gradients and counts of pairs are those of the reference in double precision, within rounding of sums that
    may cancel, whatever stands in rows that the batch does not touch."""
    for table in tables:
        table.records_VR = table.records_VR.to(dtype).contiguous()
    slots = find_slots(expand(batch), tables[0].rows)
    weights = [
        table["weight"].double()[rows]
        for table, rows in zip(tables, (slots.input_rows_U, slots.output_rows_V), strict=True)
    ]
    masks = slots.context_mask_BC, slots.target_mask_BT
    expected = reference.skipgram(
        *weights, slots.context_slots_BC, masks[0], slots.target_slots_BT, masks[1]
    )

    on_gpu = Batch(*(value.cuda() if isinstance(value, torch.Tensor) else value for value in batch))
    claims = [cuda.Claims(table.rows, 10**6, table.dim, torch.device("cuda")) for table in tables]
    sums = next(cuda.Sums.of_steps(torch.device("cuda")))
    cuda.claim(on_gpu, *claims, sums.claimed)
    found = slots.input_rows_U, slots.output_rows_V
    held = [
        Held(torch.full_like(table.records_VR, torch.nan, device="cuda"), None) for table in tables
    ]
    for (records_VR, _), table, rows in zip(held, tables, found, strict=True):
        records_VR[rows.cuda()] = table.records_VR[rows].cuda()
    cuda.skipgram(on_gpu, held[0], claims[0], held[1], claims[1], sums, counted=True)

    assert sums.pairs == expected.pairs and sums.loss.item() == pytest.approx(
        expected.loss.item(), rel=1e-5, abs=1e-6
    )
    grads = expected.grad_input_UD, expected.grad_output_VD
    numbers = reference.count_pairs(
        slots.context_slots_BC, masks[0], slots.target_slots_BT, masks[1], tuple(map(len, found))
    )
    for claim, count, rows, grad, number in zip(
        claims, map(int, sums.claimed), found, grads, numbers, strict=True
    ):
        claimed, order = claim.rows_U[:count].sort()
        assert torch.equal(claimed.cpu().long(), rows)
        mine = claim.grad_UD[:count][order].cpu().double()
        assert torch.isfinite(mine).all()
        assert (mine - grad).norm() <= 1e-4 * grad.norm() + 1e-6 * expected.pairs
        assert not claim.grad_UD[count:].any()
        assert torch.equal(claim.pairs_U[:count][order].cpu().long(), number)


@pytest.mark.gpu
@settings(max_examples=40)
@given(
    seed=st.integers(0, 2**31),
    centers=st.integers(1, 300),
    window=st.integers(1, 20),
    negative=st.integers(1, 64),
    rows=st.integers(1, 200),
    dim=st.sampled_from([32, 33, 50, 64, 96, 100, 128, 200, 256, 300, 512, 768, 1024]),
    dtype=st.sampled_from(list(cuda.ELEMENTS)),
)
def test_skipgram_equals_the_reference(seed, centers, window, negative, rows, dim, dtype):
    check_skipgram(*problem(seed, centers, window, negative, rows, dim), dtype)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "case", [{"sentence": 1}, {"sentence": 10**6}, {"rows": 2}, {"spread": 20.0}], ids=str
)
def test_skipgram_at_the_edges(case):
    """Sentences of one word mostly, one endless sentence, one word in nearly every pair, large logits."""
    check_skipgram(
        *problem(
            **(
                {"seed": 1, "centers": 500, "window": 5, "negative": 5, "rows": 50, "dim": 128}
                | case
            )
        )
    )


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["Adam", "Adamax", "RMSprop", "SGD", "Adagrad", "AdamW"])
@pytest.mark.parametrize(
    "slots, steps_per_page", [(None, 1), (500, 1), (450, 3)], ids=["resident", "roomy", "tight"]
)
def test_fused_training_equals_plain_training(name, slots, steps_per_page):
    """Some epochs over a small text, with tables on the GPU or paged, end with the same vectors and losses within rounding."""
    rng, rows, dim, device = np.random.default_rng(3), 300, 48, torch.device("cuda")
    lengths = rng.integers(1, 60, 120)
    ids, noise = (rng.zipf(1.3, lengths.sum()) % rows).astype(np.int32), np.full(rows, 1 / rows)

    def trained(fused):
        optimizer = RowOptimizer(OptimizerConfig(name=name, lr=0.002), fused)
        paged = fused and slots is not None
        tables = [
            Table(
                n,
                rows,
                dim,
                optimizer.states(dim),
                optimizer.scalars,
                "pinned" if paged else "cuda",
            )
            for n in ("input", "output")
        ]
        for number, table in enumerate(tables):
            table.initialise(uniform(dim, 0.5, number))
        sampler = Sampler(
            ids,
            np.cumsum([0, *lengths]),
            np.ones(rows),
            noise,
            ModelConfig(negative=3),
            64,
            1,
            device,
        )
        engine = CachedMapped(tables, slots, device) if paged else Resident()
        pipeline = (FusedPipeline if fused else Pipeline)(
            *tables, engine, optimizer, device, steps_per_page
        )
        losses = [
            pipeline.step(planned, 0.002)
            for _ in range(3)
            for planned in pipeline.ahead(sampler.epoch())
        ]
        engine.flush()
        return [table["weight"].cpu() for table in tables], torch.stack(
            [loss for loss, _ in losses]
        ).cpu()

    (ours, our_losses), (theirs, their_losses) = trained(True), trained(False)
    torch.testing.assert_close(our_losses, their_losses, rtol=1e-3, atol=1e-3)
    for mine, plain in zip(ours, theirs, strict=True):
        assert (mine - plain).norm() < 1e-3 * plain.norm()


@pytest.mark.gpu
def test_claims_have_room_for_the_words_of_a_pool_alone():
    rows, dim, device, ids = (
        5_000,
        8,
        torch.device("cuda"),
        np.random.default_rng(1).integers(0, 5_000, 4_000).astype(np.int32),
    )
    optimizer = RowOptimizer(OptimizerConfig(name="SGD", lr=0.01), True)
    tables = [Table(name, rows, dim, {}, {}, "cuda") for name in ("input", "output")]
    model = ModelConfig(negative=5, negative_pool=100)
    sampler = Sampler(
        ids,
        np.array([0, len(ids)]),
        np.ones(rows),
        np.full(rows, 1 / rows),
        model,
        500,
        1,
        device,
        draw=cuda.draw,
    )
    pipeline = FusedPipeline(*tables, Resident(), optimizer, device)
    for planned in pipeline.ahead(sampler.epoch()):
        pipeline.step(planned, 0.01)
        assert len(pipeline._work[1].rows_U) <= 500 + 100
        assert (pipeline._work[1].number_V == -1).all() and not pipeline._work[1].grad_UD.any()
    assert not pipeline.fault and tables[0]["weight"].isfinite().all()


@pytest.mark.gpu
@pytest.mark.parametrize("fused", [True, False])
def test_planning_far_ahead_of_a_slow_computation_changes_nothing(fused):
    """Each step waits for 5 ms of other work, so that the CPU could plan, and overwrite, many batches before the first is computed."""
    rows, dim, device = 5_000, 32, torch.device("cuda")
    ids = np.random.default_rng(1).integers(0, rows, 40_000).astype(np.int32)

    def trained(cycles):
        optimizer = RowOptimizer(OptimizerConfig(name="SGD", lr=0.01), fused)
        tables = [Table(name, rows, dim, {}, {}, "cuda") for name in ("input", "output")]
        for number, table in enumerate(tables):
            table.initialise(uniform(dim, 0.5, number))
        sampler = Sampler(
            ids,
            np.array([0, len(ids)]),
            np.ones(rows),
            np.full(rows, 1 / rows),
            ModelConfig(),
            1_000,
            1,
            device,
        )
        pipeline = (FusedPipeline if fused else Pipeline)(*tables, Resident(), optimizer, device)
        losses = []
        for planned in pipeline.ahead(sampler.epoch()):
            torch.cuda._sleep(cycles)
            losses.append(pipeline.step(planned, 0.01).loss)
            if not cycles:
                torch.cuda.synchronize()
        return torch.stack(losses).cpu(), tables[0]["weight"].cpu()

    (slow_losses, slow), (losses, weights) = trained(10_000_000), trained(0)
    torch.testing.assert_close(slow_losses, losses, rtol=1e-6, atol=0)
    torch.testing.assert_close(slow, weights, rtol=1e-5, atol=1e-6)


OPTIMIZERS = [
    ("SGD", {}),
    ("SGD", {"weight_decay": 0.1}),
    ("Adagrad", {}),
    ("Adagrad", {"lr_decay": 0.1, "initial_accumulator_value": 0.5}),
    ("RMSprop", {}),
    ("RMSprop", {"alpha": 0.9, "weight_decay": 0.1}),
    ("Adam", {}),
    ("Adam", {"betas": [0.5, 0.99], "weight_decay": 0.1}),
    ("Adam", {"betas": [0.0, 0.9]}),
    ("AdamW", {}),
    ("Adamax", {}),
    ("Adamax", {"betas": [0.5, 0.99]}),
]


def steps_of_random_rows(
    name, args, step, device, fused, rows=70, dim=50, steps=20, dtype=torch.float32, cap=0
):
    optimizer = RowOptimizer(
        OptimizerConfig(name=name, args=args, lr=0.05, step=step, occurrence_cap=cap), fused
    )
    assert optimizer.fused == fused
    tables = tuple(
        Table(key, rows, dim, optimizer.states(dim), optimizer.scalars, device, dtype)
        for key in ("input", "output")
    )
    generators = [torch.Generator().manual_seed(seed) for seed in (5, 6)]
    for table, g in zip(tables, generators, strict=True):
        table["weight"].copy_(torch.randn(rows, dim, generator=g))
    claims = tuple(cuda.Claims(rows, rows, dim, torch.device(device)) for _ in tables)
    stepped, expected = torch.zeros((), dtype=torch.int64, device=device), 0
    for number in range(steps):
        lr, touched = 0.05 * (1 - number / steps), []
        for g, share in zip(generators, (0.6, 0.3), strict=True):
            rows_U = torch.nonzero(torch.rand(rows, generator=g) < share).flatten()
            grad_UD = torch.randn(len(rows_U), dim, generator=g).to(device)
            touched.append(
                (rows_U, grad_UD, torch.randint(1, 40, (len(rows_U),), generator=g).to(device))
            )
        if fused:
            for its, (rows_U, grad_UD, pairs_U) in zip(claims, touched, strict=True):
                (
                    its.rows_U[: len(rows_U)],
                    its.grad_UD[: len(rows_U)],
                    its.pairs_U[: len(rows_U)],
                ) = rows_U.int(), grad_UD, pairs_U
            claimed = tuple(torch.tensor(len(rows_U), device=device) for rows_U, _, _ in touched)
            expected += sum(map(int, claimed))
            guard = cuda.Guard(
                *(
                    torch.zeros((), dtype=dtype, device=device)
                    for dtype in (torch.float64, torch.int64)
                ),
                number << 5,
                8,
            )
            held = tuple(Held(table.records_VR, None) for table in tables)
            optimizer.step_in_place(tables, held, claims, claimed, stepped, lr, guard)
            assert (
                not any(its.grad_UD.any() or (its.number_V != -1).any() for its in claims)
                and stepped == expected
            )
        else:
            for table, (rows_U, grad_UD, pairs_U) in zip(tables, touched, strict=True):
                page = Page(
                    table, rows_U, table.records_VR[rows_U].float(), table.columns, grad_UD, pairs_U
                )
                optimizer.step(page, lr)
                table.records_VR[rows_U] = table.encode(rows_U, page.records_UR)
    return tables


@pytest.mark.gpu
@pytest.mark.parametrize("step", ["table", "row"])
@pytest.mark.parametrize("name, args", OPTIMIZERS, ids=str)
def test_fused_optimizers_equal_torchs(name, args, step):
    pairs = (
        steps_of_random_rows(name, args, step, device, fused)
        for device, fused in (("cuda", True), ("cpu", False))
    )
    for ours, theirs in zip(*pairs, strict=True):
        for field in theirs.columns:
            torch.testing.assert_close(ours[field].cpu(), theirs[field], rtol=2e-5, atol=2e-6)
        assert all(torch.equal(ours.scalars[key], value) for key, value in theirs.scalars.items())


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["SGD", "Adam"])
def test_fused_optimizers_cap_occurrences_as_plain_torch_does(name):
    cases = [("cuda", True, 16), ("cpu", False, 16), ("cpu", False, 0)]
    cases = (
        steps_of_random_rows(name, {}, "table", device, fused, cap=cap)
        for device, fused, cap in cases
    )
    for ours, theirs, uncapped in zip(*cases, strict=True):
        torch.testing.assert_close(ours["weight"].cpu(), theirs["weight"], rtol=2e-5, atol=2e-6)
        assert (theirs["weight"] - uncapped["weight"]).abs().max() > 1e-3


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [50, 64])
@pytest.mark.parametrize("name", ["Adam", "SGD", "RMSprop"])
@pytest.mark.parametrize("dtype, unit", [(torch.bfloat16, 2**-8), (torch.float16, 2**-11)], ids=str)
def test_fused_optimizers_round_as_encode_does(name, dtype, unit, dim):
    """One step gives the same bits but where float32 differs in its last; and after twenty the tables are still near."""
    args = (name, {}, "table")
    once = (
        steps_of_random_rows(*args, device, device == "cuda", dim=dim, steps=1, dtype=dtype)
        for device in ("cuda", "cpu")
    )
    for one, other in zip(*once, strict=True):
        same = one.records_VR.cpu() == other.records_VR
        assert same.float().mean() > 0.999
    often = (
        steps_of_random_rows(*args, device, device == "cuda", dim=dim, dtype=dtype)
        for device in ("cuda", "cpu")
    )
    for many, others in zip(*often, strict=True):
        for field in others.columns:
            torch.testing.assert_close(
                many[field].cpu().float(), others[field].float(), rtol=8 * unit, atol=8 * unit
            )
        assert all(torch.equal(many.scalars[key], value) for key, value in others.scalars.items())


@pytest.mark.gpu
@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize(
    "loss, grad, fault",
    [(1.0, 1.0, 0), (float("nan"), 1.0, 161), (float("inf"), 1.0, 161), (1.0, float("nan"), 168)],
)
def test_fused_steps_write_nothing_that_is_not_finite(loss, grad, fault, which):
    """In either table; the first step has rows of that one alone. The second is sound, has rows of both, and comes too late."""
    optimizer = RowOptimizer(OptimizerConfig(name="Adam", lr=0.1), True)
    tables = tuple(
        Table(key, 4, 5, optimizer.states(5), optimizer.scalars, "cuda")
        for key in ("input", "output")
    )
    claims = tuple(cuda.Claims(4, 4, 5, torch.device("cuda")) for _ in tables)
    noted, stepped = (torch.tensor(0, device="cuda") for _ in range(2))
    for table in tables:
        table["weight"].fill_(1.0)
    for number, claimed in ((5, [2 * (table == which) for table in range(2)]), (6, [2, 2])):
        for its, count in zip(claims, claimed, strict=True):
            its.rows_U[:count] = torch.tensor([1, 3], dtype=torch.int32)[:count]
            its.grad_UD[:count] = grad if number == 5 else 1.0
        guard = cuda.Guard(
            torch.tensor(loss if number == 5 else 1.0, dtype=torch.float64, device="cuda"),
            noted,
            number << 5,
            8,
        )
        held, counts = (
            (Held(table.records_VR, None) for table in tables),
            (torch.tensor(count, device="cuda") for count in claimed),
        )
        optimizer.step_in_place(tables, tuple(held), claims, tuple(counts), stepped, 0.1, guard)
    assert int(noted) == (fault + 8 if fault == 168 and which else fault) and int(stepped) == 6
    assert not any(its.grad_UD.any() or (its.number_V != -1).any() for its in claims)
    for table in tables:
        assert (table.records_VR[:, :5] != 1.0).any(dim=1).tolist() == (
            [False] * 4 if fault else [False, True, False, True]
        )


WITHOUT = [
    ("SGD", {"momentum": 0.9}),
    ("SGD", {"maximize": True}),
    ("Adam", {"amsgrad": True}),
    ("RMSprop", {"centered": True}),
    ("NAdam", {}),
    ("Rprop", {}),
]


@pytest.mark.parametrize("name, args", WITHOUT, ids=str)
def test_what_has_no_formula_is_left_to_torch(name, args):
    assert not RowOptimizer(OptimizerConfig(name=name, args=args), fused=True).fused
