"""CROWN-IBP's linear bounds of the margins, for the ramp: interval bounds in the hidden layers, one backward pass per class.

Zhang et al., ICLR 2020. For training only; it shares nothing with the bounds that certify. Shapes: M stacked regions times batch,
K classes, N neurons.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from cure_ray.networks.sequence import window_of
from cure_ray.training.folding import Folded, FoldedNetwork
from cure_ray.training.propagation import Region

FLOOR = 1e-12


def _relaxed(a_MKN: Tensor, centre: Tensor, radius: Tensor) -> tuple[Tensor, Tensor]:
    """A line above a . relu(z) for z in the box: its slopes, and its constants summed to [M, K].

    A crossing neuron lies below the chord and above z or 0, whichever leaves the smaller area.
    """
    low, high = centre - radius, centre + radius
    active, dead = low >= 0, high <= 0
    chord = torch.where(active, 1.0, torch.where(dead, 0.0, high / (2 * radius).clamp(min=FLOOR)))
    below = (centre > 0).to(centre.dtype)  # of active and dead neurons the right one
    intercept = torch.where(active | dead, 0.0, -chord * low)
    rising = a_MKN.clamp(min=0)
    slopes = rising * chord[:, None] + (a_MKN - rising) * below[:, None]
    return slopes, (rising * intercept[:, None]).flatten(2).sum(2)


def _through(layer: Folded, a: Tensor, read: torch.Size) -> tuple[Tensor, Tensor]:
    """Coefficients [M, K, outputs] of an affine layer as coefficients of what it reads, and the constants its bias gives."""
    M, K = a.shape[:2]
    if layer.weight.dim() == 2:
        return _unpooled(layer, a.flatten(2) @ layer.weight, read), a.flatten(2) @ layer.bias
    maps = a.flatten(0, 1)
    size, kernel = _pooled_size(layer, read), layer.weight.shape[2:]
    extra = [
        n - ((out - 1) * stride - 2 * pad + k)
        for n, out, stride, pad, k in zip(size, maps.shape[2:], layer.stride, layer.padding, kernel, strict=True)
    ]
    moved = F.conv_transpose2d(maps, layer.weight, None, layer.stride, layer.padding, extra)
    return _unpooled(layer, moved.view(M, K, *moved.shape[1:]), read), (a.flatten(3).sum(3) * layer.bias).sum(2)


def _pooled_size(layer: Folded, read: torch.Size) -> list[int]:
    if layer.pool is None:
        return list(read[1:])
    return [n // k for n, k in zip(read[1:], window_of(layer.pool, read[1:]), strict=True)]


def _unpooled(layer: Folded, a: Tensor, read: torch.Size) -> Tensor:
    """Coefficients [M, K, ...] of what enters a layer as those of what it reads: every pixel of a window has its share, those that
    no window holds have none."""
    M, K = a.shape[:2]
    if layer.pool is None:
        return a.view(M, K, *read)
    height, width = window_of(layer.pool, read[1:])
    maps = a.view(M * K, read[0], *_pooled_size(layer, read))
    spread = maps.repeat_interleave(height, 2).repeat_interleave(width, 3) / (height * width)
    return F.pad(spread, (0, read[2] - spread.shape[3], 0, read[1] - spread.shape[2])).view(M, K, *read)


def _reach(a_MKN: Tensor, region: Region) -> Tensor:
    """How far a linear function rises over the region from its centre: [M, K]."""
    if region.norm == "linf":
        return (a_MKN.abs() * region.radius[:, None]).flatten(2).sum(2)
    flat = a_MKN.flatten(2)
    return region.radius[:, None] * (flat.norm(dim=2) if region.norm == "l2" else flat.abs().amax(2))


def linear_upper_bounds(network: FoldedNetwork, regions: Sequence[Region], hidden: Sequence[tuple[Tensor, Tensor]], y_M: Tensor) -> Tensor:
    """u [M, K]: upper bounds on f_i - f_y from the boxes after every inner layer (`propagate(..., keep_hidden=True)`)."""
    *inner, last = network.layers
    centre = torch.cat([region.centre for region in regions])
    z = centre if network.normalize is None else network.normalize(centre)
    shapes = {-1: z.shape[1:], **{i: c.shape[1:] for i, (c, _) in enumerate(hidden)}}  # of what each layer gives
    found = dict[int, Tensor]()  # coefficients of what each layer gives

    def hand(source: int, a: Tensor) -> None:
        found[source] = found[source] + a if source in found else a

    hand(last.reads, _unpooled(last, last.weight - last.weight[y_M][:, None], shapes[last.reads]))
    total = last.bias - last.bias[y_M][:, None]
    for i in range(len(inner) - 1, -1, -1):
        layer, a = inner[i], found.pop(i)
        if layer.relu:
            a, of_relu = _relaxed(a, *hidden[i])
            total = total + of_relu
        if layer.adds is not None:
            hand(layer.adds, a)
        a, of_bias = _through(layer, a, shapes[layer.reads])
        hand(layer.reads, a)
        total = total + of_bias
    a = found[-1]
    total = total + (a * z[:, None]).flatten(2).sum(2)
    a = a if network.normalize is None else a / network.normalize.std
    reach = [_reach(part, region) for part, region in zip(a.split([len(region.centre) for region in regions]), regions, strict=True)]
    return total + torch.cat(reach)
