"""Branch and bound against the exact answer: enumeration of all activation patterns of tiny networks.

On one pattern the network is affine, so its worst margin is a convex program: a linear one for linf and l1; for l2 the ball is
approached from outside by tangent planes, which gives the optimum to 1e-4.
"""

import itertools

import numpy as np
import pytest
import torch
from scipy.optimize import linprog
from torch import nn

from cure_ray.bounds.native.engine import NativeEngine
from cure_ray.networks.models import Network, Normalize
from cure_ray.threats.balls import Ball

STAGES = ("ibp", "crown-ibp", "crown", "alpha-crown")


def tiny(seed: int, widths: tuple[int, ...]) -> Network:
    torch.manual_seed(seed)
    layers: list[nn.Module] = [Normalize([0.4], [0.5]), nn.Flatten()]
    features = 4
    for width in widths:
        layers += [nn.Linear(features, width), nn.ReLU()]
        features = width
    layers.append(nn.Linear(features, 3))
    network = Network(layers, (1, 2, 2), 3).eval()
    with torch.no_grad():
        for module in network:
            if isinstance(module, nn.Linear):
                module.weight.mul_(2.0)
    return network


def affine_layers(network: Network) -> list[tuple[np.ndarray, np.ndarray]]:
    layers = [(m.weight.detach().double().numpy(), m.bias.detach().double().numpy()) for m in network if isinstance(m, nn.Linear)]
    (W, b), mean, std = layers[0], network[0].mean.double().item(), network[0].std.double().item()
    return [(W / std, b - W.sum(1) * mean / std), *layers[1:]]


def minimum(c: np.ndarray, G: np.ndarray, h: np.ndarray, x: np.ndarray, norm: str, eps: float) -> float:
    """min c.d over the ball∩box and G d <= h; inf if empty."""
    n = len(c)
    low, high = np.maximum(-eps, -x), np.minimum(eps, 1 - x)
    if norm == "l1":
        A = np.vstack([np.hstack([G, -G]), np.ones((1, 2 * n))])
        found = linprog(np.concatenate([c, -c]), A_ub=A, b_ub=np.append(h, eps), bounds=[(0, v) for v in [*high, *-low]])
        return float(found.fun) if found.status == 0 else np.inf
    for _ in range(40):
        found = linprog(c, A_ub=G, b_ub=h, bounds=list(zip(low, high, strict=True)))
        if found.status != 0:
            return np.inf
        size = np.linalg.norm(found.x)
        if norm == "linf" or size <= eps * (1 + 1e-5):
            break
        G, h = np.vstack([G, found.x[None] / size]), np.append(h, eps)
    return float(found.fun)


def exact_margins(network: Network, x: np.ndarray, y: int, norm: str, eps: float) -> np.ndarray:
    layers = affine_layers(network)
    hidden = [len(b) for _, b in layers[:-1]]
    worst = np.full(2, np.inf)
    for bits in itertools.product([False, True], repeat=sum(hidden)):
        M, m = np.eye(4), x.copy()  # the current layer's inputs are M d + m
        G, h, start = [], [], 0
        for (W, b), width in zip(layers, hidden, strict=False):
            on = np.array(bits[start : start + width])
            start += width
            Z, z = W @ M, W @ m + b
            sign = np.where(on, -1.0, 1.0)[:, None]
            G.append(sign * Z)
            h.append(-sign[:, 0] * z)
            M, m = Z * on[:, None], z * on
        W, b = layers[-1]
        others = [i for i in range(3) if i != y]
        for s, i in enumerate(others):
            c = (W[y] - W[i]) @ M
            worst[s] = min(worst[s], minimum(c, np.vstack(G), np.concatenate(h), x, norm, eps) + (W[y] - W[i]) @ m + b[y] - b[i])
    return worst


def compare(seed: int, widths: tuple[int, ...], norm: str, eps: float) -> tuple[int, int]:
    network = tiny(seed, widths)
    x = torch.rand(2, 1, 2, 2, generator=torch.Generator().manual_seed(seed))
    with torch.no_grad():
        y = network(x).argmax(1)
    engine = NativeEngine(network, "cpu")
    problem = engine.problem(x, y, Ball(norm, eps))
    margins = [engine.margins(problem, stage) for stage in STAGES]
    proven, provable, slack = 0, 0, 1e-4 if norm == "l2" else 1e-6
    for b, result in enumerate(engine.branch(problem, seconds=30, nodes=3000)):
        exact = exact_margins(network, x[b].double().flatten().numpy(), int(y[b]), norm, eps)
        for stage in margins:
            assert (stage[b].numpy() <= exact + slack).all()
        assert (result.margins.numpy() <= exact + slack).all(), "claims more than the exact minimum"
        assert not ((exact < -slack) & (result.margins.numpy() > 0)).any(), "proves what is false"
        provable += int((exact > 1e-3).all())
        proven += int((exact > 1e-3).all() and (result.margins > 0).all())
        assert (result.margins >= margins[-1][b] - 1e-12).all(), "loses what was proven before"
    return proven, provable


@pytest.mark.parametrize(("norm", "eps"), [("linf", 0.15), ("l2", 0.25), ("l1", 0.35)])
def test_branch_and_bound_is_exact_on_tiny_networks(norm, eps):
    results = [compare(seed, (3, 2), norm, eps) for seed in range(2)]
    assert sum(p for p, _ in results) == sum(q for _, q in results) > 0  # complete, and the test is not empty


@pytest.mark.soundness_long
@pytest.mark.parametrize(("norm", "eps"), [("linf", 0.1), ("linf", 0.2), ("l2", 0.2), ("l2", 0.4), ("l1", 0.3), ("l1", 0.6)])
@pytest.mark.parametrize("widths", [(7,), (4, 3), (3, 2, 2)])
def test_branch_and_bound_is_exact_on_many_tiny_networks(widths, norm, eps):
    results = [compare(seed, widths, norm, eps) for seed in range(100, 112)]
    assert sum(p for p, _ in results) == sum(q for _, q in results)
