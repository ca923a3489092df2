"""Rows of numbers in memory or in a file, read and written by row id.

Invalid input raises an error of one line, and nothing is written.

Shapes: V rows, D dimensions, U unique rows, R elements of a record.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from w2v.model import table_file
from w2v.model.row_file import NPY_TYPES, copy_rows, open_npy, save_npy
from w2v.model.table import Init, RowState, SplitTable, Storage, Table
from w2v.transfer.links import link_between

Ids = Tensor | np.ndarray | Sequence[int]  # int32 or int64, of any shape, on any device


class Rows:
    """Access to the rows of a table, of row stores and paged embeddings.

    Attributes:
        table: The records; its fields are "weight" and the states of the optimizer.
        device: Where rows come to.
        lock: Buffers and records serve one thread at a time.
        version: Number of changes of the table so far: rows read before one may be out of date.
    """

    def __init__(self, table: Table, device: torch.device):
        self.device = device
        self.lock = threading.RLock()
        self.version = 0
        self._replace_table(table)

    def _replace_table(self, table: Table) -> None:
        """Read and write another table from now on."""
        self.table = table
        # The records of a split table are those of both its tables, joined.
        tables = [table, table.states] if isinstance(table, SplitTable) else [table]
        self._parts = [(part, link_between(part, self.device)) for part in tables]
        self.version += 1

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
        Rows.__init__(self, table, open_device(state["device"], state["storage"]))

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
        with self.lock:
            rows_U, slots = self._unique(ids)
            weight_UD = self._read(rows_U)[:, self.table.columns["weight"]]
            return weight_UD[slots].to(self.table.dtype)

    def put(self, ids: Ids, values: Tensor | np.ndarray) -> None:
        """Set the weights of rows to `values` [*ids.shape, D].

        Values have any floating-point dtype. The last of equal ids wins. The optimizer state stays.
        """
        values = torch.as_tensor(values).detach()
        if not values.is_floating_point() or values.is_meta:
            raise ValueError(f"values are {values.dtype} on {values.device}; give floating-point")
        with self.lock:
            rows_U, slots = self._unique(ids)
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
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.table.flush()

    # Buffers that are made here serve training too.
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

    def _unique(self, ids: Ids) -> tuple[Tensor, Tensor]:
        """Return the sorted unique rows [U], and the place of each id in them.

        Raises:
            IndexError: An id is not a row.
            ValueError: Ids are not integers.
        """
        ids = torch.as_tensor(ids)
        if not ids.numel():
            ids = ids.to(self.device, torch.int64)  # an empty list has become float32
        if ids.dtype not in (torch.int32, torch.int64) or ids.is_meta:
            raise ValueError(f"ids are {ids.dtype} on {ids.device}; give int32 or int64")
        rows_U, slots = torch.unique(ids.to(self.device, torch.int64), return_inverse=True)
        if len(rows_U):
            # Both are computed on the device, to wait for it only once.
            first, last = torch.stack([rows_U[0], rows_U[-1]]).tolist()
            if first < 0 or last >= len(self):
                wrong = first if first < 0 else last
                raise IndexError(f"id {wrong} is not a row; rows are 0 to {len(self) - 1}")
        return rows_U, slots


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


def _suffix(path: str | Path) -> str:
    """Return ".npy" or ".safetensors"; raise `ValueError` for others."""
    suffix = Path(path).suffix
    if suffix not in (".npy", ".safetensors"):
        raise ValueError(f"{path} has the ending {suffix!r}; use .npy (weights) or .safetensors")
    return suffix
