"""What torch tests of its embeddings holds for paged ones.

Each case is a use of the modules; it gives torch's results with either kind. Behaviours are
those of test/nn/test_embedding.py in torch.
"""

import itertools
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.support.each_case import each_case
from tests.support.pairwise import pairwise
from w2v import PagedEmbedding, PagedEmbeddingBag

pytestmark = pytest.mark.filterwarnings("ignore:no PagedOptimizer steps this")
TORCH = SimpleNamespace(Embedding=nn.Embedding, EmbeddingBag=nn.EmbeddingBag)
PAGED = SimpleNamespace(Embedding=PagedEmbedding, EmbeddingBag=PagedEmbeddingBag)
INTS = torch.int32, torch.int64
PAIRS = [*itertools.product(INTS, INTS)]  # of ids and offsets
FLOATS = torch.float32, torch.float64
NARROW = torch.float16, torch.bfloat16
EXACT = {"rtol": 0, "atol": 0}


def assert_as_torch(use, *arguments, **tolerance):
    """Compare what a use of torch's modules and of paged ones returns."""
    found = []
    for modules in (PAGED, TORCH):
        torch.manual_seed(0)
        found.append([each for each in use(modules, *arguments) if each is not None])
    assert len(found[0]) == len(found[1]) > 0
    for mine, theirs in zip(*found, strict=True):
        if isinstance(theirs, torch.Tensor):
            assert mine.is_sparse == theirs.is_sparse
            if theirs.is_sparse:
                mine, theirs = mine.to_dense(), theirs.to_dense()
            torch.testing.assert_close(mine.detach(), theirs.detach(), **tolerance or EXACT)
        else:
            assert mine == theirs


def error_of(call, *kinds):
    """Return which of these kinds of errors a call raises."""
    try:
        call()
    except Exception as error:
        return [isinstance(error, kind) for kind in kinds]
    return "none"


# Embedding.


def basic(modules, sparse):
    table = modules.Embedding(10, 20, sparse=sparse)
    vectors = table(torch.tensor([[0, 2, 4, 5], [4, 3, 0, 9]]))
    vectors.sum().backward()
    return vectors, table.weight.grad, table.weight.grad.shape


@pytest.mark.parametrize("sparse", [False, True])
def test_gradients_are_dense_or_sparse(sparse):
    assert_as_torch(basic, sparse)


def moved(modules, dtype):
    table = modules.Embedding(10, 3, sparse=True)
    default = table.weight.device.type, table.weight.dtype
    table.to(dtype)
    vectors = table(torch.tensor([1, 2]))
    return *default, table.weight.dtype, table.embedding_dim, table.num_embeddings, vectors


@pytest.mark.parametrize("dtype", FLOATS + NARROW)
def test_modules_take_another_dtype(dtype):
    assert_as_torch(moved, dtype)


@pytest.mark.parametrize("dtype", FLOATS)
def test_the_default_dtype_is_that_of_torch(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        assert_as_torch(lambda modules: [modules.Embedding(5, 3)(torch.arange(5))])
    finally:
        torch.set_default_dtype(before)


def limited(modules, dtype):
    table = modules.Embedding(22, 5, max_norm=1.0).to(dtype)
    vectors = table(torch.tensor([2, 8, 8, 6]))
    vectors.sum().backward()
    assert torch.equal(vectors[1], vectors[2])
    return vectors, table.weight, table.weight.grad


@pytest.mark.parametrize("dtype", FLOATS)
def test_norms_are_limited(dtype):
    assert_as_torch(limited, dtype)


def pretrained(modules, kind, settings, dtype):
    given = torch.tensor([[1.0, 2, 3], [4, 5, 6], [7, 7, 7]], dtype=dtype)
    table = getattr(modules, kind).from_pretrained(given, **settings)
    ids = torch.tensor([[0, 1], [2, 0]])
    return table.weight, table.weight.data, table(ids), table.weight.requires_grad, table(ids[:1])


SETTINGS = [
    {},
    {"freeze": False},
    {"padding_idx": 2},
    {"max_norm": 2.0, "norm_type": 0.5, "scale_grad_by_freq": False, "sparse": True},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("kind", ["Embedding", "EmbeddingBag"])
@pytest.mark.parametrize("dtype", FLOATS)
def test_pretrained_weights(kind, settings, dtype):
    assert_as_torch(pretrained, kind, settings, dtype)


def replaced(modules):
    ids, given = torch.tensor([[1, 3, 2], [0, 2, 1]]), torch.rand(4, 3)
    table, bag = modules.Embedding(4, 3), modules.EmbeddingBag(4, 3)
    table.weight.data = bag.weight.data = given
    other = table.from_pretrained(given, padding_idx=2)
    return table.weight.data, table(ids), F.embedding(ids, table.weight), bag(ids), other(ids)


def test_data_may_be_replaced():
    assert_as_torch(replaced)


def padded(modules, dtype, padding, sparse):
    table = modules.Embedding(10, 20, padding_idx=padding, sparse=sparse).to(dtype)
    vectors = table(torch.tensor([[0, 2, 8, 5], [4, 8, 0, 9]]))
    found = [vectors, table.padding_idx]
    with torch.no_grad():
        table.weight[padding] = 1.0
    pre = table.weight[padding].clone()
    for count in (1, 2, 1000):
        for others in ([], [1, 3], [2]):
            ids = torch.tensor(others + [padding % 10] * count)
            table(ids).sum().backward()
            found.append(table.weight.grad)
            assert torch.equal((table.weight + table.weight.grad.to_dense())[padding], pre)
            table.zero_grad()
            assert table.weight.grad is None
    return found


@pairwise({"dtype": FLOATS + NARROW, "padding": [0, 2, -2], "sparse": [False, True]})
def test_padding_gets_no_gradient(dtype, padding, sparse):
    assert_as_torch(padded, dtype, padding, sparse, rtol=1e-3, atol=0)


def twice(modules):
    table = modules.Embedding(5, 2, padding_idx=0)
    total = table(torch.tensor([1, 3, 0, 1])).pow(2).sum()
    (grad,) = torch.autograd.grad(total, list(table.parameters()), create_graph=True)
    (grad.sum() + total).backward()
    return grad, table.weight.grad


def test_gradients_of_gradients_of_a_table_without_an_optimizer():
    assert_as_torch(twice)


def accumulated(modules, dtype):
    table = modules.Embedding(10, 3, sparse=True).to(dtype)
    found = []
    for ids in ([7, 1, 3], [7, 1, 3], [8, 1, 3]):
        table(torch.tensor(ids)).sum().backward()
        found.append(table.weight.grad)
    return found


@pytest.mark.parametrize("dtype", FLOATS)
def test_gradients_are_accumulated(dtype):
    assert_as_torch(accumulated, dtype)


def functional(modules):
    table = modules.Embedding(20, 20, dtype=torch.float64)
    ids = torch.tensor([[0, 1, 1, 2], [3, 5, 7, 11]])
    slope = torch.autograd.gradcheck(lambda weight: F.embedding(ids, weight), table.weight[:])
    F.embedding(ids, table.weight).sum().backward()
    return slope, table.weight.grad


def test_functional_embeddings_take_the_weight():
    assert_as_torch(functional)


def differentiated(modules):
    """Be the first to use a frozen table, in functions of torch.func."""
    ids = torch.tensor([1, 3, 3])
    for transform in (torch.func.grad, torch.func.hessian, torch.vmap):
        cached = {} if modules is TORCH else {"gpu_bytes": "100%"}
        table = modules.Embedding(5, 2, **cached).requires_grad_(False)
        factor = torch.ones(2, 2) if transform is torch.vmap else torch.ones(2)
        yield transform(lambda factor, table=table: (table(ids) * factor).sin().sum())(factor)
        table.requires_grad_(True)(ids).sum().backward()
        yield table.weight.grad


def test_functions_of_torch_func_take_frozen_tables():
    assert_as_torch(differentiated)


TRANSFORMS = [
    lambda table, ids: torch.vmap(table)(ids),
    lambda table, ids: torch.func.grad(lambda factor: (table(ids) * factor).sum())(torch.ones(2)),
]


@each_case("transform", TRANSFORMS)
@pytest.mark.parametrize("kind", [PagedEmbedding, PagedEmbeddingBag])
def test_functions_of_torch_func_refuse_tables_that_train(kind, transform):
    table, ids = kind(5, 2), torch.tensor([[1, 3], [3, 0]])
    with pytest.raises(RuntimeError, match=r"torch.func .* call w2v.unpage\(model\) first"):
        transform(table, ids)
    table(ids).sum().backward()
    assert table.weight.grad.sum() != 0


def errors(modules):
    made = [(kind, padding) for kind in ("Embedding", "EmbeddingBag") for padding in (25, -25, -6)]
    for kind, padding in made:
        make = lambda kind=kind, padding=padding: getattr(modules, kind)(  # noqa: E731
            5, 2, padding_idx=padding
        )
        yield error_of(make, AssertionError)
    yield error_of(lambda: modules.Embedding(5, 2)(torch.tensor([5])), IndexError)
    yield error_of(lambda: modules.Embedding(5, 2)(torch.tensor([-1])), IndexError)


def test_what_torch_refuses_is_refused():
    assert_as_torch(errors)


# EmbeddingBag.


def empty(modules, kinds, sparse):
    ids = torch.tensor([], dtype=kinds[0])
    bags = modules.EmbeddingBag(4, 3, sparse=sparse)
    return [bags(ids, torch.tensor(begins, dtype=kinds[1])) for begins in ([0], [0, 0])]


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("kinds", PAIRS)
def test_bags_of_no_ids(kinds, sparse):
    assert_as_torch(empty, kinds, sparse)


def outside(modules, dtype, kind, padding, mode):
    bags = modules.EmbeddingBag(10, 2, padding_idx=padding, mode=mode, dtype=dtype)
    found = []
    for ids in ([[-1, 1]], [[11, 8]]):
        ids = torch.tensor(ids, dtype=kind)
        for factors in (None, torch.rand(1, 2, dtype=dtype))[: 1 + (mode == "sum")]:
            found.append(error_of(lambda ids=ids, f=factors: bags(ids, None, f), RuntimeError))
    return found


@pairwise({"mode": ["sum", "mean", "max"], "padding": [None, 0], "dtype": FLOATS, "kind": INTS})
def test_ids_outside_the_table(dtype, kind, padding, mode):
    assert_as_torch(outside, dtype, kind, padding, mode)


def shapes(modules):
    bags = modules.EmbeddingBag(5, 6)
    many, ids = torch.ones(2, 0, 0, 6, 6, dtype=torch.int64), torch.ones(4, dtype=torch.int64)
    calls = [
        lambda: bags(many),
        lambda: bags(ids, many),
        lambda: bags(ids),
        lambda: bags(ids.view(2, 2), ids[:2]),
        lambda: bags(ids, torch.tensor([1, 2])),
        lambda: bags(ids, torch.tensor([0, 100])),
    ]
    return [error_of(call, ValueError, RuntimeError) for call in calls]


def test_ids_and_offsets_of_other_shapes():
    assert_as_torch(shapes)
    for last, begins in ((False, []), (True, [0])):  # with which torch ends the process
        bags = PagedEmbeddingBag(5, 2, include_last_offset=last)
        with pytest.raises(ValueError, match="have no bag for 1 ids; begin them with 0"):
            bags(torch.tensor([1]), torch.tensor(begins, dtype=torch.int64))
        assert bags([], torch.tensor(begins, dtype=torch.int64)).shape == (0, 2)


def wrong_factors(modules, kinds):
    bags = modules.EmbeddingBag(5, 2, mode="sum")
    ids, offsets = torch.tensor([3, 1, 1, 1, 4, 0], dtype=kinds[0]), torch.tensor([0, 0, 3, 3, 6])
    offsets = offsets.to(kinds[1])
    many, mean = ids.repeat(2).view(4, 3), modules.EmbeddingBag(5, 2, mode="mean")
    maximum = modules.EmbeddingBag(5, 2, mode="max")
    calls = [
        lambda: bags(ids, offsets, torch.rand(6, dtype=torch.float64)),
        lambda: bags(ids, offsets, torch.rand(5)),
        lambda: bags(many, None, torch.rand(12)),
        lambda: mean(many, None, torch.rand(4, 3)),
        lambda: maximum(many, None, torch.rand(4, 3)),
    ]
    return [error_of(call, ValueError, RuntimeError, NotImplementedError) for call in calls]


@pytest.mark.parametrize("kinds", PAIRS)
def test_factors_that_torch_refuses(kinds):
    assert_as_torch(wrong_factors, kinds)


def in_bags(modules, kinds, dtype, mode, weighs, last, sparse=False, ids=(3, 1, 1, 1, 4, 0)):
    """Return bags of ids and all gradients; some bags are empty."""
    bags = modules.EmbeddingBag(5, 2, mode=mode, include_last_offset=last, sparse=sparse).to(dtype)
    bags.weight.data.copy_(torch.arange(1, 11).view_as(bags.weight).to(dtype))
    ids = torch.tensor(ids, dtype=kinds[0])
    begins = [0, 0, 3, 3, 6] if len(ids) else [0, 0, 0, 0, 0]
    offsets = torch.tensor(begins + [len(ids)] * last, dtype=kinds[1])
    factors = torch.randn(len(ids), dtype=dtype, requires_grad=True) if weighs else None
    vectors = bags(ids, offsets, factors)
    vectors.backward(torch.rand(vectors.shape).to(dtype))
    return vectors, bags.weight.grad, factors.grad if weighs else None


@pairwise(
    {
        "mode, weighs": [("sum", 0), ("sum", 1), ("mean", 0), ("max", 0)],
        "dtype": FLOATS + NARROW,
        "kinds": PAIRS,
    }
)
def test_bags_with_offsets(kinds, dtype, mode, weighs):
    tolerance = {"rtol": 1e-2, "atol": 1e-2} if dtype in NARROW else EXACT
    for last in (False, True):
        assert_as_torch(in_bags, kinds, dtype, mode, weighs, last, **tolerance)


@each_case("kinds, dtype", [*itertools.product(PAIRS, FLOATS + NARROW)])
def test_factors_of_no_ids(kinds, dtype):
    assert_as_torch(in_bags, kinds, dtype, "sum", True, False, False, [])


def rectangles(modules, kind, dtype, mode, sparse, max_norm, weighs):
    found = []
    for rows, dim, count, size in ((2, 3, 5, 7), (2, 5, 53, 23), (101, 5, 3, 7), (2, 101, 3, 7)):
        bags = modules.EmbeddingBag(rows, dim, mode=mode, sparse=sparse, max_norm=max_norm)
        bags = bags.to(dtype)
        ids = torch.randint(rows, (count, size), dtype=kind)
        factors = None
        if weighs:
            factors = torch.randn(count, size, dtype=dtype).softmax(-1).requires_grad_()
        vectors = bags(ids, per_sample_weights=factors)
        vectors.backward(torch.rand(count, dim).to(dtype))
        found += [vectors, bags.weight.grad, factors.grad if weighs else None]
    return found


@pairwise(
    {
        "mode, sparse, weighs": [
            ("sum", 0, 1),
            ("sum", 1, 1),
            ("sum", 1, 0),
            ("mean", 0, 0),
            ("mean", 1, 0),
            ("max", 0, 0),
        ],
        "max_norm": [None, 3.0],
        "kind": INTS,
        "dtype": FLOATS,
    }
)
def test_bags_of_one_size(kind, dtype, mode, sparse, max_norm, weighs):
    tolerance = {"rtol": 1e-5, "atol": 1e-5}
    arguments = kind, dtype, mode, bool(sparse), max_norm, weighs
    assert_as_torch(rectangles, *arguments, **tolerance)


@each_case("kinds, dtype, mode", [*itertools.product(PAIRS, NARROW, ["sum", "mean"])])
def test_16_bit_bags_with_sparse_gradients(kinds, dtype, mode):
    assert_as_torch(in_bags, kinds, dtype, mode, False, False, True, rtol=1e-2, atol=1e-2)


def padded_bags(modules, dtype, mode, last, every):
    found = []
    for padding in (1, 4, 9, None):
        bags = modules.EmbeddingBag(
            10, 3, mode=mode, padding_idx=padding, include_last_offset=last, dtype=dtype
        )
        ids = torch.ones(20, dtype=torch.int64) if every else torch.randint(10, (20,))
        offsets = torch.tensor([0, 0, 7, 11, 19] + [20] * last)
        bags(ids, offsets).sum().backward()
        found += [bags(ids, offsets), bags.weight.grad]
        if not last:
            found.append(bags(ids.view(2, 10)))
    return found


@each_case(
    "dtype, mode, last, every",
    [*itertools.product(FLOATS, ["sum", "mean", "max"], [False, True], [False, True])],
)
def test_bags_leave_padding_out(dtype, mode, last, every):
    assert_as_torch(padded_bags, dtype, mode, last, every)


def last_offsets(modules, padding, mode, begins):
    bags = modules.EmbeddingBag(100, 3, include_last_offset=True, padding_idx=padding, mode=mode)
    ids = torch.tensor([[0, 1, 2, 3], [0, 1, 61, 3]])
    vectors = [bags(each, torch.tensor(begins)) for each in ids]
    if begins[-1] < 4 and padding is None and mode == "sum":
        return vectors  # torch's gradient is from memory that it has not written
    sum(each.sum() for each in vectors).backward()
    return *vectors, bags.weight.grad


@each_case(
    "padding, mode, begins",
    [*itertools.product([None, 61, 7], ["sum", "mean", "max"], [[0, 3, 3], [0, 3, 4], [0, 0, 2]])],
)
def test_the_last_offset(padding, mode, begins):
    assert_as_torch(last_offsets, padding, mode, begins)


@pytest.mark.parametrize("trains, weighs", [*itertools.product([False, True], repeat=2)])
def test_factors_and_tables_may_need_no_gradient(trains, weighs):
    def use(modules):
        bags = modules.EmbeddingBag(256, 256, mode="sum").requires_grad_(trains)
        factors = torch.rand(3, 4, requires_grad=weighs)
        ids = torch.arange(1, 5).expand(3, -1)
        vectors = bags(ids, per_sample_weights=factors.softmax(-1))
        if trains or weighs:
            vectors.sum().backward()
        return vectors, bags.weight.grad, factors.grad, vectors.requires_grad

    assert_as_torch(use, rtol=1e-6, atol=1e-6)


# A table that no optimizer of this library steps is torch's in every loop.


@pytest.mark.parametrize("settings", [{}, {"foreach": True}, {"fused": True}], ids=str)
@pytest.mark.parametrize("name", ["SGD", "Adam", "Adagrad"])
def test_optimizers_of_torch_step_a_table_without_another_optimizer(name, settings):
    def use(modules):
        model = nn.Sequential(modules.Embedding(9, 6), nn.Linear(6, 1))
        optimizer = getattr(torch.optim, name)(model.parameters(), lr=0.1, **settings)
        for step in range(3):
            optimizer.zero_grad()
            (model(torch.tensor([1, 2, 2])) * (step + 1)).square().sum().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
        return [parameter.detach() for parameter in model.parameters()]

    if name == "Adagrad" and "fused" in settings:
        settings = {}
    assert_as_torch(use)


def test_hooks_on_the_weight_are_called():
    def use(modules):
        table, found = modules.Embedding(9, 6), []
        table.weight.register_hook(lambda grad: found.append(grad.clone()))
        table(torch.tensor([1, 2, 2])).sum().backward()
        return found

    assert_as_torch(use)
