"""Rows in a file that is mapped into memory: the records of a table with their description beside them, or a plain .npy file.

A new file is written aside and gets its name at the first flush, so that a file of that name is always whole; without a flush it is
removed.
"""

from __future__ import annotations

import json
import os
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

NPY_TYPES = {torch.float64: np.float64, torch.float32: np.float32, torch.float16: np.float16}


class RowFile:
    """V records of R elements in the file `path`; `<path>.json` holds rows, dtype and fields, and the table's scalars.

    With the ending .npy: rows of D elements without padding, in the one file. An existing file is continued, and `scalars` are set to
    what it holds; raises `ValueError` where it is of another layout, `OSError` where the disk has no room for a new one.
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
        self.path, self.continued = path, path.exists()
        self._scalars = scalars
        self._aside = Path(f"{path}.partial")
        self._about = None if path.suffix == ".npy" else Path(f"{path}.json")
        self._layout = {
            "rows": rows,
            "dtype": str(dtype),
            "fields": {name: part.stop - part.start for name, part in columns.items()},
        }
        if self._about:
            self._mapped = self._map_records(rows * width * dtype.itemsize)
            self.records_VR = torch.from_numpy(self._mapped).view(dtype).view(rows, width)
        else:
            self._mapped = self._map_npy((rows, columns["weight"].stop), np.dtype(NPY_TYPES[dtype]))
            self.records_VR = torch.from_numpy(self._mapped)
        if not self.continued:
            self._discard = weakref.finalize(self, self._aside.unlink, missing_ok=True)
            if hasattr(os, "posix_fallocate"):  # Linux
                self._reserve()

    def flush(self) -> None:
        """Return when rows and scalars are on disk."""
        self._mapped.flush()
        if self._about:
            aside = f"{self._about}.partial"
            with open(aside, "w", encoding="utf-8") as file:
                json.dump(
                    self._layout
                    | {"scalars": {name: value.item() for name, value in self._scalars.items()}},
                    file,
                )
                file.flush()
                os.fsync(file.fileno())
            os.replace(aside, self._about)
        if not self.continued:  # last, so that there are no records without what they are
            os.replace(self._aside, self.path)
            self._discard.detach()
            self.continued = True
        folder = os.open(self.path.parent, os.O_RDONLY)
        os.fsync(folder)  # the new names too
        os.close(folder)

    def _map_records(self, nbytes: int) -> np.memmap:
        if not self.continued:
            return np.memmap(self._aside, np.uint8, "w+", shape=(nbytes,))
        try:
            found: dict[str, Any] = json.loads(self._about.read_text(encoding="utf-8"))
            scalars = dict(found.pop("scalars"))
        except (OSError, ValueError, KeyError, AttributeError, TypeError):
            raise ValueError(
                f"{self.path} exists, but {self._about} does not say what it holds; remove it or take another path"
            ) from None
        have, want = (
            found | {"scalars": sorted(scalars)},
            self._layout | {"scalars": sorted(self._scalars)},
        )
        if have != want:
            raise ValueError(
                f"{self.path} holds {json.dumps(have)}, but the table is {json.dumps(want)}; use the settings it was made with, "
                "or another path"
            )
        if (size := self.path.stat().st_size) != nbytes:
            raise ValueError(
                f"{self.path} has {size:,} bytes instead of {nbytes:,}; it is damaged: restore it from a copy"
            )
        for name, value in scalars.items():
            self._scalars[name].fill_(value)
        return np.memmap(self.path, np.uint8, "r+", shape=(nbytes,))

    def _map_npy(self, shape: tuple[int, int], dtype: np.dtype) -> np.memmap:
        if not self.continued:
            return np.lib.format.open_memmap(self._aside, "w+", dtype, shape)
        rows_VD = open_npy(self.path, writable=True)
        if rows_VD.shape != shape or rows_VD.dtype != dtype:
            raise ValueError(
                f"{self.path} holds {rows_VD.shape} {rows_VD.dtype}, but the table is {shape} {dtype}; take another path"
            )
        return rows_VD

    def _reserve(self) -> None:
        """Take the room on disk now: when it runs out later, a write to mapped memory kills the process."""
        nbytes = os.path.getsize(self._aside)
        try:
            with open(self._aside, "r+b") as file:
                os.posix_fallocate(file.fileno(), 0, nbytes)
        except OSError as error:
            raise OSError(
                error.errno, f"{error.strerror}: {self.path} needs {nbytes:,} bytes"
            ) from None


def open_npy(path: str | Path, writable: bool = False) -> np.memmap:
    """Map an .npy file of rows [V, D], float64, float32 or float16; raises `ValueError` for a file of anything else."""
    try:
        rows_VD = np.load(path, mmap_mode="r+" if writable else "r")
    except (ValueError, EOFError) as error:
        raise ValueError(
            f"{path} cannot be read as an .npy file of numbers: {' '.join(str(error).split())}"
        ) from None
    if not isinstance(rows_VD, np.memmap):
        raise ValueError(f"{path} is an archive; save one array with numpy.save")
    if (
        rows_VD.ndim != 2
        or 0 in rows_VD.shape
        or rows_VD.dtype not in map(np.dtype, NPY_TYPES.values())
    ):
        raise ValueError(
            f"{path} holds {rows_VD.shape} {rows_VD.dtype}; rows are [V, D] in floating point: array.astype('float32')"
        )
    return rows_VD


def save_npy(path: str | Path, rows_VD: Tensor, chunk_rows: int = 1 << 14) -> None:
    """Write rows [V, D] as an .npy file, bfloat16 as float32; aside and then renamed, a chunk of rows at a time."""
    file = np.lib.format.open_memmap(
        f"{path}.partial", "w+", NPY_TYPES.get(rows_VD.dtype, np.float32), tuple(rows_VD.shape)
    )
    for start in range(0, len(rows_VD), chunk_rows):
        chunk = rows_VD[start : start + chunk_rows].cpu()
        file[start : start + chunk_rows] = (
            chunk if chunk.dtype in NPY_TYPES else chunk.float()
        ).numpy()
    file.flush()
    os.replace(f"{path}.partial", path)


def rows_of(rows_VD: np.ndarray) -> Callable[[Tensor], Tensor]:
    """An initialiser for tables that reads runs of rows from an array."""
    return lambda rows_n: torch.from_numpy(np.array(rows_VD[int(rows_n[0]) : int(rows_n[-1]) + 1]))
