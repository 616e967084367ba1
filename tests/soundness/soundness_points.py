"""Points of the input set and what the network makes of them, computed from the original torch modules in float64, never by the engine."""

from copy import deepcopy

import torch
from torch import Tensor, nn


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
    seen = list[Tensor]()

    def note(_: nn.Module, args: tuple[Tensor]) -> None:
        seen.append(args[0].permute(0, 2, 3, 1).flatten(1) if args[0].dim() == 4 else args[0].clone())

    copy = deepcopy(network).double()
    for module in copy.modules():
        if isinstance(module, nn.ReLU):
            module.register_forward_pre_hook(note)
    logits = copy(x_BCHW.double())
    return [*seen, logits]


def in_chain(layers: list[Tensor], net: object) -> list[Tensor]:
    """The inputs of the ReLUs and the logits where the engine's chain has them; NaN, which contradicts nothing, where it carries."""
    *seen, logits = layers
    found, rest = list[Tensor](), iter(seen)
    for layer in net.layers[:-1]:
        if layer.carried_N is None:
            found.append(next(rest))
            continue
        whole = torch.full((*logits.shape[:-1], layer.outputs), torch.nan, dtype=torch.float64)
        if not layer.carried_N.all():
            whole[..., ~layer.carried_N] = next(rest)
        found.append(whole)
    assert next(rest, None) is None, "a ReLU that the chain does not have"
    return [*found, logits]


def true_margins(logits_BK: Tensor, y_B: Tensor) -> Tensor:
    rows = []
    for logits, y in zip(logits_BK, y_B.tolist(), strict=True):
        rows.append(torch.stack([logits[y] - logits[i] for i in range(len(logits)) if i != y]))
    return torch.stack(rows)
