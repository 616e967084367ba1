"""metrics.jsonl of a run: one JSON line per finished epoch. Torch-free, so that looking at a run costs nothing."""

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

METRICS = "metrics.jsonl"


def read_metrics(directory: Path) -> list[dict[str, Any]]:
    """The metrics of finished epochs. Half a line, as a killed writer of an older version left it, is no line."""
    return read_lines(directory / METRICS)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The JSON lines of a file that may not be there yet."""
    rows = []
    try:
        lines = path.read_text().splitlines()
    except FileNotFoundError:  # asked by opening it: on a network file system looking first may give an old answer
        lines = []
    for line in lines:
        with suppress(json.JSONDecodeError):
            rows.append(json.loads(line))
    return rows
