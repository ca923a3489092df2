"""Time, GPU memory and loss of steps by precision and batch size.

    python tests/bench/precision.py --corpus wiki100.txt [--steps 500] [--batches 128 1024 ...]

The learning rate is the automatic one, and falls to 0.
The fused kernels use no matrix products, so that amp would change nothing there.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.bench import plot, results
from tests.bench.measure import require_gpu
from tests.bench.results import Figures, Results
from tests.bench.steps import Steps, gpu_memory, make_plan
from w2v.config import Config, load_config
from w2v.system import console
from w2v.text import open_corpus
from w2v.text.corpus import Corpus
from w2v.text.vocab import Vocab

BATCHES = [2**power for power in range(7, 17)]
PRECISIONS = {  # by kernels
    "reference": ["float32", "amp", "bf16", "fp16"],
    "fused": ["float32", "bf16", "fp16"],
}


def measure(config: Config, text: tuple[Vocab, Corpus], number: int) -> Figures:
    """Return time, GPU memory, and loss of the last tenth of the steps."""
    steps = Steps(make_plan(config, text), number)
    # The first steps warm up; the last ones say how far the loss came.
    tenth = max(1, number // 10)
    first = steps(tenth)
    middle = steps(number - 2 * tenth)
    last = steps(tenth)
    return {
        "step [ms]": 1000 * (middle.seconds + last.seconds) / (number - tenth),
        **gpu_memory(steps.step),
        "loss": last.loss,
        "first loss": first.loss,
    }


def sweep(args: argparse.Namespace) -> Path:
    """Measure each batch size with each precision; return the file of results."""
    found = Results("precision", args.results)
    corpus = Path(args.corpus).stem
    text = None
    for kernels in args.kernels:
        for precision in PRECISIONS[kernels]:
            common = [f"corpus.path={args.corpus}", "transfer.engine=resident"]
            common += [f"train.kernels={kernels}", f"train.precision={precision}"]
            config = load_config(["text8"], [*common, "run.checkpoint_minutes=0", *args.set])
            text = text or open_corpus(config)
            measure(config, text, 3)  # compiles the kernels
            for batch in args.batches:
                case = f"{corpus} {precision} {kernels} batch {batch} {args.steps} steps"
                train = replace(config.train, batch_size=batch)
                figures = measure(replace(config, train=train), text, args.steps)
                found.add(" ".join([case, *args.set]), figures)
    return found.path


def main(arguments: list[str] | None = None) -> None:
    parser = results.parser(__doc__)
    parser.add_argument("--corpus", required=True)
    parser.add_argument("--batches", nargs="+", type=int, default=BATCHES)
    parser.add_argument("--kernels", nargs="+", choices=PRECISIONS, default=list(PRECISIONS))
    parser.add_argument("--steps", type=int, default=500)
    args = parser.parse_args(arguments)
    if args.steps < 3:
        parser.error(f"--steps {args.steps}: 3 or more are needed to tell the first from the last")
    require_gpu("bench-precision")
    console.log_to_console()
    try:
        plot.draw(sweep(args))
    except ValueError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
