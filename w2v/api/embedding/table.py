"""Tables of paged embeddings: their rows, gradients and optimizer state.

A forward pass fetches the unique rows of its ids to the compute device, as a page. Vectors are
looked up in it, so that their gradient is as small as the page. The step writes it back.

Shapes: V rows, D dimensions, U unique rows, R elements of a record.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from w2v.api.embedding import sharded
from w2v.api.embedding.ids import Ids
from w2v.api.embedding.look_up import RowPage, RowsOfIds, UniqueRows, look_up, outside_inference
from w2v.api.embedding.row_store import RowGroup, Rows, open_device, replace_table
from w2v.config import TransferConfig
from w2v.distributed.ranks import Ranks
from w2v.model.optim import RowOptimizer
from w2v.model.table import Init, RowState, SplitTable, Storage, Table, normal

MOST_ROWS = 1 << 31  # of a cache and of fused steps: they are numbered in 32 bits


class Layout(NamedTuple):
    """What a table keeps for its optimizer: states of each row, and scalars."""

    states: dict[str, RowState]
    scalars: dict[str, Tensor]


@dataclass(eq=False, repr=False)
class PagedTable:
    """Rows of a `PagedEmbedding`, whose arguments have the same names."""

    num_embeddings: int
    embedding_dim: int
    padding_idx: int | None
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
    seed: int
    init: Init | None  # until the table is open
    has_zero_padding: bool  # at first
    mode: str | None = None  # of bags
    include_last_offset: bool = False  # of bags
    trainable: bool = True
    fused: bool = False
    is_reset: bool = False  # also where a file would be continued

    def __post_init__(self) -> None:
        self._layout: Layout | None = None
        self._store: Rows | None = None
        self.checked: RowOptimizer | None = None  # whose state the table was found to have
        # What optimizers and gradient clipping see: the rows that have gradients. It is in no
        # module's parameters, as those belong to the optimizer of the dense modules.
        computes_in = torch.float64 if self.dtype == torch.float64 else torch.float32
        empty = torch.empty(0, self.embedding_dim, dtype=computes_in, device=self.device)
        self.parameter = nn.Parameter(empty)
        self._view: tuple[Tensor, int] | None = None  # that was given out last, and its address
        self.page: RowPage | None = None  # rows whose gradients wait for the step
        self.sums: Tensor | None = None  # their gradients, once ranks have exchanged them
        # Pages with gradients that are to be sent to the ranks that own the rows.
        self.unsent: dict[sharded.RoutedLookUp, tuple[RowPage, Tensor]] = {}
        self.announced: RowsOfIds | None = None  # of the current batch of `PagedOptimizer.pages`
        # All tables of that look-up and their rows, if kernels compute all vectors in one launch.
        self.together: list[tuple[PagedTable, RowsOfIds]] = []

    def __getstate__(self) -> dict[str, Any]:
        """Return what copies and pickles hold: the table, without gradients."""
        if self.ranks.size > 1:
            raise ValueError("a table of several ranks is not copied or pickled; use state_dict()")
        self._check_view()
        # Once it is open, no function for initial weights is left, which may not be picklable.
        gone = dict.fromkeys(("init", "checked", "page", "sums", "announced"))
        return dict(vars(self), _store=self.store, unsent={}, together=[], **gone)

    @property
    def store(self) -> Rows:
        """The rows; a table without an optimizer is opened at its first use."""
        if self._store is None:
            self.open(None)  # a PagedOptimizer may come later
        return self._store

    @property
    def weight(self) -> Tensor:
        """View [V, D] of this rank's weights, which may be written."""
        self._check_view()
        self.store.flush()
        self.store.version += 1  # rows read before may be out of date when this is written
        view_VD = self.store.table["weight"]
        self._view = view_VD, view_VD.data_ptr()
        return view_VD

    def _check_view(self) -> None:
        """Raise `ValueError` if `weight.data` was replaced: that writes nothing."""
        if self._view is not None:
            (view_VD, address), self._view = self._view, None
            if view_VD.data_ptr() != address:
                remedy = "write into the weights: table.weight.copy_(values)"
                raise ValueError(f"weight.data was replaced, and the table was not; {remedy}")

    # Forward pass: look up ids, fetch their rows.

    @property
    def trains(self) -> bool:
        """Whether a forward pass now is followed by gradients."""
        return self.trainable and torch.is_grad_enabled()

    @property
    def uses_kernels(self) -> bool:
        """Whether kernels read the vectors of ids and sum their gradients."""
        return self.fused and self.max_norm is None and not self.scale_grad_by_freq

    def find(self, ids: Ids) -> RowsOfIds:
        """Look up ids, and begin to bring their rows."""
        self._check_view()
        if self.trains and self.ranks.size == 1:
            _refuse_ranks()
        found = self.announced  # whose rows are there, unless other uses have evicted them
        if found is None or not found.is_of(ids):
            if self.ranks.size > 1:
                found = sharded.look_up_alone(self, ids)
            else:
                found = look_up(self.store, ids, self.padding_idx)
            # Beside rows of other tables of the group, as only this one has been looked up.
            self.store.group.prefetch([found.owned.look_up], part=self.store.first_row)
        return found

    def fetch(self, ids: Ids) -> tuple[Tensor, Tensor, int | None]:
        """Fetch the rows of ids.

        Returns:
            Their weights [U, D], which send their gradient to the page; the place of each id in
            them; and the place of the padding row, None where no id is padding.
        """
        with self.store.lock:
            found = self.find(ids)
            if self.ranks.size > 1:
                page = found.look_up.page_of(found)
                weight_UD, places_N, padding = found.look_up.part(found.index)
            else:
                page, weight_UD = self.read(found)
                places_N, padding = found.places_N, found.padding
        if self.trains:
            weight_UD = nn.Parameter(weight_UD)
            # The graph keeps the page; without a backward pass it goes, and nothing has changed.
            weight_UD.register_post_accumulate_grad_hook(functools.partial(self._collect, page))
        return weight_UD, places_N.view(found.shape), padding

    @torch.no_grad()
    def read(self, found: UniqueRows) -> tuple[RowPage, Tensor]:
        """Read rows; return the page and its weights [U, D]."""
        store, rows_U = self.store, found.rows
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
            store.group.write(store, rows_U, records_UR)
        return RowPage(store, found, rows_U, None if self.fused else records_UR), weight_UD

    # Gradients, and the step by torch.

    def _collect(self, page: RowPage, weight_UD: Tensor) -> None:
        """Take the gradient from the weights of a page."""
        grad_UD = weight_UD.grad.detach()
        weight_UD.grad = None
        with self.store.lock:
            if page.is_borrowed:
                requested, pending = page.requested, self.pending_of(page)
                grad_UD = requested.look_up.add_rows(requested.index, grad_UD, pending)
            self.add_grad(page, grad_UD)

    def pending_of(self, page: RowPage) -> Tensor | None:
        """Return gradients that wait for the step, or to be sent."""
        if not page.is_borrowed:
            return self.parameter.grad
        _, grad_UD = self.unsent.get(page.requested.look_up, (None, None))
        return grad_UD

    @property
    def grad(self) -> Tensor | None:
        """The gradients that wait for the step."""
        return self.parameter.grad if self.sums is None else self.sums

    def add_grad(self, page: RowPage, grad_UD: Tensor, is_owned: bool = False) -> None:
        """Add the gradient of a page to those that wait for the step.

        Of several ranks, those of rows of other ranks wait to be sent.
        """
        if torch.is_grad_enabled():
            remedy = "leave it out, or take torch.autograd.grad of the other parameters"
            raise RuntimeError(f"create_graph=True: gradients of rows have no gradient; {remedy}")
        if self._layout is None:
            unused = "gradients of a PagedEmbedding have no effect until a PagedOptimizer steps it"
            warnings.warn(unused, stacklevel=2)
        if page.is_borrowed and not is_owned:
            self.unsent[page.requested.look_up] = page, grad_UD
            return
        if grad_UD is self.grad:  # it was added up in place
            return
        if self.grad is not None:
            # A row of several pages has one gradient, their sum, as it is stepped once.
            with torch.no_grad():
                page, grad_UD = self._merged(page, grad_UD)
        self.page = page
        if is_owned:  # inside a step: nobody sees it
            self.sums = grad_UD
            return
        self.parameter.grad = None  # its shape may change only without a gradient
        if page.records is None:
            self.parameter.data = _zero(grad_UD.device).expand(grad_UD.shape)
        else:
            self.parameter.data = page.records[:, : self.embedding_dim]
        self.parameter.grad = grad_UD

    def _merged(self, page: RowPage, grad_UD: Tensor) -> tuple[RowPage, Tensor]:
        """Return the rows and gradients of this page and the pending one."""
        rows = [each.rows_of(self.store) for each in (self.page, page)]
        rows_U = torch.unique(torch.cat(rows))
        sum_UD = grad_UD.new_zeros(len(rows_U), self.embedding_dim)
        for rows_u, grad_uD in zip(rows, (self.grad, grad_UD), strict=True):
            sum_UD.index_add_(0, torch.searchsorted(rows_U, rows_u), grad_uD)
        records_UR = None if self.fused else self.store.group.read(rows_U)
        return RowPage(self.store, None, rows_U, records_UR), sum_UD

    def step(self, optimizer: RowOptimizer, lr: float) -> None:
        """Step the rows that have gradients by torch, and write them back."""
        with self.store.lock:
            if (grad_UD := self.grad) is None:
                return
            page, store = self.page, self.store
            rows_U = page.rows_of(store)
            for name in optimizer.first_rates(store.table):  # as torch: also of other rows
                store.flush()
                store.table[name].fill_(lr)
                store.version += 1
            if page.version != store.version:  # the table has changed since
                page.records = store.group.read(rows_U)
            store.table.begin_step()
            page.version = -1  # a step that fails half-way is repeated on the rows of the table
            optimizer.step_rows(store.table, page.records, grad_UD, None, lr)
            store.group.write(store, rows_U, page.records)
            self.drop_page()

    def drop_page(self) -> None:
        """Drop rows and gradients that were stepped."""
        self.page = self.sums = self.parameter.grad = None

    def zero_grad(self) -> None:
        """Drop the gradients."""
        self.parameter.grad = self.sums = None
        self.unsent.clear()

    # Memory, first weights and optimizer state.

    @outside_inference  # the table is trained later
    def open(
        self,
        layout: Layout | None,
        group: RowGroup | None = None,
        first_rows: tuple[int, ...] | None = None,
    ) -> None:
        """Make the table, or open its file, and set the first weights.

        In a group, the table is a part of the group's, from its rank's `first_rows` on.
        """
        memory_VR, rank = None, self.ranks.rank
        first_rows = first_rows or (0,) * self.ranks.size
        if group:
            rows = self.ranks.shard_rows(self.num_embeddings)
            memory_VR = group.table.records_VR[first_rows[rank] :][:rows]
        table = self._new_table(self.num_embeddings, layout, memory_VR)
        store = Rows(table, self.device, group=group, first_rows=first_rows, rank=rank)
        if self.is_reset or not table.continued:
            self._draw(store)
        self._store, self._layout, self.init = store, layout, None
        store.is_shard = self.ranks.size > 1
        share_cache([self])

    @outside_inference
    def reset(self, seed: int) -> None:
        """Draw the weights anew, or when the table is opened."""
        self.seed = seed
        self.init = None
        self.has_zero_padding = self.padding_idx is not None
        self.is_reset = True
        if self._store is not None:
            with self._store.lock:
                self._store.flush()  # a cache would write its rows back later
                self._store.version += 1
                self._draw(self._store)

    def _draw(self, store: Rows) -> None:
        """Set the first weights."""
        self._initialise(store.table, self.init)
        if self.has_zero_padding and self.padding_idx % self.ranks.size == self.ranks.rank:
            store.table["weight"][self.padding_idx // self.ranks.size] = 0
        store.flush()

    @outside_inference
    def attach(self, optimizer: RowOptimizer) -> None:
        """Give each row the state of an optimizer; an earlier one's is lost."""
        layout = Layout(optimizer.states(self.embedding_dim), optimizer.scalars)
        had, has = _names(self._layout), _names(layout)
        if self._store is None:
            self.open(layout)
        elif self.path is not None and had != has:
            first = "make its PagedOptimizer before the first use"
            raise ValueError(f"path={self.path}: the file is open without this state; {first}")
        elif self.path is None and (had or has):
            with self._store.lock:
                new = self._copy_table(self.num_embeddings, layout, ["weight"])
                replace_table(self._store, new)
        self._layout = layout

    def check(self, optimizer: RowOptimizer) -> None:
        """Raise `ValueError` unless the table has the state of the optimizer."""
        if self.checked is optimizer:
            return
        if self.fused:
            self.check_fused(optimizer)
        needed = Layout(optimizer.states(self.embedding_dim), optimizer.scalars)
        if (wanted := _names(needed)) != (found := _names(self._layout)):
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
        if self.num_embeddings >= MOST_ROWS:
            rows = f"{self.num_embeddings:,} rows, which are numbered in 32 bits"
            raise ValueError(f"fused=True cannot step {rows}; leave it out")

    @outside_inference
    def grow(self, num_embeddings: int, init: Init | None) -> None:
        """Append rows."""
        old = self.store.table
        with self.store.lock:
            new = self._copy_table(num_embeddings, self._layout, list(old.columns))
            for name, value in old.scalars.items():
                new.scalars[name].copy_(value)
            self._initialise(new, init, first_row=old.rows)
            replace_table(self.store, new)
            self.num_embeddings = num_embeddings

    @outside_inference
    def move(self, empty: Tensor) -> None:
        """Bring rows to the device of an empty tensor from now on."""
        if self.grad is not None or self.unsent:
            raise ValueError("rows wait for a step; call step() or zero_grad(), then move")
        self.device = open_device(empty.device, self.storage)
        self.checked = None
        self.parameter.data = empty
        if self._store is not None:
            self._store.flush()
            self._store.device = self.device
            replace_table(self._store, self._store.table)

    def _initialise(self, table: Table, init: Init | None, first_row: int = 0) -> None:
        whole = init or normal(self.embedding_dim, 1.0, self.seed)
        # A user's function may not run on a GPU.
        is_ours = getattr(whole, "__module__", None) == normal.__module__
        device = self.device if is_ours else None
        of_ranks = self.ranks.global_rows
        table.initialise(lambda rows_n: whole(of_ranks(rows_n)), device, first_row=first_row)

    def _copy_table(self, rows: int, layout: Layout | None, fields: Iterable[str]) -> Table:
        """Return a table with these fields of the present rows."""
        self._check_view()
        self._store.flush()
        old = self._store.table
        new = self._new_table(rows, layout)
        for name in fields:
            new[name][: old.rows].copy_(old[name])
        return new

    def _new_table(
        self, rows: int, layout: Layout | None, memory_VR: Tensor | None = None
    ) -> Table:
        states, scalars = layout or Layout({}, {})
        rows = self.ranks.shard_rows(rows)
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

    def state(self) -> dict[str, Tensor]:
        """Return views of the optimizer state, by their names in torch."""
        table = self.store.table
        self.store.flush()
        states = {name: table[name] for name in table.columns if name != "weight"}
        return states | {name: table.scalars[name] for name in self._layout.scalars}

    def initial_state(self) -> dict[str, Tensor]:
        """Return the state before the first step, of the rows of all ranks."""
        states, scalars = self._layout
        rows = self.num_embeddings
        initial = {
            name: torch.tensor(state.initial, device="cpu").expand(rows, state.width)
            for name, state in states.items()
        }
        return initial | scalars

    def gather(self, values: Tensor) -> Tensor | None:
        """Return a copy of weights or a state, of all ranks; None but on rank 0."""
        if self.ranks.size == 1 or not values.dim():
            return values.clone()
        return sharded.gather(self.ranks, values, self.num_embeddings, self.device)

    def own_rows(self, values: Tensor) -> Tensor:
        """Return this rank's part of a state of all ranks."""
        return values[self.ranks.rank :: self.ranks.size] if values.dim() else values


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
        if len(its_tables) > 1 and rows_N[0] < MOST_ROWS:  # alike on all ranks
            layout = Layout(optimizer.states(first.embedding_dim), optimizer.scalars)
            shape = max(1, rows_N[ranks.rank]), first.embedding_dim
            whole = Table("embeddings", *shape, layout.states, {}, first.storage, first.dtype)
            group = RowGroup(whole, first.device)
            for table, begins_N in zip(its_tables, begins_TN, strict=True):
                table.open(layout, group, tuple(begins_N))
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


@functools.cache
def _zero(device: torch.device) -> Tensor:
    return torch.zeros((), device=device)


def _names(layout: Layout | None) -> list[str]:
    """Return the names of states and scalars, with the width of states."""
    states, scalars = layout or Layout({}, {})
    return [*(f"{name} x {state.width}" for name, state in states.items()), *scalars]


def _refuse_ranks() -> None:
    """Raise `RuntimeError` in one of several processes that train together."""
    distributed = torch.distributed
    is_started = distributed.is_available() and distributed.is_initialized()
    if is_started and (ranks := distributed.get_world_size()) > 1:
        raise RuntimeError(
            f"this PagedEmbedding cannot train in {ranks} processes: each would have a table of "
            "its own; make it with process_group=torch.distributed.group.WORLD"
        )
