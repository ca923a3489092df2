"""Embedding modules for tables larger than the memory of the GPU.

    users = PagedEmbedding(1_000_000, 64, storage="pinned")
    tags = PagedEmbeddingBag(50_000, 64, mode="mean", storage="pinned")
    paged = PagedOptimizer([users, tags], "Adamax", lr=0.1)
    loss = model(users(user_ids), tags(tag_ids))
    paged.zero_grad()
    loss.backward()
    paged.step()

A forward pass fetches the unique rows of its ids to the compute device; vectors are looked up in
them, so that their gradient is as small as they are. The step updates the rows that have gradients
and writes them back. Other rows keep weight and state, as with torch.optim.SparseAdam.

Invalid input raises an error of one line, and nothing is written.

Shapes: V rows, D dimensions, U unique rows, R elements of a record.
"""

from __future__ import annotations

import contextlib
import functools
import math
import operator
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from w2v.api.embedding import sharded
from w2v.api.embedding.look_up import Identity, Ids, LookUp, RowPage, RowsOfIds, UniqueRows
from w2v.api.embedding.row_store import RowGroup, Rows, open_device, outside_inference
from w2v.api.embedding.sharded import LookedUpBatch
from w2v.config import OptimizerConfig, TransferConfig
from w2v.distributed.ranks import Ranks
from w2v.kernels.cuda import Bags
from w2v.model.optim import RowOptimizer, optimizer_name
from w2v.model.table import Init, RowState, SplitTable, Storage, Table, check_table, normal
from w2v.training.checkpoint import Checkpoints, latest

MOST_ROWS = 1 << 31  # of a cache: they are numbered in 32 bits


# A module's own attribute takes as long to set as a kernel to launch; those of its parts do not.
@dataclass
class _PendingGradients:
    """Gradients of a table that wait for the next step."""

    page: RowPage | None = None  # their rows
    sums: Tensor | None = None  # the gradients, once ranks have exchanged them
    # Pages with gradients that are to be sent to the ranks that own the rows.
    unsent: dict[sharded.RoutedLookUp, tuple[RowPage, Tensor]] = field(default_factory=dict)


@dataclass
class _AnnouncedRows:
    """A table's rows of the current batch of `PagedOptimizer.pages`."""

    rows: RowsOfIds | None = None
    # All tables of the look-up and their rows, if kernels compute all vectors in one launch.
    together: list[tuple[PagedEmbedding, RowsOfIds]] = field(default_factory=list)


class _Layout(NamedTuple):
    """What a table keeps for its optimizer: states of each row, and scalars."""

    states: dict[str, RowState]
    scalars: dict[str, Tensor]


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

    _parameter: nn.Parameter

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
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
        self._ranks = sharded.ranks_of(process_group)
        shape = {"num_embeddings": num_embeddings, "embedding_dim": embedding_dim, "dtype": dtype}
        self._ranks.require_equal(shape, "make the same table on all ranks")
        self._cache_size = TransferConfig(gpu_bytes=str(gpu_bytes))
        if state_storage and "mmap" in (storage, state_storage):
            both = f"state_storage={state_storage!r} with storage={storage!r}"
            raise ValueError(f"{both}: a file holds both; leave state_storage out")
        check_table(num_embeddings, embedding_dim, {}, storage, dtype, path)
        if state_storage:
            check_table(num_embeddings, embedding_dim, {}, state_storage, dtype, None)
        if padding_idx is not None and not -num_embeddings <= padding_idx < num_embeddings:
            limits = f"{-num_embeddings} to {num_embeddings - 1}"
            raise IndexError(f"padding_idx={padding_idx} is not a row; give one of {limits}")
        if self._ranks.size > 1 and path is not None:
            raise ValueError(f"path={path}: rows of several ranks are in no file; use 'pinned'")
        self.num_embeddings = num_embeddings
        self.embedding_dim = embedding_dim
        self.padding_idx = None if padding_idx is None else padding_idx % num_embeddings
        self.max_norm = max_norm
        self.norm_type = norm_type
        self.scale_grad_by_freq = scale_grad_by_freq
        self.storage = storage
        self.device = open_device(device, storage)
        self.dtype = dtype
        self.path = path
        self.state_storage = state_storage
        self.trainable = True
        self._fused = False
        self._stepped_by: RowOptimizer | None = None  # the one whose state was checked
        seed = int(torch.randint(1 << 62, ())) if seed is None else operator.index(seed)
        self._seed = self._ranks.all_gather(seed)[0]
        self._init = init if init is None or callable(init) else _copy_of(init, self)
        self._zero_padding = self.padding_idx is not None and (init is None or callable(init))
        self._layout: _Layout | None = None
        self._store: Rows | None = None
        self._pending = _PendingGradients()
        self._announced = _AnnouncedRows()
        # What optimizers and gradient clipping see: the rows that have gradients. It is kept out of
        # the module's parameters, as those belong to the optimizer of the dense modules.
        computes_in = torch.float64 if dtype == torch.float64 else torch.float32
        empty = torch.empty(0, embedding_dim, dtype=computes_in, device=self.device)
        vars(self)["_parameter"] = nn.Parameter(empty)

    @classmethod
    def from_pretrained(
        cls, embeddings: Tensor | np.ndarray, freeze: bool = True, **settings: Any
    ) -> PagedEmbedding:
        """Return a module with these weights [V, D]; `settings` as for the class."""
        weights_VD = torch.as_tensor(embeddings)
        settings = {"dtype": weights_VD.dtype} | settings
        return cls(*weights_VD.shape, init=weights_VD, **settings).requires_grad_(not freeze)

    @property
    def store(self) -> Rows:
        """The rows, with `get`, `put`, `save`, `load` and `flush` of a `RowStore`."""
        if self._store is None:
            self._open(None)  # a PagedOptimizer may come later
        return self._store

    @property
    def weight(self) -> Tensor:
        """View [V, D] of the weights where they are stored; may be written.

        Of several ranks, each has its own rows: row j is row j * N + rank of the whole table.
        """
        self.store.flush()
        self.store.version += 1  # rows read before may be out of date when this is written
        return self.store.table["weight"]

    @torch.compiler.disable
    def forward(self, ids: Ids) -> Tensor:
        """Return vectors [*ids.shape, D].

        Raises:
            IndexError: An id is not a row; nothing has changed.
        """
        if self._uses_kernels:
            return self._kernel_vectors(ids)
        weight_UD, places, padding = self._fetch(ids)
        return F.embedding(places, weight_UD, padding, scale_grad_by_freq=self.scale_grad_by_freq)

    def grow(self, num_embeddings: int, init: Init | None = None) -> None:
        """Append rows; the others keep weight and optimizer state.

        `init` is as for the class, for the new row ids. All rows are copied to a larger table.
        """
        if self.path is not None:
            raise ValueError(f"path={self.path}: a file cannot grow; load its rows into another")
        if num_embeddings < self.num_embeddings:
            fewer = f"{num_embeddings} rows are fewer than the present {self.num_embeddings}"
            raise ValueError(f"{fewer}; a table can only grow")
        old = self.store.table
        with self.store.lock:
            new = self._copy_table(num_embeddings, self._layout, list(old.columns))
            for name, value in old.scalars.items():
                new.scalars[name].copy_(value)
            self._initialise(new, init, first_row=old.rows)
            self.store._replace_table(new)
            self.num_embeddings = num_embeddings

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
        self._parameter.grad = self._pending.sums = None
        self._pending.unsent.clear()

    def extra_repr(self) -> str:
        shown = f"{self.num_embeddings}, {self.embedding_dim}"
        for name in ("padding_idx", "max_norm"):
            if (value := getattr(self, name)) is not None:
                shown += f", {name}={value}"
        return f"{shown}, storage={self.storage!r}, device={str(self.device)!r}"

    def __getstate__(self) -> dict[str, Any]:
        """Return what copies and pickles hold: the table, without gradients."""
        if self._ranks.size > 1:
            raise ValueError("a table of several ranks is not copied or pickled; use state_dict()")
        # Once it is open, no function for initial weights is left, which may not be picklable.
        gone = dict.fromkeys(("_init", "_stepped_by"))
        empty = {"_pending": _PendingGradients(), "_announced": _AnnouncedRows()}
        return dict(vars(self), _store=self.store, **empty, **gone)

    # Forward pass: look up ids, fetch their rows.

    @property
    def _trains(self) -> bool:
        return self.trainable and torch.is_grad_enabled()

    @property
    def _uses_kernels(self) -> bool:
        """Whether kernels read the vectors of ids and sum their gradients."""
        return self._fused and self.max_norm is None and not self.scale_grad_by_freq

    def _find(self, ids: Ids) -> RowsOfIds:
        """Look up ids, and begin to bring their rows."""
        if self._trains and self._ranks.size == 1:
            _refuse_ranks()
        found = self._announced.rows  # whose rows are there, unless other uses have evicted them
        if found is None or not found.is_of(ids):
            if self._ranks.size > 1:
                found = sharded.look_up_alone(self, ids)
            else:
                found = self.store._look_up(ids, self.padding_idx)
            # Beside rows of other tables of the group, as only this one has been looked up.
            self.store.group.prefetch([found.owned.look_up], self.store.first_row)
        return found

    def _kernel_vectors(self, ids: Ids, offsets: Tensor | None = None) -> Tensor:
        """Return vectors of ids or bags by kernels, which sum their gradients.

        The first table of an announced batch computes those of all tables; the others take theirs.
        """
        with self.store.lock:
            found = self._find(ids)
            look_up, trains = found.look_up, self._trains
            if trains and (vectors := found.take_vectors(offsets)) is not None:
                return vectors
            bags = self._bags(found.shape, offsets)
            if not trains:
                look_up.page_of(found)
                return found.in_shape(look_up.vectors(found.index, bags), bags)
            users = self._tables_to_compute(found, bags)
            bags = bags and bags._replace(tables=len(users))
            pages = [(table, look_up.page_of(rows)) for table, rows in users]
            computed = _KernelVectors.apply(self._parameter, pages, bags)
            seen = Identity(offsets)
            for (_, rows), vectors_ND in zip(users, computed, strict=True):
                rows.keep_vectors(rows.in_shape(vectors_ND, bags), seen)
            return found.take_vectors(offsets)

    def _tables_to_compute(
        self, found: RowsOfIds, bags: Bags | None
    ) -> list[tuple[PagedEmbedding, RowsOfIds]]:
        """Return this table, or at the first use of an announced batch all.

        Bags are summed together until offsets of tables are found to differ.
        """
        together = self._announced.together if found is self._announced.rows else []
        is_alone = found.look_up.is_computed or (bags and self.store.group.bags_differ)
        if not together or is_alone or not all(table._trains for table, _ in together):
            return [(self, found)]
        found.look_up.is_computed = True
        return together

    def _launch_key(self, rows: RowsOfIds) -> Any:
        """Return what is equal for tables whose vectors one launch computes."""
        return None if self._uses_kernels else self

    def _bags(self, shape: torch.Size, offsets: Tensor | None) -> Bags | None:
        """Return how ids are divided; raise `ValueError` where torch does."""
        return None

    def _fetch(self, ids: Ids) -> tuple[Tensor, Tensor, int | None]:
        """Fetch the rows of ids.

        Returns:
            Their weights [U, D], which send their gradient to the page; the place of each id in
            them; and the place of the padding row, None where no id is padding.
        """
        store = self.store
        with store.lock:
            found = self._find(ids)
            if self._ranks.size > 1:
                page = found.look_up.page_of(found)
                weight_UD, places_N, padding = found.look_up.part(found.index)
            else:
                page, weight_UD = self._read(found)
                places_N, padding = found.places_N, found.padding
        if self._trains:
            weight_UD = nn.Parameter(weight_UD)
            # The graph keeps the page; without a backward pass it goes, and nothing has changed.
            weight_UD.register_post_accumulate_grad_hook(functools.partial(self._collect, page))
        return weight_UD, places_N.view(found.shape), padding

    @torch.no_grad()
    def _read(self, found: UniqueRows) -> tuple[RowPage, Tensor]:
        """Read rows; return the page and its weights [U, D]."""
        store, rows_U = self.store, found.rows
        records_UR = store._read(rows_U)
        weight_UD = records_UR[:, store.table.columns["weight"]]
        if self.max_norm is not None:
            # As in nn.Embedding, which changes its weights in the forward pass too. On a GPU,
            # torch takes the stride of a row for its length, and no empty list of rows.
            if len(rows_U):
                whole_UD = weight_UD.contiguous()
                every_U = torch.arange(len(rows_U), device=rows_U.device)
                torch.embedding_renorm_(whole_UD, every_U, self.max_norm, self.norm_type)
                weight_UD.copy_(whole_UD)
            store._write(rows_U, records_UR)
        return RowPage(store, found, rows_U, None if self._fused else records_UR), weight_UD

    # Gradients, and the step by torch.

    def _collect(self, page: RowPage, weight_UD: Tensor) -> None:
        """Take the gradient from the weights of a page."""
        grad_UD = weight_UD.grad.detach()
        weight_UD.grad = None
        with self.store.lock:
            if page.is_borrowed:
                requested, pending = page.requested, self._pending_of(page)
                grad_UD = requested.look_up.add_rows(requested.index, grad_UD, pending)
            self._add_grad(page, grad_UD)

    def _pending_of(self, page: RowPage) -> Tensor | None:
        """Return gradients that wait for the step, or to be sent."""
        if not page.is_borrowed:
            return self._parameter.grad
        _, grad_UD = self._pending.unsent.get(page.requested.look_up, (None, None))
        return grad_UD

    @property
    def _grad(self) -> Tensor | None:
        """The gradients that wait for the step."""
        sums_UD = self._pending.sums
        return self._parameter.grad if sums_UD is None else sums_UD

    def _add_grad(self, page: RowPage, grad_UD: Tensor, is_owned: bool = False) -> None:
        """Add the gradient of a page to those that wait for the step.

        Of several ranks, those of rows of other ranks wait to be sent.
        """
        if self._layout is None:
            unused = "gradients of a PagedEmbedding have no effect until a PagedOptimizer steps it"
            warnings.warn(unused, stacklevel=2)
        if page.is_borrowed and not is_owned:
            self._pending.unsent[page.requested.look_up] = page, grad_UD
            return
        if grad_UD is self._grad:  # it was added up in place
            return
        if self._grad is not None:
            # A row of several pages has one gradient, their sum, as it is stepped once.
            with torch.no_grad():
                page, grad_UD = self._merged(page, grad_UD)
        self._pending.page = page
        if is_owned:  # inside a step: nobody sees it
            self._pending.sums = grad_UD
            return
        self._parameter.grad = None  # its shape may change only without a gradient
        if page.records is None:
            self._parameter.data = _zero(grad_UD.device).expand(grad_UD.shape)
        else:
            self._parameter.data = page.records[:, : self.embedding_dim]
        self._parameter.grad = grad_UD

    def _merged(self, page: RowPage, grad_UD: Tensor) -> tuple[RowPage, Tensor]:
        """Return the rows and gradients of this page and the pending one."""
        rows = [each.rows_of(self.store) for each in (self._pending.page, page)]
        rows_U = torch.unique(torch.cat(rows))
        sum_UD = grad_UD.new_zeros(len(rows_U), self.embedding_dim)
        for rows_u, grad_uD in zip(rows, (self._grad, grad_UD), strict=True):
            sum_UD.index_add_(0, torch.searchsorted(rows_U, rows_u), grad_uD)
        records_UR = None if self._fused else self.store._read(rows_U)
        return RowPage(self.store, None, rows_U, records_UR), sum_UD

    def _step(self, optimizer: RowOptimizer, lr: float) -> None:
        """Step the rows that have gradients by torch, and write them back."""
        with self.store.lock:
            if (grad_UD := self._grad) is None:
                return
            page, store = self._pending.page, self.store
            rows_U = page.rows_of(store)
            if page.version != store.version:  # the table has changed since
                page.records = store._read(rows_U)
            page.version = -1  # a step that fails half-way is repeated on the rows of the table
            optimizer.step_rows(store.table, page.records, grad_UD, None, lr)
            store._write(rows_U, page.records)
            self._drop_page()

    def _drop_page(self) -> None:
        """Drop rows and gradients that were stepped."""
        self._pending.page = self._pending.sums = self._parameter.grad = None

    # The table: its memory, first weights and optimizer state.

    @outside_inference  # the table is trained later
    def _open(
        self,
        layout: _Layout | None,
        group: RowGroup | None = None,
        first_rows: tuple[int, ...] | None = None,
    ) -> None:
        """Make the table, or open its file, and set the first weights.

        In a group, the table is a part of the group's, from its rank's `first_rows` on.
        """
        memory_VR, rank = None, self._ranks.rank
        first_rows = first_rows or (0,) * self._ranks.size
        if group:
            rows = self._ranks.shard_rows(self.num_embeddings)
            memory_VR = group.table.records_VR[first_rows[rank] :][:rows]
        table = self._new_table(self.num_embeddings, layout, memory_VR)
        store = Rows(table, self.device, group=group, first_rows=first_rows, rank=rank)
        if not table.continued:
            self._initialise(table, self._init)
            if self._zero_padding and self.padding_idx % self._ranks.size == self._ranks.rank:
                table["weight"][self.padding_idx // self._ranks.size] = 0
            store.flush()
        self._store, self._layout, self._init = store, layout, None
        store.is_shard = self._ranks.size > 1
        _share_cache([self])

    def _attach(self, optimizer: RowOptimizer) -> None:
        """Give each row the state of an optimizer; an earlier one's is lost."""
        layout = _Layout(optimizer.states(self.embedding_dim), optimizer.scalars)
        had, has = _names(self._layout), _names(layout)
        if self._store is None:
            self._open(layout)
        elif self.path is not None and had != has:
            first = "make its PagedOptimizer before the first use"
            raise ValueError(f"path={self.path}: the file is open without this state; {first}")
        elif self.path is None and (had or has):
            with self._store.lock:
                new = self._copy_table(self.num_embeddings, layout, ["weight"])
                self._store._replace_table(new)
        self._layout = layout

    def _initialise(self, table: Table, init: Init | None, first_row: int = 0) -> None:
        whole = init or normal(self.embedding_dim, 1.0, self._seed)
        # A user's function may not run on a GPU.
        is_ours = getattr(whole, "__module__", None) == normal.__module__
        device = self.device if is_ours else None
        of_ranks = self._ranks.global_rows
        table.initialise(lambda rows_n: whole(of_ranks(rows_n)), device, first_row=first_row)

    def _copy_table(self, rows: int, layout: _Layout | None, fields: Iterable[str]) -> Table:
        """Return a table with these fields of the present rows."""
        self._store.flush()
        old = self._store.table
        new = self._new_table(rows, layout)
        for name in fields:
            new[name][: old.rows].copy_(old[name])
        return new

    def _new_table(
        self, rows: int, layout: _Layout | None, memory_VR: Tensor | None = None
    ) -> Table:
        states, scalars = layout or _Layout({}, {})
        rows = self._ranks.shard_rows(rows)
        shape = max(1, rows), self.embedding_dim
        shared = ("embedding", *shape, states, scalars, self.storage, self.dtype)
        if self.state_storage and layout:
            table: Table = SplitTable(*shared, self.state_storage)
        else:
            table = Table(*shared, self.path, memory_VR=memory_VR)
        if rows == 0:  # there are more ranks than rows
            for part in table.parts:
                part.rows, part.records_VR = 0, part.records_VR[:0]
        return table

    def _check(self, optimizer: RowOptimizer) -> None:
        """Raise `ValueError` unless the table has the state of the optimizer."""
        if self._stepped_by is optimizer:
            return
        if self._fused and not optimizer.formula:
            raise ValueError("fused=True has no kernel for this optimizer; leave it out")
        if self._fused and (self.device.type, self.state_storage) != ("cuda", None):
            where = f"device={str(self.device)!r} and state_storage={self.state_storage}"
            raise ValueError(f"fused=True cannot step a table with {where}; leave it out")
        if self._fused and self.dtype == torch.float64:
            raise ValueError("fused=True cannot step float64; leave it out")
        needed = _Layout(optimizer.states(self.embedding_dim), optimizer.scalars)
        if (wanted := _names(needed)) != (found := _names(self._layout)):
            reason = f"a step now needs the state {wanted}, but the table has {found}"
            raise ValueError(f"{reason}; make a new PagedOptimizer")
        self._stepped_by = optimizer

    def _state(self) -> dict[str, Tensor]:
        """Return views of the optimizer state, by their names in torch."""
        table = self.store.table
        self.store.flush()
        return {name: table[name] for name in table.columns if name != "weight"} | table.scalars

    # What nn.Module calls.

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> PagedEmbedding:
        """Move the device of forward passes; the table stays where it is stored."""
        empty = fn(torch.empty_like(self._parameter[:0]).detach())
        if empty.dtype != self._parameter.dtype:
            reason = f"vectors are {self._parameter.dtype} and cannot become {empty.dtype}"
            raise ValueError(f"{reason}; use torch.autocast, or PagedEmbedding(dtype=...)")
        if empty.device != self.device:
            if self._grad is not None or self._pending.unsent:
                raise ValueError("rows wait for a step; call step() or zero_grad(), then move")
            self.device = open_device(empty.device, self.storage)
            self._stepped_by = None
            self._parameter.data = empty
            if self._store is not None:
                self._store.flush()
                self._store.device = self.device
                self._store._replace_table(self._store.table)
        return super()._apply(fn, recurse)

    def _save_to_state_dict(self, destination: dict, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        # A copy, as a view would be saved with the optimizer state beside it.
        if (whole_VD := self._gather(self.weight)) is not None:
            destination[prefix + "weight"] = whole_VD

    def _load_from_state_dict(
        self, state_dict, prefix, local_metadata, strict, missing, unexpected, errors
    ) -> None:
        given = (state_dict, prefix, local_metadata, strict, missing, unexpected, errors)
        super()._load_from_state_dict(*given)
        key = prefix + "weight"
        if key in unexpected:  # as it is no parameter
            unexpected.remove(key)
        shape = torch.Size([self.num_embeddings, self.embedding_dim])
        if key not in state_dict:
            missing += [key] if strict else []
        elif state_dict[key].shape != shape:
            found = tuple(state_dict[key].shape)
            errors.append(
                f"size mismatch for {key}: {found} in the checkpoint, {tuple(shape)} here"
            )
        else:
            self.weight.copy_(self._own_rows(state_dict[key].detach()))

    def _gather(self, values: Tensor) -> Tensor | None:
        """Return a copy of weights or a state, of all ranks; None but on rank 0."""
        if self._ranks.size == 1 or not values.dim():
            return values.clone()
        return sharded.gather(self._ranks, values, self.num_embeddings, self.device)

    def _own_rows(self, values: Tensor) -> Tensor:
        """Return this rank's part of a state of all ranks."""
        return values[self._ranks.rank :: self._ranks.size] if values.dim() else values


class _KernelVectors(torch.autograd.Function):
    """Vectors of tables of one look-up, whose gradients are summed for them."""

    @staticmethod
    def forward(
        ctx: Any, trained: Tensor, pages: list[tuple[PagedEmbedding, RowPage]], bags: Bags | None
    ) -> tuple[Tensor, ...]:
        """Return vectors [N, D] of each table; `trained` needs a gradient."""
        ctx.set_materialize_grads(False)
        ctx.pages, ctx.bags = pages, bags
        ((_, page), *others) = pages
        vectors_ND = page.requested.look_up.vectors(None if others else page.requested.index, bags)
        counts = [bags.number if bags else page.requested.shape.numel() for _, page in pages]
        # Not views, which could not be changed in place.
        return vectors_ND.unsafe_split_with_sizes(counts)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[None, ...]:
        pages, bags = ctx.pages, ctx.bags
        table, page = pages[0]
        has_padding = page.requested.look_up.paddings.count(None) < len(pages)
        has_all = all(grad is not None for grad in grads)
        with table.store.lock:
            # One launch leaves out the padding row of one table at most.
            if len(pages) > 1 and has_all and not has_padding:
                whole = _evenly_spaced(grads) if bags else None
                _sum_gradients(pages, None, torch.cat(grads) if whole is None else whole, bags)
            else:
                bags = bags and bags._replace(tables=1)
                for (table, page), grad in zip(pages, grads, strict=True):
                    if grad is not None:
                        _sum_gradients([(table, page)], page.requested.index, grad, bags)
        return (None,) * 3


def _sum_gradients(
    pages: list[tuple[PagedEmbedding, RowPage]],
    index: int | None,  # of the table; None: all tables of the look-up
    grad: Tensor,
    bags: Bags | None,
) -> None:
    """Sum gradients of ids or bags by row, with those that wait for the step."""
    if grad.dtype != torch.float32 or grad.stride(-1) != 1 or grad.dim() == 2:
        grad = grad.float().contiguous()
    pending = {page.requested.index: table._pending_of(page) for table, page in pages}
    _, first = pages[0]
    sums = first.requested.look_up.add_gradients(index, grad, bags, pending)
    for (table, page), sum_UD in zip(pages, sums, strict=True):
        table._add_grad(page, sum_UD)


def _evenly_spaced(tensors: Sequence[Tensor]) -> Tensor | None:
    """Return tensors at equal distances in one memory as one [T, ...].

    So are the gradients of vectors that were stacked. Of others, None.
    """
    first, second = tensors[:2]
    step = second.data_ptr() - first.data_ptr()
    layouts = {
        (t.untyped_storage().data_ptr(), t.data_ptr() - n * step, t.dtype, t.shape, t.stride())
        for n, t in enumerate(tensors)
    }
    if len(layouts) > 1 or step <= 0 or step % first.element_size():
        return None
    strides = step // first.element_size(), *first.stride()
    return first.as_strided((len(tensors), *first.shape), strides)


class PagedEmbeddingBag(PagedEmbedding):
    """Sums, means or maxima of bags of embeddings, as nn.EmbeddingBag.

    Arguments that are not listed are those of a `PagedEmbedding`.

    Args:
        scale_grad_by_freq: Not with mode="max".
        mode: "sum", "mean" or "max".
        include_last_offset: Whether offsets end with the number of ids.
        padding_idx: Row that is left out of all bags.
        **settings: Further arguments of a `PagedEmbedding`.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        mode: Literal["sum", "mean", "max"] = "mean",
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
        self, ids: Ids, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None
    ) -> Tensor:
        """Return one vector for each bag: [B, D].

        Args:
            ids: Bags of equal size [B, N], or all ids [N] one bag after the other.
            offsets: For ids [N]: where each bag begins, [B].
            per_sample_weights: Factor of each vector, in the shape of the ids; for mode="sum".

        Raises:
            IndexError: An id is not a row; nothing has changed.
        """
        if self._uses_kernels and self.mode != "max" and per_sample_weights is None:
            return self._kernel_vectors(ids, offsets)
        weight_UD, places, padding = self._fetch(ids)
        if offsets is not None:
            offsets = offsets.to(places)
        if per_sample_weights is not None:
            per_sample_weights = per_sample_weights.to(weight_UD)
        return F.embedding_bag(
            places,
            weight_UD.contiguous(),  # the kernels of bags do not take the stride of records
            offsets,
            scale_grad_by_freq=self.scale_grad_by_freq,
            mode=self.mode,
            per_sample_weights=per_sample_weights,
            include_last_offset=self.include_last_offset,
            padding_idx=padding,
        )

    def _launch_key(self, rows: RowsOfIds) -> Any:
        # Kernels leave out one padding row at a time: such tables are by themselves.
        if not self._uses_kernels or self.padding_idx is not None or self.mode == "max":
            return self
        return self.mode, self.include_last_offset, rows.shape

    def _bags(self, shape: torch.Size, offsets: Tensor | None) -> Bags:
        is_mean = self.mode == "mean"
        if len(shape) == 2 and offsets is None:
            return Bags(shape[0], None, shape[1], is_mean)
        if len(shape) == 1 and offsets is not None and offsets.dim() == 1:
            begins = offsets.to(self.device, torch.int64).contiguous()
            return Bags(len(begins) - self.include_last_offset, begins, 0, is_mean)
        given = None if offsets is None else list(offsets.shape)
        reason = f"ids have shape {list(shape)} and offsets {given}"
        raise ValueError(f"{reason}; give ids [B, N], or ids [N] with offsets [B]")


class PagedOptimizer(torch.optim.Optimizer):
    """One optimizer for all paged embeddings of a model.

    Steps rows that have gradients as `optimizer` of torch does, bit for bit in float32. Learning
    rate schedulers, `torch.amp.GradScaler` and `clip_grad_norm_` use it as any optimizer of torch;
    `param_groups` has a parameter for each table, with the gradients of its rows. A step consumes
    the gradients: another one without a backward pass does nothing.

    Args:
        tables: Module whose paged embeddings are stepped, or several; or groups as in torch:
            [{"params": module, "lr": 0.1}, ...]. Frozen tables are left out.
        optimizer: Row-separable optimizer: a class, or the name of one in torch.optim.
        lr: Learning rate. Sparse rows need 10 to 200 times torch's defaults.
        step: Whether bias correction counts the steps of the "table" or of each "row".
        fused: Add gradients and step rows by kernels of this library, on a GPU: several times
            faster. Sums are in no fixed order, so that the last bits differ from run to run, and a
            row whose step is not finite keeps its values. Beside its gradients, a parameter of
            `param_groups` then has zeros in place of weights.
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
        **args: Any,
    ):
        if step not in ("table", "row"):
            raise ValueError(f"step={step!r} is unknown; choose 'table' or 'row'")
        self._fused = fused
        self._name = optimizer_name(optimizer)
        self._counts = step
        self._tables: dict[nn.Parameter, PagedEmbedding] = {}
        self._row_optimizers: dict[int, tuple[dict[str, Any], RowOptimizer]] = {}  # by group
        defaults = RowOptimizer(OptimizerConfig(name=self._name, lr=lr, args=args)).arguments
        defaults["lr"] = lr  # to the `OptimizerConfig` 0 means auto
        groups = [tables] if isinstance(tables, nn.Module) else list(tables)
        if not groups:  # a PagedEmbedding has no parameters
            raise ValueError("PagedOptimizer takes modules, such as the model, not parameters()")
        super().__init__(groups, defaults)  # type: ignore[arg-type]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Step further tables: {"params": module or modules, "lr": ...}."""
        modules = param_group["params"]
        modules = [modules] if isinstance(modules, nn.Module) else list(modules)
        for module in modules:
            if not isinstance(module, nn.Module):
                kind = type(module).__name__
                raise TypeError(f"{kind} is no module; give the PagedEmbedding or its model")
        inner = dict.fromkeys(inner for module in modules for inner in module.modules())
        tables = [m for m in inner if isinstance(m, PagedEmbedding) and m.trainable]
        if not tables:
            raise ValueError("these modules have no PagedEmbedding that is trained")
        parameters = [table._parameter for table in tables]
        if not self._tables.keys().isdisjoint(parameters):
            raise ValueError("a PagedEmbedding is in two groups; give each table once")
        if len({table._ranks.size for table in [*self._tables.values(), *tables]}) > 1:
            raise ValueError("tables differ in process_group; give all of them the same")
        optimizer = self._row_optimizer(len(self.param_groups), self.defaults | param_group)
        opened = _open_together(tables, optimizer)
        for table in tables:
            if table not in opened:
                table._attach(optimizer)
            table._fused, table._stepped_by = self._fused, None
            table._check(optimizer)
        super().add_param_group(dict(param_group, params=parameters))
        self._tables.update(zip(parameters, tables, strict=True))
        _share_cache(list(self._tables.values()))

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """What torch.amp.GradScaler asks before a step."""
        if self._ranks.size > 1:
            reason = "the ranks of a table would not agree on GradScaler's factor"
            raise ValueError(f"{reason}; use torch.autocast with bfloat16, without a scaler")
        return False

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
        for number, group in enumerate(self.param_groups):
            lr = float(group["lr"])
            if not (math.isfinite(lr) and lr >= 0):
                raise ValueError(f"lr={lr} is no learning rate; it must be a number from 0 up")
            optimizer = self._row_optimizer(number, group)
            tables = [self._tables[parameter] for parameter in group["params"]]
            for table in tables:
                table._check(optimizer)
            steps.append((tables, optimizer, lr))
        # Only now, so that a step that is refused changes no table.
        if self._ranks.size > 1:
            sharded.reduce(list(self._tables.values()))
        for tables, optimizer, lr in steps:
            if self._fused:
                _step_fused(tables, optimizer, lr)
            else:
                for table in tables:
                    table._step(optimizer, lr)
        return loss

    def pages(
        self,
        loader: Iterable[Any],
        key: Any | list[Any] | Callable[[Any], Sequence[Ids]],
        ahead: int = 4,
    ) -> Iterator[Any]:
        """Yield the batches of a loader while rows of the next are fetched.

            for batch in paged.pages(loader, key="user_id"):
                loss = model(users(batch["user_id"]))

        Give the forward pass the ids as they are in the batch: for others, rows are looked up anew.
        With gpu_bytes, rows of the next batch come while this one computes, and rows of the batches
        after it stay. Results are those of the loader itself, bit for bit. An error of the loader,
        or an id that is not a row, is raised once the batches before it are used.

        Args:
            loader: Batches, such as those of a DataLoader.
            key: Item of a batch that has the ids; a list of one for each table, in the order of the
                tables; or a function that returns the ids for each table.
            ahead: Number of batches that are read ahead. The rows of half as many move together,
                which takes less time than one after the other.
        """
        if ahead < 1:
            raise ValueError(f"ahead={ahead} is too small; it must be 1 or more")
        tables = list(self._tables.values())
        batches: Iterator[LookedUpBatch]
        batches = (LookedUpBatch(batch, _look_up_batch(tables, batch, key)) for batch in loader)
        if self._ranks.size > 1:
            batches = sharded.sent_ahead(tables, batches)
        together = max(1, ahead // 2)  # batches of a page of the cache
        try:
            for number, window in enumerate(_windows(batches, ahead)):
                begins_page = number % together == 0
                if begins_page:
                    _prefetch(islice(window, together))
                batch, rows = window.popleft()
                for look_up in _owned(rows):
                    look_up.group.make_current(look_up)
                if begins_page:  # the rows after this page's
                    _prefetch(islice(window, together - 1, 2 * together - 1))
                _announce(tables, rows)
                yield batch
                _forget_vectors(rows)
        finally:
            for table in tables:
                table._announced.rows = None
                table._announced.together = []

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients of all tables, or set them to zero."""
        for table in self._tables.values() if self._ranks.size > 1 else ():
            table._pending.unsent.clear()
            table._pending.sums = None
        if not set_to_none:
            super().zero_grad(set_to_none=False)
            return
        for parameter in self._tables:  # several times faster than torch's own way
            parameter.grad = None

    def state_dict(self) -> dict[str, Any]:
        """Return the state in the format of torch's optimizer of dense tables.

        State is copied, which takes as much memory again. Of several ranks, rank 0 has it. The step
        sizes of ASGD and Rprop are 0 for rows that have made no step.
        """
        found = super().state_dict()
        states = [
            {name: table._gather(value) for name, value in table._state().items()}
            for table in self._tables.values()
        ]
        kept = {number: state for number, state in enumerate(states) if state}
        return found | {"state": {} if self._ranks.rank else kept}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of this class, or of torch's optimizer of dense tables.

        Raises:
            ValueError: It is for other tables or another optimizer; nothing has changed.
        """
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        loaded = []
        for number, table in zip(numbers, self._tables.values(), strict=False):
            state = table._state()
            given = state_dict["state"].get(number, {})
            given = {name: value for name, value in given.items() if value is not None}
            # Only a bfloat16 table counts its writes, and torch does not.
            needed = [name for name in state if name in given or name != "writes"]
            rows = table.num_embeddings
            shapes = {name: (rows, *state[name].shape[1:])[: state[name].dim()] for name in needed}
            if {name: value.shape for name, value in given.items()} != shapes:
                raise ValueError(f"the state of table {number} is of another optimizer or shape")
            loaded.append((table, state, given))
        super().load_state_dict(state_dict | {"state": {}})  # checks the numbers of tables
        for table, state, given in loaded:
            table.store.version += 1
            for name, value in given.items():
                state[name].copy_(table._own_rows(value))

    def save(self, folder: str | Path, step: int) -> None:
        """Write weights and states of all tables to a folder.

        The folder keeps the last two steps. Each rank writes its rows, without a copy in memory;
        they load into any number of ranks. Several machines need storage that they share.
        """
        Path(folder).mkdir(parents=True, exist_ok=True)
        last = latest(Path(folder), self._ranks)
        if last and step <= last.state["step"]:
            saved = f"{folder} has step {last.state['step']}, and step={step} is not later"
            raise ValueError(f"{saved}; give another folder")
        saver = Checkpoints(Path(folder), self._parts(), 0, self._ranks)
        rates = [float(group["lr"]) for group in self.param_groups]
        saver.save({"step": step, "lr": rates}, copied=False)
        saver.wait()

    def load(self, folder: str | Path) -> int:
        """Load the last step that is in a folder of `save`; return it.

        Raises:
            ValueError: There is none, or it is damaged or of other tables.
        """
        if (saved := latest(Path(folder), self._ranks)) is None:
            raise ValueError(f"{folder} holds no checkpoint; give a folder of PagedOptimizer.save")
        saved.load(self._parts(), self._ranks)
        for group, lr in zip(self.param_groups, saved.state["lr"], strict=True):
            group["lr"] = lr
        return saved.state["step"]

    @property
    def _ranks(self) -> Ranks:
        return next(iter(self._tables.values()))._ranks

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
        names = "_name", "_counts", "_fused", "_tables"
        own = {name: getattr(self, name) for name in names}
        return super().__getstate__() | own | {"_row_optimizers": {}}

    def _row_optimizer(self, number: int, group: dict[str, Any]) -> RowOptimizer:
        """Return the optimizer of a group, with the arguments it has now."""
        names = [name for name in self.defaults if name != "lr" and group.get(name) is not None]
        args = {name: group[name] for name in names}
        known_args, _ = self._row_optimizers.get(number, (None, None))
        if known_args != args:
            config = OptimizerConfig(self._name, float(group["lr"]), args=args, step=self._counts)
            self._row_optimizers[number] = args, RowOptimizer(config, may_change=True)
        _, optimizer = self._row_optimizers[number]
        return optimizer


def _look_up_batch(tables: list[PagedEmbedding], batch: Any, key: Any) -> list[RowsOfIds]:
    """Begin to look up the rows of a batch in each table."""
    if callable(key):
        ids = key(batch)
    else:
        ids = [batch[item] for item in (key if isinstance(key, list) else [key])]
    if len(ids) != len(tables):
        raise ValueError(f"key gives ids for {len(ids)} tables of {len(tables)}; give one for each")
    return sharded.look_up_tables(tables, ids)


def _windows(batches: Iterator[LookedUpBatch], ahead: int) -> Iterator[deque[LookedUpBatch]]:
    """Yield the next batch and `ahead` more, of which the caller takes one.

    An error is raised once the batches before it are taken.
    """
    window: deque[LookedUpBatch] = deque()
    error: Exception | None = None
    while True:
        while error is None and len(window) <= ahead:
            try:
                window.append(next(batches))
            except Exception as reason:  # such as StopIteration
                error = reason
        if not window:
            break
        yield window
    if not isinstance(error, StopIteration):
        raise error


def _owned(rows: list[RowsOfIds]) -> list[LookUp]:
    """Return the look-ups of rows of this process."""
    return list(dict.fromkeys(found.owned.look_up for found in rows))


def _forget_vectors(rows: list[RowsOfIds]) -> None:
    """Drop vectors that were computed and not used: they refer to the look-up."""
    for found in rows:
        found.look_up.computed.clear()


def _prefetch(batches: Iterable[LookedUpBatch]) -> None:
    """Begin to bring the rows of batches as one page."""
    by_group: dict[RowGroup, list[LookUp]] = {}
    for _, rows in batches:
        for look_up in _owned(rows):
            with contextlib.suppress(IndexError):  # it is raised when it is due
                if look_up.rows is not None:
                    by_group.setdefault(look_up.group, []).append(look_up)
    for group, look_ups in by_group.items():
        group.prefetch(look_ups)


def _announce(tables: list[PagedEmbedding], rows: list[RowsOfIds]) -> None:
    """Give tables their rows of the current batch."""
    by_look_up: dict[LookUp, list[tuple[PagedEmbedding, RowsOfIds]]] = {}
    for table, found in zip(tables, rows, strict=True):
        by_look_up.setdefault(found.look_up, []).append((table, found))
        table._announced.rows = found
    for users in by_look_up.values():
        is_one_launch = len({table._launch_key(found) for table, found in users}) == 1
        for table, _ in users:
            table._announced.together = users if is_one_launch else []


def _step_fused(tables: list[PagedEmbedding], optimizer: RowOptimizer, lr: float) -> None:
    """Step rows by fused kernels: one launch for the tables of a look-up."""
    by_look_up: dict[Any, list[PagedEmbedding]] = {}
    for table in tables:
        if table._grad is not None:
            owned = table._pending.page.owned
            is_together = owned and owned.look_up.group is table.store.group
            by_look_up.setdefault(owned.look_up if is_together else table, []).append(table)
    for look_up, its_tables in by_look_up.items():
        with its_tables[0].store.lock:
            group = its_tables[0].store.group
            counts = [optimizer.count_step(table.store.table) for table in its_tables]
            seeds = [table.store.table.next_rounding_seed() for table in its_tables]
            is_whole = isinstance(look_up, LookUp) and look_up.has_all(
                {table._pending.page.owned.index: table._grad for table in its_tables}
            )
            if is_whole and len(set(counts)) == 1:
                rows = look_up.rows, look_up.narrow_N, look_up.count
                group.step(optimizer, counts[0], seeds[0], look_up.sums_UD, lr, *rows)
                group.keep_zeros(look_up.take_sums())  # the step has made them 0
            else:
                for table, counted, seed in zip(its_tables, counts, seeds, strict=True):
                    rows_U = table._pending.page.rows_of(table.store)
                    table.store.group.step(optimizer, counted, seed, table._grad, lr, rows_U)
            for table in its_tables:
                table.store.version += 1
                table._drop_page()


def _open_together(tables: list[PagedEmbedding], optimizer: RowOptimizer) -> set[PagedEmbedding]:
    """Open tables of one kind side by side.

    They share launches and a cache. Tables that are open already stay by themselves: to copy them
    all would take twice the memory.
    Returns those that were opened.
    """
    opened: set[PagedEmbedding] = set()
    kinds: dict[Any, list[PagedEmbedding]] = {}
    for table in tables:
        if table._store is None and table.path is None and table.state_storage is None:
            is_cached = table._cache_size.gpu_bytes_of(1 << 60) != 0
            kind = table.embedding_dim, table.dtype, table.storage, table.device, is_cached
            kinds.setdefault(kind, []).append(table)
    for its_tables in kinds.values():
        first, ranks = its_tables[0], its_tables[0]._ranks
        rows_TN = [
            [len(range(rank, table.num_embeddings, ranks.size)) for rank in range(ranks.size)]
            for table in its_tables
        ]
        *begins_TN, rows_N = np.cumsum([[0] * ranks.size, *rows_TN], axis=0).tolist()
        if len(its_tables) > 1 and rows_N[0] < MOST_ROWS:  # alike on all ranks
            layout = _Layout(optimizer.states(first.embedding_dim), optimizer.scalars)
            shape = max(1, rows_N[ranks.rank]), first.embedding_dim
            whole = Table("embeddings", *shape, layout.states, {}, first.storage, first.dtype)
            group = RowGroup(whole, first.device)
            for table, begins_N in zip(its_tables, begins_TN, strict=True):
                table._open(layout, group, tuple(begins_N))
            opened.update(its_tables)
    return opened


def _share_cache(tables: list[PagedEmbedding]) -> None:
    """Give tables caches of one size, and less to those that need less."""
    sizes = [table._cache_size.gpu_bytes_of(table.store.paged_bytes) for table in tables]
    left = sum(size for size in sizes if size is not None)
    if None in sizes and tables[0].device.type == "cuda":
        left += torch.cuda.mem_get_info(tables[0].device)[0] // 2
    shared = [table for table, size in zip(tables, sizes, strict=True) if size != 0]
    for number, table in enumerate(sorted(shared, key=lambda table: table.store.paged_bytes)):
        share = min(table.store.paged_bytes, left // (len(shared) - number))
        table.store.set_cache(share)
        left -= share


@functools.cache
def _zero(device: torch.device) -> Tensor:
    return torch.zeros((), device=device)


def _names(layout: _Layout | None) -> list[str]:
    """Return the names of states and scalars, with the width of states."""
    states, scalars = layout or _Layout({}, {})
    return [*(f"{name} x {state.width}" for name, state in states.items()), *scalars]


def _copy_of(values: Tensor | np.ndarray, module: PagedEmbedding) -> Init:
    """Return an initialiser with given weights [V, D]."""
    weights_VD = torch.as_tensor(values).detach()
    shape = [module.num_embeddings, module.embedding_dim]
    if (given := list(weights_VD.shape)) != shape:
        raise ValueError(f"init has shape {given}, but the table is {shape}")
    return lambda rows_n: weights_VD[rows_n.to(weights_VD.device)]


def _refuse_ranks() -> None:
    """Raise `RuntimeError` in one of several processes that train together."""
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        ranks = distributed.get_world_size()
        if ranks > 1:
            raise RuntimeError(
                f"this PagedEmbedding cannot train in {ranks} processes: each would have a table "
                "of its own; make it with process_group=torch.distributed.group.WORLD"
            )
