"""This program without a GPU against gensim, from text to scores.

    python tests/bench/cpu.py --corpus wiki100.txt --runs 3

Programs run in turn, each in a process of its own. Memory is the peak of the process (RSS), with
and without what importing torch takes. With --epochs 0 only the reading of the text is measured.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter, sleep

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.bench import results
from tests.bench.results import Figures, memory
from w2v.system.process import cores

ROOT = Path(__file__).parents[2]
CASES = {  # config files for train.py, and settings
    "gensim": [],
    "w2v SGD": ["configs/cpu.yaml"],
    "w2v Adam": ["configs/text8.yaml", "configs/optimizers/adam.yaml", "model.vector_size=100"],
}
POLL_SECONDS = 0.02


class Clock:
    """Seconds of one stage after another."""

    def __init__(self) -> None:
        self.figures: Figures = {}
        self._last = perf_counter()

    def done(self, stage: str, words: int = 0) -> None:
        """Note the seconds of a stage, and its words/s where `words` are given."""
        now = perf_counter()
        self.figures[f"{stage} [s]"] = now - self._last
        if words:
            self.figures["words/s"] = words / (now - self._last)
        self._last = now


def gensim(corpus: Path, epochs: int, folder: Path) -> Figures:
    """Train, score and save with gensim."""
    from gensim.models import Word2Vec
    from gensim.test.utils import datapath

    clock = Clock()
    settings = dict(vector_size=100, window=5, negative=5, sample=1e-4, min_count=5, sg=1)
    model = Word2Vec(**settings, workers=cores())
    model.build_vocab(corpus_file=str(corpus))
    words = model.corpus_total_words
    clock.done("ingest", words)
    if epochs:
        totals = dict(total_words=words, total_examples=model.corpus_count)
        model.train(corpus_file=str(corpus), epochs=epochs, **totals)
        clock.done("training", words * epochs)
        accuracy, _ = model.wv.evaluate_word_analogies(datapath("questions-words.txt"))
        clock.done("evaluation")
        model.wv.save(str(folder / "vectors.kv"))
        model.wv.save_word2vec_format(str(folder / "vectors.bin"), binary=True)
        clock.done("export")
        clock.figures["analogies [%]"] = 100 * accuracy
    return clock.figures


def ours(corpus: Path, epochs: int, folder: Path, arguments: list[str]) -> Figures:
    """Train, score and save with this program."""
    before = memory()
    import torch

    torch_memory = memory() - before
    if torch.get_num_threads() != cores():
        sys.exit(f"torch uses {torch.get_num_threads()} of {cores()} cores; unset OMP_NUM_THREADS")
    from tests.bench import steps
    from w2v.config import load_config
    from w2v.vectors import evaluate

    clock = Clock()
    files = [str(ROOT / word) for word in arguments if "=" not in word]
    settings = [word for word in arguments if "=" in word]
    settings += [f"corpus.path={corpus}", f"corpus.data_dir={folder}", "train.device=cpu"]
    planned = steps.make_plan(load_config(files, [*settings, f"train.epochs={max(1, epochs)}"]))
    words = planned.corpus.raw_words
    clock.done("ingest", words)
    if epochs:
        trainer = steps.train(planned, folder)
        steps.release(trainer)
        clock.done("training", words * epochs)
        score = evaluate.analogies(planned.vocab.words, steps.vectors(trainer))
        clock.done("evaluation")
        steps.export_vectors(trainer, folder)
        clock.done("export")
        clock.figures["analogies [%]"] = 100 * score.total.accuracy
    return clock.figures | {"torch [MiB]": torch_memory}


def measure(case: str, corpus: Path, epochs: int) -> Figures:
    """Run one case in a process of its own, and watch its memory."""
    command = [sys.executable, __file__, "--corpus", str(corpus), "--epochs", str(epochs)]
    began = perf_counter()
    peak = 0.0
    with subprocess.Popen([*command, "--case", case], stdout=subprocess.PIPE, text=True) as process:
        while process.poll() is None:
            peak = max(peak, memory(process.pid))
            sleep(POLL_SECONDS)
        seconds = perf_counter() - began
        lines = process.stdout.read().splitlines()
    if process.returncode:
        raise SystemExit(process.returncode)
    figures = json.loads(lines[-1])
    without_torch = peak - figures.pop("torch [MiB]", 0)
    figures |= {"peak [MiB]": peak, "peak without torch [MiB]": without_torch}
    return figures | {"whole process [s]": seconds}


def main(arguments: list[str] | None = None) -> None:
    parser = results.parser(__doc__)
    parser.add_argument("--corpus", type=Path, required=True, help="a text file, not compressed")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--case", choices=CASES, help="print the figures of one run, for this file")
    args = parser.parse_args(arguments)
    if args.case:
        with TemporaryDirectory() as folder:
            run = args.corpus.resolve(), args.epochs, Path(folder)
            figures = ours(*run, CASES[args.case]) if CASES[args.case] else gensim(*run)
        print(json.dumps(figures))
        return
    runs: dict[str, list[Figures]] = {case: [] for case in args.cases}
    for _ in range(args.runs):  # in turn, so that a busy machine slows all of them
        for case, of_case in runs.items():
            of_case.append(measure(case, args.corpus, args.epochs))
    found = results.Results("cpu", args.results)
    for case, of_case in runs.items():
        figures = {metric: median(run[metric] for run in of_case) for metric in of_case[0]}
        case = f"{args.corpus.stem} {args.epochs} epochs, {case}"
        found.add(case, {"runs": args.runs} | figures)


if __name__ == "__main__":
    main()
