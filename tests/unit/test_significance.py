"""Tests of differences agree with SciPy, and find only what is there."""

import numpy as np
import pytest
from scipy.stats import ttest_rel

from tests.support.each_case import each_case
from w2v.vectors import significance


def test_the_interval_is_that_of_a_mean():
    items_I = (np.random.default_rng(0).random(2000) < 0.3).astype(float)
    low, high = significance.interval(np.append(items_I, np.nan))
    error = 1.96 * items_I.std() / 2000**0.5
    assert (low, high) == pytest.approx((items_I.mean() - error, items_I.mean() + error), abs=2e-3)
    assert significance.interval(np.append(items_I, np.nan)) == (low, high)  # each time
    assert significance.interval(np.array([1.0, np.nan])) is None


def test_items_change_sign_in_pairs():
    better, worse = np.ones(5), np.zeros(5)
    assert significance.p_over_items({"a": better}, {"a": worse}) == 2 / 2**5
    skipped = np.append(better, np.nan)
    assert significance.p_over_items({"a": skipped}, {"a": np.append(worse, 0)}) == 2 / 2**5
    assert significance.p_over_items({"a": better}, {"a": better}) == 1.0
    for other in ({}, {"b": worse}, {"a": worse[1:]}):
        assert significance.p_over_items({"a": better}, other) is None


def test_seeds_are_tested_as_scipy_does():
    first, second = np.random.default_rng(1).standard_normal((2, 4))
    expected = ttest_rel(first, second).pvalue
    assert significance.p_over_seeds(first - second) == pytest.approx(expected)
    assert significance.p_over_seeds(first - first) == 1.0
    assert significance.p_over_seeds(first[:1]) is None


def test_equal_vectors_differ_as_seldom_as_they_should():
    rng = np.random.default_rng(2)
    found = [
        significance.p_over_items(*({"a": (rng.random(80) < 0.4) * 1.0} for _ in range(2)))
        for _ in range(100)
    ]
    assert 0.01 < np.mean(np.array(found) < significance.LEVEL) < 0.1


def test_so_many_more_seeds_are_enough():
    difference_S = np.array([0.03, -0.01, 0.02, 0.0])
    test = significance.test(difference_S, {}, {})
    assert test.is_noise and test.seeds == 4 and 1 < test.more_seeds < 30
    # As many with the same mean and deviation have p below .05, and one less has not.
    for seeds, is_noise in ((4 + test.more_seeds, False), (3 + test.more_seeds, True)):
        more_S = np.linspace(-1, 1, seeds)
        more_S *= difference_S.std(ddof=1) / more_S.std(ddof=1)
        assert (significance.p_over_seeds(more_S + 0.01) >= 0.05) == is_noise
    assert significance.test(np.array([0.01, -0.01]), {}, {}).more_seeds is None
    assert significance.test(np.array([0.5, 0.51, 0.5]), {}, {}).more_seeds == 0


@each_case(
    ("p", "text"),
    [(0.0123, "p = .012"), (0.584, "p = .58"), (0.0001, "p < .001"), (1.0, "p = 1"), (None, "not")],
)
def test_p_is_short(p, text):
    assert str(significance.Test(p, 3)).startswith(text)


@each_case(
    ("more", "hint"),
    [
        (0, "these questions are too few"),
        (1, "about 1 more seed would tell"),
        (4, "about 4 more seeds would tell"),
        (None, "nor would they be with 100 seeds"),
    ],
)
def test_a_verdict_says_what_would_tell_more(more, hint):
    sentence = f"a and b are not distinguishable (p = .5); {hint}"
    assert significance.Test(0.5, 3, more).verdict("a", "b") == sentence
