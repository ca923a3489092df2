"""A table in a safetensors file of its own, optimizer state included: what `w2v.api.embedding` saves and loads."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from w2v.model.table import Table
from w2v.system.files import apply_umask
from w2v.training.shards import DTYPES

if TYPE_CHECKING:
    from w2v.transfer.apart import TableApart


def save(table: Table | TableApart, path: Path) -> None:
    """Write "weight" [V, D], the optimizer's states [V, D] or [V, 1], and its scalars; in the table's dtype.

    Written aside and renamed, so that no half-written file is ever seen under its name.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    fields = {name: table[name].cpu().contiguous() for name in table.columns}
    aside = Path(f"{path}.partial")
    save_file(
        fields | {f"scalar.{name}": value.cpu() for name, value in table.scalars.items()}, aside
    )
    apply_umask(aside)
    os.replace(aside, path)


def load(table: Table | TableApart, path: Path) -> None:
    """Fill the table from the file that `save` wrote. Raises `ValueError` where its fields, shapes or dtype are not the table's."""
    try:
        with safe_open(path, "pt") as file:
            dtype = file.get_slice("weight").get_dtype()
    except SafetensorError as error:
        raise ValueError(
            f"{path} is not a safetensors file of a table: {' '.join(str(error).split())}"
        ) from None
    if dtype != DTYPES[table.dtype]:
        raise ValueError(
            f"{path} holds {dtype}, but the table is {table.dtype}; make the table with the dtype of the file"
        )
    fields = load_file(path)
    expected = {name: table[name].shape for name in table.columns} | {
        f"scalar.{name}": v.shape for name, v in table.scalars.items()
    }
    found = {name: value.shape for name, value in fields.items()}
    if found != expected:
        raise ValueError(
            f"{path} holds {_shape_list(found)}, but the table has {_shape_list(expected)}; make one like the file"
        )
    for name in table.columns:
        table[name].copy_(fields[name])
    for name, value in table.scalars.items():
        value.copy_(fields[f"scalar.{name}"])


def _shape_list(shapes: dict) -> str:
    return ", ".join(
        f"{name} {'x'.join(map(str, shape)) or 'scalar'}" for name, shape in sorted(shapes.items())
    )
