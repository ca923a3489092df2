"""The CUDA kernels against their plain twins, on random problems."""

import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from w2v.batch import Page
from w2v.config import OptimizerConfig
from w2v.kernels import cuda, reference
from w2v.optim import RowOptimizer
from w2v.table import Table

KERNELS = Path(__file__).parent.parent / "w2v" / "kernels"
FORMULAS = [("sgd", 0), ("adagrad", 1), ("rmsprop", 1), ("adam", 2), ("adamw", 2), ("adamax", 2)]
COMPILED = [
    ("rows.cu", []),
    *(("sgns.cu", [f"-DDIM={d}", f"-DCONTEXTS={c}", f"-DTARGETS={t}"]) for d, c, t in [(128, 10, 6), (33, 40, 65), (1024, 2, 2)]),
    *(("optim.cu", [f"-DSTEP={name}", f"-DSTATES={states}"]) for name, states in FORMULAS),
]


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not installed")
@pytest.mark.parametrize("source, defines", COMPILED, ids=str)
def test_kernels_compile(source, defines, tmp_path):
    command = ["nvcc", "-arch=sm_90", "-std=c++17", *defines, "-ptx", str(KERNELS / source), "-o", str(tmp_path / "kernel.ptx")]
    subprocess.run(command, check=True, timeout=120)


def problem(seed, centers, contexts, targets, rows, dim):
    g = torch.Generator().manual_seed(seed)
    width = -(-3 * dim // 32) * 32
    pages = [torch.randn(rows, width, generator=g) / dim**0.25 for _ in range(2)]
    slots = [torch.randint(rows, (centers, n), generator=g) for n in (contexts, targets)]
    masks = [torch.rand(centers, n, generator=g) < share for n, share in ((contexts, 0.6), (targets, 0.9))]
    return pages, slots, masks


def both_ways(pages, slots, masks, dim):
    """The kernel's results, and those of the reference in double precision."""
    arguments = slots[0], masks[0], slots[1], masks[1]
    ours = cuda.skipgram(*(page.cuda()[:, :dim] for page in pages), *(tensor.cuda() for tensor in arguments))
    return ours, reference.skipgram(*(page[:, :dim].double() for page in pages), *arguments)


def check(ours, expected, rtol=1e-4):
    """Equal within rounding of a sum of so many terms, which may cancel."""
    assert ours.pairs == expected.pairs
    assert ours.loss.item() == pytest.approx(expected.loss.item(), rel=1e-5, abs=1e-6)
    for mine, theirs in [(ours.grad_input_UD, expected.grad_input_UD), (ours.grad_output_VD, expected.grad_output_VD)]:
        assert torch.isfinite(mine).all()
        assert (mine.cpu().double() - theirs).norm() <= rtol * theirs.norm() + 1e-6 * expected.pairs


@pytest.mark.gpu
@settings(max_examples=40)
@given(
    seed=st.integers(0, 2**31), centers=st.integers(1, 300), window=st.integers(1, 20), negative=st.integers(1, 64),
    rows=st.integers(1, 200), dim=st.sampled_from([32, 33, 50, 64, 96, 100, 128, 200, 256, 300, 512, 768, 1024]),
)  # fmt: skip
def test_skipgram_equals_the_reference(seed, centers, window, negative, rows, dim):
    pages, slots, masks = problem(seed, centers, 2 * window, 1 + negative, rows, dim)
    check(*both_ways(pages, slots, masks, dim), rtol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("case", ["no context", "no target", "one row in every pair", "large logits"])
def test_skipgram_at_the_edges(case):
    pages, slots, masks = problem(1, 500, 10, 6, 50, 128)
    if case == "no context":
        masks[0][:] = False
    elif case == "no target":
        masks[1][:] = False
    elif case == "one row in every pair":
        slots[0][:], slots[1][:] = 3, 4
    else:
        pages = [page * 20 for page in pages]
    check(*both_ways(pages, slots, masks, 128))


OPTIMIZERS = [
    ("SGD", {}), ("SGD", {"weight_decay": 0.1}), ("Adagrad", {}), ("Adagrad", {"lr_decay": 0.1, "initial_accumulator_value": 0.5}),
    ("RMSprop", {}), ("RMSprop", {"alpha": 0.9, "weight_decay": 0.1}), ("Adam", {}), ("Adam", {"betas": [0.5, 0.99], "weight_decay": 0.1}),
    ("Adam", {"betas": [0.0, 0.9]}), ("AdamW", {}), ("Adamax", {}), ("Adamax", {"betas": [0.5, 0.99]}),
]  # fmt: skip


def trained(name, args, step, device, fused, rows=70, dim=50, steps=20):
    optimizer = RowOptimizer(OptimizerConfig(name=name, args=args, lr=0.05, step=step), fused)
    assert optimizer.fused == fused
    table = Table("input", rows, dim, optimizer.states(dim), optimizer.scalars, device)
    g = torch.Generator().manual_seed(5)
    table["weight"].copy_(torch.randn(rows, dim, generator=g))
    for number in range(steps):
        touched = torch.nonzero(torch.rand(rows, generator=g) < 0.6).flatten()
        page = Page(table, touched, table.records_VR[touched.to(device)], table.columns)
        page.grad_UD = torch.randn(len(touched), dim, generator=g).to(device)
        optimizer.step(page, 0.05 * (1 - number / steps))
        table.records_VR[touched.to(device)] = page.records_UR
    return table


@pytest.mark.gpu
@pytest.mark.parametrize("step", ["table", "row"])
@pytest.mark.parametrize("name, args", OPTIMIZERS, ids=str)
def test_fused_optimizers_equal_torchs(name, args, step):
    ours, theirs = trained(name, args, step, "cuda", fused=True), trained(name, args, step, "cpu", fused=False)
    for field in theirs.columns:
        torch.testing.assert_close(ours[field].cpu(), theirs[field], rtol=2e-5, atol=2e-6)
    assert all(torch.equal(ours.scalars[key], value) for key, value in theirs.scalars.items())


WITHOUT = [
    ("SGD", {"momentum": 0.9}), ("SGD", {"maximize": True}), ("Adam", {"amsgrad": True}), ("RMSprop", {"centered": True}),
    ("NAdam", {}), ("Rprop", {}),
]  # fmt: skip


@pytest.mark.parametrize("name, args", WITHOUT, ids=str)
def test_what_has_no_formula_is_left_to_torch(name, args):
    assert not RowOptimizer(OptimizerConfig(name=name, args=args), fused=True).fused
