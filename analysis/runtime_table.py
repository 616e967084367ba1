"""Seconds per training epoch at full radius (12.14), per method, and with and without gradient projection.

python analysis/runtime_table.py STORE --runs runs --out analysis/out
"""

from pathlib import Path

import pandas as pd

from cure_ray.results.outputs import Analysis, script
from cure_ray.results.paper import DATASETS, read_paper
from cure_ray.results.study import RunInfo
from cure_ray.runs.metrics import read_metrics


def seconds(info: RunInfo) -> tuple[float, str]:
    """Median over the epochs at full radius; from the run if it is known, else the checkpoint's own epoch."""
    rows = read_metrics(info.directory) if info.directory else []
    full = [float(r["epoch_seconds"]) for r in rows if r.get("rho", 1.0) >= 1.0 and "epoch_seconds" in r]
    if full:
        return float(pd.Series(full).median()), f"median of {len(full)} epochs"
    alone = info.metrics.get("epoch_seconds")
    return (float(alone), "one epoch") if alone is not None else (float("nan"), "not recorded")


def main(analysis: Analysis) -> None:
    """Runtime table."""
    paper = read_paper(Path(__file__).parent / "paper")
    paper = paper[paper["metric"] == "seconds_per_epoch"]
    rows = []
    for e in analysis.study.entries:
        value, what = seconds(e.info)
        machine = e.info.hardware.get("gpu") or e.info.hardware.get("processor") or "not recorded"
        name = e.info.paper_name if "[" not in e.label else e.label  # a variant has no counterpart
        theirs = paper[(paper["dataset"].map(DATASETS) == e.evaluation.dataset) & (paper["method"] == name)]["value"]
        rows.append(
            {
                "dataset": e.evaluation.dataset, "network": e.info.setting("network.name"), "method": e.label, "seed": e.info.seed,
                "seconds_per_epoch": value, "measured": what, "hardware": machine,
                "paper (A40)": theirs.iloc[0] if len(theirs) else float("nan"),
            }
        )  # fmt: skip
        if value != value:
            analysis.missing(f"epoch times of {e.label}, seed {e.info.seed}: give its run with --runs")
    analysis.table("runtime", pd.DataFrame(rows), "Seconds per epoch at full radius", digits=2)


if __name__ == "__main__":
    script(main)
