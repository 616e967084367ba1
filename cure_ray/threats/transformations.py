"""Geometric transformations as a person writes them, `Sc(5),R(5),C(5),B(0.01)`: parsing, valid domains, split widths.

R(a): rotation by up to a degrees either way, counter-clockwise positive. Tu(a), Tv(a): shift by up to a pixels, right and up
positive. Sc(v): scale factor 1 +- v/100. Sh(v): shear factor +- v/100. C(v): contrast factor 1 +- v/100. B(v): brightness +- v.
They act on the image in the order written; spatial ones come first, pixel-wise ones (C, B) last.
"""

import math
import re
from dataclasses import dataclass, replace
from typing import Literal

from cure_ray.catalogue.published import GRIDS, STANDARD, certified_widths, grid_for, training_widths
from cure_ray.errors import UserError, nearest

Kind = Literal["R", "Tu", "Tv", "Sc", "Sh", "C", "B"]
KINDS: tuple[Kind, ...] = ("R", "Tu", "Tv", "Sc", "Sh", "C", "B")
SPATIAL: tuple[Kind, ...] = ("R", "Tu", "Tv", "Sc", "Sh")
EXAMPLE = "for example R(10), Tu(2),Tv(2) or Sc(5),R(5),C(5),B(0.01)"

# Where none are published: the finest of the paper's MNIST widths, about a twentieth of a pixel at the border of a small image.
DEFAULT_WIDTHS: dict[Kind, float] = {"R": 0.125, "Tu": 0.05, "Tv": 0.05, "Sc": 0.005, "Sh": 0.005, "C": 0.04, "B": 0.01}


@dataclass(frozen=True)
class Step:
    """One elementary transformation with its parameter's range, in radians, pixels or factors."""

    kind: Kind
    low: float
    high: float


@dataclass(frozen=True)
class Transformation:
    """A composed transformation and how many equal cells each parameter's range is cut into."""

    family = "geometric"

    text: str
    steps: tuple[Step, ...]
    cells: tuple[int, ...]

    norm = "geometric"  # the columns every row has; a composed transformation has no radius
    eps = 0.0

    @property
    def leaves(self) -> int:
        return math.prod(self.cells)

    @property
    def grid(self) -> str:
        """As rows record it: the cells of every parameter, like 80 or 20x40."""
        return "x".join(map(str, self.cells))

    def cut(self, grid: str) -> "Transformation":
        """The same transformation on a recorded grid."""
        return replace(self, cells=tuple(int(n) for n in grid.split("x")))

    def __str__(self) -> str:
        return self.text


def check_grid(name: str) -> str:
    if name not in GRIDS:
        raise UserError(f"unknown grid {name!r}.{nearest(name, GRIDS)}")
    return name


def check_ascii(text: str) -> None:
    """Digits of other scripts read as numbers in Python; a threat written with them is more likely a slip than meant."""
    strange = next((c for c in text if not c.isascii()), None)
    if strange is not None:
        raise UserError(f"cannot read {strange!r} in {text!r}: threats are written in plain ASCII, like linf=0.1 or R(10)")


def _pointing(text: str, place: int, why: str) -> UserError:
    return UserError(f"{why}\n  {text}\n  {' ' * place}^ here; {EXAMPLE}")


def _range(kind: Kind, amount: float, text: str, place: int) -> tuple[float, float]:
    if not math.isfinite(amount) or amount < 0:
        raise _pointing(text, place, f"{kind} needs a finite number >= 0, got {amount:g}")
    if kind == "R":
        if amount > 90:
            raise _pointing(text, place, f"rotation beyond 90 degrees ({amount:g}) leaves the domain of the interval rules")
        angle = math.radians(amount)
        return -angle, angle
    if kind in ("Sc", "C"):
        if amount >= 100 and kind == "Sc":
            raise _pointing(text, place, f"Sc({amount:g}) reaches a scale of 0 or below; it must stay under 100 percent")
        if amount > 100:
            raise _pointing(text, place, f"C({amount:g}) reaches a negative contrast; at most 100 percent")
        return 1 - amount / 100, 1 + amount / 100
    amount = amount / 100 if kind == "Sh" else amount
    return -amount, amount


_TERM = re.compile(r"\s*(?P<kind>[A-Za-z]+)?\s*(?P<open>\()?\s*(?P<amount>[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)?\s*(?P<close>\))?\s*")


def _terms(text: str) -> list[tuple[Kind, float, int]]:
    """(kind, amount, place of the amount) of every term; an error points at the character where reading stopped."""
    found, place = list[tuple[Kind, float, int]](), 0
    while True:
        match = _TERM.match(text, place)
        assert match is not None  # every part is optional
        kind = match["kind"]
        start = match.start("kind") if kind else place + len(text[place:]) - len(text[place:].lstrip())
        if kind not in KINDS:
            given = f"unknown transformation {kind!r}" if kind else "a transformation is missing"
            raise _pointing(text, start, f"{given}: one of {', '.join(KINDS)}")
        if not match["open"]:
            raise _pointing(text, match.end("kind"), f"{kind} needs its range in parentheses")
        if not match["amount"]:
            raise _pointing(text, match.end("open"), f"{kind}( needs a number")
        if not match["close"]:
            raise _pointing(text, match.end("amount"), f"{kind}({match['amount']} is not closed by a parenthesis")
        found.append((kind, float(match["amount"]), match.start("amount")))
        place = match.end()
        if place == len(text):
            return found
        if text[place] != ",":
            raise _pointing(text, place, f"cannot read {text[place]!r} here: transformations are separated by commas")
        place += 1


def _number(amount: float) -> str:
    """Short where that is exact: two ranges that differ must never share a name, or one would inherit the other's certificates."""
    return f"{amount:g}" if float(f"{amount:g}") == amount else repr(amount)


def parse_transformation(text: str, grid: str = STANDARD, widths: tuple[float, ...] | None = None) -> Transformation:
    """Read a composed transformation. Leaf widths (degrees, pixels, factors): given, or those of the named grid, or defaults."""
    check_ascii(text)
    terms = _terms(text)
    canonical = ",".join(f"{kind}({_number(amount)})" for kind, amount, _ in terms)
    steps, pixelwise = list[Step](), False
    for kind, amount, place in terms:
        if kind in SPATIAL and pixelwise:
            raise _pointing(text, place, f"{kind} after a pixel-wise transformation: write the spatial ones (R, Tu, Tv, Sc, Sh) first")
        pixelwise = pixelwise or kind not in SPATIAL
        steps.append(Step(kind, *_range(kind, amount, text, place)))
    widths = widths or certified_widths(check_grid(grid), canonical) or tuple(DEFAULT_WIDTHS[step.kind] for step in steps)
    if len(widths) != len(steps):
        raise UserError(f"{canonical} has {len(steps)} parameters but {len(widths)} split widths were given")
    return Transformation(canonical, tuple(steps), tuple(_cells(s, w) for s, w in zip(steps, widths, strict=True)))


def training_transformation(text: str, dataset: str, widths: tuple[float, ...] | None = None) -> Transformation:
    """The same range cut as CGT trains on it."""
    grid = grid_for(dataset)
    canonical = parse_transformation(text, grid).text
    return parse_transformation(text, grid, widths or training_widths(canonical))


def _cells(step: Step, width: float) -> int:
    if not (math.isfinite(width) and width > 0):
        raise UserError(f"the split width of {step.kind} must be a positive number, got {width}")
    extent = math.degrees(step.high - step.low) if step.kind == "R" else step.high - step.low
    return max(1, round(extent / width))


@dataclass(frozen=True)
class Cell:
    """A box of parameters: per step a half-open range of leaf cells. Children share edges exactly with their parent."""

    spans: tuple[tuple[int, int], ...]

    def ranges(self, transformation: Transformation) -> tuple[tuple[float, float], ...]:
        """Parameter intervals, one per step; the last edge is exactly the range's end."""
        return tuple(
            (edge(step, first, count), edge(step, last, count))
            for (first, last), step, count in zip(self.spans, transformation.steps, transformation.cells, strict=True)
        )

    @property
    def is_leaf(self) -> bool:
        return all(last - first == 1 for first, last in self.spans)

    @property
    def leaves(self) -> int:
        return math.prod(last - first for first, last in self.spans)

    def halves(self, axis: int) -> tuple["Cell", "Cell"]:
        first, last = self.spans[axis]
        middle = (first + last) // 2
        below, above = ((first, middle), (middle, last))
        return (
            Cell((*self.spans[:axis], below, *self.spans[axis + 1 :])),
            Cell((*self.spans[:axis], above, *self.spans[axis + 1 :])),
        )


def edge(step: Step, index: int, count: int) -> float:
    return step.high if index == count else step.low + (step.high - step.low) * index / count


def root(transformation: Transformation) -> Cell:
    return Cell(tuple((0, count) for count in transformation.cells))


def cell_at(transformation: Transformation, parameters: tuple[float, ...]) -> Cell:
    """The leaf that holds these parameters."""
    spans = []
    for step, count, value in zip(transformation.steps, transformation.cells, parameters, strict=True):
        extent = step.high - step.low
        index = 0 if extent == 0 else min(count - 1, max(0, int((value - step.low) / extent * count)))
        spans.append((index, index + 1))
    return Cell(tuple(spans))
