"""Vertices of l1 balls: exact where they must be, the same in every form, with the gradient the search believes in."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from cure_ray.bounds.native.branching import Settings
from cure_ray.bounds.native.compiled import Compiled
from cure_ray.bounds.native.domain import Domain
from cure_ray.bounds.native.effort import Effort
from cure_ray.bounds.native.engine import NativeEngine
from cure_ray.bounds.native.linear import evaluate, slope_gradients
from cure_ray.bounds.native.relaxation import Relaxation, interval_bounds, margin_rows, start_rows
from cure_ray.bounds.native.vertices import Vertices
from cure_ray.networks.models import Network
from cure_ray.threats.balls import Ball
from cure_ray.threats.box import Box

EPS = 1.3


def convolutional(seed: int = 0) -> Network:
    torch.manual_seed(seed)
    layers = [nn.Conv2d(2, 3, 3, 2, 1), nn.ReLU(), nn.Flatten(), nn.Linear(48, 8), nn.ReLU(), nn.Linear(8, 3)]
    return Network(layers, (2, 7, 8), 3).eval()


def dense_like(network: Network) -> Network:
    """The same function with its convolution written out as a matrix."""
    conv = network[0]
    assert isinstance(conv, nn.Conv2d)
    assert conv.bias is not None
    eye = torch.eye(112).view(112, 2, 7, 8)
    linear = nn.Linear(112, 48)
    linear.weight.data = (conv(eye) - conv.bias.view(1, -1, 1, 1)).flatten(1).t().detach()
    linear.bias.data = conv.bias.detach().repeat_interleave(16)
    return Network([nn.Flatten(), linear, nn.ReLU(), *list(network)[3:]], (2, 7, 8), 3).eval()


def one_layer(engine: NativeEngine, domain: Domain) -> tuple[Compiled, list[Relaxation]]:
    assert engine.decide is not None
    net = engine.decide
    return net, [Relaxation.of(b) for b in interval_bounds(net, domain)[:1]]


@pytest.mark.parametrize("make", [convolutional, lambda: dense_like(convolutional())])
def test_concave_rows_are_exact_on_the_ball(make) -> None:
    """All coefficients negative and no box: the least value is that of the best vertex, up to rounding."""
    engine = NativeEngine(make())
    x = torch.rand(3, 2, 7, 8, generator=torch.Generator().manual_seed(1))
    domain = engine.problem(x, torch.zeros(3, dtype=torch.long), Ball("l1", EPS), False).domain
    net, relaxations = one_layer(engine, domain)
    N = net.layers[0].outputs
    A = -torch.rand(3, 5, N, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    found = evaluate(net.layers[:1], relaxations, domain, (A, torch.zeros(3, 5).double()), [relaxations[0].adaptive_BN], net.gamma)
    step = torch.cat([torch.eye(112, dtype=torch.float64), -torch.eye(112, dtype=torch.float64)]) * EPS
    for b in range(3):
        least = (net.layers[0](domain.x_BN[b] + step).clamp_min(0) @ A[b].t()).amin(0)
        assert (found.value_BS[b] <= least + 1e-12).all()
        torch.testing.assert_close(found.value_BS[b], least, rtol=0, atol=1e-9)


@pytest.mark.parametrize("box", [True, False])
def test_a_convolution_and_its_matrix_give_the_same_margins(box: bool) -> None:
    network = convolutional()
    x = torch.rand(4, 2, 7, 8, generator=torch.Generator().manual_seed(3))
    y = network(x).argmax(1)
    margins = []
    for one in (network, dense_like(network)):
        engine = NativeEngine(one, effort=Effort(single=False))
        problem = engine.problem(x, y, Ball("l1", EPS), box)
        margins.append([engine.margins(problem, stage) for stage in ("crown-ibp", "crown")])
    for mine, other in zip(*margins, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-5)


def test_no_looser_than_lines_and_tighter_somewhere() -> None:
    network = convolutional()
    engine = NativeEngine(network)
    x = torch.rand(6, 2, 7, 8, generator=torch.Generator().manual_seed(4))
    problem = engine.problem(x, network(x).argmax(1), Ball("l1", EPS))
    net, domain = engine.decide, problem.domain
    assert net is not None
    bounds = interval_bounds(net, domain)
    relaxations = [Relaxation.of(b) for b in bounds]
    A, b, _ = start_rows(net, margin_rows(problem.y_B, 3, torch.float64))
    slopes = [r.adaptive_BN for r in relaxations]
    with_vertices = evaluate(net.layers[:-1], relaxations, domain, (A, b), slopes, net.gamma).value_BS
    lines = Lines(domain.x_BN, domain.low_BN, domain.high_BN, domain.threat, domain.box)
    with_lines = evaluate(net.layers[:-1], relaxations, lines, (A, b), slopes, net.gamma).value_BS
    assert (with_vertices > with_lines + 0.01).float().mean() > 0.9


class Lines(Domain):
    """A domain that does not know its vertices."""

    def vertices(self, layer: object) -> None:
        return None


def test_the_gradient_in_the_slopes_is_that_of_the_value() -> None:
    engine = NativeEngine(convolutional())
    x = torch.rand(1, 2, 7, 8, generator=torch.Generator().manual_seed(5))
    problem = engine.problem(x, torch.zeros(1, dtype=torch.long), Ball("l1", EPS))
    net = engine.decide
    assert net is not None
    relaxations = [Relaxation.of(b) for b in interval_bounds(net, problem.domain)]
    A, b, _ = start_rows(net, margin_rows(problem.y_B, 3, torch.float64)[:, :1])
    g = torch.Generator().manual_seed(6)
    slopes = [r.lower_slope(torch.rand(r.active_BN.shape, generator=g, dtype=torch.float64)).unsqueeze(1) for r in relaxations]

    def value(at: list[Tensor]) -> Tensor:
        return evaluate(net.layers[:-1], relaxations, problem.domain, (A, b), at, 0.0).value_BS[0, 0]

    found = evaluate(net.layers[:-1], relaxations, problem.domain, (A, b), slopes, 0.0, trace=True)
    for k, gradient in enumerate(slope_gradients(found, relaxations)):
        for i in relaxations[k].unstable_BN[0].nonzero()[:, 0].tolist():
            moved = []
            for h in (1e-7, -1e-7):
                shifted = [s.clone() for s in slopes]
                shifted[k][0, 0, i] += h
                moved.append(value(shifted))
            assert float((moved[0] - moved[1]) / 2e-7) == pytest.approx(float(gradient[0, 0, i]), abs=2e-5)


def test_up_is_the_adjoint_of_down_and_one_sample_may_serve_all_rows() -> None:
    for network in (convolutional(), dense_like(convolutional())):
        engine = NativeEngine(network)
        assert engine.decide is not None
        layer = engine.decide.layers[0]
        g = torch.Generator().manual_seed(7)
        x = torch.rand(4, 112, dtype=torch.float64, generator=g)
        size = (7, 8) if layer.is_conv else (1, 1)
        vertices = Vertices.around(layer, layer(x), EPS, size, layer.padding)
        A = torch.randn(4, 2, layer.outputs, dtype=torch.float64, generator=g)
        take = torch.rand(4, 2, 2, 112, dtype=torch.float64, generator=g)
        down, up = vertices._down(A), vertices._up(take)
        torch.testing.assert_close((down * take).sum((2, 3)), (A * up).sum(2), rtol=1e-10, atol=1e-10)
        one = Vertices.around(layer, layer(x[:1]), EPS, size, layer.padding)
        copies = Vertices.around(layer, layer(x[:1].expand(4, -1)), EPS, size, layer.padding)
        torch.testing.assert_close(one._down(A), copies._down(A), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(one._up(take), copies._up(take), rtol=1e-12, atol=1e-12)


def test_nothing_is_read_back_to_the_host() -> None:
    engine = NativeEngine(convolutional(), "cpu")
    assert engine.search is not None
    layer = engine.search.layers[0].to(torch.device("meta"), torch.float32)
    x = torch.zeros(2, 112, device="meta")
    domain = Domain.around(x, Ball("l1", EPS), Box.of(True))
    vertices = domain.vertices(layer)
    assert vertices is not None
    value, take = vertices.lowest(torch.zeros(2, 3, 48, device="meta"), torch.zeros(2, 3, 112, device="meta"), x, x)
    assert vertices.mixed(take).shape == (2, 3, 48)
    assert value.shape == (2, 3)


def test_radii_that_are_not_usual_have_no_vertices() -> None:
    engine = NativeEngine(convolutional())
    assert engine.decide is not None
    for norm, eps, known in (("l1", 0.0, False), ("l1", 1e-13, False), ("l1", 1.0, True), ("l1", 1e13, False), ("l2", 1.0, False)):
        domain = Domain.around(torch.rand(1, 112).double(), Ball(norm, eps), Box.of(False))
        assert (domain.vertices(engine.decide.layers[0]) is not None) == known


def test_another_radius_has_other_vertices() -> None:
    engine = NativeEngine(convolutional())
    assert engine.decide is not None
    layer = engine.decide.layers[0]
    domain = Domain.around(torch.rand(1, 112).double(), Ball("l1", 0.1), Box.of(True))
    assert domain.vertices(layer) is domain.vertices(layer)
    assert domain.select(torch.zeros(3, dtype=torch.long)).vertices(layer) is domain.vertices(layer)
    other = replace(domain, threat=Ball("l1", 2.0)).vertices(layer)
    assert other is not None
    assert other.eps == 2.0


def test_trees_in_l1_prove_with_vertices() -> None:
    """Branch and bound goes on from vertices and never says more than the least margin seen."""
    network = convolutional(2)
    x = torch.rand(6, 2, 7, 8, generator=torch.Generator().manual_seed(8))
    y = network(x).argmax(1)
    engine = NativeEngine(network, effort=Effort(branching=Settings(hope=0.0)))
    problem = engine.problem(x, y, Ball("l1", 2.0))
    root = engine.margins(problem, "alpha-crown").amin(1)
    found = torch.stack([r.margins.amin() for r in engine.branch(problem, 60.0, 400)])
    assert (found >= root - 1e-9).all()
    assert (found > root + 1e-6).any()
    g = torch.Generator().manual_seed(9)
    weights = torch.rand(4000, 112, generator=g).double() ** 8
    moved = weights / weights.sum(1, keepdim=True) * 2.0 * torch.where(torch.rand(4000, 112, generator=g) < 0.5, 1.0, -1.0)
    for b in range(6):
        images = (x[b].flatten().double() + moved).clamp(0, 1).view(-1, 2, 7, 8)
        logits = network.double()(images)
        margin = (logits[:, y[b]].unsqueeze(1) - logits)[:, [c for c in range(3) if c != y[b]]].min()
        network.float()
        assert found[b] <= margin + 1e-9
