"""Score a run's vectors, ask them, draw them, export them, or compare runs; RUN is a run folder, a vectors file or latest."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence

from w2v.system import process as host
from w2v.system.signals import Signals
from w2v.vectors.datasets import ASKED


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="evaluate.py", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    score = commands.add_parser(
        "score", help="analogies, WordSim-353 and SimLex-999, as gensim scores them"
    )
    nn = commands.add_parser("nn", help="nearest neighbours of words")
    analogies = commands.add_parser(
        "analogies", help="a is to b as c is to ?, or a sum of words: king - man + woman"
    )
    plot = commands.add_parser(
        "plot", help="draw loss, speed and scores of runs, finished or not: curves.png"
    )
    map_ = commands.add_parser(
        "map", help="draw the most frequent words in two dimensions: map.png"
    )
    export = commands.add_parser(
        "export",
        help="write vectors for gensim, word2vec readers, torch and TensorBoard's projector",
    )
    card = commands.add_parser("card", help="write the model card of a run: README.md")
    compare = commands.add_parser(
        "compare",
        help="a table of several runs, the mean and spread of those that differ in the seed alone",
    )
    for command, one in ((compare, "a finished run folder"), (plot, "a run folder")):
        command.add_argument(
            "runs", nargs="+", metavar="RUN", help=f"{one}, a folder of such, or latest"
        )
    for command in (score, nn, analogies, map_, export):
        command.add_argument(
            "run", metavar="RUN", help="a run folder, a vectors file (.kv .bin .txt .vec) or latest"
        )
    card.add_argument("run", metavar="RUN", help="a finished run folder, or latest")
    score.add_argument(
        "--scorer",
        choices=("torch", "gensim"),
        default="torch",
        help="same counts; gensim takes minutes (default: torch)",
    )
    score.add_argument(
        "--questions",
        metavar="FILE",
        help="analogies to ask (default: Google's questions-words.txt)",
    )
    score.add_argument(
        "--restrict-vocab",
        type=count,
        default=ASKED,
        metavar="N",
        help=f"use the first N words (default: {ASKED})",
    )
    score.add_argument("--json", action="store_true", help="print JSON instead of a table")
    for command, words in (
        (nn, "words; without any, one"),
        (analogies, "a b c, or king - man + woman; without any, one of these"),
    ):
        command.add_argument(
            "words", nargs="*", metavar="word", help=f"{words} a line from standard input"
        )
        command.add_argument(
            "--topn",
            type=count,
            default=10,
            metavar="N",
            help="answers to a question (default: 10)",
        )
    for name, ending in (("kv", "kv"), ("bin", "bin"), ("text", "txt")):
        export.add_argument(
            f"--{name}",
            action="append_const",
            dest="formats",
            const=ending,
            help=f"write vectors.{ending}",
        )
    export.add_argument(
        "--safetensors",
        action="store_true",
        help="write vectors.safetensors, and vectors.tsv with the words",
    )
    tsv = "write the N most frequent words, tensor.tsv and metadata.tsv; the projector's t-SNE takes 10,000, its page 100,000"
    export.add_argument("--projector", type=count, metavar="N", help=tsv)
    export.add_argument(
        "--to", metavar="FOLDER", help="where to write (default: beside the vectors read)"
    )
    map_.add_argument(
        "--words", type=count, default=500, metavar="N", help="how many words (default: 500)"
    )
    map_.add_argument(
        "--by", choices=("tsne", "pca"), default="tsne", help="how places are found (default: tsne)"
    )
    for command in (map_, plot):
        command.add_argument(
            "--to", metavar="FILE", help="the picture, a PNG (default: in the run folder)"
        )
    compare.add_argument(
        "--to",
        metavar="FOLDER",
        help="also write the table there as text, Markdown and CSV, and the curves",
    )
    options = parser.parse_args(argv)
    if options.command == "export" and not (
        options.formats or options.safetensors or options.projector
    ):
        export.error("nothing to write; add --kv, --bin, --text, --safetensors or --projector N")
    return options


def count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of 1 or more")
    return int(text)


def main(argv: Sequence[str] | None = None) -> int:
    options = arguments(argv)
    from w2v.api import commands
    from w2v.system.files import error_message  # after parsing, so that --help answers at once

    try:
        return commands.run(options)
    except commands.ERRORS as error:
        print(f"error: {error_message(error)}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    signal.signal(
        signal.SIGPIPE, signal.SIG_DFL
    )  # what `head` has read enough of ends without a word
    with Signals():
        host.end(main())
