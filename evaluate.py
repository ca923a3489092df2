"""Score a run's vectors, ask them for neighbours and analogies, export them, or compare runs; RUN is a run folder, a file or latest."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="evaluate.py", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    score = commands.add_parser("score", help="analogies, WordSim-353 and SimLex-999, as gensim scores them")
    nn = commands.add_parser("nn", help="nearest neighbours of words")
    analogies = commands.add_parser("analogies", help="a is to b as c is to ?")
    export = commands.add_parser("export", help="write vectors for gensim and word2vec readers")
    compare = commands.add_parser("compare", help="a table of several runs, the mean and spread of those that differ in the seed alone")
    compare.add_argument("runs", nargs="+", metavar="RUN", help="a run folder, or a folder of such")
    for command in (score, nn, analogies, export):
        command.add_argument("run", metavar="RUN", help="a run folder, a vectors file (.kv .bin .txt .vec) or latest")
    score.add_argument("--scorer", choices=("torch", "gensim"), default="torch", help="same counts; gensim takes minutes (default: torch)")
    score.add_argument("--questions", metavar="FILE", help="analogies to ask (default: Google's questions-words.txt)")
    score.add_argument("--restrict-vocab", type=count, default=300_000, metavar="N", help="use the first N words (default: 300000)")
    score.add_argument("--json", action="store_true", help="print JSON instead of a table")
    for command, words in ((nn, "words; without any, one"), (analogies, "a b c; without any, three")):
        command.add_argument("words", nargs="*", metavar="word", help=f"{words} a line from standard input")
        command.add_argument("--topn", type=count, default=10, metavar="N", help="answers to a question (default: 10)")
    for name, ending in (("kv", "kv"), ("bin", "bin"), ("text", "txt")):
        export.add_argument(f"--{name}", action="append_const", dest="formats", const=ending, help=f"write vectors.{ending}")
    export.add_argument("--to", metavar="FOLDER", help="where to write (default: beside the vectors read)")
    compare.add_argument("--to", metavar="FOLDER", help="also write the table there as text, Markdown and CSV, and the curves")
    options = parser.parse_args(argv)
    if options.command == "export" and not options.formats:
        export.error("nothing to write; add --kv, --bin or --text")
    return options


def count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of 1 or more")
    return int(text)


def main(argv: Sequence[str] | None = None) -> int:
    options = arguments(argv)
    from w2v import comparison, evaluation, export  # after parsing, so that --help answers at once

    failed = False
    try:
        if options.command == "compare":
            print(comparison.report(options.runs, options.to))
            return 0
        path = export.find(options.run)
        kv = export.load(path)
        if options.command == "export":
            print(*export.save(kv, options.to or path.parent, options.formats), sep="\n")
        elif options.command == "score":
            scores = evaluation.scores(kv, options.questions, options.restrict_vocab, options.scorer == "gensim")
            print(json.dumps(evaluation.as_dict(*scores), indent=1) if options.json else evaluation.report(*scores))
        else:
            ask, size = (evaluation.neighbours, 1) if options.command == "nn" else (evaluation.analogy, 3)
            given = [options.words[i : i + size] for i in range(0, len(options.words), size)]
            for words in given or filter(None, map(str.split, sys.stdin)):
                try:
                    if len(words) != size:
                        raise evaluation.EvaluationError(f"{' '.join(words)!r} is not {size} word{'s' * (size > 1)}; see --help")
                    print(" ".join(words), *(f"  {cos:7.4f}  {word}" for word, cos in ask(kv, *words, options.topn)), sep="\n", flush=True)
                except evaluation.EvaluationError as error:
                    print(f"error: {error}", file=sys.stderr, flush=True)
                    failed |= bool(given)
    except (evaluation.EvaluationError, export.VectorsError, comparison.ComparisonError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 2 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
