"""A network as the native engine sees it: affine maps with a ReLU between any two, BatchNorm, Normalize and average pooling folded in."""

import copy
import math
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cure_ray.bounds.native.affine import Affine, Shape
from cure_ray.bounds.native.chain import chained
from cure_ray.bounds.native.rounding import LARGEST, floored
from cure_ray.errors import UserError
from cure_ray.networks.models import Normalize
from cure_ray.networks.sequence import Block, UnreadableNetworkError, bias_of, folded, read_blocks, running_map, window_of

ADVICE = "The engine 'auto_lirpa' handles general graphs."


def flatten_images(x_BCHW: Tensor) -> Tensor:
    return x_BCHW.permute(0, 2, 3, 1).flatten(1)


@dataclass(eq=False)
class Compiled:
    """Affine maps with a ReLU after each but the last, which leaves out what a layer carries."""

    layers: list[Affine]
    in_shape: Shape
    classes: int
    gamma: float = 0.0  # relative rounding slack of the deciding pass; 0 in the searching pass

    @property
    def hidden(self) -> int:
        return len(self.layers) - 1

    @property
    def neurons(self) -> int:
        return sum(layer.outputs for layer in self.layers[:-1])

    @property
    def products(self) -> int:
        """Multiplications of one pass through the network."""
        return sum(layer.weight.numel() * layer.positions for layer in self.layers)

    def to(self, device: torch.device, dtype: torch.dtype) -> "Compiled":
        """In float64 every bound is lowered by what rounding can have added: gamma_n = n u / (1 - n u) for sums of n terms,
        with n the widest sum and a margin for the elementwise steps (docs/explanation/soundness.md)."""
        widest = max(max(layer.inputs, layer.outputs) for layer in self.layers)
        gamma = 2 * (widest + 64) * 2.0**-53 if dtype == torch.float64 else 0.0
        return Compiled([layer.to(device, dtype) for layer in self.layers], self.in_shape, self.classes, gamma)

    def __call__(self, x_BN: Tensor) -> Tensor:
        for layer in self.layers[:-1]:
            x_BN = layer.activated(layer(x_BN))
        return self.layers[-1](x_BN)


def _folded(block: Block) -> tuple[Tensor, Tensor, Tensor]:
    """Weight, bias, and the sum of sizes the bias was made of: what its rounding error is a share of."""
    weight, bias = folded(block)
    if block.norm is None:
        return weight, bias, bias.abs()
    scale = bias_of(block.affine).detach().cpu().double().abs()
    norm = running_map(block.norm)
    if block.norm.weight is not None:
        _check_lost(block.norm.weight.detach().cpu(), norm.gain)
    used = norm.gain.ne(0).view(-1, *[1] * (weight.dim() - 1))
    _check_lost(block.affine.weight.detach().cpu() * used, weight)
    return weight, bias, floored(norm.gain.abs()) * floored(scale + norm.mean.abs()) + norm.shift.abs()


def _check_lost(before: Tensor, after: Tensor) -> None:
    if bool(((before != 0) & (after == 0)).any()):
        raise UserError("folding a BatchNorm or Normalize layer turns a weight into 0: its numbers are too small to certify anything")


def _divided(weight: Tensor, std: Tensor) -> Tensor:
    divided = weight / std
    _check_lost(weight, divided)
    return divided


def _geometry(module: nn.Conv2d | nn.Linear) -> tuple[tuple[int, int], tuple[int, int]]:
    """Stride and padding."""
    if not isinstance(module, nn.Conv2d):
        return (1, 1), (0, 0)
    return (module.stride[0], module.stride[1]), (int(module.padding[0]), int(module.padding[1]))


def _after(pool: tuple[int, int] | None, shape: Shape) -> Shape:
    return shape if pool is None else (shape[0], shape[1] // pool[0], shape[2] // pool[1])


def _pooled(weight: Tensor, pool: tuple[int, int], shape: Shape, position: int, padding: tuple[int, int]) -> Tensor:
    """The weight with average pooling put in front of it: every pixel of a window has its share of the weight of their mean."""
    height, width = pool
    whole = _after(pool, shape)
    if 0 in whole:
        raise UserError(f"layer {position}: average pooling over {pool} pixels leaves nothing of an image of shape {shape}")
    if any(p and n % k for p, n, k in zip(padding, shape[1:], pool, strict=True)):
        raise UserError(f"layer {position}: a padded convolution behind average pooling that leaves out pixels is not supported. {ADVICE}")
    images = weight if weight.dim() == 4 else weight.view(-1, *whole)
    spread = images.repeat_interleave(height, 2).repeat_interleave(width, 3) / (height * width)
    _check_lost(weight, spread[:, :, ::height, ::width].reshape(weight.shape))
    if weight.dim() == 4:
        return spread
    return F.pad(spread, (0, shape[2] - spread.shape[3], 0, shape[1] - spread.shape[2])).flatten(1)


def _affine(
    weight: Tensor,
    bias: Tensor,
    scale: Tensor,
    shape: Shape,
    normalize: Normalize | None,
    stride: tuple[int, int],
    padding: tuple[int, int],
) -> Affine:
    """One layer, with the input normalisation folded in: weights over std, and the bias map of the constant image -mean/std."""
    if weight.dim() == 4:
        image = magnitude = torch.zeros(1, *shape, dtype=torch.float64)
        if normalize is not None:
            mean, std = normalize.mean.detach().cpu().double(), normalize.std.detach().cpu().double()
            image, magnitude = ((t / std).expand(shape)[None] for t in (-mean, floored(mean.abs())))
        shift = F.conv2d(image, weight, None, stride, padding)[0]
        size = F.conv2d(magnitude.abs(), floored(weight.abs()), None, stride, padding)[0]
        if normalize is not None:
            weight = _divided(weight, std.view(1, -1, 1, 1))
        bias_map, scale_map = bias.view(-1, 1, 1) + shift, scale.view(-1, 1, 1) + size
        flat, flat_scale = flatten_images(bias_map[None])[0], flatten_images(scale_map[None])[0]
        return Affine(weight, flat, floored(flat_scale), shape, tuple(shift.shape), stride, padding)
    if len(shape) == 3:
        if normalize is not None:
            mean, std = (t.detach().cpu().double().expand(shape).reshape(-1) for t in (normalize.mean, normalize.std))
            bias, scale = bias - weight @ (mean / std), scale + floored(weight.abs()) @ (floored(mean.abs()) / std).abs()
            weight = _divided(weight, std)
        weight = weight.view(-1, *shape).permute(0, 2, 3, 1).reshape(weight.shape[0], -1)
    return Affine(weight, bias, floored(scale), shape, (weight.shape[0],))


def state_of(network: nn.Module) -> list[tuple[int, int]]:
    """Which tensors a network has at the moment, and how often each was changed in place (tensors of inference mode do not tell)."""
    every = [*network.parameters(), *network.buffers()]
    return [(t.data_ptr(), -1 if t.is_inference() else t._version) for t in every]


@torch.no_grad()
def compile_network(network: nn.Module, input_shape: Shape) -> Compiled:
    """Read a sequential network into affine maps, in float64 on the CPU. Raises UserError for anything not understood."""
    if any(m.training for m in network.modules()):
        raise UserError("the network is in train mode: call network.eval() first, bounds hold for running statistics only")
    check_finite(network)
    try:
        sequence = read_blocks(network, flat=len(input_shape) == 1)
    except UnreadableNetworkError as error:
        raise UserError(f"{error}. {ADVICE}") from None
    maps: list[Affine] = []
    for block in sequence.blocks:
        shape = input_shape if block.reads < 0 else maps[block.reads].out_shape
        module, pool = block.affine, None if block.pool is None else window_of(block.pool, shape[1:])
        wanted = module.in_channels if isinstance(module, nn.Conv2d) else module.in_features
        given = shape[0] if isinstance(module, nn.Conv2d) else math.prod(_after(pool, shape))
        if wanted != given:
            raise UserError(f"layer {block.position} expects {wanted} inputs, the {shape} before it give {given}")
        weight, bias, scale = _folded(block)
        stride, padding = _geometry(module)
        if pool is not None:
            weight = _pooled(weight, pool, shape, block.position, padding)
            stride, padding = (stride[0] * pool[0], stride[1] * pool[1]), (padding[0] * pool[0], padding[1] * pool[1])
        maps.append(_affine(weight, bias, scale, shape, sequence.normalize if not maps else None, stride, padding))
    try:
        layers = chained(sequence.blocks, maps)
    except UserError as error:
        raise UserError(f"{error}. {ADVICE}") from None
    for position, layer in enumerate(layers):
        if not all(bool((t.abs() <= LARGEST).all()) for t in (layer.weight, layer.bias_scale_N)):
            raise UserError(f"affine layer {position} is not finite, or beyond {LARGEST:.0e}, after folding: nothing can be certified")
    # Copies: what is kept of them (magnitudes, norms, kernels in float32) would not follow if the network's tensors changed in place.
    layers = [replace(layer, weight=layer.weight.clone(), bias_N=layer.bias_N.clone(), cache={}) for layer in layers]
    return Compiled(layers, input_shape, layers[-1].outputs)


def check_finite(network: nn.Module) -> None:
    for name, tensor in [*network.named_parameters(), *network.named_buffers()]:
        if tensor.is_floating_point() and not torch.isfinite(tensor).all():
            raise UserError(f"the network's {name} holds NaN or infinity: nothing can be certified")
        if tensor.is_floating_point() and bool((tensor.abs() > LARGEST).any()):
            raise UserError(f"the network's {name} holds numbers beyond {LARGEST:.0e}: nothing can be certified")
        if name.endswith("running_var") and bool((tensor < 0).any()):
            raise UserError(f"the network's {name} is negative: not a variance")


@torch.no_grad()
def check_outputs(network: nn.Module, compiled: Compiled) -> None:
    """The compiled network must compute what the network computes: a cheap guard against layers with surprises (hooks, ...)."""
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(2, *compiled.in_shape, generator=generator)
    tensor = next(iter(network.parameters()))
    there = network(x.to(tensor.device, tensor.dtype)).cpu().double()
    here = compiled(flatten_images(x.double()))
    scale = 1 + there.abs().amax()
    off = (here - there).abs().amax()
    if bool(torch.isfinite(there).all()) and not bool(off <= 1e-3 * scale):
        seen = f"its outputs in float32 and those of the compiled network in float64 differ by {float(off):.3g}"
        exact = copy.deepcopy(network).cpu().double()(x.double())
        if bool(((here - exact).abs() <= 1e-3 * (1 + exact.abs().amax())).all()):
            raise UserError(
                f"the network loses its outputs to rounding: {seen}, in float64 it computes the same. Large terms cancel in it (a bias, "
                "for example), so that what a float32 network answers is not what would be certified; use smaller parameters"
            )
        raise UserError(f"the network does something that the native engine cannot see (a hook, ...): {seen}")
