import math

import pytest

from cure_ray.errors import UserError
from cure_ray.threats.transformations import cell_at, edge, parse_transformation, root


@pytest.mark.parametrize(
    ("text", "cells"),
    [
        ("R(30)", (240,)),
        ("Tu(2),Tv(2)", (80, 80)),
        ("Sc(5),R(5),C(5),B(0.01)", (20, 80, 2, 1)),
        ("Sh(2), R(2), Sc(2), C(2), B(.001)", (16, 64, 16, 1, 1)),
    ],
)
def test_the_named_mnist_configurations_have_the_grids_of_the_table(text: str, cells: tuple[int, ...]) -> None:
    assert parse_transformation(text, "mnist").cells == cells


@pytest.mark.parametrize(
    ("text", "cells"),
    [("R(10)", (100_000,)), ("R(2),Sh(2)", (400, 160)), ("Sc(1),R(1),C(1),B(0.001)", (400, 400, 4, 1))],
)
def test_the_named_cifar_configurations_have_the_grids_of_the_table(text: str, cells: tuple[int, ...]) -> None:
    assert parse_transformation(text, "cifar10").cells == cells


def test_ranges_are_in_radians_pixels_and_factors() -> None:
    rotation, shift, scale, shear, contrast, brightness = parse_transformation("R(90),Tu(2),Sc(10),Sh(4),C(20),B(0.5)").steps
    assert (rotation.low, rotation.high) == (-math.pi / 2, math.pi / 2)
    assert (shift.low, shift.high) == (-2, 2)
    assert (scale.low, scale.high) == pytest.approx((0.9, 1.1))
    assert (shear.low, shear.high) == pytest.approx((-0.04, 0.04))
    assert (contrast.low, contrast.high) == pytest.approx((0.8, 1.2))
    assert (brightness.low, brightness.high) == (-0.5, 0.5)


@pytest.mark.parametrize(
    ("text", "word", "place"),
    [
        ("R(10),Q(2)", "unknown transformation 'Q'", 6),
        ("R10", "parentheses", 1),
        ("R", "parentheses", 1),
        ("R()", "needs a number", 2),
        ("R(10", "not closed", 4),
        ("R(10) Sh(2)", "separated by commas", 6),
        ("R(10),", "missing", 6),
        ("", "missing", 0),
        ("R(-3)", ">= 0", 2),
        ("R(91)", "90 degrees", 2),
        ("Tu(1),Sc(100)", "scale of 0", 9),
        ("C(120)", "negative contrast", 2),
        ("C(2),R(2)", "spatial ones", 7),
    ],
)
def test_bad_transformations_are_refused_with_a_pointer_at_the_place(text: str, word: str, place: int) -> None:
    with pytest.raises(UserError) as caught:
        parse_transformation(text)
    first, shown, pointer = str(caught.value).split("\n")
    assert word in first
    assert shown == f"  {text}"
    assert pointer.index("^") == place + 2


def test_halves_share_their_edge_and_the_last_edge_is_exact() -> None:
    transformation = parse_transformation("R(3.3),Tu(1.7)", widths=(0.7, 0.3))
    below, above = root(transformation).halves(0)
    assert below.ranges(transformation)[0][1] == above.ranges(transformation)[0][0]
    assert above.ranges(transformation)[0][1] == transformation.steps[0].high
    assert edge(transformation.steps[1], transformation.cells[1], transformation.cells[1]) == 1.7


def test_cell_at_finds_the_leaf_of_every_parameter() -> None:
    transformation = parse_transformation("R(5),Tu(2)")
    for share in (0.0, 0.123, 0.5, 0.999, 1.0):
        point = tuple(s.low + (s.high - s.low) * share for s in transformation.steps)
        ranges = cell_at(transformation, point).ranges(transformation)
        assert all(low - 1e-12 <= t <= high + 1e-12 for t, (low, high) in zip(point, ranges, strict=True))
