"""What evaluate.py does, command by command; arguments come from there. The exit status is 2 if a word given as argument was wrong."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from collections.abc import Callable, Iterable
from pathlib import Path

from w2v.api import runs as comparison
from w2v.system import console
from w2v.system.files import naming_file
from w2v.vectors import card, export
from w2v.vectors import evaluate as evaluation
from w2v.vectors import load as vectorfile
from w2v.vectors import plots as pictures
from w2v.vectors import query as asking
from w2v.vectors.datasets import EvaluationError

ERRORS = (
    EvaluationError,
    vectorfile.VectorsError,
    comparison.ComparisonError,
    pictures.PictureError,
    card.CardError,
    OSError,
)
SIGNS = {"+", "-"}


def run(options: Namespace) -> int:
    """Do what was asked for; gives the exit status. Raises one of `ERRORS` for what a user can mend."""
    console.escape_what_it_lacks()
    return COMMANDS[options.command](options)


def score(options: Namespace) -> int:
    scores = evaluation.scores(
        vectorfile.load(options.run),
        options.questions,
        options.restrict_vocab,
        options.scorer == "gensim",
    )
    print(
        json.dumps(evaluation.as_dict(*scores), indent=1)
        if options.json
        else evaluation.report(*scores)
    )
    return 0


def nn(options: Namespace) -> int:
    kv = vectorfile.load(options.run)

    def ask(words: list[str]) -> list[tuple[str, float]]:
        if len(words) != 1:
            raise EvaluationError(f"{' '.join(words)!r} is not 1 word; see --help")
        return asking.neighbours(kv, words[0], options.topn)

    return _answer(ask, [[word] for word in options.words])


def analogies(options: Namespace) -> int:
    kv = vectorfile.load(options.run)

    def ask(words: list[str]) -> list[tuple[str, float]]:
        if SIGNS.intersection(words):
            return asking.combination(kv, words, options.topn)
        if len(words) != 3:
            raise EvaluationError(
                f"{' '.join(words)!r} is not 3 words, nor a sum such as king - man + woman; see --help"
            )
        a, b, c = words
        return asking.analogy(kv, a, b, c, options.topn)

    words = options.words
    if SIGNS.intersection(words):
        return _answer(ask, [words])
    if any(" " in word for word in words):
        return _answer(ask, [word.split() for word in words])
    return _answer(ask, [words[start : start + 3] for start in range(0, len(words), 3)])


def write(options: Namespace) -> int:
    path = vectorfile.find(options.run)
    kv, folder = vectorfile.load(path), Path(options.to or path.parent)
    with naming_file(folder):
        written = export.save(kv, folder, options.formats) if options.formats else []
        written += export.save_safetensors(kv, folder) if options.safetensors else []
        written += export.save_projector(kv, folder, options.projector) if options.projector else []
    print(*written, sep="\n")
    return 0


def draw_map(options: Namespace) -> int:
    path = vectorfile.find(options.run)
    print(
        pictures.word_map(
            vectorfile.load(path),
            Path(options.to or path.parent / "map.png"),
            options.words,
            options.by,
        )
    )
    return 0


def plot(options: Namespace) -> int:
    runs = comparison.find(options.runs, "metrics.jsonl")
    print(pictures.curves(runs, Path(options.to) if options.to else runs[0] / "curves.png"))
    return 0


def compare(options: Namespace) -> int:
    print(comparison.report(options.runs, options.to))
    return 0


def describe(options: Namespace) -> int:
    print(card.write(vectorfile.find(options.run).parent))
    return 0


COMMANDS: dict[str, Callable[[Namespace], int]] = {
    "score": score,
    "nn": nn,
    "analogies": analogies,
    "export": write,
    "map": draw_map,
    "plot": plot,
    "compare": compare,
    "card": describe,
}


def _answer(ask: Callable[[list[str]], list[tuple[str, float]]], given: Iterable[list[str]]) -> int:
    """Print the answers to each question given, or to each line of standard input; what cannot be asked is said and passed over."""
    failed = False
    if not given and sys.stdin.isatty():
        print("a question a line; Ctrl-D ends", file=sys.stderr)
    for words in given or filter(None, map(str.split, sys.stdin)):
        try:
            print(
                " ".join(words),
                *(f"  {cosine:7.4f}  {word}" for word, cosine in ask(words)),
                sep="\n",
                flush=True,
            )
        except EvaluationError as error:
            print(f"error: {error}", file=sys.stderr, flush=True)
            failed |= bool(given)
    return 2 if failed else 0
