"""Paged embeddings are modules like the others of torch."""

import copy
import functools
import gc
import io
import pickle
import sys
import time
import weakref
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.support.each_case import each_case
from tests.support.embeddings import (
    DIM,
    ROWS,
    batches,
    embedding,
    optimizer_state,
    places,
    somewhere,
    train_step,
    trainable,
    weights,
)
from tests.support.pairwise import pairwise
from w2v import PagedEmbedding, PagedEmbeddingBag, PagedOptimizer, RowStore
from w2v.config import OPTIMIZERS
from w2v.rows import cache
from w2v.rows import group as rows_group
from w2v.rows.cache import RowCache
from w2v.rows.lookup import look_up, readable
from w2v.rows.ops import Span, are_spaced
from w2v.rows.optimizer import look_up_batch
from w2v.rows.optimizer import optimizer as make_optimizer
from w2v.rows.table import normal
from w2v.system.files import sealed, unsealed


@somewhere
def test_equal_ids_count_together_and_other_rows_stay(tmp_path, storage, device):
    table, optimizer = trainable(tmp_path, storage, device, optimizer="SGD", lr=0.5)
    before = weights(table)
    table([[4, 1, 4], [4, 7, 4]]).sum().backward()
    optimizer.step()
    optimizer.step()  # nothing waits any more
    expected = before - 0.5 * torch.tensor([0, 1, 0, 0, 4, 0, 0, 1, 0])[:, None]
    torch.testing.assert_close(weights(table), expected, rtol=0, atol=0)


@somewhere
@each_case("step", ["table", "row"])
def test_without_a_backward_pass_a_step_changes_nothing(tmp_path, storage, device, step):
    table, optimizer = trainable(tmp_path, storage, device, optimizer="NAdam", step=step)
    records, state = table.store.table.records_VR.clone(), optimizer_state(table)
    dropped = table([0, 3])
    with torch.no_grad():
        assert not table([1]).requires_grad
    table.eval()([2])
    assert dropped.requires_grad and table._table.parameter.grad is None
    optimizer.step()
    table.store.flush()
    assert torch.equal(table.store.table.records_VR, records)
    assert optimizer_state(table).keys() == state.keys()
    for name, value in optimizer_state(table).items():
        assert torch.equal(value, state[name])


@somewhere
def test_a_model_may_be_used_before_it_is_trained(tmp_path, storage, device):
    table = embedding(tmp_path, storage, device, max_norm=1.0)
    with torch.inference_mode():
        before = table(range(ROWS)).clone().cpu()
    optimizer = PagedOptimizer(table, "SGD", lr=1.0)
    table([2]).sum().backward()
    optimizer.step()
    expected = before - torch.eye(ROWS)[2][:, None]
    torch.testing.assert_close(weights(table), expected)


def test_another_optimizer_begins_with_a_new_state(tmp_path):
    table, first = trainable(tmp_path, optimizer="Adam")
    train_step(table, first, *next(batches()))
    before = weights(table)
    PagedOptimizer(table, "Adam", lr=0.1)
    assert not any(value.any() for value in optimizer_state(table).values())
    second = PagedOptimizer(table, "Adamax", lr=0.1)
    assert torch.equal(weights(table), before)
    assert list(second.state_dict()["state"][0]) == ["exp_avg", "exp_inf", "step"]
    table([1]).sum().backward()
    with pytest.raises(ValueError, match="another PagedOptimizer was made for a table of this one"):
        first.step()
    second.step()


@somewhere
def test_there_may_be_no_ids(tmp_path, storage, device):
    table, optimizer = trainable(tmp_path, storage, device, max_norm=1.0, padding_idx=0)
    for ids in (torch.empty(0, 2, dtype=torch.int64), []):
        vectors = table(ids)
        assert vectors.shape == (*np.shape(ids), DIM)
        vectors.sum().backward()
        optimizer.step()
    bags = PagedEmbeddingBag(ROWS, DIM)
    assert bags([], torch.tensor([0, 0])).tolist() == [[0] * DIM] * 2


@somewhere
@each_case("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_tables_learn(tmp_path, storage, device, dtype):
    table, optimizer = trainable(tmp_path, storage, device, dtype=dtype)
    target = torch.randn(ROWS, DIM).to(device)
    for _ in range(120):
        vectors = table(range(ROWS))
        assert vectors.dtype == torch.float32
        ((vectors - target) ** 2).sum().backward()
        optimizer.step()
    assert (weights(table).float() - target.cpu()).abs().max() < 0.1


@each_case("name", OPTIMIZERS)
def test_every_optimizer_steps_16_bit_rows_in_float32(tmp_path, name):
    def trained(dtype):
        table, optimizer = trainable(tmp_path, optimizer=name, lr=0.05, dtype=dtype)
        table.weight.data.fill_(0.5)
        for step in range(3):
            (table(range(ROWS)).sum() * (1.0 + step)).backward()
            optimizer.step()
        return table

    wide, narrow = trained(torch.float32), trained(torch.bfloat16)
    torch.testing.assert_close(weights(narrow).float(), weights(wide), rtol=0.03, atol=0.01)
    scalars = wide.store.table.scalars
    assert {key: narrow.store.table.scalars[key] for key in scalars} == scalars


def test_the_optimizer_steps_the_tables_of_a_model_by_groups():
    model = nn.ModuleDict({"a": PagedEmbedding(ROWS, DIM), "bag": PagedEmbeddingBag(ROWS, DIM)})
    model["frozen"] = PagedEmbedding.from_pretrained(torch.ones(ROWS, DIM))
    model["head"] = nn.Linear(DIM, 1)
    assert len(list(model.parameters())) == 5
    (group,) = PagedOptimizer(model, torch.optim.Adagrad, lr=0.1).param_groups
    assert len(group["params"]) == 3
    assert not model["frozen"]._table.has_state
    groups = [{"params": model["a"], "lr": 1.0}, {"params": [model["bag"]], "weight_decay": 0.5}]
    optimizer = PagedOptimizer(groups, "SGD", lr=0.25)
    before = {name: model[name].weight.clone() for name in ("a", "bag")}

    def closure():
        optimizer.zero_grad()
        loss = (model["a"](range(ROWS)) + model["bag"](torch.arange(ROWS)[:, None])).sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).requires_grad
    assert torch.equal(model["a"].weight, before["a"] - 1)
    expected = before["bag"] - 0.25 * (1 + 0.5 * before["bag"])
    torch.testing.assert_close(model["bag"].weight, expected)


def test_a_table_may_change_between_forward_pass_and_step(tmp_path):
    table, optimizer = trainable(tmp_path, optimizer="SGD", lr=1.0)
    before = weights(table)
    first, second = table([1, 2]), table([2, 3])
    first.sum().backward()
    optimizer.step()
    second.sum().backward()  # of rows as they were before that step
    table.store.put([3], torch.full((1, DIM), 7.0))
    optimizer.step()
    expected = before - torch.tensor([0, 1, 2, 0, 0, 0, 0, 0, 0])[:, None]
    expected[3] = 7.0 - 1
    torch.testing.assert_close(weights(table), expected)


def test_gradients_may_be_clipped_and_dropped(tmp_path):
    table, optimizer = trainable(tmp_path, optimizer="SGD", lr=1.0)
    before = weights(table)
    parameters = optimizer.param_groups[0]["params"]
    loss = table([1, 2]).sum()
    loss.backward(retain_graph=True)
    loss.backward()
    table([2]).sum().backward()
    norm = nn.utils.clip_grad_norm_(parameters, 1.0)
    slopes = torch.tensor([0, 2.0, 3, 0, 0, 0, 0, 0, 0])[:, None].expand(-1, DIM)
    torch.testing.assert_close(norm, slopes.norm())
    optimizer.step()
    torch.testing.assert_close(weights(table), before - slopes / norm)
    after = weights(table)
    for zero_grad in (optimizer.zero_grad, table.zero_grad):
        table([1]).sum().backward()
        zero_grad()
        optimizer.step()
    assert torch.equal(weights(table), after)


def test_gradient_scaler_scales_back_and_skips_infinite_gradients(tmp_path):
    table, optimizer = trainable(tmp_path, optimizer="Adam")
    twin, twin_optimizer = trainable(tmp_path, optimizer="Adam")
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for turn, (ids, target) in enumerate(batches()):
        factor = float("inf") if turn == 2 else 1.0
        optimizer.zero_grad()
        scaler.scale((table(ids).sum(-1) * target * factor).sum()).backward()
        if turn % 2:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        if turn != 2:
            train_step(twin, twin_optimizer, ids, target)
    assert torch.equal(weights(table), weights(twin))


@pytest.mark.filterwarnings("ignore:.*fork")
def test_a_training_loop_with_autocast_workers_and_compiled_layers(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(embedding(tmp_path), nn.Linear(DIM, 1))
    compiled = torch.compile(model, backend="eager")
    sparse = PagedOptimizer(model, "Adam", lr=0.3)
    dense = torch.optim.AdamW(model.parameters(), lr=0.03)
    schedule = torch.optim.lr_scheduler.OneCycleLR(dense, 0.03, total_steps=60)
    sparse_schedule = torch.optim.lr_scheduler.StepLR(sparse, 20, 0.5)
    sparse.step = torch.compile(sparse.step, backend="eager")
    ids = torch.arange(ROWS).repeat(20)
    loader = DataLoader(TensorDataset(ids, ids % 2), batch_size=ROWS, num_workers=1)
    losses = []
    for _ in range(3):
        for batch, label in loader:
            with torch.autocast("cpu", torch.bfloat16):
                score = compiled(batch).squeeze(-1)
            assert score.dtype == torch.bfloat16
            loss = nn.functional.binary_cross_entropy_with_logits(score.float(), label.float())
            sparse.zero_grad()
            dense.zero_grad()
            loss.backward()
            sparse.step()
            dense.step()
            schedule.step()
            sparse_schedule.step()
            losses.append(float(loss.detach()))
    assert losses[-1] < 0.1 < losses[0]
    assert sparse.param_groups[0]["lr"] == 0.3 * 0.5**3


def test_schedulers_may_change_betas(tmp_path):
    table, optimizer = trainable(tmp_path, optimizer="Adam")
    dense = nn.Embedding.from_pretrained(weights(table), freeze=False)
    dense_optimizer = torch.optim.Adam(dense.parameters(), lr=0.1, foreach=False)
    for ids, target in batches():
        for module, steps in ((table, optimizer), (dense, dense_optimizer)):
            steps.param_groups[0]["betas"] = (float(target[0, 0].sigmoid()), 0.9)
            train_step(module, steps, ids, target)
    assert torch.equal(weights(table), dense.weight)


def test_threads_share_an_embedding(tmp_path):
    table, optimizer = trainable(tmp_path, optimizer="SGD", lr=1.0)
    before = weights(table)

    def train(row):
        for _ in range(30):
            (table([row]) * (row + 1)).sum().backward()
            optimizer.step()

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # so that threads meet inside a step
    try:
        with ThreadPoolExecutor(ROWS) as pool:
            list(pool.map(train, range(ROWS)))
    finally:
        sys.setswitchinterval(interval)
    expected = before - 30 * torch.arange(1, ROWS + 1)[:, None]
    torch.testing.assert_close(weights(table), expected)


def test_threads_may_be_the_first_to_use_a_table():
    calls = []

    def init(rows_n):
        calls.append(len(rows_n))
        time.sleep(0.1)  # so that the others come
        return torch.ones(len(rows_n), DIM)

    table = PagedEmbedding(ROWS, DIM, init=init)
    with ThreadPoolExecutor(4) as pool:
        vectors = list(pool.map(table, [torch.arange(ROWS)] * 4))
    assert calls == [ROWS] and torch.equal(torch.stack(vectors), torch.ones(4, ROWS, DIM))


def saved_and_loaded(pair):
    """Return what torch.load makes of what torch.save has written."""
    file = io.BytesIO()
    torch.save(pair, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("state_storage", [None, "cpu"])
@each_case(
    "duplicate", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair)), saved_and_loaded]
)
def test_a_copy_trains_on_by_itself(tmp_path, duplicate, state_storage):
    settings = {"init": normal(DIM, 1.0, 3), "state_storage": state_storage}  # not picklable
    pair = trainable(tmp_path, optimizer="NAdam", **settings)
    train_step(*pair, *next(batches()))
    other = duplicate(pair)
    untouched = duplicate(pair[0])
    assert isinstance(repr(other[0]), str) and len(list(other[0].parameters())) == 1
    for each in (pair, other):
        train_step(*each, *list(batches())[1])
    assert torch.equal(weights(pair[0]), weights(other[0]))
    assert not torch.equal(weights(pair[0]), weights(untouched))
    before = weights(untouched)
    with pytest.warns(UserWarning, match="no PagedOptimizer steps this PagedEmbedding"):
        train_step(untouched, torch.optim.SGD(untouched.parameters(), 0.1), *next(batches()))
    assert not torch.equal(weights(untouched), before)


def test_a_table_that_is_made_in_inference_mode_trains(tmp_path):
    table, optimizer = trainable(tmp_path, optimizer="Adam")
    with torch.inference_mode():
        pair = copy.deepcopy((table, optimizer))
        table.grow(ROWS + 1)
        used = embedding(tmp_path)
        used([1])
        two = embedding(tmp_path), embedding(tmp_path)
        steps = PagedOptimizer(used, "Adam", lr=0.1), PagedOptimizer(two, "Adam", lr=0.1)
    (ids, target), *_ = batches(1)
    for each in (table, optimizer), pair, (used, steps[0]), (two[1], steps[1]):
        before = weights(each[0])
        train_step(*each, ids, target)
        assert not torch.equal(weights(each[0]), before)


def test_a_model_may_be_made_within_the_meta_device():
    with torch.device("meta"):
        model = nn.Sequential(PagedEmbedding(ROWS, DIM), nn.Linear(DIM, 1))
    model[1].to_empty(device="cpu")
    assert model([1]).shape == (1, 1)


@each_case("dtype", [torch.float32, torch.bfloat16])
def test_tables_and_ids_are_not_on_the_default_device(tmp_path, dtype):
    """The meta device stands for the GPU of torch.set_default_device."""

    def trained(name):
        table, optimizer = trainable(tmp_path, "cpu cached", optimizer="NAdam", dtype=dtype)
        every = torch.arange(ROWS, device="cpu")
        for (ids,) in optimizer.pages([[every], [every[2:5]]], 0):
            (table(ids).sum() + table([1]).sum()).backward()
            table(ids).square().sum().backward()
            optimizer.step()
        table.store.put([4], np.ones((1, DIM)))
        table.store.save(tmp_path / f"{name}.npy")
        table.grow(ROWS + 1)
        optimizer.load_state_dict(copy.deepcopy(optimizer).state_dict())
        return copy.deepcopy(table)

    plain = trained("plain")
    with torch.device("meta"):
        other = trained("other")
        assert PagedEmbedding.from_pretrained(np.ones((2, 2)))([1]).device.type == "cpu"
        assert PagedEmbedding(ROWS, DIM, init=np.ones((ROWS, DIM)))([1]).device.type == "cpu"
    assert torch.equal(plain.weight, other.weight)
    assert np.array_equal(np.load(tmp_path / "plain.npy"), np.load(tmp_path / "other.npy"))


def test_a_checkpoint_has_what_schedulers_change(tmp_path):
    def made():
        table, optimizer = trainable(tmp_path, optimizer="NAdam")
        return table, optimizer, torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.3, total_steps=9)

    def train(table, optimizer, schedule, batches):
        for batch in batches:
            train_step(table, optimizer, *batch)
            schedule.step()

    first = made()
    train(*first, list(batches())[:2])
    first[1].save(tmp_path / "saved", step=np.int64(2))
    resumed = made()
    assert resumed[1].load(tmp_path / "saved") == 2
    (saved,), (loaded,) = (run[1].param_groups for run in (first, resumed))
    assert all(loaded[name] == saved[name] for name in saved.keys() - {"params"})
    resumed[2].load_state_dict(first[2].state_dict())
    for run in (first, resumed):
        train(*run, list(batches())[2:])
    assert torch.equal(weights(first[0]), weights(resumed[0]))
    (manifest,) = (tmp_path / "saved").glob("*/manifest.json")
    content = unsealed(manifest.read_text())
    for key in "step", "groups":  # whose checksum is right
        manifest.write_text(sealed(content | {key: None}))
        with pytest.raises(ValueError, match="manifest.json is damaged"):
            resumed[1].load(tmp_path / "saved")


def test_a_state_dict_has_the_weight_alone():
    model = nn.Sequential(PagedEmbedding(ROWS, DIM), nn.Linear(DIM, 1))
    PagedOptimizer(model, "Adam", lr=0.1)
    weight = model.state_dict()["0.weight"]
    assert weight.is_contiguous() and weight.untyped_storage().nbytes() == ROWS * DIM * 4
    other = nn.Sequential(nn.Embedding(ROWS, DIM), nn.Linear(DIM, 1))
    assert other.state_dict().keys() == model.state_dict().keys()
    model.load_state_dict(other.state_dict())
    assert torch.equal(model[0].weight, other[0].weight)


ARGUMENTS = {
    "Adagrad": {"initial_accumulator_value": 0.5},
    "ASGD": {"t0": 1.0},
    "RMSprop": {"momentum": 0.5, "centered": True},
    "SGD": {"momentum": 0.5},
}


def exchanged(name, trained_steps):
    """Return a paged and a dense table, of which rows 0 to 2 are trained."""
    args = {"lr": 0.1} | ARGUMENTS.get(name, {})
    table, dense = PagedEmbedding(ROWS, DIM, seed=1), nn.Embedding(ROWS, DIM)
    paged = PagedOptimizer(table, name, **args)
    optimizer = getattr(torch.optim, name)(dense.parameters(), **args)
    dense.weight.data.copy_(table.weight)
    for step in range(trained_steps):
        for module, its_optimizer in ((table, paged), (dense, optimizer)):
            step_rows(module, its_optimizer, [0, 1, 2], step)
    return table, paged, dense, optimizer


def step_rows(module, optimizer, ids, number):
    optimizer.zero_grad()
    targets = torch.randn(len(ids), DIM, generator=torch.Generator().manual_seed(number))
    (module(torch.tensor(ids)) * targets).sum().backward()
    optimizer.step()
    optimizer.param_groups[0]["lr"] *= 0.5


@pytest.mark.parametrize("trained_steps", [0, 3])
@each_case("name", OPTIMIZERS)
def test_state_exchanged_with_torch_gives_the_same_next_steps(name, trained_steps):
    """When state is exchanged, rows from 3 on have made no step."""
    for to_torch in (True, False):
        table, paged, dense, optimizer = exchanged(name, trained_steps)
        if to_torch:
            dense.load_state_dict(table.state_dict())
            optimizer.load_state_dict(paged.state_dict())
        else:
            table.load_state_dict(dense.state_dict())
            paged.load_state_dict(optimizer.state_dict())
        for step in range(3):
            for module, its_optimizer in ((table, paged), (dense, optimizer)):
                step_rows(module, its_optimizer, list(range(ROWS)), 10 + step)
            torch.testing.assert_close(table.weight, dense.weight.data, rtol=0, atol=0)
        states = paged.state_dict()["state"], optimizer.state_dict()["state"]
        assert states[0].get(0, {}).keys() == states[1][0].keys()
        for key, value in states[1][0].items():
            torch.testing.assert_close(states[0][0][key], value, rtol=0, atol=0)


def test_a_bfloat16_row_is_rounded_alike_beside_other_tables():
    rounded = []
    for before in (0, 3):  # tables in the same memory
        tables = [
            PagedEmbedding(ROWS, DIM, dtype=torch.bfloat16, seed=1) for _ in range(before + 1)
        ]
        optimizer = PagedOptimizer(tables, "SGD", lr=0.1)
        tables[-1]([1, 4]).square().sum().backward()
        optimizer.step()
        rounded.append(weights(tables[-1]))
    assert torch.equal(*rounded)


def test_state_of_a_bfloat16_table_has_the_names_of_torch():
    table = PagedEmbedding(ROWS, DIM, dtype=torch.bfloat16)
    optimizer = PagedOptimizer(table, "NAdam", lr=0.1)
    step_rows(table, optimizer, [0, 1], 0)
    expected = {"step", "mu_product", "exp_avg", "exp_avg_sq"}
    assert optimizer.state_dict()["state"][0].keys() == expected
    optimizer.load_state_dict(optimizer.state_dict())


def test_first_weights():
    torch.manual_seed(4)
    first, second = PagedEmbedding(300, 50), PagedEmbedding(300, 50)
    torch.manual_seed(4)
    again = PagedEmbedding(300, 50)
    assert torch.equal(first.weight, again.weight)
    assert not torch.equal(first.weight, second.weight)
    assert abs(float(first.weight.std()) - 1) < 0.02
    seeded = [PagedEmbedding(ROWS, DIM, seed=seed).weight for seed in (3, np.int64(3))]
    assert torch.equal(*seeded)
    given = np.random.default_rng(0).normal(size=(ROWS, DIM))
    assert PagedEmbedding.from_pretrained(given).weight.dtype == torch.float64
    assert np.array_equal(PagedEmbedding.from_pretrained(given, padding_idx=1).weight, given)
    padded = PagedEmbedding(ROWS, DIM, 2, init=normal(DIM, 1.0, 3))
    assert padded.weight.any(dim=1).tolist() == [row != 2 for row in range(ROWS)]
    nn.init.constant_(padded.weight, 3.0)
    assert padded([2]).tolist() == [[3.0] * DIM]


@somewhere
def test_reset_parameters_draws_weights_anew(tmp_path, storage, device):
    settings = {"optimizer": "Adam", "padding_idx": 2, "init": torch.ones(ROWS, DIM)}
    table, optimizer = trainable(tmp_path, storage, device, **settings)
    train_step(table, optimizer, *next(batches()))
    state = optimizer_state(table)
    torch.manual_seed(4)
    expected = PagedEmbedding(ROWS, DIM, 2).weight
    torch.manual_seed(4)
    table.reset_parameters()
    torch.testing.assert_close(weights(table), expected)
    assert not weights(table)[2].any()
    assert all(torch.equal(value, state[name]) for name, value in optimizer_state(table).items())
    table([1]).sum().backward()
    optimizer.step()
    assert not torch.equal(weights(table)[1], expected[1])


def test_reset_parameters_of_a_table_that_is_not_open(tmp_path):
    weights(embedding(tmp_path, "mmap"))
    drawn = []
    for storage in ("mmap", "cpu"):  # the file would be continued otherwise
        torch.manual_seed(4)
        table = embedding(tmp_path, storage)
        table.reset_parameters()
        PagedOptimizer(table, "SGD", lr=0.1)
        drawn.append(weights(table))
    torch.manual_seed(4)
    assert torch.equal(drawn[0], PagedEmbedding(ROWS, DIM).weight)
    assert torch.equal(drawn[1], drawn[0])


@pytest.mark.parametrize(
    "kind, dense, rules, last, more",
    [
        (PagedEmbedding, nn.Embedding, (2, 1.0, 1.0, True, False), (), (None, False)),
        (PagedEmbeddingBag, nn.EmbeddingBag, (1.0, 1.0, True, "sum", True), (True, 2), (None,)),
    ],
)
def test_arguments_are_named_and_ordered_as_in_torch(kind, dense, rules, last, more):
    given = torch.arange(1.0, 1 + ROWS * DIM).view(ROWS, DIM)
    ids = torch.tensor([[4, 1], [2, 4]])
    pretrained = [
        each.from_pretrained(given.clone(), True, *rules, *last) for each in (kind, dense)
    ]
    every = (*rules, *more, *last, "cpu", torch.float64)
    made = [each(ROWS, DIM, *every) for each in (kind, dense)]
    made[0].load_state_dict(made[1].state_dict())
    for mine, theirs in (pretrained, made):
        torch.testing.assert_close(mine(input=ids), theirs(input=ids))
        shown = theirs.extra_repr().replace(", sparse=True", "")
        expected = f"{shown}, storage='cpu', device='cpu'"  # bags of torch end with padding_idx
        assert sorted(mine.extra_repr().split(", ")) == sorted(expected.split(", "))
    with pytest.raises(TypeError, match="unexpected keyword argument 'indices'"):
        made[0](indices=ids)


def test_all_modules_of_a_model_can_be_frozen():
    model = nn.Sequential(PagedEmbedding(ROWS, DIM), nn.Linear(DIM, 1))
    optimizer = PagedOptimizer(model, "SGD", lr=0.1)
    model.apply(lambda module: module.requires_grad_(False))
    assert not model([1]).requires_grad
    model.apply(lambda module: module.requires_grad_(True))
    before = weights(model[0])
    model([1]).sum().backward()
    optimizer.step()
    assert not torch.equal(weights(model[0]), before)


def test_pretrained_rows_are_frozen_unless_asked(tmp_path):
    frozen = PagedEmbeddingBag.from_pretrained(torch.ones(ROWS, DIM), mode="sum")
    assert not frozen([[1, 2]]).requires_grad
    optimizer = PagedOptimizer(frozen.requires_grad_(), "SGD", lr=1.0)
    frozen([[1, 1]]).sum().backward()
    optimizer.step()
    assert weights(frozen)[:3, 0].tolist() == [1, -1, 1]


@somewhere
@each_case("step", ["table", "row"])
def test_a_table_grows(tmp_path, storage, device, step):
    if storage == "mmap":
        table = embedding(tmp_path, storage, device)
        with pytest.raises(ValueError, match="a file cannot grow; load its rows"):
            table.grow(ROWS + 1)
        return
    table, optimizer = trainable(tmp_path, storage, device, optimizer="Rprop", step=step)
    whole, whole_optimizer = trainable(
        tmp_path, storage, device, rows=ROWS + 5, optimizer="Rprop", step=step
    )
    for ids, target in batches(2):
        train_step(table, optimizer, ids, target)
        train_step(whole, whole_optimizer, ids, target)
    waiting = table([0, 3])
    table.grow(ROWS + 5)
    for each, steps in ((table, optimizer), (whole, whole_optimizer)):
        (
            each([ROWS, ROWS + 4]).sum() - (waiting if each is table else each([0, 3])).sum()
        ).backward()
        steps.step()
    assert torch.equal(weights(table), weights(whole))
    state = whole_optimizer.state_dict()["state"][0]
    for name, value in optimizer.state_dict()["state"][0].items():
        assert torch.equal(value, state[name])
    table.grow(ROWS + 6, init=lambda rows: torch.full((len(rows), DIM), 2.0))
    assert weights(table)[-1].tolist() == [2.0] * DIM


def test_two_runs_on_one_file_train_as_one_run_in_memory(tmp_path):
    settings = {"optimizer": "NAdam", "dtype": torch.bfloat16, "seed": 3}
    in_memory = trainable(tmp_path, **settings)
    for turn, batch in enumerate(batches(4)):
        if turn in (0, 2):
            in_file = None  # the file is open once at a time
            in_file = trainable(tmp_path, "mmap", **settings)
        train_step(*in_memory, *batch)
        train_step(*in_file, *batch)
        if turn == 1:
            in_file[0].store.flush()
    tables = [table.store.table for table, _ in (in_memory, in_file)]
    assert torch.equal(tables[0].records_VR, tables[1].records_VR)
    assert tables[0].scalars == tables[1].scalars


def test_a_new_optimizer_forgets_the_state_of_an_earlier_one(tmp_path):
    trained = []
    for storage in ("mmap", "cpu"):
        table, optimizer = trainable(tmp_path, storage, optimizer="Rprop")
        for batch in batches(4):
            train_step(table, optimizer, *batch)
            optimizer = PagedOptimizer(table, "Rprop", lr=0.1)
        trained.append(weights(table))
        table.store.flush()
        del table, optimizer
        (tmp_path / "embedding").unlink(missing_ok=True)
        table, _ = trainable(tmp_path, storage, optimizer="Adagrad", dtype=torch.float64)
        PagedOptimizer(table, "Adagrad", lr=0.1, initial_accumulator_value=0.3)
        assert optimizer_state(table)["sum"].eq(0.3).all()
    assert torch.equal(*trained)
    tables = [embedding(tmp_path) for _ in range(2)]
    for _ in range(2):
        PagedOptimizer(tables, "Adam", lr=0.1)
    assert tables[0].store.group is tables[1].store.group


@each_case("share", [0, "20%", "100%"])
def test_cached_rows_of_a_file_are_written_when_its_table_goes(tmp_path, share):
    def open_file():
        table = PagedEmbedding(
            ROWS, DIM, storage="mmap", path=tmp_path / "rows", gpu_bytes=share, seed=1
        )
        return table, PagedOptimizer(table, "SGD", lr=1.0)

    table, optimizer = open_file()
    expected = weights(table).clone()
    table([3]).sum().backward()
    optimizer.step()
    expected[3] -= 1
    del table, optimizer
    gc.collect()
    assert torch.equal(weights(open_file()[0]), expected)


@somewhere
@each_case("dtype", [torch.float32, torch.bfloat16])
def test_save_and_load(tmp_path, storage, device, dtype):
    table, optimizer = trainable(tmp_path, storage, device, optimizer="Adam", dtype=dtype)
    for batch in batches(2):
        train_step(table, optimizer, *batch)
    npy, safetensors = tmp_path / "x.npy", tmp_path / "x.safetensors"
    table.store.save(npy)
    table.store.save(safetensors)
    assert safetensors.stat().st_mode == npy.stat().st_mode
    assert not list(tmp_path.glob("*.part"))
    assert np.array_equal(np.load(npy), weights(table).float().numpy())
    other, _ = trainable(tmp_path, "cpu", device, optimizer="Adam", dtype=dtype, seed=2)
    other.store.load(npy)
    assert torch.equal(weights(other), weights(table))
    assert not other.store.table["exp_avg"].any()
    other.store.load(safetensors)
    assert torch.equal(other.store.table.records_VR.cpu(), table.store.table.records_VR.cpu())
    assert other.store.table.scalars == table.store.table.scalars


@pytest.mark.gpu
@pytest.mark.parametrize("storage", ["cpu", "pinned"])
def test_modules_move_between_devices(tmp_path, storage):
    model = nn.Sequential(embedding(tmp_path, storage, "cpu"), nn.Linear(DIM, 1))
    optimizer = PagedOptimizer(model, "Adam", lr=0.1)
    for device in ("cuda", "cpu"):
        model.to(device)
        loss = model([1, 2]).sum()
        assert loss.device.type == device
        loss.backward()
        optimizer.step()


MANY = 60  # rows of tables whose caches are too small for them


def two_tables(gpu_bytes, device="cpu", name="Adam", fused=False, step="table", **settings):
    """Return two tables, one of bags, and their optimizer."""
    storage = "pinned" if device == "cuda" else "cpu"
    sizes = {"storage": storage, "device": device, "gpu_bytes": gpu_bytes, "seed": 1} | settings
    tables = PagedEmbedding(MANY, DIM, **sizes), PagedEmbeddingBag(2 * MANY, DIM, **sizes)
    return tables, PagedOptimizer(tables, name, lr=0.1, fused=fused, step=step)


def skewed(steps, batch=8, seed=5):
    """Yield ids of both tables; some rows are in most batches."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        share = torch.rand(2, batch, generator=generator) ** 3
        ids = (share * torch.tensor([[MANY], [2 * MANY]])).long()
        yield {"user": ids[0], "tags": ids[1].view(-1, 2)}


def train_both(tables, optimizer, batches, between=None):
    """Step both tables for each batch; `between` comes after the forward pass."""
    for turn, batch in enumerate(batches):
        optimizer.zero_grad()
        loss = sum(t(ids).square().sum() for t, ids in zip(tables, batch.values(), strict=True))
        if between:
            between(turn, tables)
        loss.backward()
        optimizer.step()


def give_pages_room(tables, monkeypatch):
    """Let pages of any size have room on the GPU, and tables of a CPU too."""
    monkeypatch.setattr(rows_group, "PAGE_BYTES", 0)
    for group in {table.store.group for table in tables}:
        if group.device.type == "cpu":
            monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (1 << 20, 1 << 20))
            group.pages_only = True


def all_records(tables):
    for table in tables:
        table.store.flush()
    return [table.store.table.records_VR.cpu() for table in tables]


KEYS = ["user", "tags"]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
devices = pytest.mark.parametrize("device", DEVICES)
CACHE_SETTINGS = [
    {},
    {"name": "Adagrad"},
    {"dtype": torch.bfloat16},
    {"state_storage": "cpu"},
    {"max_norm": 1.0},
    {"padding_idx": 3},
]


@devices
@each_case("settings", CACHE_SETTINGS)
def test_a_cache_changes_no_bit(device, settings, monkeypatch):
    plain, plain_optimizer = two_tables(0, device, **settings)
    train_both(plain, plain_optimizer, skewed(20))
    for share, ahead in ("12%", 0), ("12%", 5), ("25%", 1), ("25%", 2), ("100%", 2), (0, 2):
        tables, optimizer = two_tables(share, device, **settings)
        if not share:
            give_pages_room(tables, monkeypatch)
        batches = optimizer.pages(skewed(20), KEYS, ahead) if ahead else skewed(20)
        train_both(tables, optimizer, batches)
        assert all(map(torch.equal, all_records(tables), all_records(plain))), (share, ahead)
        stats = tables[1].store.stats
        assert 0 < stats.rows_read < stats.rows_used


@devices
@each_case("ahead, plans", [(1, 12), (3, 12), (4, 6), (6, 4)])
def test_batches_that_move_together_take_one_plan(device, ahead, plans, monkeypatch):
    counts = []
    prefetch = RowCache.prefetch
    monkeypatch.setattr(
        RowCache, "prefetch", lambda its, *given: (counts.append(1), prefetch(its, *given))
    )
    tables, optimizer = two_tables("60%", device)
    train_both(tables, optimizer, optimizer.pages(skewed(12), KEYS, ahead))
    assert len(counts) == plans * len(tables[0].store.group.caches)


def other_uses(turn, tables):
    """Use a table otherwise between the forward pass and the step of a page."""
    table = tables[turn % 2]
    match turn % 7:
        case 0:
            with torch.no_grad():
                table((torch.arange(turn, turn + 9) % MANY)[None])
        case 1:
            table.weight.data[turn % MANY] += 1
        case 2:
            table.store.put([turn, 2], torch.full((2, DIM), 0.5))
        case 3:
            table(torch.arange(MANY)[None])  # more rows than the cache holds
        case 4:
            table([[turn, 3]]).sum().backward()  # a gradient of further rows
        case 5:
            table.state_dict()


@devices
@pytest.mark.filterwarnings("ignore:the GPU has room")
@pytest.mark.parametrize("share", ["14%", "60%"])
def test_other_uses_of_a_cached_table_change_no_bit(device, share, monkeypatch):
    runs = [two_tables(size, device) for size in (0, share, share, 0)]
    for run, (tables, optimizer) in enumerate(runs):
        if run == 3:
            give_pages_room(tables, monkeypatch)
        batches = optimizer.pages(skewed(50), KEYS, ahead=4) if run >= 2 else skewed(50)
        train_both(tables, optimizer, batches, between=other_uses)
    expected = all_records(runs[0][0])
    for tables, _ in runs[1:]:
        assert all(map(torch.equal, all_records(tables), expected))


def test_views_that_the_end_of_pages_would_overwrite_are_noticed(monkeypatch):
    tables, optimizer = two_tables(0)
    views = [table.weight.data for table in tables]
    give_pages_room(tables, monkeypatch)
    for view in views:
        train_both(tables, optimizer, optimizer.pages(skewed(4), KEYS))
        view.mul_(2)  # nothing is cached now
    with pytest.raises(RuntimeError, match="a view of the weight was written to"):
        for _ in optimizer.pages(skewed(4), KEYS, ahead=4):
            views[0].mul_(2)
    monkeypatch.setattr(cache, "MOST_ROWS", 9)
    with pytest.raises(ValueError, match="cannot cache a table of 60 rows.*set gpu_bytes=0"):
        PagedEmbedding(MANY, DIM, gpu_bytes="20%")([0])


def test_a_table_without_ids_leaves_the_page_of_the_others_as_it_is():
    tables = [PagedEmbedding(MANY, DIM, gpu_bytes="20%") for _ in range(2)]
    optimizer = PagedOptimizer(tables, "SGD", lr=0.1)
    for batch in optimizer.pages([([turn], []) for turn in range(9)], [0, 1]):
        sum(table(ids).sum() for table, ids in zip(tables, batch, strict=True)).backward()
        optimizer.step()
    assert tables[0].store.stats.rows_used == 9


def test_batches_that_are_read_in_inference_mode_train():
    tables, optimizer = two_tables("20%")
    pages = optimizer.pages(skewed(4), KEYS)
    with torch.inference_mode():
        next(pages)
    train_both(tables, optimizer, pages)


def test_arrays_of_any_strides_are_ids():
    table = PagedEmbedding(MANY, DIM, seed=1)
    ids = np.arange(5)[::-1]
    assert torch.equal(table(ids), table(ids.copy()))
    assert table(np.array(3)).shape == (DIM,)


def test_ids_that_change_after_they_were_read_ahead_are_looked_up_anew():
    table, changed = PagedEmbedding(9, DIM, seed=1), np.arange(4)
    for ids in PagedOptimizer(table, "SGD", lr=0.1).pages([changed], lambda ids: ids):
        ids.shape = 2, 2
        assert torch.equal(table(ids), table(torch.arange(4).view(2, 2)))
        ids += 1
        assert torch.equal(table(ids), table(torch.arange(1, 5).view(2, 2)))


def test_gradients_of_a_table_may_be_replaced_by_others_of_their_shape():
    table = PagedEmbedding(9, DIM, init=torch.zeros(9, DIM))
    optimizer = PagedOptimizer(table, "SGD", lr=1.0)
    ((parameter,),) = (group["params"] for group in optimizer.param_groups)
    table([1, 2]).sum().backward()
    assert parameter.shape == parameter.grad.shape == (2, DIM)
    for wrong in (torch.zeros(3, DIM), torch.zeros(2, DIM, dtype=torch.float64), 1.0):
        with pytest.raises((RuntimeError, TypeError), match="grad"):  # torch's own
            parameter.grad = wrong
    table([2, 5]).sum().backward()
    assert parameter.shape == (0, DIM)  # it has the weights of no page
    parameter.grad = 2 * parameter.grad
    optimizer.step()
    assert table.weight[:, 0].tolist() == [0, -2, -4, 0, 0, -2, 0, 0, 0]
    table([3]).sum().backward()
    del parameter.grad
    optimizer.step()
    assert not table.weight[3].any()


def test_weights_and_states_are_current_while_rows_are_cached(tmp_path):
    runs = two_tables(0), two_tables("50%")
    for tables, optimizer in runs:
        train_both(tables, optimizer, skewed(9))
    (plain, plain_optimizer), (tables, optimizer) = runs
    assert torch.equal(tables[0].weight, plain[0].weight)
    train_both(tables, optimizer, skewed(9))
    train_both(plain, plain_optimizer, skewed(9))
    states = optimizer.state_dict()["state"][0], plain_optimizer.state_dict()["state"][0]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[1])
    tables[0].store.save(tmp_path / "x.npy")
    assert np.array_equal(np.load(tmp_path / "x.npy"), weights(plain[0]).numpy())
    other = copy.deepcopy(tables[0])
    assert torch.equal(other.state_dict()["weight"], plain[0].state_dict()["weight"])
    optimizer.load_state_dict(plain_optimizer.state_dict())
    tables[0].grow(MANY + 1, init=lambda rows: torch.zeros(len(rows), DIM))
    assert torch.equal(tables[0].weight[:MANY], plain[0].weight)


def test_micro_batches_read_their_rows_and_the_step_each_row_once(monkeypatch):
    table = PagedEmbedding(MANY, DIM, seed=1)
    optimizer = PagedOptimizer(table, "Adam", lr=0.1)
    read, memory = [], []
    group = table.store.group

    def noted(rows_U, read_rows=group.read):
        read.append(rows_U)
        records = read_rows(rows_U).numpy()
        memory.append(weakref.ref(records))
        return torch.from_numpy(records)

    monkeypatch.setattr(group, "read", noted)
    for ids in ([1, 2, 2], [2, 3], [3, 4]):
        table(ids).sum().backward()
    optimizer.step()
    assert [rows_U.tolist() for rows_U in read] == [[1, 2], [2, 3], [3, 4], [1, 2, 3, 4]]
    table([5]).sum().backward()
    optimizer.step()  # of records that the forward pass has read
    assert len(memory) == 5 and all(records() is None for records in memory)


def test_batches_for_a_model_without_tables_are_those_of_the_loader():
    optimizer = make_optimizer(nn.Linear(2, 2), "Adam", lr=0.1)
    assert list(optimizer.pages([1, 2, 3], key="ids")) == [1, 2, 3]


def test_rows_that_are_used_most_stay():
    table = PagedEmbedding(MANY, DIM, gpu_bytes="20%", seed=1)
    optimizer = PagedOptimizer(table, "SGD", lr=0.1)
    often = [MANY - 1, MANY - 2, MANY - 3]  # without counts, the first rows would stay
    for turn in range(100):
        table([*often, turn % 50, (turn + 7) % 50]).sum().backward()
        optimizer.step()
    before = table.store.stats.rows_read
    table(often)
    assert table.store.stats.rows_read == before


@pytest.mark.gpu
def test_a_cache_takes_little_memory_beside_its_rows():
    rows, dim = 2_000_000, 32
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    table = PagedEmbedding(rows, dim, storage="pinned", gpu_bytes="50%", init=ones)
    optimizer = PagedOptimizer(table, "SGD", lr=0.1, fused=True)
    batches = [torch.randint(rows, (1000,)) for _ in range(30)]
    for ids in optimizer.pages(({"ids": ids} for ids in batches), "ids"):
        table(ids["ids"]).sum().backward()
        optimizer.step()
    cached = rows // 2
    beside = torch.cuda.max_memory_allocated() - before - cached * dim * 4
    assert beside < 8 * cached + 1.5 * rows + (8 << 20)


def ones(rows_n):
    return torch.ones(len(rows_n), 32, device=rows_n.device)


def test_rows_of_announced_batches_stay():
    table = PagedEmbedding(MANY, DIM, gpu_bytes="10%", seed=1)
    optimizer = PagedOptimizer(table, "SGD", lr=0.1)
    # [13, 14] needs the slot of one of the rows 10, 40 and 41, the last of which is the rarest.
    batches = [[10], [40, 41], [11, 12], [13, 14], [40, 41], [15]]
    reads = []
    for batch in optimizer.pages(({"ids": ids} for ids in batches), "ids", ahead=3):
        table(batch["ids"]).sum().backward()
        optimizer.step()
        reads.append(table.store.stats.rows_read)
    assert reads[-1] == len({row for ids in batches for row in ids})


@pytest.mark.gpu
def test_plans_of_listed_rows_on_the_gpu_equal_those_of_plain_torch():
    stats = []
    for storage in ("cpu", "pinned"):
        torch.manual_seed(2)
        table = PagedEmbedding(5000, DIM, storage=storage, device="cuda", gpu_bytes="20%", seed=1)
        optimizer = PagedOptimizer(table, "SGD", lr=0.1)
        batches = [(5000 * torch.rand(200) ** 4).long() for _ in range(300)]
        for ids in optimizer.pages(({"ids": ids} for ids in batches), "ids"):
            table(ids["ids"]).sum().backward()
            optimizer.step()
        stats.append(table.store.stats)
    assert stats[0] == stats[1]


def test_tables_of_one_optimizer_share_their_caches():
    sizes = 10, 1000, 1000, 50
    tables = [PagedEmbedding(rows, 32, gpu_bytes="20%") for rows in sizes]
    PagedOptimizer([*tables, PagedEmbedding(9, 32)], "SGD", lr=0.1)
    shares = [table.store.cache_bytes // 128 for table in tables]
    assert shares[0] == 10 and shares[3] == 50 and sum(shares) == sum(sizes) // 5
    assert abs(shares[1] - shares[2]) <= 1


def test_pages_of_a_loader_with_workers():
    (plain, plain_optimizer), (table, optimizer) = (
        (t, PagedOptimizer(t, "Adam", lr=0.1))
        for t in (PagedEmbedding(MANY, DIM, seed=1, gpu_bytes=size) for size in (0, "50%"))
    )
    ids = torch.randint(MANY, (100,), generator=torch.Generator().manual_seed(1))
    for _ in range(2):
        loader = DataLoader(TensorDataset(ids, ids), batch_size=16)
        for mine, theirs in zip(optimizer.pages(loader, key=1), loader, strict=True):
            train_step(table, optimizer, mine[1], mine[0])
            train_step(plain, plain_optimizer, theirs[1], theirs[0])
    assert torch.equal(weights(table), weights(plain))


FUSED_SETTINGS = [
    *({"name": name} for name in "SGD Adagrad RMSprop Adadelta Adam AdamW Adamax".split()),
    {"step": "row"},
    {"max_norm": 1.0},
    {"padding_idx": 3},
    {"scale_grad_by_freq": True},
]


@pytest.mark.gpu
@each_case("settings", FUSED_SETTINGS)
@pytest.mark.parametrize("storage, share", [("cuda", 0), ("pinned", 0), ("pinned", "25%")])
def test_fused_steps_are_those_of_torch_but_for_rounding(storage, share, settings):
    runs = [two_tables(share, "cuda", storage=storage, **settings) for _ in range(2)]
    runs[1] = two_tables(share, "cuda", storage=storage, fused=True, **settings)
    for tables, optimizer in runs:
        train_both(tables, optimizer, optimizer.pages(skewed(30), KEYS))
        train_both(tables, optimizer, skewed(10), between=other_uses)
    for found, expected in zip(*(all_records(tables) for tables, _ in runs), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.gpu
@each_case("fused", [False, True])
def test_whole_steps_are_the_same_under_torch_compile(fused):
    runs = []
    for compile_ in (lambda step: step, functools.partial(torch.compile, backend="eager")):
        tables, optimizer = two_tables("25%", "cuda", fused=fused)
        step = compile_(functools.partial(train_both, tables, optimizer))
        for batch in skewed(8):
            step([batch])
        runs.append(all_records(tables))
    for found, expected in zip(*runs, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)


BAGS = [
    {"mode": "sum"},
    {"mode": "max"},
    {"padding_idx": 3},
    {"mode": "sum", "padding_idx": 3, "include_last_offset": True},
]


@pytest.mark.gpu
@pytest.mark.parametrize("storage", ["cuda", "pinned"])
@each_case("settings", BAGS)
def test_fused_bags_of_any_size_are_those_of_torch_but_for_rounding(storage, settings):
    runs = []
    for fused in (False, True):
        sizes = {"storage": storage, "seed": 1, "gpu_bytes": "60%" if storage == "pinned" else 0}
        tables = [PagedEmbeddingBag(rows, DIM, **sizes, **settings) for rows in (MANY, 9)]
        paged = PagedOptimizer(tables, "Adagrad", lr=0.1, fused=fused)
        generator = torch.Generator().manual_seed(8)
        batches = [(torch.rand(40, generator=generator) ** 2 * 9).long() for _ in range(12)]
        offsets = torch.tensor([0, 0, 3, 4, 37, 40, 40])
        seen = []
        for turn, ids in enumerate(paged.pages(batches, lambda ids: [ids, ids])):
            its = offsets if settings.get("include_last_offset") or turn % 2 else offsets[:-1]
            vectors = [table(ids, its) for table in tables]
            factors = torch.arange(1.0, 1 + len(vectors[0]), device="cuda")[:, None]
            dim = turn // 2 % 2  # gradients are read in the memory of the stacked vectors
            first, second = torch.stack(vectors, dim).unbind(dim)
            (factors * (first - second)).square().sum().backward()
            paged.step()
            seen += [each.detach() for each in vectors]
            with torch.no_grad():
                seen.append(tables[1](ids.view(8, 5)) if "include" not in str(settings) else its)
        runs.append([each.cpu() for each in seen] + all_records(tables))
    for found, expected in zip(*runs, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.gpu
def test_fused_bags_that_torch_would_refuse_are_refused():
    table = PagedEmbeddingBag(MANY, DIM, storage="cuda")
    PagedOptimizer(table, "SGD", lr=0.1, fused=True)
    for ids, offsets in (
        ([1, 2], None),
        ([[1, 2]], torch.tensor([0])),
        ([1], torch.zeros(1, 1, dtype=torch.int64)),
    ):
        with pytest.raises(ValueError, match=r"give ids \[B, N\], or ids \[N\] with offsets \[B\]"):
            table(ids, offsets)


@pytest.mark.gpu
@each_case("dtype", [torch.bfloat16, torch.float16])
def test_fused_steps_of_16_bit_tables_learn(dtype):
    (table, _), optimizer = two_tables("25%", "cuda", "Adamax", fused=True, dtype=dtype)
    target = torch.randn(12, DIM, device="cuda")
    for _ in range(200):
        ((table(range(12)) - target) ** 2).sum().backward()
        optimizer.step()
    assert (weights(table)[:12].float() - target.cpu()).abs().max() < 0.1


def together(device, sizes, **settings):
    """Return tables of these sizes that share a look-up, and their optimizer."""
    storage = "pinned" if device == "cuda" else "cpu"
    made = {"storage": storage, "device": device, "seed": 1} | settings
    tables = [PagedEmbedding(rows, DIM, padding_idx=0, **made) for rows in sizes]
    optimizer = PagedOptimizer(tables, "Adam", lr=0.1, fused=device == "cuda")
    assert len({table.store.group for table in tables}) == 1
    return tables, optimizer


@devices
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_tables_that_are_looked_up_together_get_their_own_rows(device, dtype):
    sizes = 1, 40, 1025, 7, 64
    tables, _ = together(device, sizes)
    generator = torch.Generator().manual_seed(4)
    for counts in ((3, 90, 2000, 0, 5), (0, 0, 1, 0, 0), (0, 0, 0, 0, 0)):
        ids = [
            torch.randint(rows, (count,), generator=generator, dtype=dtype)
            for rows, count in zip(sizes, counts, strict=True)
        ]
        found = look_up_batch([table._table for table in tables], ids, [*range(5)])
        for table, its, given in zip(tables, found, ids, strict=True):
            expected, places = torch.unique(given.long(), return_inverse=True)
            assert torch.equal(its.rows().cpu() - table.store.first_row, expected)
            assert torch.equal(its.places().cpu(), places)
            assert its.padding() == (0 if len(expected) and expected[0] == 0 else None)
    for table, wrong in ((1, 40), (1, -1), (4, 64)):
        ids = [torch.zeros(3, dtype=dtype) for _ in sizes]
        ids[table][1] = wrong
        message = f"id {wrong} is not a row; rows are 0 to {sizes[table] - 1}"
        with pytest.raises(IndexError, match=message):
            len(look_up_batch([table._table for table in tables], ids, [*range(5)])[0].rows())


@devices
@pytest.mark.filterwarnings("ignore:the GPU has room")
@each_case("share", [0, "30%", "100%"])
@pytest.mark.parametrize("ahead", [0, 2])
def test_tables_that_share_memory_train_as_tables_by_themselves(device, share, ahead):
    """Gradients are whole numbers, so that sums are exact."""
    sizes = 30, 200, 9
    shared, optimizer = together(device, sizes, gpu_bytes=share)
    settings = {"storage": shared[0].storage, "device": device, "seed": 1, "padding_idx": 0}
    alone = [PagedEmbedding(rows, DIM, **settings) for rows in sizes]
    optimizers = [PagedOptimizer(t, "Adam", lr=0.1, fused=device == "cuda") for t in alone]
    generator = torch.Generator().manual_seed(6)
    batches = [
        [torch.randint(rows, (8,), generator=generator) for rows in sizes] for _ in range(26)
    ]
    pages = optimizer.pages(batches, [0, 1, 2], ahead) if ahead else batches
    for turn, ids in enumerate(pages):
        for tables in (shared, alone):
            for number, table in enumerate(tables):
                if turn % 4 != number:  # some steps leave a table out
                    table(ids[number]).sum().backward()
                if turn % 5 == number:  # some have more rows
                    table([turn % 9, 3]).sum().backward()
                if turn == 20 + number:
                    table.grow(table.num_embeddings + 1, lambda rows: torch.ones(len(rows), DIM))
        for each in (optimizer, *optimizers):
            each.step()
    for mine, theirs in zip(all_records(shared), all_records(alone), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.gpu
@each_case("rows, count", [(1, 5), (900, 3000), (1025, 1), (3_000_000, 70_000)])
def test_unique_rows_of_a_gpu_are_those_of_torch(rows, count):
    store = RowStore(rows, 4, storage="cuda")
    for padding in (None, 0, rows - 1):
        ids = (torch.rand(count, device="cuda") ** 3 * rows).long()
        placed = {None: ids, 0: ids.int().cpu().pin_memory()}.get(padding, ids.cpu())
        (found,) = look_up([store], [placed], [Span(rows, padding, store.first_rows)])
        expected, places = torch.unique(ids, return_inverse=True)
        assert torch.equal(found.rows(), expected) and torch.equal(found.places(), places)
        place = torch.nonzero(expected == padding) if padding is not None else []
        assert found.padding() == (int(place) if len(place) else None)
    for wrong in (-1, rows, 2**40, -(2**40)):
        with pytest.raises(IndexError, match=f"id {wrong} is not a row"):
            len(look_up([store], [torch.tensor([0, wrong], device="cuda")])[0].rows())


@pairwise(
    {
        "storage, device": places("cpu-cpu", "pinned-cuda", "cpu-cuda"),
        "ahead": [0, 1, 4],
        "fused": [False, True],
    },
    lambda device, fused, **_: device == "cuda" or not fused,
)
def test_moves_beside_long_and_short_steps_lose_no_row(storage, device, ahead, fused):
    """Gradients are whole numbers, so that sums are exact."""
    rows, steps = 5000, 100
    generator = torch.Generator().manual_seed(2)
    start = torch.randint(-9, 9, (rows, DIM), generator=generator).float()
    table = PagedEmbedding.from_pretrained(
        start, freeze=False, storage=storage, device=device, gpu_bytes="8%"
    )
    optimizer = PagedOptimizer(table, "SGD", lr=1.0, fused=fused)
    batches = [
        (torch.rand(150, generator=generator) ** 2 * rows).long() * 7 % rows for _ in range(steps)
    ]
    loader = [(ids,) for ids in batches]
    for (ids,) in optimizer.pages(loader, 0, ahead) if ahead else loader:
        if device == "cuda":
            torch.cuda._sleep(int(torch.randint(200_000, (), generator=generator)))
        table(ids).sum().backward()
        optimizer.step()
    for ids in batches:
        start.index_add_(0, ids, torch.full((len(ids), DIM), -1.0))
    assert torch.equal(weights(table), start)
    stats = table.store.stats
    assert stats.rows_used > stats.rows_read > stats.rows_written > rows // 12


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("kind", [torch.int32, torch.int64])
def test_ids_are_read_where_they_are_if_equally_far_apart(kind, device):
    numbers = torch.arange(12, dtype=kind).view(3, 4)
    unaligned = torch.frombuffer(bytearray(33), dtype=kind, offset=1, count=4)
    assert are_spaced([numbers[0], numbers[1].clone()]) and not are_spaced([unaligned])
    places = [numbers] if device == "cpu" else [numbers, numbers.pin_memory(), numbers.cuda()]
    for ids in places:
        spaced = [[*ids], [ids[2], ids[0]], [ids[0], ids[0]], [ids]]
        apart = [[*ids, ids[0]], [ids[0], ids[:2, 0]], [ids[0].long(), ids[0].int()]]
        assert [are_spaced(given) for given in spaced + apart] == [True] * 4 + [False] * 3
        apart.append([ids[:, 0]])  # alone, but not contiguous
        for number, given in enumerate(spaced + apart if device == "cuda" else ()):
            read = readable(given, numbers.cuda().device)
            assert (read is given) == (number < len(spaced) and ids is not numbers)
            assert are_spaced(read) and all(each.is_contiguous() for each in read)
            expected = [int(each) for part in given for each in part.flatten()]
            assert [int(each) for part in read for each in part.flatten()] == expected


@somewhere
def test_ids_in_a_column_of_a_batch(tmp_path, storage, device):
    table = embedding(tmp_path, storage, device)
    ids = torch.arange(ROWS).flip(0)[:8].view(4, 2)
    for column in (ids[:, 0], ids[:, 1].to(table.device), ids.T):
        assert torch.equal(table(column), table(column.contiguous()))
        assert torch.equal(table(column).cpu(), weights(table)[column.cpu()])
