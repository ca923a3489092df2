"""Rows of numbers in memory or in a file, read and written by row id.

Invalid input raises an error of one line, and nothing is written.

Shapes: V rows, D dimensions, U unique rows, R elements of a record.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from w2v.rows.cache import TransferStats
from w2v.rows.file import NPY_TYPES, copy_rows, lock, open_npy, save_npy
from w2v.rows.group import Member, RowGroup, outside_inference
from w2v.rows.link import Link, MappedLink
from w2v.rows.lookup import Ids, LookUp, as_tensor, look_up, to_device
from w2v.rows.table import Init, RowState, SplitTable, Storage, Table
from w2v.system.files import apply_umask, atomic_path, one_line


class Rows(Member):
    """Access to the rows of a table, of row stores and paged embeddings."""

    _unchecked: list[LookUp] | None = None  # whose ids may be no rows

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy or a pickle holds: pinned memory can be in neither."""
        table = self.table
        if table.storage == "mmap":
            remedy = "copy the file, or give storage='cpu'"
            raise ValueError(f"storage='mmap': rows in a file are not copied or pickled; {remedy}")
        with self.lock:
            self.flush()
            tensors = {name: value.clone() for name, value in self._tensors().items()}
        # The initial values of states do not matter, as all are copied.
        states = {name: RowState(table[name].shape[1], 0.0) for name in table.columns}
        del states["weight"]
        shape = table.rows, table.dim
        settings: tuple = table.name, *shape, states, table.scalars, table.storage, table.dtype
        if isinstance(table, SplitTable):
            settings = *settings, table.states.storage
        opened = self.device, self.cache_bytes
        return {"table": (type(table), settings), "tensors": tensors, "opened": opened}

    @outside_inference  # the copy is trained later
    def __setstate__(self, state: dict[str, Any]) -> None:
        kind, settings = state["table"]
        table = kind(*settings)
        device, cache_bytes = state["opened"]
        group = RowGroup(table, open_device(device, table.storage))
        Rows.__init__(self, table, group, cache_bytes)
        for name, value in self._tensors().items():
            value.copy_(state["tensors"][name])

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
        """Transfers over the link, of all tables that share a cache."""
        return self.group.stats

    @outside_inference
    def get(self, ids: Ids, *, non_blocking: bool = False) -> Tensor:
        """Return rows [*ids.shape, D] in the table's dtype.

        Rows are copied on the current stream of torch. With `non_blocking` the CPU does not wait to
        see whether all ids are rows of pinned memory: the `IndexError` comes at a later call.
        """
        with self.lock:
            group = self.group
            (found,) = look_up([self], [ids])
            group.empty_caches()
            is_queued = group.is_mapped  # negative rows are not read
            rows_U = found.look_up.rows_N if is_queued else found.rows()
            # The kernel for pinned memory also reads that of the GPU, in half the time of torch's.
            of_rows = (MappedLink if is_queued else Link)(group.link.records(rows_U))
            rows_ND = of_rows.records(found.places())[:, : self.table.dim].contiguous()
            self._check(found.look_up, waits=not (non_blocking and is_queued))
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
            (found,) = look_up([self], [ids])
            shape = [*found.shape, self.table.dim]
            if (given := list(values.shape)) != shape:
                raise ValueError(f"values have shape {given}, but these ids take {shape}")
            values_NW = to_device(values, group.device).to(self.table.dtype)
            values_NW = values_NW.reshape(-1, self.table.dim)
            if padding := group.link.table_VR.shape[1] - self.table.dim:
                values_NW = F.pad(values_NW, (0, padding))
            is_queued = group.is_mapped and group.is_exact  # negative rows are not written
            rows_U = found.look_up.rows_N if is_queued else found.rows()
            group.empty_caches()
            self.version += 1
            if (last_U := found.look_up.last_N) is None:
                places_N = found.places()
                order_N = torch.arange(len(places_N), device=places_N.device)
                last_U = places_N.new_zeros(len(rows_U))  # the last id of each row
                last_U.scatter_reduce_(0, places_N, order_N, "amax")
            last_U = last_U[: len(rows_U)]
            if group.is_exact:
                group.link.write(rows_U, values_NW.contiguous(), last_U)
            else:
                records_UR = group.read(rows_U)
                # In the table's dtype already: `write` has nothing left to round at random.
                values_UD = values_NW[last_U, : self.table.dim].to(records_UR.dtype)
                records_UR[:, self.table.columns["weight"]] = values_UD
                group.write(self, rows_U, records_UR)
            self._check(found.look_up, waits=not (non_blocking and is_queued))

    def save(self, path: str | Path) -> None:
        """Write the table to an .npy or .safetensors file.

        .npy holds the weights, bfloat16 as float32; .safetensors also the optimizer state.
        """
        with self.lock:
            self.flush()
            suffix = _suffix(path, len(self.first_rows))
            if suffix == ".npy" and self.table.is_in(path):
                return  # the flush has written the file
            with contextlib.suppress(OSError), open(path, "rb") as file:
                lock(file, path)  # another table that has it open would lose it
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            if suffix == ".npy":
                save_npy(path, self.table["weight"])
                return
            tensors = {name: value.cpu().contiguous() for name, value in self._tensors().items()}
            with atomic_path(path) as temporary:
                save_file(tensors, temporary)
                apply_umask(temporary)  # safetensors allows only the owner to read

    def load(self, path: str | Path) -> None:
        """Read a file of `save`; .npy leaves the optimizer state as it is."""
        with self.lock:
            self.flush()
            self.version += 1
            if _suffix(path, len(self.first_rows)) == ".npy":
                dtype = NPY_TYPES.get(self.table.dtype, np.dtype("float32"))
                rows_VD = open_npy(path, (len(self), self.table.dim), dtype)
                self.table.initialise(copy_rows(rows_VD))
                return
            try:
                found = load_file(path)
            except SafetensorError as error:
                reason = one_line(error)
                raise ValueError(f"{path} is not a safetensors file of a table: {reason}") from None
            holds, expected = _layout_of(found), _layout_of(self._tensors())
            if holds != expected:
                differs = f"holds {holds}, but the table has {expected}"
                raise ValueError(f"{path} {differs}; make one like the file")
            for name, value in self._tensors().items():
                value.copy_(found[name])

    def _tensors(self) -> dict[str, Tensor]:
        """Return views of fields and scalars, by their names in .safetensors."""
        fields = {name: self.table[name] for name in self.table.columns}
        scalars = {f"scalar.{name}": value for name, value in self.table.scalars.items()}
        return fields | scalars

    def flush(self) -> None:
        """Return when all writes are in the table, and with "mmap" on disk."""
        with self.lock:
            self.group.empty_caches()
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            self.table.flush()
            self._check(waits=True)

    def _check(self, *found: LookUp, waits: bool) -> None:
        """Raise `IndexError` for ids that are not rows, now or at a later call."""
        self._unchecked = [*(self._unchecked or ()), *found]
        while self._unchecked and (waits or self._unchecked[0].is_known):
            self._unchecked.pop(0).wait()


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

    @outside_inference  # rows are put later
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
        super().__init__(table, RowGroup(table, open_device(device, storage)))
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
        rows, dim = rows_VD.shape
        if storage == "mmap":
            return cls(rows, dim, storage=storage, device=device, dtype=dtype, path=path)
        init = copy_rows(rows_VD)
        return cls(rows, dim, storage=storage, device=device, dtype=dtype, init=init)


def _layout_of(tensors: dict[str, Tensor]) -> dict[str, list]:
    """Return the shape and dtype of each tensor."""
    return {name: [*tensors[name].shape, str(tensors[name].dtype)] for name in sorted(tensors)}


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


def _suffix(path: str | Path, ranks: int) -> str:
    """Return ".npy" or ".safetensors"; refuse other endings, and shards."""
    suffix = Path(path).suffix
    if ranks > 1:
        raise ValueError(f"{path} cannot hold rows of several ranks; use PagedOptimizer.save")
    if suffix not in (".npy", ".safetensors"):
        raise ValueError(f"{path} has the ending {suffix!r}; use .npy (weights) or .safetensors")
    return suffix
