"""metrics.jsonl of a run: one JSON line per finished epoch. Torch-free, so that looking at a run costs nothing."""

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

METRICS = "metrics.jsonl"


def read_metrics(directory: Path) -> list[dict[str, Any]]:
    """The metrics of finished epochs. Half a line, as a killed writer leaves it, is no line."""
    path = directory / METRICS
    rows = []
    for line in path.read_text().splitlines() if path.exists() else []:
        with suppress(json.JSONDecodeError):
            rows.append(json.loads(line))
    return rows


def rewind_metrics(directory: Path, epoch: int) -> None:
    """Forget lines of epochs that will run again."""
    path = directory / METRICS
    if path.exists():
        kept = [row for row in read_metrics(directory) if row["epoch"] <= epoch]
        partial = path.with_suffix(".partial")
        partial.write_text("".join(json.dumps(row) + "\n" for row in kept))
        partial.replace(path)
