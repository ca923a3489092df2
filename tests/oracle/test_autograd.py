"""Gradients of rows go where those of torch's modules go."""

import pytest
import torch
from torch import nn
from torch.autograd.graph import register_multi_grad_hook

import w2v
from tests.support.each_case import each_case
from tests.support.torch_kernels import use_torch_kernels
from w2v import PagedEmbedding, PagedEmbeddingBag

ROWS, DIM = 7, 4
EVERY, SOME = torch.arange(ROWS), torch.tensor([1, 3, 3])
WAYS = ["torch", "fused", "fused ahead"]  # how rows are computed


class Model(nn.Module):
    """Two tables, one of them of bags or alike, and a head."""

    def __init__(self, table, other):
        super().__init__()
        self.table, self.other = table(ROWS, DIM), other(ROWS, DIM)
        self.head = nn.Linear(DIM, 1)

    def forward(self, ids):
        of_bags = isinstance(self.other, nn.EmbeddingBag)
        vectors = self.table(ids) + self.other(ids[:, None] if of_bags else ids)
        return self.head(vectors.tanh()).square().sum()


@pytest.fixture
def each(monkeypatch):
    """Return a function that compares a use of our modules and of torch's."""
    use_torch_kernels(monkeypatch)

    def compare(use, way="torch"):
        found = []
        kinds_of = [(PagedEmbedding, PagedEmbeddingBag), (nn.Embedding, nn.EmbeddingBag)]
        for kinds in kinds_of:
            torch.manual_seed(0)
            if "ahead" in way:  # one launch computes tables that are alike
                kinds = kinds[:1] * 2
            model = Model(*kinds)
            if kinds[0] is nn.Embedding:
                optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            else:
                optimizer = w2v.optimizer(model, "SGD", lr=0.1, fused="fused" in way)
            batches = [EVERY]
            if "ahead" in way and kinds[0] is PagedEmbedding:
                batches = optimizer.pages([EVERY], lambda ids: [ids, ids])
            for _ in batches:
                results = use(model, optimizer)
            found.append([*results, *(weight.detach().clone() for weight in model.parameters())])
        assert len(found[0]) == len(found[1])
        for mine, theirs in zip(*found, strict=True):
            if isinstance(theirs, torch.Tensor):
                torch.testing.assert_close(mine, theirs)
            else:
                assert mine == theirs

    return compare


def scale(grad):
    return grad * 3


def clear_a_row(grad):
    grad[3] = 0


HOOKS = [lambda grad: None, scale, clear_a_row, lambda grad: grad + 1, torch.sign]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("ids", [EVERY, SOME])
@each_case("hook", HOOKS)
def test_hooks_of_the_weight_see_and_change_its_gradient(each, hook, ids, way):
    def use(model, optimizer):
        seen, of_all = ([], []), []
        for module, its in zip((model.table, model.other), seen, strict=True):
            module.weight.register_hook(lambda grad, its=its: its.append(grad.clone()))
            removed = module.weight.register_hook(scale)
            module.weight.register_hook(hook)
            module.weight.register_hook(lambda grad, its=its: its.append(grad.clone()))
            removed.remove()
        register_multi_grad_hook([model.table.weight, model.head.weight], of_all.extend)
        for _ in range(2):
            model(ids).backward()
            optimizer.step()
            optimizer.zero_grad()
        return seen[0] + seen[1] + of_all

    each(use, way)


def test_hooks_that_return_no_gradient_are_refused():
    table = PagedEmbedding(ROWS, DIM)
    w2v.optimizer(table, "SGD", lr=0.1)
    table.weight.register_hook(lambda grad: 1)
    with pytest.raises(TypeError, match="hook returned 'int'"):
        table(SOME).sum().backward()


def twice(model, optimizer):
    (model(EVERY) + model(SOME) + model.table.weight[2:4].sum()).backward()


def joined(model, optimizer):
    model(EVERY).backward()
    model(SOME).backward()


def repeated(model, optimizer):
    loss = model(EVERY)
    loss.backward(retain_graph=True)
    loss.backward()


def asked(model, optimizer):
    loss = model(EVERY)
    grads = torch.autograd.grad(loss, [model.other.weight, model.table.weight], retain_graph=True)
    grads += torch.autograd.grad(loss, model.head.weight)
    optimizer.step()  # nothing waits
    return grads


def asked_and_trained(model, optimizer):
    loss = model(SOME)
    (grad,) = torch.autograd.grad(loss, model.table.weight, retain_graph=True)
    loss.backward()
    return [grad]


def for_one(model, optimizer):
    model(EVERY).backward(inputs=[model.table.weight])
    return [model.head.weight.grad is None]


def for_others(model, optimizer):
    model(EVERY).backward(inputs=[model.head.weight, model.other.weight])


def frozen_between(model, optimizer):
    loss = model(EVERY)
    model.table.requires_grad_(False)
    loss.backward()
    model.table.requires_grad_(True)


def frozen_before(model, optimizer):
    model.other.requires_grad_(False)
    loss = model(EVERY)
    model.other.requires_grad_(True)
    loss.backward()


def not_asked(model, optimizer):
    model.table.requires_grad_(False)
    try:
        torch.autograd.grad(model(EVERY), model.table.weight)
    except RuntimeError as error:
        return [str(error)]


def stepped_in_backward(model, optimizer):
    calls = []

    def step(weight):
        calls.append(1)
        optimizer.step()
        optimizer.zero_grad()

    model.table.weight.register_post_accumulate_grad_hook(step)
    (model.table(EVERY).square().sum() + model.table(SOME).sum()).backward()
    model.table(SOME).square().sum().backward()
    return calls


def scaled_between(model, optimizer):
    model(EVERY).backward()
    for parameter in model.parameters():
        parameter.grad.mul_(0.5)
    model(EVERY).backward()
    optimizer.zero_grad(set_to_none=False)
    model(EVERY).backward()


USES = [
    twice,
    joined,
    repeated,
    asked,
    asked_and_trained,
    for_one,
    for_others,
    frozen_between,
    frozen_before,
    not_asked,
    stepped_in_backward,
    scaled_between,
]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("hook", [None, scale])
@each_case("use", USES)
def test_backward_passes_train_what_they_train_in_torch(each, use, hook, way):
    def with_hook(model, optimizer):
        if hook:
            model.table.weight.register_hook(hook)
        found = list(use(model, optimizer) or [])
        optimizer.step()
        return found

    each(with_hook, way)


def penalty(model, optimizer):
    loss = model(EVERY)
    (grad,) = torch.autograd.grad(loss, model.table.weight, create_graph=True)
    (loss + grad.square().sum()).backward()
    optimizer.step()
    return [grad]


def of_logits(model, optimizer):
    table, vectors = model.table, torch.randn(3, DIM, requires_grad=True)
    linear = getattr(table, "linear", lambda vectors: vectors @ table.weight.T)
    seen = []
    table.weight.register_hook(lambda grad: seen.append(grad.clone()))
    loss = linear(vectors).square().sum()
    seen += torch.autograd.grad(loss, table.weight, retain_graph=True)
    loss.backward(inputs=[vectors], retain_graph=True)
    loss.backward()
    optimizer.step()
    return [*seen, vectors.grad]


@each_case("use", [penalty, of_logits])
def test_gradients_of_gradients_and_of_logits(each, use):
    each(use)


@each_case("way", WAYS[1:])
def test_gradients_of_gradients_of_fused_tables_raise(each, way):
    with pytest.raises(RuntimeError, match="create_graph=True is not supported for paged rows"):
        each(penalty, way)


def test_logits_train_a_table_without_an_optimizer_of_this_library():
    table = PagedEmbedding(ROWS, DIM)
    expected = table.weight - 0.1
    table.linear(torch.ones(1, DIM)).sum().backward()
    torch.optim.SGD(table.parameters(), lr=0.1).step()
    torch.testing.assert_close(table.weight, expected)


def test_sparse_modules_give_hooks_and_callers_sparse_gradients():
    seen = []
    for kind in (PagedEmbedding, nn.Embedding):
        table = kind(ROWS, DIM, sparse=True)
        if kind is PagedEmbedding:
            w2v.optimizer(table, "SGD", lr=0.1)
        table.weight.register_hook(seen.append)
        loss = table(SOME).sum()
        seen += torch.autograd.grad(loss, table.weight, retain_graph=True)
        loss.backward()
    assert len(seen) == 6 and all(grad.is_sparse for grad in seen)
    for grad in seen:
        assert torch.equal(grad.to_dense(), seen[-1].to_dense())
