"""A network as a sequence of blocks, and BN folded into its affine layer: the only reader of a torch module, the only fold.

Training, the native engine and the ONNX writer see a network through this; what it does not understand, none of them does.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from cure_ray.errors import UserError
from cure_ray.networks.models import Normalize

Affine = nn.Conv2d | nn.Linear
BatchNorm = nn.BatchNorm1d | nn.BatchNorm2d
KNOWN = (Normalize, nn.Conv2d, nn.Linear, nn.BatchNorm1d, nn.BatchNorm2d, nn.ReLU, nn.Flatten)
GRAMMAR = "a network is: Normalize if any, then Conv2d or Linear, BatchNorm if any, ReLU, repeated; Flatten before Linear; Linear last"
_DROPOUT = (nn.Dropout, nn.Dropout2d)
_INSTEAD = {
    **dict.fromkeys(("MaxPool2d", "AvgPool2d", "AdaptiveAvgPool2d", "AdaptiveMaxPool2d"), "use a convolution with a stride"),
    **dict.fromkeys(("LeakyReLU", "GELU", "SiLU", "ELU", "Tanh", "Sigmoid", "Hardtanh", "ReLU6", "PReLU", "Softplus"), "use ReLU"),
    **dict.fromkeys(("GroupNorm", "LayerNorm", "InstanceNorm2d", "SyncBatchNorm"), "use BatchNorm"),
    **dict.fromkeys(("Softmax", "LogSoftmax"), "leave it out, losses and certificates are about logits"),
    **dict.fromkeys(("Dropout", "Dropout2d"), "leave it out in training"),
}


class UnreadableNetworkError(UserError):
    """A network that is not such a sequence; names the layer."""


@dataclass(frozen=True)
class Block:
    """One affine layer, its BN if it has one; a ReLU follows every block but the last. `flatten` comes before it."""

    affine: Affine
    norm: BatchNorm | None
    flatten: bool
    position: int  # of the affine layer among the network's modules, for messages


@dataclass(frozen=True)
class Blocks:
    normalize: Normalize | None
    blocks: tuple[Block, ...]


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


def read_blocks(network: nn.Module, flat: bool = False) -> Blocks:
    """The blocks of a network that takes images (`flat`: vectors); refuses by name what is not understood."""
    normalize: Normalize | None = None
    blocks, flatten, open_block = list[Block](), False, False
    for position, module in enumerate(_modules(network)):
        kind = type(module)  # exact types: a subclass may compute something else
        if kind is nn.Identity or (kind in _DROPOUT and not module.training):
            continue
        if kind not in KNOWN:
            instead = _INSTEAD.get(kind.__name__)
            raise _refuse(position, module, "this layer is not understood" + (f", {instead}" if instead else ""))
        if isinstance(module, Normalize):
            if blocks or normalize is not None or flat:
                raise _refuse(position, module, "Normalize is understood only as the first layer")
            normalize = module
        elif isinstance(module, nn.Flatten):
            if (module.start_dim, module.end_dim) != (1, -1):
                raise _refuse(position, module, "only a Flatten of everything but the batch is understood")
            flatten, flat = True, True
        elif isinstance(module, nn.ReLU):
            if not open_block:
                raise _refuse(position, module, "a ReLU must follow an affine layer")
            open_block = False
        elif isinstance(module, Affine):
            if open_block:
                raise _refuse(position, module, "two affine layers without a ReLU between them")
            if isinstance(module, nn.Conv2d):
                _check_conv(position, module)
            if flat == isinstance(module, nn.Conv2d):
                raise _refuse(position, module, "Conv2d needs images and Linear needs a Flatten before it")
            blocks.append(Block(module, None, flatten, position))
            flatten, open_block = False, True
        elif isinstance(module, BatchNorm):
            if not open_block or flatten or blocks[-1].norm is not None:
                raise _refuse(position, module, "BatchNorm is understood only directly after Conv2d or Linear")
            blocks[-1] = Block(blocks[-1].affine, module, blocks[-1].flatten, blocks[-1].position)
    if not blocks or not open_block or not isinstance(blocks[-1].affine, nn.Linear):
        raise UnreadableNetworkError(f"the network is not one that ends in a Linear layer; {GRAMMAR}")
    return Blocks(normalize, tuple(blocks))


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
