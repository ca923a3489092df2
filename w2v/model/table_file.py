"""Weights, optimizer state and scalars of a table in a safetensors file."""

from __future__ import annotations

from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from w2v.model.table import Table
from w2v.system.files import apply_umask, atomic_path, one_line


def save(table: Table, path: Path) -> None:
    """Write "weight" [V, D], states [V, D] or [V, 1], and scalars."""
    path.parent.mkdir(parents=True, exist_ok=True)
    tensors = {name: value.cpu().contiguous() for name, value in _tensors(table).items()}
    with atomic_path(path) as temporary:
        save_file(tensors, temporary)
        apply_umask(temporary)  # safetensors allows only the owner to read


def load(table: Table, path: Path) -> None:
    """Fill the table from a file that `save` wrote.

    Raises `ValueError` if its fields, shapes or dtype differ; the table is then unchanged.
    """
    try:
        found = load_file(path)
    except SafetensorError as error:
        reason = one_line(error)
        raise ValueError(f"{path} is not a safetensors file of a table: {reason}") from None
    fields = _tensors(table)
    holds, expected = (
        {name: [*tensors[name].shape, str(tensors[name].dtype)] for name in sorted(tensors)}
        for tensors in (found, fields)
    )
    if holds != expected:
        differs = f"holds {holds}, but the table has {expected}"
        raise ValueError(f"{path} {differs}; make one like the file")
    # Nothing has been written so far, so a file that is refused changes nothing.
    for name, value in fields.items():
        value.copy_(found[name])


def _tensors(table: Table) -> dict[str, Tensor]:
    """Return views of all fields and scalars, by their names in the file."""
    fields = {name: table[name] for name in table.columns}
    return fields | {f"scalar.{name}": value for name, value in table.scalars.items()}
