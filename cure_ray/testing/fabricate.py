"""Made-up verdict tables with the store's columns, for tests of everything behind the store."""

import hashlib
from collections import defaultdict
from typing import Any

import numpy as np
import pandas as pd

from cure_ray.certification.verdict import SCHEMA_VERSION
from cure_ray.results.study import RunInfo

THREATS = (("linf", 0.1), ("l2", 0.35), ("l1", 0.7))
STATUSES = ("certified", "falsified", "unknown", "timeout", "oom", "error")
STAGE_OF = {
    "certified": ("ibp", "crown-ibp", "crown", "alpha-crown", "branch-and-bound"),
    "falsified": ("attack", "branch-and-bound"),
    "unknown": ("alpha-crown", "branch-and-bound"),
    "timeout": ("branch-and-bound",),
    "oom": ("alpha-crown",),
    "error": ("ibp",),
    "misclassified": ("clean",),
}


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def verdicts(
    seed: int = 0,
    n: int = 40,
    runs: tuple[str, ...] = ("a",),
    threats: tuple[tuple[str, float], ...] = THREATS,
    dataset: str = "digits",
    certified: float = 0.6,
) -> pd.DataFrame:
    """Random but complete: every run has every sample under every threat."""
    rng = np.random.default_rng(seed)
    parts: dict[str, list[np.ndarray[Any, Any]]] = defaultdict(list)
    for run in runs:
        label = rng.integers(0, 10, n)
        predicted = np.where(rng.random(n) < 0.9, label, (label + 1) % 10)
        for norm, eps in threats:
            weights = np.array([certified, *[(1 - certified) / 5] * 5])
            status = np.where(predicted != label, "misclassified", rng.choice(STATUSES, n, p=weights))
            pick = rng.random(n)
            margin = np.where(status == "certified", rng.random(n), -rng.random(n))
            attacked = np.isin(status, ["falsified", "unknown", "timeout"])
            columns = {
                "run_id": np.full(n, digest(run)[:16]),
                "checkpoint_digest": np.full(n, digest(run)),
                "sample_index": np.arange(n),
                "label": label,
                "predicted": predicted,
                "threat": np.full(n, f"{norm}={eps:g}"),
                "norm": np.full(n, norm),
                "eps": np.full(n, eps),
                "status": status,
                "stage": np.array([STAGE_OF[s][int(u * len(STAGE_OF[s]))] for s, u in zip(status, pick, strict=True)]),
                "margin_lb": np.where(status == "misclassified", np.nan, margin),
                "attack_margin": np.where(attacked, np.where(status == "falsified", -0.1, 0.1), np.nan),
                "seconds": rng.random(n) / 10,
            }
            for name, values in columns.items():
                parts[name].append(values)
    frame = pd.DataFrame({name: np.concatenate(values) for name, values in parts.items()})
    return frame.assign(
        schema_version=SCHEMA_VERSION,
        dataset=dataset,
        split="test",
        family="lp",
        witness=None,
        engine="native",
        engine_version="1",
        seed=0,
        stages="ibp,crown-ibp,attack,crown,alpha-crown,branch-and-bound",
        budget_seconds=1.0,
        budget_nodes=100,
        box="0,1",
        nodes=0,
        message=None,
        grid=None,
    )


def infos(runs: dict[str, dict[str, object]]) -> dict[str, RunInfo]:
    """RunInfo per fabricated run: method and seed, and what else is given of the training."""
    out = {}
    for name, training in runs.items():
        training = dict(training)
        seed = training.pop("seed", 0)
        experiment = {"seed": seed, "dataset": {"name": "digits"}, "training": training, "threats": dict(THREATS)}
        out[digest(name)] = RunInfo(digest(name), experiment)
    return out
