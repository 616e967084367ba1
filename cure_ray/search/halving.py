"""Successive halving: who goes on at a rung, by one objective or by several, under constraints. Numbers in, a decision out.

Several objectives: configurations are ordered by non-dominated rank (how many fronts must be taken away until none beats them), within a
front by their share of its hypervolume above zero: what the front would lose without them. Whoever misses a constraint comes after all who
meet it, the smaller miss first.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

Values = tuple[float, ...]
ROUNDING = 9  # decimals: 0.95 is reached by a mean of 0.95 that was computed as 0.9499999999999999


@dataclass(frozen=True)
class Standing:
    """What a configuration has reached: its objectives, larger is better, and by how much it misses the constraints (0: it meets them)."""

    values: Values
    missed: float = 0.0


def shortfalls(reached: Mapping[str, float], at_least: Mapping[str, float]) -> dict[str, float]:
    """By how much each constraint is missed; zero or less where it is met, as Optuna wants it."""
    return {name: round(bound - reached[name], ROUNDING) for name, bound in at_least.items()}


def standing(reached: Mapping[str, float], objectives: Sequence[str], at_least: Mapping[str, float]) -> Standing:
    missed = sum(max(0.0, miss) for miss in shortfalls(reached, at_least).values())
    return Standing(tuple(reached[name] for name in objectives), missed)


def survives(mine: Standing, others: Sequence[Standing], factor: int) -> bool:
    """Asynchronous: among what has been seen at this rung, is it in the best 1/factor (and be it the only one)?"""
    return _better(mine, others) < max(1, (len(others) + 1) // factor)


def dominates(a: Sequence[float], b: Sequence[float]) -> bool:
    """At least as good everywhere and better somewhere."""
    return all(x >= y for x, y in zip(a, b, strict=True)) and any(x > y for x, y in zip(a, b, strict=True))


def front(points: Sequence[Values]) -> list[Values]:
    """The different points that no other dominates."""
    distinct = list(dict.fromkeys(points))
    return [p for p in distinct if not any(dominates(q, p) for q in distinct)]


def hypervolume(points: Sequence[Values]) -> float:
    """The volume between zero and the points, slice by slice along the last objective."""
    if not points:
        return 0.0
    if len(points[0]) == 1:
        return max(p[0] for p in points)
    levels = sorted({max(0.0, p[-1]) for p in points}, reverse=True)
    slices = ((top, bottom, front([p[:-1] for p in points if p[-1] >= top])) for top, bottom in pairwise([*levels, 0.0]))
    return sum((top - bottom) * hypervolume(below) for top, bottom, below in slices if top > bottom)


def share(point: Values, others: Sequence[Values]) -> float:
    """What a front loses without this point: its own volume but for what the others cover of it."""
    covered = [tuple(min(a, b) for a, b in zip(point, other, strict=True)) for other in others if other != point]
    return hypervolume([point]) - hypervolume(front(covered))


def _better(mine: Standing, others: Sequence[Standing]) -> int:
    """How many come strictly before it."""
    if mine.missed > 0:
        return sum(other.missed < mine.missed for other in others)
    left, ahead = [other.values for other in others if other.missed == 0], 0
    if len(mine.values) == 1:
        return sum(values > mine.values for values in left)
    while True:
        first = front([*left, mine.values])
        if mine.values in first:
            own = share(mine.values, first)
            return ahead + sum(values in first and share(values, first) > own for values in left)
        ahead += sum(values in first for values in left)
        left = [values for values in left if values not in first]
