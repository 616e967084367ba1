"""How much work the native engine puts into a bound: part of a job's identity."""

from dataclasses import dataclass, field
from typing import Literal

from cure_ray.bounds.native.branching import Settings

Hidden = Literal["auto", "ibp", "crown", "alpha"]


@dataclass(frozen=True)
class Effort:
    """`hidden` chooses the hidden bounds behind alpha-CROWN and branch and bound: 'alpha' optimises every layer, 'crown' and 'ibp'
    fix them; 'auto' takes 'alpha' where that is at most `work_limit` coefficients a sample, else (CNN7) 'crown' and 'alpha' for as
    many neurons as the limit allows, those first that cost the open margins most.
    With `single` products in float32 prove what is clear, without it float64 proves everything.
    With `stop_early` alpha-CROWN leaves margins alone once they are positive; without it every margin is made as tight as it gets.
    """

    hidden: Hidden = "auto"
    iterations: int = 20
    hidden_iterations: int = 8
    work_limit: int = 50_000_000
    single: bool = True
    stop_early: bool = True
    branching: Settings = field(default_factory=Settings)

    def legs(self) -> list[int]:
        """The iterations in parts, after which rows that are proven leave."""
        if not self.stop_early:
            return [self.iterations]
        first = min(4, self.iterations)
        rest, step = self.iterations - first, 8
        return [first, *[step] * (rest // step), *([rest % step] if rest % step else [])]
