"""Rows of embedding tables for any autograd model: larger than the GPU, stepped by any row-separable torch optimizer.

    users = Embedding(1_000_000, 64, optimizer="Adamax", lr=0.1, storage="pinned")
    page = users.page(ids)       # the rows of these ids, each once, on the compute device
    loss = model(page.vectors)   # [*ids.shape, D]; page.weight [U, D] is an ordinary Parameter
    loss.backward()
    users.step(page)             # optimizer step, and back into the table

Shapes: V rows, D dimensions, U unique rows of a page, R elements of a record. Bad input raises a `ValueError` of one line, and
nothing is written.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from w2v.config import OptimizerConfig
from w2v.kernels.batch import Page
from w2v.model import table_file as tablefile
from w2v.model.optim import RowOptimizer
from w2v.model.row_file import NPY_TYPES, open_npy, rows_of, save_npy
from w2v.model.table import Init, Storage, Table, normal
from w2v.transfer.apart import TableApart, engine_between

Ids = (
    Tensor | np.ndarray | Sequence[int]
)  # of any shape, int32 or int64, on any device; an id may occur more than once


class _Rows:
    """What `RowStore` and `Embedding` share: a table, the device that computes, and the engine between them."""

    def __init__(
        self,
        table: Table | TableApart,
        device: torch.device | str | None,
        init: Init | None,
        default: Init | None = None,
    ):
        self.table, self.device = (
            table,
            _open_device(device, table.weights if isinstance(table, TableApart) else table),
        )
        self._engine = engine_between(table, self.device)
        self._in_flight: weakref.WeakSet[EmbeddingPage] = (
            weakref.WeakSet()
        )  # a page that is dropped is released
        if not table.continued:
            if init or default:
                table.initialise(init or default, None if init else self.device)
            self.flush()

    def __len__(self) -> int:
        return self.table.rows

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self)}, {self.table.dim}, storage={self.table.storage!r}, device={str(self.device)!r})"

    @property
    def bytes(self) -> int:
        """What the table takes in its storage: weights, optimizer state and padding."""
        return self.table.bytes

    def get(self, ids: Ids) -> Tensor:
        """The table's rows in the order asked: [*ids.shape, D] in the table's dtype, on the compute device."""
        rows_U, slots = self._unique(ids)
        return self._engine.fetch(self.table, rows_U)["weight"][slots].to(self.table.dtype)

    def put(self, ids: Ids, values: Tensor | np.ndarray) -> None:
        """Set rows to `values` [*ids.shape, D], of any floating-point dtype; optimizer state stays. The last of equal ids wins."""
        values = torch.as_tensor(values)
        if not values.is_floating_point() or values.is_meta:
            raise ValueError(
                f"values are {values.dtype} on {values.device}; give numbers in floating point, such as values.float()"
            )
        rows_U, slots = self._unique(ids, exclusive=True)
        if values.shape != (*slots.shape, self.table.dim):
            raise ValueError(
                f"values have shape {list(values.shape)}, but these ids take {[*slots.shape, self.table.dim]}"
            )
        order = torch.arange(slots.numel(), device=self.device)
        last_U = torch.zeros_like(rows_U).scatter_reduce_(0, slots.flatten(), order, "amax")
        page = self._engine.fetch(self.table, rows_U)
        # To nearest here, so that what the table holds is what was given; rounding it once more changes nothing.
        page["weight"].copy_(
            values.to(self.device).reshape(-1, self.table.dim)[last_U].to(self.table.dtype)
        )
        self._engine.write_back(page)

    def save(self, path: str | Path) -> None:
        """Write the weights to an .npy file [V, D] (bfloat16 as float32), or weights and optimizer state to a .safetensors file.

        Rows of pages in flight are saved as they were before. Written aside and renamed, so that the file is always whole.
        """
        self.flush()
        if _ending(path) == ".safetensors":
            tablefile.save(self.table, Path(path))
        elif not self.table.is_in(path):
            save_npy(path, self.table["weight"])

    def load(self, path: str | Path) -> None:
        """Read what `save` wrote: all of a .safetensors file, or the weights of an .npy file, optimizer state staying as it is.

        Raises `ValueError` where the file's rows, dimensions, fields or dtype are not the table's.
        """
        if pages := [page for page in self._in_flight if page._held]:
            raise ValueError(
                f"{len(pages)} page(s) are in flight, which would overwrite rows of {path}; step or release them first"
            )
        self._engine.flush()
        dtype, shape = self.table.dtype, (self.table.rows, self.table.dim)
        if _ending(path) == ".safetensors":
            tablefile.load(self.table, Path(path))
            return
        rows_VD, wanted = open_npy(path), np.dtype(NPY_TYPES.get(dtype, np.float32))
        if rows_VD.shape != shape or rows_VD.dtype != wanted:
            raise ValueError(
                f"{path} holds {rows_VD.shape} {rows_VD.dtype}, but the table takes {shape} {wanted}"
            )
        self.table.initialise(rows_of(rows_VD))

    def flush(self) -> None:
        """Return when the table holds all that was put or stepped; with storage="mmap", when it is on disk (see `Table`)."""
        self._engine.flush()
        self.table.flush()

    def _unique(self, ids: Ids, exclusive: bool = False) -> tuple[Tensor, Tensor]:
        """The sorted unique rows on the compute device, and where each id is among them; all checks wait for the device once.

        exclusive: refuse rows that a page in flight has.
        """
        ids = torch.as_tensor(ids)
        if ids.dtype not in (torch.int32, torch.int64) or ids.is_meta:
            raise ValueError(
                f"ids are {ids.dtype} on {ids.device}; give int32 or int64 on the CPU or a GPU, such as ids.long()"
            )
        rows_U, slots = torch.unique(ids.to(self.device, torch.int64), return_inverse=True)
        if not len(rows_U):
            return rows_U, slots
        facts = [rows_U[0], rows_U[-1]]
        if exclusive:
            taken = (torch.isin(rows_U, page.rows) for page in self._in_flight if page._held)
            facts += [
                torch.where(is_taken_U, rows_U, self.table.rows).min() for is_taken_U in taken
            ]
        first, last, *shared = torch.stack(facts).tolist()
        if first < 0 or last >= self.table.rows:
            raise ValueError(
                f"id {first if first < 0 else last} is not a row; the table's {len(self)} rows are 0 to {len(self) - 1}"
            )
        if shared and min(shared) < self.table.rows:
            raise ValueError(
                f"row {min(shared)} is also in another page in flight; step or release that page first"
            )
        return rows_U, slots


class RowStore(_Rows):
    """V rows of D numbers without an optimizer, in memory of any kind, read and written by row number.

    storage: "cpu", "cuda", "pinned" (CPU memory that the GPU reads in place), or "mmap" (the file `path`: an .npy file, which may exist,
    or records with 128-byte alignment and a .json beside them; see `Table` for what is promised).
    device: where `get` gives rows; by default the GPU for "cuda" and "pinned", the CPU for "cpu" and "mmap".
    init: maps row numbers [n] to rows [n, D], on the table's device; by default rows are zero. An existing file keeps its rows.
    """

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
        super().__init__(Table("rows", num_rows, dim, {}, {}, storage, dtype, path), device, init)

    @classmethod
    def open(
        cls, path: str | Path, *, storage: Storage = "cpu", device: torch.device | str | None = None
    ) -> RowStore:
        """The rows of an .npy file in floating point: with storage="mmap" the file itself, where `put` changes it, else a copy."""
        rows_VD = open_npy(path)
        dtype = next(kind for kind, npy in NPY_TYPES.items() if rows_VD.dtype == npy)
        if storage == "mmap":
            return cls(*rows_VD.shape, storage=storage, device=device, dtype=dtype, path=path)
        return cls(
            *rows_VD.shape, storage=storage, device=device, dtype=dtype, init=rows_of(rows_VD)
        )


class Embedding(_Rows):
    """An embedding of V rows whose weights and optimizer state are paged: `page(ids)`, backward, `step(page)`.

    Only rows of a page are stepped; the others keep weight and state, as with torch.optim.SparseAdam. A page of all rows steps as that
    optimizer does with nn.Embedding, bit for bit in float32.

    optimizer, optimizer_args: the name of a row-separable torch.optim class and its arguments; sparse rows want an `lr` 10 to 200 times
    torch's default. `lr` is an attribute, and an argument of `step`.
    step: "table" has bias correction count the steps of the table, "row" those of each row.
    storage, device, dtype, path: as for `RowStore`, of weights and state; with 16-bit elements the step still computes in float32.
    state_storage: where the optimizer state is instead, such as "pinned" for storage="cuda"; "cpu", "cuda" or "pinned".
    init: maps row numbers [n] to weights [n, D], on the table's device; by default normal with standard deviation 1, as in
    nn.Embedding, keyed by (seed, row, column). `w2v.model.table` has `normal` and `uniform`.
    """

    def __init__(
        self,
        num_rows: int,
        dim: int,
        *,
        optimizer: str,
        lr: float,
        optimizer_args: dict[str, Any] | None = None,
        step: Literal["table", "row"] = "table",
        storage: Storage = "cpu",
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.float32,
        path: str | Path | None = None,
        seed: int = 1,
        init: Init | None = None,
        state_storage: Storage | None = None,
    ):
        if step not in ("table", "row"):
            raise ValueError(f"step={step!r} is unknown; choose 'table' or 'row'")
        self.lr = lr
        self._optimizer = RowOptimizer(
            OptimizerConfig(name=optimizer, lr=lr, args=optimizer_args or {}, step=step)
        )
        states, scalars = self._optimizer.states(dim), self._optimizer.scalars
        shape = "embedding", num_rows, dim, states, scalars, storage, dtype
        if state_storage and "mmap" in (storage, state_storage):
            raise ValueError(
                f"state_storage={state_storage!r} with storage={storage!r}: a file holds both; leave state_storage out"
            )
        table = TableApart(*shape, state_storage) if state_storage else Table(*shape, path)
        super().__init__(table, device, init, normal(dim, 1.0, seed))

    def page(self, ids: Ids) -> EmbeddingPage:
        """Fetch the rows of `ids` for a step; until it is stepped or released, no other page may have any of them."""
        rows_U, slots = self._unique(ids, exclusive=True)
        page = EmbeddingPage(self._engine.fetch(self.table, rows_U), slots)
        self._in_flight.add(page)
        return page

    def step(self, page: EmbeddingPage, lr: float | None = None) -> None:
        """Step the page's rows by `page.weight.grad` and write them back; the page is spent.

        Without a gradient (the page was not used in the loss) there is no optimizer step. `lr` is for this step; by default `self.lr`.
        """
        lr = self.lr if lr is None else lr
        if not (math.isfinite(lr) and lr >= 0):
            raise ValueError(f"lr={lr} is no learning rate; it must be a number from 0 up")
        records, _, weight = page._open()
        if page not in self._in_flight:
            raise ValueError(
                f"this page is not one of {self!r}; step it with the embedding that made it"
            )
        records.grad_UD = weight.grad
        with torch.no_grad():
            if weight.grad is not None:
                self._optimizer.step(records, lr)
            self._engine.write_back(records)
        page.release()


class EmbeddingPage:
    """Rows of an `Embedding`, on the compute device and owned by this page until it is stepped or released.

    A page that is dropped is released: its rows stay as they are in the table. After that its fields raise `ValueError`.
    """

    def __init__(self, records: Page, slots: Tensor):
        self._held: tuple[Page, Tensor, nn.Parameter] | None = (
            records,
            slots,
            nn.Parameter(records["weight"]),
        )

    @property
    def weight(self) -> nn.Parameter:
        """The rows, each once, in the order of `rows`: [U, D] float32; its `grad` is what `step` goes by."""
        return self._open()[2]

    @property
    def rows(self) -> Tensor:
        """The row numbers, sorted and unique: [U] int64."""
        return self._open()[0].rows_U

    @property
    def slots(self) -> Tensor:
        """Where in `weight` each id's row is: int64, of the ids' shape."""
        return self._open()[1]

    @property
    def vectors(self) -> Tensor:
        """The rows in the order asked: [*ids.shape, D]; autograd sums the gradients of equal ids."""
        return F.embedding(self.slots, self.weight)

    def release(self) -> None:
        """Give the rows up without writing anything."""
        self._held = None

    def _open(self) -> tuple[Page, Tensor, nn.Parameter]:
        if self._held is None:
            raise ValueError(
                "this page is spent: it was written back or released; ask for a new one with page(ids)"
            )
        return self._held


def _open_device(device: torch.device | str | None, table: Table) -> torch.device:
    """The compute device, by default the one that the storage is for; with its index, where it has one."""
    wanted = str(device or ("cuda" if table.storage in ("cuda", "pinned") else "cpu"))
    try:
        opened = torch.empty(0, device=wanted).device
    except (RuntimeError, AssertionError) as error:
        raise ValueError(
            f"device={wanted!r} cannot be used: {str(error).splitlines()[0]}; use device='cpu'"
        ) from None
    if opened.type not in ("cpu", "cuda") or (
        opened.type == "cuda" and opened != torch.empty(0, device="cuda").device
    ):
        raise ValueError(
            f"device={wanted!r} is not the CPU or the current GPU; select a GPU with torch.cuda.set_device"
        )
    if table.storage == "cuda" and opened != table.records_VR.device:
        raise ValueError(
            f"device={wanted!r} cannot compute on a table with storage='cuda'; use device='cuda', or storage='cpu'"
        )
    return opened


def _ending(path: str | Path) -> str:
    ending = Path(path).suffix
    if ending not in (".npy", ".safetensors"):
        raise ValueError(
            f"{path} has the ending {ending!r}; choose .npy for the weights, or .safetensors for weights and state"
        )
    return ending
