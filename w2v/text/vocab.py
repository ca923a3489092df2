"""The vocabulary: words by falling count, and the probabilities that follow from the counts."""

from __future__ import annotations

import hashlib
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

HEADER = re.compile(r"# words (\d+) raw_words (\d+) raw_types (\d+)")


class VocabError(ValueError):
    """A text or threshold that leaves nothing to train on; the message is one line with the remedy."""


@dataclass(frozen=True, eq=False)
class Vocab:
    """V words, each with its row (its place in `words`) and its count in the text."""

    words: list[str]  # by falling count, ties by first appearance
    counts: np.ndarray  # int64 [V]
    raw_words: int  # words of the text, dropped ones included
    raw_types: (
        int  # distinct words of the text, dropped ones included, but not those that pruning forgot
    )

    @cached_property
    def index(self) -> dict[str, int]:
        """The row of each word."""
        return {word: row for row, word in enumerate(self.words)}

    @classmethod
    def count(
        cls,
        sentences: Iterable[list[str]],
        min_count: int,
        max_final_vocab: int | None = None,
        max_vocab_size: int | None = None,
    ) -> Vocab:
        """Count the words of all sentences and keep those that `select` keeps.

        `max_vocab_size` means what it means in gensim: when a sentence leaves more distinct words than that, those that occurred less
        often than a count are forgotten, and the count, at first 1, rises by one.
        """
        counter: Counter[str] = Counter()
        raw_words, least = 0, 1
        for sentence in sentences:
            counter.update(sentence)
            raw_words += len(sentence)
            if max_vocab_size is not None and len(counter) > max_vocab_size:
                counter = Counter(
                    {word: count for word, count in counter.items() if count >= least}
                )
                least += 1
        counts = np.fromiter(counter.values(), np.int64, len(counter))
        return cls.select(list(counter).__getitem__, counts, raw_words, min_count, max_final_vocab)[
            0
        ]

    @classmethod
    def select(
        cls,
        word: Callable[[int], str],
        counts: np.ndarray,
        raw_words: int,
        min_count: int,
        max_final_vocab: int | None,
    ) -> tuple[Vocab, np.ndarray]:
        """Keep the words that occur at least `min_count` times; returns also the numbers of those kept, by row.

        `word` gives the word of a number, `counts` (int64) how often each number occurred. `max_final_vocab` means what it means in
        gensim: `min_count` is raised until at most that many words are left, so words that tie with the first one too many go with
        it. Raises `VocabError` when fewer than two words are left.
        """
        if not len(counts):
            raise VocabError("the text holds no words; bring another with corpus.path=FILE")
        order = np.argsort(-counts, kind="stable")  # ties stay in order
        ranked = counts[order]
        threshold, setting = min_count, f"vocab.min_count={min_count}"
        if (
            max_final_vocab is not None
            and max_final_vocab < len(ranked)
            and ranked[max_final_vocab] >= min_count
        ):
            threshold = int(ranked[max_final_vocab]) + 1
            setting = f"vocab.max_final_vocab={max_final_vocab} raises the minimum count to {threshold}, which"
        rows = order[: np.searchsorted(-ranked, -threshold, side="right")]
        if len(rows) < 2:
            first, occurs, remedy = word(order[0]), ranked[0], "bring more text"
            if threshold > min_count:
                remedy = "raise vocab.max_final_vocab"
            elif threshold > 1 and len(ranked) > 1:
                remedy = f"lower it to {ranked[1]} or less, or bring more text"
            kept = "only one word" if len(rows) else "no word"
            raise VocabError(
                f"{setting} keeps {kept} and training needs two; {first!r} is the most frequent, {occurs} times; {remedy}"
            )
        return cls(
            [word(number) for number in rows.tolist()],
            counts[rows],
            raw_words,
            raw_types=len(counts),
        ), rows

    @property
    def fingerprint(self) -> str:
        """32 hex digits that stand for the words and their counts, in order."""
        digest = hashlib.blake2b("\n".join(self.words).encode(), digest_size=16)
        digest.update(self.counts.astype("<i8").tobytes())
        return digest.hexdigest()

    def keep_probabilities(self, sample: float) -> np.ndarray:
        """The probability with which subsampling keeps an occurrence of each word: float64 [V]."""
        return keep_probabilities(self.counts, self.counts.sum(), sample)

    def noise_distribution(self, ns_exponent: float) -> np.ndarray:
        """The probability of each word as a noise word, in proportion to count ** `ns_exponent`: float64 [V], sum 1."""
        log_V = ns_exponent * np.log(self.counts)
        weight_V = np.exp(log_V - log_V.max())  # no exponent overflows
        return weight_V / weight_V.sum()

    def save(self, path: str | Path) -> None:
        """Write a header line, then word<TAB>count for each row; the file appears whole or not at all."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        aside = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            with aside.open("w", encoding="utf-8", newline="\n") as file:
                file.write(
                    f"# words {len(self.words)} raw_words {self.raw_words} raw_types {self.raw_types}\n"
                )
                file.writelines(
                    f"{word}\t{count}\n"
                    for word, count in zip(self.words, self.counts.tolist(), strict=True)
                )
            os.replace(aside, path)
        finally:
            aside.unlink(missing_ok=True)

    @classmethod
    def load(cls, path: str | Path) -> Vocab:
        """Read what `save` wrote. Raises `VocabError` when it is not that, or not all of it."""
        try:
            header, *lines, end = (
                Path(path).read_bytes().decode("utf-8").split("\n")
            )  # words may hold other line breaks
            size, raw_words, raw_types = map(int, HEADER.fullmatch(header).groups())
            words = [line.rpartition("\t")[0] for line in lines]
            counts = np.fromiter((line.rpartition("\t")[2] for line in lines), np.int64, len(lines))
            if end or size != len(words):
                raise ValueError(f"{len(words)} of {size} words")
        except (ValueError, AttributeError) as error:
            raise VocabError(
                f"{path} is not a whole vocabulary file ({error}); delete it, the next run writes it anew"
            ) from None
        return cls(words, counts, raw_words, raw_types)


def keep_probabilities(counts: np.ndarray, total: float, sample: float) -> np.ndarray:
    """The probability with which subsampling keeps an occurrence of words that occur so often among `total`: float64.

    (sqrt(f / t) + 1) * t / f, at most 1, for a word that makes up the share f of the kept text, with t = `sample`;
    t = 0 keeps everything. This is the formula of word2vec.c and gensim, not the 1 - sqrt(t / f) of the paper.
    """
    if sample == 0:
        return np.ones(len(counts))
    excess = counts / (sample * total)  # f / t
    return np.minimum((np.sqrt(excess) + 1) / excess, 1.0)
