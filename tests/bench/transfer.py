"""Transfers of random rows between CPU memory and the GPU.

    python tests/bench/transfer.py [--parts records rows] [--gib 6 32]

GB/s are 1e9 bytes/s; a share is of the contiguous copies of the same run in the same direction.
Shapes: V rows of a table, D dimensions, N rows moved at a time, R numbers of a record.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.bench import plot, results
from tests.bench.measure import Run, at_once, gigabytes, milliseconds, require_gpu, row_sets
from tests.bench.results import Figures, Results
from w2v.rows import moves, ops
from w2v.rows.link import MappedLink
from w2v.rows.table import Table

DIM = 128  # of `rows`
CHUNK = 1 << 20  # rows that are filled at a time
COPY_BYTES = 256_000_000
RECORD_BYTES = (256, 512, 1024, 1200, 1536, 2048, 4096)  # in the first table
RECORD_BYTES_MORE = (512, 1536)  # in the other tables
COUNTS = (1024, 8192, 65_536, 524_288, 1_048_576)  # records moved at a time


class Way(NamedTuple):
    """A way to move rows of a table."""

    get: Callable[[Any], Tensor]
    put: Callable[[Any], object]
    convert: Callable[[Tensor], Any]  # row ids, as both take them
    queued: bool  # whether only the GPU works, see `milliseconds`


def contiguous(nbytes: int) -> Figures:
    """Return rates of contiguous copies: each way, and both at once."""
    # Random bytes: no memory controller can compress them.
    gpu_in, gpu_out = torch.randint(256, (2, nbytes), dtype=torch.uint8, device="cuda")
    host_in, host_out = gpu_in.cpu().pin_memory(), gpu_out.cpu().pin_memory()

    def to_gpu(i: int) -> None:
        gpu_in.copy_(host_in, non_blocking=True)

    def from_gpu(i: int) -> None:
        host_out.copy_(gpu_out, non_blocking=True)

    return {
        "to GPU [GB/s]": gigabytes(nbytes, milliseconds(to_gpu)),
        "from GPU [GB/s]": gigabytes(nbytes, milliseconds(from_gpu)),
        "both [GB/s]": gigabytes(2 * nbytes, milliseconds(at_once(to_gpu, from_gpu))),
    }


class Moves:
    """Gather and scatter of random, sorted, disjoint records."""

    def __init__(self, records_VR: Tensor, count: int):
        self._records_VR = records_VR
        self._sets = [rows.sort().values for rows in row_sets(len(records_VR), count)]
        self._arriving = torch.randn(count, records_VR.shape[1], device="cuda")
        self._leaving = torch.randn_like(self._arriving)
        self._slots = torch.arange(count, dtype=torch.int32, device="cuda")
        self._numbers = torch.tensor([count, 0], device="cuda")
        self._narrow = [rows.int() for rows in self._sets]
        self._check()

    def gather(self, i: int) -> None:
        ops.move_records(self._records_VR, self._sets[i % len(self._sets)], self._arriving)

    def scatter(self, i: int) -> None:
        rows = self._sets[(i + 1) % len(self._sets)]
        ops.move_records(self._records_VR, rows, self._leaving, to_table=True)

    def both(self, i: int) -> None:
        coming, leaving = (self._narrow[(i + n) % len(self._sets)] for n in range(2))
        listed = moves.Moves(coming, leaving, self._slots, self._numbers)
        moves.exchange_records(listed, self._records_VR, self._leaving)

    def rates(self, link: Figures) -> Figures:
        """Return the rates and their shares of contiguous copies."""
        runs = {"gather": (self.gather, 1, "to GPU"), "scatter": (self.scatter, 1, "from GPU")}
        if len(self._sets) > 1:
            runs["both"] = (self.both, 2, "both")
        figures = {}
        for move, (run, directions, way) in runs.items():
            nbytes = directions * self._arriving.nbytes
            figures[f"{move} [GB/s]"] = gigabytes(nbytes, milliseconds(run))
            share = figures[f"{move} [GB/s]"] / link[f"{way} [GB/s]"]
            figures[f"{move} share [%]"] = 100 * share
        return figures

    def _check(self) -> None:
        """Check that the right bytes move, on a thousand records."""
        self.scatter(-1)
        torch.cuda.synchronize()
        rows = self._sets[0][:1000].cpu()
        assert torch.equal(self._records_VR[rows], self._leaving[:1000].cpu())
        self.gather(0)
        assert torch.equal(self._arriving[:1000], self._leaving[:1000])
        if len(self._sets) > 1:
            sent, there = self._leaving.clone(), self._arriving.clone()
            self.both(0)
            self.gather(1)
            assert torch.equal(self._arriving, sent) and torch.equal(self._leaving, there)


def records(link: Figures, tables_gib: list[float], counts: list[int], found: Results) -> None:
    """Measure random records of pinned tables, by size and number."""
    for gib in tables_gib:
        began = time.perf_counter()
        table = Table("bench", int(gib * 2**30) // 128, 32, {}, {}, "pinned")
        seconds = time.perf_counter() - began
        found.add(f"set-up {gib:g} GiB", {"set-up [s]": seconds, "rate [GiB/s]": gib / seconds})
        noise = torch.randn(CHUNK, table.width, device="cuda")
        for part in table.records_VR.split(CHUNK):
            part.copy_(noise[: len(part)])
        # The memory of the table serves as records of every size.
        numbers = table.records_VR.view(-1)
        for record_bytes in RECORD_BYTES if gib == tables_gib[0] else RECORD_BYTES_MORE:
            width = record_bytes // 4
            records_VR = numbers[: len(numbers) // width * width].view(-1, width)
            for count in counts:
                if count <= len(records_VR):
                    case = f"records {record_bytes} B x {count} rows of {gib:g} GiB"
                    found.add(case, Moves(records_VR, count).rates(link))
        del table, numbers, records_VR  # before the next table is pinned


def rows(table_rows: int, moved: int, found: Results) -> None:
    """Measure unsorted rows of a table: here, by CuPy and by torch."""
    sets = row_sets(table_rows, moved)
    values_ND = torch.randn(moved, DIM, device="cuda")
    for name, make in WAYS.items():
        # Every row of the table holds its number, so that what comes can be checked.
        way = make(table_rows, values_ND)
        # Converting row ids is not what is measured.
        kept, written, *_ = converted = [way.convert(rows_N) for rows_N in sets]
        assert torch.equal(way.get(kept)[:, 0], sets[0].float())
        way.put(written)
        assert torch.equal(way.get(written), values_ND)
        figures = {}
        for metric, move in (("to GPU [ms]", way.get), ("from GPU [ms]", way.put)):
            figures[metric] = milliseconds(in_turn(move, converted), way.queued)
        found.add(f"{moved} of {table_rows} rows, {name}", figures)


def in_turn(move: Callable[[Any], object], sets: list[Any]) -> Run:
    """Return a run that moves one set of rows after another."""
    return lambda i: move(sets[i % len(sets)])


def ours(table_rows: int, values_ND: Tensor) -> Way:
    """Move rows of a pinned table; sorting and restoring the order count."""
    table = Table("bench", table_rows, DIM, {}, {}, "pinned")
    number_rows(table["weight"])
    link = MappedLink(table.records_VR)
    records_ND = torch.empty_like(values_ND)

    def get(rows_N: Tensor) -> Tensor:
        sorted_N, slots_N = rows_N.sort()
        link.read(sorted_N, records_ND, slots_N)
        return records_ND

    def put(rows_N: Tensor) -> None:
        sorted_N, slots_N = rows_N.sort()
        link.write(sorted_N, values_ND, slots_N)

    return Way(get, put, lambda rows_N: rows_N, True)


def by_cupy(table_rows: int, values_ND: Tensor) -> Way:
    """Index cudaHostAlloc memory with CuPy, as SpeedTorch does it."""
    import cupy

    nbytes = table_rows * DIM * 4
    memory = cupy.cuda.PinnedMemory(nbytes)
    device = torch.cuda.current_device()
    unowned = cupy.cuda.UnownedMemory(memory.ptr, nbytes, memory, device)
    pointer = cupy.cuda.MemoryPointer(unowned, 0)
    table_VD = cupy.ndarray((table_rows, DIM), cupy.float32, pointer)
    for start in range(0, table_rows, CHUNK):
        numbers = cupy.arange(start, min(start + CHUNK, table_rows), dtype=cupy.float32)
        table_VD[start : start + CHUNK] = numbers[:, None]
    values = cupy.asarray(values_ND)

    def put(rows_N: Any) -> None:
        table_VD[rows_N] = values

    return Way(lambda rows_N: torch.from_dlpack(table_VD[rows_N]), put, cupy.asarray, True)


def by_torch(table_rows: int, values_ND: Tensor) -> Way:
    """Index on the CPU and copy; the time of the CPU counts."""
    table_VD = torch.empty(table_rows, DIM, pin_memory=True)
    number_rows(table_VD)

    def put(rows_N: Tensor) -> None:
        table_VD[rows_N] = values_ND.cpu()

    return Way(lambda rows_N: table_VD[rows_N].to("cuda"), put, Tensor.cpu, False)


def by_buffer(table_rows: int, values_ND: Tensor) -> Way:
    """Gather into a pinned buffer, and copy that; the CPU's time counts."""
    table_VD = torch.empty(table_rows, DIM, pin_memory=True)
    buffer_ND = torch.empty(values_ND.shape, pin_memory=True)
    number_rows(table_VD)

    def get(rows_N: Tensor) -> Tensor:
        return torch.index_select(table_VD, 0, rows_N, out=buffer_ND).to("cuda")

    def put(rows_N: Tensor) -> None:
        table_VD.index_copy_(0, rows_N, buffer_ND.copy_(values_ND))

    return Way(get, put, Tensor.cpu, False)


WAYS = {
    "ours": ours,
    "CuPy pinned": by_cupy,
    "torch pinned, staged": by_buffer,
    "torch pinned": by_torch,
}


def number_rows(table_VD: Tensor) -> None:
    """Write each row's number into the row."""
    table_VD.copy_(torch.arange(len(table_VD), dtype=torch.float32)[:, None])


def main(arguments: list[str] | None = None) -> None:
    parser = results.parser(__doc__)
    parts = ["records", "rows"]
    parser.add_argument("--parts", nargs="+", choices=parts, default=parts)
    parser.add_argument("--gib", nargs="+", type=float, default=[6, 32], help="tables of `records`")
    parser.add_argument(
        "--counts", nargs="+", type=int, default=COUNTS, help="`records`: at a time"
    )
    parser.add_argument("--tables", nargs="+", type=int, default=[1_000_000, 10_000_000])
    parser.add_argument("--moved", type=int, default=131_072, help="of `rows`, at a time")
    parser.add_argument("--plot", type=Path, help="default: docs/dev/transfer.png")
    args = parser.parse_args(arguments)
    require_gpu("bench-transfer")
    torch.manual_seed(0)
    found = Results("transfer", args.results)
    link = contiguous(COPY_BYTES)
    found.add(f"contiguous {COPY_BYTES // 10**6} MB", link)
    if "records" in args.parts:
        records(link, args.gib, args.counts, found)
        plot.draw(found.path, args.plot)
    for table_rows in args.tables if "rows" in args.parts else ():
        rows(table_rows, args.moved, found)


if __name__ == "__main__":
    main()
