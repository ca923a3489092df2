"""Join frequent pairs of words, such as new_york, as gensim's Phrases.

A pass counts all pairs of adjacent words in a line, scores them, and writes the text again with the
best ones joined (Mikolov et al. 2013, arXiv 1310.4546, section 4). The text is a file of codes of
words, see `MergedWords`. A pair is one integer with the first code in its upper half; it is
negative where a line ends.

To count, each thread reads the whole text and sorts the pairs of one part of all hashes, some at a
time. A part with more than MOST_PAIRS is counted in two halves, which bounds the memory.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterable
from pathlib import Path
from tempfile import TemporaryFile
from typing import NamedTuple

import numpy as np

from w2v.config import CorpusConfig
from w2v.system.process import map_in_order
from w2v.text import tokenize
from w2v.text.tokenize import FACTOR, HALF, LINE_END, MergedWords

DELIMITER = "_"
MIN_COUNT = 5  # gensim's; subtracted from the count of a pair, so that rare pairs score low
TOKENS_AT_ONCE = 1 << 18
PAIRS_AT_ONCE = 1 << 20  # that a thread sorts at once, or as many as it has counted
MOST_PAIRS = 1 << 23  # distinct ones that a thread counts
HASHES = 1 << 20  # of pairs; most pairs that are no phrase have the hash of none


class Block(NamedTuple):
    """A block of a `CodedText`."""

    first: int  # place of its first token
    tokens: int  # words and line ends
    lines: int
    tail: int  # words after the last line end


class CodedText:
    """A text as numbers of its words, int32, in a temporary file.

    LINE_END stands for a line feed.
    """

    def __init__(self, folder: Path):
        self.file = TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115 - closed below
        weakref.finalize(self, self.file.close)
        self.blocks: list[Block] = []
        self.tokens = 0

    def append(self, codes: np.ndarray) -> Block:
        """Write a block."""
        ends = np.flatnonzero(codes == LINE_END)
        tail = len(codes) - (ends[-1] + 1 if len(ends) else 0)
        block = Block(self.tokens, len(codes), len(ends), tail)
        self.blocks.append(block)
        self.tokens += len(codes)
        rest = memoryview(codes).cast("B")
        while rest:  # a full disk takes a part; the next write raises
            rest = rest[self.file.write(rest) :]
        return block

    def read(self, first: int, tokens: int) -> np.ndarray:
        """Return some tokens; those after the end are LINE_END."""
        codes = np.empty(tokens, np.int32)
        read = os.preadv(self.file.fileno(), [codes], first * codes.itemsize)
        codes[read // codes.itemsize :] = LINE_END
        return codes

    def pairs(self, first: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the TOKENS_AT_ONCE from `first` on, and the pairs they begin."""
        codes = self.read(first, min(TOKENS_AT_ONCE, self.tokens - first) + 1)
        return codes[:-1], codes[:-1].astype(np.int64) << 32 | codes[1:]

    def starts(self) -> range:
        """Return the values of `first` for all `pairs`."""
        return range(0, self.tokens, TOKENS_AT_ONCE)


def join_phrases(
    text: CodedText, merged: MergedWords, settings: CorpusConfig, workers: int, folder: Path
) -> tuple[CodedText, np.ndarray, np.ndarray]:
    """Join the pairs that score above the threshold, and add them to `merged`.

    The score is (n_ab - MIN_COUNT) / (n_a n_b) times the number of distinct words and pairs. Unlike
    gensim's, n_ab does not include words of the text that are spelled like the joined pair. Words
    are joined from the left, each to one other at most; a later pass may join joined words.

    Returns the text (another one is closed), and the count and first position of each code in it.
    """
    counts, firsts = merged.totals()
    for _ in range(settings.phrases):
        pairs = _best_pairs(text, counts, settings.phrases_threshold, workers)
        if not len(pairs):
            break
        codes = _add_words(pairs, merged)
        text, counts, firsts = _join(text, pairs, codes, merged.codes, workers, folder)
    return text, counts, firsts


def _best_pairs(text: CodedText, counts: np.ndarray, threshold: float, workers: int) -> np.ndarray:
    """Return the pairs that score above the threshold, int64, sorted."""

    def count_part(part: int) -> tuple[np.ndarray, int]:
        return _frequent_pairs(text, part, workers)

    frequent, distinct = _joined(map_in_order(workers, count_part, range(workers)))
    pairs, pair_counts = frequent
    number = np.count_nonzero(counts) + distinct
    # In the order of gensim's original_scorer, so that ties with the threshold are the same.
    product = counts[pairs >> 32].astype(np.float64) * counts[pairs & 0xFFFF_FFFF]
    scores = (pair_counts - MIN_COUNT) / product * number
    return np.sort(pairs[scores > threshold])


def _frequent_pairs(text: CodedText, part: int, parts: int) -> tuple[np.ndarray, int]:
    """Return a part's frequent pairs with counts, [2, n]; count its pairs."""
    counted = np.empty((2, 0), np.int64)  # sorted pairs, and their counts
    waiting: list[np.ndarray] = []
    for first in text.starts():
        _, pairs = text.pairs(first)
        waiting.append(pairs[(_hash(pairs) % parts == part) & (pairs >= 0)])
        if sum(map(len, waiting)) > max(PAIRS_AT_ONCE, counted.shape[1]):
            counted = _count(counted, waiting)
            waiting = []
        if counted.shape[1] > MOST_PAIRS:
            return _joined(_frequent_pairs(text, part + more, 2 * parts) for more in (0, parts))
    counted = _count(counted, waiting)
    return counted[:, counted[1] > MIN_COUNT], counted.shape[1]


def _joined(parts: Iterable[tuple[np.ndarray, int]]) -> tuple[np.ndarray, int]:
    """Return what `_frequent_pairs` has found in several parts."""
    found = list(parts)
    return np.concatenate([pairs for pairs, _ in found], axis=1), sum(count for _, count in found)


def _count(counted: np.ndarray, waiting: list[np.ndarray]) -> np.ndarray:
    """Add pairs to those that are counted, int64 [2, n]."""
    new = np.unique(np.concatenate([counted[0, :0], *waiting]), return_counts=True)
    pairs, counts = np.concatenate([counted, new], axis=1)
    order = np.argsort(pairs, kind="stable")  # which is quick where two halves are sorted
    starts = np.flatnonzero(np.diff(pairs[order], prepend=-1))
    return np.stack([pairs[order][starts], np.add.reduceat(counts[order], starts)])


def _hash(pairs: np.ndarray) -> np.ndarray:
    """Return 32 bits of each pair that look random."""
    return (pairs.view(np.uint64) * FACTOR >> HALF).astype(np.uint32)


def _add_words(pairs: np.ndarray, merged: MergedWords) -> np.ndarray:
    """Return the codes of joined words, which are added to all words."""
    halves = merged.words(pairs >> 32), merged.words(pairs & 0xFFFF_FFFF)
    joined = " ".join(map(DELIMITER.join, zip(*halves, strict=True))).encode()
    table = tokenize.WordTable()
    numbers = np.empty(len(joined), np.int32)
    numbers, _ = tokenize.number_words(tokenize.padded(joined), len(joined), 0, table, numbers)
    return merged.merge(table)[numbers]


def _join(
    text: CodedText, pairs: np.ndarray, codes: np.ndarray, size: int, workers: int, folder: Path
) -> tuple[CodedText, np.ndarray, np.ndarray]:
    """Write the joined text; return it, and each code's count and place."""

    def join(first: int, is_taken: bool = False) -> tuple[np.ndarray, bool]:
        """Return a block, and whether it takes the first word of the next one."""
        block, found = text.pairs(first)
        likely = np.flatnonzero(is_hash[_hash(found) % HASHES])  # few; the search takes 100 ns
        place = np.searchsorted(pairs, found[likely]).clip(max=len(pairs) - 1)
        joined = np.full(len(block), -1, np.int32)
        joined[likely] = np.where(pairs[place] == found[likely], codes[place], -1)
        # Of pairs that overlap, every other one is joined: those at an odd distance from the word
        # before, which begins no pair, or is taken itself.
        places = np.arange(len(block), dtype=np.int32)
        before = np.maximum.accumulate(np.where(joined < 0, places, 0 if is_taken else -1))
        begins = (joined >= 0) & ((places - before) % 2 == 1)
        is_second = np.append(is_taken, begins[:-1])
        return np.where(begins, joined, block)[~is_second], begins[-1]

    is_hash = np.zeros(HASHES, bool)
    is_hash[_hash(pairs) % HASHES] = True
    new = CodedText(folder)
    counts = np.zeros(size, np.int64)
    firsts = np.full(size, -1, np.int64)
    is_taken = False
    blocks = map_in_order(workers, join, text.starts())
    for first, (block, takes_next) in zip(text.starts(), blocks, strict=True):
        if is_taken:  # seldom, so each block is joined before this is known
            block, takes_next = join(first, is_taken)
        is_taken = takes_next
        words = block[block != LINE_END]
        np.add.at(counts, words, 1)
        fresh = np.flatnonzero(firsts[words] < 0)[::-1]  # the first of equal words is set last
        firsts[words[fresh]] = new.tokens + fresh
        new.append(block)
    text.file.close()
    return new, counts, firsts
