"""What vectors are asked: analogies, Google's or those of a file, and pairs of words that people have judged, which come with gensim."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

ASKED = 300_000  # words, the most frequent, that are asked for and answered, as in gensim
GOOGLE = "questions-words.txt"
PAIR_SETS = {
    "wordsim353": ("WordSim-353", "wordsim353.tsv"),
    "simlex999": ("SimLex-999", "simlex999.txt"),
}


class EvaluationError(ValueError):
    """A question that cannot be asked; the message is one line that names the value and the remedy."""


def in_gensim(name: str) -> Path:
    """A file that comes with gensim, found without importing it."""
    return Path(find_spec("gensim").origin).parent / "test" / "test_data" / name


def read_questions(
    path: str | Path | None, case_insensitive: bool = True
) -> list[tuple[str, list[list[str]]]]:
    """Names and four-word questions of a file's sections, in upper case unless case counts; as in gensim, other lines are passed over."""
    path = Path(path or in_gensim(GOOGLE))
    try:
        lines = path.read_bytes().decode("utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise EvaluationError(
            f"questions file {path} cannot be read ({error}); name a UTF-8 text file"
        ) from None
    sections: list[tuple[str, list[list[str]]]] = []
    for number, line in enumerate(lines, start=1):
        if line.startswith(": "):
            sections.append((line.lstrip(": ").strip(), []))
        elif sections:
            question = [
                *map(sys.intern, (line.upper() if case_insensitive else line).split())
            ]  # a word stands in many questions
            if len(question) == 4:
                sections[-1][1].append(question)
        elif line or number < len(lines):
            raise EvaluationError(
                f"{path}, line {number}: questions need a section first; begin the file with ': name'"
            )
    if not any(asked for _, asked in sections):
        raise EvaluationError(
            f"{path} holds no question; write ': section' lines, and lines of four words below them"
        )
    return sections


def judged_pairs(name: str) -> list[tuple[str, str, float]]:
    """The pairs of words of a set, in upper case, each with how alike people found them."""
    text = in_gensim(PAIR_SETS[name][1]).read_text(encoding="utf-8").upper()
    lines = [
        line.split("\t")
        for line in text.splitlines()
        if line.count("\t") == 2 and not line.startswith("#")
    ]
    return [(a, b, float(judgement)) for a, b, judgement in lines]
