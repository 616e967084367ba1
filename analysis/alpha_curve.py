"""Weight alpha of Joint (12.6): clean, per norm and the two-norm union.

python analysis/alpha_curve.py STORE --out analysis/out
"""

from cure_ray.results.figures import curves
from cure_ray.results.grids import vary
from cure_ray.results.outputs import Analysis, script

GRID = (0.0, 0.25, 0.5, 0.75, 1.0)


def main(analysis: Analysis) -> None:
    """Weight alpha of Joint (12.6): clean, per norm and the two-norm union."""
    found = vary(analysis.study, "training.alpha", ("joint",))
    for i, table in enumerate(found):
        title = f"{table['method'].iloc[0]}, {table['setting'].iloc[0]}"
        metrics = [m for m in ("clean", "cert_linf", "cert_l2", "union_linf_l2", "union") if m in table]
        analysis.figure(f"alpha_curve_{i}", curves(table, "alpha", metrics, title, "alpha"))
        analysis.table(f"alpha_curve_{i}", table[["method", "alpha", "seeds", "n", *metrics]], f"alpha: {title}", digits=2)
    have = {float(v) for table in found for v in table["alpha"]}
    lacking = [v for v in GRID if v not in have]
    if lacking:
        analysis.missing(f"runs with training.alpha = {', '.join(f'{v:g}' for v in lacking)} that differ in nothing else")


if __name__ == "__main__":
    script(main)
