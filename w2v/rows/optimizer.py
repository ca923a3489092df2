"""Optimizer of paged embeddings, or of a whole model; reads batches ahead."""

from __future__ import annotations

import itertools
import math
import operator
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from numbers import Integral, Real
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from w2v.config import OptimizerConfig
from w2v.distributed.ranks import SINGLE, Ranks
from w2v.rows import lookup, shard
from w2v.rows.checkpoint import Checkpoints, latest
from w2v.rows.embedding import check_optimizers, paged_weights, uncompiled
from w2v.rows.group import RowGroup
from w2v.rows.lookup import Ids, LookUp, RowPage, as_tensor
from w2v.rows.optim import RowOptimizer, find_class, optimizer_name
from w2v.rows.paged_table import PagedTable, open_together, share_cache, step_fused
from w2v.rows.shard import LookedUpBatch
from w2v.rows.table import Table
from w2v.rows.weight import PagedWeight

SCHEDULED = "lr", "betas", "momentum"  # what schedulers of torch change


class PagedOptimizer(torch.optim.Optimizer):
    """One optimizer for all paged embeddings of a model.

    Steps rows that have gradients as `optimizer` of torch does, bit for bit in float32. Learning
    rate schedulers, `torch.amp.GradScaler` and `clip_grad_norm_` use it as any optimizer of torch;
    `param_groups` has a parameter for each table, with the gradients of its rows. A step consumes
    the gradients: another one without a backward pass does nothing.

    Args:
        tables: Module whose paged embeddings are stepped, or several, or their weights; or groups
            as in torch: [{"params": module, "lr": 0.1}, ...]. Frozen tables have no optimizer state
            until they are unfrozen.
        optimizer: Row-separable optimizer: a class, or the name of one in torch.optim.
        lr: Learning rate. Sparse rows need 10 to 200 times torch's defaults.
        step: Whether bias correction counts the steps of the "table" or of each "row".
        fused: Add gradients and step rows by kernels of this library, on a GPU: several times
            faster. Sums are in no fixed order, so that the last bits differ from run to run, and a
            number whose step is not finite keeps its value, as do up to three beside it. A
            parameter of `param_groups` then has the gradients of rows without their weights.
        dense: Step the other parameters too, as `w2v.optimizer`: arguments for these. A group of
            both kinds becomes two, and `param_groups` has the weights of the modules, whose `grad`
            is that of the rows that have one.
        **args: Other arguments of the optimizer, such as betas.
    """

    def __init__(
        self,
        tables: nn.Module | Iterable[nn.Module] | Iterable[dict[str, Any]],
        optimizer: str | type[torch.optim.Optimizer],
        *,
        lr: float,
        step: Literal["table", "row"] = "table",
        fused: bool = False,
        dense: dict[str, Any] | None = None,
        **args: Any,
    ):
        if step not in ("table", "row"):
            raise ValueError(f"step={step!r} is unknown; choose 'table' or 'row'")
        self._fused = fused
        self._name = optimizer_name(optimizer)
        self._counts = step
        self._tables: dict[nn.Parameter, PagedTable] = {}
        self._row_optimizers: dict[int, tuple[dict[str, Any], RowOptimizer]] = {}  # by group
        config = OptimizerConfig(name=self._name, lr=_rate(lr), args=args)
        defaults = RowOptimizer(config).arguments
        defaults["lr"] = lr  # to the `OptimizerConfig` 0 means auto
        self._stepped: list[nn.Parameter] = []  # of tables in `state`, unless users removed them
        self._dense: torch.optim.Optimizer | None = None  # steps with our groups and state
        self._dense_args: dict[str, Any] | None = None
        if dense is not None:
            inherited = {} if "optimizer" in dense else args
            self._dense_args = {"optimizer": optimizer, "lr": lr} | inherited | dense
        groups = [tables] if isinstance(tables, (nn.Module, Tensor)) else list(tables)
        if groups:
            super().__init__(groups, defaults)  # type: ignore[arg-type]
        if not (groups and self.param_groups):
            raise ValueError("there are no modules or weights to step; give the model")

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Step further tables: {"params": module, modules or weights, "lr": ...}."""
        given = param_group["params"]
        given = [given] if isinstance(given, (nn.Module, Tensor)) else list(given)
        names: dict[Any, str] = {}
        if given and isinstance(given[0], tuple):  # named_parameters()
            names = {parameter: name for name, parameter in given}
            given = [*names]
        weights = paged_weights(given)
        parts = [each.parameters() if isinstance(each, nn.Module) else [each] for each in given]
        every = dict.fromkeys(itertools.chain.from_iterable(parts))
        others = [each for each in every if not isinstance(each, PagedWeight)]

        def part(parameters: list[Any]) -> dict[str, Any]:
            named = {"param_names": [names[each] for each in parameters]} if names else {}
            return param_group | named | {"params": parameters}

        if weights:
            self._add_tables(part(weights), weights)
        if self._dense_args is not None:
            if others:
                self._add_dense(part(others))
            return
        if stray := [each for each in given if not isinstance(each, (nn.Module, PagedWeight))]:
            kind = type(stray[0]).__name__
            remedy = "give the PagedEmbedding or its model; w2v.optimizer takes both"
            raise TypeError(f"{kind} is not a module; {remedy}")
        if not weights:
            raise ValueError("these modules have no PagedEmbedding; give the model")

    def _add_tables(self, param_group: dict[str, Any], weights: Sequence[PagedWeight]) -> None:
        tables = [weight.table for weight in weights]
        is_one = self._dense_args is not None
        parameters = weights if is_one else [table.parameter for table in tables]
        if not set(self._tables.values()).isdisjoint(tables):
            raise ValueError("a PagedEmbedding is in two groups; give each table once")
        if len({table.ranks.size for table in [*self._tables.values(), *tables]}) > 1:
            raise ValueError("tables differ in process_group; give all of them the same")
        optimizer = self._row_optimizer(len(self.param_groups), self.defaults | param_group)
        if self._fused:
            for table in tables:
                table.check_fused(optimizer)  # before a table loses the state that it has
        opened = open_together([table for table in tables if table.trainable], optimizer)
        for table in tables:
            if table not in opened and (table.trainable or table.has_state):
                table.attach(optimizer)
        self._claim(tables)  # once none has been refused
        for weight in weights:
            weight.pass_gradient()  # of backward passes before
        self._tables.update(zip(parameters, tables, strict=True))
        super().add_param_group(dict(param_group, params=parameters))
        share_cache(list(self._tables.values()))

    def _claim(self, tables: Iterable[PagedTable]) -> None:
        """Have tables keep their gradients for this optimizer."""
        check_optimizers()
        for table in tables:
            table.stepped_by = weakref.ref(self)
            table.fused = self._fused
            table.shows_grad = self._dense_args is not None
            table.checked = None

    def _add_dense(self, param_group: dict[str, Any]) -> None:
        """Step other parameters by an optimizer of torch."""
        if self._dense is None:
            settings = dict(self._dense_args or {})
            kind = find_class(optimizer_name(settings.pop("optimizer")))
            self._dense = kind([param_group], **settings)
        else:
            self._dense.add_param_group(param_group)
        self.param_groups.append(self._dense.param_groups[-1])

    def _has_tables(self, group: dict[str, Any]) -> bool:
        return any(parameter in self._tables for parameter in group["params"])

    def _table_groups(self) -> Iterator[tuple[dict[str, Any], RowOptimizer, list[PagedTable]]]:
        """Yield groups of tables, with their optimizers as they are now."""
        for number, group in enumerate(self.param_groups):
            if self._has_tables(group):
                tables = [self._tables[parameter] for parameter in group["params"]]
                yield group, self._row_optimizer(number, group), tables

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Refuse torch.amp.GradScaler, which reads this, with several ranks."""
        if self._ranks.size > 1:
            reason = "the ranks of a table would not agree on GradScaler's factor"
            raise ValueError(f"{reason}; use torch.autocast with bfloat16, without a scaler")
        return False

    @uncompiled
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step all rows that have gradients, and write them back.

        Returns the loss of `closure`, if it is given.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        steps = []
        for group, optimizer, tables in self._table_groups():
            lr = _rate(group["lr"])
            for table in tables:
                if not table.is_stepped_by(self):
                    other = "another PagedOptimizer was made for a table of this one"
                    raise ValueError(f"{other}; step that one, or make this one again")
                if table.trainable or table.has_gradient:
                    table.check(optimizer)
            steps.append((tables, optimizer, lr))
        # Only now, so that a step that is refused changes no table.
        for parameter in self._stepped:
            if parameter not in self.state:  # which users clear or replace
                table = self._tables[parameter]
                table.set_state(table.initial_state())
        if self._ranks.size > 1:
            shard.reduce(list(self._tables.values()))
        for tables, optimizer, lr in steps:
            if self._fused:
                step_fused(tables, optimizer, lr)
            else:
                for table in tables:
                    table.step(optimizer, lr)
        if self._dense is not None:
            self._share_with_dense()
            self._dense.step()
        self._note_state()
        return loss

    def _share_with_dense(self) -> None:
        """Give the dense optimizer the groups and the state, which users replace."""
        groups = [group for group in self.param_groups if not self._has_tables(group)]
        self._dense.param_groups, self._dense.state = groups, self.state  # type: ignore[union-attr]

    def _note_state(self) -> None:
        """Note that there is a state: else torch.distributed.checkpoint steps."""
        self._stepped = [*self._tables]
        for parameter in self._stepped:
            self.state.setdefault(parameter, {})

    def pages(
        self,
        loader: Iterable[Any],
        key: Any | list[Any] | Callable[[Any], Ids | Sequence[Ids]],
        ahead: int = 4,
    ) -> Iterator[Any]:
        """Yield the batches of a loader while rows of the next are fetched.

            for batch in paged.pages(loader, key="user_id"):
                loss = model(users(batch["user_id"]))

        Give the forward pass the ids as they are in the batch: for others, rows are looked up anew.
        Without gpu_bytes, pinned tables get room for the rows of `ahead` batches until the loop
        ends, if these are many: half of what is free at most. Results are those of the loader, bit
        for bit, unless both it and the loop draw from one random generator. Errors of the loader
        or of ids are raised once the batches before are used.

        Args:
            loader: Batches, such as those of a DataLoader.
            key: Item of a batch that has the ids; a list of one for each table, in the order of the
                tables, frozen ones too; or a function that returns the ids for each table, or the
                only one.
            ahead: Number of batches that are read ahead. The rows of half as many move together.
        """
        if ahead < 1:
            raise ValueError(f"ahead={ahead} is too small; it must be 1 or more")
        tables = list(self._tables.values())
        if not tables:  # of `w2v.optimizer` for a model without paged embeddings
            yield from loader
            return
        drawn = (LookedUpBatch(batch, look_up_batch(tables, batch, key)) for batch in loader)
        batches: Iterator[LookedUpBatch] = drawn
        if self._ranks.size > 1:
            batches = shard.sent_ahead(lambda: shard.request(tables, lambda: next(drawn)))
        together = max(1, ahead // 2)  # batches of a page of the cache
        try:
            for number, window in enumerate(_windows(batches, ahead)):
                begins_page = number % together == 0
                if begins_page:  # its rows, unless they are there, and those of the page after it
                    _prefetch(window, 0, together)
                    _prefetch(window, together, together)
                looked_up = window.popleft()
                look_ups = looked_up.look_ups
                for look_up in look_ups:
                    look_up.wait()  # raises for wrong ids
                for table, page in zip(tables, looked_up.pages, strict=True):
                    table.announced = page
                    if begins_page:
                        table.check_views()  # later writes by views would be lost
                yield looked_up.batch
                for look_up in look_ups:  # drop unused vectors, which refer to it
                    look_up.computed.clear()
        finally:
            for table in tables:
                table.announced = None
                table.check_views()  # before any rows are written over what a view has written
            for table in tables:
                table.end_pages()

    @uncompiled
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients of all tables, or set them to zero."""
        for table in self._tables.values():  # several times faster than torch's own way
            table.zero_grad(set_to_none)
        if self._dense is not None:
            self._dense.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """Return the state in the format of torch's optimizer of dense tables.

        State is copied, which takes as much memory again. With several ranks, only rank 0 returns
        it. Rows without a step have the initial state that torch would give them now: the step
        sizes of Rprop and ASGD are the learning rate.
        """
        own = self.state
        states = {key: state for key, state in own.items() if key not in self._tables}
        for group, optimizer, tables in self._table_groups():
            for parameter, table in zip(group["params"], tables, strict=True):
                state: Any = {name: table.gather(its) for name, its in table.state().items()}
                if state and self._ranks.rank == 0:
                    optimizer.set_rates(state, _rate(group["lr"]))
                    states[parameter] = state
        self.state = defaultdict(dict, states)  # where torch finds them, before hooks of users
        try:
            return super().state_dict()
        finally:
            self.state = own

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of this class, or of torch's optimizer of dense tables.

        A table without an entry in "state" gets the initial state, as in torch.

        Raises:
            ValueError: It is for other tables or another optimizer; nothing has changed.
        """
        loaded: list[tuple[PagedTable, dict[str, Tensor]]] = []

        def put(_: Any) -> None:
            if self._dense is not None:
                self._share_with_dense()
                self._dense.__setstate__({})  # adds what earlier versions of torch have not saved
            self._note_state()
            for table, state in loaded:
                table.set_state(state)

        with (  # between the hooks of users, which find the states of tables too
            self.register_load_state_dict_pre_hook(lambda _, given: self._take(given, loaded)),
            self.register_load_state_dict_post_hook(put, prepend=True),
        ):
            super().load_state_dict(state_dict)

    def _take(
        self, state_dict: dict[str, Any], loaded: list[tuple[PagedTable, dict[str, Tensor]]]
    ) -> dict[str, Any]:
        """Return a state dict without the states of tables; list these."""
        if missing := {"param_groups", "state"}.difference(state_dict):
            found = f"state_dict begins with {[*state_dict][:3]} and has no {sorted(missing)[0]}"
            raise ValueError(f"{found}; give an optimizer's")
        listed = [number for group in state_dict["param_groups"] for number in group["params"]]
        parameters = itertools.chain.from_iterable(group["params"] for group in self.param_groups)
        numbers = dict(zip(parameters, listed, strict=False))  # torch compares the lengths
        others = dict(state_dict["state"])
        for group, optimizer, tables in self._table_groups():
            for parameter, table in zip(group["params"], tables, strict=True):
                place = numbers.get(parameter)
                given = others.pop(place, {})
                if given and not table.has_state:  # as it is frozen
                    table.check(optimizer)
                state, rows = table.state(), table.num_embeddings
                # Some classes of torch count steps by an int, and keep None for an unused state.
                given = {key: as_tensor(value) for key, value in given.items() if value is not None}
                given = given or table.initial_state()
                shapes = {key: (rows, *own.shape[1:])[: own.dim()] for key, own in state.items()}
                if {key: value.shape for key, value in given.items()} != shapes:
                    raise ValueError(f"the state of table {place} is of another optimizer or shape")
                loaded.append((table, given))
        return state_dict | {"state": others}

    def save(self, folder: str | Path, step: int) -> None:
        """Write weights and states of all tables, and learning rates, to a folder.

        The folder keeps the last two steps. Each rank writes its rows, without a copy in memory;
        they load into any number of ranks. Several machines need storage that they share.
        """
        if not isinstance(step, Integral) or step < 0:
            raise ValueError(f"step={step!r} is no step; give a whole number of at least 0")
        Path(folder).mkdir(parents=True, exist_ok=True)
        last = latest(Path(folder), self._ranks)
        if last and step <= last.state["step"]:
            saved = f"{folder} has step {last.state['step']}, and step={step} is not later"
            raise ValueError(f"{saved}; give another folder")
        saver = Checkpoints(Path(folder), self._parts(), 0, self._ranks)
        groups = [
            {key: group[key] for key in SCHEDULED if key in group} | {"lr": _rate(group["lr"])}
            for group in self.param_groups
        ]
        saver.save({"step": int(step), "groups": groups}, copied=False)
        saver.wait()

    def load(self, folder: str | Path) -> int:
        """Load the last step that is in a folder of `save`; return it.

        Raises:
            ValueError: There is none, or it is damaged or of other tables.
        """
        if (saved := latest(Path(folder), self._ranks)) is None:
            raise ValueError(f"{folder} holds no checkpoint; give a folder of PagedOptimizer.save")
        with saved.checked():
            # Earlier versions have saved the rates alone, and a run of `w2v train` has neither.
            groups = saved.state.get("groups", [{"lr": lr} for lr in saved.state.get("lr", [])])
            groups, step = [{**group} for group in groups], operator.index(saved.state["step"])
            for group in groups:
                if "betas" in group:  # JSON has no tuples
                    group["betas"] = tuple(group["betas"])
        if len(groups) != len(self.param_groups):
            counts = f"{len(groups)} groups of tables, and the optimizer {len(self.param_groups)}"
            raise ValueError(f"{folder} has {counts}; make it with the same groups")
        saved.load(self._parts(), self._ranks)
        for group, values in zip(self.param_groups, groups, strict=True):
            group.update(values)
        return step

    @property
    def _ranks(self) -> Ranks:
        return next((table.ranks for table in self._tables.values()), SINGLE)

    def _parts(self) -> list[Table]:
        """Return what is written of each table, with a name of its own."""
        parts = []
        for number, table in enumerate(self._tables.values()):
            table.store.flush()
            table.store.version += 1
            for part, name in zip(table.store.table.parts, ("table", "state"), strict=False):
                part.name = f"{name}-{number}"
                parts.append(part)
        return parts

    def __getstate__(self) -> dict[str, Any]:
        """Return what copies and pickles hold."""
        names = "_name", "_counts", "_fused", "_tables", "_dense", "_dense_args", "_stepped"
        own = {name: getattr(self, name) for name in names}
        return super().__getstate__() | own | {"_row_optimizers": {}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._claim(self._tables.values())

    def _row_optimizer(self, number: int, group: dict[str, Any]) -> RowOptimizer:
        """Return the optimizer of a group, with the arguments it has now."""
        args = {
            name: value
            for name, value in group.items()
            if value is not None and name != "lr" and name in self.defaults
        }
        known_args, _ = self._row_optimizers.get(number, (None, None))
        if known_args != args:
            config = OptimizerConfig(self._name, _rate(group["lr"]), args=args, step=self._counts)
            self._row_optimizers[number] = args, RowOptimizer(config, may_change=True)
        _, optimizer = self._row_optimizers[number]
        return optimizer


def optimizer(
    model: nn.Module | Iterable[dict[str, Any]],
    optimizer: str | type[torch.optim.Optimizer] = "Adam",
    *,
    lr: float,
    dense: dict[str, Any] | None = None,
    **settings: Any,
) -> PagedOptimizer:
    """Return one optimizer for the paged tables and all other parameters.

        optimizer = w2v.optimizer(model, "Adam", lr=0.05, dense={"lr": 0.001})

    Args:
        model: The model, or groups of parameters as in torch.
        optimizer: Class, or the name of one in torch.optim.
        lr: Learning rate of the tables. Sparse rows need 10 to 200 times torch's defaults.
        dense: Arguments for the other parameters, where they differ from those of the tables;
            {"optimizer": "SGD", "lr": 0.1} names another class, with its arguments.
        **settings: Further arguments of `PagedOptimizer`.
    """
    return PagedOptimizer(model, optimizer, lr=lr, dense=dense or {}, **settings)


def _rate(lr: Any) -> float:
    """Return a learning rate; raise `ValueError` for what is none."""
    is_number = isinstance(lr, Real) or (isinstance(lr, Tensor) and lr.numel() == 1)
    if not (is_number and math.isfinite(lr) and lr >= 0):
        raise ValueError(f"lr={lr!r} is not a learning rate; give a number of at least 0")
    return float(lr)


def look_up_batch(tables: list[PagedTable], batch: Any, key: Any) -> list[RowPage]:
    """Begin to look up the rows of a batch in each table."""
    if callable(key):
        ids = key(batch)
        if len(tables) == 1 and isinstance(ids, (Tensor, np.ndarray)):
            ids = [ids]
    else:
        items = key if isinstance(key, list) else [key]
        ids = [batch[item] for item in items]
    if len(ids) != len(tables):
        raise ValueError(f"key gives ids for {len(ids)} tables of {len(tables)}; give one for each")
    return shard.look_up_ahead(tables, ids)


def _windows(batches: Iterator[LookedUpBatch], ahead: int) -> Iterator[deque[LookedUpBatch]]:
    """Yield the next batch and `ahead` more, of which the caller takes one.

    An error is raised once the batches before it are taken.
    """
    window: deque[LookedUpBatch] = deque()
    error: Exception | None = None
    while window or error is None:
        while error is None and len(window) <= ahead:
            try:
                window.append(next(batches))
            except Exception as reason:  # such as StopIteration
                error = reason
        if window:
            yield window
    if error is not None and not isinstance(error, StopIteration):
        raise error


def _prefetch(window: Iterable[LookedUpBatch], first: int, count: int) -> None:
    """Begin to bring the rows of some batches of a window as one page."""
    pages: dict[RowGroup, tuple[list[LookUp], list[LookUp]]] = {}
    for number, batch in enumerate(itertools.islice(window, first, None)):
        for look_up in batch.look_ups:
            look_ups, soon = pages.setdefault(look_up.group, ([], []))
            (look_ups if number < count else soon).append(look_up.own)
    for group, (look_ups, soon) in pages.items():
        lookup.prefetch(group, look_ups, soon)
