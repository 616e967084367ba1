"""The statistics behind the tables: intervals, paired tests, Pareto fronts. Pure functions on numbers and arrays."""

import functools
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import stats

Floats = NDArray[np.float64]


def wilson(successes: ArrayLike, n: ArrayLike, level: float = 0.95) -> tuple[Floats, Floats]:
    """Wilson's score interval for a share, as fractions; NaN where nothing was counted.

    Unlike the textbook interval it stays inside [0, 1] and keeps its coverage near 0 and 1, where certified accuracies live.
    `successes` may be fractional: the mean over seeds on the same n samples.
    """
    k, total = np.broadcast_arrays(np.asarray(successes, dtype=float), np.asarray(n, dtype=float))
    z = _quantile(level)
    with np.errstate(divide="ignore", invalid="ignore"):
        share = k / total
        centre = (share + z * z / (2 * total)) / (1 + z * z / total)
        half = z / (1 + z * z / total) * np.sqrt(share * (1 - share) / total + z * z / (4 * total * total))
        # The ends are exact in theory; rounding must not push them past the share itself at 0 and n.
        low = np.minimum(np.where(k == 0, 0.0, centre - half), share)
        high = np.maximum(np.where(k == total, 1.0, centre + half), share)
    return low, high


@functools.cache
def _quantile(level: float) -> float:
    """Two-sided, of the normal distribution; scipy takes longer for it than everything else in an interval."""
    return float(stats.norm.ppf((1 + level) / 2))


def mcnemar(only_a: ArrayLike, only_b: ArrayLike) -> Floats:
    """Exact two-sided McNemar test: only the samples on which two methods differ say anything about their difference."""
    a, b = np.asarray(only_a), np.asarray(only_b)
    return np.minimum(1.0, 2 * stats.binom.cdf(np.minimum(a, b), a + b, 0.5))


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's step-down adjustment: reject where the result is below the level, and the family-wise error stays below it."""
    order = np.argsort(p_values, kind="stable")
    adjusted, running = [0.0] * len(p_values), 0.0
    for rank, index in enumerate(order):
        running = max(running, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = running
    return adjusted


def pareto_front(points: ArrayLike) -> NDArray[np.bool_]:
    """Which of the points (rows; larger is better in every column) no other point dominates."""
    p = np.asarray(points, dtype=float)
    at_least = (p[:, None, :] >= p[None, :, :]).all(-1)
    better = (p[:, None, :] > p[None, :, :]).any(-1)
    return np.logical_not((at_least & better).any(0)).reshape(-1)
