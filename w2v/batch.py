"""The records that travel through a step: what to learn from (`Batch`) and the rows it touches (`Page`).

Shapes: B centers, C = 2 * window context positions, K negatives, U unique rows, D dimensions, R elements of a record.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

if TYPE_CHECKING:
    from w2v.table import Table


class Batch(NamedTuple):
    """Centers with their context words and noise words, as rows of the vocabulary (int64)."""

    centers_B: Tensor
    contexts_BC: Tensor
    context_mask_BC: Tensor  # bool: False where the window is smaller or leaves the sentence
    negatives_BK: Tensor
    negative_mask_BK: Tensor  # bool: False where the noise word is the center itself
    epochs_done: float  # passes over the corpus that are done with this batch


@dataclass
class Page:
    """Records of some rows of a table, on the compute device, between fetch and write-back."""

    table: Table
    rows_U: Tensor  # int64, sorted and unique
    records_UR: Tensor
    columns: Mapping[str, slice]
    grad_UD: Tensor | None = None
    slots_U: Tensor | None = None  # where an engine that keeps records on the GPU has these

    def __getitem__(self, name: str) -> Tensor:
        """A view of one field, "weight" or an optimizer state, of all rows: [U, D], or [U, 1] for a state kept once a row."""
        return self.records_UR[:, self.columns[name]]
