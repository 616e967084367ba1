"""The tests of the library use the small networks of the certification tests."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "certify"))
