"""Any row-separable torch optimizer, applied to the rows of a page; and how its learning rate moves over the run.

Which state an optimizer keeps is found by stepping it on a tiny parameter, so nothing here names an optimizer. State is lazy,
as in torch.optim.SparseAdam: a row that a step does not touch keeps its weight and its state as they are.
"""

from __future__ import annotations

import difflib
import inspect
import math
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from w2v.config import ConfigError, OptimizerConfig
from w2v.kernels import cuda
from w2v.kernels.batch import Held, Page
from w2v.model.table import RowState, Table


class NotRowwise(Exception):
    """The optimizer's step of a row depends on more than that row, its gradient, its state and a few scalars."""


class RowOptimizer:
    """A torch.optim class whose state lives in the records of a table.

    With `step="table"` the scalars of the state (Adam's step, NAdam's product) are kept once for a table, as in SparseAdam;
    with `step="row"` each row keeps its own, so that bias correction counts the steps which the row itself has made.
    """

    def __init__(self, config: OptimizerConfig, fused: bool = False):
        found = _find_class(config.name)
        self._class = _bare(found)
        self._args = _arguments(self._class, config)
        self._formula = _fused_formula(found, self._args) if fused else None
        try:
            initial = _probe(self._class, self._args)
        except NotRowwise as reason:
            raise ConfigError(
                f"optimizer.name={config.name} with optimizer.args={config.args} cannot be paged: {reason}; "
                f"row-wise choices: {' '.join(rowwise_optimizers())}"
            ) from None
        self._wide = {
            key: float(value.flatten()[0]) for key, value in initial.items() if value.dim()
        }
        self._scalars = {key: value for key, value in initial.items() if not value.dim()}
        self._per_row = config.step == "row" and bool(self._scalars)
        self.occurrence_cap = config.occurrence_cap
        self._instances: dict[torch.device, torch.optim.Optimizer] = {}

    def states(self, dim: int) -> dict[str, RowState]:
        """What a record holds besides its D weights, in order."""
        states = {key: RowState(dim, value) for key, value in self._wide.items()}
        if self._per_row:
            states |= {key: RowState(1, float(value)) for key, value in self._scalars.items()}
        return states

    @property
    def scalars(self) -> dict[str, Tensor]:
        """What a table holds once, with its first values."""
        return {} if self._per_row else self._scalars

    def step(self, page: Page, lr: float) -> None:
        """Step the page's weights and state in place, by its gradients."""
        if self.occurrence_cap:
            page.grad_UD = (
                page.grad_UD
                * (self.occurrence_cap / page.pairs_U.clamp(min=self.occurrence_cap))[:, None]
            )
        weight_UD, state = page["weight"], {key: page[key] for key in self._wide}
        if not self._per_row:
            self._apply(weight_UD, page.grad_UD, state | page.table.scalars, lr)
            return
        # torch keeps one step a parameter, so rows that have made equally many steps go together.
        own_US = torch.cat([page[key] for key in self._scalars], dim=1)
        values_GS, group_U = torch.unique(own_US, dim=0, return_inverse=True)
        for group, values_S in enumerate(values_GS.cpu()):
            rows = torch.nonzero(group_U == group).flatten()
            some_weight, some_state = (
                weight_UD[rows],
                {key: value[rows] for key, value in state.items()},
            )
            scalars = dict(zip(self._scalars, values_S.unbind(), strict=True))
            self._apply(some_weight, page.grad_UD[rows], some_state | scalars, lr)
            for key, value in ({"weight": some_weight} | some_state).items():
                page[key].index_copy_(0, rows, value)
            for key, value in scalars.items():
                page[key].index_fill_(0, rows, float(value))

    @property
    def formula(self) -> str:
        """The name of the formula by which one kernel makes the step instead of the torch.optim class; empty without one."""
        return self._formula.name if self._formula else ""

    @property
    def fused(self) -> bool:
        return self._formula is not None

    @property
    def eps(self) -> float | None:
        """What a step adds to roots and sums that it divides by; None for an optimizer that divides by none."""
        return self._args.get(
            "eps", getattr(inspect.signature(self._class).parameters.get("eps"), "default", None)
        )

    @property
    def descends(self) -> bool:
        """Whether a step is gradient descent and no more, which needs no batch: no state, weight decay or cap on occurrences."""
        return (
            self.formula == "sgd"
            and not self._formula.hyper.weight_decay
            and not self.occurrence_cap
        )

    def step_in_place(
        self,
        tables: tuple[Table, Table],
        held: tuple[Held, Held],
        claims: tuple[cuda.Claims, cuda.Claims],
        claimed: tuple[Tensor, Tensor],
        stepped: Tensor,
        lr: float,
        guard: cuda.Guard,
    ) -> None:
        """The same step of two tables of one shape by a fused kernel, on so many claimed rows of each, which it adds to those `stepped`."""
        (step, column, hyper), _ = (self.next_step(table, lr) for table in tables)
        cap, noise = self.occurrence_cap, (tables[0].next_noise(), tables[1].next_noise())
        cuda.step_rows(
            self.formula,
            len(self._wide),
            held,
            claims,
            claimed,
            stepped,
            step,
            column,
            hyper,
            cap,
            noise,
            guard,
        )

    def next_step(self, table: Table, lr: float) -> tuple[float, int, cuda.Hyper]:
        """Count a step of the table: its number, the column where rows count their own (or -1), and what a formula takes."""
        assert self._formula is not None
        step, own, number = table.scalars.get("step"), table.columns.get("step"), 0.0
        if step is not None:
            number = float(step) + 1
            step.fill_(number)  # takes half the time of adding to it
        return number, own.start if own else -1, cuda.Hyper(float(lr), *self._formula.hyper[1:])

    def _apply(
        self, weight_UD: Tensor, grad_UD: Tensor, state: dict[str, Tensor], lr: float
    ) -> None:
        if weight_UD.device not in self._instances:
            self._instances[weight_UD.device] = self._class([nn.Parameter(weight_UD)], **self._args)
        optimizer = self._instances[weight_UD.device]
        (group,) = optimizer.param_groups
        (parameter,) = group["params"]
        parameter.data, parameter.grad, group["lr"] = weight_UD, grad_UD, lr
        optimizer.state[parameter] = state
        optimizer.step()


class Formula(NamedTuple):
    """A function of kernels/optim.cu and its constants."""

    name: str
    hyper: cuda.Hyper


# For each class that has a formula: the arguments of torch's that it takes as beta1 and beta2. It takes these and no others that matter.
FUSED = {
    torch.optim.SGD: (),
    torch.optim.Adagrad: (),
    torch.optim.RMSprop: ("alpha",),
    torch.optim.Adam: ("betas",),
    torch.optim.AdamW: ("betas",),
    torch.optim.Adamax: ("betas",),
}
FUSED_TAKES = {
    "lr",
    "betas",
    "alpha",
    "eps",
    "weight_decay",
    "lr_decay",
    "initial_accumulator_value",
}
NO_MATTER = {"foreach", "fused", "capturable", "differentiable"}  # how torch computes, not what


def _fused_formula(cls: type[torch.optim.Optimizer], args: dict[str, Any]) -> Formula | None:
    """The formula that makes this optimizer's step, or None if there is none for these arguments."""
    accepted = inspect.signature(cls).parameters
    given = {
        key: parameter.default for key, parameter in accepted.items() if key != "params"
    } | args
    if cls not in FUSED or any(given[key] for key in given.keys() - FUSED_TAKES - NO_MATTER):
        return None
    betas = [
        float(beta)
        for key in FUSED[cls]
        for beta in (given[key] if key == "betas" else [given[key]])
    ]
    hyper = cuda.Hyper(
        **{
            key: float(given[key])
            for key in ("lr", "eps", "weight_decay", "lr_decay")
            if key in given
        }
    )
    for number, beta in enumerate(betas, start=1):
        log = math.log(beta) if beta else -math.inf
        hyper = hyper._replace(
            **{f"beta{number}": beta, f"rest{number}": 1 - beta, f"log_beta{number}": log}
        )
    return Formula(cls.__name__.lower(), hyper)


def learning_rate(config: OptimizerConfig, share: float) -> float:
    """The learning rate when `share` (0 to 1) of the run is done."""
    if share < config.warmup:
        return config.lr * share / config.warmup
    done = min(1.0, (share - config.warmup) / (1 - config.warmup))
    fall = {"constant": 0.0, "linear": done, "cosine": (1 - math.cos(math.pi * done)) / 2}[
        config.schedule
    ]
    return config.lr + (config.min_lr - config.lr) * fall


def rowwise_optimizers() -> list[str]:
    """The names of the torch.optim classes that a page can be stepped with."""

    def works(name: str) -> bool:
        cls = _bare(getattr(torch.optim, name))
        try:
            _probe(cls, _arguments(cls, OptimizerConfig(name=name)))
        except (ConfigError, NotRowwise):
            return False
        return True

    return [name for name in _class_names() if works(name)]


class _FirstValues(dict):
    """The state of one parameter; remembers what each entry was when the optimizer first set it."""

    def __init__(self, entries: dict[str, Tensor]):
        super().__init__(entries)
        self.first = {key: torch.as_tensor(value).clone() for key, value in entries.items()}

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        if value is not None:
            self.first.setdefault(key, torch.as_tensor(value).clone())


def _probe(cls: type[torch.optim.Optimizer], args: dict[str, Any]) -> dict[str, Tensor]:
    """The first value of each entry of the optimizer's state: 0-dimensional, or of the parameter's shape and one value throughout.

    Raises `NotRowwise` unless stepping rows apart, from these first values, gives what stepping them together gives.
    """
    shape = (4, 3)
    parameter = nn.Parameter(torch.zeros(shape))
    try:
        optimizer = cls([parameter], **args)
        state = optimizer.state[parameter] = _FirstValues(optimizer.state[parameter])
        parameter.grad = torch.zeros(shape)
        optimizer.step()
    except (RuntimeError, TypeError, ValueError, AssertionError, AttributeError) as error:
        raise NotRowwise(" ".join(str(error).split())) from None
    for key, value in state.first.items():
        if value.dim() and (value.shape != shape or not bool((value == value[0, 0]).all())):
            raise NotRowwise(f"its state {key!r} is not aligned with the rows")
    if not _rows_step_apart(cls, args, state.first):
        raise NotRowwise(
            "a row's step depends on other rows, or its first step on more than the first state"
        )
    return state.first


def _rows_step_apart(
    cls: type[torch.optim.Optimizer], args: dict[str, Any], first: dict[str, Tensor]
) -> bool:
    """Whether three steps of a dense parameter equal three steps of its rows one by one, started from the `first` state."""
    start, *grads = np.random.default_rng(0).standard_normal((4, 4, 3), np.float32)

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

    apart = np.concatenate([trained(slice(row, row + 1), first) for row in range(4)])
    return np.allclose(trained(slice(None), {}), apart, rtol=1e-5, atol=1e-7)


def _class_names() -> list[str]:
    return sorted(
        name
        for name, cls in vars(torch.optim).items()
        if inspect.isclass(cls)
        and issubclass(cls, torch.optim.Optimizer)
        and cls is not torch.optim.Optimizer
    )


def _find_class(name: str) -> type[torch.optim.Optimizer]:
    if name not in _class_names():
        lower = {known.lower(): known for known in _class_names()}
        near = difflib.get_close_matches(name.lower(), lower, n=1, cutoff=0.5)
        hint = (
            f"did you mean {lower[near[0]]}?"
            if near
            else f"row-wise choices: {' '.join(rowwise_optimizers())}"
        )
        raise ConfigError(f"optimizer.name={name} is not a torch.optim class; {hint}")
    return getattr(torch.optim, name)


def _bare(cls: type[torch.optim.Optimizer]) -> type[torch.optim.Optimizer]:
    """The class without what tells torch's compiler of it, which would import that compiler: 70 MiB and a second."""
    plain = {
        name: torch.no_grad()(inspect.unwrap(getattr(cls, name)))
        for name in ("step", "add_param_group")
    }
    return type(cls.__name__, (cls,), plain)


def _arguments(cls: type[torch.optim.Optimizer], config: OptimizerConfig) -> dict[str, Any]:
    """The constructor's arguments, checked by constructing it."""
    accepted = inspect.signature(cls).parameters
    for key in config.args:
        if key not in accepted or key in ("params", "lr"):
            near = difflib.get_close_matches(key, set(accepted) - {"params", "lr"}, n=1, cutoff=0.6)
            hint = (
                f"did you mean {near[0]}?"
                if near
                else "optimizer.args={} clears what a config file has set"
            )
            raise ConfigError(f"optimizer.args.{key} is not an argument of {config.name}; {hint}")
    args = dict(config.args, lr=config.lr)
    if "foreach" in accepted:
        args.setdefault(
            "foreach", False
        )  # there is one parameter at a time: grouping would only copy strided views
    try:
        cls([nn.Parameter(torch.zeros(1, 1))], **args)
    except (TypeError, ValueError, AssertionError, RuntimeError) as error:
        raise ConfigError(
            f"optimizer.args={config.args} or optimizer.lr={config.lr} is refused by {config.name}: {error}"
        ) from None
    return args
