"""What a box of transformation parameters can do to an image: interval coordinates and interval bilinear weights (10.2, 10.3).

The weights depend on the parameters alone: they are built once per parameter box, as a sparse matrix, and shared by all images
and channels. Everything is float64, and every pixel's interval is widened by a bound on what rounding can have hidden, so the
interval image holds every exactly transformed image. A degenerate box is a concrete transformation.
"""

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cure_ray.threats.transformations import Step

Ranges = Sequence[tuple[float, float]]
_ULP = 2.0**-53


@dataclass(frozen=True, eq=False)
class Interval:
    low: Tensor
    high: Tensor

    def plus(self, other: "Interval") -> "Interval":
        return Interval(self.low + other.low, self.high + other.high)

    def minus(self, other: "Interval") -> "Interval":
        return Interval(self.low - other.high, self.high - other.low)

    def times(self, other: "Interval") -> "Interval":
        ends = torch.stack(torch.broadcast_tensors(*(a * b for a in (self.low, self.high) for b in (other.low, other.high))))
        return Interval(ends.amin(0), ends.amax(0))

    def over(self, other: "Interval") -> "Interval":
        return self.times(Interval(1 / other.high, 1 / other.low))  # other > 0

    def negative(self) -> "Interval":
        return Interval(-self.high, -self.low)

    def magnitude(self) -> Tensor:
        """The largest absolute value over the pixels, [R, 1]."""
        return torch.maximum(self.low.abs(), self.high.abs()).amax(1, keepdim=True)


def _cosine(t: Interval) -> Interval:
    """On [-pi/2, pi/2] the cosine is 1 at 0 and falls to both sides."""
    ends = torch.stack([t.low.cos(), t.high.cos()])
    straddles = (t.low <= 0) & (t.high >= 0)
    return Interval(ends.amin(0), torch.where(straddles, torch.ones_like(t.low), ends.amax(0)))


def _backwards(step: Step, t: Interval, x: Interval, y: Interval) -> tuple[Interval, Interval]:
    """Where the content of (x, y) came from: the inverse of one spatial step."""
    if step.kind == "R":
        cos, sin = _cosine(t), Interval(t.low.sin(), t.high.sin())
        return x.times(cos).plus(y.times(sin)), y.times(cos).minus(x.times(sin))
    if step.kind == "Tu":
        return x.minus(t), y
    if step.kind == "Tv":
        return x, y.minus(t)
    if step.kind == "Sc":
        return x.over(t), y.over(t)
    return x.minus(y.times(t)), y  # shear


def _axis_weights(position: Interval, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Candidate source lines of every pixel and their weight intervals: index, low, high, each [R, P, K].

    A line j can matter only if position.low - 1 < j < position.high + 1; whatever lies outside the image is 0.
    """
    low, high = position.low.clamp(-1, size), position.high.clamp(-1, size)  # beyond one line outside nothing changes
    first = low.floor()
    count = int((high.ceil() - first).amax()) + 1
    line = first.unsqueeze(2) + torch.arange(count, dtype=low.dtype, device=low.device)
    to_low, to_high = line - low.unsqueeze(2), high.unsqueeze(2) - line
    near = torch.maximum(-to_low, -to_high).clamp_min_(0)  # 0 where the interval straddles the line
    far = torch.maximum(to_low.abs_(), to_high.abs_())
    inside = (line >= 0) & (line < size)
    zero = torch.zeros_like(line)
    weight_low, weight_high = ((1 - d).clamp_min_(0) for d in (far, near))
    return line, torch.where(inside, weight_low, zero), torch.where(inside, weight_high, zero)


@dataclass(frozen=True, eq=False)
class Warp:
    """The interval map of one parameter box: two sparse matrices of one pattern, the pixel-wise steps, and the widening."""

    low: Tensor | None  # [H*W, H*W] sparse; None: no spatial step
    high: Tensor | None
    pixelwise: tuple[tuple[str, float, float], ...]
    widening: float

    def apply(self, pixels_PN: Tensor) -> tuple[Tensor, Tensor]:
        """Interval pixels [H*W, N] of every image column, inside [0, 1]; pixels are not negative."""
        low, high = (pixels_PN if m is None else m @ pixels_PN for m in (self.low, self.high))
        low, high = (low - self.widening).clamp_(0, 1), (high + self.widening).clamp_(0, 1)
        for kind, t_low, t_high in self.pixelwise:
            if kind == "C":
                low, high = low * t_low, high * t_high
            else:
                low, high = low + t_low, high + t_high
            low, high = (low - 4 * _ULP).clamp_(0, 1), (high + 4 * _ULP).clamp_(0, 1)
        return low, high


@torch.no_grad()
def build_warps(steps: Sequence[Step], boxes: Sequence[Ranges], height: int, width: int, device: torch.device) -> list[Warp]:
    """The warps of several parameter boxes at once."""
    spatial = [i for i, step in enumerate(steps) if step.kind not in ("C", "B")]
    pixelwise = [tuple((steps[i].kind, *box[i]) for i in range(len(steps)) if i not in spatial) for box in boxes]
    if not spatial:
        return [Warp(None, None, p, 0.0) for p in pixelwise]
    x, y, magnitude_R1 = _coordinates(steps, spatial, boxes, height, width, device)
    column, x_low, x_high = _axis_weights(Interval(x.low + (width - 1) / 2, x.high + (width - 1) / 2), width)
    row, y_low, y_high = _axis_weights(Interval((height - 1) / 2 - y.high, (height - 1) / 2 - y.low), height)
    high = (y_high.unsqueeze(3) * x_high.unsqueeze(2)).flatten(2)  # [R, P, Ky*Kx]
    low = (y_low.unsqueeze(3) * x_low.unsqueeze(2)).flatten(2)
    source = (row.unsqueeze(3) * width + column.unsqueeze(2)).flatten(2)
    kept = high > 0
    # An entry's weight is off by at most about 64 ulp of the largest coordinate met on the way, and as many entries add up as
    # the pixel with most of them has. Both shrink with the parameter box, so nested boxes stay nested.
    entries_RP = kept.sum(2)
    widening_R = (256 * _ULP * (1 + magnitude_R1.squeeze(1)) * (1 + entries_RP.amax(1))).tolist()
    warps, size = list[Warp](), height * width
    for r, pixel_steps in enumerate(pixelwise):
        mask = kept[r]
        start = torch.zeros(size + 1, dtype=torch.int64, device=device)
        start[1:] = entries_RP[r].cumsum(0)
        lines = source[r][mask].long()
        pair = [_sparse(start, lines, w[r][mask], size) for w in (low, high)]
        warps.append(Warp(pair[0], pair[1], pixel_steps, widening_R[r]))
    return warps


def _sparse(start: Tensor, lines: Tensor, values: Tensor, size: int) -> Tensor:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Sparse CSR tensor support is in beta")
        return torch.sparse_csr_tensor(start, lines, values, (size, size), check_invariants=False)


def _coordinates(
    steps: Sequence[Step], spatial: Sequence[int], boxes: Sequence[Ranges], height: int, width: int, device: torch.device
) -> tuple[Interval, Interval, Tensor]:
    """Source coordinates [R, P] of every output pixel, x right and y up from the centre, and the largest magnitude met."""
    X = torch.arange(width, dtype=torch.float64, device=device) - (width - 1) / 2
    Y = (height - 1) / 2 - torch.arange(height, dtype=torch.float64, device=device)
    x_RP = X.repeat(height).expand(len(boxes), -1)
    y_RP = Y.repeat_interleave(width).expand(len(boxes), -1)
    x, y = Interval(x_RP, x_RP), Interval(y_RP, y_RP)
    magnitude_R1 = torch.maximum(x.magnitude(), y.magnitude())
    for i in reversed(spatial):
        ends = torch.tensor([box[i] for box in boxes], dtype=torch.float64, device=device)
        t = Interval(ends[:, :1], ends[:, 1:])
        x, y = _backwards(steps[i], t, x, y)
        for value in (x, y):
            magnitude_R1 = torch.maximum(magnitude_R1, value.magnitude())
    return x, y, magnitude_R1


@torch.no_grad()
def transformed(steps: Sequence[Step], parameters: Sequence[float], x_BCHW: Tensor) -> Tensor:
    """The concrete transformation of images, in float64; within rounding the point every enclosing interval image holds."""
    B, C, H, W = x_BCHW.shape
    (warp,) = build_warps(steps, [[(t, t) for t in parameters]], H, W, x_BCHW.device)
    exact = Warp(warp.low, warp.high, warp.pixelwise, 0.0)
    low, high = exact.apply(pixel_columns(x_BCHW).flatten(1))
    return ((low + high) / 2).clamp(0, 1).view(H, W, B, C).permute(2, 3, 0, 1)


def pixel_columns(x_BCHW: Tensor) -> Tensor:
    """[H*W, B, C] float64: one column per image and channel, as warps read them."""
    B, C, H, W = x_BCHW.shape
    return x_BCHW.to(torch.float64).permute(2, 3, 0, 1).reshape(H * W, B, C)


def rows_of(columns_PN: Tensor, channels: int) -> Tensor:
    """[B, H*W*C], the flat order of the native engine, from what `Warp.apply` returns."""
    return columns_PN.view(len(columns_PN), -1, channels).permute(1, 0, 2).reshape(-1, len(columns_PN) * channels)


def effect(step: Step, width: float, height_px: int, width_px: int) -> float:
    """Roughly how far a parameter interval of this width moves a pixel near the border, or changes its value: which to split."""
    half = max(height_px, width_px) / 2
    return width * half if step.kind in ("R", "Sc", "Sh") else width


def describe(steps: Sequence[Step], parameters: Sequence[float]) -> str:
    shown = [math.degrees(t) if s.kind == "R" else t for s, t in zip(steps, parameters, strict=True)]
    return ", ".join(f"{s.kind}={t:.6g}" for s, t in zip(steps, shown, strict=True))
