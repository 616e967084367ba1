"""One compact check of coupled bounds: proven norms, balls that hold, and bounds below every point for any coefficients and multipliers."""

from dataclasses import replace
from types import SimpleNamespace

import torch
from soundness_points import in_chain, points, preactivations, true_margins
from torch import Tensor, nn


def check_norms() -> None:
    """Never below the exact norm, and not far above it; convolutions written out and through their symbols."""
    from cure_ray.bounds.native import norms
    from cure_ray.bounds.native.compiled import compile_network

    g = torch.Generator().manual_seed(0)
    for channels, kernel, stride, padding, size in ((1, 3, 1, 1, 7), (2, 4, 2, 1, 8), (3, 3, 2, 0, 9), (2, 5, 1, 2, 10)):
        conv = nn.Conv2d(channels, 4, kernel, stride, padding)
        width = (size + 2 * padding - kernel) // stride + 1
        network = nn.Sequential(conv, nn.ReLU(), nn.Flatten(), nn.Linear(4 * width * width, 3)).eval()
        for parameter in network.parameters():
            parameter.data = torch.randn(parameter.shape, generator=g)
        net = compile_network(network, (channels, size, size)).to(torch.device("cpu"), torch.float64)
        layer = net.layers[0]
        matrix = layer.linear(torch.eye(layer.inputs, dtype=torch.float64)).t()
        exact = float(torch.linalg.matrix_norm(matrix, 2))
        symbol = norms._symbol_bound(layer.weight, layer.stride)
        assert exact <= norms.stretch(layer) <= exact * (1 + 1e-6), "a norm is not what it should be"
        assert exact <= symbol <= 1.6 * exact, "the norm on the plane is below that on an image"
        dense, norms.DENSE = norms.DENSE, 0
        assert norms._stretch(layer) == symbol, "a large convolution's norm is not that of its symbol"
        norms.DENSE = dense
        column = float(torch.linalg.vector_norm(matrix, dim=0).max())
        assert column <= norms.ball_stretch(layer, "l1") <= column * (1 + 1e-9), "the l1 ball's corners"
        assert norms.ball_stretch(layer, "l2") == norms.stretch(layer)
        # On a torus the symbol is exact at the frequencies of the torus: Riesz' lemma may cost no more than its factor.
        torus = torch.fft.fft2(layer.weight.permute(2, 3, 0, 1), (64, 64), dim=(0, 1)) if stride == 1 else None
        if torus is not None:
            sampled = float(torch.linalg.matrix_norm(torus, 2).max())
            assert sampled <= symbol <= sampled * 1.02
    tall = torch.randn(2, 30, 12, generator=g, dtype=torch.float64)
    exact = float(torch.linalg.matrix_norm(tall, 2).max())
    assert exact <= norms.spectral_bound(tall) <= exact * (1 + 1e-6)
    assert norms.spectral_bound(tall * 2.0**-300) >= exact * 2.0**-300
    assert norms.spectral_bound(torch.zeros(1, 3, 4, dtype=torch.float64)) == 0.0
    assert norms.spectral_bound(tall, error=0.5) >= exact + 0.5


def check_one_layer() -> None:
    """The minimum per neuron against a fine grid, SDP-CROWN's closed form without a box, CROWN's offset without a multiplier."""
    from cure_ray.bounds.native.coupled import CoupledLayer, worst_offset

    g = torch.Generator().manual_seed(1)
    n = 40
    c, g_, centre, lower, upper = (torch.randn(1, 1, n, generator=g, dtype=torch.float64) for _ in range(5))
    lower, upper = torch.minimum(lower, centre) - 0.2, torch.maximum(upper, centre) + 0.2
    lower, upper = torch.minimum(lower, torch.zeros(1)), torch.maximum(upper, torch.zeros(1))
    nothing = torch.ones(1, 1, n, dtype=torch.bool), torch.zeros(n), torch.zeros(n)
    one = torch.ones(1, 1, 1, dtype=torch.float64)
    layer = CoupledLayer.of(lower, upper, centre, one, nothing, torch.zeros(n, dtype=torch.float64), None)
    grid = lower + (upper - lower) * torch.linspace(0, 1, 4001, dtype=torch.float64).view(-1, 1, 1)
    for m in (0.0, 0.01, 1.0, 30.0):
        value, offset = worst_offset(c, g_, one * m, layer)
        value = value + (c - g_) * centre
        there = c * grid.relu() - g_ * grid + m / 2 * (grid - centre).square()
        assert (value <= there.amin(0) + 1e-12).all(), "the least value of a neuron is missed"
        assert (value >= there.amin(0) - 1e-3).all(), "the least value of a neuron is far too low"
        at = centre + offset
        torch.testing.assert_close(c * at.relu() - g_ * at + m / 2 * offset.square(), value, atol=1e-9, rtol=0)
    wide = CoupledLayer.of(one * -1e9, one * 1e9, centre, one, nothing, torch.zeros(n, dtype=torch.float64), None)
    m, radius = 0.7, 1.3
    value = (worst_offset(c, g_, one * m, wide)[0] + (c - g_) * centre).sum() - m / 2 * radius**2
    least = torch.minimum(torch.minimum(c - g_ - m * centre, g_ + m * centre), torch.zeros(1)).square()
    closed = -0.5 * (m * (radius**2 - centre.square().sum()) + least.sum() / m)
    torch.testing.assert_close(value, closed, atol=1e-9, rtol=1e-12)


def check_sharp() -> None:
    """On one layer that only shifts, the ball is all there is to know: the bound comes near the true minimum and stays below it."""
    from cure_ray.bounds.native.coupled import dense_rows
    from cure_ray.bounds.native.coupled_ascent import ascend, start
    from cure_ray.bounds.native.engine import NativeEngine
    from cure_ray.bounds.native.relaxation import Relaxation, interval_bounds, start_rows
    from cure_ray.threats.balls import Ball

    n = 9
    network = nn.Sequential(nn.Flatten(), nn.Linear(n, n), nn.ReLU(), nn.Linear(n, 2)).eval()
    g = torch.Generator().manual_seed(2)
    network[1].weight.data, network[1].bias.data = torch.eye(n), torch.full((n,), -0.5)
    network[3].weight.data, network[3].bias.data = torch.randn(2, n, generator=g).abs() * torch.tensor([[-1.0], [1.0]]), torch.zeros(2)
    x = 0.5 + 0.02 * torch.randn(1, 1, 3, 3, generator=g)
    engine = NativeEngine(network.double(), input_shape=(1, 3, 3))
    problem = engine.problem(x, torch.zeros(1, dtype=torch.long), Ball("l2", 0.3))
    relaxations = [Relaxation.of(b) for b in interval_bounds(engine.decide, problem.domain)]
    A, b, _ = start_rows(engine.decide, torch.tensor([[[1.0, -1.0]]], dtype=torch.float64))
    rows = dense_rows(engine.decide.layers[:-1], relaxations, problem.domain, A, b, engine.decide.gamma)
    bound, _, _ = ascend(rows, start(rows), 60, 0.25, 0.95)
    offset = torch.randn(20_000, n, generator=g, dtype=torch.float64)
    inward = A[0, 0] * 0.3 / A[0, 0].norm()
    offset = torch.cat([offset * 0.3 / offset.norm(dim=1, keepdim=True), -inward.unsqueeze(0)])
    least = (A[0, 0] * (x.flatten().double() - 0.5 + offset).relu()).sum(1)
    assert bound <= least.min() + b[0, 0] + 1e-9, "above the least value of a layer over its ball"
    assert bound >= least.min() + b[0, 0] - 0.1 * least.min().abs(), "far below the least value of a layer over its ball"


def check_coupled(case: SimpleNamespace, norm: str, eps: float, box: bool) -> None:
    """Balls hold every point; rows lie below every point, whatever is added to the coefficients and whatever the multipliers."""
    from cure_ray.bounds.native import linear
    from cure_ray.bounds.native.balls import ball_margins, with_balls
    from cure_ray.bounds.native.coupled import Choice, dense_rows, evaluate
    from cure_ray.bounds.native.coupled_ascent import start
    from cure_ray.bounds.native.domain import Domain
    from cure_ray.bounds.native.engine import NativeEngine
    from cure_ray.bounds.native.intermediate import Rows as Hidden
    from cure_ray.bounds.native.intermediate import crown_bounds
    from cure_ray.bounds.native.relaxation import Relaxation, interval_bounds, margin_rows, start_rows
    from cure_ray.threats.balls import Ball

    engine = NativeEngine(case.network, "cpu")
    problem = engine.problem(case.x, case.y, Ball(norm, eps), box)
    net, domain = engine.decide, problem.domain
    assert len(domain.balls) == net.hidden
    assert not with_balls(net, replace(domain, threat=Ball("linf", eps), balls=())).balls
    images = points(case.x, norm, eps, box, 24)
    P, B = images.shape[:2]
    layers = in_chain([z.view(P, B, -1) for z in preactivations(case.network, images.flatten(0, 1))], net)
    plain = all(layer.carried_N is None for layer in net.layers)
    for k, ball in enumerate(domain.balls):
        distance = torch.linalg.vector_norm((layers[k] - ball.centre_BN).nan_to_num(0), dim=-1)
        assert (distance <= ball.radius_B1[:, 0] + 1e-12).all(), "outside a ball"
        if plain:
            _check_small(net, k, domain, ball, eps, norm)
    lines = type("Lines", (Domain,), {"vertices": lambda self, layer: None})(
        domain.x_BN, domain.low_BN, domain.high_BN, domain.threat, domain.box
    )  # CROWN itself, which bounds the first layer by lines in l1 too
    g = torch.Generator().manual_seed(3)
    hidden = {"ibp": interval_bounds(net, domain), "crown": crown_bounds(net, domain, 100_000)}
    margins = torch.stack([true_margins(z, case.y) for z in layers[-1]])
    by_norms = ball_margins(net, domain, margin_rows(case.y, net.classes, torch.float64))
    assert (by_norms <= margins.amin(0) + 1e-12).all(), "a bound by norms is above an attained margin"
    for bounds in hidden.values():
        relaxations = [Relaxation.of(b) for b in bounds]
        A, b, _ = start_rows(net, margin_rows(case.y, net.classes, torch.float64))
        rows = dense_rows(net.layers[:-1], relaxations, domain, A, b, net.gamma)
        begun = start(rows)
        crown = linear.evaluate(net.layers[:-1], relaxations, lines, (A, b), [r.adaptive_BN for r in relaxations], net.gamma).value_BS
        none = Choice(begun.extras, [m * 0 for m in begun.multipliers])
        torch.testing.assert_close(evaluate(rows, none)[0], crown, atol=1e-7, rtol=1e-9)
        for size in (0.0, 0.3, 3.0):
            extras = [
                torch.randn(e.shape, generator=g, dtype=torch.float64) * size * _free(r, layer)
                for e, r, layer in zip(begun.extras, relaxations, net.layers, strict=False)
            ]
            for factor in (0.0, 0.3, 1.0, 10.0):
                value, _ = evaluate(rows, Choice(extras, [m * factor for m in begun.multipliers]))
                assert (value <= margins.amin(0) + 1e-9).all(), "a coupled bound is above an attained margin"
    for k in range(1, net.hidden):
        bounds = hidden["crown"]
        over = Hidden(net, k, [Relaxation.of(b) for b in bounds[:k]], bounds[k], domain)
        relus = torch.ones_like(bounds[k].lower_BN, dtype=torch.bool)
        relus = relus if net.layers[k].carried_N is None else relus & ~net.layers[k].carried_N
        for samples, neurons in over._chunks(relus, 100_000):
            rows = over._coupled(samples, neurons)
            assert neurons.dim() == 1 or (rows.b < over._start(samples, neurons)[1]).all(), "the rounding of the rows is not charged"
            begun = start(rows)
            extras = [torch.randn(e.shape, generator=g, dtype=torch.float64) * 0.3 for e in begun.extras]
            extras = [
                e * (layer.unstable if layer.carried is None else layer.unstable | layer.carried)
                for e, layer in zip(extras, rows.layers, strict=True)
            ]
            value, _ = evaluate(rows, Choice(extras, begun.multipliers))
            flat = neurons.dim() == 1
            low, high = (value[0], -value[1]) if flat else (value[:, : neurons.shape[1]], -value[:, neurons.shape[1] :])
            true = layers[k][:, samples, neurons] if flat else layers[k][:, samples.unsqueeze(1), neurons]
            assert not (true < low - 1e-9).any(), "a coupled bound of a hidden neuron is too high"
            assert not (true > high + 1e-9).any(), "a coupled bound of a hidden neuron is too low"


def _free(relaxation: object, layer: object) -> Tensor:
    """Where something may be added: at unstable neurons; what is carried must not mind."""
    free = relaxation.unstable_BN if layer.carried_N is None else relaxation.unstable_BN | layer.carried_N
    return free.unsqueeze(1).double()


def _check_small(net: object, k: int, domain: object, ball: object, eps: float, norm: str) -> None:
    """The radius is that of this layer: neither below a chain of exact norms, nor far above it."""
    exact = eps
    for j, layer in enumerate(net.layers[: k + 1]):
        matrix = layer.linear(torch.eye(layer.inputs, dtype=torch.float64)).t()
        corner = float(torch.linalg.vector_norm(matrix, dim=0).max())
        exact *= corner if j == 0 and norm == "l1" else float(torch.linalg.matrix_norm(matrix, 2))
    assert (ball.radius_B1 >= exact).all(), "a radius below the product of the norms"
    assert (ball.radius_B1 <= exact * 1.01 + 1e-9).all(), "a radius of another layer"
