"""Attacks on words as people read them: one row per method and attack."""

from collections.abc import Sequence
from typing import Any

import pandas as pd

from cure_ray.results.attacked import FAMILY, Attacked, words_table
from cure_ray.results.comparisons import baseline_table
from cure_ray.results.study import Study
from cure_ray.results.tables import difference_text, readable, seed_table

NOTE = "Certificates are about the head in latent space. Nothing is proven about words: a sentence stands under an attack that failed."


def attacked_table(study: Study, rows: Sequence[Attacked], baseline: str | None = None) -> pd.DataFrame:
    """Accuracy under attack with its interval, then what the attack took, and the share of sentences that stay in each ball, in %."""
    measured = words_table(study, rows)
    if measured.empty:
        return measured
    accuracies = seed_table(study).set_index(["setting", "method"])
    out = measured[["setting", "method", "attack", "seeds", "n"]].astype({"n": int}).reset_index(drop=True)
    texts = []
    for row in out.to_dict("records"):
        own = accuracies.loc[[(row["setting"], row["method"])]].reset_index()
        texts.append(readable(own, [f"words_{row['attack']}"]).iloc[0, 0])
    out["accuracy under attack"] = texts
    if baseline is not None:
        out[f"against {baseline}"] = _differences(study, out, baseline)
    shown = ["queries", "words_changed", *(c for c in measured.columns if str(c).startswith(("inside_", "singles_")))]
    return out.join(measured[shown].round(1)) if len(study.settings) > 1 else out.join(measured[shown].round(1)).drop(columns="setting")


def _differences(study: Study, out: pd.DataFrame, baseline: str) -> list[str]:
    tests: dict[tuple[str, str, str], dict[Any, Any]] = {}
    for attack in out["attack"].unique():
        having = tuple(e for e in study.entries if any(t.name == attack for t in e.everything.family(FAMILY)))
        found = baseline_table(Study(having, study.source), baseline, f"words_{attack}")
        tests |= {(row["setting"], row["method"], attack): row for row in found.to_dict("records")}
    keys = zip(out["setting"], out["method"], out["attack"], strict=True)
    return [difference_text(tests.get(key)) for key in keys]
