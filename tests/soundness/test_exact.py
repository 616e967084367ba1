"""Branch and bound against the exact answer: enumeration of all activation patterns of tiny networks.

On one pattern the network is affine, so its worst margin is a convex program: a linear one for linf and l1; for l2 the ball is
approached from outside by tangent planes, which gives the optimum to 1e-4.
"""

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from scipy.optimize import linprog
from torch import nn

from cure_ray.bounds.native.engine import NativeEngine
from cure_ray.networks.models import Network, Normalize
from cure_ray.networks.residual import Residual
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


def tiny_residual(seed: int) -> Network:
    """x + f(x) behind a ReLU, and another one behind none; 7 ReLUs."""
    torch.manual_seed(seed)
    block, other = (
        Residual([nn.Linear(3, 2), nn.ReLU(), nn.Linear(2, 3)]),
        Residual([nn.Linear(3, 2), nn.ReLU(), nn.Linear(2, 2)], [nn.Linear(3, 2)]),
    )
    layers = [Normalize([0.4], [0.5]), nn.Flatten(), nn.Linear(4, 3), nn.ReLU(), block, other, nn.Linear(2, 3)]
    network = Network(layers, (1, 2, 2), 3).eval()
    with torch.no_grad():
        for module in network.modules():
            if isinstance(module, nn.Linear):
                module.weight.mul_(1.6)
    return network


class Pattern:
    """A network with the signs of its ReLUs fixed: M d + m for an offset d, and where that has these signs, G d <= h."""

    def __init__(self, bits: Sequence[bool]) -> None:
        self.bits, self.G, self.h = list(bits), list[np.ndarray](), list[np.ndarray]()

    def through(self, module: nn.Module, M: np.ndarray, m: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        if isinstance(module, Normalize):
            mean, std = module.mean.double().item(), module.std.double().item()
            return M / std, (m - mean) / std
        if isinstance(module, nn.Linear):
            W, b = module.weight.detach().double().numpy(), module.bias.detach().double().numpy()
            return W @ M, W @ m + b
        if isinstance(module, nn.ReLU):
            on = np.array([self.bits.pop(0) for _ in m])
            sign = np.where(on, -1.0, 1.0)[:, None]
            self.G.append(sign * M)
            self.h.append(-sign[:, 0] * m)
            return M * on[:, None], m * on
        if isinstance(module, Residual):
            branches = [self.through(branch, M, m) for branch in (module.main, module.shortcut)]
            return branches[0][0] + branches[1][0], branches[0][1] + branches[1][1]
        if isinstance(module, nn.Sequential):
            for child in module:
                M, m = self.through(child, M, m)
        return M, m  # Flatten: the image is flat


def relus(network: Network) -> int:
    seen = list[int]()
    for module in network.modules():
        if isinstance(module, nn.ReLU):
            module.register_forward_pre_hook(lambda _, args: seen.append(args[0].shape[1]))
    network(torch.zeros(1, *network.input_shape))
    for module in network.modules():
        module._forward_pre_hooks.clear()
    return sum(seen)


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
    worst = np.full(2, np.inf)
    for bits in itertools.product([False, True], repeat=relus(network)):
        pattern = Pattern(bits)
        M, m = pattern.through(network, np.eye(4), x.copy())
        others = [i for i in range(3) if i != y]
        for s, i in enumerate(others):
            least = minimum(M[y] - M[i], np.vstack(pattern.G), np.concatenate(pattern.h), x, norm, eps)
            worst[s] = min(worst[s], least + m[y] - m[i])
    return worst


def compare(seed: int, network: Network, norm: str, eps: float) -> tuple[int, int]:
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
    results = [compare(seed, tiny(seed, (3, 2)), norm, eps) for seed in range(2)]
    assert sum(p for p, _ in results) == sum(q for _, q in results) > 0  # complete, and the test is not empty


@pytest.mark.parametrize(("norm", "eps"), [("linf", 0.15), ("l2", 0.25), ("l1", 0.35)])
def test_branch_and_bound_is_exact_on_tiny_residual_networks(norm, eps):
    results = [compare(seed, tiny_residual(seed), norm, eps) for seed in range(2)]
    assert sum(p for p, _ in results) == sum(q for _, q in results) > 0


@pytest.mark.soundness_long
@pytest.mark.parametrize(("norm", "eps"), [("linf", 0.1), ("linf", 0.2), ("l2", 0.2), ("l2", 0.4), ("l1", 0.3), ("l1", 0.6)])
@pytest.mark.parametrize("widths", [(7,), (4, 3), (3, 2, 2)])
def test_branch_and_bound_is_exact_on_many_tiny_networks(widths, norm, eps):
    results = [compare(seed, tiny(seed, widths), norm, eps) for seed in range(100, 112)]
    assert sum(p for p, _ in results) == sum(q for _, q in results)
