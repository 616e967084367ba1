"""Where the union is lost: R_union = R_r + R_align per method, the Pareto front, and what each stage adds.

python analysis/decomposition.py STORE --out analysis/out
"""

from cure_ray.results.decomposition import FIXED, decomposition_summary, decomposition_table, main_decomposition
from cure_ray.results.figures import decomposition
from cure_ray.results.outputs import Analysis, script
from cure_ray.results.tables import pareto_table, readable, stage_table, time_table

NOTE = (
    "R_r: errors of r, the norm with most errors (where it differs between seeds, all are named). R_align: images that r certifies and "
    "another norm does not. R_union: images not certified in every norm. Last: the same split with r fixed to linf. "
    "R_union = R_r + R_align was checked on the counts of every run."
)


def main(analysis: Analysis) -> None:
    """Error decomposition, Pareto front, per-stage columns and time per stage."""
    runs = decomposition_table(analysis.study)
    summary = decomposition_summary(analysis.study)
    weakest = main_decomposition(summary)
    shown = weakest[["setting", "method", "seeds", "n", "r"]].join(readable(weakest, ["R_r", "R_align", "R_union"]))
    fixed = main_decomposition(summary, FIXED)
    if not fixed.empty:
        both = readable(fixed, ["R_r", "R_align"]).set_axis(["R_linf", "R_align, r = linf"], axis=1)
        shown = shown.merge(fixed[["setting", "method"]].join(both), on=["setting", "method"], how="left")
    analysis.table("decomposition", summary, "R_union = R_r + R_align (%)", shown=shown, note=NOTE)
    analysis.table("decomposition_runs", runs, "R_union = R_r + R_align (%), every run and choice of r")
    for i, (setting, rows) in enumerate(weakest.groupby("setting", sort=False)):
        analysis.figure(f"decomposition_{i}", decomposition(rows, str(setting)))
    if runs.empty:
        analysis.missing("verdicts in two norms or more: without them there is no union to decompose")
    analysis.table("pareto", pareto_table(analysis.study), "Clean and certified accuracy: front and hypervolume (%)")
    stages = stage_table(analysis.study)
    used = stages[stages["stage"].isin(analysis.loaded.enabled_stages(analysis.study))]
    wide = used.pivot_table(index=["setting", "method"], columns="stage", values="union", sort=False) if "union" in used else None
    caption = "Union (%) certified by a stage or an earlier one, mean over seeds; the paper's columns are alpha-CROWN"
    analysis.table("stages", stages, caption, shown=None if wide is None else wide.reset_index())
    times = time_table(analysis.study)
    total = times.groupby(["setting", "threat", "stage"], sort=False)[["decided", "certified", "seconds"]].sum().reset_index()
    analysis.table("time_per_stage", times, "Verdicts and seconds by deciding stage, all runs together", shown=total)


if __name__ == "__main__":
    script(main)
