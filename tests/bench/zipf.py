"""Training on generated words, with tables larger than GPU memory.

    python tests/bench/zipf.py [--vocabulary 10000000] [--words 200000000]

Words follow Zipf's law and stand in random order, so that neighbouring batches share fewer rows
than those of a real text. The settings are those of configs/text8.yaml with Adam.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.bench import results, stages
from tests.bench.measure import GpuMemory
from tests.bench.results import Results
from tests.bench.steps import Steps
from w2v.config import load_config
from w2v.system import console
from w2v.text.corpus import Corpus
from w2v.text.vocab import Vocab
from w2v.training import plan
from w2v.training.memory import Machine

CONFIGS = ["text8", "adam"]
COMMON = ["corpus.path=zipf", "vocab.min_count=1", "run.checkpoint_minutes=0"]
GENERATED = ["model.negative_pool_steps=8", "transfer.engine=mapped"]
SETTINGS = ["model.negative_pool=65536", "transfer.gpu_bytes=10%"]
SENTENCE = 1000  # words, about as many as in an article


class Numbered(Sequence[str]):
    """The words w0, w1, ...: a list of ten million would take 0.7 GB."""

    def __init__(self, count: int):
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, number: int) -> str:
        return f"w{range(self._count)[number]}"


def generate(vocabulary: int, words: int, device: torch.device) -> tuple[Vocab, Corpus]:
    """Return a vocabulary and a text of about `words` words in random order.

    Word r occurs in proportion to 1 / (r + 1), and at least once. Ids take 4
    bytes a word of CPU memory, and about 40 bytes a word on the device while they are shuffled.
    """
    share_V = 1 / np.arange(1, vocabulary + 1)
    counts_V = np.maximum(1, np.rint(words * share_V / share_V.sum())).astype(np.int64)
    total = int(counts_V.sum())
    generator = torch.Generator(device).manual_seed(0)
    order_N = torch.randperm(total, generator=generator, device=device)
    rows_V = torch.arange(vocabulary, dtype=torch.int32, device=device)
    repeats_V = torch.from_numpy(counts_V).to(device)
    ids_N = rows_V.repeat_interleave(repeats_V, output_size=total)[order_N]
    offsets_S = np.append(np.arange(0, total - 1, SENTENCE), total)  # no sentence of one word
    vocab = Vocab(Numbered(vocabulary), counts_V, total, vocabulary)
    return vocab, Corpus(ids_N.cpu().numpy(), offsets_S, total)


def measure(
    benchmark: str,
    settings: list[str],
    args: argparse.Namespace,
    text: tuple[Vocab, Corpus] | None = None,
) -> None:
    """Plan a run, time its steps after the warm-up, and save the figures.

    The text is generated unless it is given.
    """
    settings = [*settings, *args.set]
    config = load_config(CONFIGS, [*COMMON, *([] if text else GENERATED), *settings])
    ranks = plan.join_ranks(config)
    console.log_to_console(console.ERRORS if ranks.rank else console.DETAILS)
    device = plan.choose_device(config, Machine.here(ranks))
    began = time.perf_counter()
    text = text or generate(args.vocabulary, args.words, device)
    generated = time.perf_counter() - began
    if device.type == "cuda":
        torch.cuda.empty_cache()  # the plan looks at the memory that is free
    if args.occupied:
        import cupy

        occupied = cupy.cuda.Memory(int(args.occupied * 2**30))  # noqa: F841  # until the end
    with GpuMemory() as gpu:
        planned = plan.make_plan(config, text, ranks=ranks)
        planned.log()
        began = time.perf_counter()
        steps = Steps(planned)
        set_up = time.perf_counter() - began
        steps(args.warm_up)  # fills the GPU memory for rows
    estimate = sum(planned.budget.takes.get("gpu", {}).values())
    figures = steps.measure(args.steps)
    figures |= {"GPU estimate [GiB]": estimate / 2**30, "GPU peak [GiB]": gpu.bytes / 2**30}
    by_stage = stages.measure(steps)
    if ranks.rank == 0:
        gpus = f"{ranks.size} GPU{'s' * (ranks.size > 1)}, " if benchmark == "ranks" else ""
        case = f"{gpus}{len(text[0].words)} words of a text of {text[1].raw_words}, " + " ".join(
            [config.optimizer.name, config.train.precision, planned.engine, *settings]
        )
        times = {"generated in [s]": generated, "set-up [s]": set_up}
        Results(benchmark, args.results).add(case, figures | times | by_stage)
    ranks.leave()


def whole(text: str) -> int:
    """Return a whole number that may be written as 1e9."""
    return int(float(text))


def options(description: str, words: int) -> argparse.ArgumentParser:
    """Return the options of this benchmark and of ranks.py."""
    parser = results.parser(description)
    parser.add_argument("--vocabulary", "--rows", type=whole, default=10_000_000)
    parser.add_argument("--words", type=whole, default=words)
    parser.add_argument("--warm-up", type=int, default=200, metavar="STEPS")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument(
        "--occupied", type=float, default=0, metavar="GIB", help="GPU memory that others take"
    )
    return parser


def main(arguments: list[str] | None = None) -> None:
    parser = options(__doc__, 200_000_000)
    args = parser.parse_args(arguments)
    if min(args.vocabulary, args.words) < 2 or args.steps < 1:
        parser.error("--vocabulary and --words must be 2 or more, --steps 1 or more")
    try:
        measure("zipf", SETTINGS, args)
    except (ValueError, MemoryError) as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
