"""Bound differences (12.15): proven margins to every other class, Max against Scratch, on the images where they differ most.

A stored bound is as tight as the stage that decided the sample, which stands in every panel; images an attack broke have loose bounds
only and are left out. For equal footing certify both checkpoints with --stages alpha-crown into a store of its own.

python analysis/bound_differences.py STORE --out analysis/out
"""

import numpy as np
import pandas as pd

from cure_ray.results.figures import margin_comparison
from cure_ray.results.frames import read_verdicts
from cure_ray.results.outputs import Analysis, script
from cure_ray.results.study import Study

PICTURES = 4


def margins_table(analysis: Analysis, study: Study) -> pd.DataFrame:
    """checkpoint, threat, sample, label, margins: rows with bounds only."""
    columns = ["checkpoint_digest", "threat", "sample_index", "label", "stage", "margins"]
    rows = read_verdicts(analysis.loaded.stores, columns)
    names = {e.evaluation.checkpoint: e.label for e in study.entries}
    rows = rows[rows["checkpoint_digest"].isin(list(names)) & (rows["margins"].map(len) > 0) & (rows["stage"] != "attack")]
    return rows.assign(method=rows["checkpoint_digest"].astype(str).map(names))


def main(analysis: Analysis) -> None:
    """Bound-difference plots."""
    for number, setting in enumerate(analysis.study.settings):
        own = analysis.study.within(setting)
        one = next((e for e in own.entries if e.info.method == "max"), None)
        two = next((e for e in own.entries if e.info.method == "scratch" and one and e.info.seed == one.info.seed), None)
        if one is None or two is None:
            analysis.missing(f"{setting}: a run of max and one of scratch with the same seed")
            continue
        rows = margins_table(analysis, Study((one, two)))
        threats = [t.name for t in one.evaluation.threats if t.norm in ("linf", "l2")]
        table = rows[rows["threat"].isin(threats)].assign(worst=lambda r: r["margins"].map(min))
        wide = table.pivot_table(index="sample_index", columns=["method", "threat"], values="worst", observed=True).dropna()
        if wide.empty or not threats or wide.shape[1] < 2 * len(threats):
            analysis.missing(f"{setting}: images with bounds in every norm for both methods")
            continue
        gap = (wide[two.label] - wide[one.label]).sum(axis=1)
        mean = table.groupby(["method", "threat"], observed=True)["worst"].describe()[["count", "mean", "25%", "50%", "75%"]].reset_index()
        analysis.table(f"bound_differences_{number}", mean, f"Smallest proven margin, {setting}", digits=4)
        for sample in gap.abs().sort_values(ascending=False).index[:PICTURES]:
            here = table[table["sample_index"] == sample].set_index(["method", "threat"])
            label = int(here["label"].iloc[0])
            margins = {m: {t: list(np.asarray(here.loc[(m, t), "margins"])) for t in threats} for m in (one.label, two.label)}
            stages = {m: {t: str(here.loc[(m, t), "stage"]) for t in threats} for m in margins}
            size = len(margins[one.label][threats[0]])
            classes = [k for k in range(size + 1) if k != label]
            figure = margin_comparison(margins, classes, f"image {sample}, class {label}: proven margin to every other class", stages)
            analysis.figure(f"bound_differences_{number}_{sample}", figure)


if __name__ == "__main__":
    script(main)
