"""Which words are near a word, or a sum of words: gensim's answers, and spellings for words that it does not know."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import TYPE_CHECKING

from w2v.vectors.datasets import EvaluationError
from w2v.vectors.evaluate import quiet

if TYPE_CHECKING:
    from gensim.models import KeyedVectors


def neighbours(kv: KeyedVectors, word: str, topn: int = 10) -> list[tuple[str, float]]:
    """The `topn` words nearest to `word` with their cosines, best first."""
    return _most_similar(kv, [word], [], topn)


def analogy(kv: KeyedVectors, a: str, b: str, c: str, topn: int = 10) -> list[tuple[str, float]]:
    """Answers to "a is to b as c is to ?": the words nearest to b - a + c with their cosines, best first."""
    return _most_similar(kv, [b, c], [a], topn)


def combination(kv: KeyedVectors, terms: Sequence[str], topn: int = 10) -> list[tuple[str, float]]:
    """The words nearest to a sum such as king - man + woman, given as words with a + or - before all but the first."""
    signs, words = ["+", *terms[1::2]], list(terms[::2])
    if len(terms) % 2 == 0 or set(signs) - {"+", "-"}:
        raise EvaluationError(
            f"{' '.join(terms)!r} is no sum of words; write it as king - man + woman, with spaces"
        )
    added, taken = (
        [word for word, sign in zip(words, signs, strict=True) if sign == wanted] for wanted in "+-"
    )
    return _most_similar(kv, added, taken, topn)


def nearest_spellings(kv: KeyedVectors, word: str, n: int = 3) -> list[str]:
    """Words of the vocabulary that are spelled like `word`, nearest first; of equally near ones the most frequent."""
    letters = set(word.lower())
    like: dict[
        str, str
    ] = {}  # lower-cased spelling -> the first, most frequent, word that is spelled so
    for candidate in kv.index_to_key:
        if (
            abs(len(candidate) - len(word)) <= 2
            and len(letters.intersection(candidate.lower())) >= len(letters) - 2
        ):
            like.setdefault(candidate.lower(), candidate)
    return [like[match] for match in difflib.get_close_matches(word.lower(), like, n=n, cutoff=0.7)]


def _most_similar(
    kv: KeyedVectors, positive: list[str], negative: list[str], topn: int
) -> list[tuple[str, float]]:
    if topn < 1:
        raise EvaluationError(f"topn={topn} asks for no word; give 1 or more")
    for word in negative + positive:
        if word not in kv.key_to_index:
            near = ", ".join(nearest_spellings(kv, word)) or "none"
            raise EvaluationError(f"{word!r} is not in the vocabulary; nearest spellings: {near}")
    with quiet():
        return kv.most_similar(positive=positive, negative=negative, topn=topn)
