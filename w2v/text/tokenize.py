"""Split UTF-8 text into words and number them, without the GIL."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from w2v.system.jit import compiled

FREE = -1  # an unused slot of the hash table
LINE_END = -1  # among word numbers
NEWLINE = ord("\n")
IS_SPACE = np.array([chr(point).isspace() for point in range(0x3001)])  # none is beyond U+3000
PADDING = b" " * 2  # ends the last word, and lets three bytes be read at any position before it
HASH_FACTOR = np.int64(-7046029254386353131)  # 2**64 / golden ratio; products wrap around


class Tokens(NamedTuple):
    """Words and line feeds of a text; a line feed is an empty token."""

    text: np.ndarray  # uint8
    starts: np.ndarray  # int32 [T], token t is text[starts[t]:ends[t]]
    ends: np.ndarray  # int32 [T]
    digests: np.ndarray  # int64 [T], exact for words of up to eight bytes of the same length


class WordTable:
    """Distinct words, numbered by first appearance, and their counts."""

    def __init__(self) -> None:
        self._size = 0
        self._letters = np.empty(0, np.uint8)  # all words end to end
        self._starts = np.zeros(1, np.int64)  # word w is letters[starts[w]:starts[w + 1]]
        self._digests = np.empty(0, np.int64)
        self._counts = np.empty(0, np.int64)
        self._slots = np.empty(0, np.int32)  # hash table of word numbers, at most half full

    def word(self, number: int) -> str:
        """Return a word by its number."""
        letters = self._letters[self._starts[number] : self._starts[number + 1]]
        return str(letters, "utf-8")

    @property
    def counts(self) -> np.ndarray:
        """How often each word occurred, int64."""
        return self._counts[: self._size]

    def add(self, tokens: Tokens) -> np.ndarray:
        """Count words; return their numbers, LINE_END for line feeds, int32."""
        most = self._size + len(tokens.starts)  # words there may be afterwards
        letters = int(self._starts[self._size]) + len(tokens.text)
        words: list[np.ndarray] = [self._letters, self._starts, self._digests, self._counts]
        for array, size in zip(words, [letters, most + 1, most, most], strict=True):
            if len(array) < size:
                array.resize(2 * size, refcheck=False)  # in place, filled with zeros
        if 2 * most > len(self._slots):
            self._slots = np.full(1 << (2 * most).bit_length(), FREE, np.int32)
            _fill(self._slots, self._digests, self._size)
        numbers, self._size = _number(*tokens, *words, self._slots, self._size)
        return numbers


def split(text: bytes) -> Tokens:
    """Split valid UTF-8 at whitespace, as str.split does."""
    letters = np.frombuffer(text + PADDING, np.uint8)
    return Tokens(letters, *_split(letters, len(text)))


@compiled
def _split(text, size):
    starts = np.empty(size, np.int32)
    ends = np.empty(size, np.int32)
    digests = np.empty(size, np.int64)
    count = 0
    i = 0
    while i < size:
        start = i
        space = _space_bytes(text, i)
        if space:
            i += space
            if text[start] != NEWLINE:
                continue
            ends[count] = start
        else:
            digest = 0
            while not _space_bytes(text, i):
                digest = digest << 8 ^ (digest >> 56 & 0xFF) ^ text[i]  # rotate, and add a byte
                i += 1
            ends[count] = i
            digests[count] = digest
        starts[count] = start
        count += 1
    return starts[:count], ends[:count], digests[:count]


@compiled
def _space_bytes(text, i):
    """Return the bytes of the whitespace character at text[i], else 0."""
    first = text[i]
    if first < 0x80:
        return 1 if IS_SPACE[first] else 0
    if first == 0xC2:  # U+0080 to U+00BF
        return 2 if IS_SPACE[text[i + 1]] else 0
    if first & 0xF0 == 0xE0:  # a character of three bytes
        point = (first & 0x0F) << 12 | (text[i + 1] & 0x3F) << 6 | text[i + 2] & 0x3F
        return 3 if point < len(IS_SPACE) and IS_SPACE[point] else 0
    return 0


@compiled
def _first_slot(digest, slots):
    """Return where the search for a word begins in the hash table."""
    mixed = digest * HASH_FACTOR
    return ((mixed ^ (mixed >> 32)) * HASH_FACTOR) >> 32 & (len(slots) - 1)


@compiled
def _fill(slots, digests, size):
    """Enter the first `size` words into an empty hash table."""
    for word in range(size):
        slot = _first_slot(digests[word], slots)
        while slots[slot] != FREE:
            slot = (slot + 1) & (len(slots) - 1)
        slots[slot] = word


@compiled
def _number(text, starts, ends, digests, letters, word_starts, word_digests, counts, slots, size):
    """Number and count tokens by a hash table; add new words."""
    numbers = np.empty(len(starts), np.int32)
    for token in range(len(starts)):
        start = starts[token]
        end = ends[token]
        if start == end:
            numbers[token] = LINE_END
            continue
        digest = digests[token]
        slot = _first_slot(digest, slots)
        while slots[slot] != FREE:
            word = slots[slot]
            first = word_starts[word]
            if (
                word_digests[word] == digest
                and word_starts[word + 1] - first == end - start
                and (end - start <= 8 or _same(text, start, end, letters, first))
            ):
                break
            slot = (slot + 1) & (len(slots) - 1)  # linear probing
        if slots[slot] == FREE:
            first = word_starts[size]
            letters[first : first + end - start] = text[start:end]
            word_starts[size + 1] = first + end - start
            word_digests[size] = digest
            slots[slot] = size
            size += 1
        word = slots[slot]
        counts[word] += 1
        numbers[token] = word
    return numbers, size


@compiled
def _same(text, start, end, letters, first):
    """Return whether text[start:end] stands in `letters` from `first` on."""
    while start < end and text[start] == letters[first]:
        start += 1
        first += 1
    return start == end


@compiled
def kept_sentences(numbers, row_of, max_length, sentence, ids, lengths):
    """Replace word numbers by rows; drop words of row -1.

    Sentences of fewer than two kept words are dropped. Fills `ids`, and `lengths` of the sentences
    that end in this block. `sentence` is the open one between blocks: its words, its kept words,
    and the row of a single one. Returns how many ids, lengths and words of the text there were.
    """
    words = sentence[0]
    kept = sentence[1]
    ids[0] = sentence[2]
    id_count = 1 if kept == 1 else 0
    length_count = 0
    word_count = 0
    for number in numbers:
        if number != LINE_END:
            word_count += 1
            words += 1
            if row_of[number] >= 0:
                ids[id_count] = row_of[number]
                id_count += 1
                kept += 1
        if number == LINE_END or words == max_length:
            if kept > 1:
                lengths[length_count] = kept
                length_count += 1
            elif kept == 1:  # a single word has no context
                id_count -= 1
            words = 0
            kept = 0
    sentence[0] = words
    sentence[1] = kept
    if kept == 1:  # it is passed on, as it may be the only one
        id_count -= 1
        sentence[2] = ids[id_count]
    return id_count, length_count, word_count
