"""Text to vocabulary and ids against gensim's scan of the vocabulary, one after the other in one run: words/s and peak memory.

python tests/bench/ingest.py --corpus wiki100.txt --runs 3
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))


def scan_by_gensim(corpus: Path) -> int:
    """Count the words of the text as gensim does before it trains; returns how many it read."""
    from gensim.models.word2vec import LineSentence, Word2Vec

    return Word2Vec().scan_vocab(LineSentence(str(corpus)))[0]


def ingest_here(corpus: Path) -> int:
    """Vocabulary and ids of the text, from nothing to files on disk; returns how many words it read."""
    import os

    from w2v.config import CorpusConfig, VocabConfig
    from w2v.text.encode import ingest

    with TemporaryDirectory(dir=corpus.parent) as folder:
        return ingest(
            [corpus],
            Path(folder, "ids"),
            CorpusConfig(),
            VocabConfig(),
            len(os.sched_getaffinity(0)),
        ).raw_words


CASES: dict[str, Callable[[Path], int]] = {"gensim scan_vocab": scan_by_gensim, "w2v": ingest_here}


def measure(case: str, corpus: Path) -> dict[str, float]:
    """One run in a process of its own, after a short text that imports and compiles what it needs."""
    done = subprocess.run(
        [sys.executable, __file__, "--corpus", str(corpus), "--case", case],
        check=True,
        capture_output=True,
        text=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


def _measure_here(case: str, corpus: Path) -> dict[str, float]:
    import resource

    def peak() -> float:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

    with TemporaryDirectory() as folder:
        short = Path(folder, "short.txt")
        short.write_text("a short text of a few words\n" * 100)
        CASES[case](short)
    before, start = peak(), perf_counter()
    words = CASES[case](corpus)
    seconds = perf_counter() - start
    return {
        "words/s": words / seconds,
        "seconds": seconds,
        "peak memory": peak(),
        "above start": peak() - before,
    }


def compare(corpus: Path, runs: int) -> dict[str, dict[str, tuple[float, str]]]:
    """All cases in turn, `runs` times: {case: {metric: (median or spread, unit)}}."""
    found: dict[str, list[dict[str, float]]] = {case: [] for case in CASES}
    for _ in range(runs):
        for case, of_case in found.items():
            of_case.append(measure(case, corpus))
    units = {"words/s": "", "seconds": "s", "peak memory": "MiB", "above start": "MiB"}
    figures: dict[str, dict[str, tuple[float, str]]] = {}
    for case, of_case in found.items():
        figures[case] = {
            metric: (median(run[metric] for run in of_case), unit) for metric, unit in units.items()
        }
        speeds = [run["words/s"] for run in of_case]
        figures[case]["words/s spread"] = (max(speeds) - min(speeds), "")
    figures["w2v"]["words/s of gensim's"] = (
        figures["w2v"]["words/s"][0] / figures["gensim scan_vocab"]["words/s"][0],
        "x",
    )
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--corpus", required=True, type=Path)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument(
        "--case", choices=CASES, help="print one run's figures, for use by this program"
    )
    parser.add_argument("--results", type=Path)
    args = parser.parse_args()
    if args.case:
        print(json.dumps(_measure_here(args.case, args.corpus)))
        return
    compared = compare(args.corpus, args.runs)
    from tests.bench import (
        results,
    )  # not before: a process starts with its parent's peak memory, and torch's is large

    for case, figures in compared.items():
        results.append(
            "ingest",
            f"{args.corpus.stem} {case} runs={args.runs}",
            figures,
            args.results or results.FILE,
        )


if __name__ == "__main__":
    main()
