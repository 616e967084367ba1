"""A training of seconds, and what is the same in two of them."""

import json
from pathlib import Path
from typing import Any

from cure_ray.config import Experiment, resolve
from cure_ray.runs.directory import list_checkpoints
from cure_ray.runs.metrics import read_metrics

TIMED = {"seconds", "nt_seconds", "merge_seconds", "epoch_seconds", "exchange_seconds"}


def small(epochs: int = 4) -> Experiment:
    """Two batches an epoch, gradient projection from the second epoch on."""
    return resolve(
        {
            "preset": "smoke",
            "name": "small",
            "dataset": {"train_samples": 200, "validation": 40},
            "network": {"width": 0.25},
            "training": {"method": "scratch", "epochs": epochs, "standard_epochs": 0, "anneal_epochs": 1, "lr_milestones": []},
            "execution": {"keep_checkpoints": 2, "device": "cpu"},
        }
    )


def essence(run: Path) -> dict[str, Any]:
    """Metrics without times and checkpoints without metrics, byte by byte: what an undisturbed run would have too."""
    rows = [{k: v for k, v in row.items() if k not in TIMED} for row in read_metrics(run)]
    files = {f"{c.name}/{p.name}": p.read_bytes() for c in list_checkpoints(run) for p in sorted(c.glob("*.safetensors"))}
    return {"metrics": json.dumps(rows), **files}


def everything(run: Path) -> dict[str, bytes]:
    """All files but those of the lease."""
    return {str(p.relative_to(run)): p.read_bytes() for p in sorted(run.rglob("*")) if p.is_file() and ".lease" not in p.parts}
