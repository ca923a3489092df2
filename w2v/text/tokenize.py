"""Split UTF-8 text into words, count and number them, without the GIL.

Words are handled as chunks of eight bytes, the last one padded with zeros, which text never holds:
two words are equal if their chunks are. The key of a word, by which it is found, is its only chunk
or mixed from all.
"""

from __future__ import annotations

import re
import unicodedata
from functools import cache
from itertools import count
from threading import Lock

import numpy as np

from w2v.system.jit import compiled

inlined = compiled(inline="always")

LINE_END = -1  # among word numbers
NEWLINE = ord("\n")
BLANK = ord(" ")
LAST_DIGIT = ord("9")
ZERO_WIDTH_SPACE = "\u200b"  # between words of Khmer and others
JOINERS = "\u200c\u200d"  # within words of Persian, Sinhala and others, and in emoji
UNKNOWN, MARK = -1, -2  # replacements that depend on other characters
PADDING = 16  # bytes after a text, as eight are read at once: a space, then zeros
WORD, SPACE, END = range(3)  # kinds of bytes; all beyond ASCII are parts of words
KINDS = np.array([chr(byte).isspace() * SPACE for byte in range(0x80)] + [WORD] * 0x80, np.uint8)
KINDS[NEWLINE] = END
LAST_SPACE = 0x3000  # code points
LAST_CASED = 0x1FFFF  # no later one has a lower case, and all later ones count as letters
NEW_WORDS = 1 << 12  # that a table has room for, at least, when a text is numbered
PARTITIONS = 64  # of all words, by hash; a power of two

# Unsigned 64-bit integers: numba would convert them to floats when combined with signed ones.
ZERO, ONE, LOW_HALF = map(np.uint64, (0, 1, 0xFFFF_FFFF))
LAST_BIT, HALF, TOP = map(np.uint64, (7, 32, 56))  # shifts
LOW_BITS = np.uint64(0x0101_0101_0101_0101)
HIGH_BITS = np.uint64(0x8080_8080_8080_8080)
ABOVE_SPACE = np.uint64(0x2121_2121_2121_2121)
FACTOR = np.uint64(0x9E37_79B9_7F4A_7C15)  # 2**64 / golden ratio


class WordTable:
    """Distinct words, numbered by first appearance, and their counts."""

    def __init__(self) -> None:
        self.size = 0
        self.chunks = np.zeros(0, np.uint64)  # of all words end to end
        self.starts = np.zeros(1, np.int64)  # word w is chunks[starts[w]:starts[w + 1]]
        self.counts = np.zeros(0, np.int64)
        self.firsts = np.zeros(0, np.int64)  # positions of first appearance
        # Hash table: the key of a word; its number + 1 and, in the upper half, its chunks.
        self.slots = np.zeros((0, 2), np.uint64)

    def reserve(self, words: int, chunks: int) -> None:
        """Make room for a number of further words and chunks."""
        words += self.size
        chunks += int(self.starts[self.size])
        arrays = [self.chunks, self.starts, self.counts, self.firsts]
        for array, size in zip(arrays, [chunks, words + 1, words, words], strict=True):
            if len(array) < size:
                array.resize(max(size, 2 * len(array)), refcheck=False)  # filled with zeros
        if 2 * words > len(self.slots):  # at most half full, so that probe sequences are short
            self.slots = np.zeros((1 << (2 * words - 1).bit_length(), 2), np.uint64)
            _rehash(self.chunks, self.starts, self.size, self.slots)

    def words(self, numbers: np.ndarray) -> list[str]:
        """Return words by their numbers."""
        starts = self.starts[numbers]
        sizes = self.starts[numbers + 1] - starts + 1  # one chunk more, for a line feed
        ends = np.cumsum(sizes)
        places = np.repeat(starts - (ends - sizes), sizes) + np.arange(sizes.sum())
        chunks = self.chunks.take(places, mode="clip")
        chunks[ends - 1] = NEWLINE
        text = chunks.view(np.uint8)
        return str(text[text != 0].data, "utf-8").split("\n")[:-1]

    @property
    def arrays(self) -> tuple[np.ndarray, ...]:
        """What compiled functions read and change."""
        return self.chunks, self.starts, self.counts, self.firsts, self.slots


def number_words(
    text: np.ndarray, size: int, first: int, table: WordTable, numbers: np.ndarray
) -> tuple[np.ndarray, int]:
    """Number and count the words of a block; add new ones to the table.

    The text is uint8, see `padded`, with `size` bytes. `first` is the position of its first word;
    every word and line end takes one. `numbers` is filled, int32; one for each byte is enough.
    Returns its filled part, LINE_END for a line feed, and the bytes of the longest word.
    """
    position = tokens = longest = 0
    while position < size:
        # Of a word, at most one chunk is not full.
        table.reserve(NEW_WORDS, size // 8 + NEW_WORDS)
        table.size, position, tokens, longest = _number(
            text, size, first, table.arrays, table.size, position, tokens, longest, numbers
        )
    return numbers[:tokens], longest


class MergedWords:
    """All distinct words of a text, merged from the tables of threads.

    They are partitioned by hash. Each partition has a lock, so that threads merge their tables at
    the same time. The code of a word is its number in its partition, times PARTITIONS, plus the
    partition.
    """

    def __init__(self) -> None:
        self._tables = [WordTable() for _ in range(PARTITIONS)]
        self._locks = [Lock() for _ in range(PARTITIONS)]
        # The first partition of each merge: merges that begin with the same one would queue.
        self._first = count(step=7)

    def merge(self, table: WordTable) -> np.ndarray:
        """Add the words and counts of a table; return their codes, int32.

        One more follows at the end, so that the code of LINE_END is LINE_END.
        """
        codes = np.full(table.size + 1, LINE_END, np.int32)
        if not table.size:
            return codes
        keys, values = table.slots[table.slots[:, 1] > 0].T
        partitions = np.empty(table.size, np.uint8)
        hashes = (keys ^ keys >> HALF) * FACTOR >> TOP
        partitions[(values & LOW_HALF).astype(np.int64) - 1] = hashes % PARTITIONS
        order, bounds = _grouped(partitions)
        # Counted for all partitions at once: in the loop, each call would wait for the GIL.
        ends = np.cumsum(np.diff(table.starts[: table.size + 1])[order])
        chunks = np.diff(np.append(0, ends)[bounds]).tolist()
        first = next(self._first)
        for partition in ((first + place) % PARTITIONS for place in range(PARTITIONS)):
            merged = self._tables[partition]
            numbers = order[bounds[partition] : bounds[partition + 1]]
            with self._locks[partition]:
                merged.reserve(len(numbers), chunks[partition])
                merged.size = _merge(
                    numbers, table.arrays, merged.arrays, merged.size, partition, codes
                )
        return codes

    @property
    def codes(self) -> int:
        """Return a number above all codes."""
        return PARTITIONS * max(table.size for table in self._tables)

    def totals(self) -> tuple[np.ndarray, np.ndarray]:
        """Return count and first position by code; unused codes count 0."""
        size = self.codes // PARTITIONS
        counts = np.zeros((size, PARTITIONS), np.int64)
        firsts = np.zeros((size, PARTITIONS), np.int64)
        for partition, table in enumerate(self._tables):
            counts[: table.size, partition] = table.counts[: table.size]
            firsts[: table.size, partition] = table.firsts[: table.size]
        return counts.ravel(), firsts.ravel()

    def words(self, codes: np.ndarray) -> list[str]:
        """Return words by their codes."""
        order, bounds = _grouped((codes % PARTITIONS).astype(np.uint8))
        words = np.empty(len(codes), object)
        for partition, table in enumerate(self._tables):
            found = order[bounds[partition] : bounds[partition + 1]]
            words[found] = table.words(codes[found] // PARTITIONS)
        return words.tolist()


def _grouped(partitions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the order by partition, and where each partition begins."""
    order = np.argsort(partitions, kind="stable")  # a radix sort for single bytes
    return order, np.searchsorted(partitions[order], np.arange(PARTITIONS + 1))


def padded(text: bytes) -> np.ndarray:
    """Return text as compiled functions read it: a space and zeros follow."""
    return np.frombuffer(text + b" " + bytes(PADDING - 1), np.uint8)


def normalized(text: np.ndarray, size: int, becomes: np.ndarray) -> tuple[np.ndarray, int]:
    """Replace characters by others; return the new text and its size.

    `becomes`, int32, has a replacement for each code point; those beyond its end stay. The size is
    -1 if there is an UNKNOWN, which depends on other characters, or if the text is not UTF-8. MARK
    minus a code point stays after a letter or another mark, and becomes a space elsewhere.
    """
    new = np.empty(3 * size // 2 + PADDING, np.uint8)  # 2 bytes become at most 3
    size = _normalize(text, size, becomes, new)
    new[max(size, 0)] = ord(" ")
    return new, size


@cache
def replacements(words_only: bool, lowercase: bool, pictures: str = "") -> np.ndarray:
    """Return the replacement of each code point, for `normalized`.

    White space becomes a space, but not line feeds. `words_only` makes a space of all but letters,
    their marks, numbers, the underscore, and what matches the pattern `pictures`. Upper case
    without exactly one lower case in all contexts (U+0130 and the Greek sigma) is UNKNOWN.
    """
    limit = LAST_SPACE + 1 if not words_only and not lowercase else LAST_CASED + 1
    becomes = np.arange(limit, dtype=np.int32)
    for point in range(limit):
        character = chr(point)
        if character.isspace() or character == ZERO_WIDTH_SPACE:
            becomes[point] = point if point == NEWLINE else ord(" ")
        elif words_only and (unicodedata.category(character)[0] == "M" or character in JOINERS):
            becomes[point] = MARK - point
        elif words_only and not (
            character.isalnum() or character == "_" or (pictures and re.match(pictures, character))
        ):
            becomes[point] = ord(" ")
        elif lowercase and character != character.lower():
            lower = character.lower()
            becomes[point] = ord(lower) if len(lower) == 1 and character != "\u03a3" else UNKNOWN
    return becomes


@compiled
def _normalize(text, size, becomes, new):
    """Decode UTF-8, replace code points, encode; return the new size, or -1."""
    i = 0
    out = 0
    while i < size:
        point = np.int32(text[i])
        length = 1
        if point >= 0x80:
            length = 2 if point < 0xE0 else 3 if point < 0xF0 else 4
            least = 0x80 if length == 2 else 0x800 if length == 3 else 0x10000
            point -= 0xF00 >> length & 0xFF  # negative in the middle of a character
            for place in range(i + 1, i + length):
                if text[place] & 0xC0 != 0x80:
                    return -1
                point = point << 6 | text[place] & 0x3F
            # The middle of a character, overlong forms, beyond Unicode, and surrogates.
            if point < least or point > 0x10FFFF or point >> 11 == 0xD800 >> 11:
                return -1
        i += length
        if point < len(becomes):
            point = becomes[point]
            if point < 0:
                if point == UNKNOWN:
                    return -1
                # Digits and spaces have no marks.
                is_marked = out > 0 and new[out - 1] > LAST_DIGIT
                point = MARK - point if is_marked else np.int32(BLANK)
        if point < 0x80:
            new[out] = point
            out += 1
            continue
        length = 2 if point < 0x800 else 3 if point < 0x10000 else 4
        for place in range(length - 1, 0, -1):
            new[out + place] = 0x80 | point & 0x3F
            point >>= 6
        new[out] = 0xF00 >> length & 0xFF | point
        out += length
    return out


@inlined
def _chunk(text, start):
    """Return eight bytes as one integer; LLVM makes one load of them."""
    place = np.uint64(start)  # numba would look for negative places otherwise
    chunk = np.uint64(text[place])
    chunk |= np.uint64(text[place + np.uint64(1)]) << np.uint64(8)
    chunk |= np.uint64(text[place + np.uint64(2)]) << np.uint64(16)
    chunk |= np.uint64(text[place + np.uint64(3)]) << np.uint64(24)
    chunk |= np.uint64(text[place + np.uint64(4)]) << np.uint64(32)
    chunk |= np.uint64(text[place + np.uint64(5)]) << np.uint64(40)
    chunk |= np.uint64(text[place + np.uint64(6)]) << np.uint64(48)
    chunk |= np.uint64(text[place + np.uint64(7)]) << np.uint64(56)
    return chunk


@inlined
def _ends(chunk):
    """Mark bytes up to a space by their highest bits; the lowest is exact."""
    return (chunk - ABOVE_SPACE) & ~chunk & HIGH_BITS


@inlined
def _key(text, start, length):
    """Return the key of a word, mixed from its chunks."""
    key = ZERO
    while length > 8:
        key = (key ^ _chunk(text, start)) * FACTOR
        key ^= key >> HALF
        start += 8
        length -= 8
    return key ^ _last_chunk(text, start, length)


@inlined
def _last_chunk(text, start, length):
    """Return the 1 to 8 bytes that end a word, padded with zeros."""
    return _chunk(text, start) & ~ZERO >> np.uint64(64 - 8 * length)


@inlined
def _first_slot(key, slots):
    """Return the slot of the hash table where the search for a word begins."""
    return np.int64((key ^ key >> HALF) * FACTOR >> HALF) & (len(slots) - 1)


@compiled
def _rehash(chunks, starts, size, slots):
    """Enter words into an empty hash table, frequent ones mostly first."""
    text = chunks.view(np.uint8)
    for number in range(size):
        start = 8 * starts[number]
        end = 8 * starts[number + 1]
        key = _key(text, start, end - start)
        slot = _first_slot(key, slots)
        while slots[slot, 1]:
            slot = (slot + 1) & (len(slots) - 1)
        slots[slot, 0] = key
        slots[slot, 1] = np.uint64(end - start >> 3) << HALF | np.uint64(number + 1)


@inlined
def _find(text, start, end, key, chunks, starts, slots):
    """Return the slot of a word, or the free one where it belongs."""
    length = (end - start + 7) >> 3
    slot = _first_slot(key, slots)
    while True:
        value = slots[slot, 1]
        if not value:
            break
        if slots[slot, 0] == key and np.int64(value >> HALF) == length:
            if length == 1:  # the key is the word
                break
            first = starts[np.int64(value & LOW_HALF) - 1]
            place = start
            while end - place > 8 and _chunk(text, place) == chunks[first]:
                place += 8
                first += 1
            if end - place <= 8 and _last_chunk(text, place, end - place) == chunks[first]:
                break
        slot = (slot + 1) & (len(slots) - 1)  # linear probing
    return slot


@inlined
def _add(text, start, end, key, slot, number, chunks, starts, slots):
    """Enter a new word at a free slot."""
    length = (end - start + 7) >> 3
    first = starts[number]
    starts[number + 1] = first + length
    slots[slot, 0] = key
    slots[slot, 1] = np.uint64(length) << HALF | np.uint64(number + 1)
    while end - start > 8:
        chunks[first] = _chunk(text, start)
        first += 1
        start += 8
    chunks[first] = _last_chunk(text, start, end - start)


@compiled
def _number(text, size, first, table, known, i, token, longest, numbers):
    """Number words from byte i on, until NEW_WORDS are new.

    Returns the words that are known, the next byte, the words and line ends so far, and the bytes
    of the longest word.
    """
    chunks, starts, counts, firsts, slots = table
    limit = known + NEW_WORDS
    while i < size and known < limit:
        end = i
        ends = _ends(_chunk(text, end))
        while not ends:
            end += 8
            ends = _ends(_chunk(text, end))
        # The bytes below the lowest mark, one bit each, are counted by a product.
        below = (((ends & (ZERO - ends)) >> LAST_BIT) - ONE) & LOW_BITS
        end += np.int64(below * LOW_BITS >> TOP)
        kind = KINDS[text[end]]
        while kind == WORD:  # a control character is part of the word
            end += 1
            kind = KINDS[text[end]]
        if end > i:
            key = _key(text, i, end - i)
            slot = _find(text, i, end, key, chunks, starts, slots)
            number = np.int64(slots[slot, 1] & LOW_HALF) - 1
            if number < 0:
                number = known
                known += 1
                _add(text, i, end, key, slot, number, chunks, starts, slots)
                firsts[number] = first + token
            counts[number] += 1
            numbers[token] = number
            token += 1
            longest = max(longest, end - i)
        if kind == END:
            numbers[token] = LINE_END
            token += 1
        i = end + 1
    return known, i, token, longest


@compiled
def _merge(numbers, table, merged, known, partition, codes):
    """Add words of a table to a merged one; return the size of that."""
    chunks, starts, counts, firsts, _ = table
    to_chunks, to_starts, to_counts, to_firsts, to_slots = merged
    text = chunks.view(np.uint8)
    for source in numbers:
        start = 8 * starts[source]
        end = 8 * starts[source + 1]
        key = _key(text, start, end - start)
        slot = _find(text, start, end, key, to_chunks, to_starts, to_slots)
        value = to_slots[slot, 1]
        if value:
            number = np.int64(value & LOW_HALF) - 1
            # The first position orders words of equal counts, whichever thread has met them first.
            to_firsts[number] = min(to_firsts[number], firsts[source])
        else:
            number = known
            known += 1
            _add(text, start, end, key, slot, number, to_chunks, to_starts, to_slots)
            to_firsts[number] = firsts[source]
        to_counts[number] += counts[source]
        codes[source] = number * PARTITIONS + partition
    return known


@compiled
def kept_sentences(numbers, rows, max_length, words, lengths):
    """Replace word numbers by rows in place; drop words of row -1.

    Sentences of a single word are dropped, except the first one, which `words` words of the block
    before may belong to, and the last one, which may continue in the next block. Fills the
    `lengths` of sentences that end in this block. Returns the number of ids and of lengths, and
    the number of ids of the last sentence.
    """
    id_count = 0
    length_count = 0
    kept = 0
    for number in numbers:
        if number != LINE_END:
            words += 1
            row = rows[number]
            numbers[id_count] = row  # never after the number that is read
            if row >= 0:
                id_count += 1
                kept += 1
        if number == LINE_END or words == max_length:
            if kept > 1 or length_count == 0:
                lengths[length_count] = kept
                length_count += 1
            elif kept == 1:  # a single word has no context
                id_count -= 1
            words = 0
            kept = 0
    return id_count, length_count, kept
