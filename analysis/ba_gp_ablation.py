"""Bound alignment and gradient projection, one after the other (12.3): Max, Max + BA, Max + BA + GP.

python analysis/ba_gp_ablation.py STORE --out analysis/out
"""

import pandas as pd

from cure_ray.results.figures import bars
from cure_ray.results.outputs import Analysis, script
from cure_ray.results.study import RunInfo
from cure_ray.results.tables import seed_table

STEPS = ("CURE-Max", "+BA", "+BA + GP")


def step(info: RunInfo) -> str:
    """Which rung of the ablation a run is; empty if none."""
    if info.method == "max":
        return STEPS[0]
    if info.method != "scratch" or not info.setting("training.eta"):
        return ""
    projection = info.setting("training.projection")
    with_projection = projection is not False and (info.setting("training.beta") or 0) > 0
    return STEPS[2] if with_projection else STEPS[1]


def main(analysis: Analysis) -> None:
    """BA and GP ablation."""
    steps = {e.label: step(e.info) for e in analysis.study.entries}
    table = seed_table(analysis.study)
    table = table.assign(step=table["method"].map(steps))
    for i, (setting, rows) in enumerate(table[table["step"] != ""].groupby("setting", sort=False)):
        rows = rows.assign(step=pd.Categorical(rows["step"], STEPS, ordered=True)).sort_values("step", kind="stable")
        metrics = [c for c in ("clean", "cert_linf", "cert_l2", "cert_l1", "union") if c in rows]
        shown = rows.assign(step=rows["step"].astype(str))[["step", "method", "seeds", "n", *metrics]]
        analysis.table(f"ba_gp_{i}", shown, f"Bound alignment and gradient projection, {setting}")
        analysis.figure(
            f"ba_gp_{i}", bars(rows.assign(method=rows["step"].astype(str) + " [" + rows["method"] + "]"), metrics, str(setting))
        )
        lacking = [s for s in STEPS if s not in set(rows["step"])]
        if lacking:
            analysis.missing(f"{setting}: {', '.join(lacking)} (+BA is method scratch with training.projection=false)")
    if not any(steps.values()):
        analysis.missing("runs of max and scratch")


if __name__ == "__main__":
    script(main)
