"""Vocabulary: words by falling count, and what subsampling keeps."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from w2v.config import VocabConfig
from w2v.system.files import atomic_path

LEAST_COUNT = 5  # of the words whose median tells how often a text repeats its words


class VocabError(ValueError):
    """No usable vocabulary; the message is one line with the remedy."""


@dataclass(frozen=True, eq=False)
class Vocab:
    """V words; the id of a word, and its row, is its place in `words`."""

    words: list[str]  # by falling count, ties by first appearance
    counts: np.ndarray  # int64 [V]
    raw_words: int  # words of the text, dropped ones included
    raw_types: int  # distinct words of the text, dropped ones included
    # `median_count` of the text, dropped words included; by default that of the kept words.
    median: float = field(default=0.0, kw_only=True)

    def __post_init__(self) -> None:
        if not self.median:
            object.__setattr__(self, "median", median_count(self.counts))

    @classmethod
    def select(
        cls,
        words: Callable[[np.ndarray], list[str]],
        counts: np.ndarray,
        firsts: np.ndarray,
        limits: VocabConfig,
    ) -> tuple[Vocab, np.ndarray]:
        """Keep the words that occur often enough; return their numbers too.

        As in gensim, `min_count` is raised until at most `max_final_vocab` words are left. Raises
        `VocabError` if fewer than two words are left.

        `words` returns words by their numbers. `counts` and `firsts`, int64, tell how often a
        number occurs, which may be never, and where first.
        """
        types = int(np.count_nonzero(counts))
        if not types:
            raise VocabError("the text holds no words; set corpus.path to another one")
        threshold = limits.min_count
        most = limits.max_final_vocab
        if most is not None and most < types:
            excluded = len(counts) - 1 - most  # the place of the first word too many
            threshold = max(threshold, int(np.partition(counts, excluded)[excluded]) + 1)
        kept = np.flatnonzero(counts >= threshold)
        # By count, then by appearance; np.lexsort takes twice the time.
        kept = kept[np.argsort(firsts[kept])]
        kept = kept[np.argsort(-counts[kept], kind="stable")]
        if len(kept) < 2:
            setting = f"vocab.min_count={limits.min_count}"
            remedy = "use more text"
            if threshold > limits.min_count:
                setting = f"vocab.max_final_vocab={most}, a minimum count of {threshold},"
                remedy = "raise vocab.max_final_vocab"
            elif threshold > 1 and types > 1:
                remedy = f"lower it to {np.partition(counts, -2)[-2]} or less, or use more text"
            few = f"keeps {'only one word' if len(kept) else 'no word'} and training needs two"
            found = f"the most frequent occurs {counts.max()} times"
            raise VocabError(f"{setting} {few}; {found}; {remedy}")
        median = median_count(counts)
        return cls(words(kept), counts[kept], int(counts.sum()), types, median=median), kept

    @property
    def fingerprint(self) -> str:
        """Hash of the words and their counts, in order: 32 hex digits."""
        digest = hashlib.blake2b("\n".join(self.words).encode(), digest_size=16)
        digest.update(self.counts.astype("<i8").tobytes())
        return digest.hexdigest()

    def keep_probabilities(self, sample: float) -> np.ndarray:
        """Return the probability that subsampling keeps a word, [V]."""
        return keep_probabilities(self.counts, self.counts.sum(), sample)

    def kept_counts(self, sample: float) -> np.ndarray:
        """Return the expected count of each word after subsampling, [V]."""
        return self.counts * self.keep_probabilities(sample)

    def save(self, path: str | Path) -> None:
        """Write a header line, then word<TAB>count for each row; atomic."""
        header = f"# words {len(self.words)} raw_words {self.raw_words} raw_types {self.raw_types}"
        ends = np.flatnonzero(np.diff(self.counts, append=0)) + 1  # of words of the same count
        parts = [f"{header}\n"]
        for first, end in itertools.pairwise([0, *ends.tolist()]):
            parts.append(f"\t{self.counts[first]}\n".join([*self.words[first:end], ""]))
        with atomic_path(path) as new, open(new, "w", encoding="utf-8", newline="\n") as file:
            file.write("".join(parts))  # as one, as in `hash_file`


def median_count(counts: np.ndarray) -> float:
    """Return the median count of words that occur LEAST_COUNT times.

    Where no word does, it is that of all words.
    """
    for least in (LEAST_COUNT, 1, 0):
        if len(found := counts[counts >= least]):
            return float(np.median(found))
    return 0.0


def keep_probabilities(counts: np.ndarray, total: float, sample: float) -> np.ndarray:
    """Return the probability that subsampling keeps a word.

    It is (sqrt(f / t) + 1) * t / f, at most 1, where f is the word's share of the `total` and t is
    `sample`; t = 0 keeps everything. word2vec.c and gensim use it in place of the paper's
    1 - sqrt(t / f) (Mikolov et al. 2013, arXiv 1310.4546).
    """
    assert sample >= 0, "auto is chosen before"
    if sample == 0:
        return np.ones(len(counts))
    excess = counts / (sample * total)  # f / t
    return np.minimum((np.sqrt(excess) + 1) / excess, 1.0)
