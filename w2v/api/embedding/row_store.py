"""Rows of numbers in memory or in a file, read and written by row id.

Invalid input raises an error of one line, and nothing is written.

Shapes: V rows, D dimensions, U unique rows, R elements of a record.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from w2v.api.embedding.ids import Ids, as_tensor, to_device
from w2v.api.embedding.look_up import LookUp, RowsOfIds, UniqueRows, look_up, outside_inference
from w2v.kernels import cuda
from w2v.kernels.cuda import Bags
from w2v.model import table_file
from w2v.model.optim import RowOptimizer
from w2v.model.row_file import NPY_TYPES, copy_rows, lock, open_npy, save_npy
from w2v.model.table import Init, RowState, SplitTable, Storage, Table
from w2v.transfer.cache import CachedLink
from w2v.transfer.engine import TransferStats
from w2v.transfer.links import Link, MappedLink, link_between


class RowGroup:
    """Tables side by side in one memory, whose rows move together.

    Rows are numbered from the first table's to the last one's.

    Attributes:
        lock: Buffers and records serve one thread at a time.
        members: The tables.
        parts: The tables that have the records, weights first, and their links.
        caches: Links that are caches.
        layout: Replaced when rows are renumbered or caches made anew: look-ups with another one are
            out of date.
        bags_differ: Whether tables have been found to differ in the offsets of their bags.
        weights: What `get` and `put` move: the weights, rounded up to the link's unit.
        link: Moves them.
        is_mapped: Whether the GPU reads and writes them in place, in units of 16 bytes.
        is_exact: Whether `weights` has no part of the optimizer state.
    """

    parts: list[tuple[Table, Link]]
    caches: list[CachedLink]
    layout: object
    bags_differ = False

    def __init__(self, table: Table, device: torch.device, lock: threading.RLock | None = None):
        self.table, self.device = table, device
        self.lock = lock or threading.RLock()
        self.members: list[Rows] = []
        self._zeros_UD: Tensor | None = None
        self.link = link_between(table, device)
        self.is_mapped = isinstance(self.link, MappedLink)
        unit = 16 // table.dtype.itemsize if self.is_mapped else 1
        width = -(-table.dim // unit) * unit
        self.weights = SimpleNamespace(records_VR=table.records_VR[:, :width])
        has_states = len(table.columns) > 1 and not isinstance(table, SplitTable)
        self.is_exact = width == table.dim or not has_states

    @property
    def paged_bytes(self) -> int:
        """Size of what a cache may hold: all but what is in the memory of the GPU."""
        return sum(part.records_VR.nbytes for part in self.table.parts if part.storage != "cuda")

    def make_caches(self) -> None:
        """Make empty caches, of the size of all members' `cache_bytes` together."""
        rows = self.table.rows
        cache_bytes = sum(member.cache_bytes for member in self.members)
        # The records of a split table are those of both its tables, joined.
        slots = min(rows, cache_bytes * rows // max(1, self.paged_bytes))
        self.layout = object()
        self.parts = [(part, self._link_to(part, slots)) for part in self.table.parts]
        self.caches = [link for _, link in self.parts if isinstance(link, CachedLink)]

    def _link_to(self, part: Table, slots: int) -> Link:
        """Return the link of a table, with a cache of so many rows."""
        link = link_between(part, self.device)
        if not slots or part.storage == "cuda":
            return link
        return CachedLink(link, part, slots, self.device)

    def empty_caches(self) -> None:
        """Write all rows back."""
        for cache in self.caches:
            cache.flush()

    @outside_inference
    def prefetch(
        self, look_ups: Sequence[LookUp], soon: Sequence[LookUp] = (), part: int | None = None
    ) -> None:
        """Begin to bring the rows of a page, as `CachedLink.prefetch`."""
        with self.lock:
            lists = [look_up.rows for look_up in look_ups if look_up.layout is self.layout]
            later = [(its.rows_N, its.known) for its in soon if its.layout is self.layout]
            for cache in self.caches:
                cache.prefetch(lists, later, part)

    @outside_inference
    def make_current(self, look_up: LookUp) -> None:
        """Make rows those of the current page."""
        with self.lock:
            rows_U = look_up.rows
            for cache in self.caches if look_up.layout is self.layout else ():
                cache.make_current(rows_U)

    def in_place(self, rows_U: Tensor, narrow_U: Tensor | None) -> tuple[Tensor, Tensor] | None:
        """Return records on the compute device and the slots of rows.

        None if rows are moved to the device and back.
        """
        (part, link), *others = self.parts
        if isinstance(link, CachedLink) and not others:
            return link.locate(rows_U)
        if type(link) is Link and not others:
            return part.records_VR, rows_U.int() if narrow_U is None else narrow_U
        return None

    @outside_inference
    def read_weights(
        self,
        rows_U: Tensor,
        narrow_U: Tensor | None,
        places_N: Tensor,
        bags: Bags | None = None,
        padding: int | None = None,
    ) -> Tensor:
        """Return weights of the unique rows at these places, or of bags of them.

        They are float32 [N, D], on the GPU.
        """
        slots_U: Tensor | None
        if (located := self.in_place(rows_U, narrow_U)) is not None:
            records_SR, slots_U = located
        else:
            columns_VW, slots_U = self.weights.records_VR, None
            shape = rows_U.shape[0], columns_VW.shape[1]
            records_SR = torch.empty(shape, dtype=columns_VW.dtype, device=self.device)
            self.link.read(self.weights, rows_U, records_SR)
        return cuda.gather_bags(records_SR, slots_U, places_N, self.table.dim, bags, padding)

    def zeros(self, rows: int) -> Tensor:
        """Return zeros, at least [rows, D]: those that are kept, if enough."""
        kept_UD, self._zeros_UD = self._zeros_UD, None
        if kept_UD is None or kept_UD.shape[0] < rows:
            kept_UD = torch.zeros(rows + rows // 8, self.table.dim, device=self.device)
        return kept_UD

    def keep_zeros(self, zeros_UD: Tensor) -> None:
        """Keep what `zeros` has returned, which is 0 again."""
        self._zeros_UD = zeros_UD

    @outside_inference
    def step(
        self,
        optimizer: RowOptimizer,
        counted: tuple[float, int],  # by `optimizer.count_step`
        seed: int,  # of the rounding to bfloat16
        grad_UD: Tensor,
        lr: float,
        rows_U: Tensor,
        narrow_U: Tensor | None = None,  # the rows in 32 bits, if they are at hand
        count: Tensor | None = None,  # their number, if the GPU knows it
    ) -> None:
        """Step unique rows by the fused kernel, in place if they are on the GPU."""
        grad_UD = grad_UD.contiguous()
        if (located := self.in_place(rows_U, narrow_U)) is not None:
            cuda.step_rows(optimizer, counted, seed, *located, count, grad_UD, lr)
            return
        ((part, link),) = self.parts
        shape = len(rows_U), part.width
        stored_UR = torch.empty(shape, dtype=part.dtype, device=self.device)
        link.read(part, rows_U, stored_UR)
        cuda.step_rows(optimizer, counted, seed, stored_UR, None, count, grad_UD, lr)
        link.write(part, rows_U, stored_UR)

    @outside_inference
    def read(self, rows_U: Tensor) -> Tensor:
        """Return the decoded records [U, R] of unique rows, on the compute device."""
        parts = []
        for part, link in self.parts:
            shape = len(rows_U), part.width
            stored_UR = torch.empty(shape, dtype=part.records_VR.dtype, device=self.device)
            link.read(part, rows_U, stored_UR)
            parts.append(part.decode(stored_UR))
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

    @outside_inference
    def write(self, member: Rows, rows_U: Tensor, records_UR: Tensor) -> None:
        """Write decoded records [U, R] of a member's unique rows."""
        member.version += 1
        own_U = rows_U - member.first_row if member.first_row else rows_U
        start = 0
        for (part, link), own in zip(self.parts, member.table.parts, strict=True):
            # Contiguous, as the kernels that copy records to pinned memory need them.
            part_UR = records_UR[:, start : start + part.width].contiguous()
            link.write(part, rows_U, own.encode(own_U, part_UR))
            start += part.width


class Rows:
    """Access to the rows of a table, of row stores and paged embeddings.

    Attributes:
        table: The records; its fields are "weight" and the states of the optimizer.
        group: Tables whose records lie beside, and share a cache.
        first_rows: In the groups of all ranks, the table's rows are numbered from here on.
        first_row: The same in this process.
        device: Where rows come to.
        lock: Buffers and records serve one thread at a time.
        version: Number of changes of the table so far: rows read before one may be out of date.
        cache_bytes: Memory of the device for rows that stay there. A `flush` empties it.
        is_shard: Whether other processes have the other rows of the table.
    """

    group: RowGroup
    is_shard = False

    def __init__(
        self,
        table: Table,
        device: torch.device,
        cache_bytes: int = 0,
        group: RowGroup | None = None,
        first_rows: tuple[int, ...] = (0,),
        rank: int = 0,
    ):
        self.device = device
        self._rank = rank
        self.lock = group.lock if group else threading.RLock()
        self.version = 0
        self.cache_bytes = cache_bytes
        self._unchecked: deque[UniqueRows] = deque()
        self._join(table, group or RowGroup(table, device, self.lock), first_rows)

    def _join(self, table: Table, group: RowGroup, first_rows: tuple[int, ...]) -> None:
        self.table, self.group = table, group
        self.first_rows, self.first_row = first_rows, first_rows[self._rank]
        group.members.append(self)
        group.make_caches()
        self.version += 1

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy or a pickle holds: pinned memory can be in neither."""
        table = self.table
        if table.storage == "mmap":
            remedy = "copy the file, or give storage='cpu'"
            raise ValueError(f"storage='mmap': rows in a file are not copied or pickled; {remedy}")
        with self.lock:
            self.flush()
            fields = {name: table[name].clone() for name in table.columns}
            scalars = {name: value.clone() for name, value in table.scalars.items()}
        # The initial values of states do not matter, as all are copied.
        states = {name: RowState(value.shape[1], 0.0) for name, value in fields.items()}
        del states["weight"]
        shape = table.rows, table.dim
        layout = (table.name, *shape, states, scalars, table.storage, table.dtype)
        split = [table.states.storage] if isinstance(table, SplitTable) else []
        made_by = type(table), (*layout, *split)
        opened = self.device, self.cache_bytes
        return {"table": made_by, "fields": fields, "scalars": scalars, "opened": opened}

    @outside_inference  # the copy is trained later
    def __setstate__(self, state: dict[str, Any]) -> None:
        kind, layout = state["table"]
        table = kind(*layout)
        for name, values in state["fields"].items():
            table[name].copy_(values)
        for name, value in state["scalars"].items():
            table.scalars[name].copy_(value)
        device, cache_bytes = state["opened"]
        Rows.__init__(self, table, open_device(device, table.storage), cache_bytes)

    def __len__(self) -> int:
        return self.table.rows

    def __repr__(self) -> str:
        sizes = f"{len(self)}, {self.table.dim}"
        places = f"storage={self.table.storage!r}, device={str(self.device)!r}"
        return f"{type(self).__name__}({sizes}, {places})"

    @property
    def bytes(self) -> int:
        """Size of weights, optimizer state and padding."""
        return self.table.bytes

    def set_cache(self, nbytes: int) -> None:
        """Keep rows in so much memory of the device."""
        if nbytes != self.cache_bytes:
            self.flush()
            self.cache_bytes = nbytes
            self.group.make_caches()
            self.version += 1

    @property
    def paged_bytes(self) -> int:
        """Size of what a cache may hold: all but what is in the memory of the GPU."""
        return self.group.paged_bytes * len(self) // max(1, self.group.table.rows)

    @property
    def stats(self) -> TransferStats:
        """What has crossed the link, of all tables that share a cache."""
        return TransferStats.sum(cache.stats for cache in self.group.caches)

    @outside_inference
    def get(self, ids: Ids, *, non_blocking: bool = False) -> Tensor:
        """Return rows [*ids.shape, D] in the table's dtype.

        Rows are copied on the current stream of torch. With `non_blocking` the CPU does not wait to
        see whether all ids are rows of pinned memory: the `IndexError` comes at a later call.
        """
        with self.lock:
            group = self.group
            found = look_up(self, ids, is_filled=True)  # negative rows are not read
            group.empty_caches()
            is_queued = group.is_mapped
            rows_U = found.look_up.rows_N if is_queued else found.rows
            shape = len(rows_U), group.weights.records_VR.shape[1]
            read_UW = torch.empty(shape, dtype=self.table.dtype, device=self.device)
            # On a GPU a row is read to the place of its last id at once.
            last_U = found.look_up.last_N if is_queued else None
            group.link.read(group.weights, rows_U, read_UW, last_U)
            if last_U is not None:
                cuda.copy_repeated(found.places_N, last_U, read_UW)
                rows_ND = read_UW[:, : self.table.dim].contiguous()
            else:
                rows_ND = read_UW[:, : self.table.dim].index_select(0, found.places_N)
            self._check(found, waits=not (non_blocking and is_queued))
            return rows_ND.view(*found.shape, self.table.dim)

    @outside_inference
    def put(self, ids: Ids, values: Tensor | np.ndarray, *, non_blocking: bool = False) -> None:
        """Set the weights of rows to `values` [*ids.shape, D].

        Values have any floating-point dtype. The last of equal ids wins. The optimizer state stays.
        `non_blocking` as for `get`; nothing is written if an id is not a row.
        """
        values = as_tensor(values).detach()
        if not values.is_floating_point() or values.is_meta:
            raise ValueError(f"values are {values.dtype} on {values.device}; give floating-point")
        with self.lock:
            group = self.group
            found = look_up(self, ids, is_filled=True)  # negative rows are not written
            shape = [*found.shape, self.table.dim]
            if (given := list(values.shape)) != shape:
                raise ValueError(f"values have shape {given}, but these ids take {shape}")
            values_NW = to_device(values, self.device).to(self.table.dtype)
            values_NW = values_NW.reshape(-1, self.table.dim)
            if padding := group.weights.records_VR.shape[1] - self.table.dim:
                values_NW = F.pad(values_NW, (0, padding))
            is_queued = group.is_mapped and group.is_exact
            rows_U = found.look_up.rows_N if is_queued else found.rows
            group.empty_caches()
            self.version += 1
            last_U = _last_ids(found, len(rows_U))
            if group.is_exact:
                group.link.write(group.weights, rows_U, values_NW.contiguous(), last_U)
            else:
                records_UR = group.read(rows_U)
                # In the table's dtype already: `write` has nothing left to round at random.
                values_UD = values_NW[last_U, : self.table.dim].to(records_UR.dtype)
                records_UR[:, self.table.columns["weight"]] = values_UD
                group.write(self, rows_U, records_UR)
            self._check(found, waits=not (non_blocking and is_queued))

    def save(self, path: str | Path) -> None:
        """Write the table to an .npy or .safetensors file.

        .npy holds the weights, bfloat16 as float32; .safetensors also the optimizer state.
        """
        with self.lock:
            self.flush()
            suffix = _suffix(path, self.is_shard)
            if suffix == ".npy" and self.table.is_in(path):
                return  # the flush has written the file
            if Path(path).exists():  # another table that has it open would lose it
                with open(path, "rb") as file:
                    lock(file, path)
            if suffix == ".safetensors":
                table_file.save(self.table, Path(path))
            else:
                save_npy(path, self.table["weight"])

    def load(self, path: str | Path) -> None:
        """Read a file of `save`; .npy leaves the optimizer state as it is."""
        with self.lock:
            self.flush()
            self.version += 1
            if _suffix(path, self.is_shard) == ".safetensors":
                table_file.load(self.table, Path(path))
                return
            dtype = NPY_TYPES.get(self.table.dtype, np.dtype("float32"))
            rows_VD = open_npy(path, "r", (len(self), self.table.dim), dtype)
            self.table.initialise(copy_rows(rows_VD))

    def flush(self) -> None:
        """Return when all writes are in the table, and with "mmap" on disk."""
        with self.lock:
            self.group.empty_caches()
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            self.table.flush()
            self._check(waits=True)

    def _check(self, *found: UniqueRows, waits: bool) -> None:
        """Raise `IndexError` for ids that are no rows, now or at a later call."""
        self._unchecked.extend(found)
        while self._unchecked and (waits or self._unchecked[0].look_up.is_known):
            len(self._unchecked.popleft().rows)


class RowStore(Rows):
    """V rows of D numbers, read and written by row id. Threads may share it.

    Args:
        num_rows: Number of rows V.
        dim: Number of dimensions D.
        storage: "cpu", "cuda", "pinned" (CPU memory that the GPU reads in place) or "mmap".
        device: Where `get` returns rows; by default the GPU for "cuda" and "pinned", else the CPU.
        dtype: float64, float32, bfloat16 or float16.
        path: The file of "mmap": an .npy file, or records with a .json file beside them (`Table`).
        init: Maps row ids [n] to rows [n, D]; by default rows are zero. An existing file stays.
    """

    def __init__(
        self,
        num_rows: int,
        dim: int,
        *,
        storage: Storage = "cpu",
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.float32,
        path: str | Path | None = None,
        init: Init | None = None,
    ):
        table = Table("rows", num_rows, dim, {}, {}, storage, dtype, path)
        super().__init__(table, open_device(device, storage))
        if not table.continued:
            if init is not None:
                if not callable(init):
                    kind = type(init).__name__
                    raise ValueError(f"init is a {kind}; give a function of row ids, or put() rows")
                table.initialise(init)
            self.flush()

    @classmethod
    def open(
        cls, path: str | Path, *, storage: Storage = "cpu", device: torch.device | str | None = None
    ) -> RowStore:
        """Return the rows of an .npy file; "mmap" maps it, others copy it."""
        rows_VD = open_npy(path)
        dtype = next(dtype for dtype, npy in NPY_TYPES.items() if npy == rows_VD.dtype)
        content = {"path": path} if storage == "mmap" else {"init": copy_rows(rows_VD)}
        return cls(*rows_VD.shape, storage=storage, device=device, dtype=dtype, **content)


def replace_table(store: Rows, table: Table) -> None:
    """Read and write another table from now on, in a group of its own."""
    store.group.empty_caches()
    store.group.members.remove(store)
    store.group.make_caches()
    alone = (0,) * len(store.first_rows)
    store._join(table, RowGroup(table, store.device, store.lock), alone)


def _last_ids(found: RowsOfIds, rows: int) -> Tensor:
    """Return the last id of each row: int64 [rows]."""
    if found.look_up.last_N is not None:
        return found.look_up.last_N[:rows]
    places_N = found.places_N
    order_N = torch.arange(len(places_N), device=places_N.device)
    return places_N.new_zeros(rows).scatter_reduce_(0, places_N, order_N, "amax")


def open_device(device: torch.device | str | None, storage: Storage) -> torch.device:
    """Return the compute device; by default the one that suits the storage."""
    wanted = str(device or ("cuda" if storage in ("cuda", "pinned") else "cpu"))
    # Kernels run on torch's current GPU, so others cannot be used.
    usable = ["cpu"]
    if torch.cuda.is_available():
        usable += ["cuda", f"cuda:{torch.cuda.current_device()}"]
    if wanted not in usable:
        raise ValueError(f"device={wanted!r} cannot be used; choose from {' '.join(usable)}")
    opened = torch.empty(0, device=wanted).device
    if storage == "cuda" and opened.type != "cuda":
        raise ValueError(f"device={wanted!r} cannot be used with storage='cuda'; use device='cuda'")
    return opened


def _suffix(path: str | Path, is_shard: bool) -> str:
    """Return ".npy" or ".safetensors"; refuse other endings, and shards."""
    suffix = Path(path).suffix
    if is_shard:
        raise ValueError(f"{path} cannot hold rows of several ranks; use PagedOptimizer.save")
    if suffix not in (".npy", ".safetensors"):
        raise ValueError(f"{path} has the ending {suffix!r}; use .npy (weights) or .safetensors")
    return suffix
