"""Embedding modules for tables larger than the memory of the GPU.

The step updates the rows that have gradients. Other rows keep weight and state, as with
torch.optim.SparseAdam. Invalid input raises an error of one line, and nothing is written.

Shapes: N ids or bags, T tables, U unique rows, D dimensions.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._C._dynamo.eval_frame import get_eval_frame_callback
from torch.autograd.function import once_differentiable
from torch.optim.optimizer import register_optimizer_step_pre_hook

from w2v.config import ConfigError, TransferConfig
from w2v.rows import lookup, ops, shard
from w2v.rows.group import Function, outside_inference
from w2v.rows.lookup import Identity, Ids, RowPage, as_tensor
from w2v.rows.ops import Bags
from w2v.rows.paged_table import PagedTable
from w2v.rows.shard import RoutedLookUp, look_up_alone
from w2v.rows.store import Rows, open_device
from w2v.rows.table import Init, Storage, check_table
from w2v.rows.weight import PagedWeight, hand_over

LINEAR_ROWS = 1 << 18  # whose products are computed at a time
TRANSFORMED = (
    "torch.func takes frozen paged tables, with ids that are no arguments of its functions; for "
    "others call w2v.unpage(model) first"
)
EXPORTED = "rows of a paged table cannot be exported; export w2v.unpage(model)"
Use = tuple[PagedWeight, RowPage]  # rows of a weight in a forward pass


class RowError(IndexError, RuntimeError, AssertionError):
    """A number that is no row; torch raises one of these for each use."""


def uncompiled(function: Function) -> Function:
    """Return the function, which torch.compile calls as it is.

    torch.compiler.disable would import the compiler, which takes as long as torch itself, and would
    take longer at each call. Export and tracing are refused. Under torch.func the function runs
    without its transforms, and an error says what they take.
    """
    disabled: list[Function] = []

    @functools.wraps(function)
    def call(*args: Any, **settings: Any) -> Any:
        called = function
        if torch.compiler.is_compiling() or get_eval_frame_callback() is not None:
            if torch.compiler.is_exporting():
                raise RuntimeError(EXPORTED)
            if not disabled:
                disabled.append(torch.compiler.disable(function))
            called = disabled[0]
        if torch.jit.is_tracing() or torch.fx._symbolic_trace._is_fx_tracing_flag:
            raise RuntimeError(EXPORTED)
        if not torch._C._are_functorch_transforms_active():
            return called(*args, **settings)
        try:
            with torch._C._DisableFuncTorch():  # whose tensors end with its function
                return called(*args, **settings)
        except RuntimeError as error:
            if isinstance(error, RowError):
                raise
            raise RuntimeError(TRANSFORMED) from error

    return call  # type: ignore[return-value]


def _of_table(name: str) -> Any:
    """Return a property of a module that is an attribute of its table."""

    def change(module: PagedRows, value: Any) -> None:
        if name not in RULES and value != getattr(module._table, name):
            raise ValueError(f"{name}={value!r} cannot be set; make another, or use grow() or to()")
        setattr(module._table, name, value)

    return property(lambda module: getattr(module._table, name), change)


class PagedRows(nn.Module):
    """What `PagedEmbedding` and `PagedEmbeddingBag` have in common."""

    num_embeddings: int = _of_table("num_embeddings")
    embedding_dim: int = _of_table("embedding_dim")
    max_norm: float | None = _of_table("max_norm")
    norm_type: float = _of_table("norm_type")
    scale_grad_by_freq: bool = _of_table("scale_grad_by_freq")
    sparse: bool = _of_table("sparse")
    storage: Storage = _of_table("storage")
    device: torch.device = _of_table("device")
    dtype: torch.dtype = _of_table("dtype")
    path: str | Path | None = _of_table("path")
    state_storage: Storage | None = _of_table("state_storage")
    weight: PagedWeight  # type: ignore[assignment]

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
        _weight: Tensor | None = None,
        _freeze: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        storage: Storage = "cpu",
        path: str | Path | None = None,
        seed: int | None = None,
        init: Init | Tensor | np.ndarray | None = None,
        state_storage: Storage | None = None,
        gpu_bytes: str | int = 0,
        process_group: torch.distributed.ProcessGroup | None = None,
    ):
        nn.Module.__init__(self)
        if _weight is not None:
            if init is not None:
                raise ValueError("_weight and init both give the first weights; leave one out")
            init, dtype = _weight, dtype or _weight.dtype
        dtype = dtype or torch.get_default_dtype()
        ranks = shard.ranks_of(process_group)
        shape = {"num_embeddings": num_embeddings, "embedding_dim": embedding_dim, "dtype": dtype}
        ranks.require_equal(shape, "make the same table on all ranks")
        try:
            cache_size = TransferConfig(gpu_bytes=str(gpu_bytes))
        except ConfigError as error:  # which names the key of a configuration
            raise ValueError(str(error).removeprefix("transfer.")) from None
        if state_storage and "mmap" in (storage, state_storage):
            both = f"state_storage={state_storage!r} with storage={storage!r}"
            raise ValueError(f"{both}: a file holds both; leave state_storage out")
        check_table(num_embeddings, embedding_dim, {}, storage, dtype, path)
        if state_storage:
            check_table(num_embeddings, embedding_dim, {}, state_storage, dtype, None)
        if ranks.size > 1 and path is not None:
            raise ValueError(f"path={path}: rows of several ranks are in no file; use 'pinned'")
        first = _initialiser(init, num_embeddings, embedding_dim)
        draws_own = first is None and type(self).reset_parameters is not PagedRows.reset_parameters
        if draws_own and path is not None:
            raise ValueError(f"path={path}: a file is not open for reset_parameters(); give init")
        table = PagedTable(
            num_embeddings=num_embeddings,
            embedding_dim=embedding_dim,
            max_norm=max_norm,
            norm_type=norm_type,
            scale_grad_by_freq=scale_grad_by_freq,
            sparse=sparse,
            storage=storage,
            device=open_device(device, storage),
            dtype=dtype,
            path=path,
            state_storage=state_storage,
            cache_size=cache_size,
            ranks=ranks,
            seed=None if seed is None else ranks.all_gather(operator.index(seed))[0],
            init=first,
            has_zero_padding=padding_idx is not None and first is init,
            trainable=not _freeze,
            shares_no_rows=process_group is None,
        )
        if draws_own:
            table.seed = table.seed or 0  # so that torch's generator draws nothing before
        elif first is None and seed is None:
            table.draw_normal(num_embeddings)
        # Rows of a process group have their own exchange: data-parallel modules do not see them.
        weights = self._parameters if process_group is None else vars(self)
        weights["weight"] = PagedWeight(table)
        self.padding_idx = padding_idx
        if draws_own:
            self.reset_parameters()

    @classmethod
    def from_pretrained(
        cls: Any, embeddings: Tensor | np.ndarray, freeze: bool = True, *rules: Any, **settings: Any
    ) -> Any:
        """Return a module with these weights [V, D].

        `rules` are those of torch's method, in its order; `settings` are of the class.
        """
        weights_VD = as_tensor(embeddings)
        if weights_VD.dim() != 2:
            raise ValueError(f"embeddings have shape {list(weights_VD.shape)}; give weights [V, D]")
        order = inspect.signature(super().from_pretrained)  # type: ignore[misc]
        _, _, *given = order.bind(weights_VD, freeze, *rules).arguments.items()
        first: dict[str, Any] = {"dtype": weights_VD.dtype, "_freeze": freeze} | settings
        return cls(*weights_VD.shape, init=weights_VD, **dict(given), **first)

    @property
    def _weight(self) -> PagedWeight:
        weight = self._parameters.get("weight")  # ten times faster than `self.weight`
        if weight is None:  # of a process group, or a parametrized one
            weight = self.weight
        if not isinstance(weight, PagedWeight):
            kind = type(weight).__name__
            raise TypeError(f"weight was replaced by a {kind}; w2v.unpage gives a plain module")
        return weight

    @property
    def _table(self) -> PagedTable:
        return self._weight.table

    @property
    def padding_idx(self) -> int | None:  # type: ignore[override]
        return self._table.padding_idx

    @padding_idx.setter
    def padding_idx(self, row: int | None) -> None:
        if row is not None:
            rows = self.num_embeddings
            if row not in range(-rows, rows):
                limits = f"{-rows} to {rows - 1}"
                raise RowError(f"padding_idx={row} is not a row; give one of {limits}")
            row = int(row) % rows
        self._table.padding_idx = row

    @property
    def store(self) -> Rows:
        """Rows, with `get`, `put`, `save`, `load` and `flush` of a `RowStore`."""
        return self._table.store

    def linear(self, vectors: Tensor) -> Tensor:
        """Return logits [..., V] over all rows of vectors [..., D].

        As F.linear(vectors, table.weight), but a part of the rows at a time: the compute device
        needs no memory for the weights, only for the gradient of all rows.
        """
        if self._table.ranks.size > 1:
            raise ValueError("linear is not supported for rows of several ranks; use one process")
        return _AllRows.apply(vectors, self.weight, self._table)

    def reset_parameters(self) -> None:
        """Draw normal weights of standard deviation 1 anew.

        This holds for tables with an `init` too. The padding row is zero. Optimizer state stays.
        """
        self._table.reset()

    def grow(self, num_embeddings: int, init: Init | None = None) -> None:
        """Append rows; the others keep weight and optimizer state.

        `init` is a function from the new row ids [n] to weights [n, D]; by default they are normal
        with standard deviation 1. All rows are copied to a larger table.
        """
        if init is not None and not callable(init):
            kind = type(init).__name__
            raise ValueError(f"init is a {kind}; give a function of row ids, or write into weight")
        if num_embeddings < self.num_embeddings:
            fewer = f"{num_embeddings} rows are fewer than the present {self.num_embeddings}"
            raise ValueError(f"{fewer}; a table can only grow")
        self._table.grow(num_embeddings, init)
        self.weight.update_shape()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients, or set them to zero, as the optimizer does.

        `zero_grad` of a module around this one does so if `w2v.optimizer` steps the table.
        """
        self._table.zero_grad(set_to_none)
        super().zero_grad(set_to_none)

    def extra_repr(self) -> str:
        shown = f"{self.num_embeddings}, {self.embedding_dim}"
        usual = {"padding_idx": None, "max_norm": None, "norm_type": 2.0}
        usual |= {"scale_grad_by_freq": False, "mode": None}
        for name, unseen in usual.items():
            if (value := getattr(self._table, name)) != unseen:
                shown += f", {name}={value!r}"
        return f"{shown}, storage={self.storage!r}, device={str(self.device)!r}"

    # What nn.Module calls, and torch.jit.script.

    def __prepare_scriptable__(self) -> nn.Module:
        raise RuntimeError(EXPORTED)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        if name == "weight" and not isinstance(param, PagedWeight):
            remedy = "write into it: table.weight.data.copy_(values); to tie, assign table.weight"
            raise ValueError(f"weight cannot be replaced; {remedy} to the other module")
        if isinstance(param, PagedWeight) and name == "weight" in self._parameters:
            for rule in RULES:
                own, other = getattr(self._table, rule), getattr(param.table, rule)
                if own != other:
                    differ = f"{rule}={own!r} and {rule}={other!r}"
                    raise ValueError(f"modules of one weight differ: {differ}; make them alike")
        super().register_parameter(name, param)

    @contextlib.contextmanager
    def _without_weight(self) -> Iterator[None]:
        own = self._parameters
        self._parameters = {name: value for name, value in own.items() if name != "weight"}
        try:
            yield
        finally:
            self._parameters = own | self._parameters

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> PagedRows:
        """Move the device of forward passes; the table stays where it is stored."""
        table = self._table
        empty = torch.empty(0, self.embedding_dim, dtype=table.vector_dtype, device=table.device)
        empty = fn(empty)
        if empty.device.type == "cpu" and empty.is_shared():
            raise ValueError("processes cannot share a table by share_memory(); use process_group")
        if empty.dtype != table.vector_dtype:
            table.convert(empty.dtype)
        if empty.device != self.device:
            table.move(empty.to(table.parameter.dtype))
        self.weight.update_shape()
        with self._without_weight():
            return super()._apply(fn, recurse)

    def _save_to_state_dict(self, destination: dict, prefix: str, keep_vars: bool) -> None:
        if keep_vars and "weight" in self._parameters:
            return super()._save_to_state_dict(destination, prefix, keep_vars)
        # A copy, as a view would be saved with the optimizer state beside it.
        if (whole_VD := self._table.gather(self._table.stored())) is not None:
            destination[prefix + "weight"] = whole_VD
        with self._without_weight():
            super()._save_to_state_dict(destination, prefix, keep_vars)

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, strict, *found) -> None:
        with self._without_weight():
            super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, *found)
        missing, unexpected, errors = found
        key = prefix + "weight"
        if key in unexpected:  # because it is not a parameter
            unexpected.remove(key)
        shape = self.num_embeddings, self.embedding_dim
        given = state_dict.get(key)
        if key not in state_dict:
            if strict:
                missing.append(key)
        elif not isinstance(given, Tensor) or given.is_meta:
            errors.append(f"{key} is a {type(given).__name__}; give a tensor that has values")
        elif given.shape != shape:
            sizes = f"{tuple(given.shape)} in the checkpoint, {shape} here"
            errors.append(f"size mismatch for {key}: {sizes}")
        else:
            self.weight.data.copy_(self._table.own_rows(given.detach()))


class PagedEmbedding(PagedRows, nn.Embedding):  # type: ignore[misc]
    """Embedding whose rows are fetched to the compute device as they are used.

    An nn.Embedding for any program; `w2v.optimizer` or a `PagedOptimizer` steps it. Vectors are
    float32, or float64 as the table. Memory is taken when the optimizer is made, or at a first use.

    Args:
        num_embeddings: Number of rows V.
        embedding_dim: Number of dimensions D.
        padding_idx: Row that is initially zero and gets no gradient.
        max_norm: Rows of larger norm are scaled down to it, in the table, when they are used.
        norm_type: Order p of the norm.
        scale_grad_by_freq: Whether to divide a row's gradient by its count in the ids.
        sparse: As torch's argument: whether hooks of the weight and torch.autograd.grad get sparse
            gradients. A step is of the rows that have gradients in any case.
        _weight, _freeze: As torch's: `init`, with its dtype; and whether the table is not trained.
        storage: "cpu", "cuda", "pinned" (CPU memory that the GPU reads in place) or "mmap".
        device: Where rows are used: by default the GPU for "cuda" and "pinned", else the CPU.
            `to(device)` changes it.
        dtype: Of the table: float64, float32, bfloat16 or float16; by default torch's. Steps of
            16-bit tables compute in float32.
        path: File of "mmap", which holds weight and state. An existing file is continued.
        seed: Seed of other first weights, which threads or a GPU draw much faster. By default they
            are those that nn.Embedding draws from torch's generator on a CPU.
        init: Weights [V, D], or a function from row ids [n] to weights [n, D]; by default they are
            normal with standard deviation 1. `w2v.rows.table` has `normal` and `uniform`.
        state_storage: Other storage for the optimizer state, such as "pinned" beside "cuda".
        gpu_bytes: Memory of the compute device for rows that stay there between uses: "20GiB",
            "10%" of the table, 0 (only during `PagedOptimizer.pages`), or "auto", half of what is
            free on a GPU. Tables of one width and PagedOptimizer share what they have together.
            Results are the same bit for bit.
        process_group: Of torch.distributed, such as `group.WORLD`: rows are sharded over its ranks,
            row v to rank v % N. All ranks make the same calls in the same order.
    """

    @uncompiled
    def forward(self, input: Ids) -> Tensor:
        """Return vectors [*input.shape, D] of ids.

        Raises:
            IndexError: An id is not a row; nothing has changed.
        """
        weight = self._weight
        table = weight.table
        if table.uses_kernels:
            return fused_vectors(weight, input)
        weight_UD, places, padding = unique_weights(weight, input)
        return F.embedding(places, weight_UD, padding, scale_grad_by_freq=table.scale_grad_by_freq)


class PagedEmbeddingBag(PagedRows, nn.EmbeddingBag):  # type: ignore[misc]
    """Sums, means or maxima of bags of embeddings, as nn.EmbeddingBag.

    Arguments that are not listed are those of a `PagedEmbedding`.

    Args:
        scale_grad_by_freq: Not with mode="max".
        mode: "sum", "mean" or "max".
        include_last_offset: Whether offsets end with the number of ids.
        padding_idx: Row that is left out of all bags.
        **settings: Further arguments of a `PagedEmbedding`.
    """

    mode: str = _of_table("mode")
    include_last_offset: bool = _of_table("include_last_offset")

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        mode: Literal["sum", "mean", "max"] = "mean",
        sparse: bool = False,
        _weight: Tensor | None = None,
        include_last_offset: bool = False,
        padding_idx: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **settings: Any,
    ):
        if mode not in ("sum", "mean", "max"):
            raise ValueError(f"mode={mode!r} is unknown; choose 'sum', 'mean' or 'max'")
        rules = (padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse, _weight)
        settings |= {"device": device, "dtype": dtype}
        super().__init__(num_embeddings, embedding_dim, *rules, **settings)
        self.mode = mode
        self.include_last_offset = include_last_offset

    @uncompiled
    def forward(
        self, input: Ids, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None
    ) -> Tensor:
        """Return one vector for each bag: [B, D].

        Args:
            input: Ids in bags of equal size [B, N], or all ids [N] one bag after the other.
            offsets: For ids [N]: where each bag begins, [B].
            per_sample_weights: Factor of each vector, in the shape of the ids; for mode="sum".

        Raises:
            IndexError: An id is not a row; nothing has changed.
        """
        weight = self._weight
        table = weight.table
        kind = offsets.dtype if isinstance(offsets, Tensor) else type(offsets).__name__
        if offsets is not None and kind not in (torch.int32, torch.int64):
            raise ValueError(f"offsets are {kind}; give a tensor of int32 or int64")
        try:
            if table.uses_kernels and table.mode != "max" and per_sample_weights is None:
                return fused_vectors(weight, input, offsets)
            weight_UD, places, padding = unique_weights(weight, input)
        except IndexError as error:  # of bags torch raises a RuntimeError
            raise RowError(str(error)) from None
        if offsets is not None:
            offsets = offsets.to(places)
            if places.numel() and offsets.numel() <= table.include_last_offset:  # torch crashes
                reason = f"offsets {offsets.tolist()} have no bag for {places.numel()} ids"
                raise ValueError(f"{reason}; begin them with 0")
        if per_sample_weights is not None:
            per_sample_weights = per_sample_weights.to(weight_UD.device)
        # The kernels of bags do not take the stride of records.
        if padding is None and table.padding_idx is not None:
            # With padding torch takes another kernel, whose last bag has all ids that are left.
            padding = len(weight_UD)
            weight_UD = F.pad(weight_UD, (0, 0, 0, 1))
        return F.embedding_bag(
            places,
            weight_UD.contiguous(),
            offsets,
            scale_grad_by_freq=table.scale_grad_by_freq,
            mode=self.mode,
            per_sample_weights=per_sample_weights,
            include_last_offset=table.include_last_offset,
            padding_idx=padding,
        )


RULES = "padding_idx max_norm norm_type scale_grad_by_freq sparse mode include_last_offset".split()


def page(
    model: nn.Module, min_rows: int = 100_000, *, gpu_bytes: str | int = "10%", **settings: Any
) -> nn.Module:
    """Page the large embeddings of a model, in place; return the model.

    Weights, ties, hooks, attributes, gradients and the state of random generators stay as they are.
    Make optimizers afterwards: steps of earlier ones raise. Subclasses of nn.Embedding and
    nn.EmbeddingBag are left alone.

    Args:
        model: The module around the embeddings.
        min_rows: Smallest table that is paged.
        gpu_bytes: As for a `PagedEmbedding`, where rows are used on a GPU.
        **settings: Further arguments of a `PagedEmbedding`. By default `storage` is "pinned" where
            there is a GPU, and `device` is that of the weights.

    Raises:
        ValueError: Nothing can be paged.
    """
    kinds: dict[Any, Any] = {nn.Embedding: PagedEmbedding, nn.EmbeddingBag: PagedEmbeddingBag}
    found: list[Any] = [module for module in model.modules() if type(module) in kinds]
    large = [module for module in found if module.num_embeddings >= min_rows]
    if not large or model in large:
        most = max((module.num_embeddings for module in found), default=0)
        reason = f"this model has no embedding of {min_rows:,} rows in it (the largest: {most:,})"
        raise ValueError(f"{reason}; give min_rows, and the module around the embeddings")
    if settings.get("path") and (tables := len({module.weight for module in large})) > 1:
        one = f"path={settings['path']} is one file, and {tables} tables would be paged"
        raise ValueError(f"{one}; raise min_rows, or make each PagedEmbedding with its path")
    settings = {"storage": "pinned" if torch.cuda.is_available() else "cpu"} | settings
    weights: dict[nn.Parameter, nn.Parameter] = {}

    def paged(module: Any) -> PagedRows:
        old = module.weight
        if old.is_meta or old.dtype.itemsize < 4:
            reason = f"weights are {old.dtype} on {old.device}"
            raise ValueError(f"{reason}; page a float32 model with its weights, for torch.autocast")
        if type(old) is not nn.Parameter:
            reason = f"the weight of an embedding is a {type(old).__name__}"
            raise ValueError(f"{reason}, not a Parameter; page the model before it is changed")
        rules = {name: getattr(module, name) for name in RULES if hasattr(module, name)}
        given: dict[str, Any] = {"device": old.device, "dtype": old.dtype} | settings
        if torch.device(given["device"]).type == "cuda":
            given["gpu_bytes"] = gpu_bytes
        shape = module.num_embeddings, module.embedding_dim
        made = kinds[type(module)](*shape, init=old, **rules, **given)
        made.weight = weights.setdefault(old, made.weight.requires_grad_(old.requires_grad))
        return made

    return _replace(model, {module: paged(module) for module in large}, weights, "page")


@outside_inference  # the model is trained later
def unpage(model: nn.Module) -> nn.Module:
    """Replace paged embeddings by torch's, in place; return the model.

    All that `w2v.page` keeps stays as it is. For export, serving and other libraries.
    """
    weights: dict[nn.Parameter, nn.Parameter] = {}

    def plain(module: PagedRows) -> nn.Module:
        table, weight = module._table, module.weight
        if table.ranks.size > 1:
            raise ValueError("rows of several ranks are on all of them; load state_dict() instead")
        if weight not in weights:
            weights[weight] = nn.Parameter(table.whole(), weight.requires_grad)
        kind: Any = nn.Embedding if table.mode is None else nn.EmbeddingBag
        rules = {name: getattr(module, name) for name in RULES if hasattr(module, name)}
        made = kind(*weight.shape, _weight=weights[weight], **rules)
        made.weight = weights[weight]
        return made

    found = [module for module in model.modules() if isinstance(module, PagedRows)]
    if not found or model in found:
        raise ValueError("this model has no PagedEmbedding in it; give the module around it")
    return _replace(model, {module: plain(module) for module in found}, weights, "unpage")


def _replace(
    model: nn.Module,
    replaced: Mapping[Any, nn.Module],
    weights: Mapping[Any, nn.Parameter],
    function: str,
) -> nn.Module:
    """Put modules and weights in the places of others, as they are."""
    for old in replaced:
        if own := [name for name in vars(old) if callable(getattr(type(old), name, None))]:
            reason = f"an embedding has a {own[0]} of its own"
            raise ValueError(f"{reason}; call w2v.{function} before it is changed")
    for old, new in replaced.items():
        kept = {name for name in vars(old) if "hook" in name or name not in vars(new)}
        kept |= {"_buffers", "_non_persistent_buffers_set", "_modules"}
        vars(new).update({name: vars(old)[name] for name in kept if not hasattr(type(new), name)})
        others = {name: each for name, each in old._parameters.items() if name != "weight"}
        new._parameters.update(others)
        new.train(old.training)
    for module in [*model.modules(), *replaced.values()]:
        for name, child in module._modules.items():
            if child in replaced:
                module._modules[name] = replaced[child]
        for name, parameter in module._parameters.items():
            if parameter in weights:
                module._parameters[name] = weights[parameter]
    check_optimizers()
    for old_weight, weight in weights.items():
        hand_over(old_weight, weight)
        stepped: list[Any] = [old_weight]
        if isinstance(old_weight, PagedWeight):
            stepped.append(old_weight.table.parameter)
        for parameter in stepped:
            parameter.replaced_by = f"w2v.{function}"
    return model


@functools.cache
def check_optimizers() -> None:
    """Have optimizers refuse weights that are not theirs, at their steps."""
    register_optimizer_step_pre_hook(_check)


@uncompiled  # torch.compile takes the groups of an optimizer as its own to change
def _check(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Raise `ValueError` for a weight that is replaced or another's."""
    kind = type(optimizer).__name__
    for parameter in [each for group in optimizer.param_groups for each in group["params"]]:
        if function := getattr(parameter, "replaced_by", None):
            has = f"this {kind} has a weight that {function} has replaced"
            raise ValueError(f"{has}; make the optimizer afterwards")
        is_shown = isinstance(parameter, PagedWeight) and parameter.table.shows_grad
        if is_shown and not parameter.table.is_stepped_by(optimizer):
            has = f"this {kind} has the weight of a PagedEmbedding"
            raise ValueError(f"{has}, which a w2v.optimizer steps; give it to one of them")


def paged_weights(given: Iterable[Any]) -> list[PagedWeight]:
    """Return the paged weights among these and in modules, each once."""
    found: list[PagedWeight] = []
    for each in given:
        if isinstance(each, PagedWeight):
            found.append(each)
        elif isinstance(each, nn.Module):
            found += [part.weight for part in each.modules() if isinstance(part, PagedRows)]
    return list(dict.fromkeys(found))


def _initialiser(init: Init | Tensor | np.ndarray | None, *shape: int) -> Init | None:
    """Return `init`, or a function for given weights [V, D]."""
    if init is None or callable(init):
        return init
    weights_VD = as_tensor(init).detach()
    if (given := list(weights_VD.shape)) != list(shape):
        raise ValueError(f"init has shape {given}, but the table is {list(shape)}")
    return lambda rows_n: weights_VD[rows_n.to(weights_VD.device)]


# Forward passes.


def announced(table: PagedTable, ids: Ids) -> RowPage | None:
    """Return the look-up of ids that were read ahead; None for others."""
    page = table.announced
    if page is None or not page.look_up.is_of(page.index, ids):
        return None
    return page


def find(table: PagedTable, ids: Ids, page: RowPage | None) -> RowPage:
    """Look up ids, and begin to bring their rows.

    `page`: the look-up, if they were read ahead.
    """
    dist = torch.distributed
    if table.trains and table.shares_no_rows and dist.is_available() and dist.is_initialized():
        parallel = nn.parallel.DistributedDataParallel
        size, used_by = dist.get_world_size(), getattr(parallel, "_active_ddp_module", None)
        if size > 1 or used_by is not None:
            where = f"{size} processes" if size > 1 else parallel.__name__
            raise RuntimeError(
                f"this PagedEmbedding cannot train in {where}: each process would have a table of "
                "its own; make it with process_group=torch.distributed.group.WORLD"
            )
    table.check_views()
    if page is None:  # else its rows are there, unless other uses have evicted them
        if table.ranks.size > 1:
            page = look_up_alone(table, ids)
        else:
            (page,) = lookup.look_up([table.store], [ids], [table.span])
        # Beside rows of other tables of the group, as only this one has been looked up.
        lookup.prefetch(table.store.group, [page.look_up.own], one_table=table.store.first_row)
    return page


def unique_weights(weight: PagedWeight, ids: Ids) -> tuple[Tensor, Tensor, int | None]:
    """Return weights [U, D] of the unique rows of ids, and their places.

    These are the place of each id in them, and of the padding row, None where no id is padding.
    """
    table = weight.table
    with table.store.lock:
        page = find(table, ids, announced(table, ids))
        if isinstance(page.look_up, RoutedLookUp):
            page.look_up.fetch([page])
            weight_UD, places_N, padding = page.look_up.part(page.index)
        else:
            page, weight_UD = table.read(page)
            places_N, padding = page.places(), page.padding()
    if table.trains:
        weight_UD = _RowsOfWeight.apply(weight.leaf, (weight, page), [weight_UD])
    return weight_UD.to(table.vector_dtype), places_N.view(page.shape), padding


class _RowsOfWeight(torch.autograd.Function):
    """Rows of a weight, whose gradients wait in the table or go to it."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor, use: Use, weights: list[Tensor]) -> Tensor:
        """Return weights [U, D], which are in a list so that they are not copied."""
        ctx.use = use  # the graph keeps the page
        return weights[0]

    @staticmethod
    def backward(ctx: Any, grad_UD: Tensor) -> tuple[Tensor | None, ...]:
        weight, page = ctx.use
        table, receiver = weight.table, weight.receiver(ctx.next_functions[0][0])
        if receiver == "table":
            with table.store.lock:
                if isinstance(page.look_up, RoutedLookUp):
                    grad_UD = page.look_up.add_rows(page.index, grad_UD, table.pending(page))
                table.collect(page, grad_UD)
        elif receiver is not None:
            return weight.gradient(page, grad_UD, receiver), None, None
        return None, None, None


def fused_vectors(weight: PagedWeight, ids: Ids, offsets: Tensor | None = None) -> Tensor:
    """Return vectors of ids or bags by kernels, which sum their gradients.

    The first table of an announced batch computes those of all tables; the others take theirs.
    """
    table = weight.table
    with table.store.lock:
        read_ahead = announced(table, ids)
        if read_ahead is not None and table.trains:
            kept = read_ahead.take_vectors(weight.version, offsets)
            if kept is not None:
                return kept
        page = find(table, ids, read_ahead)
        look_up, bags = page.look_up, _bags(table, page.shape, offsets)
        if not table.trains:
            look_up.fetch([page])
            return page.in_shape(look_up.vectors(page.index, bags), bags)
        uses = _tables_to_compute(weight, page, bags)
        bags = bags and bags._replace(tables=len(uses))
        look_up.fetch([its_page for _, its_page in uses])
        computed = _KernelVectors.apply(uses, bags, *(user.leaf for user, _ in uses))
        if len(uses) == 1:
            return page.in_shape(computed[0], bags)
        look_up.offsets = Identity(offsets)
        for (user, its_page), vectors_ND in zip(uses, computed, strict=True):
            look_up.computed[its_page.index] = its_page.in_shape(vectors_ND, bags), user.version
        vectors, _ = look_up.computed.pop(page.index)
        return vectors


def _launch_key(table: PagedTable, page: RowPage) -> Any:
    """Return a key; tables with equal keys share one kernel launch."""
    is_bag = table.mode is not None
    # Kernels leave out one padding row at a time: bags of such tables are by themselves.
    if not table.uses_kernels or (is_bag and table.padding_idx is not None) or table.mode == "max":
        return table
    return is_bag and (table.mode, table.include_last_offset, page.shape)


def _tables_to_compute(weight: PagedWeight, page: RowPage, bags: Bags | None) -> list[Use]:
    """Return this table, or at the first use of an announced batch all.

    Bags are summed together until offsets of tables are found to differ.
    """
    look_up, table, alone = page.look_up, weight.table, [(weight, page)]
    bags_differ = bags and table.store.group.bags_differ
    if page is not table.announced or look_up.is_computed or bags_differ:
        return alone
    look_up.is_computed = True
    key, uses = _launch_key(table, page), []
    for each in look_up.tables:
        its_weight, its_page = each.weight(), each.announced
        if not each.trainable or its_weight is None or _launch_key(each, its_page) != key:
            return alone
        uses.append((its_weight, its_page))
    return uses


def _bags(table: PagedTable, shape: torch.Size, offsets: Tensor | None) -> Bags | None:
    """Return how ids are divided; raise `ValueError` where torch does."""
    if table.mode is None:
        return None
    is_mean = table.mode == "mean"
    if len(shape) == 2 and offsets is None:
        return Bags(shape[0], None, shape[1], is_mean)
    if len(shape) == 1 and offsets is not None and offsets.dim() == 1:
        # On a GPU torch gives the last bag all ids that are left.
        begins = offsets[: len(offsets) - table.include_last_offset]
        begins = begins.to(table.device, torch.int64).contiguous()
        return Bags(len(begins), begins, 0, is_mean)
    given = None if offsets is None else list(offsets.shape)
    reason = f"ids have shape {list(shape)} and offsets {given}"
    raise ValueError(f"{reason}; give ids [B, N], or ids [N] with offsets [B]")


class _AllRows(torch.autograd.Function):
    """Products of vectors with all rows, some rows at a time."""

    @staticmethod
    def forward(ctx: Any, vectors: Tensor, weight: PagedWeight, table: PagedTable) -> Tensor:
        ctx.save_for_backward(vectors)
        stored_VD = table.stored()
        ctx.table, ctx.version = table, table.version
        products = vectors.new_empty(0)
        for rows, weight_nD in _parts(table, stored_VD, table.parameter.dtype):
            of_rows = F.linear(vectors, weight_nD)
            if not rows.start:
                products = of_rows.new_empty(*vectors.shape[:-1], len(stored_VD))
            products[..., rows] = of_rows
        return products

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (vectors,), table = ctx.saved_tensors, ctx.table
        stored_VD = table.stored()
        if table.version != ctx.version:
            changed = "the table has changed between linear(h) and its backward pass"
            raise RuntimeError(f"{changed}; call backward() before the step")
        needs_vectors, needs_weight, _ = ctx.needs_input_grad
        flat_ND = vectors.flatten(0, -2).to(grad.dtype)
        grad_ND, grad_VD = torch.zeros_like(flat_ND), None
        if needs_weight:
            grad_VD = grad.new_empty(stored_VD.shape, dtype=table.parameter.dtype)
        for rows, weight_nD in _parts(table, stored_VD, grad.dtype):
            grad_Nn = grad[..., rows].flatten(0, -2)
            if needs_vectors:
                grad_ND.addmm_(grad_Nn, weight_nD)
            if grad_VD is not None:
                grad_VD[rows] = (grad_Nn.T @ flat_ND).to(grad_VD.dtype)
        grad_vectors = grad_ND.view_as(vectors).to(vectors.dtype) if needs_vectors else None
        return grad_vectors, grad_VD, None


def _parts(
    table: PagedTable, stored_VD: Tensor, dtype: torch.dtype
) -> Iterator[tuple[slice, Tensor]]:
    """Yield the weights on the compute device, a part of the rows at a time."""
    for start in range(0, len(stored_VD), LINEAR_ROWS):
        rows = slice(start, start + LINEAR_ROWS)
        yield rows, stored_VD[rows].to(table.device, dtype)


class _KernelVectors(torch.autograd.Function):
    """Vectors of tables of one look-up, whose gradients are summed for them."""

    @staticmethod
    def forward(
        ctx: Any, uses: list[Use], bags: Bags | None, *leaves: Tensor
    ) -> tuple[Tensor, ...]:
        """Return vectors [N, D] of each table; `leaves` are of the weights."""
        ctx.set_materialize_grads(False)
        ctx.uses, ctx.bags = uses, bags
        _, first = uses[0]
        vectors_ND = first.look_up.vectors(first.index if len(uses) == 1 else None, bags)
        counts = [bags.number if bags else page.shape.numel() for _, page in uses]
        # Not views, which could not be changed in place.
        return vectors_ND.unsafe_split_with_sizes(counts)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        uses, bags = ctx.uses, ctx.bags
        weight, page = uses[0]
        weight.table.check_gradient()
        edges = zip(uses, ctx.next_functions, strict=True)
        receivers = [each.receiver(node) for (each, _), (node, _) in edges]
        present = [grad for grad in grads if grad is not None]
        is_one = len(present) == len(uses) > 1 and receivers.count("table") == len(uses)
        has_padding = page.look_up.paddings.count(None) < len(uses)
        returned: list[Tensor | None] = [None] * len(uses)
        with weight.table.store.lock:
            # One launch leaves out the padding row of one table at most.
            if is_one and not has_padding:
                _sum_gradients(uses, None, present, bags)
                return None, None, *returned
            bags = bags and bags._replace(tables=1)
            for number, ((weight, page), grad) in enumerate(zip(uses, grads, strict=True)):
                receiver = receivers[number]
                if grad is not None and receiver == "table":
                    _sum_gradients([(weight, page)], page.index, [grad], bags)
                elif grad is not None and receiver is not None:
                    sum_UD = page.look_up.gradient(page.index, _for_kernels([grad]), bags)
                    returned[number] = weight.gradient(page, sum_UD, receiver)
        return None, None, *returned


def _sum_gradients(
    uses: list[Use],
    index: int | None,  # of the table; None: all tables of the look-up
    grads: list[Tensor],
    bags: Bags | None,
) -> None:
    """Sum gradients of ids or bags by row, with those that wait for the step."""
    pending = {page.index: weight.table.pending(page) for weight, page in uses}
    _, first = uses[0]
    sums = first.look_up.add_gradients(index, _for_kernels(grads), bags, pending)
    for (weight, page), sum_UD in zip(uses, sums, strict=True):
        weight.table.collect(page, sum_UD)


def _for_kernels(grads: list[Tensor]) -> list[Tensor]:
    """Return gradients as kernels read them: where they are, or joined."""
    first = grads[0]
    if first.dtype == torch.float32 and first.stride(-1) == 1 and ops.are_spaced(grads):
        return grads
    return [torch.cat(grads).float()]
