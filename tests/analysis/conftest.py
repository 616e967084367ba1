"""Makes the made-up stores of tests/results available here."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "results"))
