"""Backward bounds of single convolution neurons on their receptive window, 3 to 8 times cheaper than on whole images.

Every row is one (sample, neuron) pair with both signs at once: plane 0 lower-bounds z, plane 1 lower-bounds -z. Positions of a
window outside the image get slope, intercept and input 0, so they contribute nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from cure_ray.bounds.native.affine import Affine, Shape
from cure_ray.bounds.native.compiled import Compiled
from cure_ray.bounds.native.coupled import CoupledLayer, CoupledRows
from cure_ray.bounds.native.domain import Domain
from cure_ray.bounds.native.linear import Ascent
from cure_ray.bounds.native.relaxation import LayerBounds, Relaxation
from cure_ray.bounds.native.rounding import FLOOR, reach
from cure_ray.bounds.native.vertices import Vertices, vertex_numbers
from cure_ray.threats.geometry import minimise_linear


@dataclass(frozen=True, eq=False)
class _Gathered:
    """The relaxation of one layer on the windows of the rows, each [R, h, w, C]."""

    unstable: Tensor
    upper_slope: Tensor
    upper_intercept: Tensor
    adaptive: Tensor
    bias: Tensor
    scale: Tensor | None
    ball: tuple[Tensor, ...] = ()  # lower, upper and centre on the window, and the radius [R, 1], where the layer has a ball


@dataclass(frozen=True, eq=False)
class WindowRows:
    """Rows (sample, neuron) of convolution layer k with everything they read gathered once, for any number of evaluations."""

    layers: Sequence[Affine]  # below layer k
    gathered: list[_Gathered]
    A_2RhwC: Tensor  # coefficients on the post-activations below layer k
    b_2R: Tensor
    guard_R: Tensor | None
    x_RN: Tensor
    low_RN: Tensor
    high_RN: Tensor
    inside_RN: Tensor
    domain: Domain
    gamma: float
    vertices: Vertices | None = None  # of the first layer on the windows, one sample a row

    def initial_slopes(self) -> list[Tensor]:
        """As `usual_slopes` of whole rows."""
        slopes = [g.adaptive for g in self.gathered]
        if self.vertices is not None and self.gathered[0].ball:
            slopes = [torch.where(g.unstable > 0, (g.ball[2] > 0).to(g.bias.dtype), g.adaptive) for g in self.gathered]
        return [slope.expand(2, *slope.shape).clone() for slope in slopes]

    def with_slopes(self, alphas: Sequence[Tensor]) -> list[Tensor]:
        """alphas on unstable neurons, exact slopes on stable ones."""
        return [torch.where(g.unstable > 0, a, g.adaptive) for g, a in zip(self.gathered, alphas, strict=True)]

    def evaluate(self, slopes: Sequence[Tensor], trace: bool = False) -> tuple[Tensor, list[Tensor]]:
        """Lower bounds [2, R] of z and -z, and with `trace` their gradients in the slopes."""
        A, b_2R = self.A_2RhwC, self.b_2R
        rows = A.shape[1]
        kept: list[Tensor] = []
        concave: Tensor | None = None
        for i in range(len(self.layers) - 1, -1, -1):
            g = self.gathered[i]
            if trace:
                kept.append(A)
            negative = A.clamp_max(0)
            positive = A - negative
            if i == 0 and self.vertices is not None:
                concave = negative * g.unstable
                b_2R = b_2R + self._concave(concave)
                A = (negative - concave).mul_(g.upper_slope).addcmul_(positive, slopes[i])
            else:
                b_2R = b_2R + (negative * g.upper_intercept).flatten(2).sum(-1)
                A = negative.mul_(g.upper_slope).addcmul_(positive, slopes[i])
            b_2R = b_2R + (A * g.bias).flatten(2).sum(-1)
            if g.scale is not None:
                layer = self.layers[i]
                sizes_2R = (A.abs() * g.scale).flatten(2).sum(-1) + layer.floor * g.scale.flatten(1).sum(-1)
                b_2R = b_2R - (4 * self.gamma + layer.lost) * sizes_2R
            A = self.layers[i].transpose_window(A.flatten(0, 1))
            A = A.reshape(2, rows, *A.shape[1:])
        window = A.shape[2:]
        value_2R, offset_2RN, mixed = self._minimise(A.flatten(2), concave, trace and len(self.layers) > 1)
        value_2R = value_2R + b_2R
        if not trace:
            return value_2R, []
        kept.reverse()
        point = ((self.x_RN + offset_2RN) * self.inside_RN).reshape(2 * rows, *window)
        return value_2R, self._gradients(kept, slopes, point, mixed)

    def _concave(self, concave: Tensor) -> Tensor:
        """What the ReLUs that keep their coefficients are worth at the images, less what rounding may add, [2, R]."""
        assert self.vertices is not None
        g, layer, flat_2RN = self.gathered[0], self.layers[0], concave.flatten(2)
        value_2R = (flat_2RN * self.vertices.rest_BN).sum(-1)
        if g.scale is None:
            return value_2R
        scale_RN = g.scale.flatten(1)
        sizes_2R = (flat_2RN.abs() * scale_RN).sum(-1) + layer.floor * scale_RN.sum(-1)
        return value_2R - (16 * self.gamma + 4 * layer.lost) * sizes_2R

    def _gradients(self, kept: Sequence[Tensor], slopes: Sequence[Tensor], point: Tensor, mixed: Tensor | None) -> list[Tensor]:
        gradients = []
        for i, layer in enumerate(self.layers):
            g, A = self.gathered[i], kept[i]
            z = layer.linear_window(point, A.shape[2], A.shape[3]).reshape(A.shape) + g.bias
            gradients.append((A.clamp_min(0) * z).mul_(g.unstable))
            if i + 1 < len(self.layers):
                upper = torch.addcmul(g.upper_intercept, g.upper_slope, z)
                if i == 0 and mixed is not None:
                    upper = torch.where(g.unstable > 0, mixed.reshape(z.shape), upper)
                point = torch.where(A >= 0, slopes[i] * z, upper).flatten(0, 1)
        return gradients

    def coupled(self) -> CoupledRows:
        """The same rows for coupled bounds, flat: [2, R, N]."""
        shapes = [g.bias.shape[1:] for g in self.gathered]
        views = []
        for layer, g in zip(self.layers, self.gathered, strict=True):
            lower, upper, centre, radius = g.ball
            unstable, adaptive, slope, bias = (t.flatten(1) for t in (g.unstable, g.adaptive, g.upper_slope, g.bias))
            rounding = None if g.scale is None else (g.scale.flatten(1), layer.lost, layer.floor)
            lower, upper, centre = (t.flatten(1) for t in (lower, upper, centre))
            carried = layer.carried_channels()
            carried = None if carried is None else carried.repeat(g.bias[0, ..., 0].numel())
            views.append(CoupledLayer.of(lower, upper, centre, radius, (unstable > 0, adaptive, slope), bias, rounding, carried))

        def down(i: int, g_2RN: Tensor) -> Tensor:
            return self.layers[i].transpose_window(g_2RN.reshape(-1, *shapes[i])).reshape(*g_2RN.shape[:2], -1)

        def up(i: int, x_2RN: Tensor) -> Tensor:
            h, w = self.layers[i].window_below(*shapes[i][:2])
            window = x_2RN.reshape(-1, h, w, self.layers[i].in_shape[0])
            return self.layers[i].linear_window(window, *shapes[i][:2]).reshape(*x_2RN.shape[:2], -1)

        def image(A_2RN: Tensor) -> tuple[Tensor, Tensor]:
            value_2R, offset_2RN, _ = self._minimise(A_2RN)
            return value_2R, (self.x_RN + offset_2RN) * self.inside_RN

        return CoupledRows(views, self.A_2RhwC.flatten(2), self.b_2R, down, up, image, self.gamma)

    def _minimise(self, A_2RN: Tensor, concave: Tensor | None = None, mix: bool = False) -> tuple[Tensor, Tensor, Tensor | None]:
        """The least value over the windows of the images, less what rounding may have added, and the offset of a minimiser; with
        coefficients that stay on the first layer's ReLUs and `mix` also what these give there."""
        A_2RN, mixed = A_2RN * self.inside_RN, None
        if concave is None or self.vertices is None:
            value_2R, offset_2RN = minimise_linear(
                A_2RN, self.x_RN, self.low_RN, self.high_RN, self.domain.threat, self.domain.box, self.domain.steps
            )
        else:
            fall_R2, take_R22N = self.vertices.lowest(concave.flatten(2).transpose(0, 1), A_2RN.transpose(0, 1), self.low_RN, self.high_RN)
            value_2R = (A_2RN * self.x_RN).sum(-1) + fall_R2.t()
            offset_2RN = (take_R22N[:, :, 0] - take_R22N[:, :, 1]).transpose(0, 1)
            mixed = self.vertices.mixed(take_R22N).transpose(0, 1) if mix else None
        if self.guard_R is not None:
            reach_RN = reach(self.x_RN, self.domain.threat.eps)
            value_2R = value_2R - 4 * self.gamma * (self.guard_R + (A_2RN.abs() * reach_RN).sum(-1) + FLOOR * reach_RN.sum(-1))
        return value_2R, offset_2RN, mixed

    def optimise(self, iterations: int, rate: float = 0.25, decay: float = 0.9) -> tuple[Tensor, list[Tensor]]:
        """The best value [2, R] seen and the alphas that gave it, each row with slopes of its own."""
        alphas = self.initial_slopes()
        best_2R, best = torch.full_like(self.b_2R, -torch.inf), [a.clone() for a in alphas]
        ascent = Ascent(alphas)
        for t in range(iterations):
            value_2R, gradients = self.evaluate(alphas, trace=t + 1 < iterations)
            better = value_2R > best_2R
            best_2R = torch.where(better, value_2R, best_2R)
            for kept, alpha in zip(best, alphas, strict=True):
                kept.copy_(torch.where(better[..., None, None, None], alpha, kept))
            if t + 1 < iterations:
                ascent.step(alphas, gradients, rate * decay**t)
                for alpha in alphas:
                    alpha.clamp_(0, 1)
        return best_2R, best


@dataclass(frozen=True)
class _Window:
    """Where the windows of all rows lie in one layer: top left corner = index * step - shift, size h x w."""

    h: int
    w: int
    step: tuple[int, int]
    shift: tuple[int, int]

    def below(self, layer: Affine) -> "_Window":
        (sy, sx), (py, px) = layer.stride, layer.padding
        step = (self.step[0] * sy, self.step[1] * sx)
        shift = (self.shift[0] * sy + py, self.shift[1] * sx + px)
        return _Window(*layer.window_below(self.h, self.w), step, shift)


def window_sizes(net: Compiled, k: int) -> list[tuple[int, int]]:
    """Size of the window of a neuron of convolution layer k in the outputs of layers k-1, ..., 0 and in the image."""
    window = _Window(1, 1, (1, 1), (0, 0))
    sizes = []
    for i in range(k, -1, -1):
        window = window.below(net.layers[i])
        sizes.append((window.h, window.w))
    return sizes


def windows_pay(net: Compiled, k: int) -> bool:
    """Whether the windows stay clearly smaller than the images they lie in."""
    if not net.layers[k].is_conv:
        return False
    shapes = [net.layers[i].in_shape for i in range(k, -1, -1)]
    sizes = zip(window_sizes(net, k), shapes, strict=True)
    return all(h * w < 0.8 * shape[1] * shape[2] for (h, w), shape in sizes)


def vertex_elements(net: Compiled, k: int) -> int:
    """What the vertices of an l1 ball add for one row of convolution layer k on its window."""
    h, w = window_sizes(net, k)[-2]
    return vertex_numbers(net.layers[0], h * w)


def row_elements(net: Compiled, k: int) -> int:
    """Coefficients one row of layer k needs in all layers below: the unit of the memory and work estimates."""
    if windows_pay(net, k):
        sizes = window_sizes(net, k)
        return sum(h * w * net.layers[i].in_shape[0] for i, (h, w) in zip(range(k, -1, -1), sizes, strict=True))
    return sum(net.layers[i].inputs for i in range(k + 1))


def gather_rows(
    net: Compiled,
    k: int,
    relaxations: Sequence[Relaxation],
    bounds_k: LayerBounds,
    domain: Domain,
    sample_R: Tensor,
    neuron_R: Tensor,
) -> WindowRows:
    layer = net.layers[k]
    C, _, W = layer.out_shape
    channel_R, column_R, line_R = neuron_R % C, neuron_R // C % W, neuron_R // (C * W)

    def cut(window: _Window, images: Sequence[Tensor], shape: Shape, sample: Tensor) -> tuple[Tensor, ...]:
        """The windows of flat [B, N] images of one shape, each [R, h, w, C]."""
        C, H, W = shape
        stacked = torch.cat([t.reshape(-1, H, W, C) for t in images], 3)
        last = [(n - 1) * s for n, s in zip(layer.out_shape[1:], window.step, strict=True)]
        above, left = window.shift
        below = max(0, last[0] - above + window.h - H)
        right = max(0, last[1] - left + window.w - W)
        padded = F.pad(stacked, (0, 0, left, right, above, below))
        height, width, depth = padded.shape[1:]
        lines = line_R.unsqueeze(1) * window.step[0] + torch.arange(window.h, device=line_R.device)
        columns = column_R.unsqueeze(1) * window.step[1] + torch.arange(window.w, device=line_R.device)
        index = ((sample.view(-1, 1, 1) * height + lines.unsqueeze(2)) * width + columns.unsqueeze(1)).flatten()
        picked = padded.view(-1, depth).index_select(0, index).view(-1, window.h, window.w, depth)
        return picked.split(C, 3)

    window = _Window(1, 1, (1, 1), (0, 0)).below(layer)
    vertices: Vertices | None = None
    first = torch.zeros_like(sample_R)
    gathered: list[_Gathered] = []
    for i in range(k - 1, -1, -1):
        r, below = relaxations[i], net.layers[i]
        images = [r.unstable_BN.to(r.active_BN.dtype), r.upper_slope_BN, r.upper_intercept_BN, r.adaptive_BN]
        images += [r.scale_BN] if net.gamma else []
        images += [r.lower_BN, r.upper_BN, domain.balls[i].centre_BN] if domain.balls else []
        parts = cut(window, images, below.out_shape, sample_R)
        (bias,) = cut(window, [below.bias_N.unsqueeze(0)], below.out_shape, first)
        ball = (*parts[-3:], domain.balls[i].radius_B1[sample_R]) if domain.balls else ()
        gathered.append(_Gathered(parts[0], parts[1], parts[2], parts[3], bias, parts[4] if net.gamma else None, ball))
        if i == 0 and domain.has_vertices:
            (at_image,) = cut(window, [below(domain.x_BN)], below.out_shape, sample_R)
            vertices = Vertices.around(below, at_image.flatten(1), domain.threat.eps, below.window_below(window.h, window.w), (0, 0))
        window = window.below(below)
    gathered.reverse()
    images = [domain.x_BN, domain.low_BN, domain.high_BN, torch.ones_like(domain.x_BN)]
    x, low, high, inside = (t.flatten(1) for t in cut(window, images, net.in_shape, sample_R))
    A = layer.weight[channel_R].permute(0, 2, 3, 1)
    b_R = layer.bias_N[neuron_R]
    guard_R = bounds_k.scale_BN[sample_R, neuron_R] if net.gamma else None
    return WindowRows(
        net.layers[:k], gathered, torch.stack([A, -A]), torch.stack([b_R, -b_R]), guard_R, x, low, high, inside, domain, net.gamma,
        vertices,
    )  # fmt: skip
