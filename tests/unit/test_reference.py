"""Closed-form gradients against autograd, unique rows and pairs."""

import itertools

import pytest
import torch
import torch.nn.functional as F

from tests.support.each_case import each_case
from w2v.kernels import reference
from w2v.kernels.batch import Batch, Objective, Page, Pairs, StepShape, View
from w2v.kernels.reference import ReferenceKernels, all_finite, count_pairs, expand, unique_rows
from w2v.model.huffman import make_tree

CPU = torch.device("cpu")
ROWS, DIM = 10, 4
OBJECTIVES = [
    Objective(),
    Objective(weighted=3),
    Objective(cbow=True, mean=True),
    Objective(cbow=True, mean=False),
]
NODES = 2 * ROWS  # the first row of inner nodes
TREE = make_tree(range(1, ROWS + 1), NODES)
EACH_OBJECTIVE = pytest.mark.parametrize("objective", OBJECTIVES, ids=str)


def random_problem(seed, B=6, C=4, K=3, U=5, V=7, D=4):
    """Return vectors of both tables, and masked pairs of them."""
    g = torch.Generator().manual_seed(seed)
    inputs = torch.randn(U, D, generator=g, dtype=torch.float64)
    outputs = torch.randn(V, D, generator=g, dtype=torch.float64)
    contexts = torch.randint(U, (B, C), generator=g)
    targets = torch.randint(V, (B, K + 1), generator=g)
    context_mask = torch.rand(B, C, generator=g) < 0.6
    target_mask = torch.rand(B, K + 1, generator=g) < 0.8
    labels = torch.rand(B, K + 1, generator=g) < 0.4
    return inputs, outputs, contexts, context_mask, targets, target_mask, labels


def one_pair(inputs, outputs, has_negative):
    """Return the vectors, and a pair of one context, target and negative."""
    one = torch.ones(1, 1, dtype=torch.bool)
    contexts = torch.zeros(1, 1, dtype=torch.long)
    return (
        inputs,
        outputs,
        contexts,
        one,
        torch.tensor([[0, 1]]),
        torch.tensor([[True, has_negative]]),
        torch.tensor([[True, False]]),
    )


def with_gradients(inputs, outputs, *places, **how):
    """Return the loss, and the gradients of inputs and outputs."""
    grads = torch.zeros_like(inputs), torch.zeros_like(outputs)
    return reference.gradients(inputs, outputs, Pairs(*places), grads, **how), *grads


def counted(contexts, context_mask, targets, target_mask, labels, cbow=False):
    """Yield input rows, label, output row and columns of each counted pair."""
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


def loss_by_pairs(inputs, outputs, *places, objective=OBJECTIVES[0]):
    """Return the loss as a sum over pairs, whose derivatives are weighted."""
    total, window = 0.0, places[0].shape[1] // 2
    for i, label, o, columns in counted(*places, objective.cbow):
        logit = predicting(inputs[i], objective) @ outputs[o]
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
    inputs, outputs, *places = random_problem(seed)
    vectors = inputs.requires_grad_(), outputs.requires_grad_()
    expected = loss_by_pairs(*vectors, *places, objective=objective)
    grad_input, grad_output = torch.autograd.grad(expected, vectors)
    loss, *grads = with_gradients(inputs.detach(), outputs.detach(), *places, objective=objective)
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(grads, [grad_input, grad_output], rtol=1e-10, atol=1e-12)


@each_case("seed", [0, 1])
@pytest.mark.parametrize("cbow", [False, True])
def test_pairs_of_each_row_are_counted(seed, cbow):
    inputs, outputs, *places = random_problem(seed)
    expected = [1] * len(inputs), [1] * len(outputs)
    for input_rows, _, output_row, _ in counted(*places, cbow):
        for input_row in input_rows:
            expected[0][input_row] += 1
        expected[1][output_row] += 1
    found = [torch.ones(len(vectors), dtype=torch.int32) for vectors in (inputs, outputs)]
    count_pairs(Pairs(*places), found, cbow)
    assert tuple(counts.tolist() for counts in found) == expected


@each_case("product, error", [(torch.bfloat16, 2e-2), (torch.float16, 3e-3)])
@EACH_OBJECTIVE
def test_16_bit_products_are_close(product, error, objective):
    inputs, outputs, *places = random_problem(3, B=50, D=64)
    vectors = inputs.float(), outputs.float()
    exact, close = (
        with_gradients(*vectors, *places, product=dtype, objective=objective)
        for dtype in (None, product)
    )
    assert close[0].item() == pytest.approx(exact[0].item(), rel=error)
    for ours, theirs in zip(close[1:], exact[1:], strict=True):
        assert ours.dtype == torch.float32
        assert 0 < (ours - theirs).norm() < error * theirs.norm()


def test_float16_keeps_small_gradients_and_those_of_many_large_weights():
    small = one_pair(torch.tensor([[4000.0]]), torch.tensor([[0.003], [0.0]]), has_negative=False)
    inputs, outputs, *places = random_problem(4, B=20, C=10, K=20)
    large = 4 * inputs.float(), 4 * outputs.float(), *places
    for problem in (small, large):
        exact, half = (with_gradients(*problem, product=kind)[1:] for kind in (None, torch.float16))
        for ours, theirs in zip(half, exact, strict=True):
            assert (ours - theirs).norm() < 0.02 * theirs.norm()


def test_gradcheck():
    """Compare the closed-form gradients with torch's finite differences."""

    class Loss(torch.autograd.Function):
        @staticmethod
        def forward(ctx, inputs, outputs, *places):
            loss, *grads = with_gradients(inputs, outputs, *places)
            ctx.save_for_backward(*grads)
            return loss

        @staticmethod
        def backward(ctx, grad):
            return *(grad * saved for saved in ctx.saved_tensors), *[None] * 5

    inputs, outputs, *places = random_problem(11)
    vectors = inputs.requires_grad_(), outputs.requires_grad_()
    assert torch.autograd.gradcheck(lambda x, y: Loss.apply(x, y, *places), vectors)


def test_large_logits_stay_finite():
    pair = one_pair(torch.full((1, 2), 300.0), torch.full((2, 2), 300.0), has_negative=True)
    loss, *grads = with_gradients(*pair)
    assert loss.item() == pytest.approx(180_000.0)
    assert all(grad.isfinite().all() for grad in grads)


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
    assert contexts == [[3], [9, 1], [3], [], [7]]
    assert pairs.targets_BT.tolist() == [[9, 0, 6], [3, 3, 2], [1, 3, 3], [8, 6, 6], [5, 4, 5]]
    # Negatives that are the center do not count, nor does a center without context words.
    expected = [[1, 1, 1], [1, 0, 1], [1, 1, 1], [0, 0, 0], [1, 1, 0]]
    assert pairs.target_mask_BT.int().tolist() == expected


def test_nodes_of_paths_are_targets_with_labels():
    batch = make_pairs_batch()._replace(objective=Objective(tree=TREE))
    both, alone = expand(batch), expand(batch._replace(negatives_BK=batch.negatives_BK[:, :0]))
    assert torch.equal(both.targets_BT[:, 3:], alone.targets_BT)
    assert torch.equal(both.targets_BT[:, :3], expand(make_pairs_batch()).targets_BT)
    for center, word in enumerate(batch.words_n.tolist()[:5]):
        path = slice(*TREE.begin_V[word : word + 2].tolist())
        counted = alone.target_mask_BT[center]
        if word == 8:  # it has no context words
            assert not counted.any() and not both.target_mask_BT[center].any()
            continue
        assert torch.equal(alone.targets_BT[center, counted], TREE.nodes_P[path].long())
        assert torch.equal(alone.labels_BT[center, counted], TREE.codes_P[path] == 0)
    # Frequent words have short paths.
    assert alone.target_mask_BT.sum(1).tolist() == [2, 4, 5, 0, 3]


def test_unique_rows_are_those_of_counted_pairs():
    ids, mask = (
        torch.tensor([[9, 1], [7, 7], [3, 9]]),
        torch.tensor([[1, 0], [0, 0], [1, 1]]).bool(),
    )
    rows_U, index_V = unique_rows(ids, mask, ROWS)
    assert rows_U.tolist() == [3, 9]
    assert index_V.tolist() == [-1, -1, -1, 0, -1, -1, -1, -1, -1, 1]
    kernels = ReferenceKernels(StepShape(ROWS, DIM, torch.float32, CPU))
    rows = kernels.unique_rows(make_pairs_batch())
    assert rows.inputs.rows_U.tolist() == [1, 3, 7, 9]
    assert rows.outputs.rows_U.tolist() == [0, 1, 2, 3, 4, 5, 6, 9]
    marks_TV = torch.zeros(2, ROWS, dtype=torch.bool)
    kernels.mark(make_pairs_batch(), marks_TV)
    assert [torch.nonzero(marks_V).flatten().tolist() for marks_V in marks_TV] == [
        table.rows_U.tolist() for table in rows[:2]
    ]


def gradients(batch):
    """Return the gradients of a batch, and the random weights of both tables."""
    kernels = ReferenceKernels(StepShape(NODES + ROWS, DIM, torch.float64, CPU))
    generator = torch.Generator().manual_seed(1)
    weights_TVD = torch.randn(2, NODES + ROWS, DIM, generator=generator, dtype=torch.float64)
    page = Page(*(View(weights_VD, None) for weights_VD in weights_TVD))
    return kernels.gradients(batch, page, kernels.unique_rows(batch), 0.0), weights_TVD


@EACH_OBJECTIVE
@each_case("tree, negative", [(None, 2), (TREE, 2), (TREE, 0)])
def test_gradients_of_a_batch_equal_autograd(objective, tree, negative):
    batch = make_pairs_batch()
    objective = objective._replace(tree=tree)
    negatives_BK = batch.negatives_BK[:, :negative]
    batch = batch._replace(objective=objective, negatives_BK=negatives_BK)
    grads, weights_TVD = gradients(batch)
    loss = loss_by_pairs(*weights_TVD.requires_grad_(), *expand(batch), objective=objective)
    (expected_TVD,) = torch.autograd.grad(loss, [weights_TVD])
    torch.testing.assert_close(grads.loss, loss.detach())
    assert grads.pairs == (4 if objective.cbow else 5)
    for table, expected_VD in zip(grads[:2], expected_TVD, strict=True):
        found_VD = torch.zeros_like(expected_VD)
        found_VD[table.rows_U] = table.grad_UD
        torch.testing.assert_close(found_VD, expected_VD)


def test_batch_without_pairs_touches_no_row():
    grads, _ = gradients(make_batch([1, 2, 3], [0, 1, 2], [2, 2, 2], [[1, 1], [4, 5], [6, 6]]))
    assert grads.loss == 0 and grads.pairs == 0
    assert grads.inputs.grad_UD.shape == grads.outputs.grad_UD.shape == (0, DIM)
