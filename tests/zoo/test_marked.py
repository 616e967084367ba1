"""Tables between marks: written from stores and descriptions, and nothing else of a document is touched."""

from pathlib import Path

import pytest

from cure_ray.errors import UserError
from cure_ray.results.marked import fill

ROOT = Path(__file__).parent.parent.parent
MARKS = "before\n<!-- zoo:protocol {} -->\n{}<!-- /zoo -->\nafter\n"


def test_a_section_is_written_anew_and_the_rest_is_left() -> None:
    stale = MARKS.format("mnist linf=0.1,l2=0.5,l1=1", "| a number by hand | 99.9 |\n")
    fresh = fill(stale, ROOT / "zoo")
    assert fresh.startswith(
        "before\n<!-- zoo:protocol mnist linf=0.1,l2=0.5,l1=1 -->\n\n| certified, % | clean | linf=0.1 | l2=0.5 | l1=1 | union |"
    )
    assert fresh.endswith("<!-- /zoo -->\nafter\n")
    assert "99.9" not in fresh
    assert "| CURE-Scratch, MNIST, small radii, claimed | 99.2 | 97.5 | 98 | 97.9 | 97.5 |" in fresh
    assert fill(fresh, ROOT / "zoo") == fresh


def test_networks_of_others_stand_with_what_was_proven_before_and_ours_not_among_them() -> None:
    fresh = fill("<!-- zoo:recertified mmr-universal-mnist -->\n<!-- /zoo -->\n", ROOT / "zoo")
    assert len(fresh.splitlines()) == 7
    assert "| MMR-Universal, MNIST | linf=0.1,l2=0.3,l1=1 | 79.2 (mixed-integer programme and its linear relaxation) | 87.6 |" in fresh
    with pytest.raises(UserError, match="mmr-mnist-random is ours"):
        fill("<!-- zoo:recertified mmr-mnist-random -->\n<!-- /zoo -->\n", ROOT / "zoo")


def test_a_protocol_nobody_knows_and_another_kind_of_section_are_refused() -> None:
    with pytest.raises(UserError, match="know nothing about mnist with l2=7"):
        fill(MARKS.format("mnist l2=7", ""), ROOT / "zoo")
    with pytest.raises(UserError, match="not zoo:network"):
        fill(MARKS.format("x", "").replace("zoo:protocol", "zoo:network"), ROOT / "zoo")
