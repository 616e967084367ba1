"""A sweep that nobody has worked on yet."""

from pathlib import Path

import pytest
import search_helpers


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """The directory of a sweep that nobody has worked on yet."""
    return search_helpers.new_sweep(tmp_path / "out")
