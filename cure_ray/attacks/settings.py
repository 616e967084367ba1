"""How hard an attack searches, by name and in numbers."""

from dataclasses import dataclass, replace
from typing import Literal

from cure_ray.errors import UserError, nearest

Strength = Literal["default", "strong"]
OPENING = 2  # restarts that go before all others: most samples that fall do so at once
CLOSING, VERTICES = 8, 16  # restarts and rounds over vertices before branch and bound
LAST = (40, 48, 24)  # steps, restarts and rounds over vertices after it


@dataclass(frozen=True)
class AttackSettings:
    """Numbers, not names, decide what is found: two settings with the same numbers are the same attack."""

    steps: int = 14
    restarts: int = 8  # each with its own start, class to aim at and loss
    rows: int = 1024  # samples times restarts in one forward pass
    vertices: int = 0  # rounds of the search over vertices of the l1 ball, per class aimed at
    begun: int = 0  # restarts that were made before: the attack goes on from there

    @property
    def opening(self) -> "AttackSettings":
        """The first restarts alone: what most falling samples fall to."""
        return AttackSettings(self.steps, min(OPENING, self.restarts), self.rows)

    @property
    def rest(self) -> "AttackSettings | None":
        """What is left of the attack after its opening, if anything."""
        return replace(self, begun=OPENING) if self.restarts > OPENING or self.vertices else None

    @property
    def closing(self) -> "AttackSettings":
        """The attack before the most expensive stage, when few classes are open: in l1 over vertices as well, where it finds most."""
        return AttackSettings(self.steps, min(CLOSING, self.restarts), self.rows, max(VERTICES, self.vertices))

    @property
    def last(self) -> "AttackSettings":
        """The attack on the few samples that no proof was found for: no price is too high where a tree was climbed in vain."""
        steps, restarts, vertices = (max(pair) for pair in zip(LAST, (self.steps, self.restarts, self.vertices), strict=True))
        return AttackSettings(steps, restarts, self.rows, vertices)

    @property
    def again(self) -> "AttackSettings":
        """The attack on what has been certified: an alarm, at a quarter of the price."""
        return AttackSettings(self.steps, max(1, self.restarts // 4), self.rows)


# A short run from another start or at another class finds more than more steps of the same run (docs/benchmarks.md).
STRENGTHS: dict[Strength, AttackSettings] = {"default": AttackSettings(), "strong": AttackSettings(40, 48, vertices=24)}


def attack_settings(name: str) -> AttackSettings:
    for known, settings in STRENGTHS.items():
        if name == known:
            return settings
    raise UserError(f"unknown attack {name!r}.{nearest(name, tuple(STRENGTHS))}")
