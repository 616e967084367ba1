"""A norm ball: a norm and a radius in pixel units; the domain of the inputs (threats/box.py) cuts it off."""

from dataclasses import dataclass

from cure_ray.threats.norms import Norm, check_ball


@dataclass(frozen=True)
class Ball:
    """All images within `eps` of the original in `norm`, inside the domain, which is [0, 1] unless said otherwise."""

    family = "lp"
    grid = None  # a column every row has; only transformations are cut into cells

    norm: Norm
    eps: float

    def __post_init__(self) -> None:
        check_ball(self.norm, self.eps)

    def __str__(self) -> str:
        return f"{self.norm}={self.eps:g}"
