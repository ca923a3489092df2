"""Splitting at whitespace as str.split does, and numbering distinct words."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from w2v.text import tokenize
from w2v.text.tokenize import LINE_END, WordTable, split


def words_of(text):
    table = WordTable()
    numbers = table.add(split(text.encode()))
    return [table.word(number) for number in numbers if number != LINE_END]


def test_whitespace_is_that_of_python():
    characters = [chr(code) for code in range(1, 0x110000) if not 0xD800 <= code <= 0xDFFF]
    text = "a" + "a".join(characters)
    assert words_of(text) == text.split()


LETTERS = ["a", "é", "語", "😀", "seven77", "eight888", "nine99999", "nine99998", "x" * 16]
SPACES = [" ", "\n", "\r\n", "\t", "\x1c", "\x85", "\xa0", "\u1680", "\u2009", "\u205f", "\u3000"]


@given(st.lists(st.lists(st.sampled_from(LETTERS + SPACES), max_size=30).map("".join), max_size=4))
def test_words_are_numbered_by_first_appearance_and_counted(texts):
    table = WordTable()
    numbers = [number for text in texts for number in table.add(split(text.encode())).tolist()]
    assert numbers.count(LINE_END) == sum(text.count("\n") for text in texts)
    numbers = [number for number in numbers if number != LINE_END]
    words = [word for text in texts for word in text.split()]
    distinct = list(dict.fromkeys(words))
    assert [table.word(number) for number in numbers] == words
    assert numbers == [distinct.index(word) for word in words]
    assert table.counts.tolist() == [words.count(word) for word in distinct]


def test_the_table_grows_over_many_blocks():
    table = WordTable()
    blocks = [range(start, start + 3000) for start in range(0, 30_000, 1000)]
    for block in blocks:
        numbers = table.add(split(" ".join(f"word-number-{n}" for n in block).encode()))
        assert numbers.tolist() == list(block)
    counts = np.bincount(np.concatenate([np.array(block) for block in blocks]))
    assert table.counts.tolist() == counts.tolist()


def test_words_with_the_same_digest_are_told_apart():
    """The bytes of long words are folded into eight, in which these agree."""
    words = [f"{first}1234567{second}" for first, second in ["ab", "ba", "cd", "dc"]]
    tokens = split(" ".join(words * 2).encode())
    assert len(set(tokens.digests.tolist())) < 4
    assert WordTable().add(tokens).tolist() == [*range(4)] * 2


@pytest.mark.parametrize("block", [1, 2, 3, 100])
@pytest.mark.parametrize("max_length", [2, 3, 100])
def test_kept_sentences_do_not_depend_on_blocks(block, max_length):
    numbers = np.array([0, 9, 1, -1, 2, -1, -1, 9, 9, -1, 3, 9, 9, 4, 5, 6, 7, -1], np.int32)
    row_of = np.array([10, 11, 12, 13, 14, 15, 16, 17, -1, -1], np.int32)
    sentence = np.zeros(3, np.int64)
    found_ids = []
    found_lengths = []
    words = 0
    for start in range(0, len(numbers), block):
        part = numbers[start : start + block]
        ids = np.empty(len(part) + 1, np.int32)
        lengths = np.empty(len(part), np.int64)
        counts = tokenize.kept_sentences(part, row_of, max_length, sentence, ids, lengths)
        found_ids += ids[: counts[0]].tolist()
        found_lengths += lengths[: counts[1]].tolist()
        words += counts[2]
    expected = {
        2: ([15, 16], [2]),
        3: ([10, 11, 14, 15, 16], [2, 3]),
        100: ([10, 11, 13, 14, 15, 16, 17], [2, 5]),
    }
    assert (found_ids, found_lengths) == expected[max_length] and words == 13
