"""Networks whose numbers span the whole range of doubles, and their judge: rational arithmetic, which rounds nothing.

Imports of cure_ray happen inside the functions: the mutation test runs them against altered copies of the package.
"""

import itertools
import math
import random
from collections.abc import Callable
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

Layers = list[tuple[list[list[Fraction]], list[Fraction]]]
Point = list[Fraction]


def _double(r: random.Random, exponent: float) -> float:
    """A number of about 2^exponent: subnormal below 2^-1022, 0 below 2^-1074."""
    return math.ldexp(r.uniform(1, 2) * r.choice([-1, 1]), round(exponent))


def _exponents(r: random.Random, count: int) -> list[float]:
    """One per layer. Their sum, about that of the coefficients on the image, is drawn first, mostly near where squares, products or
    numbers themselves run out; single layers lie anywhere below the largest parameter that is accepted."""
    total = r.choice([r.uniform(-1200, 1100), r.uniform(-560, -480), r.uniform(-1100, -1000), r.uniform(-5, 5)])
    parts = [total / count + (r.gauss(0, 120) if r.random() < 0.5 else 0) for _ in range(count)]
    drift = (total - sum(parts)) / count
    return [min(398.0, max(-1074.0, p + drift)) for p in parts]


def wide_network(seed: int) -> SimpleNamespace:
    """A small fully connected network in float64 with one sample, its exact twin, and a radius near where the exact class changes."""
    r = random.Random(seed)
    sizes = [4, *[r.choice([2, 3]) for _ in range(r.choice([0, 1, 2, 3, 5]))], 2]
    return _filled(r, [nn.Flatten(), *(nn.Linear(a, b) for a, b in itertools.pairwise(sizes))], (1, 2, 2))


def wide_convolution(seed: int) -> SimpleNamespace:
    """The same with two convolutions, whose hidden bounds are computed on windows."""
    r = random.Random(seed)
    return _filled(r, [nn.Conv2d(1, 1, 2), nn.Conv2d(1, 2, 2), nn.Flatten(), nn.Linear(18, 2)], (1, 5, 5))


def _filled(r: random.Random, modules: list[nn.Module], shape: tuple[int, int, int]) -> SimpleNamespace:
    """Numbers for every weight, bias and pixel; a ReLU between any two affine layers."""
    from cure_ray.networks.models import Network

    affine = [m for m in modules if not isinstance(m, nn.Flatten)]
    level, layers = 0.0, list[nn.Module]()
    exponents = iter(_exponents(r, len(affine)))
    for layer in modules:
        layers.append(layer.double())
        if isinstance(layer, nn.Flatten):
            continue
        e = next(exponents)
        level += e
        with torch.no_grad():
            for i, row in enumerate(layer.weight.flatten(1)):
                for j in range(len(row)):
                    row[j] = 0.0 if r.random() < 0.1 else _double(r, min(398, e + r.choice([0, 0, 0, -30, -200])))
                # as large as what is added to it, or absent, or anything
                place = r.choice([level - 2, level - 2, -2000, r.uniform(-1074, 398)])
                layer.bias[i] = _double(r, max(-2000, min(398, place)))
        layers.append(nn.ReLU())
    network = Network(layers[:-1], shape, 2).double().eval()
    count = math.prod(shape)
    values = [r.choice([0.0, 1.0, r.random(), r.random(), math.ldexp(r.random(), r.randrange(-1074, 0))]) for _ in range(count)]
    x = torch.tensor(values, dtype=torch.float64).view(1, *shape)
    twin = exact_layers(network)
    here = [Fraction(v) for v in values]
    logits = preactivations(twin, here)[-1]
    y = 0 if logits[0] > logits[1] else 1
    margin, slope = abs(logits[0] - logits[1]), gradient(twin, here, y)
    ratio = Fraction(r.choice([0.01, 0.3, 0.9, 1.01, 1.5, 4.0, 1e6]))
    eps = {}
    for norm, size in (("linf", sum(map(abs, slope))), ("l2", _root(sum(g * g for g in slope))), ("l1", max(map(abs, slope)))):
        wanted = ratio * margin / size if size else Fraction(1, 3)
        eps[norm] = float(min(max(wanted, Fraction(2) ** -1074), Fraction(2) ** 99))
    return SimpleNamespace(network=network, x=x, y=torch.tensor([y]), layers=twin, eps=eps)


def exact_layers(network: nn.Sequential) -> Layers:
    """Every affine layer as a matrix. Pixels come in the image's order (channel, height, width), outputs in the engine's (channel last)."""
    shape, layers, order = network.input_shape, list[Any](), None
    for module in network:
        if isinstance(module, nn.Conv2d):  # unpadded, stride 1
            channels, height, width = shape
            outputs, (kh, kw) = module.out_channels, module.kernel_size
            places = [(h, w, o) for h in range(height - kh + 1) for w in range(width - kw + 1) for o in range(outputs)]
            index = {(c, h, w): (c * height + h) * width + w for c in range(channels) for h in range(height) for w in range(width)}
            index = index if order is None else {place: order[place] for place in index}
            weight, bias, rows = module.weight.tolist(), module.bias.tolist(), []
            for h, w, o in places:
                row = [Fraction(0)] * len(index)
                for c, i, j in itertools.product(range(channels), range(kh), range(kw)):
                    row[index[c, h + i, w + j]] = Fraction(weight[o][c][i][j])
                rows.append(row)
            layers.append((rows, [Fraction(bias[o]) for _, _, o in places]))
            shape, order = (outputs, height - kh + 1, width - kw + 1), {(o, h, w): n for n, (h, w, o) in enumerate(places)}
        elif isinstance(module, nn.Linear):
            places = list(itertools.product(*map(range, shape))) if order is not None else []
            column = [order[place] for place in places] if order is not None else list(range(module.in_features))
            weight = []
            for row in module.weight.tolist():
                moved = [Fraction(0)] * len(row)
                for n, value in zip(column, row, strict=True):
                    moved[n] = Fraction(value)
                weight.append(moved)
            layers.append((weight, [Fraction(b) for b in module.bias.tolist()]))
            order = None
    return layers


def preactivations(layers: Layers, x: Point) -> list[Point]:
    """The outputs of every affine layer, exactly."""
    found = list[Point]()
    for W, b in layers:
        found.append([sum((w * v for w, v in zip(row, x, strict=True) if w and v), bias) for row, bias in zip(W, b, strict=True)])
        x = [max(z, Fraction(0)) for z in found[-1]]
    return found


def gradient(layers: Layers, x: Point, y: int) -> Point:
    """Of f_y minus the other logit at x, exactly (of a two-class network)."""
    active = [[z > 0 for z in layer] for layer in preactivations(layers, x)]
    g = [Fraction(1 if i == y else -1) for i in range(2)]
    for (W, _), on in zip(reversed(layers), [None, *reversed(active[:-1])], strict=True):
        g = [v if on is None or on[i] else Fraction(0) for i, v in enumerate(g)]
        g = [sum((g[i] * W[i][j] for i in range(len(W)) if g[i] and W[i][j]), Fraction(0)) for j in range(len(W[0]))]
    return g


def _root(square: Fraction) -> Fraction:
    """The square root, rounded up by at most 2^-60 of itself."""
    if not square:
        return square
    shift = 2 * max(0, 70 - (square.numerator.bit_length() - square.denominator.bit_length()) // 2)
    return Fraction(math.isqrt((square.numerator << shift) // square.denominator) + 1, 1 << (shift // 2))


def hostile_points(layers: Layers, x: Point, y: int, norm: str, eps: float, box: bool, seed: int = 0) -> list[Point]:
    """Points of the set, exactly: the centre, steps along the axes, and descent of the margin to the edge of the ball."""
    r, e = random.Random(seed), Fraction(eps)
    directions = [[Fraction(s if i == j else 0) for i in range(len(x))] for j in range(len(x)) for s in (1, -1)]
    directions += [[Fraction(r.uniform(-1, 1)) for _ in x] for _ in range(4)]
    points, here = [x], x
    for _ in range(4):
        g = gradient(layers, here, y)
        if norm == "linf":
            steps = [[Fraction((v < 0) - (v > 0)) for v in g]]
        else:
            steps = [[-v for v in g]]
        if norm == "l1":
            steps.append([-v if abs(v) == max(map(abs, g)) else Fraction(0) for v in g])
        for d in [*steps, *directions]:
            size = {"linf": max(map(abs, d)), "l1": sum(map(abs, d))}.get(norm) or _root(sum(v * v for v in d))
            if size:
                moved = [a + e * v / size for a, v in zip(x, d, strict=True)]
                points.append([min(max(v, Fraction(0)), Fraction(1)) for v in moved] if box else moved)
        directions = []
        here = min(points, key=lambda p: _margin(preactivations(layers, p)[-1], y))
    return points


def _margin(logits: Point, y: int) -> Fraction:
    return logits[y] - logits[1 - y]


def check_wide(seed: int, box: bool | None = None, make: Callable[[int], SimpleNamespace] = wide_network) -> int:
    """Every bound of the deciding pass holds at every hostile point, with no tolerance; the number of certificates given."""
    from cure_ray.bounds.native.engine import NativeEngine
    from cure_ray.bounds.native.intermediate import crown_bounds, optimised_bounds
    from cure_ray.bounds.native.relaxation import interval_bounds
    from cure_ray.threats.balls import Ball

    case = make(seed)
    box = bool(seed % 2) if box is None else box
    engine, count = NativeEngine(case.network, "cpu"), 0
    here = [Fraction(v) for v in case.x.flatten().tolist()]
    y = int(case.y)
    for norm, eps in case.eps.items():
        points = hostile_points(case.layers, here, y, norm, eps, box)
        exact = [preactivations(case.layers, p) for p in points]
        problem = engine.problem(case.x, case.y, Ball(norm, eps), box)
        net, domain = engine.decide, problem.domain
        hidden = (interval_bounds(net, domain), crown_bounds(net, domain, 1000), optimised_bounds(engine.search, net, domain, 1000, 3))
        for bounds in hidden:
            for k, b in enumerate(bounds):
                for i, (low, high) in enumerate(zip(b.lower_BN[0].tolist(), b.upper_BN[0].tolist(), strict=True)):
                    for layers in exact:
                        assert not math.isfinite(low) or layers[k][i] >= Fraction(low), (seed, norm, eps, k, "below its lower bound")
                        assert not math.isfinite(high) or layers[k][i] <= Fraction(high), (seed, norm, eps, k, "above its upper bound")
        worst = min(_margin(layers[-1], y) for layers in exact)
        found = [float(engine._crown(net, domain, case.y, stage)) for stage in ("ibp", "crown-ibp", "crown")]
        found += [float(engine.margins(problem, stage)) for stage in ("ibp", "crown", "alpha-crown")]
        found += [float(r.margins) for r in engine.branch(problem, seconds=1, nodes=8)]
        for margin in found:
            assert not math.isfinite(margin) or Fraction(margin) <= worst or margin <= 0, (seed, norm, eps, margin, float(worst))
            count += math.isfinite(margin) and margin > 0
    return count
