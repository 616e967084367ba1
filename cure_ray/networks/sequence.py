"""A network as a sequence of blocks, and BN folded into its affine layer: the only reader of a torch module, the only fold.

Training, the native engine and the ONNX writer see a network through this; what it does not understand, none of them does.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, Literal, Protocol, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import skip_init

from cure_ray.errors import UserError
from cure_ray.networks.models import Normalize
from cure_ray.networks.residual import Residual

T = TypeVar("T")
Affine = nn.Conv2d | nn.Linear
BatchNorm = nn.BatchNorm1d | nn.BatchNorm2d
KNOWN = (
    Normalize, nn.Conv2d, nn.Linear, nn.BatchNorm1d, nn.BatchNorm2d, nn.ReLU, nn.Flatten, nn.AvgPool2d, nn.AdaptiveAvgPool2d, Residual,
)  # fmt: skip
GRAMMAR = (
    "a network is: Normalize if any, then Conv2d or Linear, BatchNorm if any, ReLU, repeated; Residual blocks and AvgPool2d after any of "
    "these; Flatten before Linear; Linear last"
)
_DROPOUT = (nn.Dropout, nn.Dropout2d)
_INSTEAD = {
    **dict.fromkeys(("MaxPool2d", "AdaptiveMaxPool2d"), "use a convolution with a stride, or AvgPool2d"),
    **dict.fromkeys(("LeakyReLU", "GELU", "SiLU", "ELU", "Tanh", "Sigmoid", "Hardtanh", "ReLU6", "PReLU", "Softplus"), "use ReLU"),
    **dict.fromkeys(("GroupNorm", "LayerNorm", "InstanceNorm2d", "SyncBatchNorm"), "use BatchNorm"),
    **dict.fromkeys(("Softmax", "LogSoftmax"), "leave it out, losses and certificates are about logits"),
    **dict.fromkeys(("Dropout", "Dropout2d"), "leave it out in training"),
}
WHOLE = (0, 0)  # average pooling of the whole image


class UnreadableNetworkError(UserError):
    """A network that is not such a sequence; names the layer."""


@dataclass(frozen=True)
class Block:
    """One affine layer and what surrounds it. It reads the outcome of an earlier block, averaged over windows of `pool` pixels and
    flattened if asked for. BN follows if there is one, then the outcome of the block `adds` is added, then ReLU."""

    affine: Affine
    norm: BatchNorm | None
    flatten: bool
    position: int  # of the affine layer among the network's modules, for messages
    pool: tuple[int, int] | None = None
    reads: int = -1  # the image; in a plain sequence always the block before
    adds: int | None = None
    relu: bool = False


@dataclass(frozen=True)
class Blocks:
    """In an order in which every block stands behind those it reads; the last one gives the logits."""

    normalize: Normalize | None
    blocks: tuple[Block, ...]


def window_of(pool: tuple[int, int], size: Sequence[int]) -> tuple[int, int]:
    """The window of average pooling on images of this height and width."""
    return (size[0], size[1]) if pool == WHOLE else pool


def pooled(x: Tensor, pool: tuple[int, int] | None) -> Tensor:
    return x if pool is None else F.avg_pool2d(x, window_of(pool, x.shape[2:]))


class Joint(Protocol):
    """What a block or a layer made of it says about its place."""

    @property
    def reads(self) -> int: ...
    @property
    def adds(self) -> int | None: ...


class Outcomes(Generic[T]):
    """What blocks gave, as long as a later one needs it."""

    def __init__(self, layers: Sequence[Joint], image: T) -> None:
        last = len(layers) - 1
        self._last = {last: last} | {
            source: i for i, layer in enumerate(layers) for source in (layer.reads, layer.adds) if source is not None
        }
        self._kept = {-1: image}

    def of(self, block: int) -> T:
        return self._kept[block]

    def put(self, at: int, outcome: T) -> None:
        """What block `at` gave; what no later block needs is let go."""
        self._kept = {block: kept for block, kept in self._kept.items() if self._last[block] > at}
        self._kept[at] = outcome


def _modules(network: nn.Module) -> list[nn.Module]:
    # A subclass of Sequential with a forward of its own (a residual block, say) is not a sequence.
    if isinstance(network, nn.Sequential) and type(network).forward is nn.Sequential.forward:
        return [m for child in network for m in _modules(child)]
    return [network]


def _refuse(position: int, module: nn.Module, why: str) -> UnreadableNetworkError:
    return UnreadableNetworkError(f"layer {position} ({type(module).__name__}): {why}; {GRAMMAR}")


def _check_conv(position: int, conv: nn.Conv2d) -> None:
    if isinstance(conv.padding, str) or conv.padding_mode != "zeros":
        raise _refuse(position, conv, "a convolution needs numeric zero padding")
    if any(d != 1 for d in conv.dilation) or conv.groups != 1:
        raise _refuse(position, conv, "a convolution must have neither dilation nor groups")


def _pool(position: int, module: nn.AvgPool2d | nn.AdaptiveAvgPool2d) -> tuple[int, int]:
    def pair(value: object) -> tuple[object, object]:
        return (value[0], value[1]) if isinstance(value, tuple) else (value, value)

    if isinstance(module, nn.AdaptiveAvgPool2d):
        if pair(module.output_size) != (1, 1):
            raise _refuse(position, module, f"only the mean of the whole image (output size 1) is understood, not {module.output_size}")
        return WHOLE
    (height, width), padding = pair(module.kernel_size), pair(module.padding)
    if pair(module.stride) != (height, width) or padding != (0, 0) or module.ceil_mode or module.divisor_override:
        raise _refuse(position, module, "average pooling is understood over windows that do not overlap, without padding")
    assert isinstance(height, int)
    assert isinstance(width, int)
    return height, width


class _Reading:
    """The blocks read so far, and what stands between the last of them and the next."""

    def __init__(self, flat: bool) -> None:
        self.normalize: Normalize | None = None
        self.blocks = list[Block]()
        self.here = -1  # the block whose outcome the next layer reads
        self.pool: tuple[int, int] | None = None
        self.flatten, self.flat = False, flat
        self.open: Literal["affine", "sum", "fork"] | None = None  # what a ReLU would follow: the last, where a branch begins

    def read(self, module: nn.Module, position: int) -> int:
        """One module; returns the position of the next."""
        kind = type(module)  # exact types: a subclass may compute something else
        if kind is nn.Identity or (kind in _DROPOUT and not module.training):
            return position + 1
        if kind not in KNOWN:
            instead = _INSTEAD.get(kind.__name__)
            raise _refuse(position, module, "this layer is not understood" + (f", {instead}" if instead else ""))
        if isinstance(module, Residual):
            return self._join(module, position)
        if isinstance(module, Normalize):
            if self.blocks or self.normalize is not None or self.flat:
                raise _refuse(position, module, "Normalize is understood only as the first layer")
            self.normalize = module
        elif isinstance(module, nn.Flatten):
            if (module.start_dim, module.end_dim) != (1, -1):
                raise _refuse(position, module, "only a Flatten of everything but the batch is understood")
            self.flatten, self.flat = True, True
        elif isinstance(module, nn.ReLU):
            if self.open is None or self.pool is not None:
                raise _refuse(position, module, "a ReLU must follow an affine layer or a residual block")
            if self.open == "fork":
                if module.inplace:
                    raise _refuse(position, module, "in place it changes what the shortcut reads too: use ReLU()")
                self._identity(position)
            self.blocks[self.here], self.open = replace(self.blocks[self.here], relu=True), None
        elif isinstance(module, nn.AvgPool2d | nn.AdaptiveAvgPool2d):
            if self.open == "affine" or not self.blocks or self.pool is not None or self.flat:
                raise _refuse(position, module, "average pooling of images must follow a ReLU or a residual block")
            self.pool = _pool(position, module)
        elif isinstance(module, Affine):
            self._affine(module, position)
        elif isinstance(module, BatchNorm):
            if self.open in ("fork", "sum") and not self.flatten and self.pool is None:
                self._identity(position)
            if self.open != "affine" or self.flatten or self.blocks[-1].norm is not None:
                raise _refuse(position, module, "BatchNorm is understood only directly after Conv2d or Linear, or around a residual block")
            self.blocks[-1] = replace(self.blocks[-1], norm=module)
        return position + 1

    def _affine(self, module: Affine, position: int) -> None:
        if self.open == "affine":
            raise _refuse(position, module, "two affine layers without a ReLU between them")
        if isinstance(module, nn.Conv2d):
            _check_conv(position, module)
        if self.flat == isinstance(module, nn.Conv2d):
            raise _refuse(position, module, "Conv2d needs images and Linear needs a Flatten before it")
        self.blocks.append(Block(module, None, self.flatten, position, self.pool, self.here))
        self.here, self.pool, self.flatten, self.open = len(self.blocks) - 1, None, False, "affine"

    def _identity(self, position: int) -> None:
        """A layer that changes nothing, for a BatchNorm or ReLU with no affine layer of its own: before a block, or behind its sum."""
        like = self.blocks[self.here].affine.weight
        options = {"bias": False, "device": like.device, "dtype": like.dtype}
        shape: Any = (len(like), len(like))
        layer: Affine = skip_init(nn.Linear, *shape, **options) if self.flat else skip_init(nn.Conv2d, *shape, 1, **options)
        layer.weight.requires_grad_(False).copy_(torch.eye(len(like), device=like.device).view_as(layer.weight))
        self.blocks.append(Block(layer, None, False, position, None, self.here))
        self.here, self.open = len(self.blocks) - 1, "affine"

    def _join(self, module: Residual, position: int) -> int:
        """A residual block: both branches read what is here; the last layer of the main one adds what the other one gives."""
        if not self.blocks or self.pool is not None or self.flatten:
            raise _refuse(position, module, "a residual block must follow an affine layer, a ReLU or another one")
        fork, before = self.here, len(self.blocks)
        after = self._branch(module.shortcut, position + 1, fork)
        shortcut, added = self.here, self.blocks[before:]
        if len(added) > 1 or any(block.relu for block in added) or self.pool is not None:
            raise _refuse(position, module, "a shortcut is nothing, or one affine layer with BatchNorm if any")
        after = self._branch(module.main, after, fork)
        if self.here == fork or self.open != "affine" or self.pool is not None or self.flatten:
            raise _refuse(position, module, "the main branch of a residual block must end in an affine layer, with BatchNorm if any")
        self.blocks[self.here] = replace(self.blocks[self.here], adds=shortcut)
        self.open = "sum"
        return after

    def _branch(self, branch: nn.Module, position: int, fork: int) -> int:
        self.here, self.open = fork, "fork"
        for module in _modules(branch):
            if isinstance(module, nn.Flatten):
                raise _refuse(position, module, "a residual block cannot hold a Flatten")
            position = self.read(module, position)
        return position


def read_blocks(network: nn.Module, flat: bool = False) -> Blocks:
    """The blocks of a network that takes images (`flat`: vectors); refuses by name what is not understood."""
    reading, position = _Reading(flat), 0
    for module in _modules(network):
        position = reading.read(module, position)
    blocks = reading.blocks
    if not blocks or reading.open != "affine" or not isinstance(blocks[-1].affine, nn.Linear):
        raise UnreadableNetworkError(f"the network is not one that ends in a Linear layer; {GRAMMAR}")
    return Blocks(reading.normalize, tuple(blocks))


@dataclass(frozen=True)
class ChannelMap:
    """What BN does to the output y of its affine layer: gain * (y - mean) + shift per channel."""

    gain: Tensor
    mean: Tensor
    shift: Tensor

    def fold(self, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        """The affine layer with the map behind it."""
        return weight * self.gain.view(-1, *[1] * (weight.dim() - 1)), self.gain * (bias - self.mean) + self.shift


def bias_of(affine: Affine) -> Tensor:
    return affine.weight.new_zeros(affine.weight.shape[0]) if affine.bias is None else affine.bias


def _double(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().double()


def running_map(norm: BatchNorm) -> ChannelMap:
    """BN in evaluation mode, in float64 on the CPU."""
    if norm.running_mean is None or norm.running_var is None:
        raise UserError("a BatchNorm layer has no running statistics: a network that is judged needs fixed ones")
    mean = _double(norm.running_mean)
    gain = torch.ones_like(mean) if norm.weight is None else _double(norm.weight)
    shift = torch.zeros_like(mean) if norm.bias is None else _double(norm.bias)
    return ChannelMap(gain / (_double(norm.running_var) + norm.eps).sqrt(), mean, shift)


def folded(block: Block) -> tuple[Tensor, Tensor]:
    """Weight and bias in evaluation mode with BN folded in, in float64 on the CPU."""
    weight, bias = _double(block.affine.weight), _double(bias_of(block.affine))
    return (weight, bias) if block.norm is None else running_map(block.norm).fold(weight, bias)
