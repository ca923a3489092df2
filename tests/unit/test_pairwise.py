"""Cases that cover all pairs of values."""

from itertools import combinations, product

import pytest

from tests.support.pairwise import pairwise

SIZES = {"a": [1, 2, 3], "b, c": [(4, 5), (6, 7)], "d": [8, pytest.param(9, marks=pytest.mark.gpu)]}


def pairs_of(cases):
    return {pair for case in cases for pair in combinations(enumerate(case), 2)}


def test_pairs_are_covered_with_and_without_a_gpu():
    mark = pairwise(SIZES)
    assert mark.args[0] == ["a", "b", "c", "d"]
    for d, has_marks in ((8, False), (9, True)):
        cases = [case.values for case in mark.args[1] if bool(case.marks) == has_marks]
        assert pairs_of(cases) == pairs_of(product([1, 2, 3], [4], [5], [d])) | pairs_of(
            product([1, 2, 3], [6], [7], [d])
        )
        assert len(cases) == 6
    assert mark.args[1][0].id == "1-4-5-8"


def test_a_cover_is_smaller_than_all_combinations():
    values = {name: range(3) for name in "abcd"}
    cases = [case.values for case in pairwise(values).args[1]]
    assert pairs_of(cases) == pairs_of(product(range(3), repeat=4))
    assert len(cases) < 15


def test_cases_that_are_not_allowed_do_not_occur():
    values = {name: range(3) for name in "abc"}
    cases = [case.values for case in pairwise(values, lambda a, b, **_: a != b).args[1]]
    allowed = [case for case in product(range(3), repeat=3) if case[0] != case[1]]
    assert pairs_of(cases) == pairs_of(allowed)
