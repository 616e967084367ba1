"""Fault injection: runs with `pytest -m chaos` only (make chaos)."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "cluster"))  # the helpers of the tests on Ray


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if "chaos" not in (config.option.markexpr or ""):
        skip = pytest.mark.skip(reason="fault injection takes long: make chaos")
        for item in items:
            if item.get_closest_marker("chaos"):
                item.add_marker(skip)
