"""Interval bound propagation in centre and radius, for training and evaluation (docs/algorithms.md, bound propagation).

A network is read as blocks (affine, BN, ReLU). BN is folded into its affine layer before anything is propagated, with the clean
batch's statistics in training and the running ones elsewhere: one pass over weights instead of two over activations. A radius is
only ever multiplied and added, never recovered by subtracting two bounds: at lambda_2 = 1e-5 the difference would be noise.

Shapes: B batch, M stacked regions times batch, K classes, N neurons.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cure_ray.networks import Normalize
from cure_ray.norms import Norm

Sum = Callable[[Tensor], Tensor]  # adds a tensor over data-parallel ranks, differentiably
BatchNorm = nn.BatchNorm1d | nn.BatchNorm2d


def _identity(tensor: Tensor) -> Tensor:
    return tensor


@dataclass(frozen=True)
class Block:
    """One affine layer, its BN if it has one; a ReLU follows every block but the last. `flatten` comes before it."""

    affine: nn.Conv2d | nn.Linear
    norm: BatchNorm | None
    flatten: bool


@dataclass(frozen=True)
class Blocks:
    normalize: Normalize | None
    blocks: tuple[Block, ...]


def read_blocks(network: nn.Sequential) -> Blocks:
    """The block structure of a sequential network; refuses by name what it cannot propagate."""
    normalize, blocks, flatten, expect_relu = None, list[Block](), False, False
    for module in network:
        if isinstance(module, Normalize) and not blocks and normalize is None:
            normalize = module
        elif isinstance(module, nn.Flatten):
            flatten = True
        elif isinstance(module, nn.Conv2d | nn.Linear) and not expect_relu:
            if isinstance(module, nn.Conv2d) and (module.groups != 1 or module.dilation != (1, 1) or isinstance(module.padding, str)):
                raise ValueError(f"{module}: only plain convolutions (no groups, no dilation) are supported")
            blocks.append(Block(module, None, flatten))
            flatten, expect_relu = False, True
        elif isinstance(module, BatchNorm) and expect_relu and blocks[-1].norm is None:
            blocks[-1] = Block(blocks[-1].affine, module, blocks[-1].flatten)
        elif isinstance(module, nn.ReLU) and expect_relu:
            expect_relu = False
        else:
            raise ValueError(f"cannot read {type(module).__name__} here: expected Normalize, (affine, BN, ReLU)..., affine")
    if not blocks or not expect_relu or blocks[-1].norm is not None:
        raise ValueError("a classifier ends in an affine layer without BN or ReLU")
    return Blocks(normalize, tuple(blocks))


@dataclass(frozen=True)
class Folded:
    """An affine map with BN folded in: what regions and attacks see."""

    weight: Tensor
    bias: Tensor
    stride: tuple[int, int]
    padding: tuple[int, int]
    flatten: bool

    def apply(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        x = x.flatten(1) if self.flatten else x
        if weight.dim() == 2:
            return F.linear(x, weight, bias)
        return F.conv2d(x, weight, bias, self.stride, self.padding)


class _ConvForInputGradient(torch.autograd.Function):
    """A convolution whose input gradient is a matrix product and a fold.

    For one to three input channels that is three to four times faster on the CPU than the library's transposed convolution, and
    an attack spends a third of a small network's time there (docs/benchmarks.md).
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, stride: tuple[int, int], padding: tuple[int, int]) -> Tensor:
        ctx.save_for_backward(weight)
        ctx.geometry = (x.shape[2:], stride, padding)
        return F.conv2d(x, weight, bias, stride, padding)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        (weight,) = ctx.saved_tensors
        size, stride, padding = ctx.geometry
        columns = weight.flatten(1).t() @ grads[0].flatten(2)
        return F.fold(columns, size, weight.shape[2:], 1, padding, stride), None, None, None, None


def _apply_for_input_gradient(layer: Folded, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    out: Tensor = _ConvForInputGradient.apply(x, weight, bias, layer.stride, layer.padding)  # type: ignore[no-untyped-call]
    return out


@dataclass(frozen=True)
class FoldedNetwork:
    normalize: Normalize | None
    layers: tuple[Folded, ...]

    def logits(self, x: Tensor) -> Tensor:
        """The forward pass, for points."""
        return self._forward(x, Folded.apply)

    def attack_logits(self, x: Tensor) -> Tensor:
        """The same, made for attacks: gradients reach x only, through a faster kernel where there is one."""
        first = self.layers[0]
        few_channels = first.weight.dim() == 4 and first.weight.shape[1] <= 3 and x.device.type == "cpu"
        return self._forward(x, _apply_for_input_gradient if few_channels else Folded.apply)

    def _forward(self, x: Tensor, apply_first: "Callable[[Folded, Tensor, Tensor, Tensor], Tensor]") -> Tensor:
        x = x if self.normalize is None else self.normalize(x)
        for i, layer in enumerate(self.layers):
            x = (apply_first if i == 0 else Folded.apply)(layer, x, layer.weight, layer.bias)
            if layer is not self.layers[-1]:
                x = torch.relu_(x)
        return x


@dataclass(frozen=True)
class BatchStatistics:
    mean: Tensor
    inverse_std: Tensor


def _fold(block: Block, stats: BatchStatistics | None) -> Folded:
    weight: Tensor = block.affine.weight
    bias: Tensor | None = block.affine.bias
    if bias is None:
        bias = weight.new_zeros(weight.shape[0])
    if stats is not None and block.norm is not None:
        gain = block.norm.weight * stats.inverse_std
        weight = weight * gain.view(-1, *[1] * (weight.dim() - 1))
        bias = gain * (bias - stats.mean) + block.norm.bias
    conv = isinstance(block.affine, nn.Conv2d)
    stride: Any = block.affine.stride if conv else (1, 1)
    padding: Any = block.affine.padding if conv else (0, 0)
    return Folded(weight, bias, stride, padding, block.flatten)


def fold_batch(blocks: Blocks, stats: Sequence[BatchStatistics | None]) -> FoldedNetwork:
    """Fold the clean batch's statistics, which stay in the autograd graph (3.2, step 3)."""
    return FoldedNetwork(blocks.normalize, tuple(_fold(b, s) for b, s in zip(blocks.blocks, stats, strict=True)))


@torch.no_grad()
def fold_running(blocks: Blocks) -> FoldedNetwork:
    """Fold the running statistics: the network in evaluation mode, detached."""

    def stats(norm: BatchNorm | None) -> BatchStatistics | None:
        if norm is None:
            return None
        assert norm.running_mean is not None
        assert norm.running_var is not None
        return BatchStatistics(norm.running_mean, (norm.running_var + norm.eps).rsqrt())

    folded = fold_batch(blocks, [stats(b.norm) for b in blocks.blocks])
    layers = tuple(replace(layer, weight=layer.weight.detach(), bias=layer.bias.detach()) for layer in folded.layers)
    return FoldedNetwork(folded.normalize, layers)


def clean_forward(blocks: Blocks, x: Tensor, all_sum: Sum = _identity, world: int = 1) -> tuple[Tensor, list[BatchStatistics | None]]:
    """The clean training-mode pass (3.2, step 1): logits, and per block the batch statistics, all in the graph.

    Updates the running statistics once. With data-parallel ranks the statistics are those of the global batch.
    """
    x = x if blocks.normalize is None else blocks.normalize(x)
    statistics = list[BatchStatistics | None]()
    last = len(blocks.blocks) - 1
    for i, block in enumerate(blocks.blocks):
        raw = _fold(block, None)
        x = raw.apply(x, raw.weight, raw.bias)
        if block.norm is not None:
            x, stats = _batch_norm(block.norm, x, all_sum, world)
            statistics.append(stats)
        else:
            statistics.append(None)
        if i < last:
            x = torch.relu_(x)
    return x, statistics


class _BatchNorm(torch.autograd.Function):
    """torch's own BN kernels, with gradients also through the batch statistics they computed (torch returns these as constants)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
        out, mean, inverse_std = torch.ops.aten.native_batch_norm(x, weight, bias, None, None, True, 0.0, eps)
        ctx.save_for_backward(x, weight, mean, inverse_std)
        ctx.eps = eps
        ctx.set_materialize_grads(False)
        return out, mean, inverse_std

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        grad_out, grad_mean, grad_inverse = grads
        x, weight, mean, inverse_std = ctx.saved_tensors
        grad_x = grad_weight = grad_bias = None
        if grad_out is not None:
            grad_x, grad_weight, grad_bias = torch.ops.aten.native_batch_norm_backward(
                grad_out, x, weight, None, None, mean, inverse_std, True, ctx.eps, [True, True, True]
            )
        if grad_mean is not None or grad_inverse is not None:
            # d mean / dx = 1/n and d inverse_std / dx = -inverse_std^3 (x - mean) / n: together one affine map of x per channel
            count = x.numel() // x.shape[1]
            slope = torch.zeros_like(mean) if grad_inverse is None else -grad_inverse * inverse_std.pow(3) / count
            offset = -slope * mean if grad_mean is None else grad_mean / count - slope * mean
            shape = [1, -1] + [1] * (x.dim() - 2)
            extra = torch.addcmul(offset.view(shape), x, slope.view(shape))
            grad_x = extra if grad_x is None else grad_x.add_(extra)
        return grad_x, grad_weight, grad_bias, None


def _batch_norm(norm: BatchNorm, x: Tensor, all_sum: Sum, world: int) -> tuple[Tensor, BatchStatistics]:
    if world == 1:
        out, mean, inverse_std = _BatchNorm.apply(x, norm.weight, norm.bias, norm.eps)  # type: ignore[no-untyped-call]
    else:  # exact global moments: mean first, then the spread around it
        dims = [d for d in range(x.dim()) if d != 1]
        shape = [1, -1] + [1] * (x.dim() - 2)
        mean = all_sum(x.mean(dims)) / world
        inverse_std = (all_sum((x - mean.view(shape)).square().mean(dims)) / world + norm.eps).rsqrt()
        gain = norm.weight * inverse_std
        out = torch.addcmul((norm.bias - gain * mean).view(shape), x, gain.view(shape))
    with torch.no_grad():
        assert norm.running_mean is not None
        assert norm.running_var is not None
        assert norm.num_batches_tracked is not None
        count = world * x.numel() // x.shape[1]
        momentum = norm.momentum if norm.momentum is not None else 0.1
        norm.num_batches_tracked.add_(1)
        norm.running_mean.lerp_(mean.detach(), momentum)
        variance = inverse_std.detach().pow(-2) - norm.eps
        norm.running_var.lerp_(variance.clamp(min=0) * (count / max(count - 1, 1)), momentum)
    return out, BatchStatistics(mean, inverse_std)


@dataclass(frozen=True)
class Region:
    """A set of images per sample: a box (norm linf, radius shaped like the centre) or a small ball (norm l2 or l1, radius [B])."""

    centre: Tensor
    radius: Tensor
    norm: Norm


def full_region(x: Tensor, norm: Norm, eps: float) -> Region:
    """Everything the threat allows: for l_inf clipped to [0, 1], for l_2 and l_1 the whole ball (a superset of ball∩box)."""
    if norm != "linf":
        return Region(x, x.new_full((len(x),), eps), norm)
    below, above = x.clamp(max=eps), (1 - x).clamp(max=eps)
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
    """The boxes of a stack of regions before the last affine layer, and (if asked for) before every ReLU."""

    centre: Tensor
    radius: Tensor | None  # None: every region was a point
    hidden: tuple[tuple[Tensor, Tensor], ...]


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
    c = centre if network.normalize is None else network.normalize(centre)
    first, *rest = network.layers
    if points:
        for layer in network.layers[:-1]:
            c = torch.relu(layer.apply(c, layer.weight, layer.bias))
        return Propagated(c.flatten(1) if network.layers[-1].flatten else c, None, ())
    if not rest:  # a linear classifier: its one layer is the last, and `elided` would need the input region
        raise ValueError("a network needs at least one hidden layer")
    c = first.apply(c, first.weight, first.bias)
    r = _stacked_first_radius(first, network.normalize, regions, c.shape)
    hidden = list[tuple[Tensor, Tensor]]()
    for layer in rest:
        if keep_hidden:
            hidden.append((c, r))
        c, r = interval_relu(c, r, shrink)
        if layer is not rest[-1]:
            c, r = layer.apply(c, layer.weight, layer.bias), layer.apply(r, layer.weight.abs(), None)
    if rest[-1].flatten:
        c, r = c.flatten(1), r.flatten(1)
    return Propagated(c, r, tuple(hidden))


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
