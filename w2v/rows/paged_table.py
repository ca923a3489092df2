"""Tables of paged embeddings: their rows, gradients and optimizer state.

A forward pass fetches the unique rows of its ids to the compute device, as a page. Vectors are
looked up in it, so that their gradient is as small as the page. The step writes it back.

Shapes: V rows, D dimensions, U unique rows, R elements of a record.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from w2v.config import TransferConfig
from w2v.distributed.ranks import Ranks
from w2v.rows.group import RowGroup, outside_inference, regroup
from w2v.rows.lookup import LookUp, RowPage
from w2v.rows.moves import MOST_ROWS
from w2v.rows.ops import Span
from w2v.rows.optim import RowOptimizer
from w2v.rows.store import Rows, open_device
from w2v.rows.table import Init, RowState, SplitTable, Storage, Table, normal

GATHER_ROWS = 1 << 16  # of each rank, at a time
STEP_ROWS = 1 << 20  # that a step reads and writes at a time
DRAWN_ROWS = 1 << 12  # times 16
OPENING = threading.RLock()  # several threads may be the first to use a table


class Layout(NamedTuple):
    """States of each row that a table keeps for its optimizer, and scalars."""

    states: dict[str, RowState]
    scalars: dict[str, Tensor]

    def names(self) -> list[str]:
        """Return the names of states and scalars, with the width of states."""
        return [*(f"{name} x {state.width}" for name, state in self.states.items()), *self.scalars]


class RowParameter(nn.Parameter):
    """Parameter of a table in `param_groups`, with the gradients of its rows.

    Attributes:
        grad_UD: These, [U, D]. torch lets no gradient have another shape than its parameter, which
            has the rows' weights, and without `records` of a page none.
    """

    grad_UD: Tensor | None = None

    @property
    def grad(self) -> Tensor | None:
        return self.grad_UD

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        like = self if self.grad_UD is None else self.grad_UD
        like.detach().grad = value  # torch refuses another shape, dtype or device
        self.grad_UD = value

    @grad.deleter
    def grad(self) -> None:
        self.grad_UD = None

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return RowParameter, (self.detach(),)


@dataclass(eq=False, repr=False)
class PagedTable:
    """Rows of a `PagedEmbedding`, whose arguments have the same names."""

    num_embeddings: int
    embedding_dim: int
    max_norm: float | None
    norm_type: float
    scale_grad_by_freq: bool
    storage: Storage
    device: torch.device
    dtype: torch.dtype
    path: str | Path | None
    state_storage: Storage | None
    cache_size: TransferConfig
    ranks: Ranks
    seed: int | None  # of the first weights; None: torch's generator draws them
    init: Init | None  # of the first weights
    has_zero_padding: bool  # at first
    sparse: bool  # as gradients of its weight
    trainable: bool  # as `requires_grad` of its weight
    shares_no_rows: bool  # with other processes, as it was made without a process group
    padding_idx: int | None = None
    mode: str | None = None  # of bags
    include_last_offset: bool = False  # of bags

    def __post_init__(self) -> None:
        # Rows and first weights.
        self._store: Rows | None = None  # None until the first use, or an optimizer
        self.generator_state: Any = None  # of torch, before it drew weights that are not set yet
        self.is_reset = False  # first weights also where a file would be continued
        self.weight: Callable[[], Any] = _no_weight  # `PagedWeight`; weak, as it keeps the table
        self.cached_at: int | None = None  # version of the weight; None: no row is cached
        # The optimizer, if there is one.
        self.stepped_by: weakref.ref[Any] | None = None  # the last that was made
        self.fused = False  # whether kernels add gradients and step
        self.shows_grad = False  # whether `weight.grad` has the gradients of rows
        self.checked: RowOptimizer | None = None  # whose state the table was found to have
        self._layout = Layout({}, {})
        # From a forward pass to the step. The parameter has the rows that have gradients: gradient
        # clipping and PagedOptimizer see it. Modules have a `PagedWeight`, which may be in an
        # optimizer of the dense modules too.
        self.vector_dtype = torch.promote_types(self.dtype, torch.float32)  # `convert` changes it
        empty = torch.empty(0, self.embedding_dim, dtype=self.vector_dtype, device=self.device)
        self.parameter = RowParameter(empty)
        self.page: RowPage | None = None  # rows whose gradients wait for the step
        self.unsent: dict[LookUp, Tensor] = {}  # gradients of rows that other ranks own
        self.announced: RowPage | None = None  # of the current batch of `PagedOptimizer.pages`

    def __getstate__(self) -> dict[str, Any]:
        """Return what copies and pickles hold: no gradients, no optimizer."""
        if self.ranks.size > 1:
            raise ValueError("a table of several ranks is not copied or pickled; use state_dict()")
        # Once it is open, no function for initial weights is left, which may not be picklable.
        gone = dict.fromkeys(("init", "stepped_by", "checked", "page", "announced", "cached_at"))
        own = {"_store": self.store, "unsent": {}, "weight": _no_weight}
        own |= dict.fromkeys(("fused", "shows_grad"), False)
        return vars(self) | own | gone

    @property
    def store(self) -> Rows:
        """Return the rows; open a table that no optimizer has opened."""
        if self._store is None:
            # Not as tensors of a function of torch.func, which end with it.
            with OPENING, torch._C._DisableFuncTorch():
                if self._store is None:
                    self.open()  # a PagedOptimizer may come later
        assert self._store is not None
        return self._store

    @property
    def version(self) -> tuple[int, int]:
        """Return the version of the weight, or of a table that has none."""
        if (weight := self.weight()) is None:
            return self.store.version, 0
        return weight.version

    def stored(self) -> Tensor:
        """Return a view [V, D] of this rank's weights, where they are stored."""
        with self.store.lock:
            self.check_views()
            self.cached_at = None
            self.store.flush()
            return self.store.table["weight"]

    def whole(self) -> Tensor:
        """Return a copy of all weights, as forward passes give them."""
        stored_VD = self.stored()
        try:  # contiguous, as torch's kernels give other last bits for strided weights
            whole_VD = torch.empty(stored_VD.shape, dtype=self.vector_dtype, device=self.device)
            return whole_VD.copy_(stored_VD)
        except torch.OutOfMemoryError:
            reason = f"{self.num_embeddings:,} rows of weights do not fit on {self.device}"
            raise MemoryError(f"{reason}; for logits use table.linear(h)") from None

    def index(self, func: Callable[..., Tensor], *args: Any) -> Tensor:
        """Return rows as an operation of torch reads them, where they are stored."""
        stored_VD = self.stored()
        args = tree_map_only(Tensor, lambda ids: ids.to(stored_VD.device), args)
        return func(stored_VD, *args).to(self.device, self.vector_dtype)

    @property
    def span(self) -> Span:
        """The rows of all ranks, for a look-up."""
        return Span(self.num_embeddings, self.padding_idx, self.store.first_rows)

    @property
    def trains(self) -> bool:
        """Return whether a forward pass now is followed by gradients."""
        return self.trainable and torch.is_grad_enabled()

    def is_stepped_by(self, optimizer: Any) -> bool:
        """Return whether this is the last optimizer that was made for the table."""
        return self.stepped_by is not None and self.stepped_by() is optimizer

    @property
    def has_state(self) -> bool:
        """Return whether there is memory for the state of an optimizer."""
        return bool(self._layout.states)

    @property
    def has_gradient(self) -> bool:
        """Return whether gradients wait for the step, or to be sent."""
        return self.parameter.grad_UD is not None or bool(self.unsent)

    @property
    def uses_kernels(self) -> bool:
        """Return whether kernels read vectors of ids and sum gradients."""
        has_rules = self.max_norm is not None or self.scale_grad_by_freq
        return self.fused and not has_rules and self.vector_dtype == torch.float32

    @torch.no_grad()
    def read(self, page: RowPage, is_used: bool = True) -> tuple[RowPage, Tensor]:
        """Read rows; return the page with them, and its weights [U, D].

        Norms are limited in the table too, if a forward pass uses the rows.
        """
        store, rows_U = self.store, page.rows()
        records_UR = store.group.read(rows_U)
        weight_UD = records_UR[:, store.table.columns["weight"]]
        if self.max_norm is not None:
            # As in nn.Embedding, which changes its weights in the forward pass too. On a GPU,
            # torch takes the stride of a row for its length, and no empty list of rows.
            if len(rows_U):
                # `contiguous` would not copy a single row, which has the stride of its record.
                whole_UD = weight_UD.clone(memory_format=torch.contiguous_format)
                every_U = torch.arange(len(rows_U), device=rows_U.device)
                torch.embedding_renorm_(whole_UD, every_U, self.max_norm, self.norm_type)
                weight_UD.copy_(whole_UD)
            if is_used:
                store.group.write(store, rows_U, records_UR)
                count_changes([self])
        if not self.fused:
            page = RowPage(store, page.found, page.index, rows_U)
            page.records, page.version = records_UR, self.version
        return page, weight_UD

    # Gradients, and the step by torch.

    def waiting(self) -> tuple[RowPage, Tensor] | None:
        """Return the rows that wait for the step, and their gradients."""
        if self.page is None or self.parameter.grad_UD is None:
            return None
        return self.page, self.parameter.grad_UD

    def pending(self, page: RowPage) -> Tensor | None:
        """Return gradients of a look-up that wait for the step, or to be sent."""
        if self.ranks.size > 1:
            return self.unsent.get(page.look_up)
        return self.parameter.grad_UD

    def collect(self, page: RowPage, grad_UD: Tensor) -> None:
        """Add gradients to those that wait for the step, or to be sent."""
        self.check_gradient()
        if self.ranks.size > 1:
            self.unsent[page.look_up] = grad_UD
        else:
            self.add_grad(page, grad_UD)

    def add_grad(self, page: RowPage, grad_UD: Tensor) -> None:
        """Add the gradient of a page to those that wait for the step."""
        if grad_UD is self.parameter.grad_UD:  # it was added up in place
            return
        if (waiting := self.waiting()) is not None:
            page, grad_UD = self._joined(waiting, (page, grad_UD))
        self.page = page
        if page.records is not None:
            self.parameter.data = page.records[:, : self.embedding_dim]
        else:
            self.drop_weights()  # of a page before
        self.parameter.grad_UD = grad_UD

    def drop_weights(self) -> None:
        """Free the records of a page, whose weights the parameter has shown."""
        if self.parameter.shape[0]:
            self.parameter.data = self.parameter.new_empty(0, self.embedding_dim)

    @torch.no_grad()
    def _joined(self, *parts: tuple[RowPage, Tensor]) -> tuple[RowPage, Tensor]:
        """Return the rows of pages, each once, and the sums of their gradients."""
        rows_U = torch.unique(torch.cat([page.rows() for page, _ in parts]))
        grad_UD = parts[-1][1].new_zeros(len(rows_U), self.embedding_dim)
        for page, grad_uD in parts:
            grad_UD.index_add_(0, torch.searchsorted(rows_U, page.rows()), grad_uD)
        return RowPage(self.store, None, rows_U=rows_U), grad_UD

    def step(self, optimizer: RowOptimizer, lr: float) -> None:
        """Step the rows that have gradients by torch, and write them back."""
        store = self.store
        with store.lock:
            if (waiting := self.waiting()) is None:
                return
            page, grad_UD = waiting
            rows_U = page.rows()
            for name in optimizer.first_rates(store.table):  # as torch: also of other rows
                store.flush()
                store.table[name].fill_(lr)
                store.version += 1
            records_UR = page.records
            if records_UR is not None and page.version != self.version:
                records_UR = None  # the table has changed since
            page.records = None  # a step that fails half-way is repeated on the rows of the table
            self.drop_weights()
            store.table.begin_step()
            with _repeatable([self]) as set_back:
                for rows_u, grad_uD, records_uR in _in_parts(rows_U, grad_UD, records_UR):
                    if records_uR is None:
                        records_uR = store.group.read(rows_u)
                    optimizer.step_rows(store.table, records_uR, grad_uD, None, lr)
                    store.group.write(store, rows_u, records_uR)
                    if len(rows_u) < len(rows_U):  # the others are left, should they fail
                        rows_U, grad_UD = rows_U[len(rows_u) :], grad_UD[len(rows_u) :]
                        self.page = RowPage(store, None, rows_U=rows_U)
                        self.parameter.grad_UD = grad_UD
                        set_back()  # the parts of a step count as one
            drop_pages([self])

    def check_gradient(self) -> None:
        """Raise `RuntimeError` for gradients of gradients."""
        if torch.is_grad_enabled():
            remedy = "leave it out, or take torch.autograd.grad of the other parameters"
            raise RuntimeError(f"create_graph=True is not supported for paged rows; {remedy}")

    def add_whole_grad(self, grad_VD: Tensor) -> None:
        """Add a gradient [V, D], dense or sparse, to those that wait."""
        store = self.store
        with store.lock:
            if grad_VD.is_sparse:
                grad_VD = grad_VD.coalesce()
                rows_U, grad_UD = grad_VD.indices()[0], grad_VD.values()
            else:
                rows_U, grad_UD = torch.arange(len(store), device=self.device), grad_VD
            page = RowPage(store, None, rows_U=rows_U.to(self.device) + store.first_row)
            self.add_grad(page, grad_UD.to(self.device, self.parameter.dtype).contiguous())

    def check_views(self) -> None:
        """Raise `RuntimeError` if a view has written to cached rows.

        Notes the version of the weight from which on such writes would be lost.
        """
        is_cached = self._store is not None and self._store.group.caches
        if not is_cached or (weight := self.weight()) is None:
            return
        cached_at, self.cached_at = self.cached_at, weight._version
        if cached_at not in (None, self.cached_at):
            reason = "a view of the weight was written to after rows of it were cached"
            raise RuntimeError(f"{reason} (gpu_bytes, pages); take weight.data anew for each write")

    def end_pages(self) -> None:
        """Give up the room that the rows of `PagedOptimizer.pages` had."""
        if self._store is not None and self._store.group.pages_only:
            self._store.group.end_pages()
            self.cached_at = None

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients, or set them to zero."""
        self.unsent.clear()
        if set_to_none:
            self.parameter.grad_UD = None
        elif self.parameter.grad_UD is not None:
            self.parameter.grad_UD.zero_()

    # Memory, first weights and optimizer state.

    @outside_inference  # the table is trained later
    def open(
        self,
        optimizer: RowOptimizer | None = None,
        group: RowGroup | None = None,
        first_rows: tuple[int, ...] | None = None,
    ) -> None:
        """Make the table, or open its file, and set the first weights.

        In a group, the table is a part of the group's, from its rank's `first_rows` on.
        """
        memory_VR, rank, layout = None, self.ranks.rank, self._layout
        if optimizer:
            layout = self.layout_for(optimizer)
        first_rows = first_rows or (0,) * self.ranks.size
        if group:
            rows = self.ranks.shard_rows(self.num_embeddings)
            memory_VR = group.table.records_VR[first_rows[rank] :][:rows]
        table = self._new_table(self.num_embeddings, self.dtype, layout, memory_VR)
        store = Rows(table, group or RowGroup(table, self.device), 0, first_rows, rank)
        if self.is_reset or not table.continued:
            self._draw(store)
        self._store, self._layout = store, layout
        self.init = self.generator_state = None
        share_cache([self])

    @outside_inference
    def reset(self) -> None:
        """Draw the weights anew, or when the table is opened."""
        self.seed = self.init = None
        self.draw_normal(self.num_embeddings)
        self.has_zero_padding = self.padding_idx is not None
        self.is_reset = True
        if self._store is not None:
            with self._store.lock:
                self._store.flush()  # a cache would write its rows back later
                self._store.version += 1
                self._draw(self._store)
                count_changes([self])

    def _draw(self, store: Rows) -> None:
        """Set the first weights."""
        self._initialise(store.table, self.init, self.num_embeddings)
        if self.has_zero_padding and self.padding_idx is not None:
            row, owner = divmod(self.padding_idx, self.ranks.size)
            if owner == self.ranks.rank:
                store.table["weight"][row] = 0
        store.flush()

    @outside_inference
    def attach(self, optimizer: RowOptimizer) -> None:
        """Give each row the state of an optimizer; an earlier one's is lost."""
        if self._store is None:
            self.open(optimizer)
            return
        layout = self.layout_for(optimizer)
        had, has = self._layout.names(), layout.names()
        if self.path is not None and had != has:
            first = "make its PagedOptimizer before the first use, when it is not frozen"
            raise ValueError(f"path={self.path}: the file is open without this state; {first}")
        with self._store.lock:
            if had != has:
                new = self._new_table(self.num_embeddings, self.dtype, layout)
                new["weight"].copy_(self.stored())
                regroup(self._store, new, self.device)
            self._layout = layout
            if has and had == has:
                self.set_state(self.initial_state())

    def layout_for(self, optimizer: RowOptimizer) -> Layout:
        """Return what the table keeps for an optimizer."""
        layout = Layout(optimizer.states(self.embedding_dim), optimizer.scalars)
        if self.state_storage and not layout.states:
            reason = "this optimizer keeps no state; leave state_storage out"
            raise ValueError(f"state_storage={self.state_storage!r}: {reason}")
        return layout

    def check(self, optimizer: RowOptimizer) -> None:
        """Raise `ValueError` unless the table has the state of the optimizer."""
        if self.checked is optimizer:
            return
        if self.fused:
            self.check_fused(optimizer)
        if optimizer.state_count and not self.has_state:
            self.attach(optimizer)  # as torch, which makes a state when a step first needs it
        wanted = Layout(optimizer.states(self.embedding_dim), optimizer.scalars).names()
        found = self._layout.names()
        if wanted != found:
            reason = f"a step now needs the state {wanted}, but the table has {found}"
            raise ValueError(f"{reason}; make a new PagedOptimizer with the arguments it has now")
        self.checked = optimizer

    def check_fused(self, optimizer: RowOptimizer) -> None:
        """Raise `ValueError` unless fused kernels can step the table."""
        if not optimizer.formula:
            raise ValueError("fused=True has no kernel for this optimizer; leave it out")
        if (self.device.type, self.state_storage) != ("cuda", None):
            where = f"device={str(self.device)!r} and state_storage={self.state_storage}"
            raise ValueError(f"fused=True cannot step a table with {where}; leave it out")
        if self.dtype == torch.float64:
            raise ValueError("fused=True cannot step float64; leave it out")
        if self.num_embeddings > MOST_ROWS:
            rows = f"{self.num_embeddings:,} rows, which are numbered in 32 bits"
            raise ValueError(f"fused=True cannot step {rows}; leave it out")

    @outside_inference
    def grow(self, num_embeddings: int, init: Init | None) -> None:
        """Append rows."""
        if self.path is not None:
            raise ValueError(f"path={self.path}: a file cannot grow; load its rows into another")
        added = num_embeddings - self.num_embeddings
        with self.store.lock:
            new = self._copy_table(num_embeddings, self.dtype)
            if init is None and self.seed is None:
                self.draw_normal(added)
            self._initialise(new, init, added, self.num_embeddings)
            self.num_embeddings = num_embeddings
            regroup(self.store, new, self.device)

    @outside_inference
    def convert(self, dtype: torch.dtype) -> None:
        """Store rows, and give vectors, in a dtype from now on."""
        if self.path is not None:
            raise ValueError(f"path={self.path}: a file keeps its {self.dtype}; use torch.autocast")
        self._check_no_grad()
        with self.store.lock:
            new = self._copy_table(self.num_embeddings, dtype)
            self.dtype = self.vector_dtype = dtype
            self.parameter.data = self.parameter.to(torch.promote_types(dtype, torch.float32)).data
            self.checked = None
            regroup(self.store, new, self.device)

    @outside_inference
    def move(self, empty: Tensor) -> None:
        """Bring rows to the device of an empty tensor from now on."""
        self._check_no_grad()
        self.device = open_device(empty.device, self.storage)
        self.checked = None
        self.parameter.data = empty
        if self._store is not None:
            self._store.flush()
            regroup(self._store, self._store.table, self.device)

    def draw_normal(self, rows: int) -> None:
        """Draw weights of rows from torch's generator, that of rank 0."""
        state = torch.get_rng_state()
        for _ in normal_rows(rows, self.embedding_dim, self.dtype):
            pass  # they are drawn again when there is memory for them
        self.generator_state = self.ranks.all_gather(state)[0]

    def _check_no_grad(self) -> None:
        if self.has_gradient:
            raise ValueError("rows wait for a step; call step() or zero_grad(), then move")

    def _initialise(self, table: Table, init: Init | None, rows: int, old_rows: int = 0) -> None:
        """Set the weights of `rows` rows of all ranks, which follow `old_rows`."""
        size, rank = self.ranks.size, self.ranks.rank
        if init is None and self.seed is None:
            generator = torch.Generator("cpu").set_state(self.generator_state)
            for start, drawn in normal_rows(rows, self.embedding_dim, self.dtype, generator):
                first_row = start + old_rows
                skipped = (rank - first_row) % size
                own = drawn[skipped::size]
                table["weight"][(first_row + skipped) // size :][: len(own)].copy_(own)
            return
        whole = init or normal(self.embedding_dim, 1.0, self.seed or 0)
        # A user's function may not run on a GPU.
        is_ours = getattr(whole, "__module__", None) == normal.__module__
        device = self.device if is_ours else None
        of_ranks, first_row = self.ranks.global_rows, self.ranks.shard_rows(old_rows)
        table.initialise(lambda rows_n: whole(of_ranks(rows_n)), device, first_row=first_row)

    def _copy_table(self, rows: int, dtype: torch.dtype) -> Table:
        """Return a table of as many rows or more with the present ones."""
        self.store.flush()
        old, new = self.store.table, self._new_table(rows, dtype, self._layout)
        for name in old.columns:
            new[name][: old.rows].copy_(old[name])
        for name in old.scalars.keys() & new.scalars.keys():  # only bfloat16 counts writes
            new.scalars[name].copy_(old.scalars[name])
        return new

    def _new_table(
        self, rows: int, dtype: torch.dtype, layout: Layout, memory_VR: Tensor | None = None
    ) -> Table:
        rows = self.ranks.shard_rows(rows)
        shape = max(1, rows), self.embedding_dim
        shared = ("embedding", *shape, *layout, self.storage, dtype)
        if self.state_storage and layout.states:
            table: Table = SplitTable(*shared, self.state_storage)
        else:
            table = Table(*shared, self.path, memory_VR=memory_VR)
        if rows == 0:  # there are more ranks than rows
            for part in table.parts:
                part.rows, part.records_VR = 0, part.records_VR[:0]
        return table

    def state(self) -> dict[str, Tensor]:
        """Return views of the optimizer state, by their names in torch."""
        store = self.store
        store.flush()
        own = {name: store.table[name] for name in self._layout.states}
        return own | {name: store.table.scalars[name] for name in self._layout.scalars}

    def set_state(self, values: dict[str, Tensor]) -> None:
        """Set the optimizer state; `values` are of the rows of all ranks."""
        state = self.state()
        self.store.version += 1
        for name, value in values.items():
            state[name].copy_(self.own_rows(value))

    def initial_state(self) -> dict[str, Tensor]:
        """Return the state before the first step, of the rows of all ranks."""
        initial, own = dict(self._layout.scalars), self.state()
        for name, state in self._layout.states.items():
            value = own[name].new_full((), state.initial, device="cpu")
            initial[name] = value.expand(self.num_embeddings, state.width)
        return initial

    def gather(self, values: Tensor) -> Tensor | None:
        """Return a copy of weights or a state, of all ranks; None but on rank 0.

        Those of other ranks come by way of `device` to CPU memory.
        """
        ranks, rows = self.ranks, self.num_embeddings
        if ranks.size == 1 or not values.dim():
            return values.clone()
        shape = 0 if ranks.rank else rows, *values.shape[1:]
        whole_VX = torch.empty(shape, dtype=values.dtype, device="cpu")
        counts = [len(range(rank, rows, ranks.size)) for rank in range(ranks.size)]
        for first in range(0, counts[0], GATHER_ROWS):
            part = values[first : first + GATHER_ROWS].to(self.device).contiguous()
            sent = [len(part)] + [0] * (ranks.size - 1)
            received = [len(range(count)[first:][:GATHER_ROWS]) for count in counts]
            if ranks.rank:
                received = [0] * ranks.size
            parts = ranks.all_to_all(part, sent, received).split(received)
            for rank, part in enumerate(parts):
                whole_VX[rank :: ranks.size][first : first + len(part)].copy_(part)
        return None if ranks.rank else whole_VX

    def own_rows(self, values: Tensor) -> Tensor:
        """Return this rank's part of a state of all ranks."""
        return values[self.ranks.rank :: self.ranks.size] if values.dim() else values


def drop_pages(tables: Sequence[PagedTable]) -> None:
    """Drop rows and gradients that were stepped."""
    for table in tables:
        table.page = table.parameter.grad_UD = None
        table.drop_weights()
    count_changes(tables)


def count_changes(tables: Sequence[PagedTable]) -> None:
    """Have backward passes raise that need the weights of before."""
    weights = []
    for table in tables:
        if (weight := table.weight()) is not None:
            weights.append(weight)
            if table.cached_at is not None:
                table.cached_at += 1
    torch.autograd.graph.increment_version(weights)


def _no_weight() -> None:
    """Return the weight of a table that has none."""


def _in_parts(
    rows_U: Tensor, grad_UD: Tensor, records_UR: Tensor | None = None
) -> Iterable[tuple[Tensor, Tensor, Tensor | None]]:
    """Return rows, gradients and records, STEP_ROWS at a time, at least once."""
    rows, grads = rows_U.split(STEP_ROWS), grad_UD.split(STEP_ROWS)
    if records_UR is None:
        return zip(rows, grads, itertools.repeat(None))
    return zip(rows, grads, records_UR.split(STEP_ROWS), strict=True)


@contextlib.contextmanager
def _repeatable(tables: Iterable[PagedTable]) -> Iterator[Callable[[], None]]:
    """Yield a function that sets the counts of steps back; an error calls it."""
    scalars = [its.store.table.scalars[name] for its in tables for name in its._layout.scalars]
    before = [value.clone() for value in scalars]

    def set_back() -> None:
        for value, copied in zip(scalars, before, strict=True):
            value.copy_(copied)

    try:
        yield set_back
    except BaseException:
        set_back()
        raise


def step_fused(tables: list[PagedTable], optimizer: RowOptimizer, lr: float) -> None:
    """Step rows by fused kernels: one launch for the tables of a look-up."""
    by_look_up: dict[LookUp | PagedTable, list[tuple[PagedTable, RowPage, Tensor]]] = {}
    for table in tables:
        if (waiting := table.waiting()) is not None:
            page, grad_UD = waiting
            key: LookUp | PagedTable = table
            if page.found and page.found.group is table.store.group:
                key = page.found
            by_look_up.setdefault(key, []).append((table, page, grad_UD))
    for key, its_tables in by_look_up.items():
        first, _, _ = its_tables[0]
        group = first.store.group
        with group.lock, _repeatable(table for table, _, _ in its_tables):
            counts, seeds = [], []
            whole: LookUp | None = None  # whose gradients are all that there are
            if isinstance(key, LookUp) and len(its_tables) == len(key.spans):
                whole = key
            for table, page, grad_UD in its_tables:
                records = table.store.table
                records.begin_step()
                counts.append(optimizer.count_step(records))
                seeds.append(records.next_rounding_seed())
                # Gradients are scaled and clipped in place: they are the same tensors.
                if whole and whole.sums.get(page.index) is not grad_UD:
                    whole = None
            if whole and len(set(counts)) == 1:
                sums_UD, rows_U = whole.take_sums(), whole.wait()
                found = rows_U, whole.narrow_N, whole.row_count
                group.step(optimizer, counts[0], seeds[0], sums_UD[: len(rows_U)], lr, *found)
                group.zeros_UD = sums_UD  # the step has made the sums 0
            else:
                parts = zip(its_tables, counts, seeds, strict=True)
                for (_, page, grad_UD), counted, seed in parts:
                    for rows_u, grad_uD, _ in _in_parts(page.rows(), grad_UD):
                        if len(rows_u):
                            group.step(optimizer, counted, seed, grad_uD, lr, rows_u, rows_u.int())
            for table, _, _ in its_tables:
                table.store.version += 1
            drop_pages([table for table, _, _ in its_tables])


@outside_inference
def open_together(tables: Sequence[PagedTable], optimizer: RowOptimizer) -> set[PagedTable]:
    """Open tables of one kind side by side.

    They share launches and a cache. Tables that are open already stay by themselves: to copy them
    all would take twice the memory.
    Returns those that were opened.
    """
    opened: set[PagedTable] = set()
    kinds: dict[Any, list[PagedTable]] = {}
    for table in tables:
        if table._store is None and table.path is None and table.state_storage is None:
            is_cached = table.cache_size.gpu_bytes_of(1 << 60) != 0
            kind = table.embedding_dim, table.dtype, table.storage, table.device, is_cached
            kinds.setdefault(kind, []).append(table)
    for its_tables in kinds.values():
        first, ranks = its_tables[0], its_tables[0].ranks
        rows_TN = [
            [len(range(rank, table.num_embeddings, ranks.size)) for rank in range(ranks.size)]
            for table in its_tables
        ]
        *begins_TN, rows_N = np.cumsum([[0] * ranks.size, *rows_TN], axis=0).tolist()
        if len(its_tables) > 1 and rows_N[0] <= MOST_ROWS:  # alike on all ranks
            shape = max(1, rows_N[ranks.rank]), first.embedding_dim
            states = first.layout_for(optimizer).states
            whole = Table("embeddings", *shape, states, {}, first.storage, first.dtype)
            group = RowGroup(whole, first.device)
            for table, begins_N in zip(its_tables, begins_TN, strict=True):
                table.open(optimizer, group, tuple(begins_N))
            opened.update(its_tables)
    return opened


@outside_inference
def share_cache(tables: Sequence[PagedTable]) -> None:
    """Give tables caches of one size, and less to those that need less."""
    sizes = [table.cache_size.gpu_bytes_of(table.store.paged_bytes) for table in tables]
    left = sum(size for size in sizes if size is not None)
    if None in sizes and tables[0].device.type == "cuda":
        left += torch.cuda.mem_get_info(tables[0].device)[0] // 2
    shared = [table for table, size in zip(tables, sizes, strict=True) if size != 0]
    for number, table in enumerate(sorted(shared, key=lambda table: table.store.paged_bytes)):
        share = min(table.store.paged_bytes, left // (len(shared) - number))
        table.store.set_cache(share)
        left -= share


def normal_rows(
    rows: int, dim: int, dtype: torch.dtype, generator: torch.Generator | None = None
) -> Iterator[tuple[int, Tensor]]:
    """Yield what nn.init.normal_ draws on a CPU, a part of the rows at a time."""
    # torch draws 16 numbers at a time; of numbers left over it draws the last 16 anew.
    starts = [*range(0, rows, DRAWN_ROWS * 16)]
    if len(starts) > 1 and (rows - starts[-1]) * dim < 16:
        starts.pop()
    for start, end in itertools.pairwise([*starts, rows]):
        drawn = torch.empty(end - start, dim, dtype=dtype, device="cpu")
        yield start, drawn.normal_(generator=generator)
