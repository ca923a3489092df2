"""Hashes of n-grams, against gensim's and fastText's."""

from gensim.models.fasttext import ft_ngram_hashes
from hypothesis import given
from hypothesis import strategies as st

from w2v.text.ngrams import hash_words

LETTERS = st.characters(codec="utf-8", exclude_characters="\0")
WORDS = st.text(LETTERS | st.sampled_from("<>ab\u0161\u4e2d\U0001f600"), max_size=12)


@given(st.lists(WORDS, max_size=6), st.integers(1, 4), st.integers(0, 5))
def test_hashes_are_those_of_gensim(words, min_n, more):
    max_n = min_n + more
    begin_V, hashes_N = hash_words(words, min_n, max_n)
    assert begin_V[0] == 0
    assert begin_V[-1] == len(hashes_N)
    for word, first, last in zip(words, begin_V, begin_V[1:], strict=False):
        theirs = ft_ngram_hashes(word, min_n, max_n, 2**32 - 1)
        assert (hashes_N[first:last].astype(int) % (2**32 - 1)).tolist() == theirs


def hashes(word, min_n, max_n):
    return hash_words([word], min_n, max_n)[1].tolist()


def test_hashes_are_fnv_1a():
    assert hashes("foobar", 6, 6)[1] == 0xBF9CF968  # of the letters foobar
    assert hashes("a", 1, 1) == hashes("xax", 1, 1)[1:2]  # < and > alone do not count
