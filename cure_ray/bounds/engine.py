"""What a bound engine is: the one protocol behind which the native engine and auto_LiRPA stand."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from cure_ray.config.stages import BOUND_STAGES as STAGES
from cure_ray.config.stages import BoundStage as Stage
from cure_ray.threats.balls import Ball

__all__ = ["STAGES", "Branching", "Engine", "Problem", "Stage"]


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
    every image of ball∩[0,1] (with box=False: of the whole ball for l2 and l1, still of box for linf, clipped to [0,1] or not
    as `box` says). Engines decide in float64: a returned margin > 0 is a proof. A bound that could not be computed is NaN,
    never a large number, and never silently replaced.
    """

    name: str
    version: str
    stages: tuple[Stage, ...]  # what this engine offers, cheapest first
    options: Mapping[str, Any]  # everything it was made with that a bound may depend on, in JSON's types: part of a job's identity

    def problem(self, x_BCHW: Tensor, y_B: Tensor, threat: Ball, box: bool = True) -> Problem: ...

    def margins(self, problem: Problem, stage: Stage) -> Tensor:
        """[B, K-1] float64 lower bounds by this stage (not branch-and-bound). May store intermediate bounds in the problem."""
        ...

    def branch(self, problem: Problem, seconds: float, nodes: int) -> list[Branching]:
        """Branch and bound on every sample; `seconds` and `nodes` are budgets per sample."""
        ...
