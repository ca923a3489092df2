"""Evaluation data sets: analogy questions, WordSim-353, SimLex-999."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

from w2v.system.files import refused

ASKED = 300_000  # only this many of the most frequent words are used, as in gensim
GOOGLE = "questions-words.txt"
PAIR_SETS = {
    "wordsim353": ("WordSim-353", "wordsim353.tsv"),
    "simlex999": ("SimLex-999", "simlex999.txt"),
}


class EvaluationError(ValueError):
    """An impossible evaluation; one line with the value and the remedy."""


def in_gensim(name: str) -> Path:
    """Return the path of a data file of gensim, without importing it."""
    return Path(find_spec("gensim").origin).parent / "test" / "test_data" / name


def read_questions(path: str | Path | None) -> list[tuple[str, list[list[str]]]]:
    """Read sections of a file: name, and questions in upper case.

    Lines of fewer or more words are skipped, as in gensim. The default is Google's questions.
    """
    path = Path(path or in_gensim(GOOGLE))
    with refused(
        EvaluationError, f"questions file {path} cannot be read", "name a UTF-8 text file"
    ):
        lines = path.read_bytes().decode("utf-8").split("\n")
    sections: list[tuple[str, list[list[str]]]] = []
    for number, line in enumerate(lines, start=1):
        if line.startswith(": "):
            sections.append((line.lstrip(": ").strip(), []))
        elif line and not sections:
            raise EvaluationError(
                f"{path}, line {number}: a question before the first section; "
                "begin the file with ': name'"
            )
        elif len(words := line.upper().split()) == 4:
            # Interned, as each word occurs in many questions.
            sections[-1][1].append([sys.intern(word) for word in words])
    if not any(questions for _, questions in sections):
        raise EvaluationError(
            f"{path} holds no question; write ': section', and lines of four words below it"
        )
    return sections


def judged_pairs(name: str) -> list[tuple[str, str, float]]:
    """Read a set of word pairs: (WORD, WORD, human judgement)."""
    text = in_gensim(PAIR_SETS[name][1]).read_text(encoding="utf-8").upper()
    rows = [line.split("\t") for line in text.splitlines() if not line.startswith("#")]
    return [(row[0], row[1], float(row[2])) for row in rows if len(row) == 3]
