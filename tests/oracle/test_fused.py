"""Fused tables equal torch's modules, with their kernels written in torch.

What decides which rows, places and bags the kernels get is tested so without a GPU; the kernels
themselves are in tests/unit/test_embedding.py.
"""

import pytest
import torch
from torch import nn

from tests.support.each_case import each_case
from tests.support.pairwise import pairwise
from tests.support.torch_kernels import use_torch_kernels
from w2v import PagedEmbedding, PagedEmbeddingBag, PagedOptimizer
from w2v.rows import ops

SIZES, DIM, LR = (20, 30, 40), 6, 0.5


@pytest.fixture(autouse=True)
def kernels_of_torch(monkeypatch):
    use_torch_kernels(monkeypatch)


def modules(is_bag, paddings, **settings):
    """Return our tables and torch's, with the same weights."""
    kinds = (PagedEmbeddingBag, nn.EmbeddingBag) if is_bag else (PagedEmbedding, nn.Embedding)
    weights = [torch.randn(rows, DIM) for rows in SIZES]
    return [
        [
            kind.from_pretrained(weight.clone(), freeze=False, padding_idx=padding, **settings)
            for weight, padding in zip(weights, paddings, strict=True)
        ]
        for kind in kinds
    ]


@pairwise(
    {
        "shape": [(5, 3), (9,), "bags [5, 3]", "bags [9]"],
        "paddings": [(None,) * 3, (None, 3, None)],
        "ahead": [0, 2],
        "unused": [None, 1],  # a table whose vectors get no gradient
    }
)
def test_fused_tables_equal_those_of_torch(shape, paddings, ahead, unused):
    torch.manual_seed(3)
    is_bag = isinstance(shape, str)
    ours, theirs = modules(is_bag, paddings)
    paged = PagedOptimizer(ours, "SGD", lr=LR, fused=True)
    optimizer = torch.optim.SGD([table.weight for table in theirs], lr=LR)
    given = [torch.tensor([0, 2, 3, 3, 7])] if shape == "bags [9]" else []
    sizes = {"bags [5, 3]": (5, 3), "bags [9]": (9,)}.get(shape, shape)
    batches = [[torch.randint(rows, sizes) for rows in SIZES] for _ in range(4)]
    for ids in paged.pages(batches, [0, 1, 2], ahead) if ahead else batches:
        losses, seen = [], []
        factors = [torch.randn(5 if given else sizes[0], *sizes[1 + is_bag :], DIM) for _ in SIZES]
        for tables in (ours, theirs):
            vectors = [table(its, *given) for table, its in zip(tables, ids, strict=True)]
            seen.append([each.detach().clone() for each in vectors])
            vectors[0].mul_(2)  # they may be changed in place
            used = [each * f for each, f in zip(vectors, factors, strict=True)]
            losses.append(sum(e.square().sum() for n, e in enumerate(used) if n != unused))
        torch.testing.assert_close(*seen)
        for loss, stepped in zip(losses, (paged, optimizer), strict=True):
            stepped.zero_grad()
            loss.backward()
            stepped.step()
    for mine, its in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine.weight, its.weight.detach(), rtol=1e-4, atol=1e-4)


def test_bags_of_the_first_table_may_begin_elsewhere():
    ours, theirs = modules(True, (None,) * 3, mode="sum")
    paged = PagedOptimizer(ours, "SGD", lr=LR, fused=True)
    ids = [torch.randint(rows, (9,)) for rows in SIZES]
    first, others = torch.tensor([0, 2, 3]), torch.tensor([0, 1, 5])
    offsets = [first, others, others]
    for _ in paged.pages([ids], [0, 1, 2]):
        seen = [
            [table(its, begins) for table, its, begins in zip(tables, ids, offsets, strict=True)]
            for tables in (ours, theirs)
        ]
    torch.testing.assert_close(*seen)


@each_case("dim, mode", [(0, None), (1, "sum"), (2, "sum")])
def test_gradients_of_stacked_vectors_are_read_where_they_are(dim, mode, monkeypatch):
    seen = []
    sums = ops.add_gradients
    monkeypatch.setattr(ops, "add_gradients", lambda *given: (seen.append(given[0]), sums(*given)))
    is_bag = mode is not None
    ours, theirs = modules(is_bag, (None,) * 3, **{"mode": mode} if is_bag else {})
    paged = PagedOptimizer(ours, "SGD", lr=LR, fused=True)
    ids = [torch.randint(rows, (5, 3) if is_bag else (5,)) for rows in SIZES]
    factor = torch.randn(torch.stack([torch.empty(5, DIM)] * 3, dim).shape)
    for _ in paged.pages([ids], [0, 1, 2]):
        for tables in (ours, theirs):
            vectors = [table(its) for table, its in zip(tables, ids, strict=True)]
            (torch.stack(vectors, dim) * factor).sum().backward()
        paged.step()
    (grads,) = seen  # of all tables at once; only those whose elements are apart are copied
    strides = {(3 * DIM if dim == 1 else DIM, 1)}
    assert len(grads) == (1 if dim == 2 else 3) and {grad.stride() for grad in grads} == strides
    for mine, its in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine.weight, its.weight.detach() - LR * its.weight.grad)
