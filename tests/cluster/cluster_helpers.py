"""Small experiments, comparisons and murder shared by the tests on Ray."""

import os
from pathlib import Path
from typing import Any

from cure_ray.config import Experiment, resolve


def tiny(**training: Any) -> Experiment:
    """Seconds on one core: 4 steps an epoch, both branches from the first epoch on."""
    defaults = {"epochs": 3, "standard_epochs": 0, "anneal_epochs": 0, "batch_size": 64, "lr_milestones": []}
    return resolve(
        {
            "preset": "smoke",
            "name": "tiny",
            "dataset": {"name": "digits", "train_samples": 300, "validation": 40},
            "training": {**defaults, **training},
            "execution": {"device": "cpu"},
        }
    )


def files_of(checkpoint: Path) -> dict[str, bytes]:
    """Weights and optimiser states, byte by byte."""
    return {p.name: p.read_bytes() for p in sorted(checkpoint.glob("*.safetensors"))}


def own_processes(title: str) -> list[int]:
    """Descendants of this process with this in their command line: never those of somebody else's session."""
    parents: dict[int, int] = {}
    titles: dict[int, str] = {}
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            try:
                fields = (process / "stat").read_text().rpartition(")")[2].split()
                parents[int(process.name)] = int(fields[1])
                titles[int(process.name)] = (process / "cmdline").read_bytes().decode(errors="replace")
            except OSError:
                continue

    def is_ours(pid: int) -> bool:
        while pid > 1:
            if pid == os.getpid():
                return True
            pid = parents.get(pid, 0)
        return False

    return [pid for pid, line in titles.items() if title in line and pid != os.getpid() and is_ours(pid)]
