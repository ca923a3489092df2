"""Tables to disk: one safetensors file each, every field under its own name, nothing that unpickles."""

from __future__ import annotations

import os
from pathlib import Path

from safetensors.torch import load_file, save_file

from w2v.table import Table


def save_table(table: Table, folder: Path) -> Path:
    """Write `<name>.safetensors`: "weight" [V, D], the optimizer's states [V, D] or [V, 1], and its scalars; all float32.

    Written aside and renamed, so that no half-written file is ever seen under its name.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{table.name}.safetensors"
    fields = {name: table[name].cpu().contiguous() for name in table.columns}
    save_file(fields | {f"scalar.{name}": value.cpu() for name, value in table.scalars.items()}, f"{path}.partial")
    os.replace(f"{path}.partial", path)
    return path


def load_table(table: Table, folder: Path) -> None:
    """Fill the table from the file that `save_table` wrote; its fields and shapes must be the same."""
    path = folder / f"{table.name}.safetensors"
    fields = load_file(path)
    expected = {name: table[name].shape for name in table.columns} | {f"scalar.{name}": v.shape for name, v in table.scalars.items()}
    found = {name: value.shape for name, value in fields.items()}
    if found != expected:
        raise ValueError(f"{path} holds {_shapes(found)}, but this model has {_shapes(expected)}; use the config it was saved with")
    for name in table.columns:
        table[name].copy_(fields[name])
    for name, value in table.scalars.items():
        value.copy_(fields[f"scalar.{name}"])


def _shapes(shapes: dict) -> str:
    return ", ".join(f"{name} {'x'.join(map(str, shape)) or 'scalar'}" for name, shape in sorted(shapes.items()))
