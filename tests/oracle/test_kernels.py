"""Fast kernels equal the reference, on the CPU and on a GPU."""

import re
import shutil
import subprocess

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.each_case import each_case
from tests.support.pairwise import pairwise
from tests.support.steps import (
    MODEL,
    make_kernels,
    make_step,
    make_table,
    moved,
    one_sentence,
    problem,
    sorted_grads,
    train_on_text,
    with_tree,
)
from tests.support.structs import layout_assertions
from w2v.config import ModelConfig, OptimizerConfig
from w2v.rows import launch
from w2v.rows.ops import View
from w2v.rows.optim import RowOptimizer
from w2v.rows.table import padded
from w2v.word2vec import cpu_loops, cuda
from w2v.word2vec.batch import (
    FAULT_BITS,
    Grads,
    Objective,
    RowGrads,
    StepShape,
    StepState,
    Update,
    max_batch_rows,
)
from w2v.word2vec.cpu import CpuKernels, ThreadGrads
from w2v.word2vec.reference import ReferenceKernels
from w2v.word2vec.sampler import Sampler

FORMULAS = {"sgd": 0, "adagrad": 1, "rmsprop": 1}
FORMULAS |= dict.fromkeys(("adadelta", "adam", "adamw", "adamax"), 2)
FORMULAS |= {"rowwiseadagrad": 1, "rowwiseadam": 2}
GRADIENT_MACROS = "DIM WINDOW TARGETS PATHS ELEMENT COUNTED CBOW MEAN RANKS WEIGHTED SHARED"
VARIANTS = [
    ("rows.cu", {}),
    ("rows.cu", {"WIDE": 4, "LANES": 8, "ELEMENT": 1}),
    ("cache.cu", {}),
    ("lookup.cu", {}),
    ("draw.cu", {}),
    ("unique.cu", {"WINDOW": 5, "TARGETS": 6, "PATHS": 0}),
    ("unique.cu", {"WINDOW": 20, "TARGETS": 0, "PATHS": 1}),
    ("peers.cu", {"RANKS": 1, "ELEMENT": 0, "WIDE": 4}),
    ("peers.cu", {"RANKS": 4, "ELEMENT": 1, "WIDE": 1}),
    ("peers.cu", {"RANKS": 1000, "ELEMENT": 2, "WIDE": 4}),
    *(
        ("gradients.cu", dict(zip(GRADIENT_MACROS.split(), values, strict=True)))
        for values in (
            (128, 5, 6, 0, 0, 0, 0, 0, 1, 5, 8 * 11 * 516 + 32),
            (33, 20, 65, 0, 1, 1, 0, 0, 3, 0, 8 * 41 * 136),
            (300, 5, 6, 0, 0, 0, 0, 0, 1, 0, 8 * 11 * 1204 + 32),
            (1024, 1, 2, 0, 2, 0, 0, 0, 1, 8, 0),
            (128, 5, 6, 0, 0, 0, 1, 1, 2, 0, 0),
            (33, 20, 65, 0, 1, 1, 1, 0, 1, 0, 0),
            (1024, 1, 2, 0, 2, 1, 1, 1, 1, 0, 0),
            (128, 5, 0, 1, 0, 0, 0, 0, 1, 5, 0),
            (100, 5, 6, 1, 0, 1, 1, 1, 1, 0, 0),
            (1024, 5, 0, 1, 1, 1, 1, 0, 1, 0, 0),
            (2000, 5, 2, 1, 1, 1, 0, 0, 1, 0, 0),
        )
    ),
    *(("subwords.cu", {"DIM": 100 + element, "ELEMENT": element}) for element in range(3)),
    *(
        (
            "optim.cu",
            {
                "STEP": name.removeprefix("rowwise"),
                "STATES": states,
                "NARROW": int(name.startswith("rowwise")),
                "ELEMENT": n % 3,
                "WIDE": (4, 1)[n % 2],
                "RANKS": (0, 3)[n // 2 % 2],
            },
        )
        for n, (name, states) in enumerate([*FORMULAS.items(), ("adamw", 1), ("adamax", 1)])
    ),
]
OPTIMIZERS = [
    ("SGD", {}),
    ("SGD", {"weight_decay": 0.1}),
    ("Adagrad", {}),
    ("Adagrad", {"lr_decay": 0.1, "initial_accumulator_value": 0.5}),
    ("RMSprop", {}),
    ("RMSprop", {"alpha": 0.9, "weight_decay": 0.1}),
    ("Adadelta", {}),
    ("Adadelta", {"rho": 0.5, "weight_decay": 0.1}),
    ("Adam", {}),
    ("Adam", {"betas": [0.5, 0.99], "weight_decay": 0.1}),
    ("Adam", {"betas": [0.0, 0.9]}),
    ("AdamW", {}),
    ("Adamax", {}),
    ("Adamax", {"betas": [0.5, 0.99]}),
    ("AdamW", {"betas": [0.0, 0.9]}),
    ("Adamax", {"betas": [0.0, 0.9]}),
    ("w2v.RowwiseAdagrad", {"weight_decay": 0.1}),
    ("w2v.RowwiseAdam", {"weight_decay": 0.1}),
]
GPU = pytest.mark.gpu
CUDA = pytest.param("cuda", marks=GPU)
FAST = ["cpu", CUDA]
WEIGHTED = Objective(weighted=20)
CBOW_MEAN, CBOW_SUM = Objective(cbow=True, mean=True), Objective(cbow=True, mean=False)


def device_of(kernels):
    return "cuda" if kernels == "cuda" else "cpu"


# Compiling and launching.


def whole_text(source, included):
    """Return a source with its headers, each of which it includes once."""
    if source in included:
        return ""
    included.add(source)
    text = launch.path_of(source).read_text().replace('extern "C"', "").replace("#pragma once", "")
    return re.sub('#include "(.*)"', lambda match: whole_text(match[1], included), text)


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not installed")
def test_cuda_sources_compile(tmp_path):
    """One call compiles all variants, as each call reads CUDA's headers anew."""
    code = ""
    for number, (source, macros) in enumerate(VARIANTS):
        text = f"{whole_text(source, set())}\n{layout_assertions(source)}"
        defined = "".join(f"#define {key} {value}\n" for key, value in macros.items())
        undefined = "".join(f"#undef {key}\n" for key in macros)
        code += f"{defined}namespace variant{number} {{\n{text}\n}}\n{undefined}"
    (tmp_path / "kernel.cu").write_text(code)
    output = ["-ptx", str(tmp_path / "kernel.cu"), "-o", str(tmp_path / "kernel.ptx")]
    oldest = "-arch=sm_75"  # that CUDA 13 compiles for
    command = ["nvcc", oldest, "-std=c++17", "-Xcicc", "-O0", *output]
    subprocess.run(command, check=True, timeout=120)
    assert (tmp_path / "kernel.ptx").read_text().count(".entry ") >= len(VARIANTS)


def test_every_cuda_source_and_formula_is_compiled_by_the_tests():
    assert {source for source, _ in VARIANTS} == {
        path.name for folder in launch.SOURCES for path in folder.glob("*.cu")
    }
    formulas = {RowOptimizer(OptimizerConfig(name=name)).formula for name, _ in OPTIMIZERS}
    assert formulas == set(FORMULAS)


# Gradients.


def check_gradients(kernels, batch, weights_TVD, dtype=torch.float32, threads=1):
    """Compare a batch's gradients with the reference in double precision.

    Only rounding of sums, which may cancel, can differ. Rows that the batch does not touch, and
    what lies beside the weights, are not numbers.
    """
    _, vectors, dim = weights_TVD.shape
    weight_AD = weights_TVD.to(dtype).transpose(0, 1).reshape(-1, dim)
    reference = ReferenceKernels(StepShape(vectors, dim, torch.float64, torch.device("cpu"), True))
    view = View(weight_AD.double(), None)
    expected = reference.gradients(batch, view, reference.unique_rows(batch), 0.0)
    theirs = expected.rows

    device = device_of(kernels)
    size = 2 * vectors, padded(2 * dim, dtype.itemsize)
    records_AR = torch.full(size, torch.nan, dtype=dtype)
    records_AR[theirs.rows_U, :dim] = weight_AD[theirs.rows_U]
    shape = StepShape(vectors, dim, dtype, torch.device(device), True)
    tested = make_kernels(kernels, shape, threads)
    batch = moved(batch, device)
    view = View(records_AR.to(device), None)
    found = tested.gradients(batch, view, tested.unique_rows(batch), 0.0)

    marks_A = torch.zeros(2 * vectors, dtype=torch.bool, device=device)
    tested.mark(batch, marks_A)
    assert torch.equal(torch.nonzero(marks_A).flatten().cpu(), theirs.rows_U.long())
    assert int(found.pairs) == int(expected.pairs)
    assert found.loss.item() == pytest.approx(expected.loss.item(), rel=1e-5, abs=1e-6)
    rows_U, grad_UD, pairs_U = sorted_grads(found.rows)
    assert torch.equal(rows_U, theirs.rows_U.long())
    assert torch.equal(pairs_U, theirs.pairs_U.long())
    for kind in (rows_U % 2 == 0, rows_U % 2 == 1):
        error = (grad_UD.double() - theirs.grad_UD)[kind].norm()
        assert error <= 1e-4 * theirs.grad_UD[kind].norm() + 1e-6 * expected.pairs


@pytest.mark.parametrize(  # few, as compiling a number of negatives takes seconds
    "dim, negative, objective",
    [
        (1, 5, Objective()),
        (100, 5, Objective()),
        (33, 5, WEIGHTED),
        (100, 5, CBOW_MEAN),
        (33, 5, CBOW_SUM),
    ],
    ids=str,
)
@pytest.mark.parametrize("softmax", ["negatives", "tree", "both"])
@settings(max_examples=10)
@given(
    seed=st.integers(0, 2**31),
    centers=st.integers(1, 300),
    window=st.integers(1, 20),
    rows=st.integers(1, 200),
    sentence=st.integers(1, 30),
    threads=st.integers(1, 5),
)
def test_gradients_on_the_cpu(
    dim, negative, objective, softmax, seed, centers, window, rows, sentence, threads
):
    batch, weights_TVD = problem(seed, centers, window, negative, rows, dim, sentence)
    batch = batch._replace(objective=objective)
    if softmax != "negatives":
        batch, weights_TVD = with_tree(batch, weights_TVD, alone=softmax == "tree")
    check_gradients("cpu", batch, weights_TVD, threads=threads)


SOFTMAX = st.sampled_from(["negatives", "tree", "both"])


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
    objective=st.sampled_from([Objective(), WEIGHTED, CBOW_MEAN, CBOW_SUM]),
    softmax=SOFTMAX,
)
def test_gradients_on_a_gpu(seed, centers, window, negative, rows, dim, dtype, objective, softmax):
    batch, weights_TVD = problem(seed, centers, window, negative, rows, dim)
    batch = batch._replace(objective=objective)
    if softmax != "negatives":
        batch, weights_TVD = with_tree(batch, weights_TVD, alone=softmax == "tree")
    check_gradients("cuda", batch, weights_TVD, dtype)


EDGES = {
    "one word a sentence": {"sentence": 1},
    "one sentence": {"sentence": 10**6},
    "one word": {"rows": 1},
    "two words": {"rows": 2},
    "large logits": {"spread": 20.0},
    "one center": {"centers": 1},
    "two centers": {"centers": 2},
    "wide windows": {"window": 80, "sentence": 200},
}


@pairwise(
    {
        "edge": [pytest.param(edge, id=name) for name, edge in EDGES.items()],
        "kernels, threads, objective": [
            ("cpu", 1, Objective()),
            ("cpu", 3, Objective()),
            ("cpu", 3, CBOW_MEAN),
            pytest.param("cuda", 1, Objective(), marks=GPU),
            pytest.param("cuda", 1, Objective(weighted=80), marks=GPU),
            pytest.param("cuda", 1, CBOW_MEAN, marks=GPU),
            pytest.param("cuda", 1, CBOW_SUM, marks=GPU),
        ],
        "softmax": ["negatives", "tree", "both"],
    },
    # Weights of windows and sums of contexts are no matter of the softmax.
    lambda objective, softmax, **_: softmax == "negatives" or objective in (Objective(), CBOW_MEAN),
)
def test_gradients_at_the_edges(kernels, edge, threads, objective, softmax):
    size = {"seed": 1, "centers": 500, "window": 5, "negative": 5, "rows": 50, "dim": 100}
    batch, weights_TVD = problem(**(size | edge))
    batch = batch._replace(objective=objective)
    if softmax != "negatives":
        batch, weights_TVD = with_tree(batch, weights_TVD, alone=softmax == "tree")
    check_gradients(kernels, batch, weights_TVD, threads=threads)


@settings(max_examples=25)
@given(
    seed=st.integers(0, 2**31),
    centers=st.integers(1, 100),
    negative=st.integers(1, 5),
    rows=st.sampled_from([1, 2, 50, 5000]),
    softmax=SOFTMAX,
)
def test_buffers_have_room_for_the_rows_of_any_batch(seed, centers, negative, rows, softmax):
    batch, weights_TVD = problem(seed, centers, 5, negative, rows)
    if softmax != "negatives":
        batch, weights_TVD = with_tree(batch, weights_TVD, alone=softmax == "tree")
    vectors = weights_TVD.shape[1]
    reference = ReferenceKernels(StepShape(vectors, 1, torch.float32, torch.device("cpu")))
    rows_U = reference.unique_rows(batch).rows.rows_U
    assert len(rows_U) <= max_batch_rows(batch, vectors)


@pytest.mark.gpu
@pytest.mark.parametrize("has_tree", [False, True])
@pytest.mark.parametrize("objective", [Objective(), CBOW_MEAN], ids=str)
def test_gradients_of_a_large_batch(objective, has_tree):
    """Each warp and each block takes several centers."""
    batch, weights_TVD = problem(1, 100_000, 5, 5, 20_000, 16)
    batch = batch._replace(objective=objective)
    if has_tree:
        batch, weights_TVD = with_tree(batch, weights_TVD, alone=False)
    check_gradients("cuda", batch, weights_TVD)


# Optimizers.


def optimizer_steps(config, kernels, dim=50, steps=12, dtype=torch.float32):
    """Return the table after steps with random gradients of random rows."""
    vectors, device = 170, torch.device(device_of(kernels))
    optimizer = RowOptimizer(config)
    table = make_table(optimizer, vectors, dim, device.type, dtype)
    tested = make_kernels(kernels, StepShape(vectors, dim, dtype, device, True), threads=2)
    view, state = View(table.records_VR, None), StepState(device)
    g = torch.Generator().manual_seed(5)
    for number in range(steps):
        rows_U = torch.nonzero(torch.rand(2 * vectors, generator=g) < 0.45).flatten()
        pairs_U = 2 * torch.randint(1, 20, (len(rows_U),), generator=g)
        grad_UD = torch.randn(len(rows_U), dim, generator=g)
        grads = grads_of(tested, rows_U, grad_UD, pairs_U)
        lr = 0.05 * (1 - number / steps)
        tested.optimizer_step(Update(optimizer, table, lr), view, grads, state)
        assert kernels == "reference" or is_reset(grads.rows)
    assert not state.fault
    return table


def grads_of(kernels, rows_U, grad_UD, pairs_U, loss=1.0):
    """Return gradients of rows; two CPU threads have half each."""
    shape, device = kernels.shape, kernels.shape.device
    parts = torch.arange(len(rows_U)), rows_U, grad_UD, pairs_U
    if isinstance(kernels, CpuKernels):
        grads = ThreadGrads(shape.rows, shape.rows, shape.dim, 2)
        grads.of_all.count_1[:] = len(rows_U)
        for thread in range(2):
            fill(grads.of_thread[thread][:4], parts, share=2)
            cpu_loops.sort_by_owner(grads.of_thread[thread], owners=2)
    else:
        # Only the reference takes all that the buffers have room for.
        room = len(rows_U) if isinstance(kernels, ReferenceKernels) else shape.rows
        integers = torch.zeros(2, room, dtype=torch.int32, device=device)
        index_A = torch.full((shape.rows,), -1, dtype=torch.int32, device=device)
        grad_UD = torch.zeros(room, shape.dim, device=device)
        count = torch.tensor(len(rows_U), device=device)
        grads = RowGrads(index_A, integers[0], grad_UD, integers[1], count)
        fill(grads[:4], [part.to(device) for part in parts])
    loss, pairs = torch.tensor(loss, dtype=torch.float64), torch.tensor(1)
    return Grads(grads, loss.to(device), pairs.to(device))


def fill(buffers, parts, share=1):
    """Write rows, their indices, and a share of their gradients and pairs."""
    index_A, its_rows_U, its_grad_UD, its_pairs_U = buffers
    indices, rows_U, grad_UD, pairs_U = parts
    index_A[rows_U] = indices.int()
    its_rows_U[: len(rows_U)] = rows_U
    its_grad_UD[: len(rows_U), : grad_UD.shape[1]] = grad_UD / share
    its_pairs_U[: len(rows_U)] = pairs_U // share


def is_reset(grads):
    """Return whether gradients are as before a step."""
    if isinstance(grads, ThreadGrads):
        return bool((grads.of_all.index_A == -1).all() and (grads.listing[2] == -1).all())
    return bool((grads.index_A == -1).all()) and not grads.grad_UD.any()


def assert_tables_close(ours, theirs, rtol=2e-5, atol=2e-6):
    for field in theirs.columns:
        found, wanted = ours[field].cpu().float(), theirs[field].float()
        torch.testing.assert_close(found, wanted, rtol=rtol, atol=atol)
    assert all(torch.equal(ours.scalars[key], value) for key, value in theirs.scalars.items())


@pytest.mark.parametrize("kernels", FAST)
@each_case(
    "name, args, step, cap",
    [
        (*optimizer, step, cap if number % 2 else 16 - cap)
        for number, optimizer in enumerate(OPTIMIZERS)
        for step, cap in (("table", 0), ("row", 16))
    ],
)
def test_optimizers_equal_torchs(kernels, name, args, step, cap):
    config = OptimizerConfig(name=name, args=args, lr=0.05, step=step, occurrence_cap=cap)
    assert_tables_close(optimizer_steps(config, kernels), optimizer_steps(config, "reference"))


@pytest.mark.gpu
@pairwise(
    {
        "name": ["Adam", "SGD", "RMSprop"],
        "dtype, unit": [(torch.bfloat16, 2**-8), (torch.float16, 2**-11)],
        "dim": [50, 64],
    }
)
def test_optimizers_round_as_encode_does(name, dtype, unit, dim):
    """Few bits differ after one step; tables are close after some."""
    config = OptimizerConfig(name=name, lr=0.05)
    ours, theirs = (
        optimizer_steps(config, kernels, dim, 1, dtype) for kernels in ("cuda", "reference")
    )
    assert (ours.records_VR.cpu() == theirs.records_VR).float().mean() > 0.999
    often = [
        optimizer_steps(config, kernels, dim, dtype=dtype) for kernels in ("cuda", "reference")
    ]
    assert_tables_close(*often, rtol=8 * unit, atol=8 * unit)


@pairwise(
    {
        "kernels": ["reference", *FAST],
        "name": ["Adam", "NAdam"],
        "which": [0, 1],
        "loss, grad, fault": [
            (1.0, 1.0, 0),
            (torch.nan, 1.0, 1),
            (torch.inf, 1.0, 1),
            (1.0, torch.nan, 2),
        ],
    },
    lambda kernels, name, **_: kernels != "cuda" or name == "Adam",  # the others are left to torch
)
def test_steps_write_nothing_that_is_not_finite(kernels, name, loss, grad, fault, which):
    """The first step has input or output vectors; the second step is sound."""
    vectors, dim, device = 4, 5, torch.device(device_of(kernels))
    optimizer = RowOptimizer(OptimizerConfig(name=name, lr=0.1))
    table = make_table(optimizer, vectors, dim, device.type)
    before_VR = table.records_VR.clone()
    tested = make_kernels(kernels, StepShape(vectors, dim, torch.float32, device), threads=2)
    view, state = View(table.records_VR, None), StepState(device)
    first_U, then_U = torch.tensor([2, 6]) + which, torch.tensor([2, 3, 6, 7])
    for number, step_loss, rows_U, factor in ((5, loss, first_U, grad), (6, 1.0, then_U, 1.0)):
        state.step = number
        grad_UD = torch.full((len(rows_U), dim), factor)
        grads = grads_of(tested, rows_U, grad_UD, torch.full_like(rows_U, 2), step_loss)
        tested.optimizer_step(Update(optimizer, table, 0.1), view, grads, state)
        assert kernels == "reference" or is_reset(grads.rows)
    assert int(state.fault) == ((5 << FAULT_BITS) + fault if fault else 0)
    assert kernels == "cpu" or int(state.rows_updated) == 6
    changed = torch.nonzero((table.records_VR != before_VR).any(dim=1)).flatten().tolist()
    assert changed == ([] if fault else [2, 3, 6, 7])


@each_case(
    "name, argument",
    [("SGD", "momentum"), ("SGD", "maximize"), ("Adam", "amsgrad"), ("RMSprop", "centered")],
)
def test_other_optimizers_and_arguments_are_left_to_torch(name, argument):
    assert not RowOptimizer(OptimizerConfig(name=name, args={argument: True})).formula
    for other in ("NAdam", "Rprop"):
        assert not RowOptimizer(OptimizerConfig(name=other)).formula


# Training.


def check_training(kernels, name, cap=0, model=MODEL, **how):
    """Compare training on a small text with the reference."""
    config = OptimizerConfig(name=name, lr=0.002, occurrence_cap=cap)
    device = device_of(kernels)
    ours, our_losses = train_on_text(config, kernels, device, model, **how)
    theirs, their_losses = train_on_text(config, "reference", device, model)
    torch.testing.assert_close(our_losses, their_losses, rtol=1e-3, atol=1e-3)
    for table, expected in zip(ours.tables, theirs.tables, strict=True):
        for field in expected.columns:
            found, wanted = table[field].cpu(), expected[field].cpu()
            assert (found - wanted).norm() < 1e-3 * wanted.norm()


@each_case(
    "name, cap, architecture",
    [
        ("Adam", 0, "skipgram"),
        ("Adamax", 0, "cbow"),
        ("RMSprop", 5, "skipgram"),
        ("AdamW", 0, "cbow"),
        ("SGD", 5, "skipgram"),
        ("SGD", 5, "cbow"),
        ("NAdam", 5, "cbow"),
    ],
)
def test_training_on_the_cpu(name, cap, architecture):
    model = ModelConfig(architecture=architecture, negative=5)
    check_training("cpu", name, cap, model, threads=3)


ENGINES = [("resident", 0, 1), ("cache", 500, 1), ("cache", 510, 3)]


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["Adam", "Adamax", "RMSprop", "SGD", "Adagrad", "AdamW", "NAdam"])
@each_case("engine, slots, steps_per_page", ENGINES)
def test_training_on_a_gpu(name, engine, slots, steps_per_page):
    check_training("cuda", name, engine=engine, slots=slots, steps_per_page=steps_per_page)


@pytest.mark.gpu
@pairwise(
    {
        "model": [
            {"architecture": "cbow"},
            {"architecture": "cbow", "cbow_mean": False, "negative_pool": 50},
            {"hs": True, "negative": 0},
            {"architecture": "cbow", "hs": True},
        ],
        "name, cap": [("Adam", 0), ("SGD", 5), ("NAdam", 5)],
        "engine, slots, steps_per_page": ENGINES,
    }
)
def test_training_of_other_models_on_a_gpu(model, name, cap, engine, slots, steps_per_page):
    how = {"engine": engine, "slots": slots, "steps_per_page": steps_per_page}
    check_training("cuda", name, cap, ModelConfig(**{"negative": 5} | model), **how)


def sampler_of_random_words(model, words, batch_size):
    ids = np.random.default_rng(1).integers(0, 5000, words)
    text, device = one_sentence(ids, 5000), torch.device("cuda")
    return Sampler(text, model, batch_size, 1, device)


@pytest.mark.gpu
def test_buffers_have_room_for_the_words_of_a_pool_alone():
    step = make_step(OptimizerConfig(name="SGD", lr=0.01), 5000, 8, "cuda", "cuda")
    model = ModelConfig(negative=5, negative_pool=100)
    sampler = sampler_of_random_words(model, 4000, 500)
    for planned in step.plan_pages(sampler.epoch()):
        step(planned, 0.01)
        rows = step.kernels._rows
        assert len(rows.rows_U) <= 500 + 2 * model.window + 500 + 100
        assert is_reset(rows)
    assert not step.state.fault


@pytest.mark.gpu
@each_case("kernels, name", [("cuda", "SGD"), ("cuda", "ASGD"), ("reference", "SGD")])
def test_planning_far_ahead_of_a_slow_computation_changes_nothing(kernels, name):
    """Each step waits for 5 ms of other work, so the CPU could run ahead."""

    def trained(cycles):
        step = make_step(OptimizerConfig(name=name, lr=0.01), 5000, 32, kernels, "cuda")
        sampler = sampler_of_random_words(ModelConfig(), 40_000, 1000)
        losses = []
        for planned in step.plan_pages(sampler.epoch()):
            torch.cuda._sleep(cycles)
            losses.append(step(planned, 0.01).loss)
            if not cycles:
                torch.cuda.synchronize()
        return torch.stack(losses).cpu(), step.inputs["weight"].cpu()

    (slow_losses, slow), (losses, weights) = trained(10_000_000), trained(0)
    torch.testing.assert_close(slow_losses, losses, rtol=1e-6, atol=0)
    torch.testing.assert_close(slow, weights, rtol=1e-5, atol=1e-6)
