"""Rows in a memory-mapped file: records of a table, or a plain .npy file.

Shapes: V rows, D dimensions, R elements of a record.
"""

from __future__ import annotations

import fcntl
import gc
import json
import os
import tempfile
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch
from torch import Tensor

from w2v.system.files import atomic_path, atomic_write, naming_file, one_line, sync
from w2v.system.process import finalize

CHUNK_ROWS = 1 << 14  # of a table, written at a time
NPY_TYPES: dict[torch.dtype, np.dtype] = {
    torch.float64: np.dtype("float64"),
    torch.float32: np.dtype("float32"),
    torch.float16: np.dtype("float16"),
}
OLDER = "scalars_are_older"  # mark in the .json of a file


class RowFile:
    """Memory-mapped records [V, R] of a table; the mapping holds a lock.

    Their layout and the table's scalars are in `<path>.json`. An .npy file has weights [V, D]
    without padding, and no .json. An existing file is continued, and `scalars` are set from it. A
    new file has a temporary name until the first `flush`, and is removed if there is none.

    Raises:
        ValueError: The file is open elsewhere, or has another layout.
        OSError: The disk has no room.
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
        self._is_npy = path.suffix == ".npy"
        self._layout_path = Path(f"{path}.json")
        self._temporary = Path(f"{path}.part")
        self._scalars = scalars
        fields = {name: part.stop - part.start for name, part in columns.items()}
        self._layout = {"rows": rows, "dtype": str(dtype), "fields": fields}
        self._scalars_are_older = False
        # As bytes, because NumPy has no bfloat16.
        shape = rows, (fields["weight"] if self._is_npy else width) * dtype.itemsize
        file, self.continued = _open_locked(path, self._temporary)
        with file:
            if not self.continued:
                self._discard = finalize(self, self._temporary.unlink, missing_ok=True)
                try:
                    offset = self._allocate(file, shape, dtype)
                except BaseException:
                    self._discard()  # while it is locked: later, it may be another table's
                    raise
            elif self._is_npy:
                saved = open_npy(path, (rows, fields["weight"]), NPY_TYPES[dtype])
                if not saved.flags.c_contiguous:
                    remedy = "save np.ascontiguousarray(array), or use storage='cpu'"
                    raise ValueError(f"{path} holds an array in Fortran order; {remedy}")
                offset = saved.offset
            else:
                offset = 0
                self._check_layout(shape)
            # The mapping keeps the file open, and with it the lock.
            self._mapped = np.memmap(file, np.uint8, "r+", offset, shape)
        self.records_VR = torch.from_numpy(self._mapped).view(dtype)

    def flush(self) -> None:
        """Return when rows and scalars are on disk."""
        self._mapped.flush()
        self._flushed = {name: value.item() for name, value in self._scalars.items()}
        self._write_layout(scalars_are_older=False)
        if not self.continued:
            # The records get their name last, so that they are never there without a layout.
            os.replace(self._temporary, self.path)
            self._discard.detach()
            self.continued = True
            sync(self.path.parent)

    def begin_step(self) -> None:
        """Mark the scalars in the file as older than the rows, until a flush."""
        if self._scalars and self.continued and not self._scalars_are_older:
            self._write_layout(scalars_are_older=True)

    def _write_layout(self, scalars_are_older: bool) -> None:
        if not self._is_npy:
            content = self._layout | {"scalars": self._flushed}
            if scalars_are_older:
                content[OLDER] = True
            atomic_write(self._layout_path, json.dumps(content))
        self._scalars_are_older = scalars_are_older

    def _allocate(self, file: BinaryIO, shape: tuple[int, int], dtype: torch.dtype) -> int:
        """Allocate a new file on the disk; return where its records begin."""
        file.seek(0)
        file.truncate()  # a killed process may have left it
        if self._is_npy:
            _write_npy_header(file, (shape[0], shape[1] // dtype.itemsize), NPY_TYPES[dtype])
            file.flush()
        offset = file.tell()
        # Later, a write to mapped memory on a full disk would kill the process.
        with naming_file(self.path):
            os.posix_fallocate(file.fileno(), 0, offset + shape[0] * shape[1])
        return offset

    def _check_layout(self, shape: tuple[int, int]) -> None:
        """Check the layout of an existing file, and read its scalars."""
        try:
            found = json.loads(self._layout_path.read_text(encoding="utf-8"))
            scalars = found["scalars"]
            found["scalars"] = sorted(scalars)  # their names belong to the layout
            self._scalars_are_older = bool(found.pop(OLDER, False))
            self._flushed = {name: value + 0 for name, value in scalars.items()}  # numbers
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
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
        for name, value in self._flushed.items():
            self._scalars[name].fill_(value)
        if self._scalars_are_older:
            ended = f"{self.path} was not flushed before its process ended: rows are newer than"
            state = " ".join(sorted(scalars))
            warnings.warn(f"{ended} {state}; train on, or restore it from a copy", stacklevel=2)


def _open_locked(path: Path, temporary: Path) -> tuple[BinaryIO, bool]:
    """Open and lock a table's file; return it, and whether it existed.

    A new file has the temporary name. Only one table can have a file open.
    """
    while True:
        continued = path.exists()
        place = path if continued else temporary
        file = open(place, "r+b" if continued else "a+b")  # noqa: SIM115 - closed by the caller
        try:
            lock(file, path)
            # Before it was locked, the file may have been renamed or removed.
            is_current = place.exists() and os.path.samestat(os.fstat(file.fileno()), place.stat())
        except BaseException:
            file.close()
            raise
        if is_current and continued == path.exists():
            return file, continued
        file.close()


def lock(file: BinaryIO, path: str | Path) -> None:
    """Lock an open file until it is closed; refuse one that a table has open."""
    with naming_file(path):
        for _ in range(2):
            try:
                return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                gc.collect()  # a table that was deleted may still be there
        remedy = "delete that table, end that process, or take another path"
        raise ValueError(f"{path} is open in another table or process; {remedy}")


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
    path: str | Path, shape: tuple[int, int] | None = None, dtype: np.dtype | None = None
) -> np.memmap:
    """Map an .npy file of rows [V, D] in float64, float32 or float16.

    Raises `ValueError` if it holds something else, or not rows of this shape and dtype.
    """
    try:
        rows_VD = np.lib.format.open_memmap(path, "r")
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
    with atomic_path(Path(path)) as temporary, open(temporary, "wb") as file:
        _write_npy_header(file, tuple(rows_VD.shape), dtype)
        # In chunks, because a copy of all rows might not fit into memory.
        for chunk in rows_VD.split(CHUNK_ROWS):
            chunk = chunk if chunk.dtype in NPY_TYPES else chunk.float()
            file.write(chunk.cpu().contiguous().numpy().data)


def _write_npy_header(file: BinaryIO, shape: tuple[int, ...], dtype: np.dtype) -> None:
    header = {"descr": dtype.str, "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(file, header)


def copy_rows(rows_VD: np.ndarray) -> Callable[[Tensor], Tensor]:
    """Return an initialiser for tables that copies the rows of an array."""
    return lambda rows_n: torch.from_numpy(np.array(rows_VD[int(rows_n[0]) : int(rows_n[-1]) + 1]))
