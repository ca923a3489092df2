"""Neighbours, analogies and sums of words are gensim's answers."""

import numpy as np
import pytest

from tests.support.planted import kv_of
from w2v.vectors import query
from w2v.vectors.datasets import EvaluationError


def test_neighbours_and_analogies_are_gensims():
    kv = kv_of(["Paris", "paris", "London", "king"], [[1, 0], [0.9, 0.1], [0, 1], [0.5, 0.5]])
    assert query.neighbours(kv, "Paris", 2) == kv.most_similar("Paris", topn=2)
    expected = kv.most_similar(positive=["king", "London"], negative=["Paris"], topn=1)
    assert query.analogy(kv, "Paris", "king", "London", 1) == expected


def test_unknown_words_get_the_nearest_spellings():
    kv = kv_of(["Paris", "paris", "London"], np.eye(3))
    with pytest.raises(EvaluationError, match="'Lodnon' is not in the vocabulary; .*: London"):
        query.neighbours(kv, "Lodnon")
    with pytest.raises(EvaluationError, match="'qqq' is not in the vocabulary; .*: none"):
        query.combination(kv, ["Paris", "-", "qqq"])
    assert query.nearest_spellings(kv, "PARIS") == ["Paris"]  # the most frequent case variant


@pytest.mark.parametrize(
    ("terms", "positive", "negative"),
    [("a - b + c", "ac", "b"), ("a + b + c - d", "abc", "d"), ("a - b", "a", "b"), ("f", "f", "")],
)
def test_a_sum_of_words_is_gensims(terms, positive, negative):
    kv = kv_of([*"abcdef"], np.random.default_rng(5).standard_normal((6, 4)))
    expected = kv.most_similar(positive=[*positive], negative=[*negative])
    assert query.combination(kv, terms.split()) == expected


@pytest.mark.parametrize("terms", ["a b", "a -", "- a", "a b - c", "a - b c"])
def test_malformed_sums_are_refused(terms):
    kv = kv_of([*"abc"], np.eye(3))
    with pytest.raises(EvaluationError, match="is no sum of words; write it as king - man"):
        query.combination(kv, terms.split())
