"""The records that travel through a step: what to learn from (`Batch`) and the rows it touches (`Page`).

Shapes: n kept words of a chunk, B centers, K negatives, U unique rows, D dimensions, R elements of a record.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

if TYPE_CHECKING:
    from w2v.model.table import Table

CHUNK_BATCHES = (
    32  # about: a chunk of text holds as many raw words as this many batches hold centers
)


class Position(NamedTuple):
    """Where a sampler stands: the next batch to draw, by its place in the corpus."""

    epoch: int = 0
    chunk: int = 0
    batch: int = 0
    drawn: int = 0  # batches of the epoch before it


class Ahead(NamedTuple):
    """The words of the text after a batch, as far as it is looked ahead at: those of its pieces from `next` on."""

    last_piece_V: Tensor  # int32, the last piece that has the word, -1 for none
    next: int


class Batch(NamedTuple):
    """Some words of a text as centers, each with the size of its window and its noise words; words are rows of the vocabulary."""

    words_n: Tensor  # int32, the text: what subsampling has kept of a chunk
    sentences_n: Tensor  # int32, the sentence that each word is in
    first: int  # the centers are words_n[first : first + B]; their context words may lie beyond
    windows_B: Tensor  # int32, from 1 to `window`
    negatives_BK: Tensor  # int32; one that is the center itself does not count
    window: int
    epochs_done: float  # passes over the corpus that are done with this batch
    after: Position = Position()  # where the sampler stands once this batch is drawn
    pool: int = 0  # of how many words, drawn before, the noise words are picked; 0: each was drawn by itself
    ahead: Ahead | None = None


@dataclass
class Page:
    """Records of some rows of a table, on the compute device, between fetch and write-back."""

    table: Table
    rows_U: Tensor  # int64, sorted and unique
    records_UR: Tensor
    columns: Mapping[str, slice]
    grad_UD: Tensor | None = None
    pairs_U: Tensor | None = None  # of how many pairs each gradient is the sum
    slots_U: Tensor | None = None  # where an engine that keeps records on the GPU has these
    parts: tuple[Page, Page] | None = None  # of weights and of states, where these are hosted apart

    def __getitem__(self, name: str) -> Tensor:
        """A view of one field, "weight" or an optimizer state, of all rows: [U, D], or [U, 1] for a state kept once a row."""
        return self.records_UR[:, self.columns[name]]


class Held(NamedTuple):
    """Where the records of a table lie on the compute device, for kernels that work on them in place."""

    records_SR: Tensor
    slot_of_V: Tensor | None  # int32, the slot of each row that was asked for; None: the row itself
