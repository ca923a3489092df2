"""Embedding tables for any torch model, larger than the memory of the GPU.

    users = Embedding(1_000_000, 64, optimizer="Adamax", lr=0.1, storage="pinned")
    page = users.page(ids)       # the unique rows of these ids, on the compute device
    loss = model(page.vectors)   # [*ids.shape, D]
    loss.backward()
    users.step(page)             # optimizer step; the rows go back into the table

Invalid input raises a `ValueError` of one line, and nothing is written.

Shapes: V rows, D dimensions, U unique rows of a page, R elements of a record.
"""

from __future__ import annotations

import math
import operator
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from w2v.config import OptimizerConfig
from w2v.model import table_file
from w2v.model.optim import RowOptimizer, optimizer_name
from w2v.model.row_file import NPY_TYPES, copy_rows, open_npy, save_npy
from w2v.model.table import Init, SplitTable, Storage, Table, normal
from w2v.transfer.links import link_between

Ids = Tensor | np.ndarray | Sequence[int]  # int32 or int64, of any shape, on any device


class _Rows:
    """A table and the device that computes: the base of both classes."""

    def __init__(self, table: Table, device: torch.device | str | None):
        self.table = table
        self.device = _open_device(device, table)
        # The records of a split table are those of both its tables, joined.
        tables = [table, table.states] if isinstance(table, SplitTable) else [table]
        self._parts = [(part, link_between(part, self.device)) for part in tables]
        # Weak references, because a page that is dropped is released.
        self._in_flight: weakref.WeakSet[EmbeddingPage] = weakref.WeakSet()
        self._lock = threading.RLock()  # buffers, optimizer and pages serve one thread at a time

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _lock=threading.RLock())  # a lock cannot be copied

    def _initialise(self, init: Init | None, device: torch.device | None = None) -> None:
        """Set the first weights, computed on a device; an existing file stays."""
        if not self.table.continued:
            if init:
                self.table.initialise(init, device)
            self.flush()

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

    def get(self, ids: Ids) -> Tensor:
        """Return rows [*ids.shape, D] in the table's dtype."""
        with self._lock:
            rows_U, slots = self._unique(ids)
            weight_UD = self._read(rows_U)[:, self.table.columns["weight"]]
            return weight_UD[slots].to(self.table.dtype)

    def put(self, ids: Ids, values: Tensor | np.ndarray) -> None:
        """Set the weights of rows to `values` [*ids.shape, D].

        Values have any floating-point dtype. The last of equal ids wins. The optimizer state stays.
        Rows of an open page are refused.
        """
        values = torch.as_tensor(values).detach()
        if not values.is_floating_point() or values.is_meta:
            raise ValueError(f"values are {values.dtype} on {values.device}; give floating-point")
        with self._lock:
            rows_U, slots = self._unique(ids, exclusive=True)
            shape = [*slots.shape, self.table.dim]
            if (given := list(values.shape)) != shape:
                raise ValueError(f"values have shape {given}, but these ids take {shape}")
            # The place of the last of equal ids, for each row.
            order = torch.arange(slots.numel(), device=self.device)
            last_U = torch.zeros_like(rows_U).scatter_reduce_(0, slots.flatten(), order, "amax")
            values_UD = values.to(self.device).reshape(-1, self.table.dim)[last_U]
            records_UR = self._read(rows_U)
            # Rounded to nearest here, `_write` has nothing left to round at random.
            records_UR[:, self.table.columns["weight"]] = values_UD.to(self.table.dtype)
            self._write(rows_U, records_UR)

    def save(self, path: str | Path) -> None:
        """Write the table to an .npy or .safetensors file.

        .npy holds the weights, bfloat16 as float32; .safetensors also the optimizer state. Rows of
        open pages are saved as the table has them.
        """
        with self._lock:
            self.flush()
            if _suffix(path) == ".safetensors":
                table_file.save(self.table, Path(path))
            elif not self.table.is_in(path):  # otherwise the flush has written the file
                save_npy(path, self.table["weight"])

    def load(self, path: str | Path) -> None:
        """Read a file of `save`; .npy leaves the optimizer state as it is."""
        with self._lock:
            if pages := sum(page.is_open for page in self._in_flight):
                remedy = f"step or release them, then load {path}"
                raise ValueError(f"{pages} page(s) are in flight; {remedy}")
            self.flush()
            if _suffix(path) == ".safetensors":
                table_file.load(self.table, Path(path))
                return
            dtype = NPY_TYPES.get(self.table.dtype, np.dtype("float32"))
            rows_VD = open_npy(path, "r", (len(self), self.table.dim), dtype)
            self.table.initialise(copy_rows(rows_VD))

    def flush(self) -> None:
        """Return when all writes are in the table, and with "mmap" on disk."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.table.flush()

    def _read(self, rows_U: Tensor) -> Tensor:
        """Return the decoded records [U, R] of rows, on the compute device."""
        parts = []
        for part, link in self._parts:
            shape = len(rows_U), part.width
            stored_UR = torch.empty(shape, dtype=part.records_VR.dtype, device=self.device)
            link.read(part, rows_U, stored_UR)
            parts.append(part.decode(stored_UR))
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

    def _write(self, rows_U: Tensor, records_UR: Tensor) -> None:
        """Write decoded records [U, R] into the table."""
        start = 0
        for part, link in self._parts:
            # Contiguous, as the kernels that copy records to pinned memory need them.
            part_UR = records_UR[:, start : start + part.width].contiguous()
            link.write(part, rows_U, part.encode(rows_U, part_UR))
            start += part.width

    def _unique(self, ids: Ids, exclusive: bool = False) -> tuple[Tensor, Tensor]:
        """Return the sorted unique rows [U], and the place of each id in them.

        With `exclusive`, rows of a page in flight are refused.
        """
        ids = torch.as_tensor(ids)
        if not ids.numel():
            ids = ids.to(self.device, torch.int64)  # an empty list has become float32
        if ids.dtype not in (torch.int32, torch.int64) or ids.is_meta:
            raise ValueError(f"ids are {ids.dtype} on {ids.device}; give int32 or int64")
        rows_U, slots = torch.unique(ids.to(self.device, torch.int64), return_inverse=True)
        if not len(rows_U):
            return rows_U, slots
        # The checks are computed on the device, to wait for it only once.
        checks = [rows_U[0], rows_U[-1]]
        for page in self._in_flight:
            if exclusive and page.is_open:
                is_taken_U = torch.isin(rows_U, page.rows)
                checks.append(torch.where(is_taken_U, rows_U, len(self)).min())
        first, last, *taken = torch.stack(checks).tolist()
        if first < 0 or last >= len(self):
            wrong = first if first < 0 else last
            raise ValueError(f"id {wrong} is not a row; rows are 0 to {len(self) - 1}")
        if taken and min(taken) < len(self):
            raise ValueError(f"row {min(taken)} is in another page; step or release that page")
        return rows_U, slots


class RowStore(_Rows):
    """V rows of D numbers, read and written by row id.

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
        super().__init__(Table("rows", num_rows, dim, {}, {}, storage, dtype, path), device)
        self._initialise(init)

    @classmethod
    def open(
        cls, path: str | Path, *, storage: Storage = "cpu", device: torch.device | str | None = None
    ) -> RowStore:
        """Return the rows of an .npy file; "mmap" maps it, others copy it."""
        rows_VD = open_npy(path)
        dtype = next(dtype for dtype, npy in NPY_TYPES.items() if npy == rows_VD.dtype)
        content = {"path": path} if storage == "mmap" else {"init": copy_rows(rows_VD)}
        return cls(*rows_VD.shape, storage=storage, device=device, dtype=dtype, **content)


class Embedding(_Rows):
    """Embedding with an optimizer that steps the rows of a page.

    Rows outside the page keep weight and state, as with torch.optim.SparseAdam. A page of all rows
    is stepped as torch steps an nn.Embedding, bit for bit in float32. Steps compute in float32 for
    16-bit tables. `lr` is an attribute and may be changed. Threads may share an embedding.

    Args:
        optimizer: Row-separable optimizer: a class, or the name of one in torch.optim.
        lr: Learning rate. Sparse rows need 10 to 200 times torch's defaults.
        optimizer_args: Other arguments of the optimizer.
        step: Whether bias correction counts the steps of the "table" or of each "row".
        storage: Where weights and state are, as for a `RowStore`.
        device: Where pages are; like `dtype` and `path` as for a `RowStore`.
        seed: Seed of the default `init`.
        init: Maps row ids [n] to weights [n, D]; by default they are normal with standard
            deviation 1, as in nn.Embedding. `w2v.model.table` has `normal` and `uniform`.
        state_storage: Other storage for the optimizer state, such as "pinned" beside "cuda".
    """

    def __init__(
        self,
        num_rows: int,
        dim: int,
        *,
        optimizer: str | type[torch.optim.Optimizer],
        lr: float,
        optimizer_args: dict[str, Any] | None = None,
        step: Literal["table", "row"] = "table",
        storage: Storage = "cpu",
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.float32,
        path: str | Path | None = None,
        seed: int = 1,
        init: Init | None = None,
        state_storage: Storage | None = None,
    ):
        if step not in ("table", "row"):
            raise ValueError(f"step={step!r} is unknown; choose 'table' or 'row'")
        if state_storage and "mmap" in (storage, state_storage):
            both = f"state_storage={state_storage!r} with storage={storage!r}"
            raise ValueError(f"{both}: a file holds both; leave state_storage out")
        self.lr = lr
        config = OptimizerConfig(
            name=optimizer_name(optimizer), lr=lr, args=optimizer_args or {}, step=step
        )
        self._optimizer = RowOptimizer(config)
        # An optimizer's state is found by stepping it once on a tiny parameter.
        states, scalars = self._optimizer.states(dim), self._optimizer.scalars
        shared = ("embedding", num_rows, dim, states, scalars, storage, dtype)
        table = SplitTable(*shared, state_storage) if state_storage else Table(*shared, path)
        super().__init__(table, device)
        # A user's function may not run on a GPU.
        self._initialise(
            init or normal(dim, 1.0, operator.index(seed)), None if init else self.device
        )

    def page(self, ids: Ids) -> EmbeddingPage:
        """Fetch the rows of `ids`, which no open page may have, for a step."""
        with self._lock:
            rows_U, slots = self._unique(ids, exclusive=True)
            records_UR = self._read(rows_U)
            weight = nn.Parameter(records_UR[:, self.table.columns["weight"]])
            page = EmbeddingPage(rows_U, slots, records_UR, weight)
            self._in_flight.add(page)
            return page

    def step(self, page: EmbeddingPage, lr: float | None = None) -> None:
        """Step the rows by `page.weight.grad`, and write them back.

        The page is spent. Without a gradient, because the loss did not use the page, there is no
        optimizer step. `lr` is for this step alone; by default it is `self.lr`.
        """
        lr = self.lr if lr is None else lr
        if not (math.isfinite(lr) and lr >= 0):
            raise ValueError(f"lr={lr} is no learning rate; it must be a number from 0 up")
        weight = page.weight
        if page not in self._in_flight:
            remedy = "step it with the embedding that made it"
            raise ValueError(f"this page is not one of {self!r}; {remedy}")
        with self._lock, torch.no_grad():
            if weight.grad is not None:
                # `weight` is a view of the records, so the optimizer steps both.
                self._optimizer.step_rows(self.table, page.records_UR, weight.grad, None, lr)
            self._write(page.rows, page.records_UR)
            # Only now, so that a step that fails keeps the page.
            page.release()


@dataclass(eq=False, repr=False)  # equal to itself alone, so that a set can hold it
class EmbeddingPage:
    """Rows of an `Embedding` on the compute device, until stepped or released.

    A page that is dropped is released: the table keeps its rows as they were. The attributes of a
    spent page raise `ValueError`.

    Attributes:
        rows: The sorted unique row ids: int64 [U].
        slots: The place of each id in `rows`: int64, in the shape of the ids.
        records_UR: Weight and optimizer state, decoded.
        weight: The weights [U, D] in float32, a view of the records; `step` uses its `grad`.
    """

    rows: Tensor
    slots: Tensor
    records_UR: Tensor
    weight: nn.Parameter

    def __getattr__(self, name: str) -> Any:
        """Raise; `release` has deleted the attributes of a spent page."""
        if name in EmbeddingPage.__annotations__:
            spent = "this page is spent (stepped or released)"
            raise ValueError(f"{spent}; get another with page(ids)")
        raise AttributeError(name)

    @property
    def is_open(self) -> bool:
        """Whether the page is neither stepped nor released."""
        return bool(vars(self))

    @property
    def vectors(self) -> Tensor:
        """The rows in the order of the ids: [*ids.shape, D]."""
        return F.embedding(self.slots, self.weight)

    def release(self) -> None:
        """Release the rows without writing anything."""
        vars(self).clear()


def _open_device(device: torch.device | str | None, table: Table) -> torch.device:
    """Return the compute device; by default the one that suits the storage."""
    wanted = str(device or ("cuda" if table.storage in ("cuda", "pinned") else "cpu"))
    # Kernels run on torch's current GPU, so others cannot be used.
    usable = ["cpu"]
    if torch.cuda.is_available():
        usable += ["cuda", f"cuda:{torch.cuda.current_device()}"]
    if wanted not in usable:
        raise ValueError(f"device={wanted!r} cannot be used; choose from {' '.join(usable)}")
    opened = torch.empty(0, device=wanted).device
    if table.storage == "cuda" and opened != table.records_VR.device:
        raise ValueError(f"device={wanted!r} cannot be used with storage='cuda'; use device='cuda'")
    return opened


def _suffix(path: str | Path) -> str:
    """Return ".npy" or ".safetensors"; raise `ValueError` for others."""
    suffix = Path(path).suffix
    if suffix not in (".npy", ".safetensors"):
        raise ValueError(f"{path} has the ending {suffix!r}; use .npy (weights) or .safetensors")
    return suffix
