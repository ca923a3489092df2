"""Cases of a test that cover each pair of values."""

from collections import Counter
from itertools import combinations, product

import pytest


def pairwise(parameters, allowed=None):
    """Return a parametrize mark whose cases cover each pair of values.

    Cases that need a GPU cover their pairs by themselves, and so do those that need none.

    Args:
        parameters: The values of each parameter, by its name; "a, b" names two, of tuples.
        allowed: Takes the values by name; cases of which it returns False do not occur.
    """
    choices = [
        [_as_param(names, value) for value in values] for names, values in parameters.items()
    ]
    names = ", ".join(parameters).split(", ")
    cases = [
        case
        for case in product(*choices)
        if allowed is None or allowed(**dict(zip(names, _values(case), strict=True)))
    ]
    covering = []
    for needs_gpu in (False, True):
        covering += _cover([case for case in cases if any(p.marks for p in case) == needs_gpu])
    return pytest.mark.parametrize(names, [_joined(case) for case in covering])


def _as_param(names, value):
    if hasattr(value, "marks"):
        return value
    return pytest.param(*(value if "," in names else [value]))


def _values(case):
    return [value for param in case for value in param.values]


def _cover(cases):
    """Return the cases that a greedy search picks until all pairs occur."""
    pairs = [set(combinations(enumerate(map(id, case)), 2)) for case in cases]
    missing, times = set().union(*pairs), Counter()

    def gain(number):
        seldom = -sum(times[pair] for pair in pairs[number])  # so that values take turns
        return len(missing & pairs[number]), seldom

    while missing:
        best = max(range(len(cases)), key=gain)
        missing -= pairs[best]
        times.update(pairs[best])
        yield cases[best]


def _joined(case):
    """Return one param of the values, marks and ids of several."""
    ids = [param.id or "-".join(map(_id, param.values)) for param in case]
    marks = [mark for param in case for mark in param.marks]
    return pytest.param(*_values(case), marks=marks, id="-".join(ids))


def _id(value):
    return getattr(value, "__name__", str(value))
