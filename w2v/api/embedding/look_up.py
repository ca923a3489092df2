"""Look-ups: the unique rows of ids, of several tables at once.

Shapes: N ids, U unique rows, D dimensions.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from w2v.api.embedding.ids import Identity, Ids, Readback, as_tensor, joined
from w2v.kernels import cuda, cuda_cache
from w2v.kernels.cuda import Bags

if TYPE_CHECKING:
    from w2v.api.embedding.row_store import RowGroup, Rows

Function = TypeVar("Function", bound=Callable[..., Any])


class SpanNumbers(NamedTuple):
    """What `cuda_cache.find_rows` finds about the ids of one span."""

    begin: int  # rows before those of the span
    least: int  # the least id that is no row, or 0
    greatest: int  # the greatest id that is no row, or 0
    padding: int  # 1 + the place of the padding row, or 0


class ComputedVectors(NamedTuple):
    """Vectors of a table that were computed with those of others."""

    vectors: Tensor
    version: int  # of the table
    offsets: Identity  # of the bags


class LookUp:
    """Unique rows of ids, looked up in all tables of a group at once.

    On a GPU the CPU waits for them only when it reads `rows`. They are sorted by table; with
    several ranks each table has a span for each rank, and they are sorted by rank, then by table.

    Attributes:
        places_N: The place of each id's row among the unique rows.
        rows_N: The unique rows; on a GPU at the front of a buffer as long as the ids.
        narrow_N: The same buffer in 32 bits, on a GPU.
        known: On a GPU, as in `cuda_cache.FoundRows`: the first is the number of rows.
        last_N: The last id of each row, on a GPU if rows were to be filled.
        begins: Where the rows of each span begin, and where the last ones end; set with `rows`.
        paddings: The place of each table's padding row; set with `rows`.
        owned: With several ranks, the rows of each table that are requested from this rank.
        is_computed: Whether the vectors of all tables were computed together.
        computed: Those vectors that have not been used yet, by index of their table.
        sums: Sums of gradients, by index of the tables that have some.
    """

    narrow_N: Tensor | None = None
    known: Tensor | None = None
    last_N: Tensor | None = None
    begins: list[int]
    paddings: list[int | None]
    owned: list[UniqueRows] | None = None

    # It holds no reference to its tables' UniqueRows, which refer to it: the memory of cycles is
    # freed late.
    def __init__(
        self,
        group: RowGroup,
        spans: Sequence[cuda_cache.Span],  # the tables
        ids: Sequence[Tensor],  # of each table; with `are_rows`, rows of all in any order
        is_filled: bool = False,  # by a GPU: rest of `rows_N` with -1, all of it for a wrong id
        are_rows: bool = False,
    ):
        self.group = group
        self.spans = spans
        self.is_computed = False
        self.computed: dict[int, ComputedVectors] = {}
        self._readback: Readback | None = None  # numbers by span, until the CPU has read them
        self._buffer_UD: Tensor | None = None  # sums of gradients; U rows or more
        self._parts: Sequence[Tensor] = ()  # of these sums, by table
        self.sums: dict[int, Tensor] = {}
        counts = [given.numel() for given in ids]
        self._ends = list(itertools.accumulate(counts))  # of ids
        ranks = len(spans[0].first_rows)
        self.layout = group.layout  # the group has another one once a table has left it
        if group.device.type == "cuda" and any(counts):
            # Equal counts are in no key of `_spans_of`: they differ from batch to batch.
            each = counts[0] if counts.count(counts[0]) == len(counts) else 0
            self._readback = Readback(cuda_cache.numbers_of(len(spans) * ranks))
            found = cuda_cache.find_rows(
                joined(ids, group.device),
                _spans_of(tuple(spans), () if each else tuple(counts), group.device),
                each,
                self._readback.numbers,
                is_filled,
                are_rows,
            )
            self.places_N, self.rows_N, self.narrow_N, self.known, self.last_N = found
            self._readback.launched()
        else:
            flat = [given.to(group.device).long().flatten() for given in ids]
            self._look_up_on_cpu(flat, are_rows)

    def _look_up_on_cpu(self, ids: list[Tensor], are_rows: bool) -> None:
        """Find the rows as `cuda_cache.find_rows` does, by torch.

        The key of a row has its span in the upper half, and its place in the span in the lower one.
        With several ranks a table has a span for each rank: row v is in that of rank v % N.
        """
        spans, device = self.spans, ids[0].device
        tables, ranks = len(spans), len(spans[0].first_rows)
        firsts_S = torch.tensor([span.first_rows for span in spans], device=device).T.flatten()
        limits = [(0, 0)] * tables  # the least and the greatest id that is no row, or 0

        def key(table: int, row: Any) -> Any:
            return (row % ranks * tables + table << 32) + row // ranks

        if are_rows:
            span_N = torch.bucketize(ids[0], firsts_S, right=True) - 1
            keys_N = (span_N << 32) + ids[0] - firsts_S[span_N]
        else:
            for table, (ids_n, span) in enumerate(zip(ids, spans, strict=True)):
                least, greatest = map(int, ids_n.aminmax()) if ids_n.numel() else (0, 0)
                limits[table] = min(0, least), greatest if greatest >= span.rows else 0
            keys_N = torch.cat([key(table, ids_n) for table, ids_n in enumerate(ids)])
        self._is_wrong = any(least or greatest for least, greatest in limits)
        keys_N = keys_N[:0] if self._is_wrong else keys_N
        keys_U, self.places_N = torch.unique(keys_N, return_inverse=True)
        self._row_count = len(keys_U)
        self.rows_N = firsts_S[keys_U >> 32] + (keys_U & 0xFFFFFFFF)
        begins = torch.searchsorted(keys_U, torch.arange(tables * ranks, device=device) << 32)
        rows = (span.padding for span in spans)
        padding_keys = [-1 if row is None else key(table, row) for table, row in enumerate(rows)]
        padding_T = keys_U.new_tensor(padding_keys)
        end_T = torch.searchsorted(keys_U, padding_T, right=True)
        is_there_T = end_T > torch.searchsorted(keys_U, padding_T)
        paddings = (end_T * is_there_T).tolist() * ranks
        self._by_span = [
            SpanNumbers(begin, *limit, padding)
            for begin, limit, padding in zip(begins.tolist(), limits * ranks, paddings, strict=True)
        ]

    @property
    def is_known(self) -> bool:
        """Whether `rows` need not wait."""
        return self._readback is None or self._readback.is_known

    @functools.cached_property
    def rows(self) -> Tensor:
        """The unique rows of all tables, sorted: int64 [U].

        Raises:
            IndexError: An id is not a row.
        """
        if self._readback:
            self._row_count, is_wrong, *numbers = self._readback.read()
            self._is_wrong = bool(is_wrong)
            starts = range(0, len(numbers), len(SpanNumbers._fields))
            self._by_span = [SpanNumbers(*numbers[i : i + 4]) for i in starts]
            self._readback = None
        if self._is_wrong:
            # With several ranks, the spans of the first one have the limits of all ids.
            for span, found in zip(self.spans, self._by_span, strict=False):
                if wrong := found.least or found.greatest:
                    last = span.rows - 1
                    raise IndexError(f"id {wrong} is not a row; rows are 0 to {last}")
        self.begins = [*(found.begin for found in self._by_span), self._row_count]
        tables = len(self.spans)
        by_table = [self._by_span[table::tables] for table in range(tables)]  # a span for each rank
        places = [max(found.padding for found in spans) for spans in by_table]
        self.paddings = [place - 1 if place else None for place in places]
        return self.rows_N[: self._row_count]

    def places_of(self, index: int | None) -> Tensor:
        """Return the places of a table's ids; None: of all."""
        if index is None or len(self._ends) == 1:
            return self.places_N
        return self.places_N[self._ends[index - 1] if index else 0 : self._ends[index]]

    def page_of(self, rows: RowsOfIds) -> RowPage:
        """Return a table's rows as a page, before `vectors` reads them."""
        return RowPage(rows.store, rows)

    def vectors(self, index: int | None, bags: Bags | None = None) -> Tensor:
        """Return vectors of a table's ids or bags; None: of the ids of all tables."""
        return self.group.read_weights(
            self.rows, self.narrow_N, self.places_of(index), bags, self.left_out(index, bags)
        )

    def left_out(self, index: int | None, bags: Bags | None) -> int | None:
        """Return the place of a table's padding row, which bags leave out."""
        return self.paddings[index] if bags and index is not None else None

    def add_gradients(
        self,
        index: int | None,  # of the table; None: all tables
        grad_ND: Tensor,  # of its ids or bags
        bags: Bags | None,
        pending: dict[int, Tensor | None],  # the tables, with sums that wait for the step, if any
    ) -> list[Tensor]:
        """Add gradients by row; return the sums [U, D] of these tables."""
        sums_UD = self.sums_for(pending)
        padding = None if index is None else self.paddings[index]
        cuda.sum_gradients(grad_ND, self.places_of(index), sums_UD, bags, padding)
        return [self.sums[table] for table in pending]

    def sums_for(self, pending: dict[int, Tensor | None]) -> Tensor:
        """Return the sums of all tables, which are 0 where nothing is pending."""
        if self._buffer_UD is None:
            self._buffer_UD = self.new_sums()
            self._parts = self.split_sums()
        sums_UD = self.sums_UD
        for table, sum_UD in pending.items():
            if table not in self.sums:
                self.sums[table] = self._parts[table]
            elif sum_UD is not self.sums[table]:  # it was dropped
                for begin, end in self.pieces(table):
                    sums_UD[begin:end].zero_()
        return sums_UD

    def pieces(self, index: int) -> list[tuple[int, int]]:
        """Return where a table's rows begin and end, for each of several ranks."""
        return list(itertools.pairwise(self.begins))[index :: len(self.spans)]

    @property
    def sums_UD(self) -> Tensor:
        """The sums of gradients of all tables, once there are some."""
        return self._buffer_UD[: self.rows.shape[0]]

    def new_sums(self) -> Tensor:
        """Return zeros, at least as many rows as are looked up."""
        return self.group.zeros(self.rows.shape[0])

    def split_sums(self) -> Sequence[Tensor]:
        """Return the sums of each table."""
        return self.sums_UD.split([end - begin for begin, end in itertools.pairwise(self.begins)])

    def has_all(self, grads: dict[int, Tensor]) -> bool:
        """Whether these gradients, by table, are the sums of all tables."""
        # Gradients are scaled and clipped in place: they are the same tensors.
        tables = range(len(self.spans))
        return all(grads.get(index) is self.sums.get(index, self) for index in tables)

    def take_sums(self) -> Tensor:
        """Return the memory of the sums, and begin anew."""
        buffer_UD, self._buffer_UD = self._buffer_UD, None
        self._parts = ()
        self.sums.clear()
        return buffer_UD


class UniqueRows:
    """The unique rows of one table of a look-up.

    Tables that share memory number their rows one after another, from `store.first_row` on.
    """

    look_up: LookUp
    index: int

    def __init__(self, store: Rows, look_up: LookUp | None = None, index: int = 0):
        self.store = store
        if look_up:  # else `look_up_together` sets both
            self.look_up, self.index = look_up, index

    @functools.cached_property
    def rows(self) -> Tensor:
        """The unique rows, sorted: int64 [U].

        Raises:
            IndexError: An id is not a row, of this table or one that was looked up with it.
        """
        rows_U, begins = self.look_up.rows, self.look_up.begins
        return rows_U[begins[self.index] : begins[self.index + 1]]


class RowPage:
    """Rows on the compute device.

    Attributes:
        requested: The look-up of the ids: with several ranks, among the rows of all of them.
        version: Version of the table when the rows were read.
    """

    def __init__(
        self,
        store: Rows,
        owned: UniqueRows | None,  # the look-up of the rows; None if they are from several
        rows: Tensor | None = None,  # sorted unique row ids, int64 [U]; by default the look-up's
        records: Tensor | None = None,  # decoded, [U, R]; None for a fused step, made in the table
    ):
        self.requested: Any = owned
        self.owned = owned
        self.records = records
        self.version = store.version
        self._rows = rows
        self._first_row = store.first_row

    @property
    def is_borrowed(self) -> bool:
        """Whether the ids were requested from the ranks that own the rows."""
        return self.requested is not self.owned

    def rows_of(self, store: Rows) -> Tensor:
        """Return the rows as numbered now: the table may have left its group."""
        if self._rows is None:
            self._rows = self.owned.rows
        if self._first_row != store.first_row:
            self._rows = self._rows + (store.first_row - self._first_row)
            self._first_row = store.first_row
        return self._rows


class RowsOfIds(UniqueRows):
    """The unique rows of a table's ids.

    Attributes:
        shape: Shape of the ids.
    """

    look_up: Any  # a LookUp

    def __init__(
        self,
        store: Rows,
        given: Ids,
        padding: int | None = None,  # a row whose place is wanted
        rows: int | None = None,  # of all ranks; by default those of the store
    ):
        super().__init__(store)
        self.ids = as_tensor(given)
        self._identity = Identity(given)
        if not self.ids.numel():
            self.ids = self.ids.long()  # an empty list has become float32
        if self.ids.dtype not in (torch.int32, torch.int64) or self.ids.is_meta:
            raise ValueError(f"ids are {self.ids.dtype} on {self.ids.device}; give int32 or int64")
        self.shape = self.ids.shape
        rows = len(store) if rows is None else rows
        self.span = cuda_cache.Span(rows, padding, store.first_rows)

    @property
    def owned(self) -> UniqueRows:
        """The rows that this process reads and steps."""
        return self if self.look_up.owned is None else self.look_up.owned[self.index]

    def is_of(self, ids: Ids) -> bool:
        """Whether these are the ids, and rows are numbered as they were."""
        return self.look_up.layout is self.store.group.layout and self._identity.matches(ids)

    def in_shape(self, vectors_ND: Tensor, bags: Bags | None) -> Tensor:
        """Return vectors in the shape of the ids; those of bags as they are."""
        return vectors_ND if bags else vectors_ND.view(*self.shape, vectors_ND.shape[1])

    def keep_vectors(self, vectors: Tensor, offsets: Identity) -> None:
        """Keep vectors for the table's forward pass."""
        self.look_up.computed[self.index] = ComputedVectors(vectors, self.store.version, offsets)

    def take_vectors(self, offsets: Tensor | None) -> Tensor | None:
        """Return kept vectors, if weights and offsets are still the same."""
        kept = self.look_up.computed.pop(self.index, None)
        if kept is None or kept.version != self.store.version:
            return None
        if kept.offsets.matches(offsets):
            return kept.vectors
        self.store.group.bags_differ = True
        return None

    @property
    def places_N(self) -> Tensor:
        """The place of each id among the table's rows."""
        places_N = self.look_up.places_of(self.index)
        # The first table's need not wait for the rows.
        begin = self.look_up.begins[self.index] if self.index and len(self.rows) else 0
        return places_N - begin if begin else places_N

    @property
    def padding(self) -> int | None:
        """The place of the padding row among the table's, if it is there."""
        place = self.look_up.paddings[self.index] if len(self.rows) else None
        return None if place is None else place - self.look_up.begins[self.index]


def outside_inference(function: Function) -> Function:
    """Return the function, which leaves torch.inference_mode if that is on.

    torch's own decorator takes as long as a kernel's launch where it is off.
    """

    @functools.wraps(function)
    def call(*args: Any, **settings: Any) -> Any:
        if not torch.is_inference_mode_enabled():
            return function(*args, **settings)
        with torch.inference_mode(False):
            return function(*args, **settings)

    return call  # type: ignore[return-value]


def look_up(
    store: Rows, ids: Ids, padding: int | None = None, is_filled: bool = False
) -> RowsOfIds:
    """Begin to find the rows of ids."""
    found = RowsOfIds(store, ids, padding)
    look_up_together([found], is_filled)
    return found


@outside_inference  # what is made here serves training too
def look_up_together(
    rows: Sequence[RowsOfIds], is_filled: bool = False, kind: type[LookUp] = LookUp
) -> None:
    """Begin to look up rows, in all tables of a group at once."""
    by_group: dict[RowGroup, list[RowsOfIds]] = {}
    for of_table in rows:
        by_group.setdefault(of_table.store.group, []).append(of_table)
    for group, members in by_group.items():
        with group.lock:
            spans, ids = [rows.span for rows in members], [rows.ids for rows in members]
            look_up = kind(group, spans, ids, is_filled)
        for index, of_table in enumerate(members):
            of_table.look_up, of_table.index = look_up, index


_spans_of = functools.lru_cache(maxsize=64)(cuda_cache.Spans.of)
