"""Random networks in all norms: nothing the engine claims is ever contradicted by a point of the set."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from soundness_networks import designed_network, random_network
from soundness_points import preactivations, true_margins, worst_points
from soundness_tools import THREATS, check_radius_zero, check_sound

QUIET = [HealthCheck.too_slow, HealthCheck.data_too_large]


@pytest.mark.parametrize(("norm", "eps"), THREATS)
@pytest.mark.parametrize("box", [True, False])
@pytest.mark.parametrize("seed", range(6))
def test_every_method_contains_every_point(seed, box, norm, eps):
    check_sound(random_network(seed), norm, eps, box)


@pytest.mark.parametrize("seed", range(3))
def test_a_network_with_everything_in_it(seed):
    check_radius_zero(designed_network(seed))
    for norm, eps in THREATS:
        check_sound(designed_network(seed), norm, eps, True)


@pytest.mark.parametrize("seed", range(8))
def test_radius_zero_is_exact(seed):
    check_radius_zero(random_network(seed))


@settings(max_examples=25, deadline=None, suppress_health_check=QUIET, derandomize=True)
@given(seed=st.integers(100, 10**6), threat=st.sampled_from(THREATS), box=st.booleans(), factor=st.floats(0.01, 6))
def test_random_networks_and_radii(seed, threat, box, factor):
    check_sound(random_network(seed), threat[0], threat[1] * factor, box, branch=False, count=12)


@pytest.mark.soundness_long
@settings(max_examples=1500, deadline=None, suppress_health_check=QUIET)
@given(seed=st.integers(0, 10**9), threat=st.sampled_from(THREATS), box=st.booleans(), factor=st.floats(0, 10))
def test_many_random_networks_and_radii(seed, threat, box, factor):
    check_sound(random_network(seed), threat[0], threat[1] * factor, box, count=16)


@pytest.mark.parametrize(("norm", "eps"), THREATS)
def test_certificates_survive_growing_and_shrinking_radii(norm, eps):
    """True robustness is monotone in the radius, so no certificate may stand above a radius where an attack succeeds."""
    from cure_ray.bounds.native.engine import NativeEngine
    from cure_ray.threats.balls import Ball

    for seed in range(4):
        case = random_network(seed)
        engine = NativeEngine(case.network, "cpu")
        broken = torch.zeros(len(case.x), dtype=torch.bool)
        for factor in (0.0, 0.05, 0.2, 0.5, 1.0, 2.0, 5.0):
            problem = engine.problem(case.x, case.y, Ball(norm, eps * factor))
            images = worst_points(case.network, case.x, case.y, norm, eps * factor, True)
            for z in images:
                broken |= (true_margins(preactivations(case.network, z)[-1], case.y) <= 0).any(1)
            for stage in ("ibp", "crown-ibp", "crown", "alpha-crown"):
                certified = (engine.margins(problem, stage) > 0).all(1)
                assert not (certified & broken).any(), (seed, factor, stage)
