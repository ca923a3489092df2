"""Embedding modules for tables larger than the memory of the GPU.

    users = PagedEmbedding(1_000_000, 64, storage="pinned")
    tags = PagedEmbeddingBag(50_000, 64, mode="mean", storage="pinned")
    paged = PagedOptimizer([users, tags], "Adamax", lr=0.1)
    loss = model(users(user_ids), tags(tag_ids))
    paged.zero_grad()
    loss.backward()
    paged.step()

The step updates the rows that have gradients. Other rows keep weight and state, as with
torch.optim.SparseAdam. Invalid input raises an error of one line, and nothing is written.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from w2v.api.embedding import sharded
from w2v.api.embedding.forward import fetch, fused_vectors
from w2v.api.embedding.ids import Ids, as_tensor
from w2v.api.embedding.row_store import Rows, open_device
from w2v.api.embedding.table import PagedTable
from w2v.config import ConfigError, TransferConfig
from w2v.model.table import Init, Storage, check_table


def _of_table(name: str) -> Any:
    """Return a property of a module that is an attribute of its table."""
    return property(
        lambda module: getattr(module._table, name),
        lambda module, value: setattr(module._table, name, value),
    )


class PagedEmbedding(nn.Module):
    """Embedding whose rows are fetched to the compute device as they are used.

    It stands where an nn.Embedding stood; a `PagedOptimizer` steps it. It has no parameters, so
    that the optimizer of the other modules leaves it alone; `state_dict` has its weight as that of
    an nn.Embedding. Vectors are float32, or float64 as the table. Memory is taken when the
    optimizer is made, or at the first use before that.

    Args:
        num_embeddings: Number of rows V.
        embedding_dim: Number of dimensions D.
        padding_idx: Row that is initially zero and gets no gradient.
        max_norm: Rows of larger norm are scaled down to it, in the table, when they are used.
        norm_type: Order p of the norm.
        scale_grad_by_freq: Whether to divide a row's gradient by its count in the ids.
        sparse: As torch's argument; it changes nothing, as gradients are of rows in any case.
        storage: "cpu", "cuda", "pinned" (CPU memory that the GPU reads in place) or "mmap".
        device: Where rows are used: by default the GPU for "cuda" and "pinned", else the CPU.
            `to(device)` changes it.
        dtype: Of the table: float64, float32, bfloat16 or float16. Steps of 16-bit tables
            compute in float32.
        path: File of "mmap", which holds weight and state. An existing file is continued.
        seed: Seed of the default `init`; by default drawn from torch's generator.
        init: Weights [V, D], or a function from row ids [n] to weights [n, D]; by default they are
            normal with standard deviation 1. `w2v.model.table` has `normal` and `uniform`.
        state_storage: Other storage for the optimizer state, such as "pinned" beside "cuda".
        gpu_bytes: Memory of the compute device for rows that stay there between uses: "20GiB",
            "10%" of the table, 0, or "auto", half of what is free on a GPU. Tables of one width
            and PagedOptimizer share what they have together. Results are the same bit for bit.
        process_group: Of torch.distributed, such as `group.WORLD`: rows are sharded over its ranks,
            row v to rank v % N. All ranks make the same calls in the same order.
    """

    num_embeddings: int = _of_table("num_embeddings")
    embedding_dim: int = _of_table("embedding_dim")
    padding_idx: int | None = _of_table("padding_idx")
    max_norm: float | None = _of_table("max_norm")
    norm_type: float = _of_table("norm_type")
    scale_grad_by_freq: bool = _of_table("scale_grad_by_freq")
    storage: Storage = _of_table("storage")
    device: torch.device = _of_table("device")
    dtype: torch.dtype = _of_table("dtype")
    path: str | Path | None = _of_table("path")
    state_storage: Storage | None = _of_table("state_storage")
    trainable: bool = _of_table("trainable")

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = True,
        *,
        storage: Storage = "cpu",
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.float32,
        path: str | Path | None = None,
        seed: int | None = None,
        init: Init | Tensor | np.ndarray | None = None,
        state_storage: Storage | None = None,
        gpu_bytes: str | int = 0,
        process_group: torch.distributed.ProcessGroup | None = None,
    ):
        super().__init__()
        ranks = sharded.ranks_of(process_group)
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
        if padding_idx is not None and not -num_embeddings <= padding_idx < num_embeddings:
            limits = f"{-num_embeddings} to {num_embeddings - 1}"
            raise IndexError(f"padding_idx={padding_idx} is not a row; give one of {limits}")
        if ranks.size > 1 and path is not None:
            raise ValueError(f"path={path}: rows of several ranks are in no file; use 'pinned'")
        first = _initialiser(init, num_embeddings, embedding_dim)
        self._table = PagedTable(
            num_embeddings=num_embeddings,
            embedding_dim=embedding_dim,
            padding_idx=None if padding_idx is None else padding_idx % num_embeddings,
            max_norm=max_norm,
            norm_type=norm_type,
            scale_grad_by_freq=scale_grad_by_freq,
            storage=storage,
            device=open_device(device, storage),
            dtype=dtype,
            path=path,
            state_storage=state_storage,
            cache_size=cache_size,
            ranks=ranks,
            seed=ranks.all_gather(_drawn_seed() if seed is None else operator.index(seed))[0],
            init=first,
            has_zero_padding=padding_idx is not None and first is init,
        )

    @classmethod
    def from_pretrained(
        cls, embeddings: Tensor | np.ndarray, freeze: bool = True, *rules: Any, **settings: Any
    ) -> PagedEmbedding:
        """Return a module with these weights [V, D].

        `rules` and `settings` are the other arguments of the class, in its order: first
        `padding_idx`, or `max_norm` of bags.
        """
        weights_VD = as_tensor(embeddings)
        if weights_VD.dim() != 2:
            raise ValueError(f"embeddings have shape {list(weights_VD.shape)}; give weights [V, D]")
        settings = {"dtype": weights_VD.dtype} | settings
        module = cls(*weights_VD.shape, *rules, init=weights_VD, **settings)
        return module.requires_grad_(not freeze)

    @property
    def store(self) -> Rows:
        """Rows, with `get`, `put`, `save`, `load` and `flush` of a `RowStore`."""
        return self._table.opened()

    @property
    def weight(self) -> Tensor:
        """View [V, D] of the weights where they are stored; may be written.

        Write into it, as by `weight.copy_(values)`: other data or another parameter is refused. Of
        several ranks, each has its own rows: row j is row j * N + rank of the whole table.
        """
        return self._table.view_weight()

    @weight.setter
    def weight(self, value: Any) -> None:
        self.register_parameter("weight", value)  # which refuses it

    @torch.compiler.disable
    def forward(self, input: Ids) -> Tensor:
        """Return vectors [*input.shape, D] of ids.

        Raises:
            IndexError: An id is not a row; nothing has changed.
        """
        table = self._table
        if table.uses_kernels:
            return fused_vectors(table, input)
        weight_UD, places, padding = fetch(table, input)
        return F.embedding(places, weight_UD, padding, scale_grad_by_freq=table.scale_grad_by_freq)

    def reset_parameters(self) -> None:
        """Draw normal weights of standard deviation 1 anew.

        This holds for tables with an `init` too. The padding row is zero. Optimizer state stays.
        """
        self._table.reset(self._table.ranks.all_gather(_drawn_seed())[0])

    def grow(self, num_embeddings: int, init: Init | None = None) -> None:
        """Append rows; the others keep weight and optimizer state.

        `init` is a function from the new row ids [n] to weights [n, D]; by default they are normal
        with standard deviation 1. All rows are copied to a larger table.
        """
        if init is not None and not callable(init):
            kind = type(init).__name__
            raise ValueError(f"init is a {kind}; give a function of row ids, or write into weight")
        if self.path is not None:
            raise ValueError(f"path={self.path}: a file cannot grow; load its rows into another")
        if num_embeddings < self.num_embeddings:
            fewer = f"{num_embeddings} rows are fewer than the present {self.num_embeddings}"
            raise ValueError(f"{fewer}; a table can only grow")
        self._table.grow(num_embeddings, init)

    def requires_grad_(self, requires_grad: bool = True) -> PagedEmbedding:
        """Train or freeze the table; one that is frozen gets no `PagedOptimizer`.

        `requires_grad_` of a module around this one does not reach the table.
        """
        self.trainable = requires_grad
        return super().requires_grad_(requires_grad)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients; `PagedOptimizer.zero_grad` does it for all tables.

        `zero_grad` of a module around this one does not reach the table.
        """
        self._table.zero_grad()

    def extra_repr(self) -> str:
        shown = f"{self.num_embeddings}, {self.embedding_dim}"
        usual = {"padding_idx": None, "max_norm": None, "norm_type": 2.0}
        usual |= {"scale_grad_by_freq": False, "mode": None}
        for name, unseen in usual.items():
            if (value := getattr(self._table, name)) != unseen:
                shown += f", {name}={value!r}"
        return f"{shown}, storage={self.storage!r}, device={str(self.device)!r}"

    # What nn.Module calls.

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        if name == "weight":  # it was assigned to
            raise ValueError("weight cannot be replaced; write into it: table.weight.copy_(values)")
        super().register_parameter(name, param)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> PagedEmbedding:
        """Move the device of forward passes; the table stays where it is stored."""
        parameter = self._table.parameter
        empty = fn(torch.empty_like(parameter[:0]).detach())
        if empty.dtype != parameter.dtype:
            reason = f"vectors are {parameter.dtype} and cannot become {empty.dtype}"
            raise ValueError(f"{reason}; use torch.autocast, or PagedEmbedding(dtype=...)")
        if empty.device.type == "cpu" and empty.is_shared():
            raise ValueError("processes cannot share a table by share_memory(); use process_group")
        if empty.device != self.device:
            self._table.move(empty)
        return super()._apply(fn, recurse)

    def _save_to_state_dict(self, destination: dict, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        # A copy, as a view would be saved with the optimizer state beside it.
        if (whole_VD := self._table.gather(self.weight)) is not None:
            destination[prefix + "weight"] = whole_VD

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, strict, *found) -> None:
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
            self.weight.copy_(self._table.own_rows(given.detach()))


class PagedEmbeddingBag(PagedEmbedding):
    """Sums, means or maxima of bags of embeddings, as nn.EmbeddingBag.

    Arguments that are not listed are those of a `PagedEmbedding`.

    Args:
        scale_grad_by_freq: Not with mode="max".
        mode: "sum", "mean" or "max".
        sparse: Changes nothing, as for a `PagedEmbedding`.
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
        sparse: bool = True,
        *,
        include_last_offset: bool = False,
        padding_idx: int | None = None,
        **settings: Any,
    ):
        if mode not in ("sum", "mean", "max"):
            raise ValueError(f"mode={mode!r} is unknown; choose 'sum', 'mean' or 'max'")
        rules = (padding_idx, max_norm, norm_type, scale_grad_by_freq)
        super().__init__(num_embeddings, embedding_dim, *rules, **settings)
        self.mode = mode
        self.include_last_offset = include_last_offset

    @torch.compiler.disable
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
        table = self._table
        kind = offsets.dtype if isinstance(offsets, Tensor) else type(offsets).__name__
        if offsets is not None and kind not in (torch.int32, torch.int64):
            raise ValueError(f"offsets are {kind}; give a tensor of int32 or int64")
        if table.uses_kernels and table.mode != "max" and per_sample_weights is None:
            return fused_vectors(table, input, offsets)
        weight_UD, places, padding = fetch(table, input)
        if offsets is not None:
            offsets = offsets.to(places)
        if per_sample_weights is not None:
            per_sample_weights = per_sample_weights.to(weight_UD)
        return F.embedding_bag(
            places,
            weight_UD.contiguous(),  # the kernels of bags do not take the stride of records
            offsets,
            scale_grad_by_freq=table.scale_grad_by_freq,
            mode=self.mode,
            per_sample_weights=per_sample_weights,
            include_last_offset=table.include_last_offset,
            padding_idx=padding,
        )


def trained_tables(modules: Iterable[nn.Module]) -> list[PagedTable]:
    """Return the tables of paged embeddings in modules, but frozen ones."""
    parts = dict.fromkeys(part for module in modules for part in module.modules())  # each once
    return [part._table for part in parts if isinstance(part, PagedEmbedding) and part.trainable]


def _drawn_seed() -> int:
    """Draw a seed from torch's generator."""
    # On the CPU also where modules are made within torch.device("meta").
    return int(torch.randint(1 << 62, (), device="cpu"))


def _initialiser(init: Init | Tensor | np.ndarray | None, *shape: int) -> Init | None:
    """Return `init`, or a function for given weights [V, D]."""
    if init is None or callable(init):
        return init
    weights_VD = as_tensor(init).detach()
    if (given := list(weights_VD.shape)) != list(shape):
        raise ValueError(f"init has shape {given}, but the table is {list(shape)}")
    return lambda rows_n: weights_VD[rows_n.to(weights_VD.device)]
