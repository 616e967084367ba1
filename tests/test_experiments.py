"""The experiment scripts' own mathematics; running them is documented in docs/experiments.md."""

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

SCRIPTS = Path(__file__).parent.parent / "experiments"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    for name in [p.stem for p in SCRIPTS.glob("*.py")]:
        monkeypatch.delitem(sys.modules, name, raising=False)
    return importlib.import_module


def test_the_monotone_cache_finds_every_curve_with_fewer_certifications(script: Any) -> None:
    module, grid = script("varying_eps"), [0.1, 0.2, 0.3, 0.4, 0.5, 0.6]
    limits = [0.0, 0.15, 0.35, 0.6, 1.0, 0.3]
    asked: list[tuple[float, int]] = []

    def decide(eps: float, members: list[int]) -> list[bool]:
        asked.extend((eps, m) for m in members)
        return [eps <= limits[m] for m in members]

    found, calls = module.certified_counts(decide, grid, len(limits))
    assert found == [{s for s, limit in enumerate(limits) if eps <= limit} for eps in grid]
    assert calls == len(asked) == len(set(asked)) <= 3 * len(limits) < len(grid) * len(limits)


def test_overlap_is_one_for_equal_bounds_and_zero_for_disjoint_ones(script: Any) -> None:
    overlap = script("bound_overlap").overlap
    low, high = torch.tensor([[0.0, 0.5]]), torch.tensor([[0.5, 1.0]])
    assert float(overlap((low, high), (low, high))) == pytest.approx(1.0)
    assert float(overlap((low, high), (low + 2, high + 2))) == 0.0
    assert float(overlap((low, high), (low + 0.25, high + 0.25))) == pytest.approx(1 / 3)


@pytest.mark.parametrize("name", sorted(p.stem for p in SCRIPTS.glob("*.py")))
def test_every_script_says_how_it_is_run(name: str, script: Any) -> None:
    module = script(name)
    assert module.__doc__
    assert name == "common" or f"python experiments/{name}.py" in module.__doc__
