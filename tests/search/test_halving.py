"""Who goes on at a rung: by one objective, by several, under constraints."""

import itertools
import random

import pytest

from cure_ray.search.halving import Standing, dominates, front, hypervolume, share, shortfalls, standing, survives


def one(value: float, missed: float = 0.0) -> Standing:
    return Standing((value,), missed)


def test_successive_halving_keeps_the_best_share() -> None:
    assert survives(one(0.5), [], 3)
    assert not survives(one(0.5), [one(0.6)], 3)
    assert survives(one(0.7), [one(0.6)], 3)
    assert survives(one(0.5), [one(v) for v in (0.6, 0.4, 0.3, 0.2, 0.1)], 3)
    assert not survives(one(0.4), [one(v) for v in (0.6, 0.5, 0.3, 0.2, 0.1)], 3)


def test_of_several_objectives_the_rank_decides_first() -> None:
    others = [Standing(v) for v in ((0.9, 0.2), (0.5, 0.6), (0.1, 0.9), (0.4, 0.5), (0.05, 0.8))]
    assert not survives(Standing((0.45, 0.55)), others, 2), "three are on the front before it"
    assert survives(Standing((0.6, 0.65)), others, 2)


def test_within_a_front_the_share_of_the_hypervolume_decides() -> None:
    """The crowded one of three gives way: the front loses little without it."""
    corners = [Standing((0.9, 0.3)), Standing((0.3, 0.9))]
    assert not survives(Standing((0.31, 0.89)), corners, 3)
    assert survives(Standing((0.8, 0.8)), corners, 3)
    assert survives(corners[0], [corners[1], Standing((0.31, 0.89)), Standing((0.1, 0.1))], 4)


def test_who_misses_a_constraint_comes_after_all_who_meet_it() -> None:
    assert survives(Standing((0.1, 0.1)), [Standing((0.9, 0.9), missed=0.01)], 2)
    assert not survives(Standing((0.9, 0.9), missed=0.01), [Standing((0.1, 0.1))], 2)
    assert survives(one(0.1, missed=0.01), [one(0.9, missed=0.2)], 2)
    assert not survives(one(0.9, missed=0.2), [one(0.1, missed=0.01)], 2)


def test_a_constraint_is_met_where_it_is_reached_but_for_rounding() -> None:
    reached = {"clean": sum([0.9, 0.95, 1.0]) / 3 - 1e-16, "union": 0.4}
    assert standing(reached, ["union"], {"clean": 0.95}) == Standing((0.4,), 0.0)
    assert shortfalls(reached, {"clean": 0.95, "union": 0.5}) == pytest.approx({"clean": 0.0, "union": 0.1})
    assert standing(reached, ["clean"], {"union": 0.5}).missed == pytest.approx(0.1)


def test_hypervolumes_agree_with_inclusion_and_exclusion() -> None:
    """An oracle that shares nothing with the slices: the volume of a union of boxes from the volumes of their intersections."""
    rng = random.Random(0)
    for dimension in (1, 2, 3, 4):
        points = [tuple(rng.random() for _ in range(dimension)) for _ in range(5)]
        expected = 0.0
        for size in range(1, 6):
            for chosen in itertools.combinations(points, size):
                box = 1.0
                for values in zip(*chosen, strict=True):
                    box *= min(values)
                expected += box * (-1) ** (size + 1)
        assert hypervolume(points) == pytest.approx(expected)
        first = front(points)
        assert hypervolume(first) == pytest.approx(expected)
        for p in first:
            assert share(p, first) == pytest.approx(expected - hypervolume([q for q in points if q != p and not dominates(p, q)]), abs=1e-9)


def test_twins_on_a_front_do_not_push_each_other_out() -> None:
    best = Standing((0.8, 0.8))
    assert survives(best, [best, Standing((0.2, 0.9)), Standing((0.9, 0.2))], 4)
