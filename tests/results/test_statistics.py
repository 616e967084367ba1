"""Intervals, tests and fronts against values known from elsewhere, and against brute force."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from cure_ray.results.statistics import holm, mcnemar, pareto_front, wilson
from cure_ray.search.halving import hypervolume


def test_wilson_agrees_with_published_values() -> None:
    # Newcombe (1998), Table I: 81/263, 15/148, 0/20, 1/29.
    for k, n, low, high in ((81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)):
        got = wilson(k, n)
        assert float(got[0]) == pytest.approx(low, abs=5e-5)
        assert float(got[1]) == pytest.approx(high, abs=5e-5)


@given(st.integers(1, 5000), st.data())
def test_wilson_agrees_with_scipy_and_contains_the_share(n: int, data: st.DataObject) -> None:
    k = data.draw(st.integers(0, n))
    low, high = (float(v) for v in wilson(k, n))
    reference = stats.binomtest(k, n).proportion_ci(method="wilson")
    assert low == pytest.approx(reference.low, abs=1e-9)
    assert high == pytest.approx(reference.high, abs=1e-9)
    assert 0 <= low <= k / n <= high <= 1


def test_wilson_of_nothing_is_not_a_number() -> None:
    assert all(math.isnan(float(v)) for v in wilson(0, 0))


@given(st.integers(0, 60), st.integers(0, 60))
def test_mcnemar_is_the_exact_binomial_test_on_the_disagreements(a: int, b: int) -> None:
    expected = stats.binomtest(a, a + b).pvalue if a + b else 1.0
    assert float(mcnemar(a, b)) == pytest.approx(expected, abs=1e-12)
    assert float(mcnemar(a, b)) == float(mcnemar(b, a))


def test_holm_reproduces_a_worked_example() -> None:
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([]) == []


@given(st.lists(st.floats(0, 1), max_size=20))
def test_holm_never_lowers_a_p_value_and_keeps_their_order(p: list[float]) -> None:
    adjusted = holm(p)
    assert all(q >= v and q <= 1 for q, v in zip(adjusted, p, strict=True))
    assert all(adjusted[i] <= adjusted[j] for i, j in itertools.permutations(range(len(p)), 2) if p[i] < p[j])


points = st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), min_size=1, max_size=15)


@given(points)
def test_the_front_is_what_nobody_dominates(p: list[tuple[int, int]]) -> None:
    front = pareto_front(p)
    for mine, (x, y) in zip(front, p, strict=True):
        dominated = any(a >= x and b >= y and (a, b) != (x, y) for a, b in p)
        assert mine == (not dominated)


@given(points)
def test_the_hypervolume_counts_dominated_cells(p: list[tuple[int, int]]) -> None:
    cells = sum(any(x < a and y < b for a, b in p) for x in range(20) for y in range(20))
    assert hypervolume(p) == pytest.approx(cells)
