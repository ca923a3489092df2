"""Commands that score, query, draw and export vectors; `cli` parses."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from collections.abc import Callable

from w2v.api.vectors import Answers, load
from w2v.system.console import show
from w2v.system.files import one_line, printable
from w2v.vectors import report
from w2v.vectors.datasets import EvaluationError, Further
from w2v.vectors.load import VectorsError, Words
from w2v.vectors.query import SIGNS


def score(options: Namespace) -> None:
    """Print the scores on analogies and word similarity, as a table or JSON."""
    Further(options.questions, options.pairs).check()  # before vectors are read
    scores = load(options.run).score(options.questions, options.pairs, options.restrict_vocab)
    if options.json:
        from w2v.vectors import evaluate  # only now, as it imports torch

        show(json.dumps(evaluate.as_dict(scores), indent=1))
    else:
        show(scores)


def nn(options: Namespace) -> int:
    """Print the nearest neighbors of each word."""
    vectors = load(options.run)
    questions = [[word] for word in options.words]
    return _answer(vectors, lambda words: vectors.nn(words[0], options.topn), questions, joins=True)


def analogies(options: Namespace) -> int:
    """Answer analogies (a b c) and sums of words (king - man + woman)."""
    vectors = load(options.run)
    words = options.words
    if SIGNS.keys() & words:
        questions = [words]
    elif any(" " in word for word in words):  # each question is quoted
        questions = [word.split() for word in words]
    else:
        questions = [words[start : start + 3] for start in range(0, len(words), 3)]
    return _answer(vectors, lambda words: vectors.analogies(*words, topn=options.topn), questions)


def export_vectors(options: Namespace) -> None:
    """Write the vectors in other formats, and print the paths of the files."""
    if not options.formats:
        raise VectorsError("export has nothing to write; add --kv, --text, ... (see --help)")
    show(*load(options.run).export(*options.formats, to=options.to))


def draw_map(options: Namespace) -> None:
    """Draw the most frequent words in two dimensions."""
    show(load(options.run).map(options.to, options.words))


def write_report(options: Namespace) -> None:
    """Write an HTML page about runs, finished or not."""
    show(report.write(options.runs, options.to))


def _answer(
    vectors: Words,
    ask: Callable[[list[str]], Answers],
    questions: list[list[str]],
    joins: bool = False,  # whether a line is one word, which may hold spaces
) -> int:
    """Answer the questions, or else lines of stdin; return the status."""
    if not questions and sys.stdin.isatty():
        show("one question per line; Ctrl-D ends", file=sys.stderr)
    status = 0
    for words in questions or filter(None, map(str.split, sys.stdin)):
        if joins:
            words = [" ".join(words)]
        try:
            answers = [f"  {cosine:7.4f}  {printable(word)}" for word, cosine in ask(words)]
            terms = words[:: 1 + bool(SIGNS.keys() & words)]  # not the signs of a sum
            unseen = [word for word in terms if word not in vectors.key_to_index]
            lower = [word.lower() for word in unseen if word.lower() in vectors.key_to_index]
            asked = " ".join(words)
            for what, of in ("composed of n-grams", unseen), ("in the vocabulary", lower):
                if of:
                    asked += f"  ({what}: {', '.join(of)})"
            show("\n".join([printable(asked), *answers]))
        except EvaluationError as error:
            show(f"error: {one_line(error)}", file=sys.stderr)
            if questions:  # a line may be mistyped
                status = 2
    return status
