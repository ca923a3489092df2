"""Steps of paged embeddings and rows of a store, beside torch and CuPy.

    python tests/bench/library.py [--parts tables rows cache clicks nvidia]
    torchrun --nproc-per-node 2 tests/bench/library.py --parts clicks --samples 65536

`tables` steps two tables whose ids follow Zipf's law in random order of the rows; `rows` reads and
writes random rows of a `RowStore`; `cache` is the memory that a cache takes beside its rows;
`clicks` trains the model of docs/examples/clicks.py, which several GPUs share: rows are sharded
over them, and each has its part of a batch. `--scale 5.924` makes 200 M rows: 95 GiB with Adagrad
and 143 with Adam, which 16 threads (OMP_NUM_THREADS) pin at 7 GiB a second.

`nvidia` is the job of NVIDIA's dynamicemb benchmark: ten tables of 128 dimensions, 104,857 ids of
each by Zipf's law, forward, backward and update, of vectors whose gradients are given. It has 26.8
M rows a table there, which take 412 GB with Adam; `--rows 6500000` takes 100 GB.
"""

from __future__ import annotations

import argparse
import gc
import os
import runpy
import sys
import time
from collections.abc import Callable, Iterable
from functools import partial
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.bench import results, transfer
from tests.bench.measure import milliseconds, require_gpu, row_sets
from tests.bench.results import Results, memory
from w2v import PagedEmbedding, PagedOptimizer, RowStore

EXAMPLE = Path(__file__).parents[2] / "docs/examples/clicks.py"
Pair = list[Tensor]  # ids of users and of items
Step = Callable[[Any], None]
DIM = 64
STRIDE = 48_271  # a prime: neighbours by use are not neighbours by row
NVIDIA_GPU_ROWS = 1_677_721  # of a table that is on the GPU in NVIDIA's benchmark
SLOW_STEPS = 6  # measured where a step takes a tenth of a second
RANK, RANKS = (int(os.environ.get(name, one)) for name, one in (("RANK", 0), ("WORLD_SIZE", 1)))


def zipf(rows: int, count: int, skew: float) -> Tensor:
    """Return ids of which some row has the share 1 / r ** skew, r = 1, 2, ..."""
    power = 1 - skew
    uniform = torch.rand(count, dtype=torch.float64, device="cuda")
    rank = ((1 + uniform * ((rows + 1) ** power - 1)) ** (1 / power)).long() - 1
    return rank.clamp_(0, rows - 1) * STRIDE % rows


def per_second(batches: Iterable[Any], step: Step, warmups: int) -> float:
    """Return steps per second over all batches but the first ones."""
    batches = iter(batches)
    for batch in islice(batches, warmups):
        step(batch)
    torch.cuda.synchronize()
    start = time.perf_counter()
    steps = 0
    for batch in batches:
        step(batch)
        steps += 1
    torch.cuda.synchronize()
    return steps / (time.perf_counter() - start)


def measure(
    found: Results, case: str, make: Callable[[], tuple[Any, Step, Any]], warmups: int, batch: int
) -> None:
    """Measure batches and a step, with the memory that both take.

    `make` returns the batches, the step, and the tables whose transfers count.
    """
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    host, gpu = memory(), torch.cuda.memory_allocated()
    batches, step, tables = make()
    # On a GPU torch has another thread for backward passes, which takes .2 to .4 ms to wake.
    with torch.autograd.set_multithreading_enabled(False):
        rate = per_second(batches, step, warmups)
    figures = {
        "step [ms]": 1000 / rate,
        "samples/s": rate * batch,
        "GPU [MiB]": (torch.cuda.max_memory_allocated() - gpu) / 2**20,
        "host [MiB]": memory() - host,
    }
    stats = [table.store.stats for table in tables]
    if used := sum(its.rows_used for its in stats):
        figures["rows from CPU memory [%]"] = 100 * sum(its.rows_read for its in stats) / used
    if RANK == 0:
        found.add(case, figures)


def tables(rows: int, batch: int, steps: int, skew: float, only: str, found: Results) -> None:
    """Measure steps of two tables and Adam, by where the rows are."""
    pairs = [
        [zipf(rows, batch, skew).cpu().pin_memory() for _ in range(2)] for _ in range(2 * steps)
    ]
    about = f"2 x {rows} x {DIM}, {batch} ids"

    def paged(
        storage: str, gpu_bytes: str | int, ahead: bool, fused: bool = False
    ) -> tuple[Any, Step, Any]:
        users, items = (
            PagedEmbedding(rows, DIM, storage=storage, gpu_bytes=gpu_bytes, init=constant)
            for _ in range(2)
        )
        optimizer = PagedOptimizer([users, items], "Adam", lr=0.1, fused=fused)

        def step(pair: Pair) -> None:
            optimizer.zero_grad()
            loss_of(users(pair[0]), items(pair[1])).backward()
            optimizer.step()

        batches = optimizer.pages(pairs, [0, 1]) if ahead else pairs
        return batches, step, [users, items]

    def dense(kind: type, device: str, **settings: Any) -> tuple[Any, Step, Any]:
        sparse = kind is torch.optim.SparseAdam
        embeddings = [nn.Embedding(rows, DIM, device=device, sparse=sparse) for _ in range(2)]
        optimizer = kind([table.weight for table in embeddings], lr=0.1, **settings)

        def step(pair: Pair) -> None:
            optimizer.zero_grad()
            vectors = (
                table(ids.to(device, non_blocking=True)).to("cuda")
                for table, ids in zip(embeddings, pair, strict=True)
            )
            loss_of(*vectors).backward()
            optimizer.step()

        return pairs if device == "cuda" else pairs[: 2 + SLOW_STEPS], step, []

    cases: dict[str, Callable[[], tuple[Any, Step, Any]]] = {
        "on the GPU": lambda: paged("cuda", 0, False),
        "on the GPU, pages": lambda: paged("cuda", 0, True),
        "in CPU memory": lambda: paged("pinned", 0, False),
        "in CPU memory, room for 10 %, pages": lambda: paged("pinned", "10%", True),
        "on the GPU, pages, fused": lambda: paged("cuda", 0, True, fused=True),
        "in CPU memory, room for 10 %, pages, fused": lambda: paged(
            "pinned", "10%", True, fused=True
        ),
        "torch on the GPU, SparseAdam": lambda: dense(torch.optim.SparseAdam, "cuda"),
        "torch on the GPU, fused Adam": lambda: dense(torch.optim.Adam, "cuda", fused=True),
        "torch on the CPU, SparseAdam": lambda: dense(torch.optim.SparseAdam, "cpu"),
    }
    for case, make in cases.items():
        warmups = 2 if "on the CPU" in case else steps
        if only in case:
            measure(found, f"{about}: {case}", make, warmups, batch)


def constant(rows_n: Tensor, dim: int = DIM) -> Tensor:
    """Return initial weights that take no time."""
    return torch.full((len(rows_n), dim), 0.1, device=rows_n.device)


def loss_of(users_BD: Tensor, items_BD: Tensor) -> Tensor:
    """Return a loss of dot products."""
    return nn.functional.softplus(-(users_BD * items_BD).sum(1)).mean()


def by_store(table_rows: int, values_ND: Tensor) -> transfer.Way:
    """Read and write a `RowStore`."""
    rows = RowStore(table_rows, transfer.DIM, storage="pinned")
    return transfer.Way(rows.get, lambda ids: rows.put(ids, values_ND), lambda ids: ids, False)


def by_store_from_cpu(table_rows: int, values_ND: Tensor) -> transfer.Way:
    """Read and write a `RowStore` by ids in CPU memory, as in SpeedTorch."""
    return by_store(table_rows, values_ND)._replace(convert=Tensor.cpu)


def by_speedtorch(table_rows: int, values_ND: Tensor) -> transfer.Way:
    """Call SpeedTorch itself, whose ids are NumPy arrays."""
    from SpeedTorch import ModelFactory

    variable = nn.Embedding(*values_ND.shape, device="cuda")
    table = ModelFactory(variable, table_rows, transfer.DIM, CPUPinn=True)
    table.zerosInit()

    def get(ids: Any) -> Tensor:
        table.beforeForwardPass(ids)
        return variable.weight.data

    def put(ids: Any) -> None:
        variable.weight.data = values_ND
        table.afterOptimizerStep(ids)

    return transfer.Way(get, put, lambda ids: ids.cpu().numpy(), True)


def rows(table_rows: int, moved: int, found: Results) -> None:
    """Measure random rows of a `RowStore` and of others.

    SpeedTorch is one of these if it is installed: pip install SpeedTorch.
    """
    sets = row_sets(table_rows, moved)
    values_ND = torch.randn(moved, transfer.DIM, device="cuda")
    ways = {
        "RowStore": by_store,
        "RowStore, ids on the CPU": by_store_from_cpu,
        "kernels": transfer.ours,
        "CuPy pinned": transfer.by_cupy,
    }
    if find_spec("SpeedTorch"):
        ways["SpeedTorch"] = by_speedtorch
    for name, make in ways.items():
        get, put, convert, _ = make(table_rows, values_ND)
        asked = [convert(ids) for ids in sets]
        put(asked[0])
        assert torch.equal(get(asked[0]), values_ND)
        figures = {
            "get [ms]": milliseconds(partial(call, get, asked), queued=False),
            "put [ms]": milliseconds(partial(call, put, asked), queued=False),
        }
        found.add(f"{moved} of {table_rows} rows: {name}", figures)


def call(run: Callable[[Any], object], asked: list[Any], i: int) -> None:
    run(asked[i % len(asked)])


def narrow(rows_n: Tensor) -> Tensor:
    """Return initial weights of few dimensions."""
    return torch.zeros(len(rows_n), 4)


def cache(rows: int, found: Results) -> None:
    """Measure GPU memory beside a cache's rows, where batches are small."""
    batches = [torch.randint(rows, (1000,)) for _ in range(20)]
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    table = PagedEmbedding(rows, 4, storage="pinned", gpu_bytes="10%", init=narrow)
    optimizer = PagedOptimizer(table, "SGD", lr=0.1, fused=True)
    for batch in optimizer.pages(batches, lambda ids: ids):
        table(batch).sum().backward()
        optimizer.step()
    beside = torch.cuda.max_memory_allocated() - before - table.store.cache_bytes
    found.add(f"{rows} rows, room for 10 %", {"beside the cache [MiB]": beside / 2**20})


class Loss(nn.Module):
    """Loss by the features of a click model."""

    def __init__(self, top: nn.Module):
        super().__init__()
        self.top = top

    def forward(self, dense_BD: Tensor, features_BFD: Tensor, clicked: Tensor) -> Tensor:
        logits = self.top(dense_BD, features_BFD)
        return nn.functional.binary_cross_entropy_with_logits(logits, clicked)


class GraphedModel(nn.Module):
    """Loss of a click model; all but its look-ups is in CUDA graphs."""

    def __init__(self, model: nn.Module, numbers: Tensor, clicked: Tensor):
        super().__init__()
        self.model = model
        shape = len(clicked), 1 + len(model.bags), DIM
        features = torch.zeros(shape, device="cuda", requires_grad=True)
        dense = torch.zeros(len(clicked), DIM, device="cuda", requires_grad=True)
        model.bottom, self.loss = torch.cuda.make_graphed_callables(
            (model.bottom, Loss(model.top)), ((numbers.cuda(),), (dense, features, clicked.cuda()))
        )

    def forward(self, *given: Any) -> Tensor:
        *sample, clicked = given
        return self.loss(*self.model.features(*sample), clicked)


def clicks(args: argparse.Namespace, found: Results) -> None:
    """Measure the click model: tables on the GPUs, and with room for 10 %."""
    scale, batch, steps = args.scale, args.samples, args.steps // 4
    example = runpy.run_path(str(EXAMPLE))
    sizes = [max(3, round(rows * scale)) for rows in example["CRITEO"]]

    def samples() -> tuple:
        with torch.device("cuda"):
            numbers, ids, offsets, clicked = example["samples"](sizes, batch // RANKS, 1.05)
        numbers, ids, offsets, clicked = (
            its.cpu().pin_memory() for its in (numbers, ids, offsets, clicked)
        )
        return numbers, ids.unbind(), offsets, clicked

    made = [samples() for _ in range(2 * steps)]

    def train(storage: str, gpu_bytes: str | int) -> tuple[Any, Step, Any]:
        model = example["ClickModel"](sizes, DIM, storage, gpu_bytes).to("cuda")
        paged = PagedOptimizer(model, args.optimizer, lr=0.1, fused=True)
        dense = torch.optim.Adam(model.parameters(), lr=0.003, fused=True)
        loss_of: nn.Module = GraphedModel(model, made[0][0], made[0][-1])
        if RANKS > 1:
            loss_of = DistributedDataParallel(loss_of, gradient_as_bucket_view=True)

        def step(sample: tuple) -> None:
            numbers, ids, offsets, clicked = sample
            numbers, clicked = (its.to("cuda", non_blocking=True) for its in (numbers, clicked))
            loss = loss_of(numbers, ids, offsets, clicked)
            paged.zero_grad()
            dense.zero_grad()
            loss.backward()
            paged.step()
            dense.step()

        return paged.pages(made, key=lambda sample: sample[1]), step, model.bags

    about = (
        f"clicks, {args.optimizer}, {len(sizes)} tables, {sum(sizes)} rows x {DIM}, {batch} samples"
    )
    about += f", {RANKS} GPUs" * (RANKS > 1)
    for case, where in {
        "on the GPU": ("cuda", 0),
        "in CPU memory, room for 10 %": ("pinned", "10%"),
    }.items():
        if args.only in case:
            measure(found, f"{about}: {case}", lambda where=where: train(*where), steps, batch)


def nvidia(args: argparse.Namespace, found: Results) -> None:
    """Measure steps of rows alone: no model, and gradients that are given."""
    count, ids, dim = 10, 104_857, 128
    grads = torch.full((count, ids, dim), 1e-3, device="cuda").unbind()

    def train(rows: int, storage: str, gpu_bytes: str | int) -> tuple[Any, Step, Any]:
        batches = [
            torch.stack([zipf(rows, ids, args.skew) for _ in range(count)]).cpu().pin_memory()
            for _ in range(2 * args.steps)
        ]
        init = partial(constant, dim=dim)
        tables = [
            PagedEmbedding(rows, dim, storage=storage, gpu_bytes=gpu_bytes, init=init)
            for _ in range(count)
        ]
        optimizer = PagedOptimizer(tables, args.optimizer, lr=0.1, fused=True)

        def step(batch: tuple[Tensor, ...]) -> None:
            vectors = [table(its) for table, its in zip(tables, batch, strict=True)]
            torch.autograd.backward(vectors, grads)
            optimizer.step()

        made = (batch.unbind() for batch in batches)
        return optimizer.pages(made, key=lambda batch: batch), step, tables

    cases: dict[str, tuple[int, str, str | int]] = {
        "on the GPU": (NVIDIA_GPU_ROWS, "cuda", 0),
        "in CPU memory, room for 10 %": (args.rows, "pinned", "10%"),
        "in CPU memory, no cache": (args.rows, "pinned", 0),
    }
    for case, where in cases.items():
        about = f"nvidia, {args.optimizer}, {count} x {where[0]} x {dim}, {ids} ids: {case}"
        if args.only in case:
            measure(found, about, lambda where=where: train(*where), args.steps, count * ids)


def main(arguments: list[str] | None = None) -> None:
    parser = results.parser(__doc__)
    parts = ["tables", "rows", "cache", "clicks"]
    parser.add_argument("--parts", nargs="+", choices=[*parts, "nvidia"], default=parts)
    parser.add_argument("--rows", type=int, default=5_000_000, help="of a table in CPU memory")
    parser.add_argument("--batch", type=int, default=65_536, help="ids of each of `tables`")
    parser.add_argument("--skew", type=float, default=1.05, help="exponent of Zipf's law, not 1")
    parser.add_argument("--steps", type=int, default=200, help="to warm up, and again to measure")
    parser.add_argument("--scale", type=float, default=1, help="of the tables of `clicks`")
    parser.add_argument("--samples", type=int, default=8192, help="of a step of `clicks`")
    parser.add_argument("--optimizer", default="Adagrad", help="of `clicks` and `nvidia`")
    parser.add_argument("--only", default="", help="cases with this in their name")
    args = parser.parse_args(arguments)
    require_gpu("bench-library")
    if RANKS > 1:
        if args.parts != ["clicks"]:
            parser.error("several GPUs measure --parts clicks alone")
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group()
    torch.manual_seed(RANK)
    found = Results("library", args.results)
    if "tables" in args.parts:
        tables(args.rows, args.batch, args.steps, args.skew, args.only, found)
    if "rows" in args.parts:
        rows(10_000_000, 131_072, found)
    if "cache" in args.parts:
        cache(200_000_000, found)
    if "clicks" in args.parts:
        clicks(args, found)
    if "nvidia" in args.parts:
        nvidia(args, found)
    if RANKS > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
