"""Random networks, points of the input set, and one compact check that a bound engine is sound.

Everything that judges the engine is computed from the original torch modules in float64, never from the engine's own code.
Imports of cure_ray happen inside the functions: the mutation test runs them against altered copies of the package.
"""

import random
from copy import deepcopy
from types import SimpleNamespace

import torch
from torch import Tensor, nn

THREATS = (("linf", 0.04), ("l2", 0.25), ("l1", 0.6))


def random_network(seed: int) -> SimpleNamespace:
    """A small network with random layers: Normalize or not, 0 to 2 convolutions, 0 to 2 hidden linear layers, BN, missing biases."""
    from cure_ray.networks import Network, Normalize

    r = random.Random(seed)
    torch.manual_seed(seed)
    channels, height, width = r.choice([1, 2]), r.choice([4, 5, 6]), r.choice([4, 5, 6])
    shape, classes = (channels, height, width), r.choice([2, 3, 4])
    layers: list[nn.Module] = []
    if r.random() < 0.6:
        mean = [r.uniform(0.1, 0.6) for _ in range(channels)]
        layers.append(Normalize(mean, [r.uniform(0.2, 0.6) for _ in range(channels)]))
    for _ in range(r.choice([0, 1, 1, 2])):
        kernel, stride, padding = r.choice([1, 2, 3]), r.choice([1, 2]), r.choice([0, 1])
        out = r.choice([2, 3, 5])
        new = tuple((n + 2 * padding - kernel) // stride + 1 for n in (height, width))
        if min(new) < 1 or min(height, width) + 2 * padding < kernel:
            continue
        layers.append(nn.Conv2d(channels, out, kernel, stride, padding, bias=r.random() < 0.7))
        layers += [nn.BatchNorm2d(out)] if r.random() < 0.5 else []
        layers.append(nn.ReLU())
        channels, (height, width) = out, new
    layers.append(nn.Flatten())
    features = channels * height * width
    for _ in range(r.choice([0, 1, 1, 2])):
        out = r.choice([3, 6, 9])
        layers.append(nn.Linear(features, out, bias=r.random() < 0.7))
        layers += [nn.BatchNorm1d(out)] if r.random() < 0.4 else []
        layers.append(nn.ReLU())
        features = out
    layers.append(nn.Linear(features, classes, bias=r.random() < 0.8))
    network = Network(layers, shape, classes)
    with torch.no_grad():
        for module in network:
            if isinstance(module, nn.Conv2d | nn.Linear):
                module.weight.mul_(r.uniform(1.0, 2.5))
            if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d):
                module.running_mean.normal_(0, 0.3)
                module.running_var.uniform_(0.2, 2.0)
                module.weight.uniform_(-1.5, 1.5)  # negative gains too
                module.bias.normal_(0, 0.3)
    network.eval()
    x = torch.rand(3, *shape)
    x = torch.where(torch.rand_like(x) < 0.3, (x > 0.5).float(), x)  # pixels on the border of the box
    with torch.no_grad():
        y = network(x).argmax(1)
    y[-1] = (y[-1] + 1) % classes  # one wrong label: its margins are negative, nothing may be certified
    return SimpleNamespace(network=network, x=x, y=y, classes=classes)


def designed_network(seed: int = 0) -> SimpleNamespace:
    """All that can go wrong in one network: two normalised channels, oblong images, strides, padding, BN with negative gains after
    a convolution and a linear layer, a layer without bias, and windows smaller than the images."""
    from cure_ray.networks import Network, Normalize

    torch.manual_seed(seed)
    layers = [
        Normalize([0.3, 0.6], [0.25, 0.5]),
        nn.Conv2d(2, 3, 3, 2, 1, bias=False),
        nn.BatchNorm2d(3),
        nn.ReLU(),
        nn.Conv2d(3, 6, 2, 1, (1, 0)),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(6 * 6 * 3, 8),
        nn.BatchNorm1d(8),
        nn.ReLU(),
        nn.Linear(8, 3),
    ]
    network = Network(layers, (2, 9, 8), 3)
    with torch.no_grad():
        for module in network:
            if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d):
                module.running_mean.normal_(0, 0.3)
                module.running_var.uniform_(0.2, 1.0)
                module.weight.uniform_(-1.5, 1.5)
                module.bias.normal_(0, 0.3)
            elif isinstance(module, nn.Conv2d | nn.Linear):
                module.weight.mul_(1.5)
    network.eval()
    x = torch.rand(3, 2, 9, 8)
    x = torch.where(torch.rand_like(x) < 0.3, (x > 0.5).float(), x)
    with torch.no_grad():
        y = network(x).argmax(1)
    return SimpleNamespace(network=network, x=x, y=y, classes=3)


def points(x_BCHW: Tensor, norm: str, eps: float, box: bool, count: int, seed: int = 0) -> Tensor:
    """[P, B, C, H, W] float64 images of the set: the centre, vertices of the ball, points of the sphere, pixels moved to the box."""
    g = torch.Generator().manual_seed(seed)
    x = x_BCHW.double()
    B, flat = len(x), x.flatten(1)
    N = flat.shape[1]
    offsets = [torch.zeros_like(flat)]
    for _ in range(count):
        noise = torch.randn(B, N, generator=g, dtype=torch.float64)
        if norm == "linf":
            d = eps * noise.sign() if len(offsets) % 2 else eps * (2 * torch.rand(B, N, generator=g, dtype=torch.float64) - 1)
        elif norm == "l2":
            d = eps * noise / noise.norm(dim=1, keepdim=True)
        else:
            d = torch.zeros(B, N, dtype=torch.float64)
            for b in range(B):
                chosen = torch.randperm(N, generator=g)[: 1 + len(offsets) % 3]
                d[b, chosen] = eps * noise[b, chosen] / noise[b, chosen].abs().sum()
        offsets.append(d)
    moved = flat + torch.stack(offsets)
    moved = moved.clamp(0, 1) if box else moved  # clipping towards x stays in every ball
    return moved.view(-1, *x.shape)


def worst_points(network: nn.Module, x_BCHW: Tensor, y_B: Tensor, norm: str, eps: float, box: bool, steps: int = 12) -> Tensor:
    """[S, B, C, H, W]: for every wrong class, steepest descent of its margin inside the set (Frank-Wolfe on the vertices)."""
    classes = network.num_classes
    copy = deepcopy(network).double()
    x = x_BCHW.double()
    found = []
    for shift in range(1, classes):
        other = (y_B + shift) % classes
        z, best, low = x.clone(), x.clone(), torch.full((len(x),), torch.inf, dtype=torch.float64)
        for t in range(steps):
            z.requires_grad_(True)
            out = copy(z)
            rows = torch.arange(len(x))
            margin = out[rows, y_B] - out[rows, other]
            (grad,) = torch.autograd.grad(margin.sum(), z)
            z = z.detach()
            improved = margin.detach() < low
            low = torch.where(improved, margin.detach(), low)
            best = torch.where(improved.view(-1, 1, 1, 1), z, best)
            corner = _corner(grad.flatten(1), x.flatten(1), norm, eps, box).view_as(x)
            z = z + (corner - z) * (1.0 if t < 3 else 0.4)
        found.append(best)
    return torch.stack(found)


def _corner(grad_BN: Tensor, x_BN: Tensor, norm: str, eps: float, box: bool) -> Tensor:
    """A point of the set far along -grad."""
    if norm == "linf":
        moved = x_BN - eps * grad_BN.sign()
    elif norm == "l2":
        moved = x_BN - eps * grad_BN / grad_BN.norm(dim=1, keepdim=True).clamp_min(1e-30)
    else:
        room = torch.where(grad_BN > 0, x_BN, 1 - x_BN) if box else torch.full_like(x_BN, eps)
        order = (grad_BN.abs() * (room > 0)).argsort(dim=1, descending=True)
        d = torch.zeros_like(x_BN)
        for b in range(len(x_BN)):
            left = eps
            for j in order[b].tolist():
                step = min(left, float(room[b, j]))
                d[b, j] = -step * float(grad_BN[b, j].sign())
                left -= step
                if left <= 0:
                    break
        moved = x_BN + d
    return moved.clamp(0, 1) if box else moved


@torch.no_grad()
def preactivations(network: nn.Module, x_BCHW: Tensor) -> list[Tensor]:
    """The inputs of every ReLU, flattened in the engine's order (height, width, channel), and the logits, in float64."""
    seen, z = [], x_BCHW.double()
    for module in deepcopy(network).double():
        if isinstance(module, nn.ReLU):
            seen.append(z.permute(0, 2, 3, 1).flatten(1) if z.dim() == 4 else z)
        z = module(z)
    return [*seen, z]


def true_margins(logits_BK: Tensor, y_B: Tensor) -> Tensor:
    rows = []
    for logits, y in zip(logits_BK, y_B.tolist(), strict=True):
        rows.append(torch.stack([logits[y] - logits[i] for i in range(len(logits)) if i != y]))
    return torch.stack(rows)


TOLERANCE = 1e-9  # float64 noise of the judge; the engine itself gets none


def check_sound(case: SimpleNamespace, norm: str, eps: float, box: bool, branch: bool = True, count: int = 24) -> None:
    """Containment at every layer for every method, and no margin above what some point of the set attains."""
    from cure_ray.bounds.intermediate import crown_bounds, optimised_bounds
    from cure_ray.bounds.native import NativeEngine
    from cure_ray.bounds.relaxation import interval_bounds
    from cure_ray.threats import Threat

    engine = NativeEngine(case.network, "cpu")
    problem = engine.problem(case.x, case.y, Threat(norm, eps), box)
    net, domain = engine.decide, problem.domain
    images = torch.cat([points(case.x, norm, eps, box, count), worst_points(case.network, case.x, case.y, norm, eps, box)])
    P, B = images.shape[:2]
    layers = [z.view(P, B, -1) for z in preactivations(case.network, images.flatten(0, 1))]
    hidden = {
        "ibp": interval_bounds(net, domain),
        "crown": crown_bounds(net, domain, 100_000),
        "alpha": optimised_bounds(engine.search, net, domain, 100_000, 4),
    }
    for name, bounds in hidden.items():
        assert len(bounds) == len(layers) - 1
        for k, b in enumerate(bounds):
            assert (layers[k] >= b.lower_BN - TOLERANCE).all(), f"{name}: layer {k} goes below its lower bound"
            assert (layers[k] <= b.upper_BN + TOLERANCE).all(), f"{name}: layer {k} goes above its upper bound"
    attained = torch.stack([true_margins(z, case.y) for z in layers[-1]]).amin(0)
    clean = true_margins(layers[-1][0], case.y)
    for stage in ("ibp", "crown-ibp", "crown", "alpha-crown"):
        margins = engine.margins(problem, stage)
        assert margins.shape == attained.shape
        assert torch.isfinite(margins).all(), stage
        proven = (margins > 0).all(1)
        assert (margins <= attained + (TOLERANCE if proven.all() else 1e-4)).all(), f"{stage}: above an attained margin"
        assert (margins[proven] <= attained[proven] + TOLERANCE).all(), f"{stage}: a certificate above an attained margin"
    if branch:
        check_splits(engine, problem, layers, case.y)
        for b, result in enumerate(engine.branch(problem, seconds=0.4, nodes=40)):
            assert (result.margins <= attained[b] + TOLERANCE).all(), "branch and bound: above an attained margin"
            assert (result.margins <= clean[b] + TOLERANCE).all()


def check_splits(engine: object, problem: object, layers: list[Tensor], y_B: Tensor) -> None:
    """A sub-problem's bound, with any slopes and multipliers, is below the margin of every point that obeys its splits."""
    from cure_ray.bounds.relaxation import margin_rows
    from cure_ray.bounds.subproblems import Space, unstable_index

    if not problem.bounds:
        return
    g = torch.Generator().manual_seed(0)
    index_BU = unstable_index(problem.bounds)
    space = Space(engine.decide, problem.domain, problem.bounds, margin_rows(y_B, engine.decide.classes, torch.float64), index_BU)
    padded_PBN = torch.nn.functional.pad(torch.cat(layers[:-1], 2), (0, 1))
    for p in range(len(padded_PBN)):
        z_BU = padded_PBN[p].gather(1, index_BU)
        chosen = torch.rand(z_BU.shape, generator=g) < 0.5
        split_BU = torch.where(chosen, z_BU.sign(), torch.zeros_like(z_BU)).to(torch.int8)
        alpha_BU = torch.rand(z_BU.shape, generator=g, dtype=torch.float64)
        beta_BU = torch.rand(z_BU.shape, generator=g, dtype=torch.float64) * (p % 3)
        margins = true_margins(layers[-1][p], y_B)
        for spec in range(margins.shape[1]):
            specs = torch.full((len(y_B),), spec)
            found, _ = space.bound(torch.arange(len(y_B)), specs, split_BU, alpha_BU, beta_BU)
            assert (found.value_BS[:, 0] <= margins[:, spec] + TOLERANCE).all(), "a split bound is above a point that obeys the splits"


def tied_network(seed: int, width: int = 24) -> nn.Sequential:
    """Two logits that are the same function summed in another order: their margin is exactly 0 everywhere, so any positive
    claim is rounding. Large cancelling weights make the rounding errors large."""
    from cure_ray.networks import Network

    torch.manual_seed(seed)
    first, second, last = nn.Linear(9, width), nn.Linear(width, 2 * width), nn.Linear(2 * width, 2)
    order = torch.randperm(width)
    with torch.no_grad():
        first.weight.mul_(10)
        # the second half repeats the first in another order; the logits read one half each
        second.weight[width:], second.bias[width:] = second.weight[order], second.bias[order]
        w = torch.randn(width) * 1000
        last.weight.zero_()
        last.weight[0, :width], last.weight[1, width:] = w, w[order]
        last.bias.fill_(0.1)
    return Network([nn.Flatten(), first, nn.ReLU(), second, nn.ReLU(), last], (1, 3, 3), 2).eval()


def check_ties() -> None:
    """No stage may claim a positive margin where the true one is exactly 0, whatever the rounding."""
    from cure_ray.bounds.native import NativeEngine
    from cure_ray.threats import Threat

    for seed in range(2):
        engine = NativeEngine(tied_network(seed), "cpu")
        x = torch.rand(16, 1, 3, 3, generator=torch.Generator().manual_seed(seed))
        problem = engine.problem(x, torch.arange(16) % 2, Threat("linf", 0.0))
        for stage in ("ibp", "crown-ibp", "crown", "alpha-crown"):
            assert not (engine.margins(problem, stage) > 0).any(), f"{stage}: certified an exact tie"


def check_radius_zero(case: SimpleNamespace) -> None:
    """At radius 0 every method is exact."""
    from cure_ray.bounds.native import NativeEngine
    from cure_ray.threats import Threat

    engine = NativeEngine(case.network, "cpu")
    clean = true_margins(preactivations(case.network, case.x)[-1], case.y)
    for norm in ("linf", "l2", "l1"):
        problem = engine.problem(case.x, case.y, Threat(norm, 0.0))
        for stage in ("ibp", "crown-ibp", "crown", "alpha-crown"):
            torch.testing.assert_close(engine.margins(problem, stage), clean, rtol=1e-4, atol=1e-4)


def check_compact() -> None:
    """Minutes of testing in seconds: used on every mutant."""
    check_ties()
    check_radius_zero(designed_network(0))
    for norm, eps in THREATS:
        check_sound(designed_network(0), norm, eps, True, count=8)
        check_sound(random_network(5), norm, 2 * eps, False, count=8)
    check_sound(designed_network(1), "l2", 0.15, False, count=8)
    check_sound(random_network(14), "l1", 1.0, True, count=8)
