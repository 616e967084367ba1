"""Where the union is lost: R_union = R_r + R_align per run, the Pareto front, and what each stage adds.

python analysis/decomposition.py STORE --out analysis/out
"""

from cure_ray.results.outputs import Analysis, script
from cure_ray.results.tables import decomposition_table, pareto_table, stage_table, time_table


def main(analysis: Analysis) -> None:
    """Error decomposition, Pareto front, per-stage columns and time per stage."""
    analysis.table("decomposition", decomposition_table(analysis.study), "R_union = R_r + R_align (%), checked exactly")
    analysis.table("pareto", pareto_table(analysis.study), "Clean and union accuracy: front and hypervolume (%)")
    analysis.table("stages", stage_table(analysis.study), "Certified (%) by a stage or an earlier one; the paper's columns are alpha-CROWN")
    analysis.table("time_per_stage", time_table(analysis.study), "Verdicts and seconds by deciding stage", digits=2)


if __name__ == "__main__":
    script(main)
