"""The closed-form gradients against autograd, and which rows a batch touches."""

import itertools

import pytest
import torch
import torch.nn.functional as F

from w2v.kernels import reference
from w2v.model.skipgram import LossScale, Pairs, find_slots, overflown


def random_problem(seed, B=6, C=4, K=3, U=5, V=7, D=4):
    g = torch.Generator().manual_seed(seed)
    inputs = torch.randn(U, D, generator=g, dtype=torch.float64)
    outputs = torch.randn(V, D, generator=g, dtype=torch.float64)
    contexts, targets = (
        torch.randint(U, (B, C), generator=g),
        torch.randint(V, (B, K + 1), generator=g),
    )
    context_mask, target_mask = (
        torch.rand(B, C, generator=g) < 0.6,
        torch.rand(B, K + 1, generator=g) < 0.8,
    )
    return inputs, outputs, contexts, context_mask, targets, target_mask


def loss_by_pairs(inputs, outputs, contexts, context_mask, targets, target_mask):
    """The sum as the paper writes it, one pair after another."""
    total = torch.zeros((), dtype=torch.float64)
    for b in range(contexts.shape[0]):
        for c in range(contexts.shape[1]):
            for t in range(targets.shape[1]):
                if context_mask[b, c] and target_mask[b, t]:
                    logit = inputs[contexts[b, c]] @ outputs[targets[b, t]]
                    total = total - F.logsigmoid(logit if t == 0 else -logit)
    return total


@pytest.mark.parametrize("seed", range(5))
def test_closed_form_equals_autograd(seed):
    problem = random_problem(seed)
    inputs, outputs = problem[0].requires_grad_(), problem[1].requires_grad_()
    expected = loss_by_pairs(*problem)
    grad_input, grad_output = torch.autograd.grad(expected, (inputs, outputs))
    result = reference.skipgram(*(p.detach() for p in problem))
    torch.testing.assert_close(result.loss, expected.detach(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(result.grad_input_UD, grad_input, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(result.grad_output_VD, grad_output, rtol=1e-10, atol=1e-12)
    assert result.pairs == problem[3].sum()


@pytest.mark.parametrize("seed", range(5))
def test_pairs_are_counted(seed):
    inputs, outputs, contexts, context_mask, targets, target_mask = random_problem(seed)
    expected = [0] * len(inputs), [0] * len(outputs)
    for b, c, t in itertools.product(*map(range, (*contexts.shape, targets.shape[1]))):
        if context_mask[b, c] and target_mask[b, t]:
            expected[0][contexts[b, c]] += 1
            expected[1][targets[b, t]] += 1
    found = reference.count_pairs(
        contexts, context_mask, targets, target_mask, (len(inputs), len(outputs))
    )
    assert tuple(counts.tolist() for counts in found) == expected


@pytest.mark.parametrize("product, error", [(torch.bfloat16, 2e-2), (torch.float16, 3e-3)])
def test_products_of_16_bits_are_near(product, error):
    problem = random_problem(3, B=50, D=64)
    exact, near = (
        reference.skipgram(problem[0].float(), problem[1].float(), *problem[2:], product=p)
        for p in (None, product)
    )
    assert near.loss.item() == pytest.approx(exact.loss.item(), rel=error)
    for name in ("grad_input_UD", "grad_output_VD"):
        ours, theirs = getattr(near, name), getattr(exact, name)
        assert ours.dtype == torch.float32 and 0 < (ours - theirs).norm() < error * theirs.norm()


def test_scaling_the_loss_keeps_gradients_that_float16_would_lose():
    inputs, outputs, one = (
        torch.tensor([[4000.0]]),
        torch.tensor([[0.003], [0.0]]),
        torch.ones(1, 1, dtype=torch.bool),
    )
    pair = (
        inputs,
        outputs,
        torch.zeros(1, 1, dtype=torch.long),
        one,
        torch.tensor([[0, 1]]),
        torch.tensor([[True, False]]),
    )
    exact, plain, scaled = (
        reference.skipgram(*pair, product, scale).grad_input_UD.item()
        for product, scale in [
            (None, None),
            (torch.float16, None),
            (torch.float16, torch.tensor(2.0**12)),
        ]
    )
    assert (
        exact == pytest.approx(-1.84e-8, rel=0.02)
        and plain == 0
        and scaled == pytest.approx(exact, rel=0.02)
    )


def test_the_scale_follows_what_overflows(monkeypatch):
    monkeypatch.setattr(LossScale, "INTERVAL", 3)
    scalars = {}
    scale = LossScale(scalars, torch.device("cpu"))
    fits, over = torch.ones(2, 2), torch.tensor([1.0, torch.inf])
    found = []
    for grads in [
        [fits, over],
        [torch.full((1,), torch.nan)],
        [fits],
        [fits],
        [fits],
        [fits],
        [fits],
        [over],
        [fits],
        [fits],
        [fits],
    ]:
        assert bool(scale.update(overflown(grads) > 0)) == (
            not all(grad.isfinite().all() for grad in grads)
        )
        found.append(float(scalars["loss_scale"]) / LossScale.FIRST)
    assert found == [0.5, 0.25, 0.25, 0.25, 0.5, 0.5, 0.5, 0.25, 0.25, 0.25, 0.5]


def test_gradcheck():
    """torch's finite differences agree with the closed form, taken as the backward of the loss."""

    class Loss(torch.autograd.Function):
        @staticmethod
        def forward(ctx, inputs, outputs, *slots):
            result = reference.skipgram(inputs, outputs, *slots)
            ctx.save_for_backward(result.grad_input_UD, result.grad_output_VD)
            return result.loss

        @staticmethod
        def backward(ctx, grad):
            return *(grad * saved for saved in ctx.saved_tensors), None, None, None, None

    inputs, outputs, *slots = random_problem(11)
    assert torch.autograd.gradcheck(
        lambda x, y: Loss.apply(x, y, *slots), (inputs.requires_grad_(), outputs.requires_grad_())
    )


def test_large_logits_stay_finite():
    inputs, outputs = torch.full((1, 2), 300.0), torch.full((2, 2), 300.0)
    one = torch.ones(1, 1, dtype=torch.bool)
    result = reference.skipgram(
        inputs,
        outputs,
        torch.zeros(1, 1, dtype=torch.long),
        one,
        torch.tensor([[0, 1]]),
        one.expand(1, 2),
    )
    assert result.loss.item() == pytest.approx(180_000.0)
    assert (
        torch.isfinite(result.grad_input_UD).all() and torch.isfinite(result.grad_output_VD).all()
    )


@pytest.mark.parametrize(
    "rows", [10, 1000]
)  # a small table's rows are marked, a large one's sorted
def test_only_words_of_a_pair_are_touched(rows):
    pairs = Pairs(
        centers_B=torch.tensor([3, 8, 5]),
        contexts_BC=torch.tensor([[9, 1], [7, 7], [3, 9]]),
        context_mask_BC=torch.tensor([[True, False], [False, False], [True, True]]),
        negatives_BK=torch.tensor([[3, 2], [6, 6], [4, 2]]),
        negative_mask_BK=torch.tensor([[False, True], [True, True], [True, True]]),
    )
    slots = find_slots(pairs, rows)
    assert slots.input_rows_U.tolist() == [3, 9]  # 1 and 7 are masked
    assert slots.output_rows_V.tolist() == [
        2,
        3,
        4,
        5,
    ]  # 8 has no context, so its noise word 6 is not touched either
    assert slots.input_rows_U[slots.context_slots_BC[2]].tolist() == [3, 9]
    assert slots.output_rows_V[slots.target_slots_BT[2]].tolist() == [5, 4, 2]
    assert slots.target_mask_BT.tolist() == [[True, False, True], [False] * 3, [True] * 3]


def test_a_batch_without_pairs_changes_nothing():
    none = torch.zeros(3, 4, dtype=torch.bool)
    pairs = Pairs(
        torch.tensor([1, 2, 3]),
        torch.ones(3, 4, dtype=torch.long),
        none,
        torch.ones(3, 2, dtype=torch.long),
        none[:, :2],
    )
    slots = find_slots(pairs, 10)
    assert len(slots.input_rows_U) == len(slots.output_rows_V) == 0
    result = reference.skipgram(
        torch.empty(0, 5),
        torch.empty(0, 5),
        slots.context_slots_BC,
        slots.context_mask_BC,
        slots.target_slots_BT,
        slots.target_mask_BT,
    )
    assert (
        result.loss == 0
        and result.pairs == 0
        and result.grad_input_UD.shape == result.grad_output_VD.shape == (0, 5)
    )


def test_sum_rows():
    values = torch.arange(12.0).view(2, 3, 2)
    assert reference.sum_rows(values, torch.tensor([[0, 2, 0], [2, 2, 0]]), 4).tolist() == [
        [14, 17],
        [0, 0],
        [16, 19],
        [0, 0],
    ]
