"""The comparison: the same training steps written the way one would from the papers, without any of our shortcuts.

One attack per norm, one after the other, through the network's own modules in evaluation mode; a second clean pass after the
attack for the BN statistics; bounds as (lower, upper) with centre and radius recomputed at every layer; BN as its own layer.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cure_ray.networks.models import Network, Normalize
from cure_ray.training.region import step_sizes


def attack(network: Network, x: Tensor, y: Tensor, norm: str, eps: float, steps: int = 8) -> Tensor:
    """PGD inside the l_inf box (and, for l2, on the l2 sphere)."""
    low, high = (x - eps).clamp(min=0), (x + eps).clamp(max=1)
    z = low + (high - low) * torch.rand_like(x)
    for size in step_sizes(steps, 0.5):
        z = z.detach().requires_grad_()
        loss = F.cross_entropy(network(z), y)
        (grad,) = torch.autograd.grad(loss, z)
        if norm == "linf":
            z = z.detach() + size * eps * grad.sign()
        else:
            moved = z.detach() + size * eps * grad / (grad.flatten(1).norm(dim=1).view(-1, 1, 1, 1) + 1e-10) - x
            z = x + moved * eps / moved.flatten(1).norm(dim=1).view(-1, 1, 1, 1).clamp(min=1e-10)
        z = torch.minimum(torch.maximum(z, low), high)
    return z.detach()


def bounds(network: Network, lower: Tensor, upper: Tensor, statistics: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """(lower, upper) through every module but the last."""
    used = 0
    for module in list(network)[:-1]:
        if isinstance(module, nn.Conv2d | nn.Linear):
            centre, radius = (upper + lower) / 2, (upper - lower) / 2
            if isinstance(module, nn.Conv2d):
                c = F.conv2d(centre, module.weight, module.bias, module.stride, module.padding)  # type: ignore[arg-type]
                r = F.conv2d(radius, module.weight.abs(), None, module.stride, module.padding)  # type: ignore[arg-type]
            else:
                c, r = F.linear(centre, module.weight, module.bias), F.linear(radius, module.weight.abs())
            lower, upper = c - r, c + r
        elif isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d):
            mean, variance = statistics[used]
            used += 1
            shape = [1, -1] + [1] * (lower.dim() - 2)
            gain = (module.weight / (variance + module.eps).sqrt()).view(shape)
            shift = module.bias.view(shape) - gain * mean.view(shape)
            centre, radius = (upper + lower) / 2 * gain + shift, (upper - lower) / 2 * gain.abs()
            lower, upper = centre - radius, centre + radius
        elif isinstance(module, nn.ReLU | nn.Flatten | Normalize):
            lower, upper = module(lower), module(upper)
    return lower, upper


def clean_statistics(network: Network, x: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Batch statistics of every BN layer, in the graph."""
    statistics = []
    for module in network:
        if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d):
            dims = [0] if x.dim() == 2 else [0, 2, 3]
            statistics.append((x.mean(dims), x.var(dims, unbiased=False)))
        x = module(x)
    return statistics


def robust_losses(network: Network, x: Tensor, y: Tensor, norm: str, eps: float, ratio: float) -> Tensor:
    """SABR's: the worst case over a small box around the attack."""
    network.eval()
    z = attack(network, x, y, norm, eps)
    low, high = (x - eps).clamp(min=0), (x + eps).clamp(max=1)
    tau = ratio * (high - low) / 2
    z = torch.minimum(torch.maximum(z, low + tau), high - tau)
    network.train()
    return worst_case(network, z - tau, z + tau, y, clean_statistics(network, x))


def mtl_ibp(network: Network, x: Tensor, y: Tensor, eps: float, ratio: float) -> Tensor:
    """MTL-IBP: the attack's loss and the worst case over the whole l_inf box, weighed."""
    network.eval()
    z = attack(network, x, y, "linf", eps)
    network.train()
    statistics = clean_statistics(network, x)
    bound = worst_case(network, (x - eps).clamp(min=0), (x + eps).clamp(max=1), y, statistics)
    return (1 - ratio) * worst_case(network, z, z, y, statistics) + ratio * bound


def worst_case(network: Network, lower: Tensor, upper: Tensor, y: Tensor, statistics: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Cross-entropy of the margins' lower bounds, the last layer merged with the margin."""
    lower, upper = bounds(network, lower, upper, statistics)
    last = network[-1]
    assert isinstance(last, nn.Linear)
    weight = last.weight[y][:, None] - last.weight[None]
    bias = last.bias[y][:, None] - last.bias[None]
    centre, radius = (upper + lower) / 2, (upper - lower) / 2
    margin = (weight * centre[:, None]).sum(2) + bias - (weight.abs() * radius[:, None]).sum(2)
    return (-margin).logsumexp(1)


def loss(network: Network, x: Tensor, y: Tensor, method: str, eps: dict[str, float], ratio: dict[str, float]) -> Tensor:
    """A full-radius step of a method."""
    network.train()
    if method == "natural":
        return F.cross_entropy(network(x), y)
    network(x)  # updates the running statistics the attack uses
    if method == "linf mtl":
        return mtl_ibp(network, x, y, eps["linf"], ratio["linf"]).mean()
    if method in ("linf", "l2"):
        return robust_losses(network, x, y, method, eps[method], ratio[method]).mean()
    if method == "random":
        half = len(x) // 2
        return sum(  # type: ignore[return-value]
            robust_losses(network, x[part], y[part], norm, eps[norm], ratio[norm]).mean()
            for norm, part in (("linf", slice(0, half)), ("l2", slice(half, None)))
        )
    both = [robust_losses(network, x, y, norm, eps[norm], ratio[norm]) for norm in ("linf", "l2")]
    return torch.stack(both).mean() if method == "joint" else torch.stack(both).amax(0).mean()
