"""One compact check that bounds of networks with residual blocks and average pooling are sound.

Imports of cure_ray happen inside the functions: the mutation test runs them against altered copies of the package.
"""

from types import SimpleNamespace

import torch
from soundness_coupled import check_coupled
from soundness_points import preactivations, true_margins
from soundness_tools import THREATS, check_radius_zero, check_sound
from torch import nn


def residual_network(kind: str, seed: int = 0) -> SimpleNamespace:
    """Blocks behind a ReLU and behind none, with a shortcut that is nothing, a projection, or pooled; sums with and without ReLU."""
    from cure_ray.networks.models import Network, Normalize
    from cure_ray.networks.residual import Residual

    torch.manual_seed(seed)
    conv, norm, relu, linear = nn.Conv2d, nn.BatchNorm2d, nn.ReLU, nn.Linear
    shape, layers = {
        "identity": ((2, 9, 9), [
            Normalize([0.3, 0.6], [0.25, 0.5]), conv(2, 3, 3, 1, 1),
            Residual([conv(3, 2, 3, 1, 1, bias=False), norm(2), relu(), conv(2, 3, 3, 1, 1), norm(3)]), relu(),
            nn.AvgPool2d((4, 3)), nn.Flatten(), linear(18, 5), relu(), linear(5, 3),
        ]),
        "projection": ((1, 8, 8), [
            conv(1, 3, 3, 1, 1),
            Residual([conv(3, 4, 3, 2, 1), norm(4), relu(), conv(4, 4, 3, 1, 1)], [conv(3, 4, 1, 2), norm(4)]), relu(),
            Residual([conv(4, 3, 1), relu(), conv(3, 3, 3, 2, 1), relu(), conv(3, 5, 1)], [nn.AvgPool2d(2), conv(4, 5, 1)]), relu(),
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), linear(5, 3),
        ]),
        "dense": ((1, 3, 3), [
            nn.Flatten(), linear(9, 6), relu(), Residual([linear(6, 5), relu(), linear(5, 6)]),
            Residual([Residual([linear(6, 4)], [linear(6, 4)]), relu(), linear(4, 6)]), linear(6, 3),
        ]),
    }[kind]  # fmt: skip
    network = Network(layers, shape, 3)
    with torch.no_grad():
        for module in network.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.running_mean.normal_(0, 0.3)
                module.running_var.uniform_(0.2, 1.0)
                module.weight.uniform_(-1.5, 1.5)
                module.bias.normal_(0, 0.3)
            elif isinstance(module, conv | linear):
                module.weight.mul_(1.5)
        for module in network.modules():
            if isinstance(module, Residual) and len(module.shortcut):
                module.shortcut[-1].bias.sub_(2)  # what is carried is negative: whoever takes it for a ReLU is far off
                module.main[-1].bias.add_(2)
    network.eval()
    x = torch.rand(3, *shape)
    x = torch.where(torch.rand_like(x) < 0.3, (x > 0.5).float(), x)
    with torch.no_grad():
        y = network(x).argmax(1)
    return SimpleNamespace(network=network, x=x, y=y, classes=3)


def check_blocks_move_together() -> None:
    """A block moves as far as its branches do together: with norms n of its layers the ball behind it is 1 + n1 n2 times as large."""
    from cure_ray.bounds.native.engine import NativeEngine
    from cure_ray.threats.balls import Ball

    case = residual_network("dense", 1)
    stem, first = case.network[1], case.network[3].main
    engine = NativeEngine(case.network, "cpu")
    balls = engine.problem(case.x, case.y, Ball("l2", 0.1)).domain.balls
    norms = [float(torch.linalg.matrix_norm(layer.weight.detach().double(), 2)) for layer in (stem, first[0], first[2])]
    inside, behind = 0.1 * norms[0] * norms[1], 0.1 * norms[0] * (1 + norms[1] * norms[2])
    for found, exact in ((balls[1].radius_B1, inside), (balls[1].carried_B1, 0.1 * norms[0]), (balls[2].carried_B1, behind)):
        assert (found >= exact * (1 - 1e-12)).all(), "a ball of a residual block that is too small"
        assert (found <= exact * 1.001).all(), "a ball of a residual block that is too large"


def check_tied_blocks() -> None:
    """Two logits that are the same function of what was carried, summed in another order: any positive claim is rounding."""
    from cure_ray.bounds.native.engine import NativeEngine
    from cure_ray.networks.models import Network
    from cure_ray.networks.residual import Residual
    from cure_ray.threats.balls import Ball

    width = 24
    for seed in range(3):
        torch.manual_seed(seed)
        order = torch.randperm(width)
        stem, inner, outer, last = nn.Linear(9, 2 * width), nn.Linear(2 * width, 4), nn.Linear(4, 2 * width), nn.Linear(2 * width, 2)
        with torch.no_grad():
            stem.weight.mul_(10)
            stem.bias.sub_(40)  # what is carried is negative: its size is not its upper bound
            for layer in (stem, outer):
                layer.weight[width:], layer.bias[width:] = layer.weight[:width][order], layer.bias[:width][order]
            w = torch.randn(width) * 1000
            last.weight.zero_()
            last.weight[0, :width], last.weight[1, width:] = w, w[order]
            last.bias.fill_(0.1)
        network = Network([nn.Flatten(), stem, Residual([inner, nn.ReLU(), outer]), last], (1, 3, 3), 2).eval()
        engine = NativeEngine(network, "cpu")
        x = torch.rand(16, 1, 3, 3, generator=torch.Generator().manual_seed(seed))
        for threat in (Ball("linf", 0.0), Ball("l2", 1e-8), Ball("l1", 1e-8)):
            problem = engine.problem(x, torch.arange(16) % 2, threat)
            for stage in ("ibp", "crown-ibp", "crown", "alpha-crown"):
                assert not (engine.margins(problem, stage) > 0).any(), f"{stage}: certified an exact tie"


def check_norms_alone() -> None:
    """In a tiny ball the bound by norms is the margin, behind a sum without ReLU too."""
    from cure_ray.bounds.native.balls import ball_margins
    from cure_ray.bounds.native.engine import NativeEngine
    from cure_ray.bounds.native.relaxation import margin_rows
    from cure_ray.threats.balls import Ball

    case = residual_network("dense")
    engine = NativeEngine(case.network, "cpu")
    domain = engine.problem(case.x, case.y, Ball("l2", 1e-6)).domain
    found = ball_margins(engine.decide, domain, margin_rows(case.y, 3, torch.float64))
    torch.testing.assert_close(found, true_margins(preactivations(case.network, case.x)[-1], case.y), atol=1e-3, rtol=0)


def check_reach() -> None:
    """What a layer hands on is no larger than it says: rounding is charged by that."""
    from cure_ray.bounds.native.relaxation import LayerBounds

    lower, upper = torch.tensor([[-3.0, -3.0, -1.0]]), torch.tensor([[-2.0, -2.0, 2.0]])
    bounds = LayerBounds(lower, upper, upper.abs(), torch.tensor([False, True, True]))
    assert bounds.reach().tolist() == [[0.0, 3.0, 2.0]]


def check_patches(kind: str) -> None:
    """No patch of any position takes a margin below its bound, which is that of the whole image; the bound for all positions is below."""
    from cure_ray.bounds.native.compiled import flatten_images
    from cure_ray.bounds.native.engine import NativeEngine
    from cure_ray.certification.boxes import BoxDomain
    from cure_ray.certification.windows import anywhere_margins, clean_pass, patch_margins, positions
    from cure_ray.threats.balls import Ball
    from cure_ray.threats.box import UNIT

    case, g = residual_network(kind), torch.Generator().manual_seed(0)
    stem = next(module for module in case.network if isinstance(module, nn.Conv2d))
    with torch.no_grad():
        stem.weight.mul_(1e-3)  # pixels hardly count, so that bounds lie near the margins
    engine = NativeEngine(case.network, "cpu")
    clean = clean_pass(engine.decide, flatten_images(case.x.double()), case.y)
    anywhere = anywhere_margins(clean, 2, 2)
    for row, column in positions(case.x.shape[2:], 2, 2)[::3]:
        bounds = patch_margins(clean, (row, column), 2, 2)
        low, high = case.x.double().clone(), case.x.double().clone()
        low[:, :, row : row + 2, column : column + 2], high[:, :, row : row + 2, column : column + 2] = 0.0, 1.0
        low, high = flatten_images(low), flatten_images(high)
        domain = BoxDomain(low, torch.zeros_like(low), high - low, Ball("linf", 1.0), UNIT)
        torch.testing.assert_close(bounds, engine._crown(engine.decide, domain, case.y, "ibp"), atol=1e-7, rtol=0)
        for fill in (0.0, 1.0, None):
            image = case.x.double().clone()
            size = (*case.x.shape[:2], 2, 2)
            image[:, :, row : row + 2, column : column + 2] = torch.rand(size, generator=g).double() if fill is None else fill
            margins = true_margins(preactivations(case.network, image)[-1], case.y)
            assert (bounds <= margins + 1e-9).all(), "a patch below its bound"
        assert (anywhere <= bounds + 1e-9).all(), "the bound for all positions is above that of one"


def check_residual() -> None:
    check_reach()
    check_norms_alone()
    check_tied_blocks()
    check_blocks_move_together()
    for kind in ("dense", "projection", "identity"):
        case = residual_network(kind)
        check_coupled(case, "l2", 0.02 if kind == "identity" else 0.25, True)
        for norm, eps in THREATS if kind != "identity" else THREATS[:2]:
            check_sound(case, norm, 2 * eps, norm != "l1", count=8)
        if kind != "identity":
            check_radius_zero(case)
            check_coupled(case, "l1", 1.2, False)
        if kind != "dense":
            check_patches(kind)
