"""Attacks find what is there, and a witness is only what replays in float64 inside the ball and the image domain."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from cure_ray.attacks import AttackSettings, attack, check_witness, margin, replay_network
from cure_ray.networks.models import Network, conv_small
from cure_ray.threats.balls import Ball
from cure_ray.threats.geometry import distance
from cure_ray.threats.norms import NORMS, Norm

torch.set_num_threads(1)
RADII: dict[Norm, float] = {"linf": 0.15, "l2": 0.9, "l1": 2.5}


def linear_network(weights: Tensor, bias: Tensor) -> Network:
    """Two classes with margin w.x + b for class 0: its worst case over ball∩box is known exactly."""
    layer = nn.Linear(weights.numel(), 2)
    with torch.no_grad():
        layer.weight.copy_(torch.stack([weights, torch.zeros_like(weights)]))
        layer.bias.copy_(torch.stack([bias, torch.zeros_like(bias)]))
    return Network([nn.Flatten(), layer], (1, 4, 4), 2).eval()


def exact_minimum(w: Tensor, x: Tensor, threat: Ball) -> float:
    """min of w.d over ball∩box by bisection on the multiplier (l2), the knapsack (l1) or the interval (linf), in float64."""
    low, high = torch.maximum(-x, torch.tensor(-threat.eps)), torch.minimum(1 - x, torch.tensor(threat.eps))
    if threat.norm == "linf":
        return float((w * torch.where(w > 0, low, high)).sum())
    low, high = -x, 1 - x
    if threat.norm == "l1":
        left, value = threat.eps, 0.0
        for i in w.abs().argsort(descending=True):
            step = min(left, float(-low[i] if w[i] > 0 else high[i]))
            value, left = value - step * float(w[i].abs()), left - step
        return value
    near, far = 1e-9, 1e9
    for _ in range(200):
        middle = math.sqrt(near * far)
        near, far = (middle, far) if float((-w / middle).clamp(low, high).norm()) > threat.eps else (near, middle)
    return float((w * (-w / far).clamp(low, high)).sum())


@pytest.mark.parametrize("norm", NORMS)
def test_the_attack_reaches_the_exact_worst_case_of_a_linear_classifier(norm: Norm) -> None:
    rng = torch.Generator().manual_seed(0)
    threat = Ball(norm, RADII[norm])
    for _ in range(5):
        w = torch.randn(16, generator=rng)
        x = torch.rand(6, 1, 4, 4, generator=rng)
        network = linear_network(w, torch.tensor(20.0))  # never misclassified, so every restart runs to the end
        y = torch.zeros(6, dtype=torch.long)
        found = check_witness(replay_network(network), x, y, attack(network, x, y, threat, range(6), AttackSettings()), threat)
        for b in range(6):
            clean = float(w.double() @ x[b].double().flatten()) + 20
            exact = clean + exact_minimum(w.double(), x[b].double().flatten(), threat)
            assert exact - 1e-6 <= float(found.margins[b]) <= exact + 0.02 * (clean - exact)
        assert not found.valid.any()


@pytest.mark.parametrize("norm", NORMS)
def test_every_witness_is_inside_and_misclassified(norm: Norm) -> None:
    torch.manual_seed(0)
    network = conv_small((1, 12, 12), 4, [0.3], [0.4], width=0.5).eval().requires_grad_(False)
    x = torch.rand(20, 1, 12, 12)
    x[:, :, :4] = x[:, :, :4].round()  # many pixels already at the border of the domain
    y = network(x).argmax(1)
    threat = Ball(norm, RADII[norm])
    found = check_witness(replay_network(network), x, y, attack(network, x, y, threat, range(20), AttackSettings()), threat)
    assert found.valid.any()
    images = found.images[found.valid]
    assert images.dtype == torch.float64
    assert ((images >= 0) & (images <= 1)).all()
    assert (distance((images - x[found.valid].double()).flatten(1), norm) <= threat.eps).all()
    assert (margin(replay_network(network)(images), y[found.valid]) <= 0).all()


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


def test_nothing_from_a_broken_network_or_candidate_counts() -> None:
    x, y = torch.rand(2, 1, 4, 4), torch.zeros(2, dtype=torch.long)
    network = linear_network(torch.ones(16), torch.tensor(5.0))
    nowhere = torch.full_like(x, math.nan)
    assert not check_witness(replay_network(network), x, y, nowhere, Ball("l2", 1.0)).valid.any()
    broken = linear_network(torch.full((16,), math.nan), torch.tensor(0.0))
    candidates = attack(broken, x, y, Ball("l2", 1.0), [0, 1], AttackSettings(3, 2))
    found = check_witness(replay_network(broken), x, y, candidates, Ball("l2", 1.0))
    assert not found.valid.any()
    assert found.margins.isnan().all()


def test_a_tie_is_a_misclassification() -> None:
    network = linear_network(torch.zeros(16), torch.tensor(0.0))
    x, y = torch.rand(1, 1, 4, 4), torch.zeros(1, dtype=torch.long)
    assert check_witness(replay_network(network), x, y, x, Ball("linf", 0.0)).valid.all()


@pytest.mark.parametrize("norm", NORMS)
def test_a_sample_is_attacked_alike_in_any_batch(norm: Norm) -> None:
    torch.manual_seed(1)
    network = conv_small((1, 8, 8), 3, [0.0], [1.0], width=0.25).eval().double()
    x = torch.rand(5, 1, 8, 8, dtype=torch.float64)
    y = network(x).argmax(1)
    threat = Ball(norm, 0.3 * RADII[norm])
    together = attack(network, x, y, threat, range(5), AttackSettings(10, 3))
    alone = torch.cat([attack(network, x[i : i + 1], y[i : i + 1], threat, [i], AttackSettings(10, 3)) for i in range(5)])
    chunked = attack(network, x, y, threat, range(5), AttackSettings(10, 3, rows=4))
    assert torch.allclose(together, chunked, atol=1e-6)
    assert torch.allclose(together, alone, atol=1e-6)


def test_attacking_leaves_parameters_gradients_and_mode_untouched() -> None:
    network = conv_small((1, 8, 8), 3, [0.0], [1.0], width=0.25).eval()
    before = {k: v.clone() for k, v in network.state_dict().items()}
    x = torch.rand(4, 1, 8, 8)
    attack(network, x, torch.zeros(4, dtype=torch.long), Ball("l1", 1.0), range(4), AttackSettings(5, 2))
    assert all(torch.equal(before[k], v) for k, v in network.state_dict().items())
    assert all(p.grad is None for p in network.parameters())
    assert not network.training
