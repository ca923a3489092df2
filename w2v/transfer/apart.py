"""The engine for a table that is used by itself; and weights and optimizer state hosted apart, such as weights on the GPU and state in
pinned memory."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from w2v.kernels.batch import Held, Page
from w2v.model.table import Init, RowState, Storage, Table, record_columns
from w2v.transfer.engine import Engine
from w2v.transfer.mapped import Mapped
from w2v.transfer.paged import Paged
from w2v.transfer.resident import Resident
from w2v.transfer.staged import Staged


class TableApart:
    """What a `Table` is to those who name its fields, made of two: one of weights, and one of states."""

    def __init__(
        self,
        name: str,
        rows: int,
        dim: int,
        states: Mapping[str, RowState],
        scalars: Mapping[str, Tensor],
        storage: Storage,
        dtype: torch.dtype,
        state_storage: Storage,
    ):
        if not states:
            raise ValueError(
                f"state_storage={state_storage!r}: this optimizer keeps no state; leave state_storage out"
            )
        self.weights = Table(name, rows, dim, {}, {}, storage, dtype)
        (self._first, state), *others = states.items()
        # The first state takes the place of the weight, so that a record has no room that is not used.
        self.states = Table(
            f"{name}-state", rows, state.width, dict(others), scalars, state_storage, dtype
        )
        self.states["weight"].fill_(state.initial)
        self.columns = record_columns(dim, states)
        self.name, self.rows, self.dim, self.dtype, self.storage = name, rows, dim, dtype, storage
        self.continued = False

    def __getitem__(self, name: str) -> Tensor:
        """A view of one field of all rows, as `Table` gives it."""
        return (
            self.weights["weight"]
            if name == "weight"
            else self.states["weight" if name == self._first else name]
        )

    @property
    def scalars(self) -> dict[str, Tensor]:
        return self.states.scalars

    @property
    def bytes(self) -> int:
        return self.weights.bytes + self.states.bytes

    def initialise(self, values: Init, device: torch.device | None = None) -> None:
        """Set the weights."""
        self.weights.initialise(values, device)

    def is_in(self, path: object) -> bool:
        return False

    def flush(self) -> None:
        """Nothing is in a file."""


class Apart(Engine):
    """An engine for a `TableApart`: each of its two tables by an engine of its own."""

    pages = True

    def __init__(self, weights: Engine, states: Engine):
        self._weights, self._states = weights, states

    @property
    def rows_used(self) -> int:
        return self._states.rows_used

    @property
    def rows_read(self) -> int:
        return self._weights.rows_read + self._states.rows_read

    @property
    def rows_written(self) -> int:
        return self._weights.rows_written + self._states.rows_written

    @property
    def waited(self) -> float:
        return self._weights.waited + self._states.waited

    def prefetch(self, marks_TV: Tensor, soon_V: Tensor | None = None) -> None:
        """Nothing is brought ahead."""

    def fetch(self, table: TableApart, rows_U: Tensor) -> Page:
        weights, states = (
            self._weights.fetch(table.weights, rows_U),
            self._states.fetch(table.states, rows_U),
        )
        used = sum(column.stop - column.start for column in table.columns.values()) - table.dim
        records_UR = torch.cat(
            [weights.records_UR[:, : table.dim], states.records_UR[:, :used]], dim=1
        )
        return Page(table, rows_U, records_UR, table.columns, parts=(weights, states))

    def write_back(self, page: Page) -> None:
        weights, states = page.parts
        dim, end = page.table.dim, page.records_UR.shape[1]
        weights.records_UR[:, :dim] = page.records_UR[:, :dim]
        states.records_UR[:, : end - dim] = page.records_UR[:, dim:]
        self._weights.write_back(weights)
        self._states.write_back(states)

    def hold(self, table: Table) -> Held:
        raise NotImplementedError(
            "weights and states lie apart, and the kernels take them together"
        )

    def flush(self) -> None:
        self._weights.flush()
        self._states.flush()


def engine_between(table: Table | TableApart, device: torch.device) -> Engine:
    """What brings the table's rows to the device that computes, by where they are."""
    if isinstance(table, TableApart):
        return Apart(engine_between(table.weights, device), engine_between(table.states, device))
    if table.records_VR.device.type == device.type:
        return Resident()
    return Paged(Mapped() if table.storage == "pinned" else Staged())
