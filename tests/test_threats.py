"""The geometry of the threats: support functions against reference solvers, projections, dual norms."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import brentq, linprog, minimize

from cure_ray.errors import UserError
from cure_ray.threats.balls import Ball
from cure_ray.threats.box import EVERYWHERE, UNIT, Box
from cure_ray.threats.geometry import distance, dual_norm, minimise_linear, nearest, offsets, project

NORMS = ("linf", "l2", "l1")


def reference_minimum(A: np.ndarray, x: np.ndarray, norm: str, eps: float, box: bool) -> float:
    """min A.(x+d) by other means: a linear program for l1; for l2 a root of the sphere equation, checked to be feasible."""
    low = np.maximum(-eps, -x) if box else np.full(len(A), -eps)
    high = np.minimum(eps, 1 - x) if box else np.full(len(A), eps)
    corner = np.where(A >= 0, low, high)
    if norm == "linf" or eps == 0:
        return float(A @ (x + corner))
    if norm == "l1":  # d = eps (p - m) with sum(p + m) <= 1
        bounds = [(0, h / eps) for h in high] + [(0, -lo / eps) for lo in low]
        found = linprog(np.concatenate([A, -A]), A_ub=np.ones((1, 2 * len(A))), b_ub=[1.0], bounds=bounds)
        return float(A @ x + eps * found.fun)
    if np.linalg.norm(corner[A != 0]) <= eps:
        return float(A @ x + A[A != 0] @ corner[A != 0])
    logm = brentq(lambda t: np.linalg.norm(np.clip(-A * np.exp(-t), low, high)) - eps, -40, 40, xtol=1e-13)
    d = np.clip(-A * np.exp(-logm), low, high)
    return float(A @ (x + d * min(1.0, eps / np.linalg.norm(d))))


def problem(seed: int, n: int) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    A = torch.randn(n, generator=g, dtype=torch.float64)
    A = torch.where(torch.rand(n, generator=g) < 0.2, torch.zeros_like(A), A)
    x = torch.rand(n, generator=g, dtype=torch.float64)
    return A, torch.where(torch.rand(n, generator=g) < 0.4, x.round(), x)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 10**6), norm=st.sampled_from(NORMS), eps=st.sampled_from([0.0, 1e-3, 0.1, 0.5, 1.0, 3.0, 50.0]), box=st.booleans()
)
def test_the_support_function_equals_a_reference_solver(seed, norm, eps, box):
    A, x = problem(seed, 6)
    low, high = offsets(x, eps, Box.of(box))
    value, d = minimise_linear(A[None], x[None], low[None], high[None], Ball(norm, eps), Box.of(box), steps=40)
    exact = reference_minimum(A.numpy(), x.numpy(), norm, eps, box)
    assert float(value) <= exact + 1e-9 * (1 + eps)  # sound
    assert float(value) >= exact - 1e-4 * (1 + eps)  # and tight
    assert distance(d, norm).item() <= eps * (1 + 1e-6) + 1e-12
    assert float(A @ (x + d[0])) == pytest.approx(exact, abs=2e-3 * (1 + eps))


def test_the_l2_reference_agrees_with_a_general_purpose_solver():
    for seed in range(5):
        A, x = (t.numpy() for t in problem(seed, 5))
        low, high = np.maximum(-0.6, -x), np.minimum(0.6, 1 - x)
        ball = {"type": "ineq", "fun": lambda d: 0.36 - d @ d, "jac": lambda d: -2 * d}
        bounds = list(zip(low, high, strict=True))
        found = minimize(lambda d, A=A: A @ d, np.zeros(5), jac=lambda d, A=A: A, bounds=bounds, constraints=[ball], method="SLSQP")
        assert A @ x + found.fun == pytest.approx(reference_minimum(A, x, "l2", 0.6, True), abs=1e-5)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 10**6), norm=st.sampled_from(["l2", "l1"]), eps=st.floats(0.01, 4), steps=st.integers(0, 4), n=st.integers(1, 60)
)
def test_any_multiplier_gives_a_lower_bound(seed, norm, eps, steps, n):
    A, x = problem(seed, n)
    low, high = offsets(x, eps)
    value, _ = minimise_linear(A[None], x[None], low[None], high[None], Ball(norm, eps), UNIT, steps=steps)
    g = torch.Generator().manual_seed(seed)
    for scale in (0.1, 1.0, 10.0):
        d = project(scale * torch.randn(50, n, generator=g, dtype=torch.float64), x.expand(50, n), Ball(norm, eps))
        towards = project(-100 * scale * A.expand(50, n), x.expand(50, n), Ball(norm, eps))
        assert float(value) <= float(((x + d) @ A).min()) + 1e-9
        assert float(value) <= float(((x + towards) @ A).min()) + 1e-9


@pytest.mark.parametrize("norm", NORMS)
def test_rows_shared_by_a_batch_give_the_same_values(norm):
    g = torch.Generator().manual_seed(1)
    A, x = torch.randn(3, 4, 30, generator=g), torch.rand(3, 30, generator=g)
    low, high = offsets(x, 0.7)
    threat = Ball(norm, 0.7)
    together, _ = minimise_linear(A, x[:, None], low[:, None], high[:, None], threat, UNIT)
    for b in range(3):
        for s in range(4):
            alone, _ = minimise_linear(A[b, s][None], x[b][None], low[b][None], high[b][None], threat, UNIT)
            torch.testing.assert_close(alone[0], together[b, s], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("norm", NORMS)
def test_the_dual_norm_is_attained(norm):
    g = torch.Generator().manual_seed(2)
    A = torch.randn(20, 15, generator=g, dtype=torch.float64)
    zero = torch.zeros_like(A)
    low, high = offsets(zero, 0.3, EVERYWHERE)
    value, d = minimise_linear(A, zero, low, high, Ball(norm, 0.3), EVERYWHERE)
    torch.testing.assert_close(value, -0.3 * dual_norm(A, norm))
    torch.testing.assert_close((A * d).sum(1), value)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(seed=st.integers(0, 10**6), norm=st.sampled_from(NORMS), eps=st.floats(0, 3), scale=st.floats(0.01, 30))
def test_projection_is_feasible_idempotent_and_nearest(seed, norm, eps, scale):
    g = torch.Generator().manual_seed(seed)
    x = torch.rand(8, 12, generator=g, dtype=torch.float64)
    x = torch.where(torch.rand(8, 12, generator=g) < 0.3, x.round(), x)
    delta = scale * torch.randn(8, 12, generator=g, dtype=torch.float64)
    threat = Ball(norm, eps)
    d = project(delta, x, threat)
    assert (distance(d, norm) <= eps * (1 + 1e-12)).all()
    assert ((x + d >= -1e-12) & (x + d <= 1 + 1e-12)).all()
    torch.testing.assert_close(project(d, x, threat), d, atol=1e-9, rtol=1e-9)
    own = (d - delta).norm(dim=1)
    for _ in range(20):
        other = project(delta + torch.randn(8, 12, generator=g, dtype=torch.float64), x, threat)
        assert (own <= (other - delta).norm(dim=1) + 1e-6).all()


def test_the_box_only_raises_the_minimum():
    g = torch.Generator().manual_seed(3)
    A, x = torch.randn(50, 40, generator=g, dtype=torch.float64), torch.rand(50, 40, generator=g, dtype=torch.float64)
    for norm, eps in (("l2", 0.8), ("l1", 2.0), ("linf", 0.3)):
        values = []
        for box in (True, False):
            low, high = offsets(x, eps, Box.of(box))
            values.append(minimise_linear(A, x, low, high, Ball(norm, eps), Box.of(box), steps=30)[0])
        assert (values[0] >= values[1] - 1e-6).all()


@pytest.mark.parametrize("eps", [-0.1, math.nan, math.inf])
def test_bad_radii_are_refused(eps):
    with pytest.raises(UserError, match="radius"):
        Ball("l2", eps)


def test_unknown_norms_are_refused_with_advice():
    with pytest.raises(UserError, match="linf"):
        Ball("l_inf", 0.1)


BOXES = st.sampled_from([UNIT, EVERYWHERE, Box(-1.0, 1.0), Box(0.0, float("inf")), Box(-7.0, 3.5)])


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6), norm=st.sampled_from(NORMS), eps=st.floats(0, 8), box=BOXES)
def test_projections_and_minimisers_stay_in_the_ball_and_the_domain(seed, norm, eps, box):
    g = torch.Generator().manual_seed(seed)
    low, high = max(box.low, -9.0), min(box.high, 9.0)
    x = low + (high - low) * torch.rand(4, 12, generator=g, dtype=torch.float64)
    A = torch.randn(4, 12, generator=g, dtype=torch.float64)
    ends = offsets(x, eps, box)
    value, d = minimise_linear(A, x, *ends, Ball(norm, eps), box, steps=60)
    for move in (d, project(10 * A, x, Ball(norm, eps), box)):
        assert (distance(move, norm) <= eps * (1 + 1e-6) + 1e-12).all()
        assert (x + move >= box.low - 1e-12).all()
        assert (x + move <= box.high + 1e-12).all()
    points = x + project(5 * torch.randn(50, 4, 12, generator=g, dtype=torch.float64), x.expand(50, 4, 12), Ball(norm, eps), box)
    assert (value <= (A * points).sum(-1) + 1e-9).all()


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**6), norm=st.sampled_from(NORMS), radii=st.lists(st.floats(0, 3), min_size=5, max_size=5))
def test_a_projection_takes_a_radius_per_row(seed, norm, radii):
    g = torch.Generator().manual_seed(seed)
    x, delta = torch.rand(5, 7, generator=g, dtype=torch.float64), torch.randn(5, 7, generator=g, dtype=torch.float64)
    together = nearest(delta, x, norm, torch.tensor(radii, dtype=torch.float64)[:, None])
    for row, eps in enumerate(radii):
        assert torch.equal(together[row], project(delta[row : row + 1], x[row : row + 1], Ball(norm, eps))[0])
