"""CPU seconds of Word2Vec(sentences) for a small text, beside gensim.

    python tests/bench/small.py --corpus wiki100.txt --models skipgram cbow

Each run is the first call in a process of its own that has imported the class; the first process,
which may compile kernels, does not count. Cases take turns, so that a busy machine slows all.
"""

from __future__ import annotations

import subprocess
import sys
from itertools import islice
from pathlib import Path
from statistics import median
from time import process_time
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.bench import results
from tests.bench.cpu import CLASSES, MODELS

CASES = ["gensim", "Word2Vec Adam", "Word2Vec SGD"]


def call(case: str, model: str, corpus: Path, words: int) -> float:
    """Return the CPU seconds of a call that trains on the first words."""
    if case == "gensim":
        from gensim.models import Word2Vec
    else:
        from w2v import Word2Vec
    sentences = []
    with open(corpus, encoding="utf-8") as lines:
        while words > 0:
            sentences.append(list(islice(next(lines).split(), words)))
            words -= len(sentences[-1])
    arguments: dict[str, Any] = CLASSES[case] | MODELS[model]
    begun = process_time()
    Word2Vec(sentences, **arguments)
    return process_time() - begun


def main() -> None:
    """Measure as the command line says."""
    parser = results.parser(__doc__)
    parser.add_argument("--corpus", type=Path, required=True, help="a text file, not compressed")
    parser.add_argument("--words", type=int, default=17_000)
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["skipgram"])
    parser.add_argument("--case", choices=CASES, help="print the seconds of one call")
    args = parser.parse_args()
    if args.case:
        print(call(args.case, args.models[0], args.corpus, args.words))
        return
    found = results.Results("small", args.results)
    for model in args.models:
        seconds: dict[str, list[float]] = {case: [] for case in CASES}
        for run in range(args.runs + 1):
            for case, its in seconds.items():
                command = [sys.executable, __file__, "--corpus", str(args.corpus)]
                command += ["--words", str(args.words), "--models", model, "--case", case]
                done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
                if run:
                    its.append(float(done.stdout.splitlines()[-1]))
        for case, its in seconds.items():
            figures = {"runs": args.runs, "least [s]": min(its), "median [s]": median(its)}
            found.add(f"{args.words:,} words, {model}, {case}", figures)


if __name__ == "__main__":
    main()
