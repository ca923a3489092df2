"""The embeddings of a model are paged and unpaged in place."""

import io

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import w2v
from tests.support.each_case import each_case

ROWS, DIM = 40, 6


class Model(nn.Module):
    """Embeddings of several kinds, two of them with one weight."""

    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(ROWS, DIM, padding_idx=0)
        self.small = nn.Embedding(4, DIM)
        self.parts = nn.ModuleList([nn.EmbeddingBag(ROWS, DIM, mode="sum"), self.small])
        self.head = nn.Linear(DIM, ROWS, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids):
        vectors = self.tokens(ids) + self.parts[0](ids[:, None]) + self.small(ids % 4)
        return self.head(vectors.tanh())


def models():
    made = []
    for _ in range(2):
        torch.manual_seed(0)
        made.append(Model())
    return made


def train(model, optimizer, steps=3):
    for step in range(steps):
        ids = torch.randperm(ROWS, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        F.cross_entropy(model(ids), ids).backward()
        optimizer.step()


def test_a_paged_model_trains_as_it_did_and_becomes_plain_again():
    model, twin = models()
    before = torch.get_rng_state()
    calls = []
    model.tokens.register_forward_hook(lambda *_: calls.append(1))
    assert w2v.page(model, min_rows=10) is model
    assert torch.equal(torch.get_rng_state(), before)
    assert isinstance(model.tokens, w2v.PagedEmbedding) and model.tokens.padding_idx == 0
    assert isinstance(model.parts[0], w2v.PagedEmbeddingBag)
    assert type(model.small) is nn.Embedding and model.parts[1] is model.small
    assert model.head.weight is model.tokens.weight
    expected = twin.state_dict()
    assert model.state_dict().keys() == expected.keys()
    train(model, w2v.optimizer(model, "Adam", lr=0.1))
    train(twin, torch.optim.Adam(twin.parameters(), lr=0.1, foreach=False))
    for name, value in twin.state_dict().items():
        assert torch.equal(model.state_dict()[name], value), name
    assert len(calls) == 3
    with torch.inference_mode():
        w2v.unpage(model)
    assert not model.tokens.weight.is_inference()
    assert type(model.tokens) is nn.Embedding and type(model.parts[0]) is nn.EmbeddingBag
    assert model.head.weight is model.tokens.weight
    ids = torch.arange(ROWS)
    assert torch.equal(model(ids), twin(ids)) and len(calls) == 4
    assert model.parts[0].mode == "sum"


def test_modules_that_are_used_twice_are_paged_once():
    table = nn.Embedding(ROWS, DIM)
    model = nn.ModuleDict({"a": table, "b": nn.Sequential(table), "c": nn.Embedding(ROWS, DIM)})
    model["c"].weight = table.weight
    w2v.page(model.eval().requires_grad_(False), 1)
    assert model["a"] is model["b"][0] and model["c"].weight is model["a"].weight
    assert not model["a"].training and not model["a"].weight.requires_grad
    w2v.unpage(model)
    assert model["a"] is model["b"][0] and model["c"].weight is model["a"].weight
    assert not model["a"].weight.requires_grad


def changed(model, seen):
    """Give a model hooks, attributes and more; return handles of hooks."""
    tokens, bag = model.tokens, model.parts[0]
    tokens.note = model.tokens.weight.note = "kept"
    tokens.register_buffer("offset", torch.ones(DIM))
    tokens.register_buffer("unsaved", torch.ones(1), persistent=False)
    tokens.register_parameter("gain", nn.Parameter(torch.ones(DIM)))
    tokens.register_forward_hook(lambda its, _, vectors: vectors * its.gain + its.offset)
    tokens.register_state_dict_post_hook(lambda *_: seen.append("state"))
    bag.register_full_backward_hook(lambda *_: seen.append("backward"))
    handles = []
    for name, weight in (("tokens", tokens.weight), ("bag", bag.weight)):
        see = lambda grad, name=name: seen.append((name, grad.sum().item()))  # noqa: E731
        weight.register_hook(see)
        handles.append(weight.register_hook(lambda grad: grad * 2))
        see = lambda its, name=name: seen.append(name)  # noqa: E731
        handles.append(weight.register_post_accumulate_grad_hook(see))
    return handles


@pytest.mark.filterwarnings("ignore:no PagedOptimizer steps this")
@pytest.mark.parametrize("paged_between", [False, True])
def test_all_of_weights_and_modules_stays(paged_between):
    found, ids = [], torch.tensor([1, 5, 5, 2])
    for is_paged, model in zip((True, False), models(), strict=True):
        seen = []
        if paged_between and is_paged:
            w2v.page(model, 10)
        handles = changed(model, seen)
        model(ids).sum().backward()
        if is_paged and paged_between:
            w2v.unpage(model)
        elif is_paged:
            w2v.page(model, 10)
        assert model.tokens.note == model.tokens.weight.note == "kept"
        assert list(model.tokens.state_dict()) == ["weight", "gain", "offset"]
        model(ids).sum().backward()
        for handle in handles:
            handle.remove()
        model(ids).sum().backward()
        found.append([*seen, *(its.grad for its in model.parameters())])
    for mine, theirs in zip(*found, strict=True):
        if isinstance(mine, torch.Tensor):
            torch.testing.assert_close(mine, theirs)
        else:
            assert mine == theirs


def test_gradients_that_wait_in_a_table_stay():
    model, twin = models()
    w2v.page(model, 10)
    w2v.optimizer(model, "SGD", lr=0.1)
    ids = torch.tensor([1, 5, 5, 2])
    model(ids).sum().backward()
    twin(ids).sum().backward()
    w2v.unpage(model)
    for mine, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)


EARLIER = [
    lambda model: torch.optim.Adam(model.parameters()),
    lambda model: w2v.optimizer(model, "Adam", lr=0.1),
    lambda model: w2v.PagedOptimizer(model, "Adam", lr=0.1),
]


@pytest.mark.filterwarnings("ignore:no PagedOptimizer steps this")
@each_case("make", EARLIER)
def test_optimizers_that_were_made_before_are_refused(make):
    model, _ = models()
    ids = torch.arange(ROWS)
    optimizers = []
    if make is not EARLIER[2]:
        optimizers.append((make(model), "page"))
    w2v.page(model, 10)
    paged = make(model)
    model(ids).sum().backward()
    paged.step()
    optimizers.append((paged, "unpage"))
    w2v.unpage(model)
    before = model.state_dict()
    model(ids).sum().backward()
    for optimizer, function in optimizers:
        with pytest.raises(ValueError, match=f"a weight that w2v.{function} has replaced; make"):
            optimizer.step()
    assert all(torch.equal(its, before[name]) for name, its in model.state_dict().items())
    torch.optim.SGD(model.parameters(), lr=1.0).step()


def test_settings_of_the_tables_are_passed_on(tmp_path):
    model = nn.Sequential(nn.Embedding(ROWS, DIM, dtype=torch.float64))
    expected = model[0].weight.detach().clone()
    settings = {"gpu_bytes": 0, "storage": "mmap", "path": tmp_path / "rows"}
    with pytest.raises(ValueError, match="path=.*rows is one file, and 2 tables would be paged; r"):
        w2v.page(nn.Sequential(nn.Embedding(ROWS, DIM), nn.Embedding(ROWS, DIM)), 1, **settings)
    model.append(nn.Embedding(ROWS, DIM))
    model[1].weight = model[0].weight  # one table
    w2v.page(model, 1, **settings)
    assert torch.equal(model[0].weight, expected) and model[1].storage == "mmap"


class Own(nn.Embedding):
    """An embedding with a forward pass of its own."""


class Special(nn.Parameter):
    """A parameter with operations of its own."""


def own_weight():
    table = nn.Embedding(ROWS, DIM)
    table.weight = Special(table.weight.detach())
    return table


def own_forward():
    table = nn.Embedding(ROWS, DIM)
    table.forward = lambda ids: ids
    return table


def untied():
    model = nn.ModuleList([nn.Embedding(ROWS, DIM, padding_idx=0), nn.Embedding(ROWS, DIM)])
    model[1].weight = model[0].weight
    return model


REFUSED = [
    (
        lambda: nn.Sequential(nn.Embedding(3, 2)),
        r"no embedding of 10 rows in it \(the largest: 3\)",
    ),
    (lambda: nn.Sequential(Own(ROWS, 2)), r"no embedding of 10 rows in it \(the largest: 0\)"),
    (lambda: nn.Embedding(ROWS, 2), "give min_rows, and the module around the embeddings"),
    (lambda: nn.Sequential(nn.Embedding(ROWS, 2).half()), "page a float32 model with its weights"),
    (lambda: nn.Sequential(nn.Embedding(ROWS, 2, device="meta")), "weights are .* on meta; page"),
    (untied, "modules of one weight differ"),
    (lambda: nn.Sequential(own_forward()), "has a forward of its own; call w2v.page before it"),
    (lambda: nn.Sequential(own_weight()), "is a Special, not a Parameter; page the model before"),
]


@each_case("make, words", REFUSED)
def test_what_cannot_be_paged_is_refused(make, words):
    model = make()
    with pytest.raises(ValueError, match=words):
        w2v.page(model, 10)
    assert not any(isinstance(module, w2v.PagedEmbedding) for module in model.modules())
    with pytest.raises(ValueError, match="no PagedEmbedding in it; give the module around it"):
        w2v.unpage(model)


EXPORTS = [
    lambda model, ids: torch.export.export(model, (ids,)),
    lambda model, ids: torch.jit.trace(model, (ids,)),
    lambda model, ids: torch.jit.script(model),
    lambda model, ids: torch.fx.symbolic_trace(model),
]


@each_case("export", EXPORTS)
def test_export_of_a_paged_model_names_the_remedy(export):
    model, ids = nn.Sequential(nn.Embedding(ROWS, DIM), nn.Linear(DIM, 1)), torch.tensor([1, 2])
    w2v.page(model, 1)
    with pytest.raises(RuntimeError, match=r"cannot be exported; export w2v.unpage\(model\)"):
        export(model, ids)
    expected = model(ids)
    exported = export(w2v.unpage(model), ids)
    called = exported.module() if hasattr(exported, "graph_module") else exported
    assert torch.equal(called(ids), expected)


def test_a_saved_plain_model_needs_no_w2v():
    model = nn.Sequential(nn.Embedding(ROWS, DIM), nn.Linear(DIM, 1))
    w2v.unpage(w2v.page(model, 1))
    file = io.BytesIO()
    torch.save(model, file)
    assert b"w2v" not in file.getvalue()
