"""Types every part of an experiment is made of: frozen strict models, exact radii, bounded numbers."""

from fractions import Fraction
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer


def _parse_radius(value: Any) -> Fraction:
    strange = isinstance(value, str) and not (value.isascii() and "_" not in value)  # digits of other scripts are numbers to Python
    if strange or isinstance(value, bool) or not isinstance(value, int | float | str | Fraction):
        raise ValueError(f"a radius is a number or a fraction like '8/255', got {value!r}")
    try:
        return Fraction(str(value)) if isinstance(value, float) else Fraction(value)
    except (ValueError, ZeroDivisionError) as error:
        raise ValueError(f"a radius is a number or a fraction like '8/255', got {value!r}") from error


def _show_radius(value: Fraction) -> float | str:
    return float(value) if Fraction(str(float(value))) == value else f"{value.numerator}/{value.denominator}"


Radius = Annotated[Fraction, BeforeValidator(_parse_radius), PlainSerializer(_show_radius)]
Unit = Annotated[float, Field(ge=0.0, le=1.0)]
NonNegative = Annotated[float, Field(ge=0.0, allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0.0, allow_inf_nan=False)]


class Model(BaseModel):
    """Frozen, and strict about what it does not know."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)


def switch(default: Any, description: str = "") -> Any:
    """A field that, while it has its default, is no part of an experiment's written form nor of its hash: what came before it keeps both."""
    return Field(default, description=description or None, exclude_if=lambda value: value == default)
