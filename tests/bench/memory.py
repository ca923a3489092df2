"""What a table takes of CPU and GPU memory by the way that it is allocated, each in a process of its own."""

from __future__ import annotations

import multiprocessing
import re
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch

from tests.bench.measure import Figures, Section
from w2v.model.table import Table

DIM = 128


def ours(rows: int) -> tuple[Any, int]:
    table = Table("bench", rows, DIM, {}, {}, "pinned")
    return table, table.records_VR.data_ptr()


def torch_pinned(rows: int) -> tuple[Any, int]:
    table = torch.zeros(rows, DIM, pin_memory=True)
    return table, table.data_ptr()


def torch_cuda(rows: int) -> tuple[Any, int]:
    table = torch.zeros(rows, DIM, device="cuda")
    return table, table.data_ptr()


def cupy_pinned(rows: int) -> tuple[Any, int]:
    import cupy

    memory = cupy.cuda.alloc_pinned_memory(rows * DIM * 4)
    return torch.frombuffer(memory, dtype=torch.float32, count=rows * DIM).zero_(), memory.ptr


def cupy_cuda(rows: int) -> tuple[Any, int]:
    import cupy

    table = cupy.zeros((rows, DIM), cupy.float32)
    return table, table.data.ptr


WAYS = {
    "ours pinned": ours,
    "torch pinned": torch_pinned,
    "CuPy pinned": cupy_pinned,
    "torch CUDA": torch_cuda,
    "CuPy CUDA": cupy_cuda,
}


def tables(rows: int, file: Path) -> None:
    """Bytes of each way over those of the numbers, and the time to allocate and zero it."""
    nbytes = rows * DIM * 4
    section = Section(
        "transfer", f"Memory of {rows:,} x {DIM} float32, {nbytes / 1e9:.2f} GB", file
    )
    for way in WAYS:
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
            section.add(f"memory of {rows} rows, {way}", process.submit(taken, way, rows).result())
    section.print()


def taken(way: str, rows: int) -> Figures:
    """Growth of this process's memory by one table; run in a fresh process.

    RSS and locked are as Linux counts them; it counts what a driver allocates in neither, so "mapped" is what the address space
    holds for the table, whoever allocated it.
    """
    import cupy

    torch.ones(1 << 24).add_(1)  # starts the CPU threads
    cupy.zeros(1)
    torch.zeros(1, device="cuda")
    before, free, start = process_bytes(), torch.cuda.mem_get_info()[0], time.perf_counter()
    table, address = WAYS[way](rows)
    torch.cuda.synchronize()
    seconds, gpu, nbytes = (
        time.perf_counter() - start,
        free - torch.cuda.mem_get_info()[0],
        rows * DIM * 4,
    )
    after, mapped = (
        process_bytes(),
        0 if "CUDA" in way else mapping_bytes(Path("/proc/self/maps").read_text(), address, nbytes),
    )
    assert table is not None
    figures = {key: ((after[key] - before[key]) / 1e9, "GB") for key in before}
    figures |= {
        "mapped": (mapped / 1e9, "GB"),
        "GPU": (gpu / 1e9, "GB"),
        "over the table": (max(mapped, gpu) / nbytes, "times"),
    }
    return figures | {"set-up": (seconds, "s"), "set-up rate": (nbytes / 2**30 / seconds, "GiB/s")}


def process_bytes(status: str | None = None) -> dict[str, int]:
    """Bytes in memory and locked there, from the text of /proc/self/status, which is in KiB; 0 where the kernel does not say."""
    sizes = {
        key: 1024 * int(kib)
        for key, kib in re.findall(
            r"^(\w+):\s+(\d+) kB$", status or Path("/proc/self/status").read_text(), re.M
        )
    }
    return {"RSS": sizes.get("VmRSS", 0), "locked": sizes.get("VmLck", 0) + sizes.get("VmPin", 0)}


def mapping_bytes(maps: str, address: int, nbytes: int) -> int:
    """Bytes of the mappings, in the text of /proc/self/maps, that hold a piece of memory."""
    mappings = [
        tuple(int(end, 16) for end in line.split()[0].split("-")) for line in maps.splitlines()
    ]
    return sum(
        stop - start for start, stop in mappings if start < address + nbytes and stop > address
    )
