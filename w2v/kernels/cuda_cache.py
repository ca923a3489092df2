"""Moves of a row cache, planned and made on the GPU (cache.cu, rows.cu).

Shapes: S slots, A rows, W words of bits, N ids.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from w2v.kernels.launch import THREADS, blocks_for, c_struct, kernel

WARP_ROWS = 1024  # rows that one warp of cache.cu surveys
# As in cache.cu: bits of a row's number of uses, the limit at which all numbers are halved, and the
# words that share a number in SlotMap.
USE_BITS = 4
HIGHEST_LIMIT = 12
GROUP_WORDS = 4
AGE = 2048  # plans after which numbers of uses are halved, whatever the limit is
LISTED_WORDS = 1 << 16  # words of bits that `cached_rows` expands at a time
# Blocks for both directions at once: few enough that kernels which compute meanwhile do not wait
# for GPU memory behind reads of CPU memory (docs/dev/log.md has the figures).
EXCHANGE_BLOCKS = 16
Rows, RowCounts, SlotMap, Wanted, PlanSlots, LookUp = (
    c_struct("cache.cu", name)
    for name in ("Rows", "RowCounts", "SlotMap", "Wanted", "PlanSlots", "LookUp")
)
NOTHING = Wanted(marks=None, used_soon=None, uses=None, is_counted=False, halve=False)


class Moves(NamedTuple):
    """Lists of rows to load and to evict, on the GPU.

    plan: int64: the number of loaded rows, and how many of them get unused slots, which are first
    in the list; the others get the slots of the evicted rows, in order.
    """

    loaded: Tensor  # int32
    evicted: Tensor  # int32
    slots: Tensor  # int32, of the loaded rows
    plan: Tensor


class PageRows(NamedTuple):
    """Rows that a page needs: marks, or lists.

    marks_A, soon_A: bool, whether each row is needed, and whether it is evicted last. lists: rows,
    int64. soon: rows of later pages, which are evicted last: pairs of a list and None, or of a
    buffer and `FoundRows.known`, the number of rows at its front. is_counted: whether the page adds
    1 to the number of uses of its rows.
    """

    marks_A: Tensor | None = None
    soon_A: Tensor | None = None
    lists: Sequence[Tensor] = ()
    soon: Sequence[tuple[Tensor, Tensor | None]] = ()
    is_counted: bool = True


class MovePlanner:
    """Plans the moves of a cache on the GPU.

    It keeps 4 + USE_BITS bits of each row, and the slots of cached rows: by row where `slot_of_A`
    is given, else in the order of the rows, which takes few bytes for each row. Rows with more uses
    than a limit are evicted last. The limit rises where others do not suffice; numbers of uses are
    halved when it reaches HIGHEST_LIMIT, and every AGE plans.

    Args:
        slots: Capacity of the cache in rows.
        rows: Number of rows.
        device: The GPU.
        slot_of_A: The slot of each row, which `exchange_records` keeps current.

    Attributes:
        counters: int64 [5]: slots in use, rows used, read and written so far, and the number of
            uses above which rows are evicted last.
        moves: Of plan n: `moves[n % 2]`; its lists have room for the largest page so far.
        notices: For both, int64 [2] in pinned memory: rows that found no slot beside those in use,
            and rows that were refused since no slot is left at all.
    """

    def __init__(
        self, slots: int, rows: int, device: torch.device, slot_of_A: Tensor | None = None
    ):
        self._capacity, self._rows, self._device = slots, rows, device
        self.slot_of_A = slot_of_A
        self._warps = -(-rows // WARP_ROWS)
        words = self._warps * WARP_ROWS // 32
        # Bits of rows that two plans want, cached rows, rows evicted last, and numbers of uses.
        self._bits = torch.zeros(4 + USE_BITS, words, dtype=torch.int32, device=device)
        *self._wanted, self._cached_W, self._late_W = self._bits[:4]
        self._uses = self._bits[4:]
        shape = 3, self._warps + 1
        misses, first, last = torch.empty(shape, dtype=torch.int32, device=device).unbind()
        self._counts = RowCounts(
            misses=misses, evict_first=first, evict_last=last, stretches=self._warps
        )
        self._done = torch.zeros((), dtype=torch.int32, device=device)
        self.counters = torch.tensor([0, 0, 0, 0, 1], device=device)
        numbers = torch.zeros(2, 6, dtype=torch.int64, device=device)
        none = torch.empty(0, dtype=torch.int32, device=device)
        self.moves = [Moves(none, none, none, of_plan) for of_plan in numbers]
        self._notices = torch.zeros(2, 2, dtype=torch.int64, device="cpu", pin_memory=True).unbind()
        self.notices = [notice.numpy() for notice in self._notices]  # read faster than tensors
        if slot_of_A is None:
            # Cached rows before each group of words, and their slots; the next plan writes these to
            # the other list, and the two change places.
            groups = words // GROUP_WORDS
            self._before = torch.zeros(groups, dtype=torch.int32, device=device)
            self._slots, self._old_slots = torch.empty(2, slots, dtype=torch.int32, device=device)

    def plan(self, page: PageRows | None, number: int, in_use: int) -> None:
        """Give slots to the rows of a page and list the moves.

        Args:
            page: Rows that the page needs. None: those that plan `number` was given before.
            number: Number of this plan.
            in_use: Rows wanted since this plan are not evicted: `number`, or the one before it.
        """
        is_final = in_use == number
        wanted = NOTHING if page is None else self._wanted_by(page, number)
        if self.slot_of_A is None:
            self._old_slots, self._slots = self._slots, self._old_slots
            slots = PlanSlots(
                slot_of=None, before=self._before, old_slots=self._old_slots, new_slots=self._slots
            )
        else:
            slots = PlanSlots(slot_of=self.slot_of_A, before=None, old_slots=None, new_slots=None)
        rows = Rows(
            wanted=self._wanted[number % 2],
            in_use=None if is_final else self._wanted[in_use % 2],
            cached=self._cached_W,
            late=self._late_W,
        )
        moves = self.moves[number % 2]
        blocks = -(-32 * self._warps // THREADS)
        kernel("cache.cu", "survey")(
            blocks,
            all=rows,
            page=wanted,
            count=self._rows,
            counts=self._counts,
            slots=self._capacity,
            final=is_final,
            done=self._done,
            totals=self.counters,
            plan=moves.plan,
            notice=self._notices[number % 2],
        )
        kernel("cache.cu", "list")(
            blocks,
            all=rows,
            counts=self._counts,
            rows=slots,
            moves=moves,
            next_wanted=self._wanted[(number + 1) % 2],
        )
        if self.slot_of_A is None:
            blocks = blocks_for(moves.loaded.shape[0])
            kernel("cache.cu", "fill_slots")(blocks, map=self._slot_map, moves=moves)

    def _wanted_by(self, page: PageRows, number: int) -> Any:
        """Return struct Wanted of a page, with room for its moves."""
        most = self._rows
        if page.marks_A is None:
            most = sum(rows_U.shape[0] for rows_U in page.lists)
        self._make_room(number, most)
        for rows_U in page.lists:
            self._mark(rows_U, None, self._wanted[number % 2])
        for soon_U, known in page.soon:
            self._mark(soon_U, known, self._late_W)
        return Wanted(
            marks=page.marks_A,
            used_soon=page.soon_A,
            uses=self._uses,
            is_counted=page.is_counted,
            halve=number % AGE == 0,
        )

    def _make_room(self, number: int, wanted: int) -> None:
        """Have lists of a plan for so many wanted rows."""
        moves = self.moves[number % 2]
        room = min(self._capacity, wanted)
        if moves.loaded.shape[0] < room:
            torch.cuda.synchronize()  # moves on another stream may read the lists that go
            room = min(self._capacity, self._rows, room + room // 8)
            lists = torch.empty(3, room, dtype=torch.int32, device=self._device).unbind()
            self.moves[number % 2] = Moves(lists[0], lists[1], lists[2], moves.plan)

    def slots_of(self, rows_U: Tensor) -> Tensor:
        """Return the slots of rows, int32; S for rows that are not cached."""
        if self.slot_of_A is not None:
            return self.slot_of_A.index_select(0, rows_U)
        count = rows_U.shape[0]
        slots_U = torch.empty(count, dtype=torch.int32, device=self._device)
        kernel("cache.cu", "find_slots")(
            blocks_for(count),
            map=self._slot_map,
            rows=rows_U,
            count=count,
            none=self._capacity,
            found=slots_U,
        )
        return slots_U

    def cached_rows(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield all cached rows and their slots, int64, some at a time."""
        if self.slot_of_A is not None:
            rows_U = torch.nonzero(self.slot_of_A != self._capacity).flatten()
            yield rows_U, self.slot_of_A[rows_U].long()
            return
        bits_B = torch.arange(32, dtype=torch.int32, device=self._device)
        first_slot = 0
        for first in range(0, self._cached_W.shape[0], LISTED_WORDS):
            bits_WB = self._cached_W[first : first + LISTED_WORDS, None] >> bits_B & 1
            rows_U = torch.nonzero(bits_WB.flatten()).flatten() + 32 * first
            slots_U = self._slots[first_slot : first_slot + len(rows_U)]
            first_slot += len(rows_U)
            yield rows_U, slots_U.long()

    @property
    def _slot_map(self) -> Any:
        return SlotMap(cached=self._cached_W, before=self._before, slots=self._slots)

    def _mark(self, rows_U: Tensor, known: Tensor | None, words_W: Tensor) -> None:
        """Set the bits of rows."""
        count = rows_U.shape[0]
        launch = kernel("cache.cu", "mark_rows")
        launch(blocks_for(count), rows=rows_U, count=count, known=known, words=words_W)


class Span(NamedTuple):
    """One of the tables that are looked up together.

    Row v belongs to rank v % N; ids are looked up for all N ranks.
    """

    rows: int  # of the whole table
    padding: int | None  # a row whose place is wanted
    first_rows: tuple[int, ...]  # of each rank: its rows of the table are numbered from here on


class Spans(NamedTuple):
    """Tables that are looked up together, for kernels: int64 [N * T, 5]."""

    on_device: Tensor
    words: int  # of bits for all rows
    tables: int
    ranks: int

    @classmethod
    def of(cls, spans: Sequence[Span], counts: Sequence[int], device: torch.device) -> Spans:
        """`counts` are numbers of ids of the tables; none if these are equal."""
        ends = list(itertools.accumulate(counts)) or [0] * len(spans)
        ranks, words, numbers = len(spans[0].first_rows), 0, []
        for rank in range(ranks):
            for span, end in zip(spans, ends, strict=True):
                padding = -1
                if span.padding is not None and span.padding % ranks == rank:
                    padding = span.padding // ranks
                numbers.append((end, words, span.first_rows[rank], span.rows, padding))
                # A rank without rows has a word, so that the kernels find its place.
                words += max(1, -(-(span.rows - rank) // (32 * ranks)))
        # Without waiting for the GPU, as copies from unpinned memory would.
        pinned = torch.tensor(numbers, dtype=torch.int64, device="cpu").pin_memory()
        return cls(pinned.to(device, non_blocking=True), words, len(spans), ranks)


def numbers_of(spans: int) -> int:
    """Return how many numbers `find_rows` reports of so many spans."""
    return 2 + 4 * spans


class FoundRows(NamedTuple):
    """What `find_rows` returns."""

    places_N: Tensor  # int64, the place of each id among the rows
    rows_N: Tensor  # int64, the rows, by rank and then sorted, at the front
    narrow_N: Tensor  # the same in 32 bits
    known: Tensor  # int64 [2]: how many rows; not 0 if an id is no row
    last_N: Tensor | None  # int64, the last id of each row


def find_rows(
    ids_N: Tensor,  # int64 on the GPU, table by table
    spans: Spans,
    each: int,  # ids of each table, 0 if `spans` has their numbers
    readback: Tensor,
    is_filled: bool = False,
    are_rows: bool = False,
) -> FoundRows:
    """Find the unique rows of ids without sorting.

    `readback` gets, in pinned memory, the number of rows; not 0 if an id is no row; and for each
    table of each rank the rows before it, the least and the greatest id that is no row (0: none),
    and 1 + the place of its padding row (0: it is not there).

    With `is_filled`, -1 stands behind the rows, and alone if an id is no row; and the last id of
    each row is found. With `are_rows`, ids are rows of one rank, of all tables in any order.
    """
    assert spans.ranks == 1 or not are_rows, "rows of one rank"
    ids, device = ids_N.shape[0], ids_N.device
    word_blocks = -(-spans.words // THREADS)
    words = word_blocks * THREADS
    # Few allocations, as each takes the CPU as long as a launch. The first two are freed on return,
    # unless `last_N` is a part of `numbers`: numbers, words, done and last ids.
    size = numbers_of(spans.on_device.shape[0]) + words // 2 + 1
    numbers = torch.zeros(size + ids * is_filled, dtype=torch.int64, device=device)
    before_W = torch.empty(words + word_blocks + 1, dtype=torch.int32, device=device)
    kept = torch.empty(2 * ids + 2, dtype=torch.int64, device=device)
    places_N, rows_N, known = kept.split([ids, ids, 2])
    narrow_N = torch.empty(ids, dtype=torch.int32, device=device)
    rest_N, last_N = (rows_N, numbers[size:]) if is_filled else (None, None)
    ranks = 0 if are_rows else spans.ranks
    look_up = LookUp(
        spans=spans.on_device, tables=spans.tables, ranks=ranks, each=each, numbers=numbers
    )
    blocks = blocks_for(ids)
    kernel("cache.cu", "mark_ids")(blocks, ids=ids_N, count=ids, look_up=look_up)
    kernel("cache.cu", "count_ids")(word_blocks, look_up=look_up, before=before_W)
    kernel("cache.cu", "list_ids")(
        word_blocks, look_up=look_up, before=before_W, unique=rows_N, narrow=narrow_N
    )
    kernel("cache.cu", "place_ids")(
        blocks,
        ids=ids_N,
        count=ids,
        look_up=look_up,
        before=before_W,
        places=places_N,
        readback=readback,
        known=known,
        rest=rest_N,
        last=last_N,
    )
    return FoundRows(places_N, rows_N, narrow_N, known, last_N)


def exchange_records(
    moves: Moves,
    table_AR: Tensor,  # on the GPU or in pinned memory
    records_SR: Tensor,  # the cache
    slot_of_A: Tensor | None = None,  # kept current, if given
    no_slot: int = 0,  # of rows that are not cached
) -> None:
    """Write evicted records back, and load others into their slots."""
    itemsize = records_SR.element_size()
    kernel("rows.cu", "exchange")(
        EXCHANGE_BLOCKS,
        table=table_AR,
        stride=table_AR.stride(0) * itemsize // 16,
        records=records_SR,
        width=records_SR.shape[1] * itemsize // 16,
        moves=moves,
        slot_of=slot_of_A,
        none=no_slot,
    )
