"""Operations on rows by CUDA kernels: look up, move, gather, add and step.

Gradients are added in the order in which threads come, so bits differ from run to run.

Shapes: A rows, N ids, U unique rows, D dimensions, S slots, R elements of a record.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from w2v.rows.launch import ELEMENTS, THREADS, Kernel, blocks_for, c_struct, kernel
from w2v.rows.optim import RowOptimizer

# Enough for the link; more would let one direction starve the other, and be slower.
READ_BLOCKS, WRITE_BLOCKS = 64, 48
IDS = 8  # as in rows.cu: whose vectors a thread has parts of


class View(NamedTuple):
    """Where the records of rows are on the compute device."""

    records_SR: Tensor
    slot_of_A: Tensor | None  # int32, the slot of each row; None: a row is its own slot

    def slots(self, rows_U: Tensor) -> Tensor:
        """Return the slot of each row: int64 [U]."""
        return rows_U if self.slot_of_A is None else self.slot_of_A[rows_U].long()


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


def are_spaced(tensors: Sequence[Tensor]) -> bool:
    """Return whether tensors are alike and equally far apart."""
    begins = [tensor.data_ptr() for tensor in tensors]
    steps = {end - begin for begin, end in itertools.pairwise(begins)}
    layouts = {(each.shape, each.stride(), each.dtype, each.device) for each in tensors}
    is_aligned = not any(begin % tensors[0].itemsize for begin in begins)
    return len(steps) < 2 and len(layouts) == 1 and is_aligned


def step_between(tables: Sequence[Tensor], nbytes: int) -> int:
    """Return the bytes between tables; `nbytes` if one tensor has all."""
    if len(tables) == 1:
        return nbytes
    return tables[1].data_ptr() - tables[0].data_ptr()


class FoundRows(NamedTuple):
    """What `find_rows` returns."""

    places_N: Tensor  # int64, the place of each id among the rows
    rows_N: Tensor  # int64, the rows, by rank and then sorted; behind them -1
    narrow_N: Tensor  # the same in 32 bits
    row_count: Tensor  # int64 [1]: how many rows
    last_N: Tensor  # int64, the last id of each row


def find_rows(
    ids: Sequence[Tensor],  # that `are_spaced`, of each table; or one, of all tables in turn
    spans: Spans,
    each: int,  # ids of each table, 0 if `spans` has their numbers
    readback: Tensor,
    are_rows: bool = False,
    has_gaps: bool = False,
) -> FoundRows:
    """Find the unique rows of ids without sorting.

    Ids are int32 or int64 and contiguous, on the GPU or in pinned CPU memory: read in place.
    `readback` gets, in pinned memory, the number of rows; not 0 if an id is no row; and for each
    table of each rank the rows before it, the least and the greatest id that is no row (0: none),
    and 1 + the place of its padding row (0: it is not there).

    If an id is no row, there are no rows. With `are_rows`, ids are rows of one rank, of all tables
    in any order. With `has_gaps`, -1 is no id.
    """
    assert spans.ranks == 1 or not are_rows, "rows of one rank"
    first, device = ids[0], spans.on_device.device
    count = len(ids) * first.numel()
    word_blocks = -(-spans.words // THREADS)
    words = word_blocks * THREADS
    # Few allocations, as each takes the CPU as long as a launch. The first two are freed on return:
    # numbers, words and done; and rows before words and blocks.
    size = numbers_of(spans.on_device.shape[0]) + words // 2 + 1
    numbers = torch.zeros(size, dtype=torch.int64, device=device)
    before_W = torch.empty(words + word_blocks + 1, dtype=torch.int32, device=device)
    kept = torch.empty(3 * count + 1, dtype=torch.int64, device=device)
    places_N, rows_N, last_N, row_count = kept.split_with_sizes([count, count, count, 1])
    narrow_N = torch.empty(count, dtype=torch.int32, device=device)
    look_up = c_struct("lookup.cu", "LookUp")(
        ids=first,
        narrow_ids=first.dtype == torch.int32,
        step=step_between(ids, each * first.itemsize),
        count=count,
        spans=spans.on_device,
        tables=spans.tables,
        ranks=0 if are_rows else spans.ranks,
        each=each,
        gaps=has_gaps,
        numbers=numbers,
        before=before_W,
        unique=rows_N,
        narrow=narrow_N,
        places=places_N,
        last=last_N,
        readback=readback,
        row_count=row_count,
    )
    blocks = blocks_for(count)
    in_turn = kernel("lookup.cu", "mark_ids", "count_ids", "list_ids", "place_ids")
    in_turn(blocks, word_blocks, word_blocks, blocks, look_up=look_up)
    return FoundRows(places_N, rows_N, narrow_N, row_count, last_N)


def move_records(
    table_VR: Tensor,
    rows_U: Tensor,
    records_SR: Tensor,
    slots_U: Tensor | None = None,
    to_table: bool = False,
) -> None:
    """Copy records[slots[u]] = table[rows[u]], or back.

    Without slots, u is the slot. The table may be in pinned CPU memory. Rows and slots are inside
    their bounds; what is written is unique; negative rows are skipped. In CPU memory, rows are best
    sorted. A record is a multiple of 16 bytes.
    """
    assert table_VR.shape[1] == records_SR.shape[1] and table_VR.dtype == records_SR.dtype
    assert table_VR.stride(1) == 1
    itemsize, count = table_VR.element_size(), len(rows_U)
    assert table_VR.shape[1] * itemsize % 16 == 0
    if count:
        on_link = WRITE_BLOCKS if to_table else READ_BLOCKS
        kernel("rows.cu", "move_records")(
            blocks_for(32 * count) if table_VR.is_cuda else on_link,
            table=table_VR,
            stride=table_VR.stride(0) * itemsize // 16,
            rows=rows_U,
            records=records_SR,
            slots=slots_U,
            count=count,
            width=table_VR.shape[1] * itemsize // 16,
            to_table=to_table,
        )


class Bags(NamedTuple):
    """How the ids of a table are divided into bags whose vectors are summed.

    begins: where each bag begins, int64 on the GPU; the last one has all ids that are left. None:
    bags of `size` ids. is_mean: whether sums are divided by the number of ids that are not padding.
    tables: how many, one after the other, have such bags.
    """

    number: int
    begins: Tensor | None = None
    size: int = 1
    is_mean: bool = False
    tables: int = 1

    def args(self, places_N: Tensor, padding: int | None) -> Any:
        """Return the bags as struct Bags; padding: the place that is left out."""
        return c_struct("rows.cu", "Bags")(
            places=places_N,
            length=places_N.shape[0] // self.tables,
            begins=self.begins,
            size=self.size,
            bags=self.number,
            tables=self.tables,
            padding=-1 if padding is None else padding,
            mean=self.is_mean,
        )


def gather_vectors(
    view: View,
    rows_U: Tensor | None,  # unique rows, int32; None: 0, 1, 2, ...
    places_N: Tensor,  # which of these rows each id is, int64
    dim: int,
    bags: Bags | None = None,  # of ids; by default each id is one
    padding: int | None = None,  # the place that is left out of bags
) -> Tensor:
    """Return weights [N, D] of ids or bags in float32."""
    records_SR = view.records_SR
    of: dict[str, Any]
    count = places_N.shape[0]
    name, of = "gather_ids", {"places": places_N, "count": count}
    groups = -(-count // IDS)
    if bags:
        name, of = "gather_bags", {"bags": bags.args(places_N, padding)}
        count = groups = bags.tables * bags.number
    weight_ND = torch.empty(count, dim, device=records_SR.device)
    row_width = records_SR.shape[1]
    macros = _lanes(dim, _wide(dim, row_width))
    kernel("rows.cu", name, ELEMENT=ELEMENTS[records_SR.dtype], **macros)(
        blocks_for(macros["LANES"] * groups),
        view=view,
        row_width=row_width,
        rows=rows_U,
        dim=dim,
        vectors=weight_ND,
        **of,
    )
    return weight_ND


def add_gradients(
    grads: Sequence[Tensor],  # [N, D] of each table, that `are_spaced`; or one, of all in turn
    places_N: Tensor,
    sums_UD: Tensor,
    bags: Bags | None = None,
    padding: int | None = None,
) -> None:
    """Add gradients of ids or bags to the sums, by place, in no fixed order."""
    first, tables = grads[0], len(grads)
    each, dim = first.shape
    stride = first.stride(0)
    of: dict[str, Any]
    name, of = "add_ids", {"places": places_N, "tables": tables, "each": each}
    of["padding"] = -1 if padding is None else padding
    groups = -(-each // IDS) * tables
    if bags:
        name, of, each = "add_bags", {"bags": bags.args(places_N, padding)}, bags.number
        groups = -(-each // IDS) * bags.tables
    size = first.itemsize
    table_stride = step_between(grads, each * stride * size) // size
    macros = _lanes(dim, _wide(dim, table_stride, stride, first.data_ptr() // size))
    kernel("rows.cu", name, **macros)(
        blocks_for(macros["LANES"] * groups),
        grads=first,
        table_stride=table_stride,
        stride=stride,
        dim=dim,
        sums=sums_UD,
        **of,
    )


def _wide(*numbers: int) -> int:
    """Return WIDE for rows that begin at multiples of these numbers."""
    return 1 if any(number % 4 for number in numbers) else 4


def _lanes(dim: int, wide: int) -> dict[str, int]:
    """Return macros of vectors of which so many numbers are read together."""
    return {"WIDE": wide, "LANES": 1 << min(5, (dim // wide - 1).bit_length())}


def step_rows(
    optimizer: RowOptimizer,
    counted: tuple[float, int],  # by `optimizer.count_step`
    seed: int,  # of the rounding to bfloat16
    view: View,
    rows_U: Tensor | None,  # as above
    count: Tensor | None,  # their number, if the GPU knows it
    grad_UD: Tensor,
    lr: float,
) -> None:
    """Step stored records in place, by the fused kernel; gradients become 0.

    A number whose step is not finite keeps its value, as do those read with it.
    """
    (rows, dim), device = grad_UD.shape, grad_UD.device
    step, step_column = counted
    if count is None:
        count = torch.full((), rows, dtype=torch.int64, device=device)
    launch = _step_of_one_table(optimizer, view.records_SR.dtype, device, dim, step_column)
    row_grads = c_struct("unique.cuh", "RowGrads")
    launch(
        blocks_for(32 * rows),
        view=view,
        rows=row_grads(index_A=None, rows_U=rows_U, grad_UD=grad_UD, pairs_U=None, row_count=count),
        row_width=view.records_SR.shape[1],
        lr=float(lr),
        table_step=step,
        seed=seed,
    )


@functools.lru_cache(maxsize=64)
def _step_of_one_table(
    optimizer: RowOptimizer, dtype: torch.dtype, device: torch.device, dim: int, step_column: int
) -> Kernel:
    """Return a step that notes no faults."""
    stepped, fault = torch.zeros(2, dtype=torch.int64, device=device).unbind()
    return step_kernel(optimizer, dtype, dim, ranks=0).bind(
        dim=dim,
        step_column=step_column,
        cap=0,
        hyper=optimizer.hyper(0.0),  # the rate is given at each launch
        places=no_places(),
        stepped=stepped,
        # A fault would be the sum of this step and a bit, both 0.
        fault=fault,
        bit=0,
        done=None,
        loss=torch.zeros((), dtype=torch.float64, device=device),
        this_step=0,
    )


def no_places() -> Any:
    """Return struct Places of a process whose gradients no other one has."""
    places = c_struct("unique.cuh", "Places")
    return places(peers=None, places=None, room=0)


def step_kernel(optimizer: RowOptimizer, dtype: torch.dtype, dim: int, ranks: int) -> Kernel:
    """Return the kernel of an optimizer's step.

    ranks: from how many peers gradients are read; 0 for gradients in one place.
    """
    return kernel(
        "optim.cu",
        "step",
        STEP=optimizer.formula.removeprefix("rowwise"),
        STATES=optimizer.state_count,
        NARROW=int(optimizer.formula.startswith("rowwise")),
        ELEMENT=ELEMENTS[dtype],
        WIDE=_wide(dim),
        RANKS=ranks,
    )
