"""The command w2v: its commands, their options and help.

What a command of `COMMANDS` runs is imported after its arguments are parsed, so that help and wrong
arguments are answered at once.
"""

from __future__ import annotations

import argparse
import importlib
import os
import re
import signal
import sys
from collections.abc import Sequence
from itertools import pairwise, takewhile
from pathlib import Path
from typing import NoReturn

import w2v
from w2v.distributed import launcher
from w2v.system.console import escape_warnings, show
from w2v.system.files import naming_file, nearest
from w2v.system.process import Signals, escape_unencodable, exit_fast, limit_threads
from w2v.vectors.datasets import RESTRICT_VOCAB
from w2v.vectors.manifest import FILES

FOREIGN_OPTIONS = {  # of fastText and gensim, and likely guesses
    **dict.fromkeys(("thread", "workers"), "threads"),
    **dict.fromkeys(("k", "n", "top", "number"), "topn"),
    **dict.fromkeys(("o", "out", "output"), "to"),
}
FOREIGN_COMMANDS = {  # of fastText and word2vec.c, and likely guesses
    **dict.fromkeys(("test", "eval", "evaluate"), "score"),
    **dict.fromkeys(("most-similar", "distance", "neighbors", "neighbours", "similar"), "nn"),
    **dict.fromkeys(("print-word-vectors", "convert"), "export"),
    **dict.fromkeys(("version", "-v", "-V"), "--version"),
    **{name: f"train FILE model.architecture={name}" for name in ("skipgram", "cbow")},
    "word-analogy": "analogies",
    "resume": "train --resume",
    "visualize": "map",
    "plot": "report",
    **dict.fromkeys(("list", "ls"), "runs"),
    **dict.fromkeys(("remove", "rm", "delete"), "clean"),
}
UNSUPPORTED = "wordngrams loss pretrainedvectors classes".split()


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message}; see {self.prog} --help")


def count(text: str) -> int:
    """Return a whole number of at least 1 from an argument."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of 1 or more")
    return int(text)


def seed(text: str) -> int:
    """Return one of the arguments of --seeds."""
    try:
        return int(text)
    except ValueError:
        remedy = "write texts and settings first, then --seeds 1 2 3"
        raise argparse.ArgumentTypeError(f"invalid int value: {text!r}; {remedy}") from None


# What a command does, and the function of w2v.api that runs it.
COMMANDS = {
    "train": ("train word vectors on a text", "train:run"),
    "score": ("score analogies, WordSim-353 and SimLex-999", "commands:score"),
    "nn": ("print the nearest neighbors of words", "commands:nn"),
    "analogies": ("answer analogies: king - man + woman", "commands:analogies"),
    "export": ("write vectors in other formats", "commands:export_vectors"),
    "map": ("draw the most frequent words: map.svg", "commands:draw_map"),
    "report": ("write an HTML page about runs, or a file of vectors", "commands:write_report"),
    "compare": ("train configs and compare them, or compare runs", "compare:run"),
    "sweep": ("search for the best settings of optimizers", "sweep:run"),
    "runs": ("list runs with their scores and sizes", "storage:list_runs"),
    "clean": ("remove runs, or cached texts", "storage:clean"),
    "warm-up": ("compile kernels, so that the first run need not", "warm_up:run"),
    "completion": ("print the completion script of a shell", "cli:print_completion"),
}
OVERVIEW = """\
usage: w2v COMMAND ...      w2v COMMAND --help      w2v --version

Train word vectors, and score, query, draw, export and compare them.

{commands}

    w2v train my.txt
    w2v nn latest king queen

exit status: 0 success, 2 an error, 3 too little memory or disk;
130, 143, 129 Ctrl-C, SIGTERM or a closed terminal"""
# What the words of a command are, and what its --to names.
SETTINGS = {
    "train": "text to train on (- for standard input), configs, and keys that override them",
    "compare": "configs to train and compare, such as adam adamw, with a text and settings for "
    "all; or runs, which are not trained again",
    "sweep": "optimizers, such as adam, with a text and settings for all; each combination of "
    "section.key=value,value is tried, with learning rates, batch sizes and betas of its own where "
    "none are given",
}
KINDS = {"train": "text | config", "compare": "config | RUN | text", "sweep": "config | text"}
WORDS = {
    "nn": "words, each looked up by itself",
    "analogies": "three words, man king woman, or a sum, king - man + woman",
}
TO = {
    "export": ("FOLDER", "output folder (default: that of the vectors)"),
    "map": ("FILE", "SVG file, or a folder (default: in the run folder)"),
    "report": ("FILE", "output file, or a folder (default: in the run folder)"),
    **dict.fromkeys(("compare", "sweep"), ("FOLDER", "output folder (default: in run.dir)")),
}


def make_parser(name: str) -> Parser:
    """Return the parser of a command."""
    does = COMMANDS[name][0]
    parser = Parser(prog=f"w2v {name}", description=f"{does[0].upper()}{does[1:]}.")
    add = parser.add_argument
    if name in SETTINGS:
        nargs = {"train": "*"}.get(name, "+")
        metavar = f"{KINDS[name]} | section.key=value"
        add("settings", nargs=nargs, metavar=metavar, help=SETTINGS[name])
    if name == "train":
        add("--resume", metavar="RUN", help="continue a run folder, or the `latest` in run.dir")
        needs = "print what the run needs, or exit with 3 if too much; train briefly to time it"
        add("--dry-run", action="store_true", help=needs)
        add("--threads", type=count, metavar="N", help="CPU cores to use (default: all)")
        add("--gpus", type=count, default=1, metavar="N", help="GPUs of this machine (default: 1)")
        add("-v", "--verbose", action="store_true", help="print all details of plan and scores")
        add("-q", "--quiet", action="store_true", help="print only warnings and the result")
        add("--help-config", action="store_true", help="print every key, its default and meaning")
    # Commands on the vectors of one run, and on several runs, finished or not.
    if name in ("score", "nn", "analogies", "export", "map"):
        run = "a run folder, latest, or vectors of any program (.kv .bin .txt .vec, also .gz)"
        add("run", metavar="RUN", help=run)
    if name in ("report", "runs", "clean"):
        runs = "a run folder, a folder of run folders, or latest"
        nargs = "*"
        if name == "report":
            nargs, runs = "+", f"{runs}; or a file of vectors"
        add("runs", nargs=nargs, default=[], metavar="RUN", help=runs)
    if name == "clean":
        caches = "also the word ids of texts, in this corpus.data_dir (default: data)"
        add("--caches", nargs="?", const="data", metavar="FOLDER", help=caches)
        add("--dry-run", action="store_true", help="list what would be removed")
        add("--yes", action="store_true", help="do not ask")
    if name == "score":
        first = f"score the N most frequent words only (default: {RESTRICT_VOCAB})"
        add("--restrict-vocab", type=count, default=RESTRICT_VOCAB, metavar="N", help=first)
        add("--json", action="store_true", help="print JSON instead of a table")
    if name in WORDS:
        words = f"{WORDS[name]} (default: one question per line from stdin)"
        add("words", nargs="*", default=[], metavar="word", help=words)
        add("--topn", type=count, default=10, metavar="N", help="number of answers (default: 10)")
    if name == "export":
        files = {"kv": "vectors.kv", "bin": "vectors.bin", "txt": "vectors.txt"} | FILES
        for form, file in files.items():
            option = {"txt": "text"}.get(form, form)
            written = f"write {file}"
            add(f"--{option}", action="append_const", dest="formats", const=form, help=written)
    if name == "map":
        add("--words", type=count, default=500, metavar="N", help="number of words (default: 500)")
    if name in TO:
        metavar, place = TO[name]
        # Shells expand ~ only where a word begins.
        add("--to", type=lambda text: Path(text).expanduser(), metavar=metavar, help=place)
    # Commands that train several runs.
    if name in ("compare", "sweep"):
        base = "config of the settings that the others leave open (default: text8)"
        add("--base", default="text8", metavar="CONFIG", help=base)
        seeds = "train with each of these seeds; write this option last (default: 1)"
        add("--seeds", nargs="+", type=seed, default=[1], metavar="N", help=seeds)
        corpora = "train on each of these texts, and rank by the mean over all"
        add("--corpora", nargs="+", default=[], metavar="FILE", help=corpora)
    if name in ("score", "compare", "sweep"):
        questions = "score these files of analogies too, beside Google's; also .gz"
        add("--questions", nargs="+", default=[], metavar="FILE", help=questions)
        pairs = "score these files of word pairs too, beside WordSim-353 and SimLex-999"
        add("--pairs", nargs="+", default=[], metavar="FILE", help=pairs)
    if name == "completion":
        shown = "to use it: source <(w2v completion bash)"
        add("shell", choices=("bash", "zsh", "fish"), help=shown)
    return parser


def parse(name: str, arguments: Sequence[str]) -> argparse.Namespace:
    """Return the parsed arguments of a command."""
    if name not in COMMANDS:
        near = FOREIGN_COMMANDS.get(name) or nearest(name, [*COMMANDS, "--help", "--version"])
        hint = f"one of {', '.join(COMMANDS)}"
        if Path(name).exists() or "." in name:
            near = f"train {name}"
        if near:
            hint = f"did you mean w2v {near}?"
        raise ValueError(f"{name!r} is not a command of w2v; {hint}")
    if empty := [word for word in arguments if re.fullmatch(r"(--[\w-]+=)?", word)]:
        problem = f"w2v {name} has an empty argument {empty[0]!r}, such as of an unset variable"
        raise ValueError(f"{problem}; give a value, or leave it out")
    parser = make_parser(name)
    refuse_unknown_options(parser, name, arguments)
    return parser.parse_intermixed_args(arguments)


def refuse_unknown_options(parser: Parser, command: str, arguments: Sequence[str]) -> None:
    """Raise `ValueError` at unknown options; say what to write instead."""
    # argparse would name the last one alone, and nothing to write in its place.
    known = list(parser._option_string_actions)
    words = [*takewhile(lambda word: word != "--", arguments), "VALUE"]
    unknown, settings, hints = [], [], []
    for word, following in pairwise(words):
        option, _, value = word.partition("=")
        is_known = any(name.startswith(option) for name in known)  # argparse takes abbreviations
        if is_known or not re.fullmatch(r"--?[A-Za-z][\w.-]*", option):
            continue
        from w2v.config import nearest_key  # only here, as help would wait for it

        unknown.append(option)
        plain = option.lstrip("-").replace("-", "_")
        foreign = f"--{FOREIGN_OPTIONS.get(plain, '')}"
        near = foreign if foreign in known else nearest(option, known, cutoff=0.75)
        is_setting = command == "train" and (not near or plain == "hs")
        if is_setting and plain.lower() in UNSUPPORTED:
            hints.append("only word vectors are trained, by negative sampling or model.hs=true")
        elif is_setting and (key := nearest_key(plain)):
            settings.append(f"{key}={value or following}")
        elif near:
            hints.append(f"did you mean {near}?")
    if unknown:
        are = "is not an option"
        if len(unknown) > 1:
            are = "are not options"
        if settings:
            hints.insert(0, f"write {' '.join(settings)}")
        remedy = "; ".join(hints) or f"see {parser.prog} --help"
        raise ValueError(f"{', '.join(unknown)} {are} of {parser.prog}; {remedy}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return the exit status."""
    if arguments is None:
        arguments = sys.argv[1:]
    escape_warnings()
    return launcher.run(run_command, arguments or ["--help"])


def run_command(arguments: Sequence[str]) -> int | None:
    """Run a command; return the exit status if it has one of its own."""
    name, *rest = arguments
    if name == "help" and rest:
        name, rest = rest[0], ["--help"]
    if name in ("-h", "--help", "help"):
        commands = "\n".join(f"  {name:<12}{COMMANDS[name][0]}" for name in COMMANDS)
        show(OVERVIEW.format(commands=commands))
        return None
    if name == "--version":
        show(f"w2v {w2v.__version__}")
        return None
    options = parse(name, rest)
    with naming_file("the working directory"):
        os.getcwd()  # where it was deleted, libraries of torch do not load
    module, _, function = COMMANDS[name][1].partition(":")
    return getattr(importlib.import_module(f"w2v.api.{module}"), function)(options)


def start(*command: str) -> NoReturn:
    """Run the command line as a program, after the words of `command`."""
    arguments = [*command, *sys.argv[1:]]
    escape_unencodable()
    limit_threads()
    sys.path.append("")  # optimizer.name=module.Class finds a module of this folder
    if arguments[:1] == ["train"]:
        # Ctrl-C ends the program without a traceback until `Signals` are handled.
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
        exit_fast(main(arguments))
    # End quietly when the reader of a pipe, such as `head`, has ended.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    with Signals():
        status = main(arguments)
    exit_fast(status)


# How each shell completes configs, keys and their values; WORDS are these.
COMPLETE = {
    "bash": """
_w2v_words() {
  local typed="${COMP_LINE##* }" word
  for word in $(compgen -W "WORDS" -- "$typed"); do
    [[ $typed == *=* ]] && word="${word#*=}"  # what follows = is a word of its own
    echo "$word"
  done
  [[ $typed == *=* && $word ]] || compgen -f -- "${typed##*=}"
}""",
    "zsh": "_w2v_words() { compadd -S '' -- WORDS; _files }",
    "fish": "(string split ' ' 'WORDS'; __fish_complete_path (commandline -ct))",
}
NO_SPACE = """
_w2v() { _shtab_w2v; [[ "${COMPREPLY[0]}" == *= ]] && compopt -o nospace 2>/dev/null; }
complete -o filenames -F _w2v w2v"""  # after a key


def print_completion(options: argparse.Namespace) -> None:
    """Print a script that completes commands, options and settings."""
    import shtab

    from w2v.config import CONFIGS, TYPES

    words = ["latest", *(file.stem for file in sorted(CONFIGS.rglob("*.yaml")))]
    for key, kind in TYPES.items():
        values = ("true", "false") if kind is bool else getattr(kind, "__args__", [""])
        words += [f"{key}={value}" for value in values if isinstance(value, str)] or [f"{key}="]
    scripts = {
        shell: script.replace("WORDS", " ".join(words)) for shell, script in COMPLETE.items()
    }
    # Of bash and zsh, the name of a function that is defined before it is used.
    complete = {"bash": "_w2v_words", "zsh": "_w2v_words", "fish": scripts.pop("fish")}
    program = argparse.ArgumentParser("w2v")
    commands = program.add_subparsers()
    for name, (does, _) in COMMANDS.items():
        parser = commands.add_parser(name, parents=[make_parser(name)], add_help=False, help=does)
        for action in parser._actions:
            if action.dest in ("settings", "run", "runs", "resume", "base"):
                action.complete = complete | {"preamble": scripts}  # type: ignore[attr-defined]
    script = shtab.complete(program, options.shell)
    # shtab's script of zsh registers itself where `eval` runs it, but not where `source` does.
    show(script.replace("$zsh_eval_context[-1] == eval", "$zsh_eval_context[-1] == (eval|file)"))
    if options.shell == "bash":
        show(NO_SPACE)
