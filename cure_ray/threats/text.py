"""Threats as a person writes them, `linf=0.1,R(10),patch=2x2`: the list taken apart, and every part read.

The command line and `certification.threats` of an experiment are read here, so that both refuse the same things in the same words.
"""

import re
from collections.abc import Mapping, Sequence
from fractions import Fraction

from cure_ray.catalogue.published import STANDARD
from cure_ray.errors import UserError
from cure_ray.threats import Threat
from cure_ray.threats.balls import Ball, Balls
from cure_ray.threats.norms import NORMS, Norm, check_ball
from cure_ray.threats.numbers import read_number
from cure_ray.threats.patches import Patch, check_size
from cure_ray.threats.transformations import check_ascii, check_grid, parse_transformation


def parse_patch(text: str, image: tuple[int, int] | None = None) -> Patch:
    """`patch=2x2` or `patch(2x2)`, with one number for a square; `image` is (height, width)."""
    check_ascii(text)
    size = r"\s*(\d+)(?:\s*x\s*(\d+))?\s*"
    found = re.fullmatch(rf"\s*patch\s*=\s*{size}", text) or re.fullmatch(rf"\s*patch\s*\({size}\)\s*", text)
    if found is None or int(found[1]) < 1 or int(found[2] or found[1]) < 1:
        raise UserError(f"cannot read the patch {text!r}: write patch=2x2 (height x width, at least 1x1)")
    patch = Patch(int(found[1]), int(found[2] or found[1]))
    if image is not None:
        check_size(patch, image)
    return patch


def parse_ball(text: str, radii: Mapping[Norm, float] | None = None) -> Ball:
    """`linf=0.1`, `linf=8/255`, or a norm alone where `radii` knows its radius."""
    check_ascii(text)
    norm, equals, radius = (part.strip() for part in text.partition("="))
    if not equals and norm in NORMS:
        known = radii or {}
        if not known.get(norm):
            raise UserError(f"{norm} alone means the experiment's radius, and here is none: write it out, like {norm}=0.1")
        return Ball(norm, known[norm])
    try:
        if "/" in radius and "_" not in radius:
            eps = float(Fraction(radius))
        else:
            eps = read_number(radius)
    except (ValueError, ZeroDivisionError, OverflowError):
        raise UserError(f"{text!r} is not like linf=0.1 or linf=8/255") from None
    return Ball(check_ball(norm, eps), eps)


def _family(text: str) -> str:
    text = text.strip()
    if text.startswith("patch"):
        return "patch"
    return "lp" if "=" in text or text.startswith("l") else "geometric"  # linf:0.1 is a norm misspelt


def split_threats(text: str) -> list[str]:
    """The parts of a list. Commas separate, except between transformations, which they compose; semicolons always separate."""
    parts = list[str]()
    for group in text.split(";"):
        open_transformation = False
        for piece in _outside_parentheses(group):
            if not piece.strip():
                continue
            geometric = _family(piece) == "geometric"
            if geometric and open_transformation:
                parts[-1] += "," + piece.strip()
            else:
                parts.append(piece.strip())
            open_transformation = geometric
    return parts


def _outside_parentheses(text: str) -> list[str]:
    pieces, depth = [""], 0
    for character in text:
        depth += (character == "(") - (character == ")")
        if character == "," and depth <= 0:
            pieces.append("")
        else:
            pieces[-1] += character
    return pieces


def read_threats(
    text: str, grid: str = STANDARD, image: Sequence[int] | None = None, radii: Mapping[Norm, float] | None = None
) -> list[Threat]:
    """Every threat of a list, in the order written; `image` ends in (height, width). `grid` is the name of the cells transformations
    are cut into."""
    check_ascii(text)
    check_grid(grid)
    found = list[Threat]()
    for part in split_threats(text):
        kind = _family(part)
        if kind == "patch":
            found.append(parse_patch(part, None if image is None else (image[-2], image[-1])))
        elif kind == "geometric":
            found.append(parse_transformation(part, grid))
        else:
            found.append(parse_ball(part, radii))
    check_distinct(found)
    return found


def check_distinct(threats: Sequence[Threat]) -> None:
    """A table has one column per norm, and none twice."""
    names = [t.norm if isinstance(t, Ball | Balls) else str(t) for t in threats]
    if len(set(names)) != len(names):
        raise UserError(f"one radius per norm and no threat twice, got {', '.join(map(str, threats))}")


def parse_balls(text: str) -> list[Ball]:
    """A list of norm balls alone."""
    found = read_threats(text)
    others = [str(t) for t in found if not isinstance(t, Ball)]
    if others:
        raise UserError(f"only norms with radii here, like linf=8/255,l2=0.5, not {others[0]}")
    return [t for t in found if isinstance(t, Ball)]


def check_list(parts: Sequence[str]) -> None:
    """UserError unless every part can be read, whatever the data set and the radii are."""
    read_threats(";".join(parts), radii=dict.fromkeys(NORMS, 1.0))
