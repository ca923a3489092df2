"""Training on several GPUs of one machine or more: words/s, what links and network carry, and what the time of a step goes into.

    python tests/bench/ranks.py                                one GPU
    torchrun --nproc-per-node 4 tests/bench/ranks.py           four, with the same batch in all
    torchrun --nproc-per-node 4 tests/bench/ranks.py --batch 524288 --room .4     four, each with what the one had
    torchrun --nproc-per-node 4 tests/bench/ranks.py --rows 100e6 --steps 200     tables that fill the machine's memory

The words are those of zipf.py, but each is drawn by itself, and each rank draws its own share of the text; the batch is shared out among
the ranks, and so is a pool of half as many noise words, which serves eight steps. Tables are pinned, and `--room` is that of all GPUs
together. With both the same for one GPU and for several, several have smaller steps and no more memory to keep rows in (strong scaling);
with both in proportion, each GPU has what the one had (weak scaling).
"""

from __future__ import annotations

import argparse
import mmap
import sys
import time
from itertools import count
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.bench import memory, results, stages
from tests.bench.measure import Figures
from tests.bench.steps import Moved, Steps
from tests.bench.zipf import CONFIGS, SENTENCE, Numbered
from w2v.config import Config, load_config
from w2v.distributed import launcher as torchrun
from w2v.distributed.exchange import ShardedPipeline
from w2v.distributed.ranks import SINGLE, ProcessGroup, Ranks
from w2v.kernels import cuda
from w2v.model.optim import RowOptimizer
from w2v.model.sampler import Sampler
from w2v.model.table import Table, uniform
from w2v.system.process import cores
from w2v.text.vocab import Vocab
from w2v.training.paging import Spectrum, Traffic
from w2v.training.step import FusedPipeline
from w2v.transfer.cache_mapped import CachedMapped

DRAWN = 1 << 26  # words at a time
SENDS = ("weights", "gradients")  # in the order in which a step sends them


class Timed(ProcessGroup):
    """Ranks that note how long the current stream is busy with what is sent, waiting for others included."""

    def __init__(self):
        super().__init__("cuda")
        self._spans = None

    def all_to_all(self, rows_NX, sent, received, ahead=False):
        if self._spans is None:
            return super().all_to_all(rows_NX, sent, received, ahead)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        came = super().all_to_all(rows_NX, sent, received, ahead)
        end.record()
        self._spans.append((ahead, begin, end))
        return came

    def note(self):
        self._spans = []

    def noted(self) -> dict[str, float]:
        """Milliseconds of each kind since `note`."""
        torch.cuda.synchronize()
        spans, self._spans, sums, turn = self._spans, None, dict.fromkeys(("ids", *SENDS), 0.0), 0
        for ahead, begin, end in spans:
            name = "ids" if ahead else SENDS[turn]
            turn = turn if ahead else (turn + 1) % len(SENDS)
            sums[name] += begin.elapsed_time(end)
        return sums


class Shares(Steps):
    """The steps of this rank's share of the text, and of its rows; their time is that of all ranks."""

    def __init__(
        self, config: Config, ranks: Ranks, rows: int, words: int, batch: int, room: float
    ):
        self.device, self._ranks, self._raw_words = torch.device("cuda"), ranks, words // ranks.size
        self._total, self._done, self._passes = 0, 0, 0.0
        model, self._optimizer = config.model, config.optimizer
        share_V = torch.arange(1, rows + 1, dtype=torch.float64, device=self.device).reciprocal_()
        share_V /= share_V.sum()
        counts_V = (words * share_V).round_().clamp_(min=1).long()
        self.ids_N = self._draw(share_V.cumsum(0))
        vocab = Vocab(Numbered(rows), counts_V.cpu().numpy(), words, rows)
        keep_V, noise_V = (
            vocab.keep_probabilities(model.sample),
            vocab.noise_distribution(model.ns_exponent),
        )
        offsets_S = np.append(np.arange(0, self._raw_words - 1, SENTENCE), self._raw_words)
        sampler = Sampler(
            self.ids_N,
            offsets_S,
            keep_V,
            noise_V,
            model,
            batch // ranks.size,
            ranks.rank,
            self.device,
            draw=cuda.draw,
        )

        optimizer, size = RowOptimizer(config.optimizer, fused=True), model.vector_size
        tables = [
            Table(
                key,
                ranks.shard_rows(rows),
                size,
                optimizer.states(size),
                optimizer.scalars,
                "pinned",
            )
            for key in ("input", "output")
        ]
        values = uniform(size, 0.5 / size, config.train.seed)
        tables[0].initialise(lambda rows_n: values(ranks.global_rows(rows_n)), self.device)
        fields = sum(column.stop - column.start for column in tables[0].columns.values())
        self.bytes = sum(
            table.rows * fields * table.dtype.itemsize for table in tables
        )  # of the numbers, without padding
        self.pinned = sum(-(-table.bytes // mmap.PAGESIZE) * mmap.PAGESIZE for table in tables)
        kept_V = counts_V * torch.from_numpy(keep_V).to(self.device)
        uses_TV = torch.stack(
            [
                kept_V,
                kept_V + model.negative * kept_V.sum() * torch.from_numpy(noise_V).to(self.device),
            ]
        )
        engine = CachedMapped(
            tables,
            int(room * 2 * tables[0].rows),
            self.device,
            uses_TV[:, ranks.rank :: ranks.size].contiguous(),
        )
        del share_V, counts_V, kept_V, uses_TV
        torch.cuda.empty_cache()
        kind, traffic = (
            FusedPipeline if ranks.size == 1 else ShardedPipeline,
            Traffic(Spectrum.zipf(rows, words), model),
        )
        steps_per_page = config.transfer.steps_per_page or traffic.steps_of_page(
            batch // ranks.size, engine.slots, ranks.size
        )
        self.pipeline = kind(
            *tables, engine, optimizer, self.device, steps_per_page, ranks=ranks, rows=rows
        )
        self._ahead = self.pipeline.ahead(batch for _ in count() for batch in sampler.epoch())

    def _draw(self, cdf_V: torch.Tensor) -> torch.Tensor:
        generator = torch.Generator(self.device).manual_seed(self._ranks.rank)
        ids_N = torch.empty(self._raw_words, dtype=torch.int32, device=self.device)
        for part in ids_N.split(DRAWN):
            uniform_n = torch.rand(
                len(part), dtype=torch.float64, device=self.device, generator=generator
            )
            part.copy_(
                torch.searchsorted(cdf_V, uniform_n, out_int32=True).clamp_(max=len(cdf_V) - 1)
            )
        return ids_N

    def _wait(self) -> None:
        torch.cuda.synchronize()
        self._ranks.all_gather(None)


def measure(steps: Shares, ranks: Ranks, warm_up: int, number: int) -> tuple[Figures, Figures]:
    """Figures of so many steps of all ranks after the warm-up, which fills the rows' GPU memory; and of the stages of this rank's."""
    steps(warm_up)
    before, sent = Moved.by(steps.pipeline), ranks.bytes_sent
    stretch = steps(number)
    moved, sent = Moved.by(steps.pipeline).since(before), ranks.bytes_sent - sent
    gigabytes, rss = (
        steps.pipeline.inputs.bytes / steps.pipeline.inputs.rows / 1e9,
        memory.process_bytes()["RSS"],
    )
    mine = (
        stretch.words,
        moved.read * gigabytes,
        moved.written * gigabytes,
        sent / 1e9,
        steps.bytes,
        steps.pinned,
        rss,
    )
    words, read, written, sent, records, pinned, rss = (
        sum(figure) for figure in zip(*ranks.all_gather(mine), strict=True)
    )
    figures = {
        "words/s": (words / stretch.seconds, ""),
        "step": (1000 * stretch.seconds / number, "ms"),
        "CPU": (1000 * stretch.cpu / number, "ms"),
        "loss": (stretch.loss, ""),
        "to a GPU": (read / ranks.size / stretch.seconds, "GB/s"),
        "from a GPU": (written / ranks.size / stretch.seconds, "GB/s"),
        "sent by a GPU": (sent / ranks.size / stretch.seconds, "GB/s"),
        "gpu memory": (steps.pipeline.bytes_gpu / 2**30, "GiB"),
        "records": (records / 2**30, "GiB"),
        "pinned over records": (pinned / records, "times"),
        "host memory over records": (rss / records, "times"),
    }
    noted = {}
    if isinstance(ranks, Timed):
        ranks.note()
        steps(stages.MEASURED)
        noted = {
            f"{name}, sent": (1000 * ms / stages.MEASURED, "us")
            for name, ms in ranks.noted().items()
        }
    return figures, stages.measure(steps) | noted


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--rows",
        type=lambda number: int(float(number)),
        default=10_000_000,
        help="of each of the two tables",
    )
    parser.add_argument("--words", type=lambda number: int(float(number)), default=1_000_000_000)
    parser.add_argument(
        "--batch", type=int, default=131_072, metavar="CENTERS", help="of a step of all ranks"
    )
    parser.add_argument(
        "--room",
        type=float,
        default=0.1,
        metavar="SHARE",
        help="of the rows, for which the GPUs together have memory",
    )
    parser.add_argument("--warm-up", type=int, default=200, metavar="STEPS")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--set", nargs="*", default=[], metavar="section.key=value")
    parser.add_argument("--results", type=Path, default=results.FILE)
    args = parser.parse_args()
    ranks = Timed() if torchrun.started() else SINGLE
    torch.cuda.set_device(ranks.local_rank)
    torch.set_num_threads(max(1, cores() // ranks.local_size))
    config = load_config(
        CONFIGS,
        [
            f"model.negative_pool={args.batch // 2 // ranks.size}",
            "model.negative_pool_steps=8",
            *args.set,
        ],
    )
    began = time.perf_counter()
    steps = Shares(config, ranks, args.rows, args.words, args.batch, args.room)
    ranks.all_gather(None)
    set_up = {"set-up": (time.perf_counter() - began, "s")}
    figures, measured = measure(steps, ranks, args.warm_up, args.steps)
    if ranks.rank == 0:
        case = f"{ranks.size} GPUs, {args.rows} rows, {args.words} words, Adam float32 mapped:{args.room:.0%}"
        case = " ".join(
            [
                case,
                f"batch {args.batch} pool {args.batch // 2} for {config.model.negative_pool_steps} steps",
                *args.set,
            ]
        )
        results.append("ranks", case, figures | set_up, args.results)
        results.append("stages", f"ranks {case}", measured, args.results)
    ranks.leave()


if __name__ == "__main__":
    main()
