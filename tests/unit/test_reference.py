"""Closed-form gradients against autograd, unique rows and pairs."""

import itertools

import pytest
import torch
import torch.nn.functional as F

from tests.support.each_case import each_case
from w2v.rows.ops import View
from w2v.word2vec import reference
from w2v.word2vec.batch import Batch, Objective, Pairs, StepShape
from w2v.word2vec.huffman import make_tree
from w2v.word2vec.reference import ReferenceKernels, all_finite, count_pairs, expand, unique_rows

CPU = torch.device("cpu")
WORDS, DIM = 10, 4
OBJECTIVES = [
    Objective(),
    Objective(weighted=3),
    Objective(cbow=True, mean=True),
    Objective(cbow=True, mean=False),
]
NODES = 2 * WORDS  # the number of the first inner node
EACH_OBJECTIVE = pytest.mark.parametrize("objective", OBJECTIVES, ids=str)


@pytest.fixture(scope="module")
def tree():
    return make_tree(range(1, WORDS + 1), NODES)


def random_problem(seed, B=6, C=4, K=3, V=7, D=4):
    """Return vectors, those of both tables in turn, and masked pairs of them."""
    g = torch.Generator().manual_seed(seed)
    weight_AD = torch.randn(2 * V, D, generator=g, dtype=torch.float64)
    contexts = 2 * torch.randint(V, (B, C), generator=g)
    targets = 2 * torch.randint(V, (B, K + 1), generator=g) + 1
    context_mask = torch.rand(B, C, generator=g) < 0.6
    target_mask = torch.rand(B, K + 1, generator=g) < 0.8
    labels = torch.rand(B, K + 1, generator=g) < 0.4
    return weight_AD, contexts, context_mask, targets, target_mask, labels


def one_pair(context, target, negative=None, dim=1):
    """Return vectors of equal numbers, and a pair, with or without a negative."""
    numbers = [[context], [target], [0.0], [negative or 0.0]]
    return (
        torch.tensor(numbers).repeat(1, dim),
        torch.tensor([[0]]),
        torch.tensor([[True]]),
        torch.tensor([[1, 3]]),
        torch.tensor([[True, negative is not None]]),
        torch.tensor([[True, False]]),
    )


def with_gradients(weight_AD, *places, **how):
    """Return the loss, and the gradients of all vectors."""
    grad_AD = torch.zeros_like(weight_AD)
    return reference.gradients(weight_AD, Pairs(*places), grad_AD, **how), grad_AD


def assert_near(grad_AD, expected_AD, error):
    """Compare the gradients of input vectors, and those of output vectors."""
    for kind in (slice(0, None, 2), slice(1, None, 2)):
        difference = (grad_AD[kind] - expected_AD[kind]).norm()
        assert difference < error * expected_AD[kind].norm()


def counted(contexts, context_mask, targets, target_mask, labels, cbow=False):
    """Yield context rows, label, target row and columns of each counted pair."""
    for b, t in itertools.product(range(len(targets)), range(targets.shape[1])):
        columns = torch.nonzero(context_mask[b]).flatten()
        if len(columns) and target_mask[b, t]:
            for chosen in columns[None] if cbow else columns[:, None]:
                yield contexts[b][chosen], labels[b, t], targets[b, t], chosen


def predicting(vectors, objective):
    """Return what context vectors predict with; its derivatives are gensim's."""
    total, mean = vectors.sum(0), vectors.mean(0)
    value, differentiated = (mean, total) if objective.mean else (total, mean)
    return differentiated + (value - differentiated).detach()


def loss_by_pairs(weight_AD, *places, objective=OBJECTIVES[0]):
    """Return the loss as a sum over pairs, whose derivatives are weighted."""
    total, window = 0.0, places[0].shape[1] // 2
    for i, label, o, columns in counted(*places, objective.cbow):
        logit = predicting(weight_AD[i], objective) @ weight_AD[o]
        loss = -F.logsigmoid(logit if label else -logit)
        column, weight = int(columns[0]), 1.0
        if widest := objective.weighted:
            distance = window - column if column < window else column - window + 1
            weight = (widest + 1 - distance) / widest
        total = total + weight * loss + (1 - weight) * loss.detach()
    return total


@each_case("seed", [0, 1])
@EACH_OBJECTIVE
def test_closed_form_equals_autograd(seed, objective):
    weight_AD, *places = random_problem(seed)
    expected = loss_by_pairs(weight_AD.requires_grad_(), *places, objective=objective)
    (expected_AD,) = torch.autograd.grad(expected, [weight_AD])
    loss, grad_AD = with_gradients(weight_AD.detach(), *places, objective=objective)
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(grad_AD, expected_AD, rtol=1e-10, atol=1e-12)


@each_case("seed", [0, 1])
@pytest.mark.parametrize("cbow", [False, True])
def test_pairs_of_each_row_are_counted(seed, cbow):
    weight_AD, *places = random_problem(seed)
    expected = [1] * len(weight_AD)
    for context_rows, _, target_row, _ in counted(*places, cbow):
        for row in (*context_rows, target_row):
            expected[row] += 1
    count_A = torch.ones(len(weight_AD), dtype=torch.int32)
    count_pairs(Pairs(*places), count_A, cbow)
    assert count_A.tolist() == expected


@each_case("product, error", [(torch.bfloat16, 2e-2), (torch.float16, 3e-3)])
@EACH_OBJECTIVE
def test_16_bit_products_are_close(product, error, objective):
    weight_AD, *places = random_problem(3, B=50, D=64)
    exact, close = (
        with_gradients(weight_AD.float(), *places, product=dtype, objective=objective)
        for dtype in (None, product)
    )
    assert close[0].item() == pytest.approx(exact[0].item(), rel=error)
    assert close[1].dtype == torch.float32
    for first in range(2):
        assert not torch.equal(close[1][first::2], exact[1][first::2])
    assert_near(close[1], exact[1], error)


def test_float16_keeps_small_gradients_and_those_of_many_large_weights():
    small = one_pair(4000.0, 0.003)
    weight_AD, *places = random_problem(4, B=20, C=10, K=20)
    for problem in (small, (4 * weight_AD.float(), *places)):
        (_, exact_AD), (_, half_AD) = (
            with_gradients(*problem, product=kind) for kind in (None, torch.float16)
        )
        assert_near(half_AD, exact_AD, 0.02)


def test_gradcheck():
    """Compare the closed-form gradients with torch's finite differences."""

    class Loss(torch.autograd.Function):
        @staticmethod
        def forward(ctx, weight_AD, *places):
            loss, grad_AD = with_gradients(weight_AD, *places)
            ctx.save_for_backward(grad_AD)
            return loss

        @staticmethod
        def backward(ctx, grad):
            return grad * ctx.saved_tensors[0], *[None] * 5

    weight_AD, *places = random_problem(11)
    assert torch.autograd.gradcheck(
        lambda weight_AD: Loss.apply(weight_AD, *places), weight_AD.requires_grad_()
    )


def test_large_logits_stay_finite():
    loss, grad_AD = with_gradients(*one_pair(300.0, 300.0, 300.0, dim=2))
    assert loss.item() == pytest.approx(180_000.0)
    assert grad_AD.isfinite().all()


@each_case("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_one_number_that_is_not_finite_is_found(dtype):
    values = torch.linspace(-9, 9, 60, dtype=dtype).view(20, 3)
    assert all_finite(values) and all_finite(values[:0])
    for number in (torch.inf, -torch.inf, torch.nan):
        values[13, 1] = number
        assert not all_finite(values)


def make_batch(words, sentences, windows, negatives, first=0, window=2):
    words_n, sentences_n, windows_B, negatives_BK = (
        torch.tensor(numbers, dtype=torch.int32)
        for numbers in (words, sentences, windows, negatives)
    )
    return Batch(words_n, sentences_n, first, windows_B, negatives_BK, window, 0.0)


def make_pairs_batch():
    """Return a batch of five centers from [9 3 1], [8] and [5 7].

    The center 8 has no context words.
    """
    words, sentences = [9, 3, 1, 8, 5, 7], [0, 0, 0, 1, 2, 2]
    negatives = [[0, 6], [3, 2], [3, 3], [6, 6], [4, 5]]
    return make_batch(words, sentences, [1, 1, 1, 2, 2], negatives)


def test_windows_stay_in_their_sentence_and_size():
    pairs = expand(make_pairs_batch())
    contexts = [row[mask].tolist() for row, mask in zip(*pairs[:2], strict=True)]
    assert contexts == [[2 * 3], [2 * 9, 2 * 1], [2 * 3], [], [2 * 7]]
    targets = [[9, 0, 6], [3, 3, 2], [1, 3, 3], [8, 6, 6], [5, 4, 5]]
    assert torch.equal(pairs.targets_BT, 2 * torch.tensor(targets) + 1)
    # Negatives that are the center do not count, nor does a center without context words.
    expected = [[1, 1, 1], [1, 0, 1], [1, 1, 1], [0, 0, 0], [1, 1, 0]]
    assert pairs.target_mask_BT.int().tolist() == expected


def test_nodes_of_paths_are_targets_with_labels(tree):
    batch = make_pairs_batch()._replace(objective=Objective(tree=tree))
    both, alone = expand(batch), expand(batch._replace(negatives_BK=batch.negatives_BK[:, :0]))
    assert torch.equal(both.targets_BT[:, 3:], alone.targets_BT)
    assert torch.equal(both.targets_BT[:, :3], expand(make_pairs_batch()).targets_BT)
    for center, word in enumerate(batch.words_n.tolist()[:5]):
        path = slice(*tree.begin_V[word : word + 2].tolist())
        counted = alone.target_mask_BT[center]
        if word == 8:  # it has no context words
            assert not counted.any() and not both.target_mask_BT[center].any()
            continue
        assert torch.equal(alone.targets_BT[center, counted], 2 * tree.nodes_P[path].long() + 1)
        assert torch.equal(alone.labels_BT[center, counted], tree.codes_P[path] == 0)
    # Frequent words have short paths.
    assert alone.target_mask_BT.sum(1).tolist() == [2, 4, 5, 0, 3]


def test_unique_rows_are_those_of_counted_pairs():
    marks_A = torch.zeros(10, dtype=torch.bool).index_fill_(0, torch.tensor([9, 3]), True)
    rows_U, index_A = unique_rows(marks_A)
    assert rows_U.tolist() == [3, 9]
    assert index_A.tolist() == [-1, -1, -1, 0, -1, -1, -1, -1, -1, 1]
    kernels = ReferenceKernels(StepShape(WORDS, DIM, torch.float32, CPU))
    rows_U = kernels.unique_rows(make_pairs_batch()).rows.rows_U
    inputs, outputs = [1, 3, 7, 9], [0, 1, 2, 3, 4, 5, 6, 9]
    expected = sorted([*(2 * word for word in inputs), *(2 * word + 1 for word in outputs)])
    assert rows_U.tolist() == expected
    marks_A = torch.zeros(2 * WORDS, dtype=torch.bool)
    kernels.mark(make_pairs_batch(), marks_A)
    assert torch.nonzero(marks_A).flatten().tolist() == expected


def gradients(batch):
    """Return the gradients of a batch, and the random weights of all rows."""
    kernels = ReferenceKernels(StepShape(NODES + WORDS, DIM, torch.float64, CPU))
    generator = torch.Generator().manual_seed(1)
    weight_AD = torch.randn(kernels.shape.rows, DIM, generator=generator, dtype=torch.float64)
    view = View(weight_AD, None)
    return kernels.gradients(batch, view, kernels.unique_rows(batch), 0.0), weight_AD


@EACH_OBJECTIVE
@each_case("with_tree, negative", [(False, 2), (True, 2), (True, 0)])
def test_gradients_of_a_batch_equal_autograd(tree, objective, with_tree, negative):
    batch = make_pairs_batch()
    objective = objective._replace(tree=tree if with_tree else None)
    negatives_BK = batch.negatives_BK[:, :negative]
    batch = batch._replace(objective=objective, negatives_BK=negatives_BK)
    grads, weight_AD = gradients(batch)
    loss = loss_by_pairs(weight_AD.requires_grad_(), *expand(batch), objective=objective)
    (expected_AD,) = torch.autograd.grad(loss, [weight_AD])
    torch.testing.assert_close(grads.loss, loss.detach())
    assert grads.pairs == (4 if objective.cbow else 5)
    found_AD = torch.zeros_like(expected_AD)
    found_AD[grads.rows.rows_U] = grads.rows.grad_UD
    torch.testing.assert_close(found_AD, expected_AD)


def test_batch_without_pairs_touches_no_row():
    grads, _ = gradients(make_batch([1, 2, 3], [0, 1, 2], [2, 2, 2], [[1, 1], [4, 5], [6, 6]]))
    assert grads.loss == 0 and grads.pairs == 0
    assert grads.rows.grad_UD.shape == (0, DIM)
