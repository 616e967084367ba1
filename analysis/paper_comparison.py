"""Ours beside the paper's, value by value, where data set and radii are the same; known inconsistencies of the paper marked.

python analysis/paper_comparison.py STORE --out analysis/out
"""

from pathlib import Path

import pandas as pd

from cure_ray.results.outputs import Analysis, script
from cure_ray.results.paper import DOUBTS, compare, missing_from, read_paper


def main(analysis: Analysis) -> None:
    """The comparison, the paper's values with their marks, and what the marks mean."""
    paper = read_paper(Path(__file__).parent / "paper")
    analysis.table("paper_comparison", compare(analysis.study, paper), "Ours and the paper's (%)")
    analysis.table("paper_values", paper, "The paper's values; doubt: ids of known inconsistencies", digits=4)
    marks = pd.DataFrame([{"id": d.id, "experiment": d.experiment, "dataset": d.dataset or "all", "why": d.why} for d in DOUBTS])
    analysis.table("paper_doubts", marks, "Known inconsistencies in the paper's tables")
    for experiment in ("main", "main_appendix", "cifar100", "ablation_ba_gp", "ablation_alpha"):
        for what in missing_from(analysis.study, paper, experiment):
            analysis.missing(f"{experiment}: {what}")


if __name__ == "__main__":
    script(main)
