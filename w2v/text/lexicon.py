"""The distinct words of a text and their counts, block by block; the work is done by kernels/text.py."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from w2v.text import tokenize as text


@dataclass(frozen=True)
class Tokens:
    """What a block of text holds: its words and line ends as codes, and its distinct words in order of appearance."""

    codes: np.ndarray  # int32, a word's number in this block or END
    words: tuple[np.ndarray, np.ndarray, np.ndarray]  # letters, starts, digests

    @classmethod
    def of(cls, block: bytes) -> Tokens:
        """Split valid UTF-8 at white space, as str.split does."""
        padded = block + text.PADDING
        eights = np.ndarray(len(block) + 1, np.int64, padded, strides=(1,))
        codes, *words = text.split(np.frombuffer(padded, np.uint8), eights)
        return cls(codes, tuple(words))

    @property
    def longest(self) -> int:
        """Bytes of the longest word."""
        return int(np.diff(self.words[1]).max(initial=0))


class Lexicon:
    """The distinct words of a text, numbered in order of appearance, and how often each occurred.

    A sentence ends with its line or after `max_sentence_length` words. With `max_vocab_size`, when a sentence leaves more distinct
    words than that, those that occurred less often than a count are forgotten, and the count, at first 1, rises by one, as in gensim;
    words that occur again start anew, and the numbers change.
    """

    def __init__(self, max_sentence_length: int, max_vocab_size: int | None = None):
        self._longest, self._limit, self._closed = max_sentence_length, max_vocab_size or 0, False
        self._letters, self._starts, self._digests = (
            np.empty(0, np.uint8),
            np.zeros(1, np.int64),
            np.empty(0, np.int64),
        )
        self._counts, self._table = np.empty(0, np.int64), np.full(2, -1, np.int32)
        self._state = np.array([0, 0, 0, 1], np.int64)

    @classmethod
    def closed(cls, words: Iterable[str], max_sentence_length: int) -> Lexicon:
        """One that holds these words and takes no more: all others get the number after the last."""
        lexicon = cls(max_sentence_length)
        lexicon.settle(Tokens.of("\n".join(words).encode()))
        lexicon._state[:] = [len(lexicon), 0, 0, 1]
        lexicon._closed = True
        return lexicon

    def __len__(self) -> int:
        return int(self._state[text.SIZE])

    @property
    def words_read(self) -> int:
        return int(self._state[text.WORDS])

    @property
    def counts(self) -> np.ndarray:
        """How often each word occurred: int64 [T]."""
        return self._counts[: len(self)]

    def __getitem__(self, number: int) -> str:
        return self._letters[self._starts[number] : self._starts[number + 1]].tobytes().decode()

    def settle(self, tokens: Tokens) -> np.ndarray:
        """Count the words of the text's next block; returns their numbers, int32, and END after each sentence."""
        letters, _, digests = tokens.words
        size = len(self) + len(digests)
        self._letters = _grown(self._letters, int(self._starts[len(self)]) + len(letters))
        self._starts, self._digests, self._counts = (
            _grown(array, size + 1) for array in (self._starts, self._digests, self._counts)
        )
        if 2 * size > len(self._table):
            self._table = np.empty(1 << (2 * size).bit_length(), np.int32)
            text.enter(self._table, self._digests, len(self))
        numbers = np.empty(2 * len(tokens.codes), np.int32)
        written = text.settle(
            tokens.codes,
            tokens.words,
            (self._letters, self._starts, self._digests),
            self._counts,
            self._table,
            self._state,
            self._longest,
            self._limit,
            self._closed,
            numbers,
        )
        return numbers[:written]


def encoded(
    numbers: Iterable[np.ndarray], row_of: np.ndarray
) -> Iterator[tuple[np.ndarray, np.ndarray, int]]:
    """What `Corpus.write` takes, of a lexicon's numbers in blocks; a word without a row has -1 in `row_of`."""
    state = np.zeros(2, np.int64)
    for block in numbers:
        ids, lengths = np.empty(len(block) + 1, np.int32), np.empty(len(block), np.int64)
        written, sentences, words = text.rows(block, row_of, state, ids, lengths)
        yield ids[:written], lengths[:sentences], words


def _grown(array: np.ndarray, least: int) -> np.ndarray:
    """The array, or a copy with room for twice `least`."""
    if len(array) >= least:
        return array
    larger = np.empty(2 * least, array.dtype)
    larger[: len(array)] = array
    return larger
