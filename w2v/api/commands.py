"""Commands that score, query, draw and export vectors; `cli` parses."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path

from w2v.system.console import show
from w2v.system.files import naming_file, one_line, printable
from w2v.vectors import export, query, report
from w2v.vectors.datasets import EvaluationError, Further
from w2v.vectors.load import READABLE, VectorsError, find, load, load_words
from w2v.vectors.runs import picture_path

Ask = Callable[[list[str]], list[tuple[str, float]]]  # words to answers and their cosines


def score(options: Namespace) -> None:
    """Print the scores on analogies and word similarity, as a table or JSON."""
    further = Further(options.questions, options.pairs)
    further.check()
    kv = load_words(options.run)
    from w2v.vectors import evaluate  # only now, as it imports torch

    words = kv.index_to_key
    limit = options.restrict_vocab
    scores = evaluate.scores(words, kv.vectors, further.questions, further.pairs, limit)
    if options.json:
        show(json.dumps(evaluate.as_dict(scores), indent=1))
    else:
        show("\n\n".join(filter(None, evaluate.report(scores))))


def nn(options: Namespace) -> int:
    """Print the nearest neighbors of each word."""
    kv = load_words(options.run)
    questions = [[word] for word in options.words]
    return _answer(lambda words: query.combination(kv, [" ".join(words)], options.topn), questions)


def analogies(options: Namespace) -> int:
    """Answer analogies (a b c) and sums of words (king - man + woman)."""
    kv = load_words(options.run)

    def ask(words: list[str]) -> list[tuple[str, float]]:
        if query.SIGNS.keys() & words:
            return query.combination(kv, words, options.topn)
        if len(words) != 3:
            remedy = "nor a sum such as king - man + woman; see --help"
            raise EvaluationError(f"{' '.join(words)!r} is not 3 words, {remedy}")
        a, b, c = words
        return query.combination(kv, [b, "-", a, "+", c], options.topn)

    words = options.words
    if query.SIGNS.keys() & words:
        questions = [words]
    elif any(" " in word for word in words):  # each question is quoted
        questions = [word.split() for word in words]
    else:
        questions = [words[start : start + 3] for start in range(0, len(words), 3)]
    return _answer(ask, questions)


def export_vectors(options: Namespace) -> None:
    """Write the vectors in other formats, and print the paths of the files."""
    if not options.formats:
        raise VectorsError("export has nothing to write; add --kv, --bin or --text")
    path = find(options.run)
    folder = Path(options.to or path.parent)
    if folder.suffix in (*READABLE, ".safetensors"):
        raise VectorsError(f"--to {folder} names a file; name a folder")
    kv = load(path)
    with naming_file(folder):
        for file in export.save(kv, folder, options.formats):
            show(file)


def draw_map(options: Namespace) -> None:
    """Draw the most frequent words in two dimensions."""
    path = find(options.run)
    picture = picture_path([path.parent], "map.png", options.to)
    show(report.word_map(load_words(path), picture, options.words))


def write_report(options: Namespace) -> None:
    """Write an HTML page about runs, finished or not."""
    show(report.write(options.runs, options.to))


def _answer(ask: Ask, questions: Sequence[list[str]]) -> int:
    """Answer the questions, or else lines of stdin; return the status."""
    if not questions and sys.stdin.isatty():
        show("one question per line; Ctrl-D ends", file=sys.stderr)
    status = 0
    for words in questions or filter(None, map(str.split, sys.stdin)):
        try:
            answers = [f"  {cosine:7.4f}  {printable(word)}" for word, cosine in ask(words)]
            show("\n".join([printable(" ".join(words)), *answers]))
        except EvaluationError as error:
            show(f"error: {one_line(error)}", file=sys.stderr)
            if questions:  # a line may be mistyped
                status = 2
    return status
