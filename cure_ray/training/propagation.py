"""Interval bound propagation in centre and radius, for training and evaluation (docs/explanation/algorithms.md, bound propagation).

A radius is only ever multiplied and added, never recovered by subtracting two bounds: at lambda_2 = 1e-5 the difference would be
noise. Shapes: B batch, M stacked regions times batch, K classes, N neurons.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from cure_ray.networks.models import Normalize
from cure_ray.networks.sequence import Outcomes
from cure_ray.threats.box import UNIT, Box
from cure_ray.threats.norms import Norm
from cure_ray.training.folding import Folded, FoldedNetwork


@dataclass(frozen=True)
class Region:
    """A set of images per sample: a box (norm linf, radius shaped like the centre) or a small ball (norm l2 or l1, radius [B])."""

    centre: Tensor
    radius: Tensor
    norm: Norm


def full_region(x: Tensor, norm: Norm, eps: float, box: Box = UNIT) -> Region:
    """Everything the threat allows: for l_inf clipped to the domain, for l_2 and l_1 the whole ball (a superset of ball∩box)."""
    if norm != "linf":
        return Region(x, x.new_full((len(x),), eps), norm)
    below, above = (x - box.low).clamp(max=eps), (box.high - x).clamp(max=eps)
    return Region(x + (above - below) / 2, (above + below) / 2, "linf")


def dual_norm_of_rows(weight: Tensor, norm: Norm) -> Tensor:
    """||w_j||_{p*} of every output's row or whole kernel: how far a unit l_p ball moves it."""
    rows = weight.flatten(1)
    return rows.norm(dim=1) if norm == "l2" else rows.abs().amax(1)


class _IntervalRelu(torch.autograd.Function):
    """ReLU of a box. Active neurons pass, dead ones vanish, crossing ones become [0, s*u]; one fused rule instead of (l, u)."""

    @staticmethod
    def forward(ctx: Any, c: Tensor, r: Tensor, shrink: float) -> tuple[Tensor, Tensor]:
        active = c >= r
        half = (c + r).clamp_(min=0).mul_(0.5 * shrink)  # dead: 0
        ctx.save_for_backward(active, half > 0)
        ctx.shrink = shrink
        if shrink != 1:
            return torch.where(active, c, half), torch.where(active, r, half)
        # An active neuron has c >= (c+r)/2 >= r, a crossing or dead one c <= half <= r: the cases are a maximum and a minimum.
        return torch.maximum(c, half), torch.minimum(r, half)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        grad_c, grad_r = grads
        active, alive = ctx.saved_tensors
        both = (grad_c + grad_r).mul_(0.5 * ctx.shrink).mul_(alive)
        return torch.where(active, grad_c, both), torch.where(active, grad_r, both), None


def interval_relu(c: Tensor, r: Tensor, shrink: float = 1.0) -> tuple[Tensor, Tensor]:
    """Three cases (3.1): unchanged, zero, or c = r = shrink*u/2."""
    out: tuple[Tensor, Tensor] = _IntervalRelu.apply(c, r, shrink)  # type: ignore[no-untyped-call]
    return out


@dataclass(frozen=True)
class Propagated:
    """The boxes of a stack of regions before the last affine layer, and (if asked for) after every other one, before its ReLU."""

    centre: Tensor
    radius: Tensor | None  # None: every region was a point
    hidden: tuple[tuple[Tensor, Tensor], ...]

    def before_relu(self, network: FoldedNetwork) -> list[tuple[Tensor, Tensor]]:
        """Those of the hidden boxes that a ReLU follows: all but those of projections."""
        return [box for box, layer in zip(self.hidden, network.layers, strict=False) if layer.relu]


def _first_radius(first: Folded, normalize: Normalize | None, region: Region, out_shape: torch.Size) -> Tensor:
    if region.norm == "linf":
        radius = region.radius if normalize is None else region.radius / normalize.std
        return first.apply(radius, first.weight.abs(), None)
    weight = first.weight
    if normalize is not None:
        std = normalize.std if weight.dim() == 4 else normalize.std.expand(region.centre.shape[1:]).flatten()
        weight = weight / std
    spread = dual_norm_of_rows(weight, region.norm).view(1, -1, *[1] * (len(out_shape) - 2))
    scale = region.radius.view(-1, *[1] * (len(out_shape) - 1))
    return (scale * spread).expand(len(region.radius), *out_shape[1:])


def propagate(
    network: FoldedNetwork, regions: Sequence[Region], shrink: float = 1.0, keep_hidden: bool = False, points: bool = False
) -> Propagated:
    """All regions as one stacked batch, up to (not including) the last affine layer."""
    centre = torch.cat([region.centre for region in regions])
    image = centre if network.normalize is None else network.normalize(centre)
    *inner, last = network.layers
    if points:
        outcomes = Outcomes(network.layers, image)
        for i, layer in enumerate(inner):
            c = layer.apply(outcomes.of(layer.reads), layer.weight, layer.bias)
            c = c if layer.adds is None else c + outcomes.of(layer.adds)
            outcomes.put(i, torch.relu(c) if layer.relu else c)
        return Propagated(last.entering(outcomes.of(last.reads)), None, ())
    if not inner:  # a linear classifier: its one layer is the last, and `elided` would need the input region
        raise ValueError("a network needs at least one hidden layer")
    first = inner[0]
    c = first.apply(image, first.weight, first.bias)
    r = _stacked_first_radius(first, network.normalize, regions, c.shape)
    boxes = Outcomes(network.layers, (image, image))  # the image is read by the first layer alone
    hidden: list[tuple[Tensor, Tensor]] = []
    for i, layer in enumerate(inner):
        if i > 0:
            c, r = boxes.of(layer.reads)
            c, r = layer.apply(c, layer.weight, layer.bias), layer.apply(r, layer.weight.abs(), None)
        if layer.adds is not None:
            other_c, other_r = boxes.of(layer.adds)
            c, r = c + other_c, r + other_r
        if keep_hidden:
            hidden.append((c, r))
        boxes.put(i, interval_relu(c, r, shrink) if layer.relu else (c, r))
    c, r = boxes.of(last.reads)
    return Propagated(last.entering(c), last.entering(r), tuple(hidden))


def _stacked_first_radius(first: Folded, normalize: Normalize | None, regions: Sequence[Region], shape: torch.Size) -> Tensor:
    boxes = [region for region in regions if region.norm == "linf"]
    if len(boxes) == len(regions):  # one convolution for all of them
        stacked = Region(regions[0].centre, torch.cat([region.radius for region in regions]), "linf")
        return _first_radius(first, normalize, stacked, shape)
    return torch.cat([_first_radius(first, normalize, region, shape) for region in regions])


def upper_bounds(network: FoldedNetwork, boxes: Propagated, y_M: Tensor) -> Tensor:
    """u [M, K]: upper bounds on f_i - f_y with the last layer elided (3.3); exactly 0 at i = y."""
    last = network.layers[-1]
    logits = F.linear(boxes.centre, last.weight, last.bias)
    u = logits - logits.gather(1, y_M[:, None])
    if boxes.radius is None:
        return u
    spread_MKN = (last.weight - last.weight[y_M][:, None]).abs()
    return u + torch.bmm(spread_MKN, boxes.radius[:, :, None]).squeeze(2)


def certified(u_MK: Tensor, y_M: Tensor) -> Tensor:
    """Strictly: every other class stays below the label."""
    return (u_MK.scatter(1, y_M[:, None], -torch.inf) < 0).all(1)
