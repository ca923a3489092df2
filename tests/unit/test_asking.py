"""Neighbours, analogies and sums of words are gensim's answers; unknown words get spellings."""

import numpy as np
import pytest

from tests.unit.test_evaluation import kv_of
from w2v.vectors import evaluate as evaluation
from w2v.vectors import query as asking


def test_neighbours_and_analogy_are_gensims_and_unknown_words_get_spellings():
    kv = kv_of(["Paris", "paris", "London", "king"], [[1, 0], [0.9, 0.1], [0, 1], [0.5, 0.5]])
    assert asking.neighbours(kv, "Paris", 2) == kv.most_similar("Paris", topn=2)
    assert asking.analogy(kv, "Paris", "king", "London", 1) == kv.most_similar(
        positive=["king", "London"], negative=["Paris"], topn=1
    )
    with pytest.raises(
        evaluation.EvaluationError,
        match="'Lodnon' is not in the vocabulary; nearest spellings: London",
    ):
        asking.neighbours(kv, "Lodnon")
    with pytest.raises(ValueError, match="'qqq' is not in the vocabulary; nearest spellings: none"):
        asking.analogy(kv, "king", "qqq", "London")
    assert asking.nearest_spellings(kv, "PARIS") == [
        "Paris"
    ]  # the most frequent of its case variants
    with pytest.raises(ValueError, match="topn=0"):
        asking.neighbours(kv, "king", 0)


def test_a_sum_of_words_is_gensims():
    rng = np.random.default_rng(5)
    kv = kv_of(["a", "b", "c", "d", "e", "f"], rng.standard_normal((6, 4)))
    for sum_, added, taken in (
        ("a - b + c", "ac", "b"),
        ("a + b + c - d", "abc", "d"),
        ("a - b", "a", "b"),
        ("f", "f", ""),
    ):
        assert asking.combination(kv, sum_.split()) == kv.most_similar(
            positive=[*added], negative=[*taken]
        )
    for wrong in ("a b", "a -", "- a", "a b - c", "a - b c"):
        with pytest.raises(
            evaluation.EvaluationError, match="is no sum of words; write it as king - man"
        ):
            asking.combination(kv, wrong.split())
    with pytest.raises(evaluation.EvaluationError, match="'x' is not in the vocabulary"):
        asking.combination(kv, ["a", "-", "x"])
