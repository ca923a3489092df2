"""This program without a GPU against gensim, on the same text, one after the other: from text to vectors, saved and scored.

    python tests/bench/cpu.py --corpus wiki100.txt --runs 3

Memory is what Linux counts for the process: all of it (RSS), and that of no file, which cannot be had back (anonymous); of both the
peak, and the peak less what importing torch took.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter, sleep

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))
ADAM = ["configs/text8.yaml", "configs/optimizers/adam.yaml", "model.vector_size=100"]
CASES = {
    "gensim": [],
    "w2v SGD": ["configs/cpu.yaml"],
    "w2v Adam": ADAM,
}  # as arguments of train.py
MEMORY = {"peak": "VmRSS", "peak anonymous": "RssAnon"}  # as /proc/<pid>/status names it
UNITS = {"words/s": "", "analogies": "%"}  # seconds, otherwise
UNITS |= dict.fromkeys([*MEMORY, *(f"{kind} without torch" for kind in MEMORY)], "MiB")
LOOK_SECONDS = 0.02


class Clock:
    """Seconds of one stage after another."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = perf_counter()

    def done(self, stage: str) -> None:
        now = perf_counter()
        self.seconds[stage], self._last = now - self._last, now

    def figures(self, raw_words: int, accuracy: float) -> dict[str, float]:
        return self.seconds | {
            "words/s": raw_words / self.seconds["training"],
            "analogies": 100 * accuracy,
        }


def _memory(process: int | str = "self") -> dict[str, float]:
    """MiB that a process takes, by kind; nothing once it has ended."""
    try:
        status = Path(f"/proc/{process}/status").read_text()
        return {
            kind: int(re.search(rf"{name}:\s+(\d+) kB", status)[1]) / 1024
            for kind, name in MEMORY.items()
        }
    except (OSError, TypeError):
        return {}


def gensim(corpus: Path, epochs: int, folder: Path) -> dict[str, float]:
    from gensim.models import Word2Vec
    from gensim.test.utils import datapath

    clock, workers = Clock(), len(os.sched_getaffinity(0))
    model = Word2Vec(
        vector_size=100,
        window=5,
        negative=5,
        sample=1e-4,
        min_count=5,
        sg=1,
        workers=workers,
        epochs=epochs,
    )
    model.build_vocab(corpus_file=str(corpus))
    clock.done("ingest")
    model.train(
        corpus_file=str(corpus),
        total_words=model.corpus_total_words,
        total_examples=model.corpus_count,
        epochs=epochs,
    )
    clock.done("training")
    accuracy, _ = model.wv.evaluate_word_analogies(datapath("questions-words.txt"))
    clock.done("evaluation")
    model.wv.save(str(folder / "vectors.kv"))
    model.wv.save_word2vec_format(str(folder / "vectors.bin"), binary=True)
    clock.done("export")
    return clock.figures(model.corpus_total_words * epochs, accuracy)


def ours(corpus: Path, epochs: int, folder: Path, arguments: list[str]) -> dict[str, float]:
    before = _memory()
    import torch

    torch_took = {
        f"{kind} without torch": before[kind] - value for kind, value in _memory().items()
    }
    from w2v.config import load_config
    from w2v.distributed import ranks
    from w2v.system import process as host
    from w2v.training import plan, trainer
    from w2v.vectors import evaluate as evaluation
    from w2v.vectors import export

    assert torch.get_num_threads() == host.cores()
    clock = Clock()
    files = [str(ROOT / entry) for entry in arguments if "=" not in entry]
    here = [
        f"corpus.path={corpus}",
        f"corpus.data_dir={folder}",
        "train.device=cpu",
        f"train.epochs={epochs}",
    ]
    config = load_config(files, [entry for entry in arguments if "=" in entry] + here)
    planned = plan.make_plan(config)
    clock.done("ingest")
    sampler, pipeline = plan.build(planned)
    trainer.Trainer(
        config, planned.vocab, planned.corpus.raw_words, sampler, pipeline, folder
    ).train()
    pipeline.finish()
    host.return_freed_memory()
    clock.done("training")
    vectors = pipeline.inputs["weight"]
    accuracy = evaluation.analogies(planned.vocab.words, vectors).total.accuracy
    clock.done("evaluation")
    blocks = export.in_order(pipeline.inputs, ranks.SINGLE)
    export.save_rows(planned.vocab.words, planned.vocab.counts, pipeline.inputs.dim, blocks, folder)
    clock.done("export")
    return clock.figures(planned.corpus.raw_words * epochs, accuracy) | torch_took


def measure(case: str, corpus: Path, epochs: int) -> dict[str, float]:
    """One run in a process of its own."""
    command = [
        sys.executable,
        __file__,
        "--corpus",
        str(corpus),
        "--epochs",
        str(epochs),
        "--case",
        case,
    ]
    start, peak = perf_counter(), dict.fromkeys(MEMORY, 0.0)
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        while process.poll() is None:
            peak |= {kind: max(peak[kind], value) for kind, value in _memory(process.pid).items()}
            sleep(LOOK_SECONDS)
        seconds, lines = perf_counter() - start, process.stdout.read().splitlines()
    if process.returncode:
        raise SystemExit(process.returncode)
    figures = json.loads(lines[-1])
    less = {
        f"{kind} without torch": value + figures.get(f"{kind} without torch", 0)
        for kind, value in peak.items()
    }
    return figures | {"whole process": seconds} | peak | less


def compare(
    corpus: Path, epochs: int, runs: int, cases: list[str], kept: Path | None = None
) -> dict[str, dict[str, tuple[float, str]]]:
    """The cases in turn, `runs` times: {case: {metric: (median or spread, unit)}}, and ratios to gensim's medians.

    kept: a file of single runs, which are not made again.
    """
    found: dict[str, list[dict[str, float]]] = {case: [] for case in cases}
    for line in kept.read_text().splitlines() if kept and kept.exists() else ():
        of, figures = json.loads(line)
        if of[1:] == [corpus.name, epochs] and len(found.get(of[0], range(runs))) < runs:
            found[of[0]].append(figures)
    for number in range(runs):
        for case, of_case in found.items():
            if len(of_case) > number:
                continue
            of_case.append(measure(case, corpus, epochs))
            print(f"run {number + 1} {case}: {of_case[-1]}", file=sys.stderr, flush=True)
            if kept:
                with kept.open("a") as file:
                    file.write(json.dumps([[case, corpus.name, epochs], of_case[-1]]) + "\n")
    figures: dict[str, dict[str, tuple[float, str]]] = {}
    for case, of_case in found.items():
        figures[case] = {}
        for metric in of_case[0]:
            values = [run[metric] for run in of_case]
            figures[case][metric] = (median(values), UNITS.get(metric, "s"))
            figures[case][f"{metric} spread"] = (max(values) - min(values), UNITS.get(metric, "s"))
    for case in figures.keys() - {"gensim"} if "gensim" in figures else ():
        for metric in (
            "words/s",
            "whole process",
            "peak without torch",
            "peak anonymous without torch",
        ):
            figures[case][f"{metric} of gensim's"] = (
                figures[case][metric][0] / figures["gensim"][metric][0],
                "x",
            )
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--corpus", type=Path, required=True, help="a text file, not packed, which gensim reads too"
    )
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument(
        "--kept",
        type=Path,
        help="where single runs are kept and found again, to go on with --runs later",
    )
    parser.add_argument("--case", choices=CASES, help=argparse.SUPPRESS)
    parser.add_argument("--results", type=Path)
    args = parser.parse_args()
    if args.case:
        with TemporaryDirectory() as folder:
            more = [] if args.case == "gensim" else [CASES[args.case]]
            print(
                json.dumps(
                    (ours if more else gensim)(
                        args.corpus.resolve(), args.epochs, Path(folder), *more
                    )
                )
            )
        return
    from tests.bench import results

    for case, figures in compare(
        args.corpus, args.epochs, args.runs, args.cases, args.kept
    ).items():
        results.append(
            "cpu",
            f"{args.corpus.stem} {args.epochs} epochs, {case}, runs={args.runs}",
            figures,
            args.results or results.FILE,
        )


if __name__ == "__main__":
    main()
