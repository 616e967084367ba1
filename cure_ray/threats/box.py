"""The domain of the inputs: every number of an image or vector lies between two ends, which may be infinite."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from cure_ray.errors import UserError
from cure_ray.threats.numbers import read_number

UNBOUNDED = "none"


@dataclass(frozen=True)
class Box:
    """All inputs whose every entry lies in [low, high]; threats are balls intersected with it.

    As text, on the command line, in experiments and in stored results: `0,1`, `-1,1`, `none` (the whole space).
    """

    low: float = 0.0
    high: float = 1.0

    def __post_init__(self) -> None:
        if not self.low < self.high or self.low == math.inf or self.high == -math.inf:
            raise UserError(f"a domain needs a lower end below its upper end, got {self.low:g},{self.high:g}")

    @property
    def bounded(self) -> bool:
        """Whether it can cut anything off a ball."""
        return math.isfinite(self.low) or math.isfinite(self.high)

    @property
    def reach(self) -> float:
        """The largest magnitude inside."""
        return max(abs(self.low), abs(self.high))

    @property
    def inside(self) -> float:
        """Some number well inside."""
        ends = [end for end in (self.low, self.high) if math.isfinite(end)]
        middle = sum(end / len(ends) for end in ends)  # of halves: the sum of two ends may overflow
        return min(max(middle, self.low), self.high)

    def words(self) -> str:
        return f"[{self.low:g}, {self.high:g}]" if self.bounded else "the whole space"

    def __str__(self) -> str:
        return f"{_number(self.low)},{_number(self.high)}" if self.bounded else UNBOUNDED

    @staticmethod
    def of(what: "Box | bool | str | Sequence[float]") -> "Box":
        """A domain as people write it: True is [0, 1], False and `none` the whole space, else two ends."""
        if isinstance(what, Box):
            return what
        if isinstance(what, bool):
            return UNIT if what else EVERYWHERE
        if isinstance(what, str):
            if what.strip() == UNBOUNDED:
                return EVERYWHERE
            try:
                ends = [read_number(part) for part in what.split(",")]
            except ValueError:
                ends = []
        else:
            try:
                ends = [float(end) for end in what]
            except (TypeError, ValueError):
                ends = []
        if len(ends) != 2 or any(math.isnan(end) for end in ends):
            raise UserError(f"{what!r} is not a domain: write its ends, like 0,1 or -1,1, or none for the whole space")
        return Box(*ends)


def _number(value: float) -> str:
    """The shortest text that reads back as this number."""
    return f"{value:g}" if float(f"{value:g}") == value else repr(value)


UNIT = Box()
EVERYWHERE = Box(-math.inf, math.inf)
