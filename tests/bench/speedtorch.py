"""What SpeedTorch's README measured, again: random rows to and from a CUDA variable, and where the time of a small product goes.

SpeedTorch (https://github.com/Santosh-Gupta/SpeedTorch, 2019) moves 131,072 rows of 128 float32 to and from a table in pinned memory.
Shapes: V rows of a table, D dimensions, N rows moved at a time. The rows of a set are distinct, and in random order.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tests.bench.measure import (
    CALLS,
    WARMUPS,
    Figures,
    Section,
    milliseconds,
    rate,
    row_sets,
    share,
)
from w2v.model.table import Table
from w2v.transfer.mapped import Mapped

DIM = 128
CHUNK_ROWS = 1 << 16  # a table's values repeat after so many rows
PRODUCT_ROWS = 131_072


class Case(NamedTuple):
    """What each way is given: how many rows its table has, their values, sets of rows on the GPU, and a CUDA variable."""

    rows: int
    values_CD: Tensor
    sets: list[Tensor]
    variable_ND: Tensor


class Way(NamedTuple):
    get: Callable[
        [Any], Tensor
    ]  # a set of rows -> their values on the GPU, in the order of the set
    put: Callable[[Any], object]  # a set of rows <- the variable
    sets: list[
        Any
    ]  # where and as what this way wants them; the first is never written, so that `check` knows its values
    queued: bool  # as in `milliseconds`: False where the CPU moves rows


def rows(link: Figures, table_rows: int, moved: int, file: Path) -> None:
    """Times of each way, and over ours, which includes sorting the rows and giving back their order."""
    values_CD, variable_ND = (
        torch.randn(count, DIM, device="cuda") for count in (CHUNK_ROWS, moved)
    )
    case = Case(table_rows, values_CD, row_sets(table_rows, moved, in_order=False), variable_ND)
    title = f"{moved:,} random rows of {DIM} float32 of {table_rows:,}, to and from a CUDA variable ({torch.get_num_threads()} CPU threads)"
    section = Section("transfer", title, file)
    ours: Figures = {}
    for build in (ours_pinned, cupy_pinned, torch_pinned, torch_cuda, cupy_cuda):
        for name, way in build(case).items():
            check(way, case)
            figures = measured(way, 4 * variable_ND.numel(), link, on_gpu="CUDA" in name)
            ours = ours or figures
            figures |= {
                f"{key} over ours": (figures[key][0] / ours[key][0], "times")
                for key in ("to GPU", "from GPU")
            }
            section.add(f"{moved} of {table_rows} rows, {name}", figures)
    section.print()


def check(way: Way, case: Case) -> None:
    """What is about to be timed moves the right rows, in the order asked for."""
    kept, written, *_ = way.sets
    assert torch.equal(
        way.get(kept), case.values_CD[torch.as_tensor(kept, device="cuda") % CHUNK_ROWS]
    )
    way.put(written)
    assert torch.equal(way.get(written), case.variable_ND)


def measured(way: Way, nbytes: int, link: Figures, on_gpu: bool) -> Figures:
    sets = way.sets[1:]
    to, back = (
        milliseconds(lambda i, move=move: move(sets[i % len(sets)]), way.queued)
        for move in (way.get, way.put)
    )
    figures = {"to GPU": (to, "ms"), "from GPU": (back, "ms"), "sum": (to + back, "ms")}
    for key in ("to GPU", "from GPU"):
        figures[f"{key} rate"] = rate(nbytes, figures[key][0])
        if not on_gpu:
            figures[f"{key} share"] = share(figures[f"{key} rate"], link[key])
    return figures


def ours_pinned(case: Case) -> dict[str, Way]:
    table, link, records_ND = (
        Table("bench", case.rows, DIM, {}, {}, "pinned"),
        Mapped(),
        torch.empty_like(case.variable_ND),
    )
    for start in range(0, case.rows, CHUNK_ROWS):
        part = table["weight"][start : start + CHUNK_ROWS]
        part.copy_(case.values_CD[: len(part)])

    def get(rows_N: Tensor, slots_N: Tensor | None = None) -> Tensor:
        link.read(table, rows_N, records_ND, slots_N)
        return records_ND

    def put(rows_N: Tensor, slots_N: Tensor | None = None) -> None:
        link.write(table, rows_N, case.variable_ND, slots_N)

    sorted_before = [rows_N.sort().values for rows_N in case.sets]
    return {
        "ours": Way(
            lambda rows_N: get(*rows_N.sort()),
            lambda rows_N: put(*rows_N.sort()),
            case.sets,
            queued=True,
        ),
        "ours, rows sorted before": Way(get, put, sorted_before, queued=True),
    }


def cupy_pinned(case: Case) -> dict[str, Way]:
    """Fancy indexing on cudaHostAlloc memory, as SpeedTorch does it, but with CuPy's memory pool left on and without its many waits."""
    import cupy

    nbytes = case.rows * DIM * 4
    memory = cupy.cuda.PinnedMemory(nbytes)
    pointer = cupy.cuda.MemoryPointer(
        cupy.cuda.UnownedMemory(memory.ptr, nbytes, memory, torch.cuda.current_device()), 0
    )
    return {"CuPy pinned": _cupy_way(cupy.ndarray((case.rows, DIM), cupy.float32, pointer), case)}


def cupy_cuda(case: Case) -> dict[str, Way]:
    import cupy

    return {"CuPy CUDA": _cupy_way(cupy.empty((case.rows, DIM), cupy.float32), case)}


def _cupy_way(table_VD: Any, case: Case) -> Way:
    import cupy

    values_CD, variable_ND = cupy.asarray(case.values_CD), cupy.asarray(case.variable_ND)
    for start in range(0, case.rows, CHUNK_ROWS):
        table_VD[start : start + CHUNK_ROWS] = values_CD[: case.rows - start]

    def put(rows_N: Any) -> None:
        table_VD[rows_N] = variable_ND

    return Way(
        lambda rows_N: torch.from_dlpack(table_VD[rows_N]),
        put,
        [cupy.asarray(rows_N) for rows_N in case.sets],
        queued=True,
    )


def torch_pinned(case: Case) -> dict[str, Way]:
    """The naive way, and with a pinned buffer between: rows are moved into it on all cores, and it is copied whole."""
    table_VD, buffer_ND = (
        torch.empty(count, DIM, pin_memory=True) for count in (case.rows, len(case.variable_ND))
    )
    _fill(table_VD, case.values_CD)
    sets = [rows_N.cpu() for rows_N in case.sets]

    def put(rows_N: Tensor) -> None:
        table_VD[rows_N] = case.variable_ND.cpu()

    def get_staged(rows_N: Tensor) -> Tensor:
        return torch.index_select(table_VD, 0, rows_N, out=buffer_ND).to("cuda", non_blocking=True)

    def put_staged(rows_N: Tensor) -> None:
        table_VD.index_copy_(0, rows_N, buffer_ND.copy_(case.variable_ND))

    return {
        "torch pinned": Way(lambda rows_N: table_VD[rows_N].to("cuda"), put, sets, queued=False),
        "torch pinned, staged": Way(get_staged, put_staged, sets, queued=False),
    }


def torch_cuda(case: Case) -> dict[str, Way]:
    table_VD = torch.empty(case.rows, DIM, device="cuda")
    _fill(table_VD, case.values_CD)

    def put(rows_N: Tensor) -> None:
        table_VD[rows_N] = case.variable_ND

    return {"torch CUDA": Way(lambda rows_N: table_VD[rows_N], put, case.sets, queued=True)}


def _fill(table_VD: Tensor, values_CD: Tensor) -> None:
    for part in table_VD.split(len(values_CD)):
        part.copy_(values_CD[: len(part)])


def product(file: Path) -> None:
    """A product too small to be worth a copy: on the CPU, on the GPU, and on the GPU with its operand and result copied each time."""
    a_ND, b_DD = torch.randn(PRODUCT_ROWS, DIM), torch.randn(DIM, DIM)
    pinned_ND, result_ND = a_ND.pin_memory(), torch.empty(PRODUCT_ROWS, DIM, pin_memory=True)
    a_gpu, b_gpu = a_ND.cuda(), b_DD.cuda()
    seconds = []
    for _ in range(CALLS):
        start = time.perf_counter()
        a_ND @ b_DD
        seconds.append(time.perf_counter() - start)
    times = {
        "on the CPU": 1e3 * median(seconds[WARMUPS:]),
        "on the GPU": milliseconds(lambda _: a_gpu @ b_gpu, queued=True),
        "on the GPU, copied each way": milliseconds(
            lambda _: (a_ND.cuda() @ b_gpu).cpu(), queued=False
        ),
        "on the GPU, copied each way, pinned": milliseconds(
            lambda _: result_ND.copy_(
                pinned_ND.to("cuda", non_blocking=True) @ b_gpu, non_blocking=True
            ),
            queued=False,
        ),
    }
    title = f"[{PRODUCT_ROWS:,} x {DIM}] times [{DIM} x {DIM}], float32 ({torch.get_num_threads()} CPU threads)"
    section = Section("transfer", title, file)
    for where, ms in times.items():
        section.add(
            f"product {where}",
            {"time": (ms, "ms"), "over the GPU alone": (ms / times["on the GPU"], "times")},
        )
    section.print()
