"""Row-separable torch optimizers, and the learning rate's schedule.

Which state an optimizer keeps is found by stepping it on a tiny parameter, so nothing here names
an optimizer, but for those with a fused kernel. State is lazy, as in torch.optim.SparseAdam: a row
that a step does not touch keeps its weight and its state.

Shapes: V rows of a table, U unique rows, D dimensions, R elements of a record.
"""

from __future__ import annotations

import importlib
import inspect
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from w2v.config import OPTIMIZERS, ConfigError, OptimizerConfig, check_optimizer
from w2v.rows.table import RowState, Table
from w2v.system.files import nearest, one_line, refused

Optimizer = torch.optim.Optimizer


class Hyper(NamedTuple):
    """Constants of an optimizer step, as in struct Hyper of cu/optim.cu.

    rest is 1 - beta.
    """

    lr: float
    eps: float = 0.0
    weight_decay: float = 0.0
    lr_decay: float = 0.0
    beta1: float = 0.0
    rest1: float = 1.0
    log_beta1: float = float("-inf")
    beta2: float = 0.0
    rest2: float = 1.0
    log_beta2: float = float("-inf")


class RowOptimizer:
    """A torch.optim class whose state is kept in the records of a table.

    With `optimizer.step=table` the scalars of the state (Adam's step, NAdam's product) are kept
    once a table, as in SparseAdam; with `row` each row has its own, so that bias correction counts
    the steps of that row.

    `formula` names the formula in the fused kernels (cu/optim.cu, cpu_loops.py) that makes the same
    step; it is empty where only torch has it. With beta1 = 0, `exp_avg` is the last gradient, which
    no step reads: it is not kept unless arguments `may_change`.

    Raises:
        ConfigError: The class does not exist, refuses its arguments, or is not row-separable.
    """

    def __init__(self, config: OptimizerConfig, may_change: bool = False):
        found: Any = find_class(config.name)
        self._class = _without_compiler(found)
        self._args = _arguments(self._class, config)
        self.formula, self._hyper = _fused_formula(found, self._args)
        given = f"optimizer.name={config.name} with optimizer.args={config.args}"
        remedy = f"choose one of {' '.join(OPTIMIZERS)}, or other arguments"
        # A state whose initial value is the learning rate (`lr_states`) is stored as 0 until a
        # first step sets it to the rate of that step.
        try:
            with refused(ConfigError, f"{given} is not row-separable", remedy):
                is_rowwise = bool(self.formula)
                first, self.lr_states = _find_state(self._class, self._args, is_rowwise)
        except AssertionError as error:  # torch asserts what some arguments need
            reason = one_line(error)
            raise ConfigError(f"{given} is refused by torch ({reason}); {remedy}") from error
        # States of rows, of which some have one number a row, and scalars; with first values.
        self._wide = {key: float(value.flatten()[0]) for key, value in first.items() if value.dim()}
        self._narrow = {key for key, value in first.items() if value.shape[1:] == (1,)}
        self._unread = set()
        if self.formula.startswith("adam") and self._hyper.beta1 == 0 and not may_change:
            self._unread.add("exp_avg")
            del self._wide["exp_avg"]
        self._scalars = {key: value for key, value in first.items() if not value.dim()}
        self._per_row = config.step == "row" and bool(self._scalars)
        self.occurrence_cap = max(0, config.occurrence_cap)  # none while it is auto
        self._instances: dict[torch.device, Optimizer] = {}
        # The constructor's arguments, with defaults, that are not None.
        self.arguments = {key: value for key, value in self._args.items() if value is not None}
        self.scalars: dict[str, Tensor] = {}  # that a table holds once
        if not self._per_row:
            self.scalars = self._scalars
        self.state_count = len(self._wide)
        # Whether a step is w -= lr * gradient and no more, which needs no batch.
        is_scaled = self._hyper.weight_decay or self.occurrence_cap
        self.is_plain_sgd = self.formula == "sgd" and not is_scaled

    def states(self, dim: int) -> dict[str, RowState]:
        """Return what a record holds besides its D weights, in order."""
        states = {
            key: RowState(1 if key in self._narrow else dim, value)
            for key, value in self._wide.items()
        }
        if self._per_row:
            own = self._scalars.items()
            states |= {key: RowState(1, float(value), counts=True) for key, value in own}
        return states

    def hyper(self, lr: float) -> Hyper:
        """Return the constants of the formula for a step."""
        return self._hyper._replace(lr=float(lr))

    def count_step(self, table: Table) -> tuple[float, int]:
        """Count a step; return the table's number of steps, and a column.

        The column has the number of each row's own steps; it is -1 if rows do not count them.
        """
        number = 0.0
        if (step := table.scalars.get("step")) is not None:
            number = float(step) + 1
            step.fill_(number)  # takes half the time of adding
        return number, table.columns.get("step", slice(-1, 0)).start

    def step_rows(
        self, table: Table, records_UR: Tensor, grad_UD: Tensor, pairs_U: Tensor | None, lr: float
    ) -> None:
        """Step decoded records of a table in place, by the torch.optim class.

        The records are of unique rows, float32 or float64. `pairs_U` counts the pairs that each
        gradient sums, for `occurrence_cap`.
        """
        if (cap := self.occurrence_cap) and pairs_U is not None:
            grad_UD = grad_UD * (cap / pairs_U.clamp(min=cap))[:, None]
        fields = {key: records_UR[:, column] for key, column in table.columns.items()}
        if self.lr_states:
            self.set_rates(fields | table.scalars, lr)
        weight_UD = fields["weight"]
        state = {key: fields[key] for key in self._wide}
        state |= {key: torch.zeros_like(weight_UD) for key in self._unread}
        if not self._per_row:
            self._apply(weight_UD, grad_UD, state | table.scalars, lr)
            return
        # torch keeps one step a parameter: rows with equally many steps are stepped together.
        scalars_US = torch.cat([fields[key] for key in self._scalars], dim=1)
        values_GS, group_U = torch.unique(scalars_US, dim=0, return_inverse=True)
        for group, values_S in enumerate(values_GS.cpu()):
            rows = torch.nonzero(group_U == group).flatten()
            scalars = dict(zip(self._scalars, values_S.unbind(), strict=True))
            part = {key: value[rows] for key, value in state.items()}
            weights = weight_UD[rows]
            self._apply(weights, grad_UD[rows], part | scalars, lr)
            weight_UD.index_copy_(0, rows, weights)
            for key, value in part.items():
                state[key].index_copy_(0, rows, value)
            for key, value in scalars.items():
                fields[key].index_fill_(0, rows, float(value))

    def set_rates(self, state: Mapping[str, Tensor], lr: float) -> None:
        """Set the states of rows without a step whose initial value is the rate."""
        for key in self.lr_states:
            state[key].masked_fill_((state[key] == 0) | (state.get("step", 1) == 0), lr)

    def first_rates(self, table: Table) -> list[str]:
        """Return the states that a table's first step sets in all rows."""
        step = table.scalars.get("step")
        if not self.lr_states or step is None or step > 0:
            return []
        return [key for key in self.lr_states if key in table.columns]

    def _apply(
        self, weight_UD: Tensor, grad_UD: Tensor, state: dict[str, Tensor], lr: float
    ) -> None:
        if weight_UD.device not in self._instances:
            parameters = [nn.Parameter(weight_UD)]
            self._instances[weight_UD.device] = self._class(parameters, **self._args)
        optimizer = self._instances[weight_UD.device]
        (group,) = optimizer.param_groups
        (parameter,) = group["params"]
        parameter.data = weight_UD
        parameter.grad = grad_UD
        group["lr"] = lr
        optimizer.state[parameter] = state
        optimizer.step()
        optimizer.state.clear()  # free the rows' memory
        parameter.grad = None
        parameter.data = weight_UD.new_empty(0)


class _Rowwise(Optimizer):
    """Optimizer with states of one number a row."""

    def __init__(self, params: Any, **defaults: Any) -> None:
        for name, value in defaults.items():
            below = {"betas": 1.0}.get(name, math.inf)
            if not all(0 <= number < below for number in np.ravel(value)):
                limits = f"at least 0, and below {below}"
                raise ValueError(f"{name}={value} is out of range; give {limits}")
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Step the parameters that have a gradient; return the loss of `closure`."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if (grad := parameter.grad) is not None:
                    if group["weight_decay"]:
                        grad = grad.add(parameter, alpha=group["weight_decay"])
                    self._step_one(parameter, grad, self.state[parameter], group)
        return loss

    def _step_one(
        self, weight: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]
    ) -> None:
        raise NotImplementedError


class RowwiseAdam(_Rowwise):
    """Adam whose second moment is one number a row: a mean over the row."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)

    def _step_one(
        self, weight: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]
    ) -> None:
        beta1, beta2 = group["betas"]
        square_V1 = grad.square().mean(-1, keepdim=True)
        if not state:
            state["step"] = torch.zeros((), device="cpu")
            state["exp_avg"] = torch.zeros_like(grad)
            state["exp_avg_sq"] = torch.zeros_like(square_V1)
        state["step"] += 1
        steps = float(state["step"])
        state["exp_avg"].lerp_(grad, 1 - beta1)
        state["exp_avg_sq"].lerp_(square_V1, 1 - beta2)
        root_V1 = state["exp_avg_sq"].div(1 - beta2**steps).sqrt_().add_(group["eps"])
        rate = float(group["lr"]) / (1 - beta1**steps)
        weight.addcdiv_(state["exp_avg"], root_V1, value=-rate)


class RowwiseAdagrad(_Rowwise):
    """Adagrad with one number a row: the sum of means of squared gradients.

    As the exact row-wise Adagrad of FBGEMM and TorchRec.
    """

    def __init__(
        self, params: Any, lr: float = 1e-2, eps: float = 1e-8, weight_decay: float = 0.0
    ) -> None:
        super().__init__(params, lr=lr, eps=eps, weight_decay=weight_decay)

    def _step_one(
        self, weight: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]
    ) -> None:
        square_V1 = grad.square().mean(-1, keepdim=True)
        if not state:
            state["sum"] = torch.zeros_like(square_V1)
        state["sum"] += square_V1
        root_V1 = state["sum"].sqrt().add_(group["eps"])
        weight.addcdiv_(grad, root_V1, value=-float(group["lr"]))


# Classes with a formula, and which of their arguments are its beta1 and beta2.
FUSED_BETAS = {
    torch.optim.SGD: (),
    torch.optim.Adagrad: (),
    torch.optim.RMSprop: ("alpha",),
    torch.optim.Adadelta: ("rho",),
    torch.optim.Adam: ("betas",),
    torch.optim.AdamW: ("betas",),
    torch.optim.Adamax: ("betas",),
    RowwiseAdagrad: (),
    RowwiseAdam: ("betas",),
}
# Any other argument that is set sends the run to torch's own step. The last four say how torch
# computes, not what.
FUSED_ARGUMENTS = {*"lr eps betas alpha rho weight_decay lr_decay".split()}
FUSED_ARGUMENTS |= {"initial_accumulator_value", "foreach", "fused", "capturable", "differentiable"}


def _fused_formula(cls: type[Optimizer], args: dict[str, Any]) -> tuple[str, Hyper]:
    """Return the formula of a step, or "", and its constants."""
    others = args.keys() - FUSED_ARGUMENTS
    if cls not in FUSED_BETAS or any(args[key] for key in others):
        return "", Hyper(args["lr"])
    betas = np.ravel([args[key] for key in FUSED_BETAS[cls]])
    constants = {key: float(args[key]) for key in Hyper._fields if key in args}
    for number, beta in enumerate(map(float, betas), start=1):
        constants[f"beta{number}"] = beta
        constants[f"rest{number}"] = 1 - beta
        constants[f"log_beta{number}"] = math.log(beta) if beta else -math.inf
    return cls.__name__.lower(), Hyper(**constants)


def learning_rate(config: OptimizerConfig, progress: float) -> float:
    """Return the learning rate at a progress from 0 to 1 of the run."""
    if progress < config.warmup:
        return config.lr * progress / config.warmup
    done = min(1.0, (progress - config.warmup) / (1 - config.warmup))
    cosine = (1 - math.cos(math.pi * done)) / 2
    fall = {"constant": 0.0, "linear": done, "cosine": cosine}[config.schedule]
    return config.lr + (config.min_lr - config.lr) * fall


SHAPE = (4, 3)  # of a parameter on which an optimizer is tried


class _FirstValues(dict):
    """State of one parameter; keeps the first value of each entry."""

    def __init__(self, entries: dict[str, Tensor]):
        super().__init__(entries)
        self.first = {key: torch.as_tensor(value).clone() for key, value in entries.items()}

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        if value is not None:
            self.first.setdefault(key, torch.as_tensor(value).clone())


def _find_state(
    cls: type[Optimizer], args: dict[str, Any], is_rowwise: bool
) -> tuple[dict[str, Tensor], list[str]]:
    """Return the first values of the state, and the keys of the rates.

    Rates, states that begin with the learning rate, are returned as 0. All is found by steps;
    raises if a step mixes rows. With `is_rowwise` it is known not to, which saves three quarters of
    the time, also where a scheduler changes the arguments at each step.
    """
    with torch.device("cpu"):  # whatever torch.set_default_device says
        first = _first_state(cls, args)
        for key, value in first.items():
            is_of_rows = value.shape in (SHAPE, (SHAPE[0], 1))
            is_row_aligned = is_of_rows and bool((value == value[0, 0]).all())
            if value.dim() and not is_row_aligned:
                raise RuntimeError(f"its state {key!r} is not aligned with the rows")
        if is_rowwise:
            return first, []
        if not _rows_are_separable(cls, args, first):
            raise RuntimeError("the step of a row depends on other rows or on the first step")
        other = _first_state(cls, args | {"lr": 2 * args["lr"]})
    rates = [key for key in first if not torch.equal(first[key], other[key])]
    return first | {key: torch.zeros_like(first[key]) for key in rates}, rates


def _first_state(cls: type[Optimizer], args: dict[str, Any]) -> dict[str, Tensor]:
    parameter = nn.Parameter(torch.zeros(SHAPE, dtype=torch.float64))
    optimizer = cls([parameter], **args)
    state = optimizer.state[parameter] = _FirstValues(optimizer.state[parameter])
    parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    return state.first


def _rows_are_separable(
    cls: type[Optimizer], args: dict[str, Any], first: dict[str, Tensor]
) -> bool:
    """Return whether stepping a table equals stepping each of its rows."""
    start, *grads = np.random.default_rng(0).standard_normal((4, *SHAPE))

    def trained(rows: slice, state: dict[str, Tensor]) -> np.ndarray:
        parameter = nn.Parameter(torch.from_numpy(start[rows].copy()))
        optimizer = cls([parameter], **args)
        if state:
            optimizer.state[parameter] = {
                key: value[rows].clone() if value.dim() else value.clone()
                for key, value in state.items()
            }
        for grad in grads:
            parameter.grad = torch.from_numpy(grad[rows].copy())
            optimizer.step()
        return parameter.detach().numpy()

    separate = np.concatenate([trained(slice(row, row + 1), first) for row in range(4)])
    return np.allclose(trained(slice(None), {}), separate, rtol=1e-5, atol=1e-7)


def optimizer_name(optimizer: str | type[Optimizer]) -> str:
    """Return `optimizer.name` of a class; a name is returned as it is."""
    if isinstance(optimizer, str):
        return optimizer
    if not inspect.isclass(optimizer):
        kind = type(optimizer).__name__
        raise ConfigError(f"optimizer is a {kind} and no class; give a class, or its name")
    if getattr(torch.optim, optimizer.__name__, None) is optimizer:
        return optimizer.__name__
    return f"{optimizer.__module__}.{optimizer.__name__}"


def find_class(name: str) -> type[Optimizer]:
    """Return the class of torch.optim, or the one that package.Class names."""
    check_optimizer(name)
    package, _, last = name.rpartition(".")
    remedy = "name a class as package.Class"
    with refused(ConfigError, f"optimizer.name={name} cannot be imported", remedy):
        found = getattr(importlib.import_module(package or "torch.optim"), last)
    if not (inspect.isclass(found) and issubclass(found, Optimizer)):
        raise ConfigError(f"optimizer.name={name} is not a class of torch's Optimizers")
    return found


def _without_compiler(cls: type[Optimizer]) -> type[Optimizer]:
    """Return the class, with methods that do not import torch's compiler."""
    # The compiler takes 70 MiB and a second, the profiler some milliseconds.
    methods = "step", "add_param_group"
    plain = {name: torch.no_grad()(inspect.unwrap(getattr(cls, name))) for name in methods}
    plain["step"].hooked = True  # as if torch had added its profiler
    return type(cls.__name__, (cls,), plain)


def _arguments(cls: type[Optimizer], config: OptimizerConfig) -> dict[str, Any]:
    """Return the constructor's arguments, with defaults, checked by a call."""
    parameters = inspect.signature(cls).parameters
    accepted = {key: parameter.default for key, parameter in parameters.items()}
    own = set(accepted) - {"params", "lr"}
    if "lr" in config.args:
        raise ConfigError(f"optimizer.args.lr={config.args['lr']} is set by optimizer.lr alone")
    given_args = dict(config.args)
    for key in config.args:
        if key not in own:
            near = nearest(key, own)
            choices = f"choose from {' '.join(sorted(own))}; optimizer.args={{}} clears all"
            hint = f"did you mean {near}?" if near else choices
            raise ConfigError(f"optimizer.args.{key} is not an argument of {config.name}; {hint}")
        value, default = config.args[key], accepted[key]
        is_list = isinstance(value, (list, tuple))
        if isinstance(default, tuple) and not (is_list and len(value) == len(default)):
            numbers = ",".join(f"{number:g}" for number in default)
            expected = f"must be {len(default)} numbers, such as [{numbers}]"
            raise ConfigError(f"optimizer.args.{key}={value} {expected}")
        if is_list:  # torch takes no int among floats
            given_args[key] = [float(n) if type(n) is int else n for n in value]
    if "foreach" in accepted:
        # There is one parameter at a time: grouping would only copy strided views.
        accepted["foreach"] = False
    defaults = {
        key: value for key, value in accepted.items() if value is not inspect.Parameter.empty
    }
    args = defaults | given_args | {"lr": config.lr or 0.1}  # any rate will do while it is auto
    given = f"optimizer.args={config.args}" + f" or optimizer.lr={config.lr}" * bool(config.lr)
    with refused(ConfigError, f"{given} is refused by {config.name}", "change or omit it"):
        try:
            cls([nn.Parameter(torch.zeros(1, 1))], **args)
        except AssertionError as error:
            raise ValueError(str(error)) from error
    return args
