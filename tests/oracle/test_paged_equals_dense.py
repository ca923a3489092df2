"""Paged embeddings train as dense modules of torch do."""

import copy

import numpy as np
import pytest
import torch
from torch import nn

from tests.support.each_case import each_case
from tests.support.embeddings import (
    DIM,
    ROWS,
    SOMEWHERE,
    batches,
    embedding,
    everywhere,
    somewhere,
    trainable,
    weights,
)
from tests.support.pairwise import pairwise
from w2v import PagedEmbedding, PagedEmbeddingBag, PagedOptimizer, RowwiseAdagrad, RowwiseAdam
from w2v.config import OPTIMIZERS


def dense_twin(table, optimizer="SGD", kind=nn.Embedding, lr=0.1, **settings):
    """Return torch's module with the same weights, and its optimizer."""
    dense = kind(table.num_embeddings, DIM, device=table.device, **settings)
    dense.weight.data.copy_(weights(table))
    return dense, getattr(torch.optim, optimizer)(dense.parameters(), lr=lr, foreach=False)


def assert_equal(table, dense):
    assert torch.equal(weights(table), dense.weight.detach().cpu())


def is_comparable(storage, device, cached, dtype, step, **_):
    """Return whether an embedding can be stored so and equals torch."""
    has_memory = device == "cuda" or storage in ("cpu", "mmap")
    has_cache = not cached or storage in ("cpu", "pinned")
    # Rows hold their own scalars in float64, and torch's modules theirs in float32.
    return has_memory and has_cache and (dtype == torch.float32 or step == "table")


@pairwise(
    {
        "name": OPTIMIZERS,
        "storage": ["cpu", "mmap", "pinned", "cuda"],
        "device": ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)],
        "cached": ["", " cached"],
        "dtype": [torch.float32, torch.float64],
        "step": ["table", "row"],
    },
    is_comparable,
)
def test_a_model_trains_as_with_nn_embedding(tmp_path, storage, device, cached, name, step, dtype):
    torch.manual_seed(0)
    settings = {"optimizer": name, "step": step, "dtype": dtype}
    paged, paged_optimizer = trainable(tmp_path, storage + cached, device, **settings)
    dense, dense_optimizer = dense_twin(paged, name, dtype=dtype)
    heads = [nn.Linear(DIM, 1).to(device, dtype) for _ in range(2)]
    heads[1].load_state_dict(heads[0].state_dict())
    sides = []
    for table, optimizer, head in zip(
        (paged, dense), (paged_optimizer, dense_optimizer), heads, strict=True
    ):
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda turn: 1 / (1 + turn))
        head_optimizer = torch.optim.SGD(head.parameters(), lr=0.1)
        sides.append((table, head, [optimizer, head_optimizer], schedule))

    for ids, target in batches():
        losses = []
        for table, head, optimizers, schedule in sides:
            vectors = table(ids.to(device))
            assert vectors.shape == (*ids.shape, DIM)
            losses.append(((head(vectors.tanh()).squeeze(-1) - target.to(device)) ** 2).mean())
            for optimizer in optimizers:
                optimizer.zero_grad()
            losses[-1].backward()
            for optimizer in optimizers:
                optimizer.step()
            schedule.step()
        torch.testing.assert_close(*losses, rtol=0, atol=0)
    assert_equal(paged, dense)


@somewhere
@each_case("how", ["twice in a forward pass", "accumulated"])
def test_gradients_of_several_forward_passes_are_summed(tmp_path, storage, device, how):
    paged, paged_optimizer = trainable(tmp_path, storage, device, optimizer="Adam")
    dense, dense_optimizer = dense_twin(paged, "Adam")
    for ids, target in batches():  # both halves together have every row, some in both
        for table, optimizer in ((paged, paged_optimizer), (dense, dense_optimizer)):
            optimizer.zero_grad()
            losses = [
                (table(half.to(device)).tanh().sum(-1) * goal.to(device)).square().sum()
                for half, goal in zip(ids, target, strict=True)
            ]
            for loss in losses if how == "accumulated" else [sum(losses)]:
                loss.backward()
            optimizer.step()
    assert_equal(paged, dense)


@somewhere
@each_case("name, sparse", [("Adam", "SparseAdam"), ("SGD", "SGD")])
def test_rows_outside_the_batch_stay_as_with_sparse_adam(tmp_path, storage, device, name, sparse):
    paged, paged_optimizer = trainable(tmp_path, storage, device, optimizer=name)
    dense, _ = dense_twin(paged, sparse=True)
    dense_optimizer = getattr(torch.optim, sparse)(list(dense.parameters()), lr=0.1)
    for ids, target in batches(count=20):
        for table, optimizer in ((paged, paged_optimizer), (dense, dense_optimizer)):
            before = table.weight.clone()
            optimizer.zero_grad()
            vectors = table(ids[0, :4].to(device))
            (vectors.sum(-1) * target[0, :4].to(device)).sum().backward()
            optimizer.step()
            others = sorted(set(range(ROWS)) - set(ids[0, :4].tolist()))
            assert torch.equal(table.weight[others], before[others])
    torch.testing.assert_close(weights(paged), dense.weight.detach().cpu(), rtol=1e-5, atol=1e-6)


RULES = [
    {"padding_idx": 4},
    {"padding_idx": -1, "scale_grad_by_freq": True},
    {"max_norm": 1.5},
    {"max_norm": 2.0, "norm_type": 1.0, "padding_idx": 0},
]


@somewhere
@each_case("rules", RULES)
def test_rules_of_nn_embedding_hold(tmp_path, storage, device, rules):
    paged, paged_optimizer = trainable(tmp_path, storage, device, optimizer="Adamax", **rules)
    if "padding_idx" in rules:
        assert not weights(paged)[rules["padding_idx"]].any()
    dense, dense_optimizer = dense_twin(paged, "Adamax", **rules)
    for ids, target in batches():
        vectors = []
        for table, optimizer in ((paged, paged_optimizer), (dense, dense_optimizer)):
            vectors.append(table(ids.to(device)))
            optimizer.zero_grad()
            (vectors[-1].sum(-1) * target.to(device)).sum().backward()
            optimizer.step()
        assert torch.equal(*vectors)
    assert_equal(paged, dense)
    with torch.no_grad():  # the norm is limited in the table here too
        assert torch.equal(paged(ids.to(device)), dense(ids.to(device)))
    assert_equal(paged, dense)


@somewhere
def test_the_norm_of_a_single_row_is_that_of_its_weights(tmp_path, storage, device):
    """A record has the optimizer's state behind them."""
    paged, paged_optimizer = trainable(tmp_path, storage, device, "Adagrad", max_norm=2.0)
    dense, dense_optimizer = dense_twin(paged, "Adagrad", max_norm=2.0)
    for turn in range(6):
        for table, optimizer in ((paged, paged_optimizer), (dense, dense_optimizer)):
            optimizer.zero_grad()
            (table(torch.tensor([turn % 2], device=device)) ** 2).sum().backward()
            optimizer.step()
        assert_equal(paged, dense)


@somewhere
@pytest.mark.parametrize("step", ["table", "row"])
@each_case("kind", [RowwiseAdagrad, RowwiseAdam])
def test_states_of_one_number_a_row(tmp_path, storage, device, kind, step):
    args = {"weight_decay": 0.01, "lr": 0.1}
    paged = embedding(tmp_path, storage, device)
    paged_optimizer = PagedOptimizer(paged, kind, step=step, **args)
    dense, _ = dense_twin(paged)
    dense_optimizer = kind(dense.parameters(), **args)
    for ids, target in batches():
        for table, optimizer in ((paged, paged_optimizer), (dense, dense_optimizer)):
            optimizer.zero_grad()
            (table(ids.to(device)).tanh().sum(-1) * target.to(device)).sum().backward()
            optimizer.step()
    assert_equal(paged, dense)
    state = paged_optimizer.state_dict()["state"][0]
    (narrow,) = state.keys() & {"sum", "exp_avg_sq"}
    assert state[narrow].shape == (ROWS, 1)
    for wrong in ({"eps": -1.0}, {"lr": float("nan")}, {"betas": (0.9, 1.0)}):
        if kind is RowwiseAdam or "betas" not in wrong:
            with pytest.raises(ValueError, match=f"{next(iter(wrong))}=.* is out of range; give"):
                kind(dense.parameters(), **wrong)


BAGS = [
    {"mode": "sum"},
    {"mode": "mean"},
    {"mode": "max"},
    {"mode": "mean", "padding_idx": 2},
    {"mode": "max", "padding_idx": 2},
    {"mode": "sum", "max_norm": 1.0, "scale_grad_by_freq": True},
    {"mode": "sum", "include_last_offset": True},
]


def is_in_torch(rules, shape, **_):
    is_sum, last = rules["mode"] == "sum", rules.get("include_last_offset")
    return (shape != "weighted" or is_sum) and (shape != "rectangle" or not last)


@pairwise(
    {"storage, device": SOMEWHERE, "rules": BAGS, "shape": ["offsets", "rectangle", "weighted"]},
    is_in_torch,
)
def test_bags_train_as_with_nn_embedding_bag(tmp_path, storage, device, rules, shape):
    last = rules.get("include_last_offset")
    paged = embedding(tmp_path, storage, device, kind=PagedEmbeddingBag, **rules)
    paged_optimizer = PagedOptimizer(paged, "Adam", lr=0.1)
    dense, dense_optimizer = dense_twin(paged, "Adam", nn.EmbeddingBag, **rules)
    # On a GPU torch sums the gradients of bags in any order.
    tolerance = {"rtol": 0, "atol": 0 if device == "cpu" else 1e-4}
    offsets = torch.tensor([0, 3, 3, 25, 40] if last else [0, 3, 3, 25])  # one bag is empty
    for turn, (ids, _) in enumerate(batches()):
        factors, found, slopes = torch.linspace(-1, 2, ids.numel()), [], []
        for table, optimizer in ((paged, paged_optimizer), (dense, dense_optimizer)):
            given = [ids.to(device)]
            if shape != "rectangle":
                given = [ids.flatten().to(device), offsets.to(device)]
            if shape == "weighted":
                given.append(factors.to(device).requires_grad_())
            found.append(table(*given))
            optimizer.zero_grad()
            (found[-1].tanh() * (turn + 1)).sum().backward()
            optimizer.step()
            slopes.append(given[-1].grad)
        torch.testing.assert_close(*found, **tolerance)
        if shape == "weighted":
            torch.testing.assert_close(*slopes, **tolerance)
    torch.testing.assert_close(weights(paged), dense.weight.detach().cpu(), **tolerance)


def test_checkpoints_interchange_with_torch(tmp_path):
    """A run that changes sides in the middle equals one that does not."""

    def paged():
        table = PagedEmbedding(ROWS, DIM)
        return table, PagedOptimizer(table, "Adam", lr=0.1, betas=(0.8, 0.9))

    def dense():
        table = nn.Embedding(ROWS, DIM)
        return table, torch.optim.Adam(table.parameters(), lr=0.1, betas=(0.8, 0.9), foreach=False)

    def trained(turns, sides):
        torch.manual_seed(3)
        table, optimizer = dense()
        for (ids, target), make in zip(batches(turns), sides, strict=True):
            saved = tmp_path / "checkpoint.pt"
            torch.save([table.state_dict(), optimizer.state_dict()], saved)
            table, optimizer = make()
            modules, optimizers = torch.load(saved)
            table.load_state_dict(modules)
            optimizer.load_state_dict(optimizers)  # without state before the first step
            (table(ids).sum(-1) * target).square().sum().backward()
            optimizer.step()
        return table.state_dict()["weight"], optimizer.state_dict()["state"][0]

    weight, state = trained(4, [dense, paged, dense, paged])
    expected_weight, expected_state = trained(4, [dense] * 4)
    assert torch.equal(weight, expected_weight)
    for name, value in expected_state.items():
        assert torch.equal(state[name], value)


def test_a_checkpoint_of_sparse_adam_goes_on():
    """SparseAdam counts its steps by an int, not by a tensor."""
    dense = nn.Embedding(ROWS, DIM, sparse=True)
    torchs = torch.optim.SparseAdam(dense.parameters(), lr=0.1)
    table = PagedEmbedding(ROWS, DIM)
    optimizer = PagedOptimizer(table, "Adam", lr=0.1)
    for turn, (ids, target) in enumerate(batches(4)):
        if turn == 2:
            table.load_state_dict(dense.state_dict())
            optimizer.load_state_dict(torchs.state_dict())
        for module, steps in ((dense, torchs), (table, optimizer)):
            steps.zero_grad()
            (module(ids).sum(-1) * target).square().sum().backward()
            steps.step()
    torch.testing.assert_close(weights(table), dense.weight.detach())


@pytest.mark.parametrize("step", ["table", "row"])
@each_case("name", OPTIMIZERS)
def test_a_resumed_run_equals_one_that_went_on(tmp_path, name, step):
    """Use state dicts for float32; `save` also keeps the seed of bfloat16."""
    settings = {"optimizer": name, "step": step, "dtype": torch.float32}
    if step == "table":
        settings["dtype"] = torch.bfloat16
    first, first_optimizer = trainable(tmp_path, **settings)
    runs = [(first, first_optimizer)]
    for turn, (ids, target) in enumerate(batches(4, count=20)):
        if turn == 2:
            other, optimizer = trainable(tmp_path, **settings | {"seed": 5})
            if step == "table":
                first_optimizer.save(tmp_path / "saved", step=turn)
                optimizer.load(tmp_path / "saved")
            else:
                other.load_state_dict(first.state_dict())
                optimizer.load_state_dict(first_optimizer.state_dict())
            runs.append((other, optimizer))
        for table, optimizer in runs:
            (table(ids[:, :3]).sum(-1) * target[:, :3]).square().sum().backward()
            optimizer.step()
            optimizer.param_groups[0]["lr"] *= 0.5
    (left, _), (right, optimizer) = runs
    assert torch.equal(weights(left), weights(right))
    found = optimizer.state_dict()["state"].get(0, {})
    for name, value in first_optimizer.state_dict()["state"].get(0, {}).items():
        assert torch.equal(found[name], value)
    assert optimizer.param_groups[0]["lr"] == 0.1 * 0.5**4


@everywhere
@each_case("seed", [0, 1])
@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
def test_any_order_of_uses_equals_sparse_gradients_of_torch(tmp_path, storage, device, seed):
    """Passes, steps, writes and copies come in random order."""
    rng = np.random.default_rng(seed)
    torch.manual_seed(seed)
    settings = {"max_norm": 2.0, "dtype": torch.float64}  # as Adagrad enlarges what rounding leaves
    paged, paged_optimizer = trainable(tmp_path, storage, device, "Adagrad", **settings)
    dense, _ = dense_twin(paged, sparse=True, **settings)
    dense_optimizer = torch.optim.Adagrad(dense.parameters(), lr=0.1)
    waiting = []  # losses of both, of forward passes without a backward pass so far
    for _ in range(80):
        use = rng.choice("forward forward backward step zero put drop copy".split())
        # With max_norm, torch's own module takes no empty list of ids on a GPU.
        fewest = 1 if device == "cuda" else 0
        ids = torch.from_numpy(rng.integers(0, ROWS, rng.integers(fewest, 6))).to(device)
        if use == "forward":
            factor = torch.randn(len(ids), 1).to(ids.device)
            waiting.append([(each(ids).tanh() * factor).sum() for each in (paged, dense)])
        elif use in ("backward", "drop") and waiting:
            losses = waiting.pop(rng.integers(len(waiting)))
            for loss in losses if use == "backward" else []:
                loss.backward()
        elif use == "step":
            paged_optimizer.step()
            dense_optimizer.step()
            dense_optimizer.zero_grad()  # a paged step consumes the gradients
        elif use == "zero":
            paged_optimizer.zero_grad()
            dense_optimizer.zero_grad()
        elif use == "put":
            ids = ids.unique()
            values = torch.randn(len(ids), DIM, dtype=torch.float64).to(ids.device)
            paged.store.put(ids, values)
            dense.weight.data[ids] = values
        elif use == "copy" and storage != "mmap" and dense.weight.grad is None:
            waiting.clear()
            paged, paged_optimizer = copy.deepcopy((paged, paged_optimizer))
        torch.testing.assert_close(weights(paged), dense.weight.detach().cpu())
