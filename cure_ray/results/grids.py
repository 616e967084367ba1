"""Grids: runs that differ in one thing only, a setting or a certified radius, and what that does to the accuracies."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from cure_ray.config.methods import method_rank
from cure_ray.errors import UserError
from cure_ray.results.statistics import wilson
from cure_ray.results.study import Entry, Study, flatten
from cure_ray.results.tables import accuracy_table
from cure_ray.threats.norms import NORMS

_NAMES = ("name", "origin", "seed", "execution.", "certification.", "training.start_from")


def vary(study: Study, path: str, methods: Sequence[str]) -> list[pd.DataFrame]:
    """Per method and setting, the largest family of runs in which nothing but `path` (and the seed) differs; means over seeds.

    Columns: setting, method, the last part of `path`, seeds, and the accuracies with their intervals.
    """
    field = path.rpartition(".")[2]
    table = accuracy_table(study).set_index("checkpoint")
    families: dict[tuple[Any, ...], list[Entry]] = defaultdict(list)
    for entry in study.entries:
        value = entry.info.setting(path)
        if entry.info.method in methods and value is not None:
            rest = tuple(sorted((k, str(v)) for k, v in flatten(entry.info.experiment).items() if k != path and not k.startswith(_NAMES)))
            families[entry.setting, entry.info.method, rest].append(entry)
    largest: dict[tuple[str, str], list[Entry]] = {}
    for (setting, method, _), entries in families.items():
        distinct = len({float(e.info.setting(path)) for e in entries})
        known = largest.get((setting, method), [])
        if distinct > 1 and distinct > len({float(e.info.setting(path)) for e in known}):
            largest[setting, method] = entries
    out = []
    for (setting, method), entries in sorted(largest.items(), key=lambda item: (item[0][0], method_rank(item[0][1]))):
        rows = table.loc[[e.evaluation.checkpoint for e in entries]].copy()
        rows[field] = [float(e.info.setting(path)) for e in entries]
        out.append(_mean(rows, field).assign(setting=setting, method=method))
    return out


def _mean(rows: pd.DataFrame, by: str) -> pd.DataFrame:
    metrics = [c for c in rows.columns if f"{c}_low" in rows.columns and rows[c].notna().all()]
    made = []
    for value, group in rows.groupby(by):
        row: dict[str, Any] = {by: value, "seeds": len(group), "n": int(group["n"].min())}
        for m in metrics:
            mean = float(group[m].mean(skipna=False))
            low, high = wilson(mean / 100 * row["n"], row["n"])
            row |= {m: mean, f"{m}_sd": float(group[m].std(ddof=1)) if len(group) > 1 else float("nan")}
            row |= {f"{m}_low": 100 * float(low), f"{m}_high": 100 * float(high)}
        made.append(row)
    return pd.DataFrame(made)


def radius_curves(study: Study) -> tuple[pd.DataFrame, list[str]]:
    """Union accuracy with one norm's radius varied and the others fixed; and what could not be computed because of holes."""
    rows, holes = [], []
    for entry in study.entries:
        fixed = {t.norm: t for t in entry.evaluation.threats}
        for norm in NORMS:
            radii = [t for t in entry.everything.family("lp") if t.norm == norm]
            if len(radii) < 2:
                continue
            for threat in radii:
                others = [t for n, t in fixed.items() if n != norm]
                try:
                    block = entry.everything.only([threat, *others])
                except UserError as error:
                    holes.append(str(error))
                    continue
                hits = np.asarray(block.certified.all(1))
                low, high = wilson(int(hits.sum()), block.n)
                rows.append(
                    {
                        "setting": entry.setting, "method": entry.label, "seed": entry.info.seed, "norm": norm, "eps": threat.eps,
                        "n": block.n,
                        "union": 100 * float(hits.mean()), "union_low": 100 * float(low), "union_high": 100 * float(high),
                    }
                )  # fmt: skip
    return pd.DataFrame(rows, columns=["setting", "method", "seed", "norm", "eps", "n", "union", "union_low", "union_high"]), holes
