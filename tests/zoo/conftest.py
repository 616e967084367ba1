"""What the tests of this directory share."""

from pathlib import Path

import nearest_mean
import pytest


@pytest.fixture
def nearest(tmp_path: Path) -> nearest_mean.Nearest:
    return nearest_mean.make(tmp_path)
