"""Domains as people write them."""

import math

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from cure_ray.errors import UserError
from cure_ray.threats.box import EVERYWHERE, UNIT, Box


@pytest.mark.parametrize(
    ("written", "box"),
    [
        (True, UNIT), (False, EVERYWHERE), ("none", EVERYWHERE), ("0,1", UNIT), (" -1 , 1", Box(-1, 1)), ([0, 1], UNIT),
        ("0,inf", Box(0, math.inf)), ("-inf,inf", EVERYWHERE), (Box(2, 3), Box(2, 3)),
    ],
)  # fmt: skip
def test_a_domain_is_read_as_written(written, box) -> None:
    assert Box.of(written) == box


@pytest.mark.parametrize("written", ["", "1", "1,0", "0,0", "a,b", "0,1,2", "nan,1", "inf,inf", "-inf,-inf", [1.0]])
def test_what_is_no_domain_is_refused(written) -> None:
    with pytest.raises(UserError, match="domain"):
        Box.of(written)


@given(a=st.floats(allow_nan=False), b=st.floats(allow_nan=False))
@example(a=-4.2523835782747535e302, b=-1.7976888824787375e308)  # their sum overflows
@example(a=5e-324, b=1e-323)  # their halves underflow
def test_the_text_of_a_domain_reads_back_as_it(a: float, b: float) -> None:
    low, high = min(a, b), max(a, b)
    if low < high and low < math.inf and high > -math.inf:
        box = Box(low, high)
        assert Box.of(str(box)) == box
        assert box.low <= box.inside <= box.high
        assert math.isfinite(box.inside)


def test_only_the_whole_space_is_unbounded() -> None:
    assert not EVERYWHERE.bounded
    assert UNIT.bounded
    assert Box(0, math.inf).bounded
