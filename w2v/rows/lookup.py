"""Look-ups: the unique rows of ids, of several tables at once.

Shapes: N ids, U unique rows, D dimensions.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from w2v.rows import ops
from w2v.rows.group import Member, RowGroup, outside_inference
from w2v.rows.launch import cuda_runtime, has_cupy
from w2v.rows.link import current_stream
from w2v.rows.ops import Bags


class LookUp:
    """Unique rows of ids, looked up in all tables of a group at once.

    They are sorted by table; with several ranks each table has a span for each rank, and they are
    sorted by rank, then by table.

    Attributes:
        shapes: Of the ids of each table.
        places_N: The place of each id's row among the unique rows.
        rows_N: The unique rows; by kernels in a buffer as long as the ids, with -1 behind them, or
            alone if an id is no row.
        narrow_N: The rows in 32 bits, in a buffer of that size.
        row_count: By kernels, as in `ops.FoundRows`.
        last_N: By kernels, the last id of each row.
        begins: Where the rows of each span begin, and where the last ones end; set by `wait`.
        paddings: The place of each table's padding row; set by `wait`.
        is_computed: Whether it was tried to compute the vectors of all tables together.
        tables: The tables, if their ids were read ahead.
        computed: Those vectors that have not been used yet, by index of their table, and its
            version.
        offsets: Of the bags of these.
        sums: Sums of gradients, by index of the tables that have some.
    """

    row_count: Tensor | None = None
    last_N: Tensor | None = None
    begins: list[int]
    paddings: list[int | None]
    is_computed = False
    offsets: Identity
    _rows_U: Tensor | None = None  # once the CPU knows their number
    _sums_UD: Tensor  # of all tables, once there are some, and zeros behind them
    _parts: Sequence[Tensor] = ()  # of these, by table
    _readback: Readback | None = None  # numbers by span, until the CPU has read them
    _wrong: tuple[int, int] | None = None  # an id that is not a row, and the number of rows

    # It holds no reference to its pages, which refer to it: the memory of cycles is freed late.
    def __init__(
        self,
        group: RowGroup,
        spans: Sequence[ops.Span],  # the tables
        given: Sequence[Ids],  # of each table; with `are_rows`, rows of all in any order
        are_rows: bool = False,
        has_gaps: bool = False,  # for kernels: -1 is no id
    ):
        self.group, self.spans = group, spans
        self.computed: dict[int, tuple[Tensor, tuple[int, int]]] = {}
        self.tables: list[Any] = []
        self.sums: dict[int, Tensor] = {}
        ids = [_checked(each) for each in given]
        self.shapes = [each.shape for each in ids]
        self._identities = [Identity(each) for each in given]
        counts = [each.numel() for each in ids]
        self._edges = list(itertools.accumulate(counts, initial=0))  # of each table's ids
        self.layout = group.layout  # the group has another one once a table has left it
        if group.has_kernels and any(counts):
            # Equal counts are in no key of `_spans_of`: they differ from batch to batch.
            each = counts[0] if counts.count(counts[0]) == len(counts) else 0
            parts = len(spans) * len(spans[0].first_rows)
            unequal = () if each else tuple(counts)
            read = readable(ids, group.device)
            self._readback = Readback(ops.numbers_of(parts), read)
            found = ops.find_rows(
                read,
                _spans_of(tuple(spans), unequal, group.device, current_stream()),
                each,
                self._readback.numbers,
                are_rows,
                has_gaps,
            )
            self.places_N, self.rows_N, self.narrow_N, self.row_count, self.last_N = found
            self._readback.launched()
        else:
            flat = [each.to(group.device).long().flatten() for each in ids]
            self._look_up_by_torch(flat, are_rows)

    def is_of(self, index: int, ids: Ids) -> bool:
        """Return whether the look-up is still valid for these ids of a table."""
        return self.layout is self.group.layout and self._identities[index].matches(ids)

    def _look_up_by_torch(self, ids: list[Tensor], are_rows: bool) -> None:
        """Find the rows as `ops.find_rows` does, by torch.

        The key of a row has its span in the upper half, and its place in the span in the lower one.
        With several ranks a table has a span for each rank: row v is in that of rank v % N.
        """
        spans, device = self.spans, ids[0].device
        tables, ranks = len(spans), len(spans[0].first_rows)
        firsts_S = torch.tensor([span.first_rows for span in spans], device=device).T.flatten()

        def key(table: int, row: Any) -> Any:
            return (row % ranks * tables + table << 32) + row // ranks

        if are_rows:
            span_N = torch.bucketize(ids[0], firsts_S, right=True) - 1
            keys_N = (span_N << 32) + ids[0] - firsts_S[span_N]
        else:
            for ids_n, span in zip(ids, spans, strict=True):
                least, greatest = map(int, ids_n.aminmax()) if ids_n.numel() else (0, 0)
                if not self._wrong and (least < 0 or greatest >= span.rows):
                    self._wrong = min(0, least) or greatest, span.rows
            keys_N = torch.cat([key(table, ids_n) for table, ids_n in enumerate(ids)])
        if self._wrong:
            keys_N = keys_N[:0]
        keys_U, self.places_N = torch.unique(keys_N, return_inverse=True)
        self.rows_N = firsts_S[keys_U >> 32] + (keys_U & 0xFFFFFFFF)
        self.narrow_N = self.rows_N.int()
        edges = torch.arange(tables * ranks + 1, device=device) << 32
        self.begins = torch.searchsorted(keys_U, edges).tolist()
        rows = (span.padding for span in spans)
        padding_keys = [-1 if row is None else key(table, row) for table, row in enumerate(rows)]
        padding_T = keys_U.new_tensor(padding_keys)
        begin_T = torch.searchsorted(keys_U, padding_T)
        end_T = torch.searchsorted(keys_U, padding_T, right=True)
        places = zip(begin_T.tolist(), end_T.tolist(), strict=True)
        self.paddings = [begin if begin < end else None for begin, end in places]

    @property
    def is_known(self) -> bool:
        """Return whether `wait` returns at once."""
        return self._readback is None or self._readback.is_known

    def wait(self) -> Tensor:
        """Wait for the unique rows of all tables; return them, sorted: int64 [U].

        Raises:
            IndexError: An id is not a row.
        """
        if self._rows_U is None:
            self._read()
            if self._wrong:
                wrong, rows = self._wrong
                raise IndexError(f"id {wrong} is not a row; rows are 0 to {rows - 1}")
            self._rows_U = self.rows_N[: self.begins[-1]]
        return self._rows_U

    def is_valid(self) -> bool:
        """Wait for the unique rows; return whether all ids are rows."""
        self._read()
        return self._wrong is None

    def _read(self) -> None:
        """Read what `ops.find_rows` reports, once."""
        if self._readback is None:
            return
        count, is_wrong, *of_spans = self._readback.read()
        self._readback = None
        begins, leasts, greatests, places = (of_spans[number::4] for number in range(4))
        self.begins = [*begins, count]
        tables = len(self.spans)
        ends = [max(places[table::tables]) for table in range(tables)]  # a span for each rank
        self.paddings = [end - 1 if end else None for end in ends]
        if is_wrong:
            # With several ranks, the spans of the first one have the limits of all ids.
            limits = zip(self.spans, leasts, greatests, strict=False)
            self._wrong = next(
                (least or greatest, span.rows)
                for span, least, greatest in limits
                if least or greatest
            )

    def places_of(self, index: int | None) -> Tensor:
        """Return the places of a table's ids; None: of all."""
        if index is None or len(self._edges) == 2:
            return self.places_N
        return self.places_N[self._edges[index] : self._edges[index + 1]]

    def fetch(self, pages: Sequence[RowPage]) -> None:
        """Get the weights of tables, if other ranks own them."""

    def weights(self) -> tuple[ops.View, Tensor | None]:
        """Return records, and the rows to read; None: they are these, in order."""
        rows_U, group = self.wait(), self.group
        if (view := group.in_place(rows_U)) is not None:
            return view, self.narrow_N
        return ops.View(group.link.records(rows_U), None), None

    @outside_inference
    def vectors(self, index: int | None, bags: Bags | None = None) -> Tensor:
        """Return vectors of a table's ids or bags, None: of all: float32 [N, D]."""
        view, rows_U = self.weights()
        padding = self.paddings[index] if bags and index is not None else None
        places_N, dim = self.places_of(index), self.group.table.dim
        return ops.gather_vectors(view, rows_U, places_N, dim, bags, padding)

    def add_gradients(
        self,
        index: int | None,  # of the table; None: all tables
        grads: Sequence[Tensor],  # of its ids or bags, as `ops.add_gradients`
        bags: Bags | None,
        pending: dict[int, Tensor | None],  # the tables, with sums that wait for the step, if any
    ) -> list[Tensor]:
        """Add gradients by row; return the sums [U, D] of these tables."""
        sums_UD = self.sums_for(pending)
        padding = None if index is None else self.paddings[index]
        ops.add_gradients(grads, self.places_of(index), sums_UD, bags, padding)
        return [self.sums[table] for table in pending]

    def gradient(self, index: int, grads: Sequence[Tensor], bags: Bags | None) -> Tensor:
        """Return the gradient [U, D] of a table, without what waits."""
        sums_UD = grads[0].new_zeros(self.begins[-1], self.group.table.dim)
        ops.add_gradients(grads, self.places_of(index), sums_UD, bags, self.paddings[index])
        return sums_UD[self.begins[index] : self.begins[index + 1]]

    def sums_for(self, pending: dict[int, Tensor | None]) -> Tensor:
        """Return the sums of all tables, which are 0 where nothing is pending."""
        if not self._parts:
            self._sums_UD, self._parts = self.new_sums()
        for table, sum_UD in pending.items():
            if table not in self.sums:
                self.sums[table] = self._parts[table]
            elif sum_UD is not self.sums[table]:  # it was dropped
                for begin, end in self.pieces(table):
                    self._sums_UD[begin:end].zero_()
        return self._sums_UD

    def pieces(self, index: int) -> list[tuple[int, int]]:
        """Return where a table's rows begin and end, for each of several ranks."""
        return list(itertools.pairwise(self.begins))[index :: len(self.spans)]

    def new_sums(self) -> tuple[Tensor, Sequence[Tensor]]:
        """Return zeros for all rows or more, and those of each table."""
        sums_UD = self.group.zeros(self.begins[-1])
        edges = [*self.begins, sums_UD.shape[0]]
        sizes = [end - begin for begin, end in itertools.pairwise(edges)]
        return sums_UD, sums_UD.split_with_sizes(sizes)

    def take_sums(self) -> Tensor:
        """Return the sums, and zeros behind them, and begin anew."""
        sums_UD = self._sums_UD
        del self._sums_UD
        self._parts = ()
        self.sums.clear()
        return sums_UD

    @property
    def own(self) -> LookUp:
        """The look-up of the rows that this process reads and steps."""
        return self


class RowPage:
    """Unique rows of a table: its part of a look-up, or rows of several.

    Tables that share memory number their rows one after another, from `store.first_row` on.

    Attributes:
        found: The look-up; None if the rows are from several.
        index: Of the table in the look-up.
        records: Decoded, [U, R], as they were read; None before, and for a fused step.
        version: Version of the table when they were read.
    """

    records: Tensor | None = None
    version: tuple[int, int]

    def __init__(
        self, store: Member, found: LookUp | None, index: int = 0, rows_U: Tensor | None = None
    ):
        self.store, self.found, self.index = store, found, index
        self._rows_U = rows_U  # of a look-up once they are known
        self._first_row = store.first_row

    @property
    def look_up(self) -> LookUp:
        """The one look-up that the rows are from."""
        assert self.found is not None, "the rows are from several look-ups"
        return self.found

    @property
    def shape(self) -> torch.Size:
        """Shape of the ids."""
        return self.look_up.shapes[self.index]

    def rows(self) -> Tensor:
        """Wait for the unique rows; return them, sorted: int64 [U].

        They are numbered as now: the table may have left its group.

        Raises:
            IndexError: An id is not a row, of this table or one that was looked up with it.
        """
        if self._rows_U is None:
            rows_U, begins = self.look_up.wait(), self.look_up.begins
            self._rows_U = rows_U[begins[self.index] : begins[self.index + 1]]
        if self._first_row != self.store.first_row:
            self._rows_U = self._rows_U + (self.store.first_row - self._first_row)
            self._first_row = self.store.first_row
        return self._rows_U

    def places(self) -> Tensor:
        """Return the place of each id among the table's rows."""
        places_N = self.look_up.places_of(self.index)
        if self.index and len(self.rows()):  # the first table's need not wait for the rows
            places_N = places_N - self.look_up.begins[self.index]
        return places_N

    def padding(self) -> int | None:
        """Return the place of the padding row among the table's, if it is there."""
        self.rows()
        place = self.look_up.paddings[self.index]
        return None if place is None else place - self.look_up.begins[self.index]

    def in_shape(self, vectors_ND: Tensor, bags: Bags | None) -> Tensor:
        """Return vectors in the shape of the ids; those of bags as they are."""
        if bags or len(self.shape) == 1:
            return vectors_ND
        return vectors_ND.view(*self.shape, vectors_ND.shape[1])

    def take_vectors(self, version: tuple[int, int], offsets: Tensor | None) -> Tensor | None:
        """Return kept vectors, if weights and offsets are still the same."""
        look_up = self.look_up
        vectors, computed_at = look_up.computed.pop(self.index, (None, None))
        if vectors is None or computed_at != version:
            return None
        if look_up.offsets.matches(offsets):
            return vectors
        self.store.group.bags_differ = True
        return None


@outside_inference  # what is made here serves training too
def look_up(
    stores: Sequence[Member],
    ids: Sequence[Ids],
    spans: Sequence[ops.Span] | None = None,  # by default all rows of the stores
    kind: type[LookUp] = LookUp,
) -> list[RowPage]:
    """Begin to find the rows of ids, in all tables of a group at once."""
    if spans is None:
        spans = [ops.Span(store.table.rows, None, store.first_rows) for store in stores]
    members: dict[RowGroup, list[int]] = {}
    for number, store in enumerate(stores):
        members.setdefault(store.group, []).append(number)
    pages: dict[int, RowPage] = {}
    for group, numbers in members.items():
        with group.lock:
            its_spans, its_ids = [spans[n] for n in numbers], [ids[n] for n in numbers]
            found = kind(group, its_spans, its_ids)
        for index, number in enumerate(numbers):
            pages[number] = RowPage(stores[number], found, index)
    return [pages[number] for number in range(len(stores))]


@outside_inference
def prefetch(
    group: RowGroup,
    look_ups: Sequence[LookUp],
    soon: Sequence[LookUp] = (),
    one_table: int | None = None,
) -> None:
    """Begin to bring the rows of a page, as `CachedLink.prefetch`.

    Without `one_table` it is one of `PagedOptimizer.pages`, which may get room. Wrong ids are
    refused by `wait`, when they are used.
    """
    if not (group.caches or (group.pages_only and one_table is None)):
        return
    with group.lock:
        lists = [its.wait() for its in look_ups if its.layout is group.layout and its.is_valid()]
        if one_table is None:
            group.make_room(sum(rows_U.shape[0] for rows_U in lists))
        later = [its.rows_N for its in soon if its.layout is group.layout]
        for cache in group.caches:
            cache.prefetch(lists, later, one_table)


@functools.lru_cache(maxsize=64)
def _spans_of(
    spans: Sequence[ops.Span], counts: Sequence[int], device: torch.device, _: torch.cuda.Stream
) -> ops.Spans:
    """Return tables for look-ups on a stream, by which they are copied."""
    return ops.Spans.of(spans, counts, device)


# Copy ids to the GPU, and small results back, without synchronizing.

Ids = Tensor | np.ndarray | Sequence[int]  # int32 or int64, of any shape, on any device


class Identity:
    """Recognizes a tensor by its memory, without reading it.

    It keeps the tensor, so that no other one is given its memory. Arrays and lists are read.
    """

    def __init__(self, ids: Any):
        self._ids, self._memory = ids, _memory_of(ids)

    def matches(self, ids: Any) -> bool:
        """Return whether these are the same ids, which were not changed since."""
        if _memory_of(ids) != self._memory:
            return False
        is_same = ids is self._ids or not isinstance(ids, Tensor)
        return is_same or _layout_of(ids) == _layout_of(self._ids)


def _memory_of(ids: Any) -> tuple[Any, ...]:
    """Return where a tensor is and how often it was changed, or other ids."""
    if isinstance(ids, Tensor):
        try:
            return ids.data_ptr(), ids._version
        except RuntimeError:  # tensors of inference mode do not count their changes
            return ids.data_ptr(), _layout_of(ids)
    if ids is None:
        return ()
    values = np.asarray(ids)
    return values.tobytes(), values.shape, values.dtype


def _layout_of(ids: Tensor) -> tuple[Any, ...]:
    """Return how the memory of a tensor is read."""
    return ids.shape, ids.stride(), ids.dtype, ids.device


def as_tensor(values: Any) -> Tensor:
    """Return a tensor as it is, and other values as one in CPU memory.

    torch.as_tensor would copy them to the device of torch.set_default_device.
    """
    if isinstance(values, Tensor):
        return values
    if isinstance(values, np.ndarray):
        values = np.asarray(values, order="C")  # torch takes no negative strides
    return torch.as_tensor(values, device="cpu")


def _checked(given: Ids) -> Tensor:
    """Return ids as a tensor; refuse what are no whole numbers."""
    ids = as_tensor(given)
    if ids.is_nested or ids.layout is not torch.strided:
        raise ValueError("ids are nested or sparse; give a dense tensor, such as ids.values()")
    if not ids.numel():
        ids = ids.long()  # an empty list has become float32
    if ids.dtype not in (torch.int32, torch.int64) or ids.is_meta:
        raise ValueError(f"ids are {ids.dtype} on {ids.device}; give int32 or int64")
    return ids


def readable(ids: Sequence[Tensor], device: torch.device) -> Sequence[Tensor]:
    """Return ids as `ops.find_rows` reads them on this GPU."""
    first, *others = ids
    is_pinned = not first.is_cuda and _is_pinned(first)
    is_near = first.device == device or (is_pinned and all(map(_is_pinned, others)))
    if is_near and first.is_contiguous() and ops.are_spaced(ids):
        return ids
    flat = [values.flatten() for values in ids]
    count = sum(map(len, flat))
    if all(values.is_cuda for values in flat):
        return [torch.cat(flat).to(device)]
    # The others are most likely as the first: a wrong guess only waits.
    if not is_pinned and not any(values.is_cuda for values in flat):
        ids_N = torch.empty(count, dtype=torch.int64, device="cpu", pin_memory=True)
        return [torch.cat(flat, out=ids_N)]
    ids_N = torch.empty(count, dtype=torch.int64, device=device)
    torch._foreach_copy_(ids_N.split([*map(len, flat)]), flat, non_blocking=True)
    return [ids_N]


def to_device(values: Tensor, device: torch.device) -> Tensor:
    """Copy to the device; unpinned memory alone would wait for it."""
    is_sent = device.type == "cuda" and values.device.type == "cpu"
    if is_sent and not _is_pinned(values):
        values = values.pin_memory()
    return values.to(device, non_blocking=True)


def _is_pinned(values: Tensor) -> bool:
    """Return whether memory is pinned CPU memory."""
    if not (has_cupy() and values.numel()):
        return values.is_pinned()
    # torch's way takes 30 us. Each time anew: the address may be that of other memory now.
    runtime = cuda_runtime()
    return runtime.pointerGetAttributes(values.data_ptr()).type == runtime.memoryTypeHost


class Readback:
    """Small results that a kernel writes to pinned memory for the CPU.

    Memory and events are reused: allocating them takes as long as launching a kernel.
    """

    _free: ClassVar[dict[int, list[tuple[Tensor, torch.cuda.Event, Any]]]] = {}
    _pool: list[Any] | None = None  # where memory goes; None until there is some

    def __init__(self, count: int, read: Any = ()):  # other memory, kept until it was read
        pool = self._free.setdefault(count, [])
        try:
            self.numbers, self._event, unread = pool.pop()
            if unread is not None:
                self._event.synchronize()  # the last kernel may still use the memory
        except IndexError:
            self.numbers = torch.empty(count, dtype=torch.int64, device="cpu", pin_memory=True)
            self._event = torch.cuda.Event()
        self._read = read
        self._pool = pool

    def __del__(self) -> None:
        if self._pool is not None:
            self._pool.append((self.numbers, self._event, self._read))

    def launched(self) -> None:
        """Note that the kernel was launched on the current stream."""
        current_stream().record_event(self._event)

    @property
    def is_known(self) -> bool:
        return self._event.query()

    def read(self) -> list[int]:
        self._event.synchronize()
        self._read = None
        return self.numbers.tolist()
