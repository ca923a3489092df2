"""The weight of a paged table is a parameter to every framework."""

import copy
import io
import pickle
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import w2v
from tests.support.each_case import each_case
from tests.support.embeddings import DIM, ROWS, somewhere, trainable, weights
from tests.support.processes import run_python
from w2v import PagedEmbedding, PagedEmbeddingBag, PagedOptimizer

EVERY = torch.arange(ROWS)


def twins(optimizer="Adam", lr=0.1, **settings):
    """Return a paged and a dense table of equal weights, with optimizers."""
    modules = []
    for kind in (PagedEmbedding, nn.Embedding):
        torch.manual_seed(0)
        modules.append(kind(ROWS, DIM, **settings))
    torchs = getattr(torch.optim, optimizer)(modules[1].parameters(), lr=lr, foreach=False)
    return (modules[0], PagedOptimizer(modules[0], optimizer, lr=lr)), (modules[1], torchs)


def train(pair, loss_of, steps=4):
    table, optimizer = pair
    for step in range(steps):
        optimizer.zero_grad()
        torch.manual_seed(step)
        loss_of(table, EVERY.to(table.weight.device)).backward()
        optimizer.step()


def logits_of(table, ids):
    return F.linear(table(ids).tanh(), table.weight)


WHOLE = [
    lambda table, ids: F.cross_entropy(logits_of(table, ids), ids.flip(0)),
    lambda table, ids: (table(ids[:3]) @ table.weight.T).square().sum(),
    lambda table, ids: table(ids[:3]).square().sum() + 0.1 * table.weight.pow(2).sum(),
    lambda table, ids: table.weight.norm(),
    lambda table, ids: (torch.cat([table.weight, table.weight])[2:12] ** 2).sum(),
    lambda table, ids: (table.weight[2:5] * table.weight[3]).sum(),
    lambda table, ids: F.embedding(ids[:2].view(2, 1), table.weight).square().sum(),
    lambda table, ids: table.weight.index_select(0, ids[:2]).square().sum(),
    lambda table, ids: (table.weight[ids[:2]] * torch.randn(2, DIM).to(ids.device)).sum(),
]


@pytest.mark.parametrize("loss_of", WHOLE)
@each_case("name", ["SGD", "Adam", "Adagrad", "NAdam"])
def test_reads_of_the_whole_weight_have_the_gradient_of_torch(name, loss_of):
    paged, dense = twins(name)
    for pair in (paged, dense):
        train(pair, loss_of)
    assert torch.equal(paged[0].weight, dense[0].weight)


@somewhere
@each_case("dtype", [torch.float32, torch.float64])
def test_a_tied_model_trains_with_rows_anywhere(tmp_path, storage, device, dtype):
    paged = trainable(tmp_path, storage, device, optimizer="Adam", dtype=dtype)
    dense = nn.Embedding.from_pretrained(weights(paged[0]).to(device), freeze=False)
    torchs = torch.optim.Adam(dense.parameters(), lr=0.1, foreach=False)
    for pair in (paged, (dense, torchs)):
        train(pair, WHOLE[0])
    tolerance = {"rtol": 0, "atol": 0 if device == "cpu" else 1e-5}
    torch.testing.assert_close(weights(paged[0]), dense.weight.detach().cpu(), **tolerance)


def test_a_step_of_all_rows_takes_them_by_parts(monkeypatch):
    monkeypatch.setattr("w2v.rows.paged_table.STEP_ROWS", 4)
    monkeypatch.setattr("w2v.rows.embedding.LINEAR_ROWS", 2)
    for loss_of in (WHOLE[0], lambda table, ids: linear(table, table(ids).tanh()).square().sum()):
        paged, dense = twins("NAdam")  # has two scalars
        for pair in (paged, dense):
            train(pair, loss_of)
        torch.testing.assert_close(paged[0].weight, dense[0].weight)


def linear(table, vectors):
    """Return logits over all rows."""
    if isinstance(table, PagedEmbedding):
        return table.linear(vectors)
    return F.linear(vectors, table.weight)


@each_case("shape", [(3, DIM), (2, 3, DIM), (0, DIM)])
def test_linear_gives_logits_and_both_gradients(shape):
    found = []
    for table, optimizer in twins():
        torch.manual_seed(1)
        vectors = torch.randn(shape, requires_grad=True)
        logits = linear(table, vectors)
        logits.square().sum().backward()
        optimizer.step()
        found.append((logits, vectors.grad, table.weight))
    for mine, theirs in zip(*found, strict=True):
        assert torch.equal(mine, theirs)
    table, optimizer = twins()[0]
    logits = table.linear(torch.ones(1, DIM))
    table([1]).sum().backward()
    optimizer.step()
    with pytest.raises(RuntimeError, match=r"changed between linear\(h\) and its backward pass"):
        logits.sum().backward()


def test_gradients_of_rows_and_of_the_whole_wait_together():
    paged, dense = twins()
    for table, optimizer in (paged, dense):
        table(EVERY[:2]).square().sum().backward()
        table.weight.square().sum().backward()
        table(EVERY[1:4]).sum().backward()
        optimizer.step()
        table.weight.sum().backward()
        optimizer.zero_grad()
        table(EVERY).sum().backward()
        optimizer.step()
    assert torch.equal(paged[0].weight, dense[0].weight)


def test_the_weight_is_a_parameter():
    model = nn.Sequential(PagedEmbedding(ROWS, DIM), nn.Linear(DIM, 1))
    assert isinstance(model[0], nn.Embedding) and not isinstance(model[0], nn.EmbeddingBag)
    assert isinstance(PagedEmbeddingBag(ROWS, DIM), nn.EmbeddingBag)
    assert not isinstance(PagedEmbeddingBag(ROWS, DIM), nn.Embedding)
    assert [name for name, _ in model.named_parameters()] == ["0.weight", "1.weight", "1.bias"]
    weight = model[0].weight
    assert isinstance(weight, nn.Parameter) and weight.is_leaf and weight.requires_grad
    assert weight.grad is None and weight.shape == (ROWS, DIM) and len(weight) == ROWS
    assert sum(parameter.numel() for parameter in model.parameters()) == ROWS * DIM + DIM + 1
    assert "tensor([[" in repr(weight) and weight.tolist() == weights(model[0]).tolist()
    assert model[0]._table._store is not None


def test_counting_parameters_takes_no_memory():
    table = PagedEmbedding(1 << 20, 64, seed=1)
    assert sum(parameter.numel() for parameter in table.parameters()) == 1 << 26
    assert table.weight.device.type == "cpu" and table.weight.dtype == torch.float32
    assert table._table._store is None


OPTIMIZERS = [
    lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.1),
    lambda parameters: torch.optim.AdamW(parameters, lr=0.1, foreach=True),
    lambda parameters: torch.optim.Adam(parameters, lr=0.1, fused=True),
]


@each_case("make", OPTIMIZERS)
def test_optimizers_and_clipping_of_dense_modules_leave_the_table_alone(make):
    model = nn.Sequential(PagedEmbedding(ROWS, DIM), nn.Linear(DIM, 1))
    paged, dense = PagedOptimizer(model, "SGD", lr=1.0), make(model.parameters())
    for parameter in model.parameters():
        parameter.grad = None
    expected = weights(model[0])
    model(EVERY[:2]).sum().backward()
    slope = model[1].weight.detach().clone()
    nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    dense.step()
    model.zero_grad()
    assert torch.equal(weights(model[0]), expected)
    paged.step()
    expected[:2] -= slope
    torch.testing.assert_close(weights(model[0]), expected)
    dense.load_state_dict(dense.state_dict())


def test_groups_by_weight_decay_find_the_table():
    model = nn.Sequential(PagedEmbedding(ROWS, DIM), nn.LayerNorm(DIM))
    decayed = [p for name, p in model.named_parameters() if p.dim() > 1 and p.requires_grad]
    paged = PagedOptimizer([{"params": decayed, "weight_decay": 0.5}], "SGD", lr=0.1)
    expected = weights(model[0]) * 0.95
    model(EVERY).sum().mul(0).backward()
    paged.step()
    torch.testing.assert_close(weights(model[0]), expected)


class Lora(nn.Module):
    """An embedding whose rows are frozen, beside factors that are trained."""

    def __init__(self, base):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Parameter(torch.ones(2, base.num_embeddings))
        self.b = nn.Parameter(torch.zeros(base.embedding_dim, 2))

    def forward(self, ids):
        return self.base(ids) + F.embedding(ids, self.a.T) @ self.b.T


def test_frozen_tables_beside_trained_factors():
    model = Lora(PagedEmbedding(ROWS, DIM))
    dense = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    assert len(dense.param_groups[0]["params"]) == 2
    before = weights(model.base)
    model(EVERY).sum().backward()
    dense.step()
    assert torch.equal(weights(model.base), before) and model.b.any()
    with torch.no_grad():
        expected = model(EVERY)
        model.base.weight.add_(model.a.T @ model.b.T)  # merged
    torch.testing.assert_close(model.base(EVERY), expected)


def test_freezing_all_parameters_freezes_the_table():
    model = nn.Sequential(PagedEmbedding(ROWS, DIM), nn.Linear(DIM, 1))
    model.requires_grad_(False)
    assert not model(EVERY).requires_grad and not model[0].weight.requires_grad
    model.requires_grad_(True)
    assert model[0](EVERY).requires_grad
    model[0].weight.requires_grad = False
    assert not model[0](EVERY).requires_grad


@each_case("settings", [{}, {"multi_avg_fn": get_ema_multi_avg_fn(0.9)}])
def test_averages_of_a_model_average_its_table(settings):
    averages = []
    for kind in (PagedEmbedding, nn.Embedding):
        torch.manual_seed(2)
        model = nn.Sequential(kind(ROWS, DIM), nn.Linear(DIM, 1))
        average = AveragedModel(model, **settings)
        for step in range(3):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(step)
            average.update_parameters(model)
        averages.append(average.module[0].weight)
    assert torch.equal(*averages)


class Tied(nn.Module):
    """A language model whose output has the weights of its input."""

    def __init__(self, kind, swap=False):
        super().__init__()
        self.wte = kind(ROWS, DIM)
        self.head = nn.Linear(DIM, ROWS, bias=False)
        self.head.weight = self.wte.weight

    def forward(self, ids):
        return self.head(self.wte(ids).tanh())


BETWEEN = [copy.deepcopy, lambda model: model, lambda model: torch.compile(model, backend="eager")]


@each_case("between", BETWEEN)
def test_tied_weights_stay_tied(between):
    torch.manual_seed(1)
    paged, dense = Tied(PagedEmbedding), Tied(nn.Embedding)
    dense.load_state_dict(paged.state_dict())
    assert len(list(paged.parameters())) == 1
    used = between(paged)
    paged = getattr(used, "_orig_mod", used)
    optimizers = PagedOptimizer(paged, "Adam", lr=0.1), torch.optim.Adam(dense.parameters(), lr=0.1)
    for _ in range(3):
        for model, optimizer in zip((used, dense), optimizers, strict=True):
            optimizer.zero_grad()
            F.cross_entropy(model(EVERY), EVERY).backward()
            optimizer.step()
    assert paged.head.weight is paged.wte.weight
    torch.testing.assert_close(paged.wte.weight, dense.wte.weight, rtol=0, atol=0)
    paged.load_state_dict(dense.state_dict())
    second = PagedEmbedding(3, DIM)
    second.weight = paged.wte.weight
    assert second.num_embeddings == ROWS
    assert torch.equal(second(EVERY), paged.wte(EVERY))


@each_case("settings", [{"padding_idx": 1}, {"max_norm": 1.0}, {"scale_grad_by_freq": True}])
def test_modules_of_other_rules_are_not_tied(settings):
    for kind in (PagedEmbedding, PagedEmbeddingBag):
        table = kind(ROWS, DIM, **settings)
        with pytest.raises(ValueError, match="modules of one weight differ: .*; make them alike"):
            table.weight = PagedEmbedding(ROWS, DIM).weight
        assert table.weight.table is table._table


def test_a_tied_model_that_stays_where_it_is_is_not_changed():
    model = Tied(PagedEmbedding)
    loss = F.cross_entropy(model(EVERY), EVERY)
    before = model.wte.weight._version
    model.cpu().float()
    assert model.wte.weight._version == before
    loss.backward()


INITIALISERS = [
    nn.init.normal_,
    nn.init.uniform_,
    nn.init.zeros_,
    nn.init.xavier_uniform_,
    nn.init.kaiming_normal_,
    nn.init.trunc_normal_,
    nn.init.orthogonal_,
    lambda weight: weight.data.copy_(torch.ones(ROWS, DIM)),
    lambda weight: setattr(weight, "data", torch.ones(ROWS, DIM)),
    lambda weight: weight.data[2:4].zero_(),
    lambda weight: nn.init.constant_(weight[4], 3.0),
    lambda weight: nn.init.normal_(weight[2:4]),
    lambda weight: nn.init.xavier_uniform_(weight.T),
    lambda weight: nn.init.zeros_(weight[:, 1:3][2:4].T),
    lambda weight: [nn.init.uniform_(row) for row in weight.detach()],
    lambda weight: [row.data.mul_(2) for row in weight],
    lambda weight: weight[3].detach().add_(weight[4]),
    lambda weight: weight[5].data.copy_(weight[4]),
    lambda weight: weight.view(ROWS, DIM).data.fill_(1.0),
]


@each_case("initialise", INITIALISERS)
def test_initialisers_write_what_they_write_in_torch(initialise):
    found = []
    for table, _ in twins():
        table(EVERY)
        torch.manual_seed(3)
        initialise(table.weight)
        with torch.no_grad():
            table.weight[1].fill_(2.0)
            table.weight[5:] *= 0.5
        found.append((table.weight, table(EVERY), torch.get_rng_state()))
    for mine, theirs in zip(*found, strict=True):
        assert torch.equal(mine, theirs)
    with pytest.raises(RuntimeError, match="leaf Variable that requires grad"):
        twins()[0][0].weight.fill_(1.0)
    with pytest.raises(RuntimeError, match=r"use weight.detach\(\).numpy\(\)"):
        twins()[0][0].weight.numpy()


def test_a_table_grows_with_its_data_as_resized_token_embeddings():
    (table, optimizer), _ = twins()
    table.weight.data = torch.cat([table.weight.data, torch.ones(3, DIM)])
    assert table.num_embeddings == len(table.weight) == ROWS + 3
    assert table([ROWS + 1]).tolist() == [[1.0] * DIM]
    table.weight.square().sum().backward()
    optimizer.step()
    assert not torch.equal(table([ROWS + 1]), torch.ones(1, DIM))


def test_weights_change_other_tensors_in_place():
    found = []
    for table, _ in twins():
        average = torch.ones(ROWS, DIM)
        with torch.no_grad():
            average.add_(table.weight, alpha=0.5).lerp_(table.weight, 0.5)
            average[2].copy_(table.weight[3])
            torch._foreach_mul_([average], [table.weight])
            torch.add(table.weight, 1.0, out=(other := torch.empty(ROWS, DIM)))
        found.append((average, other, table.weight))
    for mine, theirs in zip(*found, strict=True):
        assert torch.equal(mine, theirs)


READS = [
    copy.deepcopy,
    lambda row: pickle.loads(pickle.dumps(row)),
    torch.from_dlpack,
    lambda row: torch.from_numpy(row.numpy()),
    lambda row: torch.tensor([float(f"{value:.3f}") for value in row]),
    lambda row: torch.tensor(row.tolist()),
    lambda row: torch.empty(2, 3).copy_(row.view(2, 3)),
    lambda row: row[1:].cpu().contiguous(),
    lambda row: torch.vmap(torch.sin)(row),
]


@each_case("read", READS)
def test_views_of_a_weight_are_read_as_tensors(read):
    mine, theirs = (read(table.weight[3].detach()) for table, _ in twins())
    assert torch.equal(mine, theirs)
    with pytest.raises(ValueError, match=r"share_memory\(\); use process_group"):
        twins()[0][0].weight[3].detach().share_memory_()


def test_reading_some_rows_copies_no_others(monkeypatch):
    table = PagedEmbedding(ROWS, DIM)
    rows_ND = table.weight.detach()[2:5].clone()
    monkeypatch.delattr(type(table._table), "whole")
    views = table.weight[2:5], table.weight.narrow(0, 2, 3), torch.stack([*table.weight[2:5]])
    for read in views:
        torch.testing.assert_close(read.clone(), rows_ND, rtol=0, atol=0)


def test_views_of_a_weight_show_it_as_it_is():
    found = []
    for table, optimizer in twins():
        views = [table.weight[2], table.weight.T, table.weight[3:5], table.weight.view(-1)]
        views += [views[0][1:3], *table.weight[:2].unbind()]
        shapes = [(view.shape, view.stride(), view.is_leaf) for view in views]
        seen = [view.detach().clone() for view in views]
        table.weight.data[1:4] = 5.0
        seen += [view.detach().clone() for view in views]
        table(EVERY).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        seen += [view.detach().clone() for view in views]
        (views[0].square().sum() + views[1].sum()).backward()
        optimizer.step()
        assert views[0].tolist() == table.weight[2].tolist()
        found.append((shapes, torch.cat([each.flatten() for each in seen]), table.weight))
    (shapes, *values), (expected_shapes, *expected) = found
    assert shapes == expected_shapes
    for mine, theirs in zip(values, expected, strict=True):
        assert torch.equal(mine, theirs)


VIEWS = [lambda weight: weight.data, lambda weight: weight.detach()[1:3], lambda weight: weight[2]]


@each_case("take", VIEWS)
def test_views_that_are_written_to_before_the_step_change_the_weight(take):
    found = []
    for table, optimizer in twins("SGD"):
        view = take(table.weight)
        turned = table.weight.T
        for _ in range(2):
            table(EVERY[:4]).square().sum().backward()
            with torch.no_grad():
                view.mul_(0.5)
            found.append(turned.detach().clone())
            optimizer.step()
            optimizer.zero_grad()
        found.append(table.weight.detach().clone())
    for mine, theirs in zip(found[:3], found[3:], strict=True):
        assert torch.equal(mine, theirs)


def test_writing_to_an_earlier_view_of_a_cached_table_raises(tmp_path):
    table, optimizer = trainable(tmp_path, "cpu cached")
    ids = EVERY[:2]
    for _ in range(2):
        with torch.no_grad():
            table.weight.mul_(0.5)
            table.weight.data.add_(1.0)
        table(ids).sum().backward()
        optimizer.step()
        table(ids)
    view = table.weight.data
    pages = optimizer.pages([ids, ids], key=lambda batch: batch)
    next(pages)  # rows are cached, though nothing has used them
    for use in (lambda: table(ids), lambda: table(ids), table.state_dict):
        view.mul_(2.0)
        with pytest.raises(RuntimeError, match="a view of the .*; take weight.data anew for each"):
            use()
        table(ids)


SAVED = [
    lambda weight: (weight[2] * weight[3]).sum(),
    lambda weight: (torch.ones(1, DIM, requires_grad=True) @ weight.T).sum(),
    lambda weight: weight.norm(),
]


@each_case("loss_of", SAVED)
def test_a_step_before_the_backward_pass_raises_where_it_does_in_torch(loss_of):
    for table, optimizer in twins():
        table(EVERY[:2]).sum().backward()
        loss = loss_of(table.weight)
        optimizer.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_lists_that_are_changed_before_the_backward_pass_raise_as_in_torch():
    for table, _ in twins():
        other = torch.ones(ROWS, DIM, requires_grad=True)
        losses = [table.weight.square().sum(), other.square().sum()]
        with torch.no_grad():
            torch._foreach_mul_([table.weight, other], 2.0)
        for loss in losses:
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                loss.backward()


def test_drawing_weights_before_the_backward_pass_raises_as_in_torch():
    for table, _ in twins():
        loss = table.weight.square().sum()
        table.reset_parameters()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_a_limited_norm_before_the_backward_pass_raises_where_it_does_in_torch():
    for table, _ in twins(max_norm=0.1):
        loss = (table(EVERY[:2]) @ table.weight.T).sum()
        table(EVERY[2:4])
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_writing_to_another_shape_of_the_weight_raises():
    (table, _), _ = twins()
    with pytest.raises(RuntimeError, match="not stored in this shape; write to rows of it"):
        nn.init.zeros_(table.weight.view(-1))
    row = table.weight[2].detach()
    for call in (partial(row.as_strided, (2,), (1,)), partial(row.set_, torch.ones(DIM))):
        with pytest.raises(TypeError, match=r"give a clone\(\), or call w2v.unpage"):
            call()


def test_operations_may_write_to_the_weight_as_their_output():
    table = twins()[0][0]
    with torch.no_grad():
        torch.add(torch.ones(ROWS, DIM), 1.0, out=table.weight)
    assert torch.equal(weights(table), torch.full((ROWS, DIM), 2.0))


def test_growing_draws_nothing():
    table, before = PagedEmbedding(ROWS, DIM), torch.get_rng_state()
    table.weight.data = torch.ones(ROWS + 1, DIM)
    assert torch.equal(torch.get_rng_state(), before)


def test_models_change_between_float32_and_float64():
    (table, optimizer), (dense, torchs) = twins()
    train((table, optimizer), WHOLE[0], 2)
    train((dense, torchs), WHOLE[0], 2)
    for module in (table, dense):
        module.double()
    assert table.weight.dtype == table(EVERY).dtype == torch.float64
    assert torch.equal(table.weight, dense.weight)
    table(EVERY).sum().backward()
    optimizer.step()


@each_case("rows, dim", [(1, 1), (5, 3), (2, 8), (100, 7), (33, 17)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("kind", ["Embedding", "EmbeddingBag"])
def test_first_weights_and_the_generator_are_those_of_torch(kind, rows, dim, dtype, monkeypatch):
    monkeypatch.setattr("w2v.rows.paged_table.DRAWN_ROWS", 1)
    found = []
    for each in (getattr(w2v, f"Paged{kind}"), getattr(nn, kind)):
        torch.manual_seed(4)
        settings = {"padding_idx": 0, "dtype": dtype}
        tables = each(rows, dim, **settings), each(rows, dim, dtype=dtype)
        found.append((torch.get_rng_state(), *(table.weight.detach().clone() for table in tables)))
        tables[0].reset_parameters()
        found[-1] += (tables[0].weight.detach(), torch.rand(3))
        own = type(kind, (each,), {"reset_parameters": lambda its: nn.init.uniform_(its.weight)})
        found[-1] += (own(rows, dim).weight.detach(), torch.rand(3))
    for mine, theirs in zip(*found, strict=True):
        assert torch.equal(mine, theirs.to(mine.dtype))


def test_given_weights_draw_nothing():
    before = torch.get_rng_state()
    given = torch.ones(ROWS, DIM, dtype=torch.float64)
    table = PagedEmbedding(ROWS, DIM, _weight=given, _freeze=True)
    assert table.weight.dtype == torch.float64 and not table(EVERY).requires_grad
    PagedEmbedding(ROWS, DIM, init=given), PagedEmbedding(ROWS, DIM, seed=1)
    assert torch.equal(torch.get_rng_state(), before)
    with pytest.raises(ValueError, match="_weight and init both give the first weights"):
        PagedEmbedding(ROWS, DIM, _weight=given, init=given)


def test_data_parallel_modules_leave_the_table_alone():
    code = """
import torch
from torch import nn
from w2v import PagedEmbedding, PagedOptimizer
torch.distributed.init_process_group("gloo", init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
def trained(process_group):
    table = PagedEmbedding(9, 6, process_group=process_group)
    model = nn.Sequential(table, nn.Linear(6, 1))
    paged = PagedOptimizer(model, "SGD", lr=1.0)
    parallel = nn.parallel.DistributedDataParallel(model)
    expected = table.weight.clone()
    for _ in range(3):
        parallel(torch.tensor([1, 2])).sum().backward()
        expected[1:3] -= model[1].weight.detach()
        paged.step()
    torch.testing.assert_close(table.weight, expected)
trained(torch.distributed.group.WORLD)
print("trained")
trained(None)
"""
    done = run_python(code)
    assert done.stdout == "trained\n"
    assert "cannot train in DistributedDataParallel: each process would have" in done.stderr


def test_saved_models_have_their_table():
    model = Tied(PagedEmbedding)
    model.wte.weight.decays = False
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert loaded.head.weight is loaded.wte.weight
    assert torch.equal(loaded.wte.weight, model.wte.weight)
    assert loaded.wte.weight.decays is False
