"""The fields a search may change: kinds of values, and which fields depend on which."""

from collections.abc import Mapping
from typing import Any, Self

from pydantic import Field, model_validator

from cure_ray.config import Experiment
from cure_ray.config._base import Model
from cure_ray.errors import UserError

Value = bool | int | float | str | list[Any] | None
Point = Mapping[str, Any]  # "training.eta" -> 1.5


class Dimension(Model):
    """One searched field: exactly one of the five kinds, and the values of other fields it depends on."""

    choice: tuple[Value, ...] | None = Field(None, min_length=1, description="One of these values.")
    grid: tuple[Value, ...] | None = Field(None, min_length=1, description="The same; reads better with `search: grid`.")
    uniform: tuple[float, float] | None = Field(None, description="A number between these.")
    loguniform: tuple[float, float] | None = Field(None, description="A positive number between these, uniform in its logarithm.")
    whole: tuple[int, int] | None = Field(None, alias="int", description="A whole number between these, both included.")
    when: dict[str, tuple[Value, ...]] = Field({}, description="Search this field only if each of these fields has one of these values.")

    @property
    def values(self) -> tuple[Value, ...] | None:
        return self.choice if self.choice is not None else self.grid

    @property
    def examples(self) -> tuple[Value, ...]:
        """Every value of a finite kind; both ends of a range."""
        return self.values or tuple(self.uniform or self.loguniform or self.whole or ())

    @model_validator(mode="after")
    def _check(self) -> Self:
        given = [k for k in ("choice", "grid", "uniform", "loguniform", "whole") if getattr(self, k) is not None]
        if len(given) != 1:
            raise ValueError(f"give exactly one of choice, grid, uniform, loguniform, int; got {', '.join(given) or 'none'}")
        ends = self.uniform or self.loguniform or self.whole
        if ends is not None and not ends[0] < ends[1]:
            raise ValueError(f"the range must go from a smaller to a larger number, got {list(ends)}")
        if self.loguniform is not None and self.loguniform[0] <= 0:
            raise ValueError(f"loguniform needs positive ends, got {list(self.loguniform)}; for 0 as a value use choice")
        return self


def active(space: Mapping[str, Dimension], path: str, point: Point, base: Experiment) -> bool:
    """Whether a field is searched at this point: every field it depends on has one of the wanted values."""
    for other, wanted in space[path].when.items():
        value: Any = point[other] if other in point else _field(base, other)
        if (other in space and other not in point) or value not in wanted:
            return False
    return True


def ordered(space: Mapping[str, Dimension]) -> list[str]:
    """Fields after those they depend on."""
    done: list[str] = []
    left = list(space)
    while left:
        ready = [p for p in left if not any(o in left for o in space[p].when)]
        if not ready:
            raise UserError(f"space: {', '.join(left)} depend on each other in a circle")
        done += ready
        left = [p for p in left if p not in ready]
    return done


def _field(experiment: Experiment, path: str) -> Any:
    value: Any = experiment.model_dump(mode="json")
    own: Any = experiment
    for key in path.split("."):
        own = getattr(own, key, None)
        value = value.get(key, own) if isinstance(value, Mapping) else own  # a switch that is off is not written
    return value
