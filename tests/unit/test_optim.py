"""Row-wise optimizers: bit-identical to torch's dense ones; schedules."""

import pytest
import torch
from torch import nn

from tests.support.each_case import each_case
from w2v.config import NOT_ROWWISE, OPTIMIZERS, ConfigError, OptimizerConfig
from w2v.rows.link import link_between
from w2v.rows.optim import RowOptimizer, learning_rate, optimizer_name
from w2v.rows.table import Table

ROWS, DIM, STEPS, LR = 12, 7, 6, 0.05
WITH_ARGS = [
    ("SGD", {"momentum": 0.9, "nesterov": True}),
    ("Adam", {"amsgrad": True, "betas": [0.5, 0.99]}),
    ("RMSprop", {"momentum": 0.5, "centered": True}),
    ("AdamW", {"weight_decay": 0.1}),
    ("Adagrad", {"initial_accumulator_value": 0.5}),
    ("Adam", {"betas": [0.0, 0.99]}),
    ("Adamax", {"betas": [0.0, 0.99]}),
    ("Rprop", {"etas": [0.4, 1.3]}),
]
EVERY = [(name, {}) for name in OPTIMIZERS] + WITH_ARGS
GPU = pytest.mark.gpu
STORAGES = ["cpu", pytest.param("cuda", marks=GPU), pytest.param("pinned", marks=GPU)]
both_step_counts = pytest.mark.parametrize("step", ["table", "row"])


def device_of(storage):
    return torch.device("cpu" if storage == "cpu" else "cuda")


def start_weights(device="cpu"):
    return torch.randn(ROWS, DIM, generator=torch.Generator().manual_seed(1)).to(device)


def gradients(count, rows, seed=2):
    return torch.randn(count, rows, DIM, generator=torch.Generator().manual_seed(seed))


def new_table(config, storage="cpu"):
    optimizer = RowOptimizer(config)
    table = Table("input", ROWS, DIM, optimizer.states(DIM), optimizer.scalars, storage)
    table["weight"].copy_(start_weights(device_of(storage)))
    return optimizer, table


def train_rows(config, storage, steps):
    """Apply steps of (rows, gradient, lr), reading and writing the rows."""
    optimizer, table = new_table(config, storage)
    device = device_of(storage)
    link = link_between(table, device)
    for rows, grad, lr in steps:
        rows_U = torch.as_tensor(rows, device=device)
        records_UR = link.records(rows_U)
        optimizer.step_rows(table, records_UR, grad.to(device), None, lr)
        link.write(rows_U, records_UR)
    if device.type == "cuda":
        torch.cuda.synchronize()
    return table


def train_dense(config, weights, steps):
    """Make steps of (gradient of all weights, lr) with torch's own class."""
    parameter = nn.Parameter(weights.clone())
    cls = getattr(torch.optim, config.name)
    optimizer = cls([parameter], lr=config.lr, foreach=False, **config.args)
    for grad, lr in steps:
        parameter.grad = grad.to(weights.device)
        optimizer.param_groups[0]["lr"] = lr
        optimizer.step()
    return parameter.detach(), optimizer.state[parameter]


@pytest.mark.parametrize("name, kept", [("Adam", "exp_avg_sq"), ("Adamax", "exp_inf")])
def test_a_mean_that_is_overwritten_unread_is_not_kept(name, kept):
    for beta, more in ((0.0, []), (0.5, ["exp_avg"])):
        config = OptimizerConfig(name=name, args={"betas": [beta, 0.9]})
        assert list(RowOptimizer(config).states(DIM)) == [*more, kept]
        assert list(RowOptimizer(config, may_change=True).states(DIM)) == ["exp_avg", kept]


@pytest.mark.parametrize("storage", STORAGES)
@both_step_counts
@each_case("name, args", EVERY)
def test_stepping_some_rows_equals_a_dense_run_of_those_rows(name, args, step, storage):
    config = OptimizerConfig(name=name, args=args, lr=LR, step=step)
    touched = torch.tensor([1, 4, 5])
    rates = [LR * (1 - i / STEPS) for i in range(STEPS)]
    steps = list(zip(gradients(STEPS, 3), rates, strict=True))
    table = train_rows(config, storage, [(touched, grad, lr) for grad, lr in steps])
    dense_start = start_weights(device_of(storage))[touched]
    weights, state = train_dense(config, dense_start, steps)
    assert torch.equal(table["weight"].cpu()[touched], weights.cpu())
    for key in set(table.columns) - {"weight"}:
        found = table[key].cpu()[touched]
        assert torch.equal(found, state[key].cpu().expand(found.shape)), key
    for key, value in table.scalars.items():
        assert torch.equal(value, state[key].cpu()), key
    # The other rows stay as they were.
    _, untrained = new_table(config, storage)
    rest = torch.tensor([row for row in range(ROWS) if row not in touched])
    assert torch.equal(table.records_VR.cpu()[rest], untrained.records_VR.cpu()[rest])


@each_case("name, args", EVERY)
def test_steps_counted_by_row_equal_a_dense_run_of_each_row_alone(name, args):
    config = OptimizerConfig(name=name, args=args, lr=LR, step="row")
    generator = torch.Generator().manual_seed(3)
    is_touched = torch.rand(STEPS, ROWS, generator=generator) < 0.4
    grads = gradients(STEPS, ROWS, seed=4)
    visits = [torch.nonzero(touched).flatten() for touched in is_touched]
    steps = [(rows, grad[rows], LR) for rows, grad in zip(visits, grads, strict=True)]
    table = train_rows(config, "cpu", steps)
    for row in range(ROWS):
        own = slice(row, row + 1)
        own_steps = [(grad[own], LR) for grad in grads[is_touched[:, row]]]
        weights, _ = train_dense(config, start_weights()[own], own_steps)
        # The width of vector instructions may change the last bit.
        torch.testing.assert_close(table["weight"][own], weights, rtol=1e-6, atol=1e-7)


def test_counting_steps_by_table_or_by_row_differs_for_a_row_first_touched_late():
    first, last = gradients(1, 1)[0], gradients(1, 2)[0]
    steps = [([0], first, 0.1), ([0], first, 0.1), ([0, 1], last, 0.1)]
    by_table, by_row = (
        train_rows(OptimizerConfig(name="Adam", lr=0.1, step=step), "cpu", steps)["weight"]
        for step in ("table", "row")
    )
    assert torch.equal(by_table[0], by_row[0])
    late_by_table, late_by_row = ((w - start_weights())[1].abs() for w in (by_table, by_row))
    # Adam's first step is lr * sign(gradient), unless bias is corrected for the third step.
    torch.testing.assert_close(late_by_row, torch.full((DIM,), 0.1))
    m_hat, v_hat = 0.1 / (1 - 0.9**3), 0.001 / (1 - 0.999**3)
    torch.testing.assert_close(late_by_table, torch.full((DIM,), 0.1 * m_hat / v_hat**0.5))


def test_occurrence_cap_limits_the_gradient_of_frequent_rows():
    optimizer, table = new_table(OptimizerConfig(name="SGD", lr=1.0, occurrence_cap=4))
    records_UR = table.records_VR[:3].clone()
    optimizer.step_rows(table, records_UR, torch.ones(3, DIM), torch.tensor([1, 4, 16]), 1.0)
    step_UD = table["weight"][:3] - records_UR[:, :DIM]
    expected = torch.tensor([1, 1, 4 / 16])[:, None].expand(3, DIM)
    torch.testing.assert_close(step_UD, expected)


def test_known_optimizers_are_all_that_torch_has():
    classes = {name for name, cls in vars(torch.optim).items() if isinstance(cls, type)}
    assert classes - {"Optimizer"} <= {*OPTIMIZERS, *NOT_ROWWISE}


def test_whole_numbers_are_arguments():
    config = OptimizerConfig(name="Adam", args={"betas": [0, 0.99]})
    assert RowOptimizer(config).arguments["betas"] == [0.0, 0.99]


@each_case("name", OPTIMIZERS)
def test_arguments_that_torch_refuses_in_a_step_are_one_line(name):
    for argument in ("capturable", "fused", "differentiable", "foreach"):
        try:
            RowOptimizer(OptimizerConfig(name=name, args={argument: True}))
        except ConfigError as error:
            assert argument in str(error) and len(str(error).splitlines()) == 1


def test_capturable_is_refused_on_a_cpu():
    with pytest.raises(ConfigError, match="capturable.* is refused by torch .*other arguments"):
        RowOptimizer(OptimizerConfig(name="Adam", args={"capturable": True}))


@each_case("name", NOT_ROWWISE)
def test_optimizers_that_mix_rows_are_refused_with_alternatives(name):
    if hasattr(torch.optim, name):  # by trying it, too
        with pytest.raises(ConfigError, match="is not row-separable .*; choose one of ASGD"):
            RowOptimizer(OptimizerConfig(name=f"torch.optim.{name}"))
    with pytest.raises(ConfigError, match=f"optimizer.name={name} .*Adamax.*RMSprop"):
        RowOptimizer(OptimizerConfig(name=name))


@each_case(
    "name, args, words",
    [
        ("adamx", {}, "optimizer.name=adamx .*did you mean Adamax"),
        ("Xyzzy", {}, "choose one of ASGD"),
        ("torch.optim.Xyzzy", {}, "cannot be imported"),
        ("torch.optim.Optimizer.step", {}, "cannot be imported"),
        ("collections.Counter", {}, "not a class of"),
        ("Adam", {"betas": 0.9}, r"betas=0.9 must be 2 numbers, such as \[0.9,0.999\]"),
        ("Adam", {"beta": 0.5}, "optimizer.args.beta .*Adam; did you mean betas"),
        ("Adam", {"lr": 0.5}, "optimizer.args.lr=.* is set by optimizer.lr alone"),
        ("RMSprop", {"betas": (0.5, 0.9)}, "optimizer.args.betas .*choose from alpha .*args={}"),
        ("Adam", {"betas": [2, 3]}, "refused by Adam .*Invalid beta"),
        ("SGD", {"momentum": 0.9, "dampening": 0.5}, "depends on .*first step"),
    ],
)
def test_unusable_optimizers_are_refused(name, args, words):
    with pytest.raises(ConfigError, match=words):
        RowOptimizer(OptimizerConfig(name=name, args=args))


class HalfStep(torch.optim.SGD):
    """SGD with half the rate."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.sub_(parameter.grad, alpha=group["lr"] / 2)


def test_a_class_of_ones_own_steps_rows():
    config = OptimizerConfig(name=optimizer_name(HalfStep), lr=LR)
    grad = gradients(1, 3)[0]
    ours = train_rows(config, "cpu", [([1, 4, 7], grad, LR)])["weight"]
    expected = start_weights()
    expected[[1, 4, 7]] -= LR / 2 * grad
    torch.testing.assert_close(ours, expected)
    assert optimizer_name(torch.optim.Adam) == optimizer_name("Adam") == "Adam"


@each_case(
    "settings, expected",
    [
        ({"schedule": "constant"}, [1, 1, 1, 1, 1]),
        ({"schedule": "linear"}, [1, 0.75, 0.5, 0.25, 0]),
        ({"schedule": "linear", "min_lr": 0.2}, [1, 0.8, 0.6, 0.4, 0.2]),
        ({"schedule": "linear", "warmup": 0.5}, [0, 0.5, 1, 0.5, 0]),
        ({"schedule": "cosine"}, [1, 0.853553, 0.5, 0.146447, 0]),
    ],
)
def test_learning_rate_follows_the_schedule(settings, expected):
    config = OptimizerConfig(lr=1.0, **settings)
    rates = [learning_rate(config, progress) for progress in (0, 0.25, 0.5, 0.75, 1)]
    assert rates == pytest.approx(expected, abs=1e-6)


@both_step_counts
@pytest.mark.parametrize("name", ["ASGD", "Rprop"])
def test_states_that_begin_with_the_rate_take_that_of_the_first_step(name, step):
    """A row that is first used late in a schedule begins with its rate."""
    config = OptimizerConfig(name=name, lr=0.5, step=step)
    (grad,) = gradients(1, 1)
    rows = {0: 0.25, 3: 0.01} if step == "row" or name == "Rprop" else {0: 0.25}
    trained = train_rows(config, "cpu", [([row], grad, lr) for row, lr in rows.items()])
    for row, lr in rows.items():
        parameter = torch.nn.Parameter(start_weights()[row : row + 1])
        parameter.grad = grad.clone()
        getattr(torch.optim, name)([parameter], lr=lr).step()
        assert torch.equal(trained["weight"][row], parameter[0])
