"""What a bound engine is: the one protocol behind which the native engine and auto_LiRPA stand."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from cure_ray.config.stages import BOUND_STAGES as STAGES
from cure_ray.config.stages import BoundStage as Stage
from cure_ray.errors import UserError
from cure_ray.threats.balls import Ball
from cure_ray.threats.box import UNIT, Box

__all__ = ["STAGES", "Branching", "Engine", "Problem", "Stage", "check_domain"]


@dataclass(frozen=True)
class Branching:
    """What branch and bound says of one sample."""

    margins: Tensor  # [K-1], the best proven lower bound of every margin, float64
    nodes: int  # sub-problems bounded
    seconds: float
    exhausted: bool  # True: stopped by the budget, or because the budget would not do, so an unproven margin is only unknown


class Problem(Protocol):
    """A batch of samples under one threat, with whatever intermediate bounds the engine has gathered so far."""

    @property
    def size(self) -> int: ...

    def select(self, index: Tensor) -> "Problem":
        """The sub-batch of these samples (a LongTensor), keeping all bounds found so far."""
        ...


class Engine(Protocol):
    """Bounds for one network.

    Every method returns lower bounds on the margins f_y - f_i for the K-1 classes i != y in increasing class order, valid for
    every image of ball∩box; `box` is the domain of the inputs, [0, 1] unless said otherwise (True; False: the whole space). An
    engine that cannot use it with a norm bounds the whole ball. Engines decide in float64: a returned margin > 0 is a proof. A
    bound that could not be computed is NaN, never a large number, and never silently replaced.
    """

    name: str
    version: str
    stages: tuple[Stage, ...]  # what this engine offers, cheapest first
    options: Mapping[str, Any]  # everything it was made with that a bound may depend on, in JSON's types: part of a job's identity

    def problem(self, x_BCHW: Tensor, y_B: Tensor, threat: Ball, box: Box | bool = UNIT) -> Problem: ...

    def margins(self, problem: Problem, stage: Stage) -> Tensor:
        """[B, K-1] float64 lower bounds by this stage (not branch-and-bound). May store intermediate bounds in the problem."""
        ...

    def branch(self, problem: Problem, seconds: float, nodes: int) -> list[Branching]:
        """Branch and bound on every sample; `seconds` and `nodes` are budgets per sample."""
        ...


def check_domain(x: Tensor, box: Box) -> None:
    """UserError if a finite number lies outside the domain: bounds of ball∩box would be about a set that does not hold the image."""
    outside = ((x < box.low) | (x > box.high)) & torch.isfinite(x)
    if bool(outside.any()):
        raise UserError(f"pixels must lie in {box.words()}, got {float(x.min()):g}..{float(x.max()):g}")
