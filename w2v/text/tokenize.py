"""Kernels that turn UTF-8 text into numbers, one for each distinct word; they run without the interpreter's lock.

Words are kept as four arrays: their bytes end to end (`letters`), where each begins (`starts`), a digest of each, which up to eight
bytes is the word itself, and a table of their numbers, -1 where free and at most half full, in which a word stands at or after the
place that its digest names. T words.
"""

from __future__ import annotations

import numpy as np

from w2v.system.jit import compiled

END = -1  # of a line in `Tokens.codes`, of a sentence among the numbers
WORD, SPACE, NEWLINE, WIDE = range(
    4
)  # what a byte is; WIDE may begin a white space of two or three bytes
KIND = np.zeros(256, np.uint8)
KIND[[*b"\t\v\f\r\x1c\x1d\x1e\x1f "]] = SPACE
KIND[ord("\n")] = NEWLINE
KIND[[0xC2, 0xE1, 0xE2, 0xE3]] = WIDE
ONES = np.int64(0x0101010101010101)
PADDING = b" " * 8  # after a text, so that eight bytes can be read anywhere in it
MIX = np.int64(-7046029254386353131)  # 2**64 over the golden ratio; products wrap around
SIZE, WORDS, PENDING, LEAST = range(
    4
)  # of a lexicon's state: distinct words, words read, words of the open sentence, next count to prune


@compiled
def _white(text, i):
    """How many bytes the white space at `text[i]` takes, as str.split knows it; 0 where a word goes on."""
    kind = KIND[text[i]]
    if kind != WIDE:
        return 0 if kind == WORD else 1
    if i + 1 >= len(text):
        return 0
    first, second = text[i], text[i + 1]
    if first == 0xC2:
        return 2 if second == 0x85 or second == 0xA0 else 0
    if i + 2 >= len(text):
        return 0
    third = text[i + 2]
    if first == 0xE1:
        wide = second == 0x9A and third == 0x80
    elif first == 0xE3:
        wide = second == 0x80 and third == 0x80
    elif second == 0x80:
        wide = 0x80 <= third <= 0x8A or third == 0xA8 or third == 0xA9 or third == 0xAF
    else:
        wide = second == 0x81 and third == 0x9F
    return 3 if wide else 0


@compiled
def last_break(text):
    """Where the bytes after the last white space of `text` begin; 0 when it has none."""
    for i in range(len(text) - 1, -1, -1):
        width = _white(text, i)
        if width:
            return i + width
    return 0


@compiled
def _end(text, eights, i):
    """Where the word at `text[i]` ends; a white space follows it."""
    while True:
        suspects = ((eights[i] - ONES * 0x21) | eights[i]) & (
            ONES << 7
        )  # bytes that are no visible ASCII; the first is certain
        if suspects == 0:
            i += 8
            continue
        first = suspects & -suspects
        i += ((((first - 1) & ONES) * ONES) >> 56) - 1
        if _white(text, i):
            return i
        i += 1


@compiled
def _digest(eights, begin, end):
    """A word of up to eight bytes itself; of a longer one its eights mixed, and a lowest byte that no word begins with."""
    digest, long = np.int64(0), end - begin > 8
    while end - begin >= 8:
        digest, begin = digest * MIX ^ eights[begin], begin + 8
    if end > begin:
        digest = digest * MIX ^ (eights[begin] & ((np.int64(1) << 8 * (end - begin)) - 1))
    return (digest & ~0xFF) | 0x20 if long else digest


@compiled
def _scattered(digest):
    """A number whose low bits depend on all bytes of a word."""
    mixed = digest * MIX
    return ((mixed ^ (mixed >> 32)) * MIX) >> 32


@compiled
def _same(text, begin, end, letters, first, last):
    """Whether the word `text[begin:end]` is `letters[first:last]`."""
    if last - first != end - begin:
        return False
    while begin < end and text[begin] == letters[first]:
        begin, first = begin + 1, first + 1
    return begin == end


@compiled
def _append(text, begin, end, digest, letters, starts, digests, size):
    """Add the word `text[begin:end]` as number `size` to all but the table."""
    at = starts[size]
    for i in range(begin, end):
        letters[at] = text[i]
        at += 1
    starts[size + 1], digests[size] = at, digest


@compiled
def enter(table, digests, size):
    """Enter the first `size` words into a table that has room for them; they are known to differ."""
    table[:] = -1
    mask = len(table) - 1
    for number in range(size):
        place = _scattered(digests[number]) & mask
        while table[place] >= 0:
            place = (place + 1) & mask
        table[place] = number


@compiled
def split(text, eights):
    """The codes of a text's words and lines, and its distinct words in order of appearance: codes, letters, starts, digests.

    `text` is padded; `eights[i]` are the eight bytes from `text[i]` on.
    """
    codes, letters = np.empty(len(text) + 1, np.int32), np.empty(len(text), np.uint8)
    starts, digests = np.empty(len(text) // 2 + 2, np.int64), np.empty(len(text) // 2 + 1, np.int64)
    table = np.full(1 << 16, -1, np.int32)
    starts[0] = count = size = i = 0
    while i < len(eights) - 1:
        width = _white(text, i)
        if width:
            if text[i] == 10:
                codes[count] = END
                count += 1
            i += width
            continue
        begin, i = i, _end(text, eights, i)
        digest = _digest(eights, begin, i)
        place = _scattered(digest) & (len(table) - 1)
        while table[place] >= 0:
            number = table[place]
            if digests[number] == digest and (
                i - begin <= 8 or _same(text, begin, i, letters, starts[number], starts[number + 1])
            ):
                break
            place = (place + 1) & (len(table) - 1)
        if table[place] < 0:
            _append(text, begin, i, digest, letters, starts, digests, size)
            table[place] = size
            codes[count] = size
            size += 1
            if 2 * size > len(table):
                table = np.empty(2 * len(table), np.int32)
                enter(table, digests, size)
        else:
            codes[count] = table[place]
        count += 1
    return codes[:count], letters[: starts[size]], starts[: size + 1], digests[:size]


@compiled
def _prune(letters, starts, digests, counts, table, state):
    """Forget the words that occurred less often than the least count, which rises by one; the others move up, in their order."""
    size, at = 0, 0
    for number in range(state[SIZE]):
        if counts[number] >= state[LEAST]:
            for i in range(starts[number], starts[number + 1]):
                letters[at] = letters[i]
                at += 1
            digests[size], counts[size] = digests[number], counts[number]
            size += 1
            starts[size] = at
    enter(table, digests, size)
    state[SIZE], state[LEAST] = size, state[LEAST] + 1


@compiled
def settle(codes, words, lexicon, counts, table, state, longest, limit, closed, numbers):
    """Count the words of a text and write their numbers in the lexicon, END after each sentence; returns how many were written.

    A closed lexicon takes no more words: its size stands for all others. With a limit it is pruned after a sentence that exceeds it.
    """
    letters, starts, digests = lexicon
    new_letters, new_starts, new_digests = words
    known = np.full(len(new_digests), -1, np.int32)
    written = 0
    for code in codes:
        if code != END:
            if known[code] < 0:
                begin, end, digest = new_starts[code], new_starts[code + 1], new_digests[code]
                place = _scattered(digest) & (len(table) - 1)
                while table[place] >= 0:
                    number = table[place]
                    if digests[number] == digest and (
                        end - begin <= 8
                        or _same(
                            new_letters, begin, end, letters, starts[number], starts[number + 1]
                        )
                    ):
                        break
                    place = (place + 1) & (len(table) - 1)
                number = table[place]
                if number < 0:
                    number = state[SIZE]
                    if not closed:
                        _append(new_letters, begin, end, digest, letters, starts, digests, number)
                        table[place], counts[number] = number, 0
                        state[SIZE] += 1
                known[code] = number
            number = known[code]
            counts[number] += 1
            numbers[written] = number
            written += 1
            state[WORDS] += 1
            state[PENDING] += 1
        if state[PENDING] == longest or (code == END and state[PENDING]):
            numbers[written] = END
            written += 1
            state[PENDING] = 0
            if 0 < limit < state[SIZE]:
                _prune(letters, starts, digests, counts, table, state)
                known[:] = -1
    return written


@compiled
def rows(numbers, row_of, state, ids, lengths):
    """Ids of the words that have a row, in sentences that have two of them, and the lengths of these sentences.

    Returns how many ids, sentences and words there are. `state` holds the open sentence's length and its first id, which is written
    when a second follows.
    """
    length, first = state
    written = sentences = words = 0
    for number in numbers:
        if number == END:
            if length > 1:
                lengths[sentences] = length
                sentences += 1
            length = 0
            continue
        words += 1
        row = row_of[number]
        if row >= 0:
            if length == 0:
                first = row
            else:
                if length == 1:
                    ids[written] = first
                    written += 1
                ids[written] = row
                written += 1
            length += 1
    state[0], state[1] = length, first
    return written, sentences, words
