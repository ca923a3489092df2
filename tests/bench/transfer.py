"""The link between CPU memory and the GPU: what this machine's link can do, and what random rows of a table reach of it.

    python tests/bench/transfer.py [--quick] [--parts records ...] [--gib 6 32] [--blocks 16 32 ...]

GB/s are 1e9 bytes/s; a share is of the contiguous copy rate of the same run in the same direction.
"""

from __future__ import annotations

import argparse
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.bench import memory, plot, results, speedtorch
from tests.bench.measure import Figures, Run, Section, at_once, milliseconds, rate, row_sets, share
from w2v.kernels import cuda
from w2v.model.table import Table

PARTS = ["speedtorch", "memory", "records", "product"]
BLOCKS = [16, 32, 64, 132, 264]


class Sizes(NamedTuple):
    copy_bytes: int
    fetched: int  # rows at a time, of SpeedTorch's own table
    table_rows: tuple[int, ...]  # of how many each
    memory_rows: int
    gib: tuple[
        float, ...
    ]  # tables for `records`; all record sizes in the first, `record_bytes_more` in the others
    record_bytes: tuple[int, ...]
    record_bytes_more: tuple[int, ...]
    counts: tuple[int, ...]  # rows moved at a time


FULL = Sizes(
    256_000_000,
    131_072,
    (1_000_000, 10_000_000),
    10_000_000,
    (6, 32),
    (256, 512, 1024, 1200, 1536, 2048, 4096),
    (512, 1536),
    (1024, 8192, 65_536, 524_288, 1_048_576),
)
QUICK = Sizes(
    16_000_000, 8192, (100_000,), 100_000, (0.125, 0.25), (512, 1536), (1536,), (1024, 8192)
)


def contiguous(nbytes: int) -> Figures:
    """Rates of cudaMemcpyAsync between pinned CPU memory and the GPU: each way, and both ways at once, which is their total."""
    host_in, host_out = (
        torch.randint(256, (nbytes,), dtype=torch.uint8, device="cuda").cpu().pin_memory()
        for _ in range(2)
    )
    gpu_in, gpu_out = (
        torch.randint(256, (nbytes,), dtype=torch.uint8, device="cuda") for _ in range(2)
    )

    def to_gpu(i: int) -> None:
        gpu_in.copy_(host_in, non_blocking=True)

    def from_gpu(i: int) -> None:
        host_out.copy_(gpu_out, non_blocking=True)

    return {
        "to GPU": rate(nbytes, milliseconds(to_gpu, queued=True)),
        "from GPU": rate(nbytes, milliseconds(from_gpu, queued=True)),
        "both": rate(2 * nbytes, milliseconds(at_once(to_gpu, from_gpu), queued=True)),
    }


def pinned_table(gib: float) -> tuple[Table, Figures]:
    """A pinned table of random numbers, and what it took to allocate, zero and register it."""
    start = time.perf_counter()
    table = Table("bench", int(gib * 2**30) // 128, 32, {}, {}, "pinned")
    seconds = time.perf_counter() - start
    noise = torch.randn(1 << 20, table.width, device="cuda")
    for part in table.records_VR.split(len(noise)):
        part.copy_(noise[: len(part)])
    return table, {"set-up": (seconds, "s"), "set-up rate": (gib / seconds, "GiB/s")}


def as_records(table: Table, record_bytes: int) -> Tensor:
    """The table's memory seen as records of another size, the rest left over: float32 [rows, record_bytes / 4]."""
    numbers, width = table.records_VR.view(-1), record_bytes // 4
    return numbers[: len(numbers) // width * width].view(-1, width)


class Moves:
    """Gather and scatter of `count` random records, sorted and unique, one by one and at once; those of one call are disjoint."""

    def __init__(self, records_VR: Tensor, count: int):
        self.records_VR, self.sets = records_VR, row_sets(len(records_VR), count)
        self.narrow = [rows.int() for rows in self.sets]
        self.nbytes = count * records_VR.shape[1] * 4
        self.arriving, self.leaving = (
            torch.randn(count, records_VR.shape[1], device="cuda") for _ in range(2)
        )
        self.address = torch.tensor([records_VR.data_ptr()], device="cuda")
        self.slots, self.numbers = (
            torch.arange(count, dtype=torch.int32, device="cuda"),
            torch.tensor([count, 0], device="cuda"),
        )
        self.disjoint = len(self.sets) > 1
        self._check()

    def both(self, i: int) -> None:
        coming, leaving = (self.narrow[(i + n) % len(self.sets)] for n in range(2))
        moves = cuda.Moves(coming, leaving, self.slots, self.numbers)
        cuda.exchange(moves, self.address, *self.records_VR.shape, self.leaving)

    def gather(self, i: int) -> None:
        cuda.gather_records(self.records_VR, self.sets[i % len(self.sets)], self.arriving)

    def scatter(self, i: int) -> None:
        cuda.scatter_records(self.records_VR, self.sets[(i + 1) % len(self.sets)], self.leaving)

    def _check(self) -> None:
        """What is about to be timed moves the right bytes; a thousand records stand for all."""
        self.scatter(-1)
        torch.cuda.synchronize()
        assert torch.equal(self.records_VR[self.sets[0][:1000].cpu()], self.leaving[:1000].cpu())
        self.gather(0)
        assert torch.equal(self.arriving[:1000], self.leaving[:1000])
        if self.disjoint:
            expected = self.leaving.clone(), self.arriving.clone()
            self.both(0)
            self.gather(1)
            assert torch.equal(self.arriving, expected[0]) and torch.equal(
                self.leaving, expected[1]
            )


def records(link: Figures, sizes: Sizes, file: Path) -> None:
    set_ups = Section("transfer", "Allocating, zeroing and registering pinned tables", file)
    for gib in sizes.gib:
        table, set_up = pinned_table(gib)
        set_ups.add(f"set-up {gib:g} GiB", set_up)
        section = Section(
            "transfer", f"Sorted random records of a pinned table of {gib:g} GiB", file
        )
        for record_bytes in sizes.record_bytes if gib == sizes.gib[0] else sizes.record_bytes_more:
            for count in sizes.counts:
                records_VR = as_records(table, record_bytes)
                if count <= len(records_VR):
                    case = f"records {record_bytes} B x {count} rows of {gib:g} GiB"
                    section.add(case, rates(Moves(records_VR, count), link))
        section.print()
        del table, records_VR
    set_ups.print()


def rates(moves: Moves, link: Figures) -> Figures:
    """Gather, scatter, and, where the table has rows enough, the total of both at once."""
    runs = {"gather": (moves.gather, 1, "to GPU"), "scatter": (moves.scatter, 1, "from GPU")}
    if moves.disjoint:
        runs["both"] = (moves.both, 2, "both")
    figures = {}
    for move, (run, directions, way) in runs.items():
        figures[move] = rate(directions * moves.nbytes, milliseconds(run, queued=True))
        figures[f"{move} share"] = share(figures[move], link[way])
    return figures


def blocks(link: Figures, sizes: Sizes, numbers: list[int], file: Path) -> None:
    """Rates by the number of thread blocks of the kernels."""
    table, _ = pinned_table(sizes.gib[0])
    count = min(65_536, sizes.counts[-1])
    moves = Moves(as_records(table, 1536), count)
    section = Section(
        "transfer",
        f"Thread blocks of the kernels: {count:,} records of 1,536 bytes of {sizes.gib[0]:g} GiB",
        file,
    )
    usual = cuda.MOVING_BLOCKS

    def launched(move: Run, number: int) -> Run:
        def run(i: int) -> None:
            cuda.MOVING_BLOCKS = number
            move(i)

        return run

    try:
        for number in numbers:
            figures = {}
            runs = [
                ("gather", moves.gather, 1, "to GPU"),
                ("scatter", moves.scatter, 1, "from GPU"),
                ("both", moves.both, 2, "both"),
            ]
            for move, run, directions, way in runs:
                figures[move] = rate(
                    directions * moves.nbytes, milliseconds(launched(run, number), queued=True)
                )
                figures[f"{move} share"] = share(figures[move], link[way])
            section.add(f"blocks {number}", figures)
    finally:
        cuda.MOVING_BLOCKS = usual
    section.print()


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="small sizes: does it run?")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument(
        "--gib",
        nargs="+",
        type=float,
        help="pinned tables of `records`; all must fit in CPU memory, one at a time (6 32)",
    )
    parser.add_argument(
        "--blocks",
        nargs="*",
        type=int,
        metavar="N",
        help=f"sweep the kernels' thread blocks instead ({BLOCKS})",
    )
    parser.add_argument("--results", type=Path, default=results.FILE)
    parser.add_argument(
        "--plot", type=Path, help="default: docs/transfer.png, and none with --quick or --blocks"
    )
    args = parser.parse_args(arguments)
    if min(args.blocks or [1]) < 1:
        parser.error(f"--blocks {min(args.blocks)}: a kernel needs one block or more")
    if not torch.cuda.is_available() or find_spec("cupy") is None:
        sys.exit(
            "bench-transfer needs a CUDA GPU and CuPy, and finds "
            + ("no CuPy" if torch.cuda.is_available() else "no GPU")
        )
    torch.manual_seed(0)
    sizes = QUICK if args.quick else FULL
    sizes = sizes._replace(gib=tuple(args.gib or sizes.gib))

    section = Section(
        "transfer", "Contiguous copies between pinned CPU memory and the GPU", args.results
    )
    link = contiguous(sizes.copy_bytes)
    section.add(f"contiguous {sizes.copy_bytes // 10**6} MB", link)
    section.print()
    if args.blocks is not None:
        blocks(link, sizes, args.blocks or BLOCKS, args.results)
        return
    if "records" in args.parts:
        records(link, sizes, args.results)
        if path := args.plot or (None if args.quick else plot.FILE):
            plot.draw(args.results, path)
    if "speedtorch" in args.parts:
        for rows in sizes.table_rows:
            speedtorch.rows(link, rows, sizes.fetched, args.results)
    if "memory" in args.parts:
        memory.tables(sizes.memory_rows, args.results)
    if "product" in args.parts:
        speedtorch.product(args.results)


if __name__ == "__main__":
    main()
