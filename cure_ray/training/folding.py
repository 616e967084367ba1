"""A network as training sees it: the clean pass, and BN folded into its affine layer with the statistics in the autograd graph.

BN is folded before anything is propagated, with the clean batch's statistics in training and the running ones elsewhere: one pass
over weights instead of two over activations (docs/decisions/0002).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cure_ray.networks.models import Normalize
from cure_ray.networks.sequence import BatchNorm, Block, Blocks, ChannelMap, Outcomes, bias_of, pooled

Sum = Callable[[Tensor], Tensor]  # adds a tensor over data-parallel ranks, differentiably


def _identity(tensor: Tensor) -> Tensor:
    return tensor


@dataclass(frozen=True)
class Folded:
    """An affine map with BN folded in: what regions and attacks see."""

    weight: Tensor
    bias: Tensor
    stride: tuple[int, int]
    padding: tuple[int, int]
    flatten: bool
    pool: tuple[int, int] | None = None
    reads: int = -1  # and the rest of its place in the network, as in `Block`
    adds: int | None = None
    relu: bool = False

    def entering(self, x: Tensor) -> Tensor:
        """What it reads, as it multiplies it."""
        x = pooled(x, self.pool)
        return x.flatten(1) if self.flatten else x

    def apply(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        x = self.entering(x)
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
        outcomes = Outcomes(self.layers, x if self.normalize is None else self.normalize(x))
        for i, layer in enumerate(self.layers):
            x = (apply_first if i == 0 else Folded.apply)(layer, outcomes.of(layer.reads), layer.weight, layer.bias)
            x = x if layer.adds is None else x + outcomes.of(layer.adds)
            x = torch.relu_(x) if layer.relu else x
            outcomes.put(i, x)
        return x


@dataclass(frozen=True)
class BatchStatistics:
    mean: Tensor
    inverse_std: Tensor


def _fold(block: Block, stats: BatchStatistics | None) -> Folded:
    weight, bias = block.affine.weight, bias_of(block.affine)
    if stats is not None and block.norm is not None:
        weight, bias = ChannelMap(block.norm.weight * stats.inverse_std, stats.mean, block.norm.bias).fold(weight, bias)
    conv = isinstance(block.affine, nn.Conv2d)
    stride: Any = block.affine.stride if conv else (1, 1)
    padding: Any = block.affine.padding if conv else (0, 0)
    return Folded(weight, bias, stride, padding, block.flatten, block.pool, block.reads, block.adds, block.relu)


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
    outcomes = Outcomes(blocks.blocks, x if blocks.normalize is None else blocks.normalize(x))
    statistics = list[BatchStatistics | None]()
    for i, block in enumerate(blocks.blocks):
        raw = _fold(block, None)
        x = raw.apply(outcomes.of(block.reads), raw.weight, raw.bias)
        if block.norm is not None:
            x, stats = _batch_norm(block.norm, x, all_sum, world)
            statistics.append(stats)
        else:
            statistics.append(None)
        x = x if block.adds is None else x + outcomes.of(block.adds)
        x = torch.relu_(x) if block.relu else x
        outcomes.put(i, x)
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
