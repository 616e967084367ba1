"""Norm balls: a norm and a radius in pixel units, one for all images or one for each; the domain of the inputs (box.py) cuts them off."""

import hashlib
import struct
from dataclasses import dataclass
from typing import Any

from cure_ray.errors import UserError
from cure_ray.threats.norms import Norm, check_ball

EACH = "=each-"  # in the text of balls with a radius for each image, before a digest of the radii


@dataclass(frozen=True)
class Ball:
    """All images within `eps` of the original in `norm`, inside the domain, which is [0, 1] unless said otherwise.

    Several radii, in a list, an array, a tensor or a column, are one for every image that is certified, by its number: `Balls`.

    >>> from cure_ray import Ball
    >>> str(Ball("l2", 0.5)), Ball("l2", [0.5, 0.25]).at(1)
    ('l2=0.5', Ball(norm='l2', eps=0.25))
    """

    family = "lp"
    grid = None  # a column every row has; only transformations are cut into cells

    norm: Norm
    eps: float

    def __new__(cls, norm: Norm = "linf", eps: Any = 0.0) -> Any:
        given = eps.tolist() if hasattr(eps, "tolist") else eps  # tensors, arrays, columns, and their single numbers
        return Balls(norm, tuple(given)) if isinstance(given, list | tuple) else super().__new__(cls)

    def __post_init__(self) -> None:
        object.__setattr__(self, "eps", _number(self.eps, self.norm))
        check_ball(self.norm, self.eps)

    def __str__(self) -> str:
        return f"{self.norm}={self.eps:g}"


@dataclass(frozen=True)
class Balls:
    """A ball around every image, each with its own radius. What is said about an image is said about its ball."""

    family = "lp"
    grid = None

    norm: Norm
    radii: tuple[float, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "radii", tuple(_number(r, self.norm) for r in self.radii))
        if not self.radii:
            raise UserError(f"{self.norm}: no radius given; one for all images, or one for each")
        for radius in self.radii:
            check_ball(self.norm, radius)

    @property
    def eps(self) -> float:
        """The largest; a row holds its image's."""
        return max(self.radii)

    def at(self, index: int) -> Ball:
        """The ball around image `index`."""
        ball: Ball = Ball(self.norm, self.radii[index])
        return ball

    def __str__(self) -> str:
        digest = hashlib.sha256(struct.pack(f"<{len(self.radii)}d", *self.radii)).hexdigest()
        return f"{self.norm}{EACH}{digest[:8]}"


def _number(value: Any, norm: str) -> float:
    try:
        if isinstance(value, str | bytes | bool):
            raise TypeError
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        raise UserError(f"the radius of {norm} must be a number, or one for every image, got {value!r}") from None
