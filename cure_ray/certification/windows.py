"""IBP of a patch through its window: a k x k patch changes only a small part of each feature map, the rest is computed once (11).

float64 throughout. Clean activations carry an a-priori bound on their own rounding error, and every affine layer adds its slack,
so the bounds hold in exact arithmetic; up to that rounding they are those of propagating the whole image.

Shapes: B images, windows [B, h, w, C]; maps are height, width, channel, as everywhere in the native engine.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from cure_ray.bounds.native.affine import Affine
from cure_ray.bounds.native.compiled import Compiled
from cure_ray.bounds.native.relaxation import margin_rows, start_rows
from cure_ray.errors import UserError

Span = tuple[int, int]  # rows or columns, half open


@dataclass(frozen=True, eq=False)
class CleanLayer:
    """The input of one affine layer for the unpatched images, and its output before the ReLU when that layer is dense."""

    layer: Affine
    input_BN: Tensor
    output_BN: Tensor
    error_N: Tensor  # bounds |computed - exact| of the input
    slack_N: Tensor  # what rounding in this layer can hide, for any image of [0, 1]


@dataclass(frozen=True, eq=False)
class CleanPass:
    """Everything that does not depend on where the patch is."""

    layers: tuple[CleanLayer, ...]
    rows_BSN: Tensor  # elided last layer: f_y - f_i on its inputs
    constant_BS: Tensor
    slack_BS: Tensor
    error_N: Tensor  # bounds |computed - exact| of what the last layer reads

    def select(self, index: Tensor) -> "CleanPass":
        kept = tuple(CleanLayer(c.layer, c.input_BN[index], c.output_BN[index], c.error_N, c.slack_N) for c in self.layers)
        return CleanPass(kept, self.rows_BSN[index], self.constant_BS[index], self.slack_BS[index], self.error_N)


def _gamma(layer: Affine) -> float:
    """gamma_n = n u / (1 - n u), doubled, for the sums of this layer alone: the a-priori bound would pile up the widest one's."""
    return 2 * (layer.weight[0].numel() + 64) * 2.0**-53


@torch.no_grad()
def clean_pass(net: Compiled, x_BN: Tensor, y_B: Tensor) -> CleanPass:
    """The clean activations with error bounds. The magnitudes behind the slacks are those of the largest box, [0, 1]^d."""
    if net.hidden == 0:
        raise UserError("patch certification needs a network with at least one hidden layer")
    layers = list[CleanLayer]()
    low, high = torch.zeros(1, net.layers[0].inputs).to(x_BN), torch.ones(1, net.layers[0].inputs).to(x_BN)
    error_1N, value_BN = torch.zeros_like(low), x_BN
    for layer in net.layers[:-1]:
        scale_1N = layer.magnitude(torch.maximum(low.abs(), high.abs())) + layer.bias_scale_N
        slack_1N = 16 * _gamma(layer) * scale_1N
        output_BN = layer(value_BN)
        layers.append(CleanLayer(layer, value_BN, output_BN, error_1N[0], slack_1N[0]))
        error_1N = layer.linear(error_1N, layer.weight_abs) + slack_1N
        centre, radius = layer((low + high) / 2), layer.linear((high - low) / 2, layer.weight_abs) + slack_1N
        low, high, value_BN = (layer.activated(t) for t in (centre - radius, centre + radius, output_BN))
    C_BSK = margin_rows(y_B, net.classes, x_BN.dtype)
    rows_BSN, constant_BS, guard_BS = start_rows(net, C_BSK)
    last = net.layers[-1]
    magnitude_1K = last.magnitude(torch.maximum(low.abs(), high.abs()))
    slack_BS = 16 * _gamma(last) * (guard_BS + C_BSK.abs() @ magnitude_1K[0])
    return CleanPass(tuple(layers), rows_BSN, constant_BS, slack_BS, error_1N[0])


def reached(span: Span, kernel: int, stride: int, padding: int, size: int) -> Span:
    """The outputs of a convolution that read any of these inputs."""
    first = -((kernel - 1 - span[0] - padding) // stride)  # ceil((span[0] + padding - kernel + 1) / stride)
    return max(0, first), min(size, (span[1] - 1 + padding) // stride + 1)


def _crop(map_BHWC: Tensor, rows: Span, columns: Span) -> Tensor:
    """A window that may reach over the border, where the padding is 0."""
    _, H, W, _ = map_BHWC.shape
    inside = map_BHWC[:, max(rows[0], 0) : min(rows[1], H), max(columns[0], 0) : min(columns[1], W)]
    pad = (0, 0, max(-columns[0], 0), max(columns[1] - W, 0), max(-rows[0], 0), max(rows[1] - H, 0))
    return F.pad(inside, pad) if any(pad) else inside.clone()


def _overlay(crop: Tensor, window: Tensor, rows: Span, columns: Span, top: int, left: int) -> None:
    """Put the part of a changed window that the crop (whose corner is top, left) sees into it."""
    height, width = crop.shape[1:3]
    r0, r1 = max(rows[0], top), min(rows[1], top + height)
    c0, c1 = max(columns[0], left), min(columns[1], left + width)
    crop[:, r0 - top : r1 - top, c0 - left : c1 - left] = window[:, r0 - rows[0] : r1 - rows[0], c0 - columns[0] : c1 - columns[0]]


def _convolve(crop_BhwC: Tensor, weight: Tensor, stride: tuple[int, int]) -> Tensor:
    """A small convolution without padding as one matrix product: float64 convolutions are slow on CPUs."""
    kh, kw = weight.shape[2:]
    patches = crop_BhwC.unfold(1, kh, stride[0]).unfold(2, kw, stride[1])  # [B, h, w, C, kh, kw]
    B, h, w = patches.shape[:3]
    return (patches.reshape(B * h * w, -1) @ weight.reshape(len(weight), -1).t()).view(B, h, w, -1)


def _relu(c: Tensor, r: Tensor, carried: Tensor | None) -> tuple[Tensor, Tensor]:
    low, high = (c - r).clamp_min_(0), (c + r).clamp_min_(0)
    centre, radius = (low + high) / 2, (high - low) / 2
    return (centre, radius) if carried is None else (torch.where(carried, c, centre), torch.where(carried, r, radius))


@dataclass(frozen=True)
class _Window:
    c: Tensor
    r: Tensor
    rows: Span
    columns: Span


def _through_convolution(clean: CleanLayer, window: _Window) -> _Window:
    layer = clean.layer
    (sy, sx), (py, px), (ky, kx) = layer.stride, layer.padding, layer.kernel
    C, H, W = layer.in_shape
    channels, out_H, out_W = layer.out_shape
    rows, columns = reached(window.rows, ky, sy, py, out_H), reached(window.columns, kx, sx, px, out_W)
    if window.c.numel() == 0 or rows[0] >= rows[1] or columns[0] >= columns[1]:  # pixels that no output reads
        empty = window.c.new_zeros(len(window.c), 0, 0, channels)
        return _Window(empty, empty, (0, 0), (0, 0))
    top, left = rows[0] * sy - py, columns[0] * sx - px
    down, right = top + (rows[1] - rows[0] - 1) * sy + ky, left + (columns[1] - columns[0] - 1) * sx + kx
    c = _crop(clean.input_BN.view(-1, H, W, C), (top, down), (left, right))
    r = _crop(clean.error_N.view(1, H, W, C), (top, down), (left, right)).repeat(len(c), 1, 1, 1)
    _overlay(c, window.c, window.rows, window.columns, top, left)
    _overlay(r, window.r, window.rows, window.columns, top, left)
    part = (slice(rows[0], rows[1]), slice(columns[0], columns[1]))
    bias, slack = (m.view(out_H, out_W, channels)[part] for m in (layer.bias_N, clean.slack_N))
    centre, radius = _convolve(c, layer.weight, layer.stride) + bias, _convolve(r, layer.weight_abs, layer.stride) + slack
    return _Window(*_relu(centre, radius, layer.carried_channels()), rows, columns)


def _into_dense(clean: CleanLayer, window: _Window) -> tuple[Tensor, Tensor]:
    """The first fully connected layer: only the changed inputs are multiplied."""
    layer = clean.layer
    C, H, W = layer.in_shape
    part = (slice(None), slice(*window.rows), slice(*window.columns))
    before = clean.input_BN.view(-1, H, W, C)[part]
    weight = layer.weight.view(-1, H, W, C)[part].flatten(1)
    c = clean.output_BN + (window.c - before).flatten(1) @ weight.t()
    everywhere = layer.weight_abs @ clean.error_N + clean.slack_N
    return _relu(c, window.r.flatten(1) @ weight.abs().t() + everywhere, layer.carried_N)


@torch.no_grad()
def patch_margins(clean: CleanPass, corner: tuple[int, int], height: int, width: int) -> Tensor:
    """[B, K-1] lower bounds of the margins when a height x width patch at this row and column takes any values in [0, 1]."""
    row, column = corner
    first = clean.layers[0].layer
    shape = (len(clean.layers[0].input_BN), height, width, first.in_shape[0])
    half = clean.layers[0].input_BN.new_full(shape, 0.5)
    window = _Window(half, half, (row, row + height), (column, column + width))
    index = 0
    while index < len(clean.layers) and clean.layers[index].layer.is_conv:
        window = _through_convolution(clean.layers[index], window)
        index += 1
    if index == len(clean.layers):
        return _margins(clean, *_whole(clean, window))
    c, r = _into_dense(clean.layers[index], window)
    for dense in clean.layers[index + 1 :]:
        c, r = _relu(dense.layer(c), dense.layer.linear(r, dense.layer.weight_abs) + dense.slack_N, dense.layer.carried_N)
    return _margins(clean, c, r)


def _whole(clean: CleanPass, window: _Window) -> tuple[Tensor, Tensor]:
    """The last convolution's maps with the changed window in them, where the logits read them directly."""
    last = clean.layers[-1]
    C, H, W = last.layer.out_shape
    c = last.layer.activated(last.output_BN).view(-1, H, W, C).clone()
    r = clean.error_N.view(1, H, W, C).repeat(len(c), 1, 1, 1)
    _overlay(c, window.c, window.rows, window.columns, 0, 0)
    _overlay(r, window.r, window.rows, window.columns, 0, 0)
    return c.flatten(1), r.flatten(1)


def _margins(clean: CleanPass, c: Tensor, r: Tensor) -> Tensor:
    """The elided last layer."""
    centre = torch.matmul(clean.rows_BSN, c.unsqueeze(2)).squeeze(2)
    return centre + clean.constant_BS - torch.matmul(clean.rows_BSN.abs(), r.unsqueeze(2)).squeeze(2) - clean.slack_BS


@torch.no_grad()
def anywhere_margins(clean: CleanPass, height: int, width: int) -> Tensor:
    """[B, K-1]: all positions at once, loose: every neuron of the first layer moves as far as the worst patch could move it."""
    first = clean.layers[0]
    layer = first.layer
    if layer.is_conv:
        ky, kx = layer.kernel
        heavy = layer.weight_abs.sum(1, keepdim=True)  # [O, 1, ky, kx], channels together
        size = (min(height, ky), min(width, kx))
        worst = F.avg_pool2d(heavy, size, 1).flatten(1).amax(1) * (size[0] * size[1])
        radius = worst.repeat(layer.outputs // len(worst))
    else:
        C, H, W = layer.in_shape
        heavy = layer.weight_abs.view(-1, H, W, C).sum(3).unsqueeze(1)
        radius = F.avg_pool2d(heavy, (height, width), 1).flatten(1).amax(1) * (height * width)
    c, r = _relu(first.output_BN, (radius + first.slack_N).expand_as(first.output_BN), layer.carried_N)
    for below in clean.layers[1:]:
        c, r = _relu(below.layer(c), below.layer.linear(r, below.layer.weight_abs) + below.slack_N, below.layer.carried_N)
    return _margins(clean, c, r)


def positions(image: Sequence[int], height: int, width: int) -> list[tuple[int, int]]:
    return [(i, j) for i in range(image[0] - height + 1) for j in range(image[1] - width + 1)]
