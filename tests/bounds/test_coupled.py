"""Coupled bounds beyond soundness: the gradient, the gain, radii that change nothing, and kernels that wait for no value."""

from dataclasses import replace

import torch
from torch import nn

from cure_ray.bounds.native import norms
from cure_ray.bounds.native.coupled import Choice, dense_rows, evaluate
from cure_ray.bounds.native.coupled_ascent import ascend, start
from cure_ray.bounds.native.domain import Domain
from cure_ray.bounds.native.engine import NativeEngine
from cure_ray.bounds.native.intermediate import optimised_bounds
from cure_ray.bounds.native.relaxation import Relaxation, interval_bounds, margin_rows, start_rows
from cure_ray.networks.models import Network
from cure_ray.threats.balls import Ball


def wide(seed: int = 0) -> NativeEngine:
    """A network with many unstable neurons at once."""
    torch.manual_seed(seed)
    layers = [nn.Conv2d(1, 6, 3, 2, 1), nn.ReLU(), nn.Flatten(), nn.Linear(150, 40), nn.ReLU(), nn.Linear(40, 4)]
    return NativeEngine(nn.Sequential(*layers).eval(), input_shape=(1, 10, 10))


def rows_of(engine: NativeEngine, threat: Ball, device: str = "cpu"):  # type: ignore[no-untyped-def]
    x, y = torch.rand(3, 1, 10, 10, generator=torch.Generator().manual_seed(1)), torch.tensor([0, 1, 2])
    domain = engine.problem(x, y, threat).domain
    relaxations = [Relaxation.of(b) for b in interval_bounds(engine.decide, domain)]
    A, b, _ = start_rows(engine.decide, margin_rows(y, 4, torch.float64))
    layers = [layer.to(torch.device(device), torch.float64) for layer in engine.decide.layers[:-1]]
    moved = [Relaxation(*(t.to(device) for t in r.tensors())) for r in relaxations]
    balls = tuple(replace(ball, centre_BN=ball.centre_BN.to(device), radius_B1=ball.radius_B1.to(device)) for ball in domain.balls)
    there = Domain(*(t.to(device) for t in (domain.x_BN, domain.low_BN, domain.high_BN)), threat, domain.box, balls=balls)
    return dense_rows(layers, moved, there, A.to(device), b.to(device), engine.decide.gamma)


def test_the_gradient_is_the_change_of_the_bound() -> None:
    rows = rows_of(wide(), Ball("l2", 0.5))
    begun = start(rows)
    # Away from the ends of the hull, where coefficients stop: there is a gradient on one side only.
    rows = replace(rows, layers=[replace(layer, unstable=torch.zeros_like(layer.unstable)) for layer in rows.layers])
    g = torch.Generator().manual_seed(0)
    choice = Choice([0.05 * torch.randn(e.shape, generator=g, dtype=torch.float64) for e in begun.extras], begun.multipliers)
    _, found = evaluate(rows, choice, trace=True)
    assert found is not None
    for k in range(len(rows.layers)):
        step = torch.randn(choice.extras[k].shape, generator=g, dtype=torch.float64)
        ends = []
        for sign in (1, -1):
            extras = [e + sign * 1e-7 * step if i == k else e for i, e in enumerate(choice.extras)]
            ends.append(evaluate(rows, Choice(extras, choice.multipliers))[0])
        torch.testing.assert_close((found.excess[k] * step).sum(-1), (ends[0] - ends[1]) / 2e-7, rtol=1e-4, atol=1e-5)
    used = [m.clone().fill_(0.5) for m in choice.multipliers]
    _, found = evaluate(rows, Choice(choice.extras, used), trace=True)
    assert found is not None
    for k, layer in enumerate(rows.layers):
        ends = [evaluate(rows, Choice(choice.extras, [m + d if i == k else m for i, m in enumerate(used)]))[0] for d in (1e-7, -1e-7)]
        slope = (found.used[k] - layer.radius.square()).squeeze(-1) / 2
        torch.testing.assert_close(slope, (ends[0] - ends[1]) / 2e-7, rtol=1e-4, atol=1e-5)


def test_an_ascent_never_ends_below_where_it_began() -> None:
    rows = rows_of(wide(), Ball("l2", 0.5))
    begun = start(rows)
    value, _ = evaluate(rows, begun)
    best, choice, _ = ascend(rows, begun, 6, 0.25, 0.95)
    assert (best >= value).all()
    torch.testing.assert_close(evaluate(rows, choice)[0], best, rtol=0, atol=0)


def test_balls_gain_where_many_neurons_are_unstable() -> None:
    for threat in (Ball("l2", 0.5), Ball("l1", 1.0)):
        rows = rows_of(wide(), threat)
        begun = start(rows)
        crown, _ = evaluate(rows, Choice(begun.extras, [m * 0 for m in begun.multipliers]))
        best, choice, _ = ascend(rows, begun, 20, 0.25, 0.95)
        assert (best > crown).all()
        assert any(bool((m > 0).any()) for m in choice.multipliers)


def test_l_inf_and_radii_beyond_the_range_of_squares_have_no_balls() -> None:
    engine = wide()
    x, y = torch.rand(1, 1, 10, 10), torch.tensor([0])
    for threat in (Ball("linf", 0.1), Ball("l2", 0.0), Ball("l2", 1e-20), Ball("l1", 1e20)):
        assert not engine.problem(x, y, threat).domain.balls


def test_networks_whose_norms_vanish_or_overflow_prove_nothing_by_accident() -> None:
    for scale in (0.0, 1e-150, 1e60):
        torch.manual_seed(0)
        network = nn.Sequential(nn.Flatten(), nn.Linear(9, 5), nn.ReLU(), nn.Linear(5, 3)).double().eval()
        network[1].weight.data *= scale
        engine = NativeEngine(network, input_shape=(1, 3, 3))
        x = torch.rand(4, 1, 3, 3, generator=torch.Generator().manual_seed(0))
        with torch.no_grad():
            y = network(x.double()).argmax(1)
        margins = engine.margins(engine.problem(x, y, Ball("l2", 0.5), False), "alpha-crown")
        with torch.no_grad():
            moved = x.double() + 0.5 * nn.functional.normalize(torch.randn(200, 4, 9, dtype=torch.float64), dim=-1).view(200, 4, 1, 3, 3)
            logits = network(moved.flatten(0, 1)).view(200, 4, 3)
        wrong = (logits.argmax(-1) != y).any(0)
        assert not (wrong & (margins > 0).all(1)).any()


def test_a_norm_is_computed_once_and_kept() -> None:
    layer = wide().decide.layers[0]
    first = norms.stretch(layer)
    layer.weight *= 100
    assert norms.stretch(layer) == first


def test_a_coupled_pass_waits_for_no_value() -> None:
    rows = rows_of(wide(), Ball("l2", 0.5), "meta")
    value, found = evaluate(rows, start(rows), trace=True)
    assert value.device.type == "meta"
    assert found is not None


def test_hidden_bounds_are_no_looser_than_those_of_slopes_alone() -> None:
    """In few steps neither ascent finds what the other does: a neuron keeps the better of both."""
    torch.manual_seed(3)
    network = Network([nn.Flatten(), nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, 24), nn.ReLU(), nn.Linear(24, 3)], (1, 4, 4), 3).eval()
    engine = NativeEngine(network, "cpu")
    domain = engine.problem(torch.rand(4, 1, 4, 4), torch.tensor([0, 1, 2, 0]), Ball("l2", 0.8), False).domain
    assert engine.search is not None
    assert engine.decide is not None
    both, slopes = (optimised_bounds(engine.search, engine.decide, d, 100_000, 8)[1] for d in (domain, replace(domain, balls=())))
    hard = slopes.unstable()
    assert (both.lower_BN[hard] >= slopes.lower_BN[hard] - 1e-9).all()
    assert (both.upper_BN[hard] <= slopes.upper_BN[hard] + 1e-9).all()
    assert ((both.upper_BN - both.lower_BN)[hard] < (slopes.upper_BN - slopes.lower_BN)[hard] - 1e-4).any(), "the balls gain nothing"
