"""Fault injection: runs with `pytest -m chaos` only (make chaos)."""

import pytest


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if "chaos" not in (config.option.markexpr or ""):
        skip = pytest.mark.skip(reason="fault injection takes long: make chaos")
        for item in items:
            if item.get_closest_marker("chaos"):
                item.add_marker(skip)
