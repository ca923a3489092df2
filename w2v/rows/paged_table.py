"""Tables of paged embeddings: their rows, gradients and optimizer state.

A forward pass fetches the unique rows of its ids to the compute device, as a page. Vectors are
looked up in it, so that their gradient is as small as the page. The step writes it back.

Shapes: V rows, D dimensions, U unique rows, R elements of a record.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from w2v.config import TransferConfig
from w2v.distributed.ranks import Ranks
from w2v.rows.group import RowGroup, outside_inference, regroup
from w2v.rows.lookup import LookUp, RowPage, RowsOfIds, UniqueRows
from w2v.rows.optim import RowOptimizer
from w2v.rows.store import Rows, open_device
from w2v.rows.table import Init, RowState, SplitTable, Storage, Table, normal

MOST_ROWS = 1 << 31  # of a cache and of fused steps: they are numbered in 32 bits
GATHER_ROWS = 1 << 16  # of each rank, at a time


class Layout(NamedTuple):
    """States of each row that a table keeps for its optimizer, and scalars."""

    states: dict[str, RowState]
    scalars: dict[str, Tensor]

    def names(self) -> list[str]:
        """Return the names of states and scalars, with the width of states."""
        return [*(f"{name} x {state.width}" for name, state in self.states.items()), *self.scalars]


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
        self._layout = Layout({}, {})  # of the optimizer
        self.has_optimizer = False
        self._store: Rows | None = None
        self.checked: RowOptimizer | None = None  # whose state the table was found to have
        # What optimizers and gradient clipping see: the rows that have gradients. It is in no
        # module's parameters, as those belong to the optimizer of the dense modules.
        computes_in = torch.promote_types(self.dtype, torch.float32)
        empty = torch.empty(0, self.embedding_dim, dtype=computes_in, device=self.device)
        self.parameter = nn.Parameter(empty)
        self._view: tuple[Tensor, int] | None = None  # that was given out last, and its address
        self.page: RowPage | None = None  # rows whose gradients wait for the step
        self.sums: Tensor | None = None  # their gradients, once ranks have exchanged them
        # Pages with gradients that are to be sent to the ranks that own the rows.
        self.unsent: dict[LookUp, tuple[RowPage, Tensor]] = {}
        self.announced: RowsOfIds | None = None  # of the current batch of `PagedOptimizer.pages`

    def __getstate__(self) -> dict[str, Any]:
        """Return what copies and pickles hold: the table, without gradients."""
        if self.ranks.size > 1:
            raise ValueError("a table of several ranks is not copied or pickled; use state_dict()")
        self.check_view()
        # Once it is open, no function for initial weights is left, which may not be picklable.
        gone = dict.fromkeys(("init", "checked", "page", "sums", "announced"))
        return vars(self) | {"_store": self.opened(), "unsent": {}} | gone

    @property
    def store(self) -> Rows:
        """Return the rows of an open table."""
        assert self._store is not None, "a table is opened at its first use"
        return self._store

    def opened(self) -> Rows:
        """Return the rows; open a table that no optimizer has opened."""
        if self._store is None:
            self.open()  # a PagedOptimizer may come later
        return self.store

    def view_weight(self) -> Tensor:
        """Return a view [V, D] of this rank's weights, which may be written."""
        self.check_view()
        store = self.opened()
        store.flush()
        store.version += 1  # rows read before may be out of date when this is written
        view_VD = store.table["weight"]
        self._view = view_VD, view_VD.data_ptr()
        return view_VD

    def check_view(self) -> None:
        """Raise `ValueError` if `weight.data` was replaced: that writes nothing."""
        if self._view is not None:
            (view_VD, address), self._view = self._view, None
            if view_VD.data_ptr() != address:
                remedy = "write into the weights: table.weight.copy_(values)"
                raise ValueError(f"weight.data was replaced, and the table was not; {remedy}")

    @property
    def trains(self) -> bool:
        """Return whether a forward pass now is followed by gradients."""
        return self.trainable and torch.is_grad_enabled()

    @property
    def uses_kernels(self) -> bool:
        """Return whether kernels read vectors of ids and sum gradients."""
        return self.fused and self.max_norm is None and not self.scale_grad_by_freq

    @torch.no_grad()
    def read(self, found: UniqueRows) -> tuple[RowPage, Tensor]:
        """Read rows; return the page and its weights [U, D]."""
        store, rows_U = self.store, found.wait()
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
        return RowPage(store, found, None if self.fused else records_UR), weight_UD

    # Gradients, and the step by torch.

    def grad(self) -> Tensor | None:
        """Return the gradients that wait for the step."""
        return self.parameter.grad if self.sums is None else self.sums

    def waiting(self) -> tuple[RowPage, Tensor] | None:
        """Return the rows that wait for the step, and their gradients."""
        grad_UD = self.grad()
        if self.page is None or grad_UD is None:
            return None
        return self.page, grad_UD

    def add_grad(self, page: RowPage, grad_UD: Tensor, is_exchanged: bool = False) -> None:
        """Add the gradient of a page to those that wait for the step."""
        if grad_UD is self.grad():  # it was added up in place
            return
        if (waiting := self.waiting()) is not None:
            # A row of several pages has one gradient, their sum, as it is stepped once.
            with torch.no_grad():
                parts = waiting, (page, grad_UD)
                rows_U = torch.unique(torch.cat([page.rows() for page, _ in parts]))
                grad_UD = grad_UD.new_zeros(len(rows_U), self.embedding_dim)
                for page, grad_uD in parts:
                    grad_UD.index_add_(0, torch.searchsorted(rows_U, page.rows()), grad_uD)
                records_UR = None if self.fused else self.store.group.read(rows_U)
                page = RowPage(self.store, rows_U, records_UR)
        self.page = page
        if is_exchanged:  # inside a step, unseen by users
            self.sums = grad_UD
            return
        self.parameter.grad = None  # its shape may change only without a gradient
        if page.records is None:
            self.parameter.data = _zero(grad_UD.device).expand(grad_UD.shape)
        else:
            self.parameter.data = page.records[:, : self.embedding_dim]
        self.parameter.grad = grad_UD

    def step(self, optimizer: RowOptimizer, lr: float) -> None:
        """Step the rows that have gradients by torch, and write them back."""
        store = self.opened()
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
            if records_UR is None or page.version != store.version:  # the table has changed since
                records_UR = store.group.read(rows_U)
            page.records = None  # a step that fails half-way is repeated on the rows of the table
            store.table.begin_step()
            optimizer.step_rows(store.table, records_UR, grad_UD, None, lr)
            store.group.write(store, rows_U, records_UR)
            self.drop_page()

    def drop_page(self) -> None:
        """Drop rows and gradients that were stepped."""
        self.page = self.sums = self.parameter.grad = None

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients, or set them to zero."""
        self.sums = None
        self.unsent.clear()
        if set_to_none:
            self.parameter.grad = None
        elif self.parameter.grad is not None:
            self.parameter.grad.zero_()

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
        self.has_optimizer = optimizer is not None
        if optimizer:
            layout = self.layout_for(optimizer)
        first_rows = first_rows or (0,) * self.ranks.size
        if group:
            rows = self.ranks.shard_rows(self.num_embeddings)
            memory_VR = group.table.records_VR[first_rows[rank] :][:rows]
        table = self._new_table(self.num_embeddings, layout, memory_VR)
        store = Rows(table, group or RowGroup(table, self.device), 0, first_rows, rank)
        if self.is_reset or not table.continued:
            self._draw(store)
        self._store, self._layout, self.init = store, layout, None
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
            first = "make its PagedOptimizer before the first use"
            raise ValueError(f"path={self.path}: the file is open without this state; {first}")
        elif self.path is None and (had or has):
            with self._store.lock:
                new = self._copy_table(self.num_embeddings, layout, ["weight"])
                regroup(self._store, new, self.device)
        self._layout, self.has_optimizer = layout, True

    def layout_for(self, optimizer: RowOptimizer) -> Layout:
        """Return what the table keeps for an optimizer."""
        return Layout(optimizer.states(self.embedding_dim), optimizer.scalars)

    def check(self, optimizer: RowOptimizer) -> None:
        """Raise `ValueError` unless the table has the state of the optimizer."""
        if self.checked is optimizer:
            return
        if self.fused:
            self.check_fused(optimizer)
        wanted, found = self.layout_for(optimizer).names(), self._layout.names()
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
        if self.num_embeddings >= MOST_ROWS:
            rows = f"{self.num_embeddings:,} rows, which are numbered in 32 bits"
            raise ValueError(f"fused=True cannot step {rows}; leave it out")

    @outside_inference
    def grow(self, num_embeddings: int, init: Init | None) -> None:
        """Append rows."""
        old = self.opened().table
        with self.store.lock:
            new = self._copy_table(num_embeddings, self._layout, list(old.columns))
            for name, value in old.scalars.items():
                new.scalars[name].copy_(value)
            self._initialise(new, init, first_row=old.rows)
            regroup(self.store, new, self.device)
            self.num_embeddings = num_embeddings

    @outside_inference
    def move(self, empty: Tensor) -> None:
        """Bring rows to the device of an empty tensor from now on."""
        if self.grad() is not None or self.unsent:
            raise ValueError("rows wait for a step; call step() or zero_grad(), then move")
        self.device = open_device(empty.device, self.storage)
        self.checked = None
        self.parameter.data = empty
        if self._store is not None:
            self._store.flush()
            regroup(self._store, self._store.table, self.device)

    def _initialise(self, table: Table, init: Init | None, first_row: int = 0) -> None:
        whole = init or normal(self.embedding_dim, 1.0, self.seed)
        # A user's function may not run on a GPU.
        is_ours = getattr(whole, "__module__", None) == normal.__module__
        device = self.device if is_ours else None
        of_ranks = self.ranks.global_rows
        table.initialise(lambda rows_n: whole(of_ranks(rows_n)), device, first_row=first_row)

    def _copy_table(self, rows: int, layout: Layout, fields: Iterable[str]) -> Table:
        """Return a table with these fields of the present rows."""
        self.check_view()
        self.store.flush()
        old = self.store.table
        new = self._new_table(rows, layout)
        for name in fields:
            new[name][: old.rows].copy_(old[name])
        return new

    def _new_table(self, rows: int, layout: Layout, memory_VR: Tensor | None = None) -> Table:
        rows = self.ranks.shard_rows(rows)
        shape = max(1, rows), self.embedding_dim
        shared = ("embedding", *shape, *layout, self.storage, self.dtype)
        if self.state_storage and (layout.states or self.has_optimizer):
            table: Table = SplitTable(*shared, self.state_storage)
        else:
            table = Table(*shared, self.path, memory_VR=memory_VR)
        if rows == 0:  # there are more ranks than rows
            for part in table.parts:
                part.rows, part.records_VR = 0, part.records_VR[:0]
        return table

    def state(self) -> dict[str, Tensor]:
        """Return views of the optimizer state, by their names in torch."""
        store = self.opened()
        store.flush()
        own = {name: store.table[name] for name in self._layout.states}
        return own | {name: store.table.scalars[name] for name in self._layout.scalars}

    def initial_state(self) -> dict[str, Tensor]:
        """Return the state before the first step, of the rows of all ranks."""
        initial = {
            name: torch.tensor(state.initial, device="cpu").expand(self.num_embeddings, state.width)
            for name, state in self._layout.states.items()
        }
        return initial | self._layout.scalars

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


def step_fused(tables: list[PagedTable], optimizer: RowOptimizer, lr: float) -> None:
    """Step rows by fused kernels: one launch for the tables of a look-up."""
    by_look_up: dict[LookUp | PagedTable, list[tuple[PagedTable, RowPage, Tensor]]] = {}
    for table in tables:
        if (waiting := table.waiting()) is not None:
            page, grad_UD = waiting
            key: LookUp | PagedTable = table
            if page.owned and page.owned.look_up.group is table.store.group:
                key = page.owned.look_up
            by_look_up.setdefault(key, []).append((table, page, grad_UD))
    for key, its_tables in by_look_up.items():
        stores = [table.store for table, _, _ in its_tables]
        group = stores[0].group
        with group.lock:
            for store in stores:
                store.table.begin_step()
            counts = [optimizer.count_step(store.table) for store in stores]
            seeds = [store.table.next_rounding_seed() for store in stores]
            grads = {page.owned.index: grad for _, page, grad in its_tables if page.owned}
            # Gradients are scaled and clipped in place: they are the same tensors.
            has_all = isinstance(key, LookUp) and all(
                grads.get(index) is key.sums.get(index, key) for index in range(len(key.spans))
            )
            if isinstance(key, LookUp) and has_all and len(set(counts)) == 1:
                sums_UD, memory_UD = key.take_sums()
                rows = key.wait(), key.narrow_N, key.known
                group.step(optimizer, counts[0], seeds[0], sums_UD, lr, *rows)
                group.zeros_UD = memory_UD  # the step has made the sums 0
            else:
                parts = zip(its_tables, counts, seeds, strict=True)
                for (_, page, grad_UD), counted, seed in parts:
                    group.step(optimizer, counted, seed, grad_UD, lr, page.rows())
            for table, _, _ in its_tables:
                table.store.version += 1
                table.drop_page()


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


@functools.cache
def _zero(device: torch.device) -> Tensor:
    return torch.zeros((), device=device)
