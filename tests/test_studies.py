"""The studies' own mathematics, and how scripts are divided; running them is documented in docs/experiments.md."""

import ast
import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

SCRIPTS = Path(__file__).parent.parent / "studies"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    for name in [p.stem for p in SCRIPTS.glob("*.py")]:
        monkeypatch.delitem(sys.modules, name, raising=False)
    return importlib.import_module


def test_overlap_is_one_for_equal_bounds_and_zero_for_disjoint_ones(script: Any) -> None:
    overlap = script("bound_overlap").overlap
    low, high = torch.tensor([[0.0, 0.5]]), torch.tensor([[0.5, 1.0]])
    assert float(overlap((low, high), (low, high))) == pytest.approx(1.0)
    assert float(overlap((low, high), (low + 2, high + 2))) == 0.0
    assert float(overlap((low, high), (low + 0.25, high + 0.25))) == pytest.approx(1 / 3)


def test_curves_train_every_configuration_once_and_vary_one_weight_at_a_time(script: Any) -> None:
    points = script("tuned_methods").curve_points({"eta": 2.0, "beta": 0.5, "lambda_inf": 0.1})
    pairs = [(point["eta"], point["beta"]) for point in points]
    assert len(pairs) == len(set(pairs)) == 6 + 5 - 1, "the best one lies on both curves"
    assert all(eta == 2.0 or beta == 0.5 for eta, beta in pairs)
    assert len(script("tuned_methods").curve_points({"eta": 2.3, "beta": 0.4})) == 6 + 5


@pytest.mark.parametrize("name", sorted(p.stem for p in SCRIPTS.glob("*.py")))
def test_every_script_says_how_it_is_run(name: str, script: Any) -> None:
    module = script(name)
    assert module.__doc__
    assert name == "common" or f"python studies/{name}.py" in module.__doc__


def test_analysis_reads_stores_and_needs_no_network() -> None:
    for path in sorted((SCRIPTS.parent / "analysis").glob("*.py")):
        names = {a.name for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Import) for a in n.names}
        names |= {n.module or "" for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.ImportFrom)}
        rooms = {name.split(".")[1] for name in names if name.startswith("cure_ray.")}
        assert rooms <= {"results", "config", "runs", "catalogue", "errors"}, path
        assert not {"torch", "cure_ray.runs.checkpoints"} & names, path
