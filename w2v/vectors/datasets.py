"""Evaluation data sets: analogy questions and judged word pairs."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from w2v.system.files import in_gensim, refused

RESTRICT_VOCAB = 300_000  # only this many of the most frequent words are used, as in gensim
GOOGLE = "questions-words.txt"
PAIR_SETS = {
    "wordsim353": ("WordSim-353", "wordsim353.tsv"),
    "simlex999": ("SimLex-999", "simlex999.txt"),
}
ITEMS = "held_out_items.tsv"  # of a run: held-out items, each after the item before it
ITEM_SCORES = ("hit rate at 10", "MRR at 10")
NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)(E[-+]?\d+)?")  # of a line in upper case


class Further(NamedTuple):
    """Files of the user to score beside gensim's: analogies and word pairs."""

    questions: Sequence[str | Path] = ()
    pairs: Sequence[str | Path] = ()

    def check(self) -> None:
        """Raise `EvaluationError` at files that cannot be read or told apart."""
        for paths in (self.questions, [*PAIR_SETS, *self.pairs]):
            by_name(paths)
        for path in self.questions:
            read_questions(path)
        for path in self.pairs:
            judged_pairs(path)


class EvaluationError(ValueError):
    """An impossible evaluation; one line with the value and the remedy."""


def set_name(path: str | Path) -> str:
    """Return the name of a data set: that of its file, without endings."""
    return Path(path).name.split(".")[0]


def by_name(paths: Iterable[Any]) -> dict[str, Any]:
    """Return paths by the names of their sets, which must differ."""
    named: dict[str, Any] = {}
    for path in paths:
        if named.setdefault(set_name(path), path) != path:
            same = f"{named[set_name(path)]} and {path} have the same name"
            raise EvaluationError(f"{same}, by which results are known; rename one")
    return named


def title(name: str) -> str:
    """Return the name of a set of word pairs as it is printed."""
    return PAIR_SETS.get(name, (name, ""))[0]


def read_questions(path: str | Path | None) -> list[tuple[str, list[list[str]]]]:
    """Read sections of a file: name, and questions in upper case.

    A section begins with ": name"; questions before the first one are in a section that is named
    after the file. Lines of fewer or more words are skipped, as in gensim. The default is Google's
    questions.
    """
    path = Path(path or in_gensim(GOOGLE))
    sections: list[tuple[str, list[list[str]]]] = []
    for line in _read_text(path, "questions file").split("\n"):
        if line.startswith(": "):
            sections.append((line.lstrip(": ").strip(), []))
        elif len(words := line.upper().split()) == 4:
            if not sections:
                sections.append((set_name(path), []))
            sections[-1][1].append(words)
    if not any(questions for _, questions in sections):
        raise EvaluationError(
            f"{path} holds no question; write lines of four words, below ': section' or without"
        )
    return sections


def judged_pairs(name: str | Path) -> list[tuple[str, str, float]]:
    """Read word pairs: (WORD, WORD, human judgement).

    `name` is one of PAIR_SETS or a file. Its columns are separated by tabs, commas or spaces: two
    words, then the judgement as the first number. Lines without one, such as a header, are skipped.
    """
    path = Path(name)
    if str(name) in PAIR_SETS:
        path = in_gensim(PAIR_SETS[str(name)][1])
    pairs = []
    for line in _read_text(path, "pairs file").upper().splitlines():
        columns = line.split(next((mark for mark in "\t,;" if mark in line), None))
        number = next((part for part in columns[2:] if NUMBER.fullmatch(part.strip())), None)
        if number and not line.startswith("#"):
            pairs.append((columns[0].strip(), columns[1].strip(), float(number)))
    if not pairs:
        raise EvaluationError(
            f"{path} holds no pair of words; write two words and a number, with tabs, on each line"
        )
    return pairs


def read_items(folder: Path) -> list[list[str]]:
    """Return a run's held-out items, each after the one before it: [Q, 2]."""
    if not (path := folder / ITEMS).is_file():
        return []
    pairs = [line.split("\t") for line in _read_text(path, "items file").rstrip("\n").split("\n")]
    if not all(len(pair) == 2 for pair in pairs):
        remedy = "write two items with a tab on each line, or remove it"
        raise EvaluationError(f"{path} has a line without two items; {remedy}")
    return pairs


def _read_text(path: Path, what: str) -> str:
    """Return the text of a file, unpacked."""
    from w2v.text.formats import packing_of, unpacked  # only here, as help would wait for it

    problem = f"{what} {path} cannot be read"
    with (
        refused(EvaluationError, problem, "name a UTF-8 text file"),
        unpacked(path, packing_of(path)) as file,
    ):
        return file.read().decode("utf-8-sig")  # without the mark that Excel writes
