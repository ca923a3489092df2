"""Rows in a memory-mapped file: records of a table, or a plain .npy file.

Shapes: V rows, D dimensions, R elements of a record.
"""

from __future__ import annotations

import json
import os
import tempfile
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from w2v.system.files import atomic_path, atomic_write, naming_file, one_line, sync

CHUNK_ROWS = 1 << 14  # of a table, written at a time
NPY_TYPES: dict[torch.dtype, np.dtype] = {
    torch.float64: np.dtype("float64"),
    torch.float32: np.dtype("float32"),
    torch.float16: np.dtype("float16"),
}


class RowFile:
    """Memory-mapped records [V, R] of a table.

    Their layout and the table's scalars are in `<path>.json`. An .npy file has weights [V, D]
    without padding, and no .json. An existing file is continued, and `scalars` are set from it. A
    new file has a temporary name until the first `flush`, and is removed if there is none. Raises
    `ValueError` for an existing file of another layout, `OSError` if the disk has no room.
    """

    def __init__(
        self,
        path: Path,
        rows: int,
        width: int,
        columns: Mapping[str, slice],
        dtype: torch.dtype,
        scalars: Mapping[str, Tensor],
    ):
        self.path = path
        self.continued = path.exists()
        self._is_npy = path.suffix == ".npy"
        self._layout_path = Path(f"{path}.json")
        self._temporary = Path(f"{path}.part")
        self._scalars = scalars
        fields = {name: part.stop - part.start for name, part in columns.items()}
        self._layout = {"rows": rows, "dtype": str(dtype), "fields": fields}
        shape = rows, fields["weight"]
        if self._is_npy and self.continued:
            self._mapped = open_npy(path, "r+", shape, NPY_TYPES[dtype])
        elif self._is_npy:
            open_new = np.lib.format.open_memmap
            self._mapped = open_new(self._temporary, "w+", NPY_TYPES[dtype], shape)
        else:
            # As bytes, because NumPy has no bfloat16.
            self._mapped = self._map_records((rows, width * dtype.itemsize))
        self.records_VR = torch.from_numpy(self._mapped).view(dtype)
        if not self.continued:
            self._discard = weakref.finalize(self, self._temporary.unlink, missing_ok=True)
            # Later, a write to mapped memory on a full disk would kill the process.
            with open(self._temporary, "r+b") as file, naming_file(self.path):
                os.posix_fallocate(file.fileno(), 0, self._temporary.stat().st_size)

    def flush(self) -> None:
        """Return when rows and scalars are on disk."""
        self._mapped.flush()
        if not self._is_npy:
            scalars = {name: value.item() for name, value in self._scalars.items()}
            atomic_write(self._layout_path, json.dumps(self._layout | {"scalars": scalars}))
        if not self.continued:
            # The records get their name last, so that they are never there without a layout.
            os.replace(self._temporary, self.path)
            self._discard.detach()
            self.continued = True
            sync(self.path.parent)

    def _map_records(self, shape: tuple[int, int]) -> np.memmap:
        """Map a file of records as bytes; check its layout if it exists."""
        if not self.continued:
            return np.memmap(self._temporary, np.uint8, "w+", shape=shape)
        try:
            found = json.loads(self._layout_path.read_text(encoding="utf-8"))
            scalars = found["scalars"]
            found["scalars"] = sorted(scalars)  # their names belong to the layout
        except (OSError, ValueError, KeyError, TypeError):
            unknown = f"{self.path} exists, but {self._layout_path} does not say what it holds"
            raise ValueError(f"{unknown}; remove it or take another path") from None
        expected = self._layout | {"scalars": sorted(self._scalars)}
        if found != expected:
            differs = f"holds {json.dumps(found)}, but the table is {json.dumps(expected)}"
            raise ValueError(f"{self.path} {differs}; use its settings, or another path")
        size, nbytes = self.path.stat().st_size, shape[0] * shape[1]
        if size != nbytes:
            damage = f"has {size:,} bytes instead of {nbytes:,}"
            raise ValueError(f"{self.path} {damage}; it is damaged: restore it from a copy")
        # The file is accepted, so the table continues it.
        for name, value in scalars.items():
            self._scalars[name].fill_(value)
        return np.memmap(self.path, np.uint8, "r+", shape=shape)


def nameless_records(folder: str | Path, rows: int, width: int, dtype: torch.dtype) -> Tensor:
    """Return zero records [V, R] in a file that ends with the process.

    It does so even if the process is killed. Raises `OSError` if the disk has no room.
    """
    shape = rows, width * dtype.itemsize
    with naming_file(folder), tempfile.TemporaryFile(dir=folder) as file:
        os.posix_fallocate(file.fileno(), 0, shape[0] * shape[1])
        mapped = np.memmap(file, np.uint8, "r+", shape=shape)
    return torch.from_numpy(mapped).view(dtype)


def open_npy(
    path: str | Path,
    mode: Literal["r", "r+"] = "r",
    shape: tuple[int, int] | None = None,
    dtype: np.dtype | None = None,
) -> np.memmap:
    """Map an .npy file of rows [V, D] in float64, float32 or float16.

    Raises `ValueError` if it holds something else, or not rows of this shape and dtype.
    """
    try:
        rows_VD = np.lib.format.open_memmap(path, mode)
    except (ValueError, EOFError) as error:
        reason = one_line(error)
        raise ValueError(f"{path} cannot be read as an .npy file of numbers: {reason}") from None
    holds = f"{path} holds {rows_VD.shape} {rows_VD.dtype}"
    if rows_VD.ndim != 2 or 0 in rows_VD.shape or rows_VD.dtype not in NPY_TYPES.values():
        raise ValueError(f"{holds}; rows are [V, D] in floating point: array.astype('float32')")
    if shape and (rows_VD.shape, rows_VD.dtype) != (shape, dtype):
        raise ValueError(f"{holds}, but the table is {shape} {dtype}; take another file")
    return rows_VD


def save_npy(path: str | Path, rows_VD: Tensor) -> None:
    """Write rows [V, D] to an .npy file; bfloat16 becomes float32."""
    dtype = NPY_TYPES.get(rows_VD.dtype, np.dtype("float32"))
    header = {"descr": dtype.str, "fortran_order": False, "shape": tuple(rows_VD.shape)}
    with atomic_path(Path(path)) as temporary, open(temporary, "wb") as file:
        np.lib.format.write_array_header_1_0(file, header)
        # In chunks, because a copy of all rows might not fit into memory.
        for chunk in rows_VD.split(CHUNK_ROWS):
            chunk = chunk if chunk.dtype in NPY_TYPES else chunk.float()
            file.write(chunk.cpu().contiguous().numpy().data)


def copy_rows(rows_VD: np.ndarray) -> Callable[[Tensor], Tensor]:
    """Return an initialiser for tables that copies the rows of an array."""
    return lambda rows_n: torch.from_numpy(np.array(rows_VD[int(rows_n[0]) : int(rows_n[-1]) + 1]))
