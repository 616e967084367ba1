"""Poisoned networks, planted counterexamples and radii at both ends: nothing is certified that should not be."""

import contextlib
import copy
import itertools
from collections.abc import Callable

import pytest
import torch
from torch import nn

from cure_ray.attacks import AttackSettings, margin
from cure_ray.bounds.engine import Engine
from cure_ray.bounds.lirpa.engine import LirpaEngine
from cure_ray.bounds.native.engine import NativeEngine
from cure_ray.certification.balls import certify_batch
from cure_ray.certification.job import CascadeSettings
from cure_ray.certification.outcome import Outcome
from cure_ray.certification.verdict import Status
from cure_ray.errors import UserError
from cure_ray.networks.models import Network
from cure_ray.testing import tiny
from cure_ray.threats.balls import Ball
from cure_ray.threats.norms import NORMS, Norm

ENGINES = pytest.mark.parametrize("make", [NativeEngine, LirpaEngine], ids=["native", "auto_lirpa"])
SETTINGS = CascadeSettings(("ibp", "crown-ibp", "attack", "crown"), attack=AttackSettings(10, 2))
DECIDED = {"linf": 0.03, "l2": 0.2, "l1": 0.4}


def certify(make: Callable[..., Engine], network: Network, threat: Ball, n: int = 8) -> list[Outcome]:
    x, y = tiny.samples(n)
    return certify_batch(make(network), network, x, y, threat, SETTINGS)


@ENGINES
@pytest.mark.parametrize("scale", [1e30, 1e-30, -1.0, 0.0])
def test_scaled_weights_certify_only_what_the_attack_cannot_break(make: Callable[..., Engine], scale: float) -> None:
    network = copy.deepcopy(tiny.network())
    with torch.no_grad():
        for module in network.modules():
            if isinstance(module, nn.Conv2d | nn.Linear):
                module.weight.mul_(scale)
    x, y = tiny.samples(8)
    for outcome, clean in zip(certify(make, network, Ball("linf", 0.5)), margin(network(x), y), strict=True):
        assert outcome.status != Status.CERTIFIED or float(clean) > 0
        if scale == 0.0:
            assert outcome.status != Status.CERTIFIED or outcome.margins is not None, "a constant network is robust where it is right"


@ENGINES
def test_a_network_whose_outputs_overflow_is_an_error_not_an_unknown(make: Callable[..., Engine]) -> None:
    network = copy.deepcopy(tiny.network())
    with torch.no_grad():
        for module in network.modules():
            if isinstance(module, nn.Conv2d | nn.Linear):
                module.weight.fill_(3e38)
        network[1].running_var.fill_(0)  # type: ignore[index,union-attr]
        network[1].eps = 0.0  # type: ignore[index]
    statuses = set()
    with contextlib.suppress(UserError):  # an engine may see it coming and refuse the network
        statuses = {o.status for o in certify(make, network, Ball("linf", 0.1))}
    assert statuses <= {Status.ERROR}


@ENGINES
def test_zero_variance_in_batch_norm_is_handled_as_the_network_computes_it(make: Callable[..., Engine]) -> None:
    network = copy.deepcopy(tiny.network())
    with torch.no_grad():
        network[1].running_var.zero_()  # type: ignore[index,union-attr]
    x, y = tiny.samples(8)
    outcomes = certify(make, network, Ball("l2", 0.01))
    for outcome, clean in zip(outcomes, margin(network(x), y), strict=True):
        assert outcome.status in (Status.CERTIFIED, Status.FALSIFIED, Status.UNKNOWN, Status.MISCLASSIFIED)
        assert outcome.status != Status.CERTIFIED or float(clean) > 0


@ENGINES
@pytest.mark.parametrize("norm", NORMS)
def test_a_planted_counterexample_is_never_certified(make: Callable[..., Engine], norm: Norm) -> None:
    """A detector of one exact image inside the ball flips the decision there and nowhere else that is easy to find."""
    x, y = tiny.samples(1)
    x.view(-1)[27] = 0.1  # so that the planted point lies in [0, 1] as well as in the ball
    threat = Ball(norm, 1.2 * DECIDED[norm])
    direction = torch.zeros_like(x).flatten()
    direction[27] = 1.0  # one pixel: inside every one of the three balls
    point = (x.flatten() + 0.999 * threat.eps * direction).view_as(x)
    key = direction / direction.norm()
    first = nn.Linear(64, 1)
    last = nn.Linear(1, 10)
    with torch.no_grad():
        first.weight.copy_(key[None])
        first.bias.copy_(-(key @ point.flatten())[None] + 1e-3 * threat.eps)
        last.bias.zero_()
        last.bias[y] = 0.5
        last.weight.zero_()
        last.weight[(int(y) + 1) % 10] = 1e6 / threat.eps
    network = Network([nn.Flatten(), first, nn.ReLU(), last], (1, 8, 8), 10).eval().requires_grad_(False)
    assert int(network(x).argmax()) == int(y)
    assert int(network(point).argmax()) != int(y)
    settings = CascadeSettings(attack=AttackSettings(10, 2))
    assert certify_batch(make(network), network, x, y, threat, settings)[0].status in (Status.FALSIFIED, Status.UNKNOWN)
    smaller = Ball(norm, 0.9 * threat.eps)
    assert certify_batch(make(network), network, x, y, smaller, settings)[0].status == Status.CERTIFIED


@ENGINES
@pytest.mark.parametrize("norm", NORMS)
def test_radius_zero_certifies_every_correct_sample_and_a_huge_radius_none(make: Callable[..., Engine], norm: Norm) -> None:
    wanted = [Status.CERTIFIED, Status.MISCLASSIFIED]
    assert all(o.status in wanted for o in certify(make, tiny.network(), Ball(norm, 0.0)))
    assert not any(o.status == Status.CERTIFIED for o in certify(make, tiny.network(), Ball(norm, 64.0)))


@pytest.mark.parametrize("norm", NORMS)
def test_verdicts_agree_with_the_radius(norm: Norm) -> None:
    """What is broken at a small radius is certified at no larger one; what is certified is broken at no smaller one."""
    sweep = [certify(NativeEngine, tiny.network(), Ball(norm, f * DECIDED[norm]), 12) for f in (0.5, 1.0, 1.5, 2.5)]
    for small, large in itertools.pairwise(sweep):
        for a, b in zip(small, large, strict=True):
            assert not (a.status == Status.FALSIFIED and b.status == Status.CERTIFIED)


def test_duplicated_samples_and_non_contiguous_input_get_the_same_verdict() -> None:
    x, y = tiny.samples(3)
    engine, threat = NativeEngine(tiny.network()), Ball("l2", 0.25)
    single = certify_batch(engine, tiny.network(), x, y, threat, SETTINGS)
    doubled = certify_batch(engine, tiny.network(), x.repeat(2, 1, 1, 1), y.repeat(2), threat, SETTINGS, indices=[0, 1, 2, 0, 1, 2])
    strided = x.permute(0, 1, 3, 2).contiguous().permute(0, 1, 3, 2)
    assert not strided.is_contiguous()
    other = certify_batch(engine, tiny.network(), strided, y, threat, SETTINGS)
    facts = [(o.status, o.stage) for o in single]
    assert [(o.status, o.stage) for o in doubled] == facts * 2
    assert [(o.status, o.stage) for o in other] == facts
