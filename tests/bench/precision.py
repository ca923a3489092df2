"""What 16 bits change, by batch size: time of a step, GPU memory, and the loss after as many steps from the same start.

    python tests/bench/precision.py --corpus wiki100.txt [--steps 500] [--batches 128 1024 ...] [--set section.key=value ...]

float32; amp: products of matrices in bfloat16; bf16, fp16: the tables' rows too. The fused kernels multiply no matrices, so amp is
nothing of its own there. The learning rate goes with the batch as `w2v.api.compare.with_batch` says, and falls to 0 over the steps.
"""

from __future__ import annotations

import argparse
import sys
from importlib.util import find_spec
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.bench import plot_precision, results
from tests.bench.measure import Figures, Section
from tests.bench.steps import Steps, gpu_memory
from w2v.api.compare import Opened, with_batch
from w2v.config import Config, load_config
from w2v.system import console
from w2v.training import plan

BATCHES = [2**power for power in range(7, 17)]
PRECISIONS = {
    "reference": ["float32", "amp", "bf16", "fp16"],
    "fused": ["float32", "bf16", "fp16"],
}  # by kernels


def measure(config: Config, opened: Opened, number: int) -> Figures:
    """Time per step, after the first tenth of the steps, GPU memory, and the mean loss of a pair in their last tenth."""
    steps = Steps(plan.make_plan(config, opened(config)), number)
    tenth = max(1, number // 10)
    first, middle, last = steps(tenth), steps(number - 2 * tenth), steps(tenth)
    timed = number - tenth
    return {
        "step": (1000 * (middle.seconds + last.seconds) / timed, "ms"),
        **gpu_memory(steps.pipeline, steps.ids_N),
        "loss": (last.loss, ""),
        "first loss": (first.loss, ""),
    }


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--corpus", required=True)
    parser.add_argument("--base", nargs="+", default=["configs/text8.yaml"])
    parser.add_argument("--batches", nargs="+", type=int, default=BATCHES)
    parser.add_argument("--kernels", nargs="+", choices=PRECISIONS, default=list(PRECISIONS))
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--set", nargs="*", default=[], metavar="section.key=value")
    parser.add_argument("--results", type=Path, default=results.FILE)
    parser.add_argument("--plot", type=Path, default=plot_precision.FILE)
    args = parser.parse_args(arguments)
    if args.steps < 3:
        parser.error(f"--steps {args.steps}: 3 or more are needed to tell the first from the last")
    if not torch.cuda.is_available() or find_spec("cupy") is None:
        sys.exit(
            "bench-precision needs a CUDA GPU and CuPy, and finds "
            + ("no CuPy" if torch.cuda.is_available() else "no GPU")
        )
    console.log_to_console()
    try:
        sweep(args)
    except ValueError as error:
        sys.exit(str(error))
    plot_precision.draw(args.results, args.plot)


def sweep(args: argparse.Namespace) -> None:
    """Measure every batch size with every precision of the kernels."""
    opened = Opened()
    section = Section(
        "precision",
        f"{args.steps} steps on {Path(args.corpus).stem}, by precision, kernels and batch size",
        args.results,
    )
    for kernels in args.kernels:
        for precision in PRECISIONS[kernels]:
            common = [
                f"corpus.path={args.corpus}",
                "transfer.engine=resident",
                f"train.kernels={kernels}",
                f"train.precision={precision}",
            ]
            config = load_config(args.base, [*common, "run.checkpoint_minutes=0", *args.set])
            measure(config, opened, 3)  # compiles the kernels
            for batch in args.batches:
                case = " ".join(
                    [
                        Path(args.corpus).stem,
                        precision,
                        kernels,
                        f"batch {batch}",
                        f"{args.steps} steps",
                        *args.set,
                    ]
                )
                section.add(case, measure(with_batch(config, batch), opened, args.steps))
    section.print()


if __name__ == "__main__":
    main()
