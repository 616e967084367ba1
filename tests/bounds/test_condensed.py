"""The network as one sample sees it: the same function on its domain, the same bounds of sub-problems, and never what decides."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from cure_ray.bounds.native.climbing import Together
from cure_ray.bounds.native.condensed import Apart, condensed
from cure_ray.bounds.native.engine import NativeEngine
from cure_ray.bounds.native.nodes import Nodes
from cure_ray.bounds.native.relaxation import margin_rows
from cure_ray.bounds.native.subproblems import Space, unstable_index
from cure_ray.networks.models import Network
from cure_ray.networks.residual import Residual
from cure_ray.threats.balls import Ball

THREATS = [("linf", 0.01), ("l2", 0.1), ("l1", 0.3)]


def plain() -> Network:
    torch.manual_seed(0)
    layers = [nn.Conv2d(1, 4, 3, 2, 1), nn.ReLU(), nn.Conv2d(4, 4, 3, 1, 1), nn.ReLU(), nn.Flatten(), nn.Linear(64, 12), nn.ReLU()]
    return Network([*layers, nn.Linear(12, 3)], (1, 8, 8), 3).eval()


def with_shortcut() -> Network:
    torch.manual_seed(1)
    body = nn.Sequential(nn.Conv2d(4, 4, 3, 1, 1), nn.ReLU(), nn.Conv2d(4, 4, 3, 1, 1))
    layers = [nn.Conv2d(1, 4, 3, 2, 1), nn.ReLU(), Residual(body), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3)]
    return Network(layers, (1, 8, 8), 3).eval()


def solved(network: Network, norm: str, eps: float) -> SimpleNamespace:
    engine = NativeEngine(network)
    x = torch.rand(3, 1, 8, 8, generator=torch.Generator().manual_seed(2))
    problem = engine.problem(x, network(x).argmax(1), Ball(norm, eps))
    engine.margins(problem, "alpha-crown")
    assert problem.bounds is not None
    C_BSK = margin_rows(problem.y_B, 3, torch.float64)
    index_BU = unstable_index(problem.bounds)
    return SimpleNamespace(engine=engine, problem=problem, C_BSK=C_BSK, index_BU=index_BU, x=x)


def some_nodes(s: SimpleNamespace, plainly: bool) -> Nodes:
    g = torch.Generator().manual_seed(3)
    U, D, L = s.index_BU.shape[1], 24, len(s.problem.bounds)
    sample_D = torch.arange(D) % 3
    real_DU = s.index_BU[sample_D] < sum(b.lower_BN.shape[1] for b in s.problem.bounds)
    split_DU = (torch.randint(-1, 2, (D, U), generator=g) * (torch.rand(D, U, generator=g) < 0.2) * real_DU).to(torch.int8)
    alpha_DU, beta_DU = torch.rand(D, U, generator=g), 0.1 * torch.rand(D, U, generator=g) * real_DU
    price_DL, plain_D = 0.1 + torch.rand(D, L, generator=g), torch.full((D,), plainly)
    bound_D, none_DK = torch.full((D,), -1e9), torch.full((D, 2), -1)
    return Nodes(bound_D, sample_D, torch.arange(D) % 2, split_DU, alpha_DU, beta_DU, price_DL, none_DK, plain_D)


@pytest.mark.parametrize("make", [plain, with_shortcut])
@pytest.mark.parametrize(("norm", "eps"), THREATS)
def test_the_condensed_network_is_the_network_on_the_domain(make, norm: str, eps: float) -> None:
    network = make()
    s = solved(network, norm, eps)
    net = s.engine.decide
    for b in range(3):
        bounds = [layer.select(torch.tensor([b])) for layer in s.problem.bounds]
        unstable = [layer.unstable()[0].nonzero(as_tuple=True)[0] for layer in bounds]
        small = condensed(net, bounds, unstable, s.C_BSK[b])
        assert small.neurons < net.neurons
        offset = torch.randn(50, 64, generator=torch.Generator().manual_seed(4)).double()
        offset = offset * (0.99 * eps / torch.linalg.vector_norm(offset, {"linf": torch.inf, "l2": 2, "l1": 1}[norm], dim=1, keepdim=True))
        points = (s.problem.domain.x_BN[b] + offset).clamp(0, 1)
        torch.testing.assert_close(small(points), net(points) @ s.C_BSK[b].t(), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("make", [plain, with_shortcut])
@pytest.mark.parametrize(("norm", "eps"), THREATS)
@pytest.mark.parametrize("plainly", [True, False])
def test_sub_problems_have_the_same_bounds(make, norm: str, eps: float, plainly: bool) -> None:
    s = solved(make(), norm, eps)
    nodes = some_nodes(s, plainly or norm == "linf")
    parts = (s.engine.search, s.problem.domain, s.problem.bounds, s.C_BSK, s.index_BU)
    whole, apart = Together(Space(*parts)), Apart(*parts, room=1 << 24)
    torch.testing.assert_close(apart.value(nodes), whole.value(nodes), rtol=1e-4, atol=1e-4)
    mine, other = (climber.bounded(nodes, 1, 0.1, 0.98, 1) for climber in (apart, whole))
    torch.testing.assert_close(mine.bound_D, other.bound_D, rtol=1e-4, atol=1e-4)
    assert (mine.candidate_DK == other.candidate_DK).float().mean() > 0.9  # but for ties
    mine, other = (climber.bounded(nodes, 4, 0.1, 0.98, 1) for climber in (apart, whole))
    assert abs(float((mine.bound_D - other.bound_D).mean())) < 0.02  # ascents amplify rounding
    assert torch.equal(mine.sample_D, nodes.sample_D)
    assert torch.equal(mine.split_DU, nodes.split_DU)
    assert any(space.net is not s.engine.search for space, _ in apart._spaces.values()), "nothing was condensed"


def test_what_decides_is_never_condensed_and_little_is_kept() -> None:
    s = solved(plain(), "l2", 0.5)
    nodes = some_nodes(s, False)
    exact = Apart(s.engine.decide, s.problem.domain, s.problem.bounds, s.C_BSK, s.index_BU, room=1 << 24)
    assert exact.value(nodes).dtype == torch.float64
    assert all(space.net is s.engine.decide for space, _ in exact._spaces.values())
    tight = Apart(s.engine.search, s.problem.domain, s.problem.bounds, s.C_BSK, s.index_BU, room=1)
    tight.value(nodes)
    assert len(tight._spaces) == 1


def test_a_neuron_that_float32_takes_for_stable_keeps_its_place() -> None:
    """Bounds of 1e-46 are 0 in float32: what follows it must not move up."""
    network = plain()
    with torch.no_grad():
        network[0].weight[1], network[0].bias[1] = 0.0, 0.0  # type: ignore[index, operator]
        network[0].weight[1, 0, 1, 1:] = torch.tensor([1.4e-45, -1.4e-45])  # type: ignore[index, operator]
    s = solved(network, "l2", 0.1)
    first = s.problem.bounds[0]
    assert bool((first.unstable() & ~first.to(torch.float32).unstable()).any()), "no such neuron"
    nodes = some_nodes(s, True)
    parts = (s.engine.search, s.problem.domain, s.problem.bounds, s.C_BSK, s.index_BU)
    torch.testing.assert_close(Apart(*parts, room=1 << 24).value(nodes), Together(Space(*parts)).value(nodes), rtol=1e-4, atol=1e-4)
