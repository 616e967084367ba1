"""Bound alignment and gradient projection (12.3): Max, Max + BA, Max + GP, Max + BA + GP, all else equal.

python analysis/ba_gp_ablation.py STORE --out analysis/out
"""

from typing import Any

from cure_ray.results.ablation import STEPS, ladders, step
from cure_ray.results.figures import bars, decomposition
from cure_ray.results.outputs import Analysis, script
from cure_ray.results.tables import difference_text, readable

NOTE = (
    "R_r + R_align = 100 - union, r being the norm with most errors. The last column: change of the union against that step, in "
    "points (± deviation over seeds); p from an exact paired sign test on the same images, seeds pooled, Holm-corrected; * below 0.05."
)


def _change(row: dict[Any, Any]) -> str:
    text = difference_text(row)
    return text if text == "-" else f"{row['below_step']}: {text}"


def main(analysis: Analysis) -> None:
    """BA and GP ablation."""
    found = ladders(analysis.study)
    for i, rows in enumerate(found):
        setting = rows["setting"].iloc[0]
        metrics = [c for c in ("clean", "cert_linf", "cert_l2", "cert_l1", "union") if c in rows]
        shown = rows[["step", "method", "seeds", "n"]].join(readable(rows, [*metrics, "R_r", "R_align"]))
        shown["union against a step below"] = [_change(row) for row in rows.to_dict("records")]
        analysis.table(f"ba_gp_{i}", rows, f"Bound alignment and gradient projection (%), {setting}", shown=shown, note=NOTE)
        named = (
            rows.assign(method=rows["step"] + " [" + rows["method"] + "]")
            if rows["step"].duplicated().any()
            else rows.assign(method=rows["step"])
        )
        analysis.figure(f"ba_gp_{i}", bars(named, metrics, str(setting)))
        analysis.figure(f"ba_gp_decomposition_{i}", decomposition(named, str(setting)))
        lacking = [s for s in STEPS if s not in set(rows["step"])]
        if lacking:
            how = "method scratch: training.projection=false leaves out GP, training.eta=0 BA"
            analysis.missing(f"{setting}: {', '.join(lacking)} ({how})")
    if not found:
        have = sorted({step(e.info) for e in analysis.study.entries} - {""})
        analysis.missing(f"runs of max and scratch that differ in BA and GP alone (found: {', '.join(have) or 'none'})")


if __name__ == "__main__":
    script(main)
