"""Trade-off bars (12.17): certified accuracy per norm and union, one group per method.

python analysis/trade_off_bars.py STORE --out analysis/out
"""

from cure_ray.results.figures import bars
from cure_ray.results.outputs import Analysis, script
from cure_ray.results.tables import readable, seed_table

PAPER = ("linf", "l2", "CURE-Scratch", "CURE-Finetune")


def main(analysis: Analysis) -> None:
    """Trade-off bars, one figure per setting."""
    table = seed_table(analysis.study)
    for i, (setting, rows) in enumerate(table.groupby("setting", sort=False)):
        metrics = [c for c in ("cert_linf", "cert_l2", "cert_l1", "union") if c in rows and rows[c].notna().all()]
        if not metrics:
            analysis.missing(f"{setting}: certified accuracy in some norm")
            continue
        analysis.figure(f"trade_off_{i}", bars(rows, metrics, str(setting)))
        shown = rows[["method", "seeds", "n"]].join(readable(rows, metrics))
        analysis.table(f"trade_off_{i}", rows[["method", "seeds", "n", *metrics]], f"Trade-off (%), {setting}", shown=shown)
        have = {e.info.paper_name for e in analysis.study.within(str(setting)).entries}
        lacking = [m for m in PAPER if m not in have]
        if lacking:
            analysis.missing(f"{setting}: {', '.join(lacking)} of the paper's figure")


if __name__ == "__main__":
    script(main)
