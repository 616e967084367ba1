"""Attacks find what is there, and a witness is only what replays in float64 inside the ball and the image domain."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cure_ray.attacks import AttackSettings, attack, check_witness, replay_network
from cure_ray.testing.attacks import RADII, linear_network, small_network
from cure_ray.threats.balls import Ball
from cure_ray.threats.geometry import distance
from cure_ray.threats.norms import NORMS, Norm


@settings(max_examples=60, deadline=None)
@given(norm=st.sampled_from(NORMS), eps=st.floats(0, 3), seed=st.integers(0, 10**6), size=st.floats(0, 1e6))
def test_a_candidate_outside_the_ball_is_brought_inside_or_does_not_count(norm: Norm, eps: float, seed: int, size: float) -> None:
    rng = torch.Generator().manual_seed(seed)
    x = torch.rand(3, 1, 4, 4, generator=rng)
    network = linear_network(torch.randn(16, generator=rng), torch.tensor(0.1))
    threat = Ball(norm, eps)
    candidates = x + size * torch.randn(x.shape, generator=rng)
    found = check_witness(replay_network(network), x, torch.zeros(3, dtype=torch.long), candidates, threat)
    assert (distance((found.images - x.double()).flatten(1), norm) <= eps).all()
    assert ((found.images >= 0) & (found.images <= 1)).all()
    assert torch.equal(found.valid, found.margins <= 0)


def test_a_candidate_that_is_nowhere_does_not_count() -> None:
    x, y = torch.rand(2, 1, 4, 4), torch.zeros(2, dtype=torch.long)
    network = linear_network(torch.ones(16), torch.tensor(5.0))
    nowhere = torch.full_like(x, math.nan)
    assert not check_witness(replay_network(network), x, y, nowhere, Ball("l2", 1.0)).valid.any()


def test_a_tie_is_a_misclassification() -> None:
    network = linear_network(torch.zeros(16), torch.tensor(0.0))
    x, y = torch.rand(1, 1, 4, 4), torch.zeros(1, dtype=torch.long)
    assert check_witness(replay_network(network), x, y, x, Ball("linf", 0.0)).valid.all()


@pytest.mark.parametrize("norm", NORMS)
def test_a_sample_is_attacked_alike_in_pieces(norm: Norm) -> None:
    network = small_network(3, 8).double()
    x = torch.rand(5, 1, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    y, threat = network(x).argmax(1), Ball(norm, 0.3 * RADII[norm])
    together = attack(network, x, y, threat, range(5), AttackSettings(10, 3))
    assert torch.allclose(together, attack(network, x, y, threat, range(5), AttackSettings(10, 3, rows=4)), atol=1e-6)
