"""Score, query, draw, export and compare word vectors."""

from __future__ import annotations

import argparse
import signal
from collections.abc import Sequence

from w2v.system.process import Signals, exit_fast, with_exit_status
from w2v.vectors.datasets import ASKED


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line; one section for each command."""
    parser = argparse.ArgumentParser(prog="evaluate.py", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)

    def add(name: str, does: str) -> argparse.ArgumentParser:
        return commands.add_parser(name, help=does, description=does)

    score = add("score", "score analogies, WordSim-353 and SimLex-999, as gensim does")
    nn = add("nn", "print the nearest neighbors of words")
    analogies = add("analogies", "answer: a is to b as c is to ?, or king - man + woman")
    word_map = add("map", "draw the most frequent words in two dimensions: map.png")
    export = add("export", "write vectors for gensim, word2vec readers, torch and TensorBoard")
    for command in (score, nn, analogies, word_map, export):
        run = "a run folder, a vectors file (.kv .bin .txt .vec), or latest"
        command.add_argument("run", metavar="RUN", help=run)

    scorer = "implementation; both count the same, gensim takes minutes (default: torch)"
    score.add_argument("--scorer", choices=("torch", "gensim"), default="torch", help=scorer)
    questions = "file of analogies (default: Google's questions-words.txt)"
    score.add_argument("--questions", metavar="FILE", help=questions)
    first = "score the N most frequent words only (default: %(default)s)"
    score.add_argument("--restrict-vocab", type=count, default=ASKED, metavar="N", help=first)
    score.add_argument("--json", action="store_true", help="print JSON instead of a table")

    for command, words in ((nn, "words"), (analogies, "a b c, or king - man + woman")):
        words += " (default: read one question per line from standard input)"
        command.add_argument("words", nargs="*", metavar="word", help=words)
        answers = "number of answers (default: %(default)s)"
        command.add_argument("--topn", type=count, default=10, metavar="N", help=answers)

    words = "number of words (default: %(default)s)"
    word_map.add_argument("--words", type=count, default=500, metavar="N", help=words)
    by = "projection (default: tsne)"
    word_map.add_argument("--by", choices=("tsne", "pca"), default="tsne", help=by)

    option = export.add_argument
    for name, suffix in (("kv", "kv"), ("bin", "bin"), ("text", "txt")):
        file = f"write vectors.{suffix}"
        option(f"--{name}", action="append_const", dest="formats", const=suffix, help=file)
    tensors = "write vectors.safetensors, and vectors.tsv with the words"
    option("--safetensors", action="store_true", help=tensors)
    projector = "write the N most frequent words for TensorBoard's projector (at most 100,000)"
    option("--projector", type=count, metavar="N", help=projector)
    option("--to", metavar="FOLDER", help="output folder (default: the vectors')")

    plot = add("plot", "draw loss, speed and scores of runs, finished or not: curves.png")
    compare = add("compare", "print a table of runs, with mean and spread over seeds")
    for command in (plot, compare):
        runs = "a run folder, a folder of run folders, or latest"
        command.add_argument("runs", nargs="+", metavar="RUN", help=runs)
    for command in (word_map, plot):
        command.add_argument("--to", metavar="FILE", help="output PNG (default: in the run folder)")
    tables = "also write the table as text, Markdown and CSV, and the curves"
    compare.add_argument("--to", metavar="FOLDER", help=tables)
    card = add("card", "write the model card of a finished run: README.md")
    card.add_argument("run", metavar="RUN", help="a finished run folder, or latest")

    options = parser.parse_args(argv)
    if options.command == "export" and not (
        options.formats or options.safetensors or options.projector
    ):
        export.error("nothing to write; add --kv, --bin, --text, --safetensors or --projector N")
    return options


def count(text: str) -> int:
    """Return a whole number of at least 1 from an argument."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of 1 or more")
    return int(text)


@with_exit_status
def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return the exit status: 0 success, 2 a user error."""
    options = arguments(argv)
    from w2v.api import commands  # after parsing, so that --help answers at once

    return commands.run(options)


if __name__ == "__main__":
    # End quietly when the reader of a pipe, such as `head`, has ended.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    with Signals():
        exit_fast(main())
