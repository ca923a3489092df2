"""Join frequent pairs of words, such as new_york, as gensim's Phrases.

A pass counts all pairs of adjacent words of a line, scores them, and writes the text again with the
best ones joined (Mikolov et al. 2013, arXiv 1310.4546, section 4). The text is a file of word
codes, see `Partitions`.

To count, each thread reads the whole text and counts the pairs of one part of all hashes, so that
tables are neither shared nor merged. Memory is bounded by MOST_SLOTS of 16 bytes for each thread,
and half as much while its table grows: a part with more pairs than that is counted in two halves.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, NamedTuple

import numpy as np

from w2v.system.jit import compiled
from w2v.text import tokenize
from w2v.text.tokenize import FACTOR, HALF, LINE_END, LOW_HALF, PARTITION_FACTOR, Partitions

ONE, SIX, LAST_BIT = map(np.uint64, (1, 6, 63))
inlined = compiled(inline="always")

DELIMITER = "_"
MIN_COUNT = 5  # gensim's; subtracted from the count of a pair, so that rare pairs score low
TOKENS_AT_ONCE = 1 << 18
FIRST_SLOTS = 1 << 16
MOST_SLOTS = 1 << 24  # of the pairs that a thread counts; a power of two, as FIRST_SLOTS
LOOK_BACK = 64  # tokens before a block that may decide where its first pair begins


class Phrases(NamedTuple):
    """What `join_phrases` has made."""

    text: CodedText
    counts: np.ndarray  # int64, of each code in this text
    firsts: np.ndarray  # int64, position of the first appearance of each
    codes: np.ndarray  # of joined words; some may have become parts of longer ones


class CodedText:
    """A text as codes of its words, int32, in a temporary file.

    LINE_END stands for a line feed.
    """

    def __init__(self, folder: Path):
        self.file = TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115 - its user closes it
        self.blocks: list[tuple[int, int, int]] = []  # tokens, line ends, words after the last one
        self.tokens = 0

    def append(self, codes: np.ndarray) -> None:
        """Write a block of codes."""
        ends = np.flatnonzero(codes == LINE_END)
        tail = len(codes) - (ends[-1] + 1 if len(ends) else 0)
        self.blocks.append((len(codes), len(ends), tail))
        self.tokens += len(codes)
        rest = memoryview(codes).cast("B")
        while rest:  # a full disk takes a part, and raises at the next
            rest = rest[self.file.write(rest) :]

    def read(self, first: int, last: int, buffer: np.ndarray) -> np.ndarray:
        """Return codes [first, last), in the buffer."""
        codes = buffer[: last - first]
        os.preadv(self.file.fileno(), [codes], first * codes.itemsize)
        return codes

    def spans(self) -> Iterator[tuple[int, int]]:
        """Yield the first and last code of blocks to be read."""
        for first in range(0, self.tokens, TOKENS_AT_ONCE):
            yield first, min(first + TOKENS_AT_ONCE, self.tokens)


def join_phrases(
    text: CodedText, merged: Partitions, passes: int, threshold: float, workers: int, folder: Path
) -> Phrases:
    """Join pairs that score above the threshold, in some passes.

    Words are joined from the left, and each becomes part of one pair at most; a later pass may join
    joined words. Other than in gensim, the count of a pair does not include words of the text that
    are spelled like the joined pair.

    Args:
        text: Closed at the end, unless it is returned.
        merged: Words by their codes; joined words are added.
        passes: At most; it ends when there is nothing left to join.
        threshold: Of the score (n_ab - MIN_COUNT) / (n_a n_b) times the number of distinct words
            and pairs.
        workers: Threads.
        folder: Where the new text is written.
    """
    counts, firsts = merged.totals()
    found = [np.empty(0, np.int32)]
    with ThreadPoolExecutor(workers) as pool:
        for _ in range(passes):
            pairs = _best_pairs(text, counts, threshold, workers, pool)
            if not len(pairs):
                break
            codes = _add_words(pairs, merged)
            found.append(codes)
            text = _joined(text, pairs, codes, workers, pool, folder)
            counts, firsts = _count_words(text, merged.codes, workers, pool)
    return Phrases(text, counts, firsts, np.unique(np.concatenate(found)))


def in_order(
    pool: ThreadPoolExecutor, function: Callable, items: Iterable[tuple], most: int
) -> Iterator[Any]:
    """Call a function in threads; yield what it returns, in order.

    At most so many results wait, which bounds the memory.
    """
    pending: deque[Future] = deque()
    for item in items:
        pending.append(pool.submit(function, *item))
        if len(pending) > most:
            yield pending.popleft().result()
    while pending:
        yield pending.popleft().result()


def _best_pairs(
    text: CodedText, counts: np.ndarray, threshold: float, workers: int, pool: ThreadPoolExecutor
) -> np.ndarray:
    """Return the pairs of codes that score above the threshold, int64."""
    parts = pool.map(lambda part: _frequent_pairs(text, part, workers), range(workers))
    frequent, distinct = zip(*parts, strict=True)
    pairs, pair_counts = np.concatenate(frequent).T
    number = np.count_nonzero(counts) + sum(distinct)
    # In the order of gensim's original_scorer, so that ties with the threshold are the same.
    product = counts[pairs >> HALF].astype(np.float64) * counts[pairs & LOW_HALF]
    scores = (pair_counts.astype(np.int64) - MIN_COUNT) / product * number
    return pairs[scores > threshold].astype(np.int64)


def _frequent_pairs(text: CodedText, part: int, parts: int) -> tuple[np.ndarray, int]:
    """Count the pairs of a part of all hashes.

    Returns pairs that are more frequent than MIN_COUNT with their counts, uint64 [n, 2], and the
    number of distinct pairs.
    """
    slots = np.zeros((FIRST_SLOTS, 2), np.uint64)
    used = 0
    buffer = np.empty(TOKENS_AT_ONCE + 1, np.int32)
    for first, last in text.spans():
        codes = text.read(max(0, first - 1), last, buffer)
        place = 1
        while place < len(codes):
            limit = len(slots) // 4 * 3
            if used == limit and len(slots) == MOST_SLOTS:
                del slots
                halves = [_frequent_pairs(text, 2 * part + half, 2 * parts) for half in (0, 1)]
                return np.concatenate([half[0] for half in halves]), sum(half[1] for half in halves)
            if used == limit:
                slots = _table(slots, 2 * len(slots))
            place, used = _count_pairs(codes, place, part, parts, slots, used, len(slots) // 4 * 3)
    return slots[slots[:, 1] > MIN_COUNT], used


def _add_words(pairs: np.ndarray, merged: Partitions) -> np.ndarray:
    """Return the codes of joined words, which are added to all words."""
    halves = merged.words(pairs >> 32), merged.words(pairs & 0xFFFF_FFFF)
    joined = " ".join(map(DELIMITER.join, zip(*halves, strict=True))).encode()
    table = tokenize.WordTable()
    numbers = np.empty(len(joined), np.int32)
    numbered = tokenize.number_words(tokenize.padded(joined), len(joined), 0, table, numbers)
    return merged.merge(table)[numbered.numbers]


def _joined(
    text: CodedText,
    pairs: np.ndarray,
    codes: np.ndarray,
    workers: int,
    pool: ThreadPoolExecutor,
    folder: Path,
) -> CodedText:
    """Write a text in which pairs are joined; close the one before."""
    entries = np.stack([pairs, codes + 1], axis=1).astype(np.uint64)
    slots = _table(entries, 1 << (2 * len(entries)).bit_length())
    join = partial(_join_block, text, slots, _mark(entries, np.zeros(len(slots) // 4, np.uint64)))
    new = CodedText(folder)
    for block in in_order(pool, join, text.spans(), 2 * workers):
        new.append(block)
    text.file.close()
    return new


def _join_block(
    text: CodedText, slots: np.ndarray, bits: np.ndarray, first: int, last: int
) -> np.ndarray:
    """Return codes [first, last) of a text after joining.

    A pair belongs to the block of its first word.
    """
    joined = np.empty(last - first, np.int32)
    before = LOOK_BACK
    while True:
        start = max(0, first - before)
        end = min(last + 1, text.tokens)
        codes = text.read(start, end, np.empty(end - start, np.int32))
        size = _join(codes, first - start, last - start, start == 0, slots, bits, joined)
        if size >= 0:
            return joined[:size]
        before *= 8


def _count_words(
    text: CodedText, size: int, workers: int, pool: ThreadPoolExecutor
) -> tuple[np.ndarray, np.ndarray]:
    """Return count and first position of each code of a text."""
    counts = np.zeros(size, np.int64)
    firsts = np.zeros(size, np.int64)

    def count(part: int) -> None:
        buffer = np.empty(TOKENS_AT_ONCE, np.int32)
        for first, last in text.spans():
            codes = text.read(first, last, buffer)
            _count_codes(codes, first, part, workers, counts, firsts)

    list(pool.map(count, range(workers)))
    return counts, firsts


def _table(entries: np.ndarray, size: int) -> np.ndarray:
    """Return a hash table of so many slots: pair, and what is not 0."""
    slots = np.zeros((size, 2), np.uint64)
    _enter(entries, slots)
    return slots


@inlined
def _hash(pair):
    """Return a hash; its upper half tells the part, its lower one the slot."""
    mixed = pair * FACTOR
    mixed = (mixed ^ mixed >> HALF) * PARTITION_FACTOR
    return mixed ^ mixed >> HALF


@inlined
def _slot(pair, hash_, slots):
    """Return the slot of a pair, or the free one where it belongs."""
    mask = len(slots) - 1
    slot = np.int64(hash_ & LOW_HALF) & mask
    while slots[slot, 1] and slots[slot, 0] != pair:
        slot = (slot + 1) & mask
    return slot


@inlined
def _is_of_part(hash_, part, parts):
    """Return whether a hash of 32 bits is in one of equal parts."""
    return hash_ * np.uint64(parts) >> HALF == np.uint64(part)


@compiled
def _enter(entries, slots):
    """Copy the entries of a hash table, or of a list, to another table."""
    for row in range(len(entries)):
        if entries[row, 1]:
            slot = _slot(entries[row, 0], _hash(entries[row, 0]), slots)
            slots[slot, 0] = entries[row, 0]
            slots[slot, 1] = entries[row, 1]


@compiled
def _count_pairs(codes, place, part, parts, slots, used, limit):
    """Count pairs of a part; return where it ended and the slots in use."""
    while place < len(codes) and used < limit:
        first = codes[place - 1]
        second = codes[place]
        place += 1
        if first >= 0 and second >= 0:
            pair = np.uint64(first) << HALF | np.uint64(second)
            hash_ = _hash(pair)
            if _is_of_part(hash_ >> HALF, part, parts):
                slot = _slot(pair, hash_, slots)
                if not slots[slot, 1]:
                    slots[slot, 0] = pair
                    used += 1
                slots[slot, 1] += np.uint64(1)
    return place, used


@compiled
def _mark(entries, bits):
    """Set a bit for each pair of a list, by its hash; return the bits."""
    for row in range(len(entries)):
        hash_ = _hash(entries[row, 0]) >> HALF
        bits[np.int64(hash_ >> SIX) & len(bits) - 1] |= ONE << (hash_ & LAST_BIT)
    return bits


@inlined
def _joined_code(first, second, slots, bits):
    """Return what two words are joined to, or -1."""
    pair = np.uint64(first) << HALF | np.uint64(second)
    hash_ = _hash(pair)
    bit = hash_ >> HALF
    code = np.int64(-1)
    # The bits are in a near cache, and most pairs have none.
    if bits[np.int64(bit >> SIX) & len(bits) - 1] >> (bit & LAST_BIT) & ONE:
        code = np.int64(slots[_slot(pair, hash_, slots), 1]) - 1
    return code


@compiled
def _join(codes, first, last, is_start, slots, bits, joined):
    """Join pairs whose first word is in [first, last); return the new size.

    It is -1 if codes before these are needed.
    """
    # The word before may take the first one, if that is not taken itself: go back to a word that
    # no word before it can take.
    place = first
    while place > 0 and codes[place - 1] >= 0 and codes[place] >= 0:
        if _joined_code(codes[place - 1], codes[place], slots, bits) < 0:
            break
        place -= 1
    if place == 0 and not is_start:
        return -1
    size = 0
    while place < last:
        word = codes[place]
        after = place + 1
        if word >= 0 and after < len(codes) and codes[after] >= 0:
            code = _joined_code(word, codes[after], slots, bits)
            if code >= 0:
                word = code
                after += 1
        if place >= first:
            joined[size] = word
            size += 1
        place = after
    return size


@compiled
def _count_codes(codes, position, part, parts, counts, firsts):
    """Count the codes of a part; note their first positions."""
    for place in range(len(codes)):
        code = codes[place]
        # 64 codes are beside each other, so that threads do not share cache lines.
        hash_ = np.uint64(code >> 6) * FACTOR >> HALF
        if code >= 0 and _is_of_part(hash_, part, parts):
            if not counts[code]:
                firsts[code] = position + place
            counts[code] += 1
