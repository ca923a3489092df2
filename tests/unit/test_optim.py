"""The oracle: paging with any optimizer is that optimizer on a dense table, bit for bit; and how learning rates move."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from w2v.config import ConfigError, OptimizerConfig
from w2v.model.optim import RowOptimizer, learning_rate, rowwise_optimizers
from w2v.model.table import Table
from w2v.transfer.mapped import Mapped
from w2v.transfer.paged import Paged
from w2v.transfer.resident import Resident

ROWS, DIM, STEPS = 12, 7, 6
WITH_ARGS = [
    ("SGD", {"momentum": 0.9, "nesterov": True}),
    ("Adam", {"amsgrad": True, "betas": [0.5, 0.99]}),
    ("RMSprop", {"momentum": 0.5, "centered": True}),
    ("AdamW", {"weight_decay": 0.1}),
    ("Adagrad", {"initial_accumulator_value": 0.5}),
    ("Rprop", {"etas": [0.4, 1.3]}),
]
OPTIMIZERS = [(name, {}) for name in rowwise_optimizers()] + WITH_ARGS
GPU = pytest.mark.gpu
PLACES = ["cpu", pytest.param("cuda", marks=GPU), pytest.param("pinned", marks=GPU)]


def engine_for(storage):
    if storage == "pinned":
        return Paged(Mapped())
    return Resident()


def device_of(storage):
    return "cpu" if storage == "cpu" else "cuda"


def start_weights(device):
    return torch.randn(ROWS, DIM, generator=torch.Generator().manual_seed(1)).to(device)


def gradients(count, rows, seed=2):
    return torch.randn(count, rows, DIM, generator=torch.Generator().manual_seed(seed))


def paged(config, storage):
    optimizer = RowOptimizer(config)
    table = Table("input", ROWS, DIM, optimizer.states(DIM), optimizer.scalars, storage)
    table["weight"].copy_(start_weights(device_of(storage)))
    return optimizer, table


def train_paged(config, storage, steps):
    """`steps` is a list of (rows, gradient of those rows, lr)."""
    optimizer, table = paged(config, storage)
    engine, device = engine_for(storage), device_of(storage)
    for rows, grad, lr in steps:
        page = engine.fetch(table, torch.as_tensor(rows, device=device))
        page.grad_UD = grad.to(device)
        optimizer.step(page, lr)
        engine.write_back(page)
    engine.flush()
    return table


def train_dense(config, weights, steps):
    """`steps` is a list of (gradient of all weights, lr)."""
    parameter = nn.Parameter(weights.clone())
    optimizer = getattr(torch.optim, config.name)(
        [parameter], lr=config.lr, foreach=False, **config.args
    )
    for grad, lr in steps:
        parameter.grad, optimizer.param_groups[0]["lr"] = grad.to(weights.device), lr
        optimizer.step()
    return parameter.detach(), optimizer.state[parameter]


@pytest.mark.parametrize("storage", PLACES)
@pytest.mark.parametrize("step", ["table", "row"])
@pytest.mark.parametrize("name, args", OPTIMIZERS, ids=str)
def test_all_rows_touched_equals_dense(name, args, step, storage):
    config = OptimizerConfig(name=name, args=args, lr=0.05, step=step)
    rates = [0.05 * (1 - i / STEPS) for i in range(STEPS)]
    grads = gradients(STEPS, ROWS)
    table = train_paged(
        config, storage, [(range(ROWS), grad, lr) for grad, lr in zip(grads, rates, strict=True)]
    )
    weights, state = train_dense(
        config, start_weights(device_of(storage)), list(zip(grads, rates, strict=True))
    )
    assert torch.equal(table["weight"].cpu(), weights.cpu())
    for key in set(table.columns) - {"weight"}:
        assert torch.equal(table[key].cpu(), state[key].cpu().expand(ROWS, table[key].shape[1])), (
            key
        )
    assert all(torch.equal(value, state[key].cpu()) for key, value in table.scalars.items())


@pytest.mark.parametrize("storage", PLACES)
@pytest.mark.parametrize("step", ["table", "row"])
@pytest.mark.parametrize("name, args", OPTIMIZERS, ids=str)
def test_some_rows_touched_equal_a_dense_run_over_those_rows(name, args, step, storage):
    """Rows 1, 4, 5 are touched at each step: they equal a dense run of three rows, and the other rows stay as they were."""
    config = OptimizerConfig(name=name, args=args, lr=0.05, step=step)
    touched = torch.tensor([1, 4, 5])
    grads = gradients(STEPS, 3)
    table = train_paged(config, storage, [(touched, grad, 0.05) for grad in grads])
    weights, _ = train_dense(
        config, start_weights(device_of(storage))[touched], [(grad, 0.05) for grad in grads]
    )
    assert torch.equal(table["weight"].cpu()[touched], weights.cpu())
    _, untrained = paged(config, storage)
    rest = torch.tensor([row for row in range(ROWS) if row not in touched])
    assert torch.equal(table.records_VR.cpu()[rest], untrained.records_VR.cpu()[rest])


@pytest.mark.parametrize("name, args", OPTIMIZERS, ids=str)
def test_per_row_steps_equal_a_dense_run_of_each_row_alone(name, args):
    """With `step: row`, a row that comes in at different times trains as if it were the only row, at the steps that touch it."""
    config = OptimizerConfig(name=name, args=args, lr=0.05, step="row")
    generator = torch.Generator().manual_seed(3)
    visits = [
        torch.nonzero(torch.rand(ROWS, generator=generator) < 0.4).flatten() for _ in range(STEPS)
    ]
    grads = gradients(STEPS, ROWS, seed=4)
    table = train_paged(
        config, "cpu", [(rows, grad[rows], 0.05) for rows, grad in zip(visits, grads, strict=True)]
    )
    for row in range(ROWS):
        mine = [
            (grad[row : row + 1], 0.05)
            for rows, grad in zip(visits, grads, strict=True)
            if row in rows
        ]
        weights, _ = train_dense(config, start_weights("cpu")[row : row + 1], mine)
        torch.testing.assert_close(
            table["weight"][row], weights[0], rtol=1e-6, atol=1e-7
        )  # vector width may change the last bit


def test_steps_by_table_and_by_row_differ_for_a_late_row():
    """A row first touched at the table's third step: Adam's bias correction takes it for older than it is, unless counted by row."""
    visits = [(torch.tensor([0]), gradients(1, 1)[0], 0.1)] * 2 + [
        (torch.tensor([0, 1]), gradients(1, 2)[0], 0.1)
    ]
    by_table, by_row = (
        train_paged(OptimizerConfig(name="Adam", lr=0.1, step=step), "cpu", visits)
        for step in ("table", "row")
    )
    assert torch.equal(by_table["weight"][0], by_row["weight"][0])
    first_step = (by_row["weight"] - start_weights("cpu"))[1]
    torch.testing.assert_close(
        first_step.abs(), torch.full((DIM,), 0.1)
    )  # Adam's first step is lr * sign(gradient)
    m_hat, v_hat = 0.1 / (1 - 0.9**3), 0.001 / (1 - 0.999**3)
    torch.testing.assert_close(
        (by_table["weight"] - start_weights("cpu"))[1].abs(),
        torch.full((DIM,), 0.1 * m_hat / v_hat**0.5),
    )


def test_rowwise_optimizers_are_the_known_ones():
    assert (
        rowwise_optimizers()
        == "ASGD Adadelta Adagrad Adam AdamW Adamax NAdam RAdam RMSprop Rprop SGD".split()
    )


@pytest.mark.parametrize("name", ["Adafactor", "Muon", "LBFGS", "SparseAdam"])
def test_optimizers_that_mix_rows_are_refused_with_those_that_work(name):
    if not hasattr(torch.optim, name):
        pytest.skip(f"torch {torch.__version__} has no {name}")
    with pytest.raises(
        ConfigError, match=f"optimizer.name={name} .*cannot be paged.*Adamax.*RMSprop"
    ):
        RowOptimizer(OptimizerConfig(name=name))


@pytest.mark.parametrize(
    "name, args, words",
    [
        ("adamx", {}, "optimizer.name=adamx is not a torch.optim class; did you mean Adamax"),
        ("Xyzzy", {}, "row-wise choices: ASGD"),
        (
            "Adam",
            {"beta": 0.5},
            "optimizer.args.beta is not an argument of Adam; did you mean betas",
        ),
        ("Adam", {"lr": 0.5}, "optimizer.args.lr is not an argument of Adam"),
        (
            "RMSprop",
            {"betas": (0.5, 0.9)},
            "optimizer.args.betas is not an argument of RMSprop; optimizer.args={} clears",
        ),
        ("Adam", {"betas": [2, 3]}, "refused by Adam: Invalid beta"),
        ("SGD", {"momentum": 0.9, "dampening": 0.5}, "first step on more than the first state"),
    ],
)
def test_unusable_optimizers_are_refused(name, args, words):
    with pytest.raises(ConfigError, match=words):
        RowOptimizer(OptimizerConfig(name=name, args=args))


def test_torchs_compiler_is_not_imported():
    """It takes 70 MiB and a second."""
    code = "import sys, w2v.model.optim; w2v.model.optim.rowwise_optimizers(); sys.exit('torch._dynamo' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2], check=True)


def test_schedules():
    def rates(**settings):
        return [
            round(learning_rate(OptimizerConfig(lr=1.0, **settings), share), 6)
            for share in (0, 0.25, 0.5, 0.75, 1)
        ]

    assert rates(schedule="constant") == [1, 1, 1, 1, 1]
    assert rates(schedule="linear") == [1, 0.75, 0.5, 0.25, 0]
    assert rates(schedule="linear", min_lr=0.2) == [1, 0.8, 0.6, 0.4, 0.2]
    assert rates(schedule="linear", warmup=0.5) == [0, 0.5, 1, 0.5, 0]
    assert rates(schedule="cosine") == [1, 0.853553, 0.5, 0.146447, 0]
