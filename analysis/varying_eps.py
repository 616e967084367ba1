"""Union accuracy with one norm's radius varied and the others fixed (12.10).

Needs verdicts at several radii of a norm: certify the same checkpoint again with, e.g., --threats linf=4/255 into the same store.

    python analysis/varying_eps.py STORE --out analysis/out
"""

from cure_ray.results.figures import lines_by_method
from cure_ray.results.grids import radius_curves
from cure_ray.results.outputs import Analysis, script


def main(analysis: Analysis) -> None:
    """Varying-eps curves."""
    table, holes = radius_curves(analysis.study)
    for what in holes:
        analysis.missing(what)
    if table.empty:
        analysis.missing(
            "verdicts at more than one radius of a norm, for example cure-ray certify CHECKPOINT --threats linf=0.05 --out STORE"
        )
        return
    analysis.table("varying_eps", table, "Union accuracy (%) with one radius varied", digits=4)
    for (setting, norm), rows in table.groupby(["setting", "norm"], sort=False):
        mean = rows.groupby(["method", "eps"], sort=False)[["union", "union_low", "union_high"]].mean().reset_index()
        number = list(analysis.study.settings).index(str(setting))
        analysis.figure(f"varying_eps_{number}_{norm}", lines_by_method(mean, "eps", "union", f"{setting}", f"{norm} radius"))


if __name__ == "__main__":
    script(main)
