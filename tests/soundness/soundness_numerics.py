"""Checks of what only shows in the last digits, at the ends of a range, or in another domain: judged in rational arithmetic.

Imports of cure_ray happen inside the functions: the mutation test runs them against altered copies of the package.
"""

import random
from fractions import Fraction

import torch
from soundness_networks import designed_network, tied_network
from soundness_rational import check_wide
from torch import Tensor, nn

WIDE = (14, 39, 82, 124)  # of wide_network: a margin, a hidden bound, an l2 norm and a coefficient that underflow


def least(A: list[float], x: list[float], norm: str, eps: float, ends: tuple[float, float]) -> Fraction:
    """min of A.x' over the ball and the domain, exactly (l1: the best exchange first; linf: every pixel for itself)."""
    left, total = Fraction(eps), Fraction(0)
    for a, v in sorted(((Fraction(a), Fraction(v)) for a, v in zip(A, x, strict=True)), key=lambda pair: -abs(pair[0])):
        room = v - Fraction(ends[0]) if a > 0 else Fraction(ends[1]) - v
        step = max(Fraction(0), min(room, left if norm == "l1" else Fraction(eps)))
        left -= step if norm == "l1" else 0
        total += a * v - abs(a) * step
    return total


def _values(r: random.Random, A: list[float], ends: tuple[float, float]) -> list[float]:
    """Pixels of all kinds, or each so close to the end it would move to that the largest entries of A do not use up a radius."""
    low, high = ends
    if r.random() < 0.5:
        room = [0.01 * r.random() * (high - low) for _ in A]
        return [low + v if a > 0 else high - v for a, v in zip(A, room, strict=True)]
    return [r.choice([low, high, low + r.random() * (high - low), high - 1e-3 * r.random() * (high - low)]) for _ in A]


def check_support(seeds: int = 12) -> None:
    """Support functions of l1 and linf on ball∩box against their exact values: at most 1e-12 above, and not far below."""
    from cure_ray.threats.balls import Ball
    from cure_ray.threats.box import Box
    from cure_ray.threats.geometry import minimise_linear, offsets

    for seed in range(seeds):
        r = random.Random(seed)
        ends = r.choice([(0.0, 1.0), (-1.0, 3.0), (-4.0, -1.0)])
        box, count = Box(*ends), r.choice([5, 60, 200])
        A = [r.gauss(0, 1) for _ in range(count)]
        x = _values(r, A, ends)
        for norm, eps in (("l1", r.choice([0.3, 1.0, 4.0])), ("linf", 0.2)):
            x_1N, A_1N = (torch.tensor([v], dtype=torch.float64) for v in (x, A))
            value, _ = minimise_linear(A_1N, x_1N, *offsets(x_1N, eps, box), Ball(norm, eps), box)
            exact = least(A, x, norm, eps, ends)
            assert Fraction(float(value)) <= exact + Fraction(1, 10**12), f"{norm}: above the minimum of a linear function"
            # a price read off the largest entries alone is sound and loose; at these sizes by less than the radius
            assert Fraction(float(value)) >= exact - Fraction(eps) * Fraction(max(map(abs, A))), f"{norm}: far below it"


def check_first_layer() -> None:
    """Bounds of the first layer hold in rational arithmetic, without tolerance, where large terms cancel."""
    from cure_ray.bounds.native.engine import NativeEngine
    from cure_ray.bounds.native.relaxation import interval_bounds
    from cure_ray.networks.models import Network
    from cure_ray.threats.balls import Ball

    torch.manual_seed(0)
    layer, last = nn.Linear(36, 60).double(), nn.Linear(60, 2).double()
    with torch.no_grad():
        layer.weight.mul_(1000)
        x = torch.rand(1, 1, 6, 6, dtype=torch.float64)
        layer.bias.copy_(-(layer.weight @ x.flatten()))  # every neuron is 0 at x, and unstable around it
    engine = NativeEngine(Network([nn.Flatten(), layer, nn.ReLU(), last], (1, 6, 6), 2).eval(), "cpu")
    pixels = x.flatten().tolist()
    for norm, eps in (("l1", 0.7), ("linf", 0.01)):
        (bounds,) = interval_bounds(engine.decide, engine.problem(x, torch.tensor([0]), Ball(norm, eps)).domain)
        for row, bias, low, high in zip(layer.weight.tolist(), layer.bias.tolist(), *_rows(bounds), strict=True):
            assert Fraction(low) <= least(row, pixels, norm, eps, (0.0, 1.0)) + Fraction(bias), f"{norm}: a lower bound without its slack"
            up = -least([-w for w in row], pixels, norm, eps, (0.0, 1.0)) + Fraction(bias)
            assert Fraction(high) >= up, f"{norm}: an upper bound without its slack"


def _rows(bounds: object) -> tuple[list[float], list[float]]:
    lower: Tensor = bounds.lower_BN
    return lower[0].tolist(), bounds.upper_BN[0].tolist()


def check_gamma() -> None:
    """gamma covers n u / (1 - n u) for the longest sum of the network, which no small network would notice."""
    from cure_ray.bounds.native.compiled import compile_network
    from cure_ray.networks.models import Network

    for width in (8, 5000):
        layers = [nn.Flatten(), nn.Linear(4, width), nn.ReLU(), nn.Linear(width, 2)]
        compiled = compile_network(Network(layers, (1, 2, 2), 2).eval(), (1, 2, 2))
        unit = width * 2.0**-53
        assert compiled.to(torch.device("cpu"), torch.float64).gamma >= unit / (1 - unit), "gamma is below what long sums lose"


def check_other_engine_on_ties() -> None:
    """auto_LiRPA pays for its rounding as well."""
    from cure_ray.bounds.lirpa.engine import LirpaEngine
    from cure_ray.threats.balls import Ball

    engine = LirpaEngine(tied_network(0))
    x = torch.rand(16, 1, 3, 3, generator=torch.Generator().manual_seed(0))
    for eps in (0.0, 1e-9):
        problem = engine.problem(x, torch.arange(16) % 2, Ball("linf", eps))
        for stage in ("ibp", "crown"):
            assert not (engine.margins(problem, stage) > 0).any(), f"auto_LiRPA, {stage}: certified an exact tie"


def check_numerics() -> None:
    from soundness_tools import check_sound

    check_support()
    check_first_layer()
    check_gamma()
    check_other_engine_on_ties()
    for norm in ("l2", "l1"):  # a radius that is small but not 0
        check_sound(designed_network(0), norm, 5e-7, True, branch=False, count=4)
    for seed in WIDE:
        check_wide(seed)
