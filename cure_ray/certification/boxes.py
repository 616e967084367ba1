"""Margins of arbitrary boxes of images by the native engine: what geometric and patch certification ask of it.

float32 searches and float64 decides, rounding slack included (docs/explanation/soundness.md), exactly as for l_p balls: a margin > 0 in a
row whose margins are all positive is a proof for every image of the box.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from cure_ray.bounds.arithmetic import exact_arithmetic
from cure_ray.bounds.engine import Stage
from cure_ray.bounds.native.domain import Domain
from cure_ray.bounds.native.engine import NativeEngine
from cure_ray.bounds.native.problem import NativeProblem, visible
from cure_ray.bounds.native.relaxation import interval_bounds, interval_margins, margin_rows
from cure_ray.threats.balls import Ball
from cure_ray.threats.box import UNIT

# The engine reads a magnitude bound |x| + eps off the threat; pixels lie in [0, 1], so 1 covers every box.
ANY_BOX = Ball("linf", 1.0)


@dataclass(frozen=True, eq=False)
class BoxDomain(Domain):
    """A box with its own offsets per pixel. Flat images in the engine's order: height, width, channel."""

    def to(self, dtype: torch.dtype) -> "BoxDomain":
        """A cast, not a recomputation: the offsets are not those of a ball. Only the searching pass works on it."""
        return replace(self, x_BN=self.x_BN.to(dtype), low_BN=self.low_BN.to(dtype), high_BN=self.high_BN.to(dtype))


def box_margins(engine: NativeEngine, low_BN: Tensor, high_BN: Tensor, y_B: Tensor, stage: Stage) -> Tensor:
    """[B, K-1] lower bounds of f_y - f_i over low <= x <= high; float64 in, float64 out; NaN where a bound is not finite."""
    domain = BoxDomain(low_BN, torch.zeros_like(low_BN), high_BN - low_BN, ANY_BOX, UNIT)
    usable_B = torch.isfinite(low_BN).all(1) & torch.isfinite(high_BN).all(1)
    assert engine.decide is not None
    return engine.margins(NativeProblem(domain, y_B, usable_B, engine.decide), stage)


@torch.no_grad()
def separate_margins(engine: NativeEngine, low_BN: Tensor, high_BN: Tensor, y_B: Tensor) -> Tensor:
    """[B, K-1] IBP bounds of f_y from below minus bounds of f_i from above (A29): sound, and never above those of `box_margins`."""
    assert engine.decide is not None
    net, parts = engine.decide, list[Tensor]()
    with exact_arithmetic():
        for low, high, y in zip(low_BN.split(64), high_BN.split(64), y_B.split(64), strict=True):
            domain = BoxDomain(low, torch.zeros_like(low), high - low, ANY_BOX, UNIT)
            bounds = interval_bounds(net, domain)
            rows_BSK = margin_rows(y, net.classes, low.dtype)
            mine = interval_margins(net, domain, bounds, rows_BSK[:, :1].clamp_min(0))
            parts.append(mine + interval_margins(net, domain, bounds, rows_BSK.clamp_max(0)))
    return visible(torch.cat(parts))


def proven(margins_BS: Tensor) -> Tensor:
    """Finite and strictly positive, every one of them."""
    return (torch.isfinite(margins_BS) & (margins_BS > 0)).all(1)
