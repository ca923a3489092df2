"""This program without a GPU against gensim, from text to scores.

    python tests/bench/cpu.py --corpus wiki100.txt --runs 3
    python tests/bench/cpu.py --corpus wiki100.txt --cores 1 4 16
    python tests/bench/cpu.py --corpus wiki100.txt --cases gensim "Word2Vec SGD" \\
        --models skipgram cbow skipgram-hs cbow-hs

Programs run in turn, each in a process of its own and with the seeds 1, 2, ... Times and memory are
medians of the runs, scores are means with their standard deviation. Memory is the peak of the
process (RSS), with and without what importing torch takes. With --epochs 0 only the reading of the
text is measured.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import product
from pathlib import Path
from statistics import mean, median, stdev
from tempfile import TemporaryDirectory
from time import perf_counter, sleep
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.bench import results
from tests.bench.results import Figures, memory
from w2v.system.process import cores

ROOT = Path(__file__).parents[2]
PROGRAMS = {  # config files for train.py, and settings
    "w2v SGD": ["configs/cpu.yaml"],
    "w2v Adam": ["configs/text8.yaml", "configs/optimizers/adam.yaml"],
}
# Arguments of gensim's class, or of ours where there is an optimizer.
CLASSES: dict[str, dict[str, Any]] = {
    "gensim": {},
    "gensim alpha .05": {"alpha": 0.05},
    "gensim sentences": {"sentences": True},  # in place of a corpus_file
    "Word2Vec SGD": {"optimizer": "SGD", "alpha": 0.025, "device": "cpu"},
    "Word2Vec Adam": {"optimizer": "Adam", "device": "cpu"},
    "Word2Vec Adamax": {"optimizer": "Adamax", "device": "cpu"},
}
CASES = [*CLASSES, *PROGRAMS]
MODELS = {  # of the classes
    "skipgram": {"sg": 1},
    "cbow": {"sg": 0},
    "skipgram-hs": {"sg": 1, "hs": 1, "negative": 0},
    "cbow-hs": {"sg": 0, "hs": 1, "negative": 0},
}
PAIRS = ["wordsim353.tsv", "simlex999.txt"]
SCORES = ["analogies [%]", "wordsim353", "simlex999"]
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


def gensim(corpus: Path, epochs: int, seed: int, folder: Path, given: dict[str, Any]) -> Figures:
    """Train, score and save with gensim's class, or with ours."""
    if "optimizer" in given:
        from w2v import Word2Vec
    else:
        from gensim.models import Word2Vec
    from gensim.models.word2vec import LineSentence
    from gensim.test.utils import datapath

    text: dict[str, Any] = {"corpus_file": str(corpus)}
    if "sentences" in given:
        given = {name: value for name, value in given.items() if name != "sentences"}
        text = {"corpus_iterable": LineSentence(str(corpus))}
    clock = Clock()
    settings = dict(window=5, sample=1e-4, min_count=5, workers=cores(), seed=seed)
    model = Word2Vec(**settings, epochs=max(1, epochs), **given)
    model.build_vocab(**text)
    words = model.corpus_total_words
    clock.done("ingest", words)
    if epochs:
        totals = dict(total_words=words, total_examples=model.corpus_count)
        model.train(**text, epochs=epochs, **totals)
        clock.done("training", words * epochs)
        accuracy, _ = model.wv.evaluate_word_analogies(datapath("questions-words.txt"))
        clock.done("evaluation")
        model.wv.save(str(folder / "vectors.kv"))
        model.wv.save_word2vec_format(str(folder / "vectors.bin"), binary=True)
        clock.done("export")
        judged = [model.wv.evaluate_word_pairs(datapath(name)) for name in PAIRS]
        clock.figures |= dict(
            zip(SCORES, [100 * accuracy] + [j[1][0] for j in judged], strict=True)
        )
    return clock.figures


def ours(corpus: Path, epochs: int, seed: int, folder: Path, arguments: list[str]) -> Figures:
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
    settings += [f"train.seed={seed}"]
    planned = steps.make_plan(load_config(files, [*settings, f"train.epochs={max(1, epochs)}"]))
    words = planned.corpus.raw_words
    clock.done("ingest", words)
    if epochs:
        trainer = steps.train(planned, folder)
        steps.release(trainer)
        clock.done("training", words * epochs)
        scorer = evaluate.Scorer(planned.vocab.words, steps.vectors(trainer))
        score = scorer.analogies()
        clock.done("evaluation")
        steps.export_vectors(trainer, folder)
        clock.done("export")
        clock.figures["analogies [%]"] = 100 * score.total.accuracy
        for name in SCORES[1:]:
            clock.figures[name] = scorer.similarity(name).spearman or 0.0
    return clock.figures | {"torch [MiB]": torch_memory}


def measure(arguments: list[str]) -> Figures:
    """Run one case in a process of its own, and watch its memory."""
    command = [sys.executable, __file__, *arguments]
    began = perf_counter()
    peak = 0.0
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
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


def summary(runs: list[Figures]) -> Figures:
    """Return medians of times and memory, and means of scores."""
    figures: Figures = {"runs": len(runs)}
    for metric in runs[0]:
        values = [run[metric] for run in runs]
        figures[metric] = mean(values) if metric in SCORES else median(values)
        if metric in SCORES and len(runs) > 1:
            name, bracket, unit = metric.partition(" [")
            figures[f"{name} stdev{bracket}{unit}"] = stdev(values)
    return figures


def main(arguments: list[str] | None = None) -> None:
    parser = results.parser(__doc__)
    parser.add_argument("--corpus", type=Path, required=True, help="a text file, not compressed")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--size", type=int, default=100, help="of vectors")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=["gensim", *PROGRAMS])
    parser.add_argument("--case", choices=CASES, help="print the figures of one run, for this file")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["skipgram"])
    parser.add_argument("--cores", type=int, nargs="+", help="of a process (all)")
    parser.add_argument("--seed", type=int, default=1, help="of that run")
    args = parser.parse_args(arguments)
    counts = args.cores or [cores()]
    if args.case:
        # Before torch is imported, which starts as many threads as there are cores.
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: counts[0]])
        with TemporaryDirectory() as folder:
            run = args.corpus.resolve(), args.epochs, args.seed, Path(folder)
            is_program, model = args.case in PROGRAMS, MODELS[args.models[0]]
            figures = (
                ours(*run, [*PROGRAMS[args.case], f"model.vector_size={args.size}"])
                if is_program
                else gensim(*run, CLASSES[args.case] | model | {"vector_size": args.size})
            )
        print(json.dumps(figures))
        return
    found = results.Results("cpu", args.results)
    cases = list(product(counts, args.models, args.cases))
    if len(args.models) > 1 and set(args.cases) & {*PROGRAMS}:
        parser.error("--models: several are for classes, such as gensim; leave out the programs")
    common = ["--corpus", str(args.corpus), "--epochs", str(args.epochs), "--size", str(args.size)]
    runs: dict[str, list[Figures]] = {}
    for seed in range(1, args.runs + 1):  # in turn, so that a busy machine slows all of them
        for number, model, case in cases:
            suffix = f", {model}" if args.models != ["skipgram"] else ""
            suffix += f", {number} core{'s' * (number > 1)}" if args.cores else ""
            of_case = runs.setdefault(case + suffix, [])
            run = ["--case", case, "--models", model, "--cores", str(number), "--seed", str(seed)]
            of_case.append(measure([*common, *run]))
            found.add(f"{args.corpus.stem} {args.epochs} epochs, {case}{suffix}", summary(of_case))


if __name__ == "__main__":
    main()
