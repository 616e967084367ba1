"""Traps: ties, planted counterexamples, poisoned weights and inputs. Nothing may be certified that should not be."""

import math

import pytest
import torch
from soundness_networks import random_network, tied_network
from soundness_tools import THREATS
from torch import nn

from cure_ray.bounds.native.engine import NativeEngine
from cure_ray.errors import UserError
from cure_ray.networks.models import Network
from cure_ray.threats.balls import Ball

STAGES = ("ibp", "crown-ibp", "crown", "alpha-crown")


@pytest.mark.parametrize("eps", [0.0, 1e-12])
@pytest.mark.parametrize("norm", ["linf", "l2", "l1"])
def test_an_exact_tie_is_never_certified(norm, eps):
    for seed in range(6):
        engine = NativeEngine(tied_network(seed), "cpu")
        x = torch.rand(16, 1, 3, 3)
        problem = engine.problem(x, torch.arange(16) % 2, Ball(norm, eps))
        for stage in STAGES:
            assert not (engine.margins(problem, stage) > 0).any(), (seed, stage)
        assert not any((r.margins > 0).any() for r in engine.branch(problem, seconds=0.2, nodes=8))


@pytest.mark.parametrize(("norm", "eps"), THREATS)
def test_a_planted_counterexample_at_the_edge_of_the_ball_is_respected(norm, eps):
    """A detector that fires only in the last percent before a chosen point of the sphere turns the margin negative there."""
    torch.manual_seed(0)
    x = torch.full((1, 1, 4, 4), 0.3)
    direction = {"linf": torch.ones(16), "l2": torch.ones(16) / 4, "l1": torch.eye(16)[5]}[norm]
    reach = float(direction @ direction) * eps  # direction . d at the planted point
    detector = nn.Linear(16, 1)
    last = nn.Linear(1, 2)
    with torch.no_grad():
        detector.weight.copy_(direction[None] / reach)
        detector.bias.copy_(-(detector.weight @ x.flatten()) - 0.99)
        last.weight.copy_(torch.tensor([[0.0], [200.0]]))
        last.bias.copy_(torch.tensor([1.0, 0.0]))
    engine = NativeEngine(Network([nn.Flatten(), detector, nn.ReLU(), last], (1, 4, 4), 2).eval(), "cpu")
    for factor, robust in ((1.0, False), (0.97, True)):
        problem = engine.problem(x, torch.tensor([0]), Ball(norm, eps * factor))
        margins = engine.margins(problem, "alpha-crown")
        (result,) = engine.branch(problem, seconds=2, nodes=100)
        assert bool((margins > 0).all()) is robust
        assert bool((result.margins > 0).all()) is robust


def small(seed: int = 0) -> Network:
    return random_network(seed).network


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_poisoned_weights_are_refused(value):
    network = small()
    with torch.no_grad():
        next(iter(network.parameters())).view(-1)[0] = value
    with pytest.raises(UserError, match="NaN or infinity"):
        NativeEngine(network, "cpu")


@pytest.mark.parametrize("size", [1e20, 1e30, 3e38])
@pytest.mark.parametrize("which", [0, -1])
def test_absurdly_large_weights_certify_nothing(size, which):
    for seed in range(4):
        case = random_network(seed)
        layers = [m for m in case.network if isinstance(m, nn.Linear | nn.Conv2d)]
        with torch.no_grad():
            layers[which].weight.fill_(size)
            layers[which].weight.view(-1)[::2] = -size
        engine = NativeEngine(case.network, "cpu")
        problem = engine.problem(case.x, case.y, Ball("l2", 0.5))
        logits = case.network.double()(case.x.double())
        for stage in STAGES:
            margins = engine.margins(problem, stage)
            proven = (margins > 0).all(1)
            rows = torch.arange(len(case.x))
            wrong = logits.argmax(1) != case.y
            assert not (proven & wrong).any()
            assert (proven <= (logits[rows, case.y] >= logits.amax(1))).all()
            assert not torch.isinf(margins).any()


def test_zero_variance_is_handled_like_the_network_does():
    network = Network([nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU(), nn.Flatten(), nn.Linear(8, 2)], (1, 4, 4), 2).eval()
    with torch.no_grad():
        network[1].running_var.zero_()
    x = torch.rand(3, 1, 4, 4)
    engine = NativeEngine(network, "cpu")
    margins = engine.margins(engine.problem(x, network(x).argmax(1), Ball("linf", 0.0)), "crown")
    logits = network.double()(x.double())
    torch.testing.assert_close(margins[:, 0], (logits.amax(1) - logits.amin(1)).detach(), rtol=1e-6, atol=1e-6)


def test_a_negative_variance_is_refused():
    network = Network([nn.Flatten(), nn.Linear(16, 3), nn.BatchNorm1d(3), nn.ReLU(), nn.Linear(3, 2)], (1, 4, 4), 2).eval()
    network[2].running_var.fill_(-1.0)
    with pytest.raises(UserError, match="not a variance"):
        NativeEngine(network, "cpu")


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_poisoned_image_gets_nan_and_leaves_its_neighbours_alone(value):
    case = random_network(1)
    engine = NativeEngine(case.network, "cpu")
    threat = Ball("l2", 0.05)
    clean = engine.problem(case.x, case.y, threat)
    poisoned = case.x.clone()
    poisoned[1].view(-1)[3] = value
    problem = engine.problem(poisoned, case.y, threat)
    for stage in STAGES:
        margins, expected = engine.margins(problem, stage), engine.margins(clean, stage)
        assert torch.isnan(margins[1]).all()
        torch.testing.assert_close(margins[[0, 2]], expected[[0, 2]], rtol=1e-6, atol=1e-6)
    results = engine.branch(problem, seconds=0.5, nodes=20)
    assert torch.isnan(results[1].margins).all()
    assert torch.isfinite(results[0].margins).all()


@pytest.mark.parametrize("value", [-0.01, 1.01, 1e30])
def test_pixels_outside_the_image_domain_are_refused(value):
    case = random_network(1)
    case.x[0].view(-1)[0] = value
    with pytest.raises(UserError, match=r"\[0, 1\]"):
        NativeEngine(case.network, "cpu").problem(case.x, case.y, Ball("l2", 0.1))


@pytest.mark.parametrize("norm", ["linf", "l2", "l1"])
def test_a_huge_radius_certifies_only_what_no_image_can_break(norm):
    """With the box the set is all of [0,1]^n, where a robust network could still be certified; without it nothing can be."""
    for seed in range(4):
        case = random_network(seed)
        engine = NativeEngine(case.network, "cpu")
        for stage in STAGES:
            free = engine.margins(engine.problem(case.x, case.y, Ball(norm, 1e6), box=False), stage)
            assert not (free > 0).all(1).any()
            boxed = engine.margins(engine.problem(case.x, case.y, Ball(norm, 1e6)), stage)
            images = torch.rand(200, *case.x.shape[1:], dtype=torch.float64)
            logits = case.network.double()(images).detach()
            case.network.float()
            for b in range(len(case.x)):
                if (boxed[b] > 0).all():
                    assert (logits.argmax(1) == case.y[b]).all()
