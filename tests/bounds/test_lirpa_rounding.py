"""The rounding term of the auto_LiRPA engine: a certificate means the same whichever engine gave it."""

import math
from fractions import Fraction

import pytest
import torch
from soundness_networks import tied_network
from soundness_rational import hostile_points, preactivations, wide_network
from torch import Tensor, nn

from cure_ray.attacks import AttackSettings
from cure_ray.bounds.lirpa.engine import LirpaEngine
from cure_ray.bounds.lirpa.magnitudes import magnitudes
from cure_ray.certification.balls import certify_batch
from cure_ray.certification.job import CascadeSettings
from cure_ray.certification.verdict import Status
from cure_ray.errors import UserError
from cure_ray.threats.balls import Ball

STAGES = ("ibp", "crown-ibp", "crown", "alpha-crown")


@pytest.mark.parametrize("eps", [0.0, 1e-9])
@pytest.mark.parametrize("norm", ["linf", "l2", "l1"])
def test_an_exact_tie_is_never_certified(norm, eps):
    """Two logits that are the same sum in another order: a margin of 0, and rounding that looks positive about half of the time."""
    for seed in range(3):
        engine = LirpaEngine(tied_network(seed), alpha_iterations=2)
        x = torch.rand(16, 1, 3, 3, generator=torch.Generator().manual_seed(seed))
        problem = engine.problem(x, torch.arange(16) % 2, Ball(norm, eps))
        for stage in STAGES if seed == 0 else STAGES[:3]:
            assert not (engine.margins(problem, stage) > 0).any(), (seed, stage)


def test_a_tie_passes_the_cascade_without_a_certificate_or_an_alarm():
    network = tied_network(0)
    x = torch.rand(16, 1, 3, 3, generator=torch.Generator().manual_seed(0))
    settings = CascadeSettings(STAGES[:3], attack=AttackSettings(3, 2))
    outcomes = certify_batch(LirpaEngine(network), network, x, torch.arange(16) % 2, Ball("linf", 1e-9), settings)
    assert not any(o.status == Status.CERTIFIED for o in outcomes)


def test_bounds_hold_in_rational_arithmetic_over_the_whole_range_of_doubles():
    positive = 0
    for seed in range(30):
        case = wide_network(seed)
        engine, y = LirpaEngine(case.network), int(case.y)
        here = [Fraction(v) for v in case.x.flatten().tolist()]
        for norm, eps in case.eps.items():
            points = hostile_points(case.layers, here, y, norm, eps, box=False)
            worst = min(z[y] - z[1 - y] for z in (preactivations(case.layers, p)[-1] for p in points))
            problem = engine.problem(case.x, case.y, Ball(norm, eps), False)
            for stage in STAGES[:3]:
                margin = float(engine.margins(problem, stage))
                assert not math.isfinite(margin) or Fraction(margin) <= worst or margin <= 0, (seed, norm, stage, margin, float(worst))
                positive += margin > 0
    assert positive > 0


class Everything(nn.Module):
    """One of every operation whose rounding is known."""

    input_shape = (2, 8, 8)

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.inner, self.norm = nn.Conv2d(2, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.leaky, self.pool, self.most, self.head = nn.LeakyReLU(0.1), nn.AvgPool2d(2), nn.MaxPool2d(2), nn.Linear(16, 3)
        self.scale = nn.Parameter(torch.rand(4, 1, 1) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.norm(self.stem((x - 0.5) / 0.25)))
        h = self.pool(torch.relu(h + self.inner(h) * self.scale))
        h = self.most(self.leaky(h) / 2.0 - 0.1)
        return self.head(h.view(h.size(0), -1))


@torch.no_grad()
def test_magnitudes_bound_every_output_of_the_ball():
    torch.manual_seed(0)
    network = Everything().eval()
    engine = LirpaEngine(network)
    x = torch.rand(5, 2, 8, 8, dtype=torch.float64)
    found = magnitudes(engine._prepared.model, engine._prepared.reach(x, 0.1))
    assert found.activations == 4
    for _ in range(20):
        moved = x + 0.1 * (2 * torch.rand_like(x) - 1)
        assert (engine._prepared.model(engine._prepared.inputs(moved)).abs() <= found.output_BK).all()


@pytest.mark.parametrize("make", [nn.Softplus, nn.GELU, lambda: nn.Softmax(1), nn.Hardswish])
def test_an_operation_whose_rounding_is_not_known_is_refused_by_name(make):
    module = make()
    network = nn.Sequential(nn.Flatten(), nn.Linear(4, 3), module, nn.Linear(3, 2)).eval()
    with pytest.raises(UserError, match=rf"{type(module).__name__}|does not support"):
        LirpaEngine(network, input_shape=(1, 2, 2))


def test_parameters_beyond_what_is_charged_for_are_refused():
    network = nn.Sequential(nn.Flatten(), nn.Linear(4, 2)).double().eval()
    with torch.no_grad():
        network[1].weight[0, 0] = 1e200
    with pytest.raises(UserError, match="beyond"):
        LirpaEngine(network, input_shape=(1, 2, 2))
