"""The table of methods is complete, and nothing else knows a method by its name."""

import ast
from pathlib import Path
from typing import get_args

import pytest

from cure_ray.config import METHODS, Training
from cure_ray.config.methods import LOSSES, Loss, Method, Objective, display_name, inactive_fields, method_rank
from cure_ray.training.losses import BETWEEN, OBJECTIVES

PACKAGE = Path(__file__).parent.parent / "cure_ray"


def test_every_method_has_a_row_and_every_objective_a_function() -> None:
    assert get_args(Method) == tuple(METHODS)
    assert set(get_args(Objective)) == set(OBJECTIVES) == {r.objective for r in METHODS.values()} - {"base"}


def test_every_loss_has_a_meaning_and_every_one_but_sabrs_a_function() -> None:
    assert get_args(Loss) == tuple(LOSSES)
    assert set(LOSSES) == {"sabr", *BETWEEN}


def test_every_field_of_a_row_exists() -> None:
    for row in METHODS.values():
        assert set(row.fields) | set(row.defaults.get("training", {})) <= set(Training.model_fields)


BOUNDED = {"loss", "bounds", "natural_weight", "ramp_bound"}
ALIGNED, TURNED = {"base", "eta", "align", "align_subset"}, {"transformation", "transformation_widths"}


@pytest.mark.parametrize(
    ("method", "base", "expected"),
    [
        ("linf", "max", {"norms", "alpha", "random_weights"} | ALIGNED | TURNED),
        ("scratch", "max", {"alpha", "random_weights"} | TURNED),
        ("scratch", "joint", {"random_weights"} | TURNED),
        ("joint", "max", {"random_weights"} | ALIGNED | TURNED),
        ("cgt", "max", {"norms", "alpha", "random_weights"} | ALIGNED | BOUNDED),
        ("l2_pgd", "max", {"norms", "alpha", "random_weights"} | ALIGNED | TURNED | BOUNDED),
    ],
)
def test_settings_of_other_methods_are_inactive(method: Method, base: str, expected: set[str]) -> None:
    assert inactive_fields(method, base) == expected


def test_tables_name_and_order_methods_by_their_rows() -> None:
    assert [display_name(m) for m in ("scratch", "l2_pgd", "a-net-from-elsewhere")] == ["CURE-Scratch", "l2_pgd", "a-net-from-elsewhere"]
    assert sorted(["elsewhere", "scratch", "natural", "joint"], key=method_rank) == ["natural", "joint", "scratch", "elsewhere"]


def test_no_other_module_compares_a_method_with_a_name() -> None:
    """`x.method == "scratch"` or `in ("max", ...)` anywhere else would be a second home for what a method is."""
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Compare) and isinstance(node.left, ast.Attribute) and node.left.attr == "method":
                names = {c.value for c in ast.walk(node) if isinstance(c, ast.Constant)} & set(METHODS)
                if names:
                    found.append(f"{path.relative_to(PACKAGE)}:{node.lineno} {sorted(names)}")
    assert not found
