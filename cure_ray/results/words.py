"""Attacks on words as people read them: accuracy and cost per method and attack, paired tests, and how far vectors moved."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from cure_ray.results.attacked import FAMILY, Attacked, words_table
from cure_ray.results.comparisons import baseline_table, significance_table
from cure_ray.results.study import Study
from cure_ray.results.tables import difference_text, readable, seed_table
from cure_ray.text.record import inside

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


def attacked_by(study: Study, attack: str | None = None) -> Study:
    """The networks whose words were attacked, by any attack or by this one."""
    having = tuple(e for e in study.entries if any(attack in (None, t.name) for t in e.everything.family(FAMILY)))
    return Study(having, study.source)


def paired_table(study: Study) -> pd.DataFrame:
    """Per attack, every pair of methods it was run on: exact sign tests on the same sentences, seeds pooled, Holm within the attack."""
    names = dict.fromkeys(t.name for e in study.entries for t in e.everything.family(FAMILY))
    found = [significance_table(attacked_by(study, n), f"words_{n}", pooled=True).assign(attack=n) for n in names]
    return pd.concat(found, ignore_index=True).sort_values("p_holm", kind="stable") if found else pd.DataFrame()


def moved_table(study: Study, rows: Sequence[Attacked]) -> pd.DataFrame:
    """Per setting and attack, all networks together: what one exchanged word and what a broken sentence do to the vector.

    `single_*` is the share of single exchanges whose vector stays in the ball, in %; `moved_*` the median distance of broken sentences,
    `inside_*` how many of them lie in the ball.
    """
    own = attacked_by(study)
    out = list[dict[str, Any]]()
    for setting in own.settings:
        entries = own.within(setting).entries
        radii = {str(t.norm): t.eps for t in entries[0].evaluation.threats if t.family == "lp"}
        whose = {e.evaluation.checkpoint for e in entries}
        for attack in dict.fromkeys(row.attack for row in rows):
            mine = [row.record for row in rows if row.checkpoint in whose and row.attack == attack and row.tried]
            broken = [
                row.record.distances or {} for row in rows if row.checkpoint in whose and row.attack == attack and row.status == "falsified"
            ]
            singles = sum(record.singles for record in mine)
            row: dict[str, Any] = {"setting": setting, "attack": attack, "attacked": len(mine), "singles": singles, "broken": len(broken)}
            for norm, eps in radii.items():
                near = sum((record.singles_inside or {}).get(norm, 0) for record in mine)
                row[f"single_{norm}"] = 100.0 * near / singles if singles else float("nan")
                row[f"moved_{norm}"] = float(np.median([d[norm] for d in broken])) if broken else float("nan")
                row[f"inside_{norm}"] = sum(inside(d, {norm: eps})[norm] for d in broken)
            out.append(row)
    return pd.DataFrame(out)


def _differences(study: Study, out: pd.DataFrame, baseline: str) -> list[str]:
    tests: dict[tuple[str, str, str], dict[Any, Any]] = {}
    for attack in out["attack"].unique():
        found = baseline_table(attacked_by(study, attack), baseline, f"words_{attack}")
        tests |= {(row["setting"], row["method"], attack): row for row in found.to_dict("records")}
    keys = zip(out["setting"], out["method"], out["attack"], strict=True)
    return [difference_text(tests.get(key)) for key in keys]
