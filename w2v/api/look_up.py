"""Look-ups: the unique rows of ids, of several tables at once.

Shapes: N ids, U unique rows, D dimensions.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from w2v.kernels import cuda, cuda_cache
from w2v.kernels.cuda import Bags
from w2v.transfer.cache import RowUses
from w2v.transfer.streams import current_stream

if TYPE_CHECKING:
    pass

Ids = Tensor | np.ndarray | Sequence[int]  # int32 or int64, of any shape, on any device

_pinned: set[int] = set()  # addresses of memory that was pinned when it was seen


class Later:
    """Numbers that kernels write to pinned memory, for the CPU to read later.

    Memory and events are used again: to allocate them takes as long as a kernel's launch.
    """

    _free: ClassVar[dict[int, list[tuple[Tensor, torch.cuda.Event]]]] = {}

    def __init__(self, count: int):
        self._pool = self._free.setdefault(count, [])
        try:
            self.numbers, self._event = self._pool.pop()
            self._event.synchronize()  # until the last kernel that was given them is done
        except IndexError:
            self.numbers = torch.empty(count, dtype=torch.int64, pin_memory=True)
            self._event = torch.cuda.Event()

    def __del__(self) -> None:
        self._pool.append((self.numbers, self._event))

    def launched(self) -> None:
        """Say that the kernel is on the current stream."""
        current_stream().record_event(self._event)

    @property
    def is_known(self) -> bool:
        return self._event.query()

    def read(self) -> list[int]:
        self._event.synchronize()
        return self.numbers.tolist()


class LookUp:
    """Unique rows of the ids of tables of one group, which are found together.

    The CPU waits for them when it asks for `rows`.

    Args:
        parts: The ids of each table, which get their places. On a GPU all tables take one launch.
        number: Number of the page, 0 for ids that were not announced.
        is_filled: Whether -1 stands behind the rows on a GPU, and for all if an id is no row.

    Attributes:
        group: The group that the tables were in.
        stores: The tables.
        places_N: The place of each id among the rows.
        rows_N: The rows of all tables, on a GPU in a buffer as long as the ids.
        narrow_N: They in 32 bits, on a GPU.
        count: Their number, first of some on the GPU.
        begins: Where the rows of each table begin, and where the last end; known with `rows`.
        paddings: The place of each padding row among those of its table; known with `rows`.
        sums_UD: The sums of gradients, once there are some.
        is_given: Whether vectors of all tables were made together.
        waiting: Those that were not asked for yet, by the index of their table, with what they were
            made of.
    """

    narrow_N: Tensor | None = None
    count: Tensor | None = None
    sums_UD: Tensor | None = None
    begins: list[int]
    paddings: list[int | None]

    # It must not know its parts, which know it: memory of a cycle is freed late.
    def __init__(self, parts: Sequence[UniqueRows], number: int = 0, is_filled: bool = False):
        self.number = number
        self.group = parts[0].store.group
        self.stores = [part.store for part in parts]
        self._later: Later | None = None
        self._buffer_UD: Tensor | None = None  # of the sums
        self.is_given = False
        self.waiting: dict[int, tuple[Any, Tensor]] = {}
        self._sums: dict[int, Tensor] = {}  # of each table, in `sums_UD`
        sizes = [part.shape.numel() for part in parts]
        store = parts[0].store
        uses = store.uses
        if store.device.type == "cuda" and any(sizes):
            ids_N = _joined([part.ids for part in parts], store.device)
            spans = tuple(
                cuda_cache.Span(size, len(part.store), part.store.first_row, part.padding_row)
                for size, part in zip(sizes, parts, strict=True)
            )
            self._later = Later(cuda_cache.numbers_of(len(parts)))
            counted = uses.count_V, uses.page_of_V if number else None, number
            self.places_N, self.rows_N, self.narrow_N, self.count = cuda_cache.find_rows(
                ids_N, _spans_of(spans, store.device), *counted, self._later.numbers, is_filled
            )
            self._later.launched()
        else:
            self._look_up_on_cpu(parts, uses)
        self._ends = list(itertools.accumulate(sizes))  # of ids
        for index, part in enumerate(parts):
            part.look_up, part.index = self, index
        if number:
            uses.announced = number

    def _look_up_on_cpu(self, parts: Sequence[UniqueRows], uses: RowUses) -> None:
        """Find the rows by torch."""
        found, places, self._numbers = [], [], [0, 0]
        for part in parts:
            rows = len(part.store)
            rows_U, its_places = torch.unique(
                part.ids.to(part.store.device, torch.int64).flatten(), return_inverse=True
            )
            first, last = (int(rows_U[0]), int(rows_U[-1])) if len(rows_U) else (0, 0)
            last = last if last >= rows else 0
            padding = -1 if part.padding_row is None else part.padding_row
            place = torch.nonzero(rows_U == padding)
            found.append(rows_U + part.store.first_row)
            places.append(its_places + self._numbers[0])
            its = self._numbers[0], min(0, first), last, int(place) + 1 if len(place) else 0
            self._numbers += its
            self._numbers[0] += len(rows_U)
            self._numbers[1] |= first < 0 or last > 0
        self.rows_N, self.places_N = torch.cat(found), torch.cat(places)
        if not self._numbers[1]:
            uses.note(self.rows_N, self.number)

    @property
    def is_known(self) -> bool:
        """Whether `rows` need not wait."""
        return self._later is None or self._later.is_known

    @functools.cached_property
    def rows(self) -> Tensor:
        """The unique rows of all tables, sorted: int64 [U].

        Raises:
            IndexError: An id is not a row.
        """
        if self._later:
            self._numbers = self._later.read()
            self._later = None
        count, is_wrong, *numbers = self._numbers
        for store, least, greatest in zip(self.stores, numbers[1::4], numbers[2::4], strict=True):
            if is_wrong and (least or greatest):
                last = len(store) - 1
                raise IndexError(f"id {least or greatest} is not a row; rows are 0 to {last}")
        self.begins = [*numbers[::4], count]
        self.paddings = [place - 1 if place else None for place in numbers[3::4]]
        return self.rows_N[:count]

    def places_of(self, index: int) -> Tensor:
        """Return the places of a table's ids."""
        if len(self._ends) == 1:
            return self.places_N
        return self.places_N[self._ends[index - 1] if index else 0 : self._ends[index]]

    def vectors(self, index: int | None, bags: Bags | None = None) -> Tensor:
        """Return vectors of a table's ids or bags; None: of the ids of all tables."""
        which = self._places(index)
        return self.group.read_weights(self.rows, self.narrow_N, which[0], bags, which[1])

    def _places(self, index: int | None) -> tuple[Tensor, int | None]:
        """Return the place of each id of a table, and that of its padding row."""
        if index is None:
            return self.places_N, None
        padding = self.paddings[index] if len(self.rows) else None
        its_padding = None if padding is None else self.begins[index] + padding
        return self.places_of(index), its_padding

    def add_gradients(self, index: int, grad_ND: Tensor, bags: Bags | None = None) -> Tensor:
        """Return sums [U, D] of a table's gradients, beside other tables'."""
        places_N, padding = self._places(index)
        (sums_UD,) = self.add_at([index], grad_ND, places_N, bags, padding).values()
        return sums_UD

    def add_at(
        self,
        tables: Sequence[int],
        grad_ND: Tensor,
        places_N: Tensor,
        bags: Bags | None = None,
        padding: int | None = None,
    ) -> dict[int, Tensor]:
        """Add gradients at places among all rows; return the sums of tables."""
        rows = self.rows.shape[0]
        if self.sums_UD is None:
            self._buffer_UD = self._new_sums(rows)
            self.sums_UD = self._buffer_UD[:rows]
        is_first = self._sums.keys().isdisjoint(tables)  # else an earlier pass's wait there
        all_UD = self.sums_UD if is_first else torch.zeros_like(self.sums_UD)
        cuda.sum_gradients(grad_ND, places_N, all_UD, bags, padding)
        sums = {its: all_UD[self.begins[its] : self.begins[its + 1]] for its in tables}
        if is_first:
            self._sums |= sums
        return sums

    def _new_sums(self, rows: int) -> Tensor:
        return self.group.zeros(rows)

    def has_all(self, grads: dict[int, Tensor]) -> bool:
        """Whether these gradients, by table, are the sums of all tables."""
        # Gradients are scaled and clipped in place: they are the same tensors.
        tables = range(len(self.stores))
        return all(grads.get(index) is self._sums.get(index, self) for index in tables)

    def drop_sums(self) -> None:
        """Begin anew once the sums were stepped, which has made them 0."""
        self.group.keep_zeros(self._buffer_UD)
        self.sums_UD = self._buffer_UD = None
        self._sums.clear()


class UniqueRows:
    """The unique rows of ids, for which the CPU waits when it asks for them.

    Rows are numbered through the tables that share their memory, from `store.first_row` on.

    Args:
        store: The table.
        given: The ids.
        padding: A row whose place is wanted.
        is_filled: As for a `LookUp`.
        alone: Whether to look them up now; else a `LookUp` with others does.

    Attributes:
        shape: Shape of the ids.
        look_up: The rows of all tables that were looked up together.
        index: Which of these tables it is.
    """

    look_up: LookUp
    index: int

    def __init__(
        self,
        store: Any,  # Rows, or what stands for them
        given: Ids,
        padding: int | None = None,
        is_filled: bool = False,
        alone: bool = True,
    ):
        self.store = store
        self._given = given  # keeps its memory from becoming that of others
        self._name = name_of(given)
        self.padding_row = padding
        self.ids = torch.as_tensor(given)
        if not self.ids.numel():
            self.ids = self.ids.long()  # an empty list has become float32
        if self.ids.dtype not in (torch.int32, torch.int64) or self.ids.is_meta:
            raise ValueError(f"ids are {self.ids.dtype} on {self.ids.device}; give int32 or int64")
        self.shape = self.ids.shape
        if alone:
            LookUp([self], is_filled=is_filled)

    @property
    def owned(self) -> UniqueRows:
        """The rows that this process reads and steps."""
        return self

    def is_of(self, ids: Ids) -> bool:
        """Whether these are the ids, and rows are numbered as they were."""
        return self.look_up.group is self.store.group and self._name == name_of(ids)

    @functools.cached_property
    def rows(self) -> Tensor:
        """The unique rows, sorted: int64 [U].

        Raises:
            IndexError: An id is not a row, of this table or one that was looked up with it.
        """
        rows_U, begins = self.look_up.rows, self.look_up.begins
        return rows_U[begins[self.index] : begins[self.index + 1]]

    @property
    def places_N(self) -> Tensor:
        """The place of each id among the rows."""
        places_N = self.look_up.places_of(self.index)
        # The first table's need not wait for the rows.
        begin = self.look_up.begins[self.index] if self.index and len(self.rows) else 0
        return places_N - begin if begin else places_N

    @property
    def padding(self) -> int | None:
        """The place of the padding row among the rows, if it is there."""
        return self.look_up.paddings[self.index] if len(self.rows) else None


def look_up_together(found: Sequence[UniqueRows], is_ahead: bool = True) -> None:
    """Begin to look up rows, in all tables of a group at once.

    Those of a page, whose ids are read ahead, are evicted last.
    """
    by_group: dict[Any, list[UniqueRows]] = {}
    for its in found:
        by_group.setdefault(its.store.group, []).append(its)
    for group, parts in by_group.items():
        with group.lock:
            LookUp(parts, group.uses.announced + 1 if is_ahead else 0)


@functools.lru_cache(maxsize=64)
def _spans_of(spans: tuple[cuda_cache.Span, ...], device: torch.device) -> cuda_cache.Spans:
    return cuda_cache.Spans.of(spans, device)


def _joined(ids: Sequence[Tensor], device: torch.device) -> Tensor:
    """Return all ids on the GPU: int64 [N]."""
    if len(ids) == 1:
        return to_device(ids[0], device).long().flatten()
    flat = [its.flatten() for its in ids]
    if all(its.is_cuda for its in flat):
        return torch.cat(flat).long()
    # The others are most likely as the first: to ask takes long, and a wrong answer only waits.
    if not any(its.is_cuda for its in flat) and not _is_pinned(flat[0]):
        # One copy in place of many.
        return torch.cat(flat).long().pin_memory().to(device, non_blocking=True)
    ids_N = torch.empty(sum(map(len, flat)), dtype=torch.int64, device=device)
    for part, its in zip(ids_N.split([len(its) for its in flat]), flat, strict=True):
        part.copy_(its, non_blocking=True)
    return ids_N


def to_device(values: Tensor, device: torch.device) -> Tensor:
    """Copy to the device; unpinned memory alone would wait for it."""
    is_sent = device.type == "cuda" and values.device.type == "cpu"
    if is_sent and not _is_pinned(values):
        values = values.pin_memory()
    return values.to(device, non_blocking=True)


def _is_pinned(values: Tensor) -> bool:
    """Whether memory of the CPU is pinned, or was when it was seen."""
    address = values.data_ptr()
    if address in _pinned:  # to ask takes 30 us
        return True
    if len(_pinned) > 4096:
        _pinned.clear()
    if is_pinned := values.is_pinned():
        _pinned.add(address)
    return is_pinned


def name_of(ids: Ids) -> Any:
    """Return what tells these ids from others, without looking at them."""
    if not isinstance(ids, Tensor):
        return id(ids)
    changes = 0 if ids.is_inference() else ids._version
    return ids.data_ptr(), ids.shape, ids.stride(), ids.dtype, ids.device, changes
