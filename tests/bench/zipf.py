"""Training on generated words, with tables larger than GPU memory.

    python tests/bench/zipf.py [--vocabulary 10000000] [--words 200000000]

Words follow Zipf's law and stand in random order, so that neighbouring batches share fewer rows
than those of a real text. The settings are those of configs/text8.yaml with Adam.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.bench import results, stages
from tests.bench.measure import GpuMemory
from tests.bench.results import Results
from tests.bench.steps import Steps
from tests.support.zipf import zipf_text
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
    text = text or zipf_text(args.vocabulary, args.words, device)
    generated = time.perf_counter() - began
    if device.type == "cuda":
        torch.cuda.empty_cache()  # the plan looks at the memory that is free
    if args.occupied:
        import cupy

        occupied = cupy.cuda.Memory(int(args.occupied * 2**30))  # noqa: F841  # until the end
    with GpuMemory() as gpu:
        planned = plan.make_plan(config, text, ranks=ranks)
        console.log.info(plan.describe(planned))
        console.log.debug(plan.describe_bytes(planned))
        began = time.perf_counter()
        steps = Steps(planned)
        set_up = time.perf_counter() - began
        steps(args.warm_up)  # fills the GPU memory for rows
    estimate = sum(planned.takes().get("gpu", {}).values())
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
