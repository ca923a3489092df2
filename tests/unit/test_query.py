"""Neighbors, analogies and sums of words are gensim's answers."""

import numpy as np
import pytest

from tests.support.each_case import each_case
from tests.support.planted import kv_of
from w2v.vectors import query
from w2v.vectors.datasets import EvaluationError


def assert_equal(answers, expected):
    assert [word for word, _ in answers] == [word for word, _ in expected]
    assert [cosine for _, cosine in answers] == pytest.approx([c for _, c in expected], abs=1e-6)


def test_unknown_words_get_the_nearest_spellings():
    kv = kv_of(["Paris", "paris", "London"], np.eye(3))
    with pytest.raises(EvaluationError, match="'Lodnon' is not in the vocabulary; .*: London"):
        query.combination(kv, ["Lodnon"])
    with pytest.raises(EvaluationError, match="'qqq' is not in the vocabulary; vocab.tsv"):
        query.combination(kv, ["Paris", "-", "qqq"])
    assert query.nearest_spellings(kv, "PARIS") == ["Paris"]  # the most frequent case variant


@each_case(
    ("terms", "positive", "negative"),
    [("a - b + c", "ac", "b"), ("a + b + c - d", "abc", "d"), ("a - b", "a", "b"), ("f", "f", "")],
)
def test_a_sum_of_words_is_gensims(terms, positive, negative):
    kv = kv_of([*"abcdef"], np.random.default_rng(5).standard_normal((6, 4)))
    expected = kv.most_similar(positive=[*positive], negative=[*negative], topn=2)
    assert_equal(query.combination(kv, terms.split(), 2), expected)


def test_words_of_the_sum_are_no_answers_even_without_a_direction():
    kv = kv_of([*"abc"], np.eye(3))
    answers = query.combination(kv, ["a", "-", "a"])
    assert sorted(answers) == [("b", 0.0), ("c", 0.0)]
    with_zero = kv_of([*"abc"], np.eye(3) * [[1], [1], [0]])
    assert [word for word, _ in query.combination(with_zero, ["a"])] == ["b", "c"]


@each_case("terms", ["a b", "a -", "- a", "a b - c", "a - b c"])
def test_malformed_sums_are_refused(terms):
    kv = kv_of([*"abc"], np.eye(3))
    with pytest.raises(EvaluationError, match="is no sum of words; write it as king - man"):
        query.combination(kv, terms.split())


def test_examples_are_neighbors_of_frequent_words_that_say_something():
    words = ["the", "of", *(f"word{n}" for n in range(3000))]
    lines = query.examples(words, np.random.default_rng(1).standard_normal((len(words), 4)))
    assert [line.split()[1] for line in lines] == [
        "word8",
        "word32",
        "word128",
        "word512",
        "word2048",
    ]
    assert all(len(line.split()) == 7 for line in lines)
    few = query.examples(["cat", "dog"], np.eye(2))
    assert [line.split()[1:] for line in few] == [["cat", "dog"], ["dog", "cat"]]
