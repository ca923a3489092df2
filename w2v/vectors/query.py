"""Find the words nearest to a word, an analogy, or a sum of words."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

import numpy as np

from w2v.vectors.datasets import EvaluationError
from w2v.vectors.fasttext import Ngrams
from w2v.vectors.load import Words

EXAMPLE_RANKS = (8, 32, 128, 512, 2048)  # by frequency: shown with their neighbors
EXAMPLE_WORDS = 20_000  # enough for good neighbors, and quick
SIGNS = {"+": 1, "-": -1}
SPELLED = 100_000  # frequent words that are compared with an unknown one, in 0.3 s


def combination(kv: Words, terms: Sequence[str], topn: int = 10) -> list[tuple[str, float]]:
    """Return the `topn` words nearest to a sum, with cosines.

    The sum is one word, or several such as ["king", "-", "man", "+", "woman"]. The answers are
    those of gensim's most_similar, whose import takes seconds.
    """
    words = terms[::2]
    signs = ["+", *terms[1::2]]
    if len(terms) % 2 == 0 or set(signs) - SIGNS.keys():
        raise EvaluationError(
            f"{' '.join(terms)!r} is no sum of words; write it as king - man + woman, with spaces"
        )
    vectors = [vector_of(kv, word) for word in words]
    for word, vector_D in zip(words, vectors, strict=True):
        if vector_D is None:
            near = ", ".join(nearest_spellings(kv, word))
            hint = f"nearest spellings: {near}" if near else "vocab.tsv of the run lists all words"
            raise EvaluationError(f"{word!r} is not in the vocabulary; {hint}")
    rows = [kv.key_to_index[word] for word in words if word in kv.key_to_index]
    sign_T = np.array([SIGNS[sign] for sign in signs], np.float32)
    with np.errstate(all="ignore"):  # zero vectors
        vectors_TD = np.array(vectors)
        sum_D = sign_T @ (vectors_TD / np.linalg.norm(vectors_TD, axis=1, keepdims=True))
        # The sum of king - king is zero, and so are its cosines.
        found = _nearest(kv, sum_D / (np.linalg.norm(sum_D) or 1), topn + len(rows))
    return [(kv.index_to_key[row], cosine) for row, cosine in found if row not in rows][:topn]


def _nearest(kv: Words, unit_D: np.ndarray, count: int) -> list[tuple[int, float]]:
    """Return rows and cosines of the words nearest to a vector."""
    if kv.norms is None:
        kv.norms = np.linalg.norm(kv.vectors, axis=1)
    cosine_V = kv.vectors @ unit_D / kv.norms
    # Of a million words, to sort all would take .1 s.
    best = np.argpartition(-cosine_V, min(count, len(cosine_V)) - 1)[:count]
    best = best[np.argsort(-cosine_V[best])]
    return list(zip(best.tolist(), cosine_V[best].tolist(), strict=True))


def vector_of(kv: Words, word: str) -> np.ndarray | None:
    """Return the vector of a word, composed if it is unseen, or None."""
    if word in kv.key_to_index:
        return kv.vectors[kv.key_to_index[word]]
    ngrams: Ngrams | None = getattr(kv, "ngrams", None)  # gensim's class has none
    return ngrams and ngrams.compose(word)


def examples(words: Sequence[str], vectors_ND: np.ndarray) -> list[str]:
    """Return lines with the neighbors of up to five frequent words."""
    kv = Words(words[: len(vectors_ND)], vectors_ND)
    # Short words are mostly function words, whose neighbors say little.
    long = [word for word in kv.index_to_key if len(word) >= 5] or kv.index_to_key
    ranks = {min(rank, len(long) * n // 6) for n, rank in enumerate(EXAMPLE_RANKS, start=1)}
    lines = []
    for rank in sorted(ranks):
        near = ", ".join(other for other, _ in combination(kv, [long[rank]], 5))
        lines.append(f"near {long[rank]:<12} {near}")
    return lines


def nearest_spellings(kv: Words, word: str) -> list[str]:
    """Return frequent words spelled like `word`, the most similar first."""
    spellings: dict[str, str] = {}  # lower case -> the most frequent of the case variants
    for candidate in kv.index_to_key[:SPELLED]:
        spellings.setdefault(candidate.lower(), candidate)
    matches = difflib.get_close_matches(word.lower(), spellings, cutoff=0.7)
    return [spellings[match] for match in matches]
