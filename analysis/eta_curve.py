"""Weight eta of bound alignment (12.8): clean and union.

python analysis/eta_curve.py STORE --out analysis/out
"""

from cure_ray.results.figures import curves
from cure_ray.results.grids import vary
from cure_ray.results.outputs import Analysis, script

GRID = (0.5, 1.0, 1.5, 2.0, 4.0)


def main(analysis: Analysis) -> None:
    """Weight eta of bound alignment (12.8): clean and union."""
    found = vary(analysis.study, "training.eta", ("scratch", "finetune"))
    for i, table in enumerate(found):
        title = f"{table['method'].iloc[0]}, {table['setting'].iloc[0]}"
        metrics = [m for m in ("clean", "union") if m in table]
        analysis.figure(f"eta_curve_{i}", curves(table, "eta", metrics, title, "eta"))
        analysis.table(f"eta_curve_{i}", table[["method", "eta", "seeds", "n", *metrics]], f"eta: {title}", digits=2)
    have = {float(v) for table in found for v in table["eta"]}
    lacking = [v for v in GRID if v not in have]
    if lacking:
        analysis.missing(f"runs with training.eta = {', '.join(f'{v:g}' for v in lacking)} that differ in nothing else")


if __name__ == "__main__":
    script(main)
