"""Splitting at whitespace as str.split does, and numbering distinct words."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tests.support.each_case import each_case
from w2v.text import tokenize
from w2v.text.tokenize import LINE_END, MergedWords, WordTable


def number(data, table, first=0):
    """Return the numbers of words, and what else was found."""
    numbers = np.empty(len(data), np.int32)
    return tokenize.number_words(tokenize.padded(data), len(data), first, table, numbers)


def cleaned(text, words_only=False, lowercase=False):
    data = text.encode()
    becomes = tokenize.replacements(words_only, lowercase)
    new, size = tokenize.normalized(tokenize.padded(data), len(data), becomes)
    return new[:size].tobytes().decode() if size >= 0 else None


def test_whitespace_is_that_of_python_and_the_zero_width_space():
    characters = [chr(code) for code in range(1, 0x110000) if not 0xD800 <= code <= 0xDFFF]
    text = "a" + "a".join(characters)
    table = WordTable()
    numbers = number(cleaned(text).encode(), table)[0]
    assert table.words(numbers[numbers != LINE_END]) == text.replace("\u200b", " ").split()


LETTERS = [
    "a",
    "é",
    "語",
    "😀",
    "seven77",
    "eight888",
    "nine99999",
    "nine99998",
    "x" * 16,
    "\1",
    "\x1b",
]
LETTERS += ["x" * 17, "x" * 24]
SPACES = [" ", "\n", "\r\n", "\t", "\x1c"]


@given(st.lists(st.lists(st.sampled_from(LETTERS + SPACES), max_size=30).map("".join), max_size=4))
def test_words_are_numbered_by_first_appearance_and_counted(texts):
    table = WordTable()
    found = [number(text.encode(), table) for text in texts]
    for text, numbered in zip(texts, found, strict=True):
        longest = max([len(word.encode()) for word in text.split()], default=0)
        assert longest == numbered[1] or longest < 8
    numbers = [n for numbered in found for n in numbered[0].tolist() if n != LINE_END]
    words = [word for text in texts for word in text.split()]
    distinct = list(dict.fromkeys(words))
    assert table.words(np.arange(table.size)) == distinct
    assert numbers == [distinct.index(word) for word in words]
    assert table.counts[: table.size].tolist() == [words.count(word) for word in distinct]


def test_tables_grow_and_merge():
    merged = MergedWords()
    text = {}
    for start in (20_000, 0, 10_000):  # as threads do, in any order
        table = WordTable()
        words = [f"word-number-{n}" for n in range(start, start + 15_000)]
        numbered = number(" ".join(words).encode(), table, first=start * 10)
        codes = merged.merge(table)[numbered[0]]
        assert merged.words(codes) == words
        text |= {start * 10 + place: word for place, word in enumerate(words)}
    counts, firsts = merged.totals()
    [used] = counts.nonzero()
    words = merged.words(used)
    first = {word: place for place, word in sorted(text.items(), reverse=True)}
    assert dict(zip(words, firsts[used].tolist(), strict=True)) == first
    expected = [list(text.values()).count(word) for word in words[:50]]
    assert len(words) == 35_000 and counts[used][:50].tolist() == expected


def test_words_with_the_same_key_are_told_apart():
    def mixed(chunk):
        key = int.from_bytes(chunk, "little") * int(tokenize.FACTOR) % 2**64
        return key ^ key >> 32

    rng = np.random.default_rng(1)
    words = []
    while len(words) < 20:
        first, second, end = (rng.integers(97, 123, 8, np.uint8).tobytes() for _ in range(3))
        other_end = (mixed(first) ^ int.from_bytes(end, "little") ^ mixed(second)).to_bytes(
            8, "little"
        )
        if min(other_end) > 32:
            words += [first + end, second + other_end]
    assert number(b" ".join(words * 2), WordTable())[0].tolist() == [*range(20)] * 2


@each_case(
    "data",
    [
        b"\xff",
        b"\x80\x80",
        b"\xc1\x81",
        b"\xe0\x80\x80",
        b"\xed\xa0\x80",
        b"\xf4\x90\x80\x80",
        b"\xf8\x90\x80\x80",  # UTF-8 has no first byte above 0xF4
        b"\xfc\x80\x80\x80",
        b"a\xc3",
    ],
)
def test_what_is_not_utf8_is_not_replaced(data):
    becomes = tokenize.replacements(False, False)
    assert tokenize.normalized(tokenize.padded(data), len(data), becomes)[1] == -1


def test_lower_case_is_that_of_python():
    points = [
        p for p in range(1, 0x110000) if not 0xD800 <= p <= 0xDFFF and p not in (0x130, 0x3A3)
    ]
    text = "".join(c for c in map(chr, points) if not (c.isspace() or c == "\u200b"))
    assert cleaned(text, lowercase=True) == text.lower()
    assert cleaned("a Σ", lowercase=True) is None and cleaned("aİ", lowercase=True) is None


def test_words_only_keeps_letters_their_marks_and_numbers():
    text = "Don't stop, “naïve” 語彙…\n3.5% ÉTÉ: हिन्दी e\u0301_x\n"
    lines = [line.split() for line in cleaned(text, True, True).split("\n")]
    assert lines[0] == ["don", "t", "stop", "naïve", "語彙"]
    assert lines[1:] == [["3", "5", "été", "हिन्दी", "e\u0301_x"], []]
