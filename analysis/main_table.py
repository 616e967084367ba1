"""Main and appendix tables (12.1): clean, certified per norm and union for every method, beside the paper's values.

python analysis/main_table.py STORE --out analysis/out [--baseline CURE-Max] [--names]
"""

from pathlib import Path

from cure_ray.results.outputs import Analysis, script
from cure_ray.results.paper import missing_from, read_paper
from cure_ray.results.tables import BASELINE_NOTE, baseline_table, compact_table, seed_table, significance_table, status_table


def main(analysis: Analysis) -> None:
    """Main and appendix tables: accuracies with intervals, paired tests, and the count of every status."""
    table = seed_table(analysis.study)
    keep = [c for c in table.columns if not c.startswith("emp_")]
    compact = compact_table(analysis.study, analysis.baseline)
    seeds = ", mean ± deviation over seeds" if (table["seeds"] > 1).any() else ""
    note = BASELINE_NOTE if analysis.baseline else ""
    where = f"; {table['setting'].iloc[0]}" if table["setting"].nunique() == 1 else ""
    analysis.table("main_table", table[keep], f"Certified accuracy (%){seeds}, 95 % Wilson intervals{where}", shown=compact, note=note)
    if analysis.baseline:
        analysis.table("main_baseline", baseline_table(analysis.study, analysis.baseline), f"Against {analysis.baseline}", 4, note=note)
    analysis.table(
        "main_empirical", table[["setting", "method", *(c for c in table if c.startswith("emp_"))]], "Empirical accuracy (%): not proofs"
    )
    each, pooled = significance_table(analysis.study), significance_table(analysis.study, pooled=True)
    analysis.table("main_significance", each, "Exact McNemar tests seed by seed, Holm-corrected over all of them", digits=4)
    analysis.table("main_significance_pooled", pooled, "Exact sign tests, seeds pooled, Holm-corrected over all pairs", digits=4)
    analysis.table("main_status", status_table(analysis.study), "Status of every sample")
    paper = read_paper(Path(__file__).parent / "paper")
    for experiment in ("main", "main_appendix"):
        for what in missing_from(analysis.study, paper, experiment):
            analysis.missing(f"{experiment}: {what}")


if __name__ == "__main__":
    script(main)
