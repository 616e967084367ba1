"""The three norms by name: duals, and when one ball contains another (docs/explanation/algorithms.md, threat models)."""

import math
from typing import Literal

from cure_ray.errors import UserError, nearest

Norm = Literal["linf", "l2", "l1"]
NORMS: tuple[Norm, ...] = ("linf", "l2", "l1")
P: dict[Norm, float] = {"linf": math.inf, "l2": 2.0, "l1": 1.0}
LARGEST_RADIUS = 1e30  # attacks and searches compute in float32
DUAL: dict[Norm, Norm] = {"linf": "l1", "l2": "l2", "l1": "linf"}


def check_ball(norm: str, eps: float) -> Norm:
    """The norm, if there is one of that name and the radius is one."""
    if norm not in NORMS:
        raise UserError(f"unknown norm {norm!r}.{nearest(str(norm), NORMS)}")
    if not 0 <= eps <= LARGEST_RADIUS:
        raise UserError(f"the radius of {norm} must be a finite number >= 0 in pixel units, at most {LARGEST_RADIUS:g}, got {eps}")
    return norm


def contains(outer: Norm, outer_eps: float, inner: Norm, inner_eps: float, dimension: int) -> bool:
    """Whether the ball (inner, inner_eps) lies inside (outer, outer_eps) in `dimension` dimensions."""
    p, q = P[inner], P[outer]
    growth = 1.0 if p <= q else dimension ** (1.0 / q - (0.0 if math.isinf(p) else 1.0 / p))
    return inner_eps * growth <= outer_eps
