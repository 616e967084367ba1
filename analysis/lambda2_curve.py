"""Sub-selection ratio lambda_2 of method l2 (12.7): clean and certified l2.

python analysis/lambda2_curve.py STORE --out analysis/out
"""

from cure_ray.results.figures import curves
from cure_ray.results.grids import vary
from cure_ray.results.outputs import Analysis, script

GRID = (0.0, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2)


def main(analysis: Analysis) -> None:
    """Sub-selection ratio lambda_2 of method l2 (12.7): clean and certified l2."""
    found = vary(analysis.study, "training.lambda_2", ("l2",))
    for i, table in enumerate(found):
        title = f"{table['method'].iloc[0]}, {table['setting'].iloc[0]}"
        metrics = [m for m in ("clean", "cert_l2") if m in table]
        analysis.figure(f"lambda2_curve_{i}", curves(table, "lambda_2", metrics, title, "lambda_2", log=True))
        analysis.table(f"lambda2_curve_{i}", table[["method", "lambda_2", "seeds", "n", *metrics]], f"lambda_2: {title}", digits=6)
    have = {float(v) for table in found for v in table["lambda_2"]}
    lacking = [v for v in GRID if v not in have]
    if lacking:
        analysis.missing(f"runs with training.lambda_2 = {', '.join(f'{v:g}' for v in lacking)} that differ in nothing else")


if __name__ == "__main__":
    script(main)
