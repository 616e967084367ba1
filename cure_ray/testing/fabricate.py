"""Made-up verdict tables with the store's columns, for tests of everything behind the store."""

import hashlib
from collections import defaultdict
from typing import Any

import numpy as np
import pandas as pd

from cure_ray.certification.verdict import SCHEMA_VERSION
from cure_ray.results.study import RunInfo
from cure_ray.text.record import WordsRecord
from cure_ray.text.words import Change

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


def attacked(rows: pd.DataFrame, attack: str = "pwws", seed: int = 0) -> pd.DataFrame:
    """Rows of an attack on words to go with a table of verdicts: the same networks and samples, some of them broken."""
    rng = np.random.default_rng(seed)
    out = rows[rows["norm"] == "linf"].reset_index(drop=True).copy()
    broken = (out["status"] != "misclassified") & (rng.random(len(out)) < 0.5)
    out["status"] = np.where(out["status"] == "misclassified", "misclassified", np.where(broken, "falsified", "unknown"))
    out["stage"] = np.where(out["status"] == "misclassified", "clean", "attack")
    records = []
    for sample, status in zip(out["sample_index"], out["status"], strict=True):
        changes = (Change(1, "film", "<film> & co"),) if status == "falsified" else ()
        tried = status != "misclassified"
        moved, near = ({"linf": 0.4, "l2": 2.0, "l1": 9.0}, {"linf": 1, "l2": 2, "l1": 0}) if tried else (None, None)
        records.append(WordsRecord(f"A film number {sample} .", changes, moved, 4 * tried, near).to_json())
    return out.assign(
        family="text", threat=attack, norm="text", eps=0.0, engine="words", stages="attack", box="none", nodes=7, message=records,
        margin_lb=np.nan, attack_margin=np.where(out["status"] == "misclassified", np.nan, np.where(broken, -0.5, 0.5)),
        run_id=[digest(f"{run}{attack}")[:16] for run in out["run_id"]],
    )  # fmt: skip


def infos(runs: dict[str, dict[str, object]]) -> dict[str, RunInfo]:
    """RunInfo per fabricated run: method and seed, and what else is given of the training."""
    out = {}
    for name, training in runs.items():
        training = dict(training)
        seed = training.pop("seed", 0)
        experiment = {"seed": seed, "dataset": {"name": "digits"}, "training": training, "threats": dict(THREATS)}
        out[digest(name)] = RunInfo(digest(name), experiment)
    return out
