"""Networks: plain sequences of Normalize, Conv2d, BatchNorm, ReLU, Flatten and Linear, so that every bound method can read them.

The input normalisation is the first layer, hence every radius in this project is in pixel units.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn


class Normalize(nn.Module):
    """(x - mean) / std per channel. The constants are part of the architecture, not of the state dict."""

    mean: Tensor
    std: Tensor

    def __init__(self, mean: Sequence[float], std: Sequence[float]) -> None:
        super().__init__()
        if len(mean) != len(std) or any(s <= 0 for s in std):
            raise ValueError(f"Normalize needs one positive std per channel, got mean={list(mean)}, std={list(std)}")
        self.register_buffer("mean", torch.tensor(mean, dtype=torch.float32).view(-1, 1, 1), persistent=False)
        self.register_buffer("std", torch.tensor(std, dtype=torch.float32).view(-1, 1, 1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return (x - self.mean) / self.std


class Network(nn.Sequential):
    """A sequential classifier that knows the shape of its input (C, H, W) and its number of classes."""

    def __init__(self, layers: Sequence[nn.Module], input_shape: tuple[int, int, int], num_classes: int) -> None:
        super().__init__(*layers)
        self.input_shape = input_shape
        self.num_classes = num_classes


def normalize_layers(mean: Sequence[float], std: Sequence[float]) -> list[nn.Module]:
    identity = all(m == 0 for m in mean) and all(s == 1 for s in std)
    return [] if identity else [Normalize(mean, std)]


def conv_layers(channels_in: int, channels_out: int, kernel: int, stride: int, padding: int, batch_norm: bool) -> list[nn.Module]:
    layers: list[nn.Module] = [nn.Conv2d(channels_in, channels_out, kernel, stride, padding)]
    if batch_norm:
        layers.append(nn.BatchNorm2d(channels_out))
    return [*layers, nn.ReLU()]


def _linear(features_in: int, features_out: int, batch_norm: bool) -> list[nn.Module]:
    layers: list[nn.Module] = [nn.Linear(features_in, features_out)]
    if batch_norm:
        layers.append(nn.BatchNorm1d(features_out))
    return [*layers, nn.ReLU()]


def cnn7(
    input_shape: tuple[int, int, int],
    num_classes: int,
    mean: Sequence[float],
    std: Sequence[float],
    width: float = 1.0,
    last_conv_stride: int = 1,
) -> Network:
    """Five 3x3 convolutions (64, 64, 128/2, 128, 128), two linear layers, BN before every ReLU (docs/explanation/algorithms.md 2.1)."""
    narrow, wide, hidden = (max(1, round(width * n)) for n in (64, 128, 512))
    channels, height, _ = input_shape
    plan = [(narrow, 1), (narrow, 1), (wide, 2), (wide, 1), (wide, last_conv_stride)]
    layers = normalize_layers(mean, std)
    for channels_out, stride in plan:
        layers += conv_layers(channels, channels_out, 3, stride, 1, batch_norm=True)
        channels, height = channels_out, (height - 1) // stride + 1
    layers += [nn.Flatten(), *_linear(channels * height * height, hidden, batch_norm=True), nn.Linear(hidden, num_classes)]
    return Network(layers, input_shape, num_classes)


def conv_small(
    input_shape: tuple[int, int, int],
    num_classes: int,
    mean: Sequence[float],
    std: Sequence[float],
    width: float = 1.0,
    batch_norm: bool = True,
) -> Network:
    """Two strided convolutions (16, 32) and two linear layers (100): for CPUs and tests."""
    first, second, hidden = (max(1, round(width * n)) for n in (16, 32, 100))
    channels, height, _ = input_shape
    layers = normalize_layers(mean, std)
    for channels_out in (first, second):
        layers += conv_layers(channels, channels_out, 4, 2, 1, batch_norm)
        channels, height = channels_out, (height - 2) // 2 + 1
    if height < 1:
        raise ValueError(f"conv-small needs images of at least 4x4 pixels, got {input_shape}")
    layers += [nn.Flatten(), *_linear(channels * height * height, hidden, batch_norm), nn.Linear(hidden, num_classes)]
    return Network(layers, input_shape, num_classes)


def mlp(
    input_shape: tuple[int, int, int],
    num_classes: int,
    mean: Sequence[float],
    std: Sequence[float],
    width: float = 1.0,
    batch_norm: bool = True,
) -> Network:
    """Two hidden layers of 100: the smallest network that is still interesting."""
    hidden = max(1, round(width * 100))
    layers = [*normalize_layers(mean, std), nn.Flatten(), *_linear(math.prod(input_shape), hidden, batch_norm)]
    return Network([*layers, *_linear(hidden, hidden, batch_norm), nn.Linear(hidden, num_classes)], input_shape, num_classes)


@torch.no_grad()
def ibp_init(network: nn.Sequential, generator: torch.Generator | None = None) -> None:
    """Weights ~ Normal(0, sqrt(2 pi) / fan_in) in every affine layer but the last, which keeps PyTorch's default."""
    affine = [m for m in network.modules() if isinstance(m, nn.Conv2d | nn.Linear)]
    for layer in affine[:-1]:
        fan_in = layer.weight[0].numel()
        layer.weight.normal_(0.0, math.sqrt(2 * math.pi) / fan_in, generator=generator)


def parameter_count(network: nn.Module) -> int:
    return sum(p.numel() for p in network.parameters() if p.requires_grad)
