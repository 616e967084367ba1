"""Interval images that follow the parameters: a line per pixel and a small rest, where a box would forget that all pixels move together.

A parameter box is cut into parts with centres `tau` in [-1, 1]^K. Every transformed image of part j lies in its interval image
[L_j, U_j], so with any slopes `s` it is `s.tau_j` plus something between min_j (L_j - s.tau_j) and max_j (U_j - s.tau_j). Slopes times any
point of [-1, 1]^K, plus that rest, therefore hold the images of all parts. A linear function A over this set is bounded exactly, by |A.s_k|
per parameter where a box has |A|.|s_k|.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from cure_ray.bounds.engine import Stage
from cure_ray.bounds.native.affine import Affine
from cure_ray.bounds.native.engine import NativeEngine
from cure_ray.bounds.native.problem import NativeProblem
from cure_ray.certification.boxes import ANY_BOX, BoxDomain
from cure_ray.certification.transformed import TransformedImages
from cure_ray.threats.box import UNIT
from cure_ray.threats.transformations import Cell, Transformation
from cure_ray.threats.warps import Ranges, build_warps, effect

PARTS = 64  # interval images per cell at most
FINE = 0.06  # pixels: smaller pieces no longer shrink the rest much
CHUNK = 32  # images whose parts are held at once
WORTH = 0.8  # a pixel follows the parameters if that shrinks its rest to less than this share
_ULP = 2.0**-53


@dataclass(frozen=True, eq=False)
class SlopedDomain(BoxDomain):
    """A box, plus slopes times any point of [-1, 1]^K. Bounds by IBP and CROWN-IBP only: other stages read the box alone."""

    slope_BKN: Tensor

    def select(self, index: Tensor) -> "SlopedDomain":
        return replace(self, x_BN=self.x_BN[index], low_BN=self.low_BN[index], high_BN=self.high_BN[index], slope_BKN=self.slope_BKN[index])

    def to(self, dtype: torch.dtype) -> "SlopedDomain":
        return replace(
            self, x_BN=self.x_BN.to(dtype), low_BN=self.low_BN.to(dtype), high_BN=self.high_BN.to(dtype), slope_BKN=self.slope_BKN.to(dtype)
        )

    def minimise(self, A_BSN: Tensor, steps: int | None = None) -> tuple[Tensor, Tensor]:
        value_BS, offset = super().minimise(A_BSN, steps)
        return value_BS - torch.matmul(A_BSN, self.slope_BKN.transpose(1, 2)).abs().sum(2), offset

    def spread(self, layer: Affine) -> Tensor:
        moved = layer.linear(self.slope_BKN.flatten(0, 1)).view(len(self.x_BN), -1, layer.outputs)
        return super().spread(layer) + moved.abs().sum(1)

    @property
    def reach(self) -> Tensor:
        return self.x_BN.abs() + self.high_BN.abs() + self.slope_BKN.abs().sum(1) + 1


def sloped_margins(engine: NativeEngine, low_BN: Tensor, high_BN: Tensor, slope_BKN: Tensor, y_B: Tensor, stage: Stage) -> Tensor:
    """[B, K-1] as `box_margins`, over the box plus the slopes."""
    assert stage in ("ibp", "crown-ibp"), stage
    domain = SlopedDomain(low_BN, torch.zeros_like(low_BN), high_BN - low_BN, ANY_BOX, UNIT, slope_BKN)
    usable_B = torch.isfinite(low_BN).all(1) & torch.isfinite(high_BN).all(1) & torch.isfinite(slope_BKN).flatten(1).all(1)
    assert engine.decide is not None
    return engine.margins(NativeProblem(domain, y_B, usable_B, engine.decide), stage)


def pieces(transformation: Transformation, ranges: Ranges, size: tuple[int, int], most: int = PARTS) -> list[int]:
    """Into how many equal pieces to cut each parameter: the one that moves pixels most first, until they are fine or many."""
    counts = [1] * len(ranges)
    while 2 * math.prod(counts) <= most:
        moved = [effect(s, b - a, *size) / n for s, (a, b), n in zip(transformation.steps, ranges, counts, strict=True)]
        axis = max(range(len(counts)), key=moved.__getitem__)
        if moved[axis] <= FINE:
            break
        counts[axis] *= 2
    return counts


def parts_of(ranges: Ranges, counts: Sequence[int]) -> tuple[list[list[tuple[float, float]]], list[tuple[float, ...]]]:
    """The parts, which share their edges and so tile the box; and their centres, every parameter from -1 to 1."""
    edges = [[low + (high - low) * i / n for i in range(n)] + [high] for (low, high), n in zip(ranges, counts, strict=True)]
    boxes = [list(box) for box in itertools.product(*(list(itertools.pairwise(line)) for line in edges))]
    centres = list(itertools.product(*([(2 * i + 1) / n - 1 for i in range(n)] for n in counts)))
    return boxes, centres


@torch.no_grad()
def sloped_images(images: TransformedImages, cell: Cell, index: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The box [B, N], lower and upper end, and the slopes [B, K, N] that hold these images under every parameter of the cell."""
    transformation, device = images.transformation, images.engine.device
    ranges = cell.ranges(transformation)
    boxes, centres = parts_of(ranges, pieces(transformation, ranges, images.size))
    warps = build_warps(transformation.steps, boxes, *images.size, device)
    tau_JK = torch.tensor(centres, dtype=torch.float64, device=device)
    found = [_follow([images.boxes(warp, some) for warp in warps], tau_JK) for some in index.split(CHUNK)]
    low, high, slope = (torch.cat(parts) for parts in zip(*found, strict=True))
    return low, high, slope


def _follow(parts: Sequence[tuple[Tensor, Tensor]], tau_JK: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    low_JBN, high_JBN = (torch.stack(ends) for ends in zip(*parts, strict=True))
    weight_JK = tau_JK / tau_JK.square().sum(0).clamp_min(1e-12)  # least squares, parameter by parameter: the parts form a grid
    slope_BKN = torch.einsum("jk,jbn->bkn", weight_JK, (low_JBN + high_JBN) / 2)
    line_JBN = torch.einsum("jk,bkn->jbn", tau_JK, slope_BKN)
    # A handful of sums of numbers of this size are off by less.
    widening_BN = 64 * len(tau_JK[0]) * _ULP * (1 + slope_BKN.abs().sum(1))
    rest = (low_JBN - line_JBN).amin(0) - widening_BN, (high_JBN - line_JBN).amax(0) + widening_BN
    box = low_JBN.amin(0), high_JBN.amax(0)
    follows_BN = rest[1] - rest[0] < WORTH * (box[1] - box[0])
    low_BN, high_BN = (torch.where(follows_BN, end, whole) for end, whole in zip(rest, box, strict=True))
    return low_BN, high_BN, slope_BKN * follows_BN.unsqueeze(1)
