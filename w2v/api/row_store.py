"""Rows of numbers in memory or in a file, read and written by row id.

Invalid input raises an error of one line, and nothing is written.

Shapes: V rows, D dimensions, U unique rows, R elements of a record.
"""

from __future__ import annotations

import functools
import threading
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from w2v.kernels import cuda, cuda_cache
from w2v.model import table_file
from w2v.model.optim import RowOptimizer
from w2v.model.row_file import NPY_TYPES, copy_rows, open_npy, save_npy
from w2v.model.table import Init, RowState, SplitTable, Storage, Table
from w2v.transfer.cache import CachedLink, RowUses
from w2v.transfer.engine import TransferStats
from w2v.transfer.links import Link, MappedLink, link_between
from w2v.transfer.streams import current_stream

Ids = Tensor | np.ndarray | Sequence[int]  # int32 or int64, of any shape, on any device


class _Columns(NamedTuple):
    """Columns of a table, as links move them."""

    records_VR: Tensor


class _Later:
    """Numbers on the compute device that the CPU reads when it needs them."""

    def __init__(self, numbers: Tensor):
        self._numbers, self._event = numbers, None
        if numbers.is_cuda:
            pinned = torch.empty(len(numbers), dtype=torch.int64, pin_memory=True)
            self._numbers = pinned.copy_(numbers, non_blocking=True)
            self._event = current_stream().record_event()

    @property
    def is_known(self) -> bool:
        return self._event is None or self._event.query()

    def read(self) -> list[int]:
        if self._event:
            self._event.synchronize()
        return self._numbers.tolist()


class UniqueRows:
    """The unique rows of ids, for which the CPU waits when it asks for them.

    Attributes:
        shape: Shape of the ids.
        places_N: The place of each id among the rows.
        rows_N: The rows, then `fill` on a GPU.
        words: A bit for each row of the table, on a GPU.
        number: Number of the page, 0 for ids that were not announced.
    """

    def __init__(
        self,
        store: Rows,
        given: Ids,
        padding: int | None = None,
        number: int = 0,
        fill: int | None = None,
    ):
        self._given = given  # keeps its memory from becoming that of others
        self._name = _name_of(given)
        self._table_rows = len(store)
        self.number = number
        self.words: Tensor | None = None
        ids = torch.as_tensor(given)
        if not ids.numel():
            ids = ids.to(store.device, torch.int64)  # an empty list has become float32
        if ids.dtype not in (torch.int32, torch.int64) or ids.is_meta:
            raise ValueError(f"ids are {ids.dtype} on {ids.device}; give int32 or int64")
        self.shape = ids.shape
        ids_N = to_device(ids, store.device).long().flatten()
        uses = store.uses
        if not len(ids_N):
            places_N = self.rows_N = ids_N
            found = torch.zeros(4, dtype=torch.int64)
        elif ids_N.is_cuda:
            counted = uses.count_V, uses.page_of_V if number else None, number
            places_N, self.rows_N, self.words, found = cuda_cache.find_rows(
                ids_N, len(store), padding, *counted, fill
            )
        else:
            self.rows_N, places_N = torch.unique(ids_N, return_inverse=True)
            first, last = int(self.rows_N[0]), int(self.rows_N[-1])
            place = torch.nonzero(self.rows_N == (-1 if padding is None else padding))
            numbers = [len(self.rows_N), min(0, first), last, int(place) + 1 if len(place) else 0]
            found = torch.tensor(numbers)
            if first >= 0 and last < len(store):
                uses.note(self.rows_N, number)
        if number:
            uses.announced = number
        self.places_N = places_N
        self._found = _Later(found)

    def is_of(self, ids: Ids) -> bool:
        """Whether these are the ids, unchanged."""
        return self._name == _name_of(ids)

    @property
    def places(self) -> Tensor:
        """The place of each id among the rows, in the shape of the ids."""
        return self.places_N.view(self.shape)

    @property
    def is_known(self) -> bool:
        """Whether `rows` need not wait."""
        return self._found.is_known

    @functools.cached_property
    def rows(self) -> Tensor:
        """The unique rows, sorted: int64 [U].

        Raises:
            IndexError: An id is not a row.
        """
        count, first, last, self._padding = self._found.read()
        if first < 0 or last >= self._table_rows:
            wrong = first if first < 0 else last
            raise IndexError(f"id {wrong} is not a row; rows are 0 to {self._table_rows - 1}")
        return self.rows_N[:count]

    @property
    def padding(self) -> int | None:
        """The place of the padding row among the rows, if it is there."""
        return self._padding - 1 if len(self.rows) and self._padding else None


class Rows:
    """Access to the rows of a table, of row stores and paged embeddings.

    Attributes:
        table: The records; its fields are "weight" and the states of the optimizer.
        device: Where rows come to.
        lock: Buffers and records serve one thread at a time.
        version: Number of changes of the table so far: rows read before one may be out of date.
        cache_bytes: Memory of the device for rows that stay there. A `flush` empties it.
    """

    def __init__(self, table: Table, device: torch.device, cache_bytes: int = 0):
        self.device = device
        self.lock = threading.RLock()
        self.version = 0
        self.cache_bytes = cache_bytes
        self._unchecked: deque[UniqueRows] = deque()
        self._replace_table(table)

    def _replace_table(self, table: Table) -> None:
        """Read and write another table from now on."""
        self.table = table
        # The records of a split table are those of both its tables, joined.
        slots = self.cache_bytes * len(self) // max(1, self.paged_bytes)
        is_planned = 0 < slots < len(self)
        self.uses = RowUses(len(self) if is_planned else 0, self.device)
        self._parts = [(part, self._link_to(part, slots)) for part in self._tables()]
        self._caches = [link for _, link in self._parts if isinstance(link, CachedLink)]
        self.version += 1
        # What `get` and `put` move: the weights, as the GPU can move units of 16 bytes alone.
        self._link = link_between(table, self.device)
        self._is_mapped = isinstance(self._link, MappedLink)
        unit = 16 // table.dtype.itemsize if self._is_mapped else 1
        width = -(-table.dim // unit) * unit
        self._weights = _Columns(table.records_VR[:, :width])
        has_states = len(table.columns) > 1 and not isinstance(table, SplitTable)
        self._is_exact = width == table.dim or not has_states

    def _link_to(self, part: Table, slots: int) -> Link:
        """Return the link of a table, with a cache of so many rows."""
        link = link_between(part, self.device)
        if not slots or part.storage == "cuda":
            return link
        return CachedLink(link, part, slots, self.device, self.uses)

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy or a pickle holds: pinned memory can be in neither."""
        table = self.table
        if table.storage == "mmap":
            remedy = "copy the file, or give storage='cpu'"
            raise ValueError(f"storage='mmap': rows in a file are not copied or pickled; {remedy}")
        with self.lock:
            self.flush()
            return {
                "name": table.name,
                "storage": table.storage,
                "state_storage": table.states.storage if isinstance(table, SplitTable) else None,
                "dtype": table.dtype,
                "fields": {name: table[name].clone() for name in table.columns},
                "scalars": {name: value.clone() for name, value in table.scalars.items()},
                "device": self.device,
                "cache_bytes": self.cache_bytes,
            }

    def __setstate__(self, state: dict[str, Any]) -> None:
        fields, scalars = state["fields"], state["scalars"]
        # The initial values of states do not matter, as all are copied.
        states = {name: RowState(value.shape[1], 0.0) for name, value in fields.items()}
        del states["weight"]
        shape = fields["weight"].shape
        layout = (state["name"], *shape, states, scalars, state["storage"], state["dtype"])
        split = [state["state_storage"]] if state["state_storage"] else []
        table = (SplitTable if split else Table)(*layout, *split)
        for name, values in fields.items():
            table[name].copy_(values)
        for name, value in scalars.items():
            table.scalars[name].copy_(value)
        device = open_device(state["device"], state["storage"])
        Rows.__init__(self, table, device, state["cache_bytes"])

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
            self._replace_table(self.table)

    @property
    def paged_bytes(self) -> int:
        """Size of what a cache may hold: all but what is in the memory of the GPU."""
        return sum(part.records_VR.nbytes for part in self._tables() if part.storage != "cuda")

    @property
    def stats(self) -> TransferStats:
        """What has crossed the link to and from the cache."""
        return TransferStats.sum(cache.stats for cache in self._caches)

    @torch.inference_mode(False)
    def get(self, ids: Ids, *, non_blocking: bool = False) -> Tensor:
        """Return rows [*ids.shape, D] in the table's dtype.

        Rows are copied on the current stream of torch. With `non_blocking` the CPU does not wait to
        see whether all ids are rows of pinned memory: the `IndexError` comes at a later call.
        """
        with self.lock:
            waits = not (non_blocking and self._is_mapped)
            found = UniqueRows(self, ids, fill=None if waits else 0)
            self._check(found, waits)
            self._empty_caches()
            rows_U = found.rows if waits else found.rows_N
            shape = len(rows_U), self._weights.records_VR.shape[1]
            stored_UW = torch.empty(shape, dtype=self.table.dtype, device=self.device)
            self._link.read(self._weights, rows_U, stored_UW)
            rows_ND = stored_UW[:, : self.table.dim].index_select(0, found.places_N)
            return rows_ND.view(*found.shape, self.table.dim)

    @torch.inference_mode(False)
    def put(self, ids: Ids, values: Tensor | np.ndarray, *, non_blocking: bool = False) -> None:
        """Set the weights of rows to `values` [*ids.shape, D].

        Values have any floating-point dtype. The last of equal ids wins. The optimizer state stays.
        `non_blocking` as for `get`; nothing is written if an id is not a row.
        """
        values = torch.as_tensor(values).detach()
        if not values.is_floating_point() or values.is_meta:
            raise ValueError(f"values are {values.dtype} on {values.device}; give floating-point")
        with self.lock:
            waits = not (non_blocking and self._is_mapped and self._is_exact)
            found = UniqueRows(self, ids, fill=None if waits else -1)
            shape = [*found.shape, self.table.dim]
            if (given := list(values.shape)) != shape:
                raise ValueError(f"values have shape {given}, but these ids take {shape}")
            values_NW = to_device(values, self.device).to(self.table.dtype)
            values_NW = values_NW.reshape(-1, self.table.dim)
            if padding := self._weights.records_VR.shape[1] - self.table.dim:
                values_NW = F.pad(values_NW, (0, padding))
            self._check(found, waits)
            rows_U = found.rows if waits else found.rows_N  # negative ones are not written
            self._empty_caches()
            self.version += 1
            last_U = _last_ids(found.places_N, len(rows_U))
            if self._is_exact:
                self._link.write(self._weights, rows_U, values_NW.contiguous(), last_U)
                return
            records_UR = self._read(rows_U)
            # In the table's dtype already: `_write` has nothing left to round at random.
            values_UD = values_NW[last_U, : self.table.dim].to(records_UR.dtype)
            records_UR[:, self.table.columns["weight"]] = values_UD
            self._write(rows_U, records_UR)

    def save(self, path: str | Path) -> None:
        """Write the table to an .npy or .safetensors file.

        .npy holds the weights, bfloat16 as float32; .safetensors also the optimizer state.
        """
        with self.lock:
            self.flush()
            if _suffix(path) == ".safetensors":
                table_file.save(self.table, Path(path))
            elif not self.table.is_in(path):  # otherwise the flush has written the file
                save_npy(path, self.table["weight"])

    def load(self, path: str | Path) -> None:
        """Read a file of `save`; .npy leaves the optimizer state as it is."""
        with self.lock:
            self.flush()
            self.version += 1
            if _suffix(path) == ".safetensors":
                table_file.load(self.table, Path(path))
                return
            dtype = NPY_TYPES.get(self.table.dtype, np.dtype("float32"))
            rows_VD = open_npy(path, "r", (len(self), self.table.dim), dtype)
            self.table.initialise(copy_rows(rows_VD))

    def flush(self) -> None:
        """Return when all writes are in the table, and with "mmap" on disk."""
        with self.lock:
            self._empty_caches()
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            self.table.flush()
            while self._unchecked:
                len(self._unchecked.popleft().rows)

    def _tables(self) -> list[Table]:
        """Return the table, or both tables of a split one."""
        table = self.table
        return [table, table.states] if isinstance(table, SplitTable) else [table]

    def _empty_caches(self) -> None:
        for cache in self._caches:
            cache.flush()

    def _check(self, found: UniqueRows, waits: bool) -> None:
        """Raise `IndexError` for ids that are no rows, now or at a later call."""
        self._unchecked.append(found)
        while self._unchecked and (waits or self._unchecked[0].is_known):
            len(self._unchecked.popleft().rows)

    # What is made here serves training too.
    @torch.inference_mode(False)
    def _look_up(self, ids: Ids, padding: int | None, is_ahead: bool = False) -> UniqueRows:
        """Begin to find the rows of ids; those of coming pages are evicted last."""
        with self.lock:
            number = self.uses.announced + 1 if is_ahead else 0
            return UniqueRows(self, ids, padding, number)

    @torch.inference_mode(False)
    def _prefetch(self, found: UniqueRows, hold: bool = False) -> None:
        """Bring rows into the cache; with `hold`, as the current page."""
        with self.lock:
            rows_U = found.rows
            for cache in self._caches:
                cache.prefetch(rows_U, found.number, found.words)
                if hold:
                    cache.hold(rows_U)

    @torch.inference_mode(False)
    def _read(self, rows_U: Tensor) -> Tensor:
        """Return the decoded records [U, R] of unique rows, on the compute device."""
        parts = []
        for part, link in self._parts:
            shape = len(rows_U), part.width
            stored_UR = torch.empty(shape, dtype=part.records_VR.dtype, device=self.device)
            link.read(part, rows_U, stored_UR)
            parts.append(part.decode(stored_UR))
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

    def _in_place(self, rows_U: Tensor) -> tuple[Tensor, Tensor] | None:
        """Return records on the compute device and slots, if rows have any."""
        (part, link), *others = self._parts
        if isinstance(link, CachedLink) and not others:
            return link.in_place(rows_U)
        return (part.records_VR, rows_U) if type(link) is Link and not others else None

    @torch.inference_mode(False)
    def _read_weights(self, rows_U: Tensor) -> Tensor:
        """Return the decoded weights [U, D] of unique rows, on the compute device."""
        columns = self.table.columns["weight"]
        if (found := self._in_place(rows_U)) is None:
            return self._read(rows_U)[:, columns]
        records_SR, slots_U = found
        return self.table.decode(records_SR[:, columns].index_select(0, slots_U))

    def _step_fused(
        self, optimizer: RowOptimizer, rows_U: Tensor, grad_UD: Tensor, lr: float
    ) -> None:
        """Step unique rows by the fused kernel, in place if they are on the GPU."""
        self.version += 1
        grad_UD = grad_UD.contiguous()
        if (found := self._in_place(rows_U)) is not None:
            cuda.step_rows(optimizer, self.table, *found, grad_UD, lr)
            return
        ((part, link),) = self._parts
        shape = len(rows_U), part.width
        stored_UR = torch.empty(shape, dtype=part.dtype, device=self.device)
        link.read(part, rows_U, stored_UR)
        cuda.step_rows(optimizer, part, stored_UR, None, grad_UD, lr)
        link.write(part, rows_U, stored_UR)

    @torch.inference_mode(False)
    def _write(self, rows_U: Tensor, records_UR: Tensor) -> None:
        """Write decoded records [U, R] of unique rows into the table."""
        self.version += 1
        start = 0
        for part, link in self._parts:
            # Contiguous, as the kernels that copy records to pinned memory need them.
            part_UR = records_UR[:, start : start + part.width].contiguous()
            link.write(part, rows_U, part.encode(rows_U, part_UR))
            start += part.width


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
            if init:
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


_pinned: set[int] = set()  # addresses of memory that was pinned when it was seen


def _last_ids(places_N: Tensor, rows: int) -> Tensor:
    """Return the last id of each row: int64 [rows]."""
    if places_N.is_cuda:
        return cuda_cache.last_ids(places_N, rows)
    last_U = places_N.new_zeros(rows)
    order_N = torch.arange(len(places_N))
    return last_U.scatter_reduce_(0, places_N, order_N, "amax")


def to_device(values: Tensor, device: torch.device) -> Tensor:
    """Copy to the device; unpinned memory alone would wait for it."""
    if device.type == "cuda" and values.device.type == "cpu":
        address = values.data_ptr()
        if address not in _pinned:  # to ask takes 30 us
            if values.is_pinned():
                _pinned.add(address)
            else:
                values = values.pin_memory()
        if len(_pinned) > 4096:
            _pinned.clear()
    return values.to(device, non_blocking=True)


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


def _name_of(ids: Ids) -> Any:
    """Return what tells these ids from others, without looking at them."""
    if not isinstance(ids, Tensor):
        return id(ids)
    changes = 0 if ids.is_inference() else ids._version
    return ids.data_ptr(), ids.shape, ids.stride(), ids.dtype, ids.device, changes


def _suffix(path: str | Path) -> str:
    """Return ".npy" or ".safetensors"; raise `ValueError` for others."""
    suffix = Path(path).suffix
    if suffix not in (".npy", ".safetensors"):
        raise ValueError(f"{path} has the ending {suffix!r}; use .npy (weights) or .safetensors")
    return suffix
