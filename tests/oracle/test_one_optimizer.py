"""One optimizer of tables and dense parameters trains as torch's does."""

import copy
from collections import defaultdict
from functools import partial

import pytest
import torch
import torch.distributed.checkpoint as checkpoint
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.optim import lr_scheduler

import w2v
from tests.support.each_case import each_case
from tests.support.embeddings import DIM, ROWS
from w2v import PagedEmbedding, PagedEmbeddingBag

EVERY = torch.arange(ROWS)
NAMES = "SGD Adam AdamW Adagrad RMSprop NAdam".split()


class Model(nn.Module):
    """A table, bags and a dense head."""

    def __init__(self, table, bag):
        super().__init__()
        self.head = nn.Linear(2 * DIM, 1)
        self.table = table(ROWS, DIM)
        self.bag = bag(ROWS, DIM, mode="sum")
        self.norm = nn.LayerNorm(2 * DIM)

    def forward(self, ids):
        vectors = torch.cat([self.table(ids), self.bag(ids.view(-1, 1))], dim=1)
        return self.head(self.norm(vectors)).squeeze(1)


def models():
    """Return equal models, with paged tables and with torch's."""
    made = []
    for kinds in ((PagedEmbedding, PagedEmbeddingBag), (nn.Embedding, nn.EmbeddingBag)):
        torch.manual_seed(0)
        made.append(Model(*kinds))
    return made


def optimizers(name="Adam", dense=None, lr=0.1, **settings):
    """Return both models, each with one optimizer of all that it has."""
    paged, torchs = models()
    kind = getattr(torch.optim, name)
    own = [*torchs.table.parameters(), *torchs.bag.parameters()]
    rest = [*torchs.head.parameters(), *torchs.norm.parameters()]
    groups = [{"params": own}, {"params": rest} | (dense or {})]
    theirs = kind(groups, lr=lr, foreach=False, **settings)
    return (paged, w2v.optimizer(paged, name, lr=lr, dense=dense, **settings)), (torchs, theirs)


def loss_of(model, step):
    target = torch.randn(ROWS, generator=torch.Generator().manual_seed(step))
    return F.mse_loss(model(EVERY), target)


def train(pair, steps=3, after=lambda: None, before=lambda: None):
    model, optimizer = pair
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        before()
        optimizer.step()
        after()


def assert_equal(paged, torchs):
    expected = torchs.state_dict()
    for name, value in paged.state_dict().items():
        assert torch.equal(value, expected[name]), name


@pytest.mark.parametrize("dense", [None, {"lr": 0.01, "weight_decay": 0.1}])
@each_case("name", NAMES)
def test_a_model_trains_as_with_one_optimizer_of_torch(name, dense):
    (paged, mine), (torchs, theirs) = optimizers(name, dense)
    assert [len(group["params"]) for group in mine.param_groups] == [2, 4]
    for pair in ((paged, mine), (torchs, theirs)):
        train(pair)
    assert_equal(paged, torchs)


def test_another_class_may_step_the_dense_parameters():
    paged, torchs = models()
    mine = w2v.optimizer(paged, "Adagrad", lr=0.1, dense={"optimizer": "SGD", "momentum": 0.9})
    tables = torch.optim.Adagrad([torchs.table.weight, torchs.bag.weight], lr=0.1)
    rest = torch.optim.SGD(
        [*torchs.head.parameters(), *torchs.norm.parameters()], lr=0.1, momentum=0.9
    )
    train((paged, mine))
    for step in range(3):
        tables.zero_grad()
        rest.zero_grad()
        loss_of(torchs, step).backward()
        tables.step()
        rest.step()
    assert_equal(paged, torchs)


SCHEDULES = [
    lambda its: lr_scheduler.OneCycleLR(its, 0.3, total_steps=5),
    lambda its: lr_scheduler.LambdaLR(its, lambda turn: 1 / (1 + turn)),
    lambda its: lr_scheduler.CosineAnnealingWarmRestarts(its, 2),
]


@pytest.mark.parametrize("schedule", SCHEDULES)
@each_case("name", ["SGD", "Adam"])
def test_schedulers_change_rates_and_momentum_of_all_parameters(name, schedule):
    pairs = optimizers(name)
    for model, optimizer in pairs:
        scheduler = schedule(optimizer)
        train((model, optimizer), 4, after=scheduler.step)
    assert_equal(pairs[0][0], pairs[1][0])


def clip(parameters, norms):
    norms.append(nn.utils.clip_grad_norm_(parameters, 0.1))


def test_clipping_the_parameters_of_the_model_clips_its_rows():
    pairs = optimizers()
    for model, optimizer in pairs:
        norms = []
        parameters = list(model.parameters())
        before = partial(clip, parameters, norms)
        train((model, optimizer), before=before)
        assert all(norm > 0.1 for norm in norms)
    for mine, theirs in zip(*(model.parameters() for model, _ in pairs), strict=True):
        torch.testing.assert_close(mine, theirs)


def test_gradient_scaler_and_zero_grad_of_the_model_see_all_parameters():
    pairs = optimizers("SGD")
    for model, optimizer in pairs:
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for step in range(4):
            loss = loss_of(model, step)
            scaler.scale(loss * (float("inf") if step == 1 else 1.0)).backward()
            scaler.step(optimizer)
            scaler.update()
            model.zero_grad()
            assert all(parameter.grad is None for parameter in model.parameters())
        assert scaler.get_scale() == 512.0
    assert_equal(pairs[0][0], pairs[1][0])


@pytest.mark.parametrize("of_table", [False, True])
def test_gradients_that_are_set_to_zero_are_stepped(of_table):
    pairs = optimizers()
    for model, optimizer in pairs:
        for step in range(3):
            loss_of(model, step).backward()
            if step == 1:
                module = model.table if of_table else model
                module.zero_grad(set_to_none=False)
            optimizer.step()
            optimizer.zero_grad()
    assert_equal(pairs[0][0], pairs[1][0])


def test_groups_by_weight_decay_divide_tables_and_others():
    paged, torchs = models()
    made = []
    for model in (paged, torchs):
        named = [*model.named_parameters()]
        groups = [
            {"params": [(name, p) for name, p in named if p.dim() > 1], "weight_decay": 0.1},
            {"params": [(name, p) for name, p in named if p.dim() == 1], "weight_decay": 0.0},
        ]
        if model is paged:
            made.append((model, w2v.optimizer(groups, "AdamW", lr=0.1)))
        else:
            made.append((model, torch.optim.AdamW(groups, lr=0.1, foreach=False)))
    for pair in made:
        train(pair)
    assert [len(group["params"]) for group in made[0][1].param_groups] == [2, 1, 3]
    assert_equal(paged, torchs)
    mine, theirs = (optimizer.state_dict()["param_groups"] for _, optimizer in made)
    names = [
        [name for group in groups for name in group["param_names"]] for groups in (mine, theirs)
    ]
    assert sorted(names[0]) == sorted(names[1])
    assert mine[0]["param_names"] == ["table.weight", "bag.weight"]


def test_closures():
    pairs = optimizers()
    for model, optimizer in pairs:

        def closure(model=model, optimizer=optimizer):
            optimizer.zero_grad()
            loss = loss_of(model, 0)
            loss.backward()
            return loss

        losses = [optimizer.step(closure) for _ in range(3)]
        assert losses[-1] < losses[0]
    assert_equal(pairs[0][0], pairs[1][0])


def assert_equal_states(found, expected):
    for number, values in expected["state"].items():
        for key, value in values.items():
            if value is not None:  # SGD's momentum without one
                assert torch.equal(found["state"][number][key], value), (number, key)


LATER = {*"maximize foreach capturable differentiable fused decoupled_weight_decay".split()}


@each_case("name", NAMES)
def test_state_dicts_are_those_of_torch(name):
    (paged, mine), (torchs, theirs) = optimizers(name)
    train((paged, mine), 2)
    train((torchs, theirs), 2)
    state, expected = copy.deepcopy(mine.state_dict()), theirs.state_dict()
    assert_equal_states(state, expected)
    (other, others_optimizer), _ = optimizers(name)
    other.load_state_dict(torchs.state_dict())
    older = copy.deepcopy(expected)  # as earlier versions of torch have saved it
    for group in older["param_groups"]:
        for key in LATER & group.keys():
            del group[key]
    for values in older["state"].values():
        if "step" in values:
            values["step"] = int(values["step"])
    others_optimizer.load_state_dict(older)
    hooks = (  # which find and replace the states of all parameters
        mine.register_state_dict_post_hook(lambda _, found: {"saved": found}),
        mine.register_load_state_dict_pre_hook(lambda _, found: found["saved"]),
        mine.register_load_state_dict_post_hook(
            lambda its: assert_equal_states(its.state_dict()["saved"], state)
        ),
    )
    saved = copy.deepcopy(mine.state_dict())
    train((paged, mine), 1)
    paged.load_state_dict(torchs.state_dict())
    mine.load_state_dict(saved)
    for hook in hooks:
        hook.remove()
    copied, copied_optimizer = copy.deepcopy((paged, mine))
    for pair in ((paged, mine), (other, others_optimizer), (copied, copied_optimizer)):
        train(pair)
    train((torchs, theirs))
    for model in (paged, other, copied):
        assert_equal(model, torchs)
    for model, optimizer in ((copied, copied_optimizer), (torchs, theirs)):
        optimizer.state = defaultdict(dict)  # as users begin anew
        train((model, optimizer))
    assert_equal(copied, torchs)


CHECKPOINTED = [("SGD", {}), ("SGD", {"momentum": 0.9}), ("Adam", {}), ("Adagrad", {})]


@pytest.mark.parametrize("steps", [0, 2])
@each_case("name, settings", CHECKPOINTED)
def test_distributed_checkpoints_hold_and_restore_everything(name, settings, steps, tmp_path):
    (paged, mine), (torchs, theirs) = optimizers(name, **settings)
    train((paged, mine), steps)
    train((torchs, theirs), steps)
    found = get_state_dict(paged, mine)
    expected = get_state_dict(torchs, theirs)
    assert found[1]["state"].keys() == expected[1]["state"].keys()
    checkpoint.save({"model": found[0], "optimizer": found[1]}, checkpoint_id=tmp_path / "saved")
    (other, optimizer), _ = optimizers(name, **settings)
    weights, states = get_state_dict(other, optimizer)
    content = {"model": weights, "optimizer": states}
    checkpoint.load(content, checkpoint_id=tmp_path / "saved")
    set_state_dict(
        other, optimizer, model_state_dict=content["model"], optim_state_dict=content["optimizer"]
    )
    for pair in ((paged, mine), (other, optimizer), (torchs, theirs)):
        train(pair)
    assert_equal(paged, torchs)
    assert_equal(other, torchs)


def test_gradients_that_are_set_step_all_rows():
    """As torch.distributed.checkpoint sets them, before there is a state."""
    pairs = optimizers()
    for model, optimizer in pairs:
        for parameter in model.parameters():
            parameter.grad = torch.ones(parameter.shape)
        optimizer.step()
        optimizer.zero_grad()
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        for parameter in model.parameters():
            parameter.grad = torch.ones(parameter.shape)
            del parameter.grad
        optimizer.step()
    assert_equal(pairs[0][0], pairs[1][0])
    weight = pairs[0][0].table.weight
    weight.grad = torch.ones(ROWS, DIM)
    weight.grad = None
    assert weight.grad is None


@pytest.mark.parametrize("used", [False, True])
@each_case("name, settings", [(name, {}) for name in NAMES] + [("SGD", {"momentum": 0.9})])
def test_tables_that_are_frozen_for_some_steps_train_as_in_torch(name, settings, used):
    found = []
    for paged, model in zip((True, False), models(), strict=True):
        model.table.requires_grad_(False)
        if used:
            model(EVERY)
        if paged:
            optimizer = w2v.optimizer(model, name, lr=0.1, **settings)
        else:
            every = [*model.table.parameters(), *model.bag.parameters()]
            every += [*model.head.parameters(), *model.norm.parameters()]
            optimizer = getattr(torch.optim, name)(every, lr=0.1, foreach=False, **settings)
        pair = model, optimizer
        train(pair, 2)
        if name not in ("Adagrad", "SGD"):  # in torch these have one from the start, or None
            assert optimizer.state_dict()["state"].keys() == {*range(1, 6)}
        model.table.requires_grad_(True)
        model.bag.requires_grad_(False)
        train(pair, 2)
        state = copy.deepcopy(optimizer.state_dict())
        model.bag.requires_grad_(True)
        train(pair, 2)
        optimizer.load_state_dict(state)
        train(pair, 2)
        found.append(model)
    assert_equal(*found)


def test_a_state_loads_into_a_frozen_table():
    paged, _ = models()
    _, (torchs, theirs) = optimizers()
    train((torchs, theirs))
    paged.load_state_dict(torchs.state_dict())
    paged.table.requires_grad_(False)
    mine = w2v.optimizer(paged, "Adam", lr=0.1)
    mine.load_state_dict(copy.deepcopy(theirs.state_dict()))
    paged.table.requires_grad_(True)
    train((paged, mine))
    train((torchs, theirs))
    assert_equal(paged, torchs)


def test_frozen_tables_and_models_without_tables():
    paged, _ = models()
    paged.table.requires_grad_(False)
    mine = w2v.optimizer(paged, "SGD", lr=0.1)
    before = paged.table.weight.clone()
    train((paged, mine))
    assert torch.equal(paged.table.weight, before)
    with pytest.raises(ValueError, match="no modules or weights to step; give the model"):
        w2v.optimizer(nn.Sequential(), "SGD", lr=0.1)
    head = nn.Linear(1, 1)
    plain = w2v.optimizer(head, "SGD", lr=1.0)
    before = head.weight.detach().clone()
    head(torch.ones(1)).sum().backward()
    plain.step()
    assert torch.equal(head.weight, before - 1)


def test_an_unknown_argument_of_dense_is_refused():
    paged, _ = models()
    with pytest.raises(TypeError, match="unexpected keyword argument 'betas'"):
        w2v.optimizer(paged, "SGD", lr=0.1, dense={"betas": (0.9, 0.9)})


def test_another_optimizer_of_the_same_weight_is_refused():
    model = Model(PagedEmbedding, PagedEmbeddingBag)
    earlier = w2v.optimizer(model.table.weight, "Adam", lr=0.1)
    later = w2v.optimizer(model, "Adam", lr=0.1)
    other = torch.optim.Adam(model.parameters())
    model(EVERY).sum().backward()
    with pytest.raises(ValueError, match="this Adam has the weight .* give it to one of them"):
        other.step()
    before = model.table.weight.clone()
    with pytest.raises(ValueError, match="this PagedOptimizer has the weight .* give it to one of"):
        earlier.step()
    assert torch.equal(model.table.weight, before)
    later.step()
    assert not torch.equal(model.table.weight, before)
