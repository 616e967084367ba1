"""Weight beta of gradient projection (12.9): clean and union.

python analysis/beta_curve.py STORE --out analysis/out
"""

from cure_ray.results.figures import curves
from cure_ray.results.grids import vary
from cure_ray.results.outputs import Analysis, script

GRID = (0.0, 0.25, 0.5, 0.75, 1.0)


def main(analysis: Analysis) -> None:
    """Weight beta of gradient projection (12.9): clean and union."""
    found = vary(analysis.study, "training.beta", ("scratch",))
    for i, table in enumerate(found):
        title = f"{table['method'].iloc[0]}, {table['setting'].iloc[0]}"
        metrics = [m for m in ("clean", "union") if m in table]
        analysis.figure(f"beta_curve_{i}", curves(table, "beta", metrics, title, "beta"))
        analysis.table(f"beta_curve_{i}", table[["method", "beta", "seeds", "n", *metrics]], f"beta: {title}", digits=2)
    have = {float(v) for table in found for v in table["beta"]}
    lacking = [v for v in GRID if v not in have]
    if lacking:
        analysis.missing(f"runs with training.beta = {', '.join(f'{v:g}' for v in lacking)} that differ in nothing else")


if __name__ == "__main__":
    script(main)
