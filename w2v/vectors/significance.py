"""Intervals of scores, and tests whether one is higher than another.

Shapes: S seeds, I items of a set, such as questions (NaN: not counted), V values, R samples. SciPy
is imported where runs are compared: that takes a second or two.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import NamedTuple

import numpy as np

LEVEL = 0.05  # below this p, a difference is not noise
RESAMPLES = 999
BATCH = 32  # samples that are in memory at once
MOST_SEEDS = 100


def interval(items_I: np.ndarray) -> tuple[float, float] | None:
    """Return the 95 % interval of the mean over items, by the bootstrap."""
    counted_I = items_I[np.isfinite(items_I)]
    if len(counted_I) < 2:
        return None
    values_V, counts_V = np.unique(counted_I, return_counts=True)  # few, as for right and wrong
    draws = np.random.default_rng(0)  # results repeat
    drawn_RV = draws.multinomial(len(counted_I), counts_V / len(counted_I), RESAMPLES)
    low, high = np.quantile(drawn_RV @ values_V / len(counted_I), [0.025, 0.975])
    return float(low), float(high)


class Test(NamedTuple):
    """Tests of a difference over seeds and items; p is the larger one."""

    p: float | None  # None if nothing could be tested
    seeds: int  # that both have
    more_seeds: int | None = None  # that would show such a difference; None if 100 do not

    @property
    def is_noise(self) -> bool:
        """Whether nothing shows a difference."""
        return self.p is None or self.p >= LEVEL

    def __str__(self) -> str:
        if self.p is None or self.p < 0.001:
            return "not tested" if self.p is None else "p < .001"
        return f"p = {self.p:.2g}".replace("= 0.", "= .")

    def verdict(self, better: str, worse: str) -> str:
        """Return a sentence about two rows, and what would tell more."""
        if not self.is_noise:
            doubt = "; other seeds may differ: train more" * (self.seeds < 2)
            return f"{better} > {worse} ({self}){doubt}"
        hints = {None: "nor would they be with 100 seeds", 0: "these questions are too few"}
        plural = "s" * (self.more_seeds != 1)
        hint = hints.get(self.more_seeds, f"about {self.more_seeds} more seed{plural} would tell")
        if self.seeds < 2:
            hint = "train more seeds"
        return f"{better} and {worse} are not distinguishable ({self}); {hint}"


def test(
    difference_S: np.ndarray, better: Mapping[str, np.ndarray], worse: Mapping[str, np.ndarray]
) -> Test:
    """Test the difference of seeds, and of the items of each set by its name."""
    seeds = len(difference_S)
    tested = [p_over_seeds(difference_S), p_over_items(better, worse)]
    p = max((p for p in tested if p is not None), default=None)
    p_of_more = (p_over_seeds(difference_S, seeds + more) for more in range(MOST_SEEDS - seeds))
    is_enough = (p is not None and p < LEVEL for p in p_of_more)
    return Test(p, seeds, next((more for more, is_so in enumerate(is_enough) if is_so), None))


def p_over_seeds(difference_S: np.ndarray, seeds: int | None = None) -> float | None:
    """Return p of the mean difference by Student's paired test, or None.

    With `seeds`, p if so many seeds had the same mean and deviation. Changes of sign, as for items,
    would need six seeds for p < .05: three have only eight.
    """
    if len(difference_S) < 2:
        return None
    mean = abs(float(np.mean(difference_S)))
    deviation = float(np.std(difference_S, ddof=1))
    if not deviation:  # as for two equal runs
        return float(not mean)
    seeds = seeds or len(difference_S)
    return 2 * float(import_module("scipy.stats").t.sf(mean / deviation * seeds**0.5, seeds - 1))


def p_over_items(better: Mapping[str, np.ndarray], worse: Mapping[str, np.ndarray]) -> float | None:
    """Return p of the mean difference by changes of sign of items, or None.

    Both have the items of each set by its name; sets count alike. None: no item is in both.
    """
    differences = [np.empty(0)]
    for name in better:
        if name in worse and len(better[name]) == len(worse[name]):
            difference_I = better[name] - worse[name]
            difference_I = difference_I[np.isfinite(difference_I)]
            differences.append(difference_I / max(1, len(difference_I)))  # each set counts alike
    compared_I = np.concatenate(differences)
    changed_I = compared_I[compared_I != 0]
    if len(changed_I) < 2:
        return 1.0 if len(compared_I) else None
    test = import_module("scipy.stats").permutation_test
    found = test(
        (changed_I,), np.sum, permutation_type="samples", n_resamples=RESAMPLES, batch=BATCH, rng=0
    )
    return float(found.pvalue)
