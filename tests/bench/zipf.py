"""Training on a generated text of very many words, whose tables are larger than the GPU memory for their rows.

    python tests/bench/zipf.py [--vocabulary 10000000] [--words 200000000] [--set section.key=value ...]

The words follow Zipf's law, and each stands where chance puts it: neighbouring batches share fewer rows than those of a real text, so
more rows move. There is no text, only ids; the model's settings are those of configs/text8.yaml with Adam.
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
from tests.bench import memory, results, stages
from tests.bench.measure import Figures
from tests.bench.steps import Moved, Steps, gpu_memory, link
from w2v.config import load_config
from w2v.system import console
from w2v.text.corpus import Corpus
from w2v.text.vocab import Vocab
from w2v.training import backends, plan
from w2v.training.machine import Machine
from w2v.training.plan import Plan

ROOT = Path(__file__).parents[2]
CONFIGS = [ROOT / "configs/text8.yaml", ROOT / "configs/optimizers/adam.yaml"]
SETTINGS = """
corpus.path=zipf vocab.min_count=1 model.negative_pool=65536 model.negative_pool_steps=8 transfer.engine=mapped transfer.gpu_bytes=10%
run.checkpoint_minutes=0
""".split()
SENTENCE = 1000  # words, about an article's


class Numbered(Sequence[str]):
    """The words w0, w1, ..., made when they are asked for: ten million of them would take 0.7 GB."""

    def __init__(self, count: int):
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, number: int) -> str:
        return f"w{range(self._count)[number]}"


def generate(
    vocabulary: int, words: int, exponent: float, device: torch.device, seed: int = 0
) -> tuple[Vocab, Corpus]:
    """About so many words in random order: word r occurs in proportion to 1 / (r + 1) ** exponent, and at least once.

    The ids take 4 bytes a word of CPU memory, and 20 or so a word on the device while they are shuffled.
    """
    share_V = np.arange(1, vocabulary + 1, dtype=np.float64) ** -exponent
    counts_V = np.maximum(1, np.rint(words * share_V / share_V.sum())).astype(np.int64)
    total = int(counts_V.sum())
    order_N = torch.randperm(
        total, generator=torch.Generator(device).manual_seed(seed), device=device
    )
    rows_V = torch.arange(vocabulary, dtype=torch.int32, device=device)
    ids_N = rows_V.repeat_interleave(torch.from_numpy(counts_V).to(device), output_size=total)[
        order_N
    ]
    offsets_S = np.append(np.arange(0, total - 1, SENTENCE), total)  # no sentence of one word
    return Vocab(Numbered(vocabulary), counts_V, total, vocabulary), Corpus(
        ids_N.cpu().numpy(), offsets_S, total
    )


def train(planned: Plan, warm_up: int, number: int) -> tuple[Figures, Figures]:
    """Figures of so many steps after the warm-up, which fills the rows' GPU memory; and of the stages of a step."""
    began = time.perf_counter()
    steps = Steps(planned)
    set_up = time.perf_counter() - began
    steps(warm_up)
    before = Moved.by(steps.pipeline)
    stretch = steps(number)
    moved = Moved.by(steps.pipeline).since(before)
    host = memory.process_bytes()
    figures = {
        "words/s": (stretch.words / stretch.seconds, ""),
        "seconds": (stretch.seconds, "s"),
        "step": (1000 * stretch.seconds / number, "ms"),
        "loss": (stretch.loss, ""),
        **link(moved, steps.pipeline, stretch.words, stretch.seconds),
        **gpu_memory(steps.pipeline, steps.ids_N),
        "tables": (planned.table_bytes / 2**30, "GiB"),
        "host memory": (host["RSS"] / 2**30, "GiB"),
        "set-up": (set_up, "s"),
    }
    return figures, stages.measure(steps)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--vocabulary", type=int, default=10_000_000)
    parser.add_argument("--words", type=int, default=200_000_000)
    parser.add_argument("--exponent", type=float, default=1.0)
    parser.add_argument("--warm-up", type=int, default=200, metavar="STEPS")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--set", nargs="*", default=[], metavar="section.key=value")
    parser.add_argument("--results", type=Path, default=results.FILE)
    args = parser.parse_args(arguments)
    if min(args.vocabulary, args.words) < 2 or args.steps < 1:
        parser.error("--vocabulary and --words must be 2 or more, --steps 1 or more")
    console.log_to_console()
    try:
        config = load_config(CONFIGS, [*SETTINGS, *args.set])
        device = backends.choose_device(config, Machine.here())
        began = time.perf_counter()
        opened = generate(args.vocabulary, args.words, args.exponent, device)
        generated = time.perf_counter() - began
        if device.type == "cuda":
            torch.cuda.empty_cache()  # the plan looks at what is free
        planned = plan.make_plan(config, opened)
        print(planned, flush=True)
        figures, measured = train(planned, args.warm_up, args.steps)
    except (ValueError, MemoryError) as error:
        sys.exit(str(error))
    engine = planned.engine + (
        f":{config.transfer.gpu_bytes}" if planned.engine in backends.LINKS else ""
    )
    case = f"{args.vocabulary} words of a text of {opened[1].raw_words}, exponent {args.exponent:g}, {config.optimizer.name} "
    case += f"{config.train.precision} {engine} negative_pool={config.model.negative_pool} for {config.model.negative_pool_steps} steps"
    case = " ".join([case, *args.set])
    results.append("zipf", case, figures | {"generated in": (generated, "s")}, args.results)
    results.append("stages", f"zipf {case}", measured, args.results)


if __name__ == "__main__":
    main()
