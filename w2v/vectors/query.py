"""Find the words nearest to a word, an analogy, or a sum of words."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from w2v.vectors.datasets import EvaluationError

if TYPE_CHECKING:
    from gensim.models import KeyedVectors


def neighbours(kv: KeyedVectors, word: str, topn: int = 10) -> list[tuple[str, float]]:
    """Return the `topn` words nearest to `word`, with cosines."""
    return combination(kv, [word], topn)


def analogy(kv: KeyedVectors, a: str, b: str, c: str, topn: int = 10) -> list[tuple[str, float]]:
    """Answer "a is to b as c is to ?" by the words nearest to b - a + c."""
    return combination(kv, [b, "-", a, "+", c], topn)


def combination(kv: KeyedVectors, terms: Sequence[str], topn: int = 10) -> list[tuple[str, float]]:
    """Return the words nearest to a sum: ["king", "-", "man", "+", "woman"]."""
    words = terms[::2]
    signs = ["+", *terms[1::2]]
    if len(terms) % 2 == 0 or set(signs) - {"+", "-"}:
        raise EvaluationError(
            f"{' '.join(terms)!r} is no sum of words; write it as king - man + woman, with spaces"
        )
    # gensim's own error names no similar words.
    for word in words:
        if word not in kv.key_to_index:
            near = ", ".join(nearest_spellings(kv, word)) or "none"
            raise EvaluationError(f"{word!r} is not in the vocabulary; nearest spellings: {near}")
    signed = list(zip(signs, words, strict=True))
    with np.errstate(all="ignore"):  # zero vectors
        return kv.most_similar(
            positive=[word for sign, word in signed if sign == "+"],
            negative=[word for sign, word in signed if sign == "-"],
            topn=topn,
        )


def nearest_spellings(kv: KeyedVectors, word: str) -> list[str]:
    """Return words spelled like `word`, the most similar first."""
    letters = set(word.lower())
    spellings: dict[str, str] = {}  # lower case -> the most frequent of the case variants
    for candidate in kv.index_to_key:
        # A cheap test first: difflib is slow on a whole vocabulary.
        shared = letters.intersection(candidate.lower())
        if abs(len(candidate) - len(word)) <= 2 and len(shared) >= len(letters) - 2:
            spellings.setdefault(candidate.lower(), candidate)
    matches = difflib.get_close_matches(word.lower(), spellings, cutoff=0.7)
    return [spellings[match] for match in matches]
