"""Makes the helpers of this directory importable, and knows a sweep."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import search_helpers


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """The directory of a sweep that nobody has worked on yet."""
    return search_helpers.new_sweep(tmp_path / "out")
