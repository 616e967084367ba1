"""Main and appendix tables (12.1): clean, certified per norm and union for every method, beside the paper's values.

python analysis/main_table.py STORE --out analysis/out
"""

from pathlib import Path

from cure_ray.results.outputs import Analysis, script
from cure_ray.results.paper import missing_from, read_paper
from cure_ray.results.tables import compact_table, seed_table, significance_table, status_table


def main(analysis: Analysis) -> None:
    """Main and appendix tables: accuracies with intervals, paired tests, and the count of every status."""
    analysis.table("main_compact", compact_table(analysis.study), "Certified accuracy (%), 95 % Wilson intervals")
    table = seed_table(analysis.study)
    keep = [c for c in table.columns if not c.startswith("emp_")]
    analysis.table("main_table", table[keep], "Certified accuracy (%), 95 % Wilson intervals, mean and deviation over seeds")
    analysis.table(
        "main_empirical", table[["setting", "method", *(c for c in table if c.startswith("emp_"))]], "Empirical accuracy (%): not proofs"
    )
    analysis.table("main_significance", significance_table(analysis.study), "Union: exact McNemar tests, Holm-corrected", digits=4)
    analysis.table("main_status", status_table(analysis.study), "Status of every sample")
    paper = read_paper(Path(__file__).parent / "paper")
    for experiment in ("main", "main_appendix"):
        for what in missing_from(analysis.study, paper, experiment):
            analysis.missing(f"{experiment}: {what}")


if __name__ == "__main__":
    script(main)
