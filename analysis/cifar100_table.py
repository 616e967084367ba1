"""CIFAR-100 table: the main table for that data set alone.

python analysis/cifar100_table.py STORE --out analysis/out
"""

from dataclasses import replace
from pathlib import Path

from cure_ray.results.outputs import Analysis, script
from cure_ray.results.paper import missing_from, read_paper
from cure_ray.results.tables import compact_table, seed_table


def main(analysis: Analysis) -> None:
    """The CIFAR-100 table."""
    table = seed_table(analysis.study)
    table = table[table["setting"].str.startswith("cifar100 ")]
    if table.empty:
        analysis.missing("any run on CIFAR-100")
    else:
        own = replace(analysis.study, entries=tuple(e for e in analysis.study.entries if e.evaluation.dataset == "cifar100"))
        columns = [c for c in table if not c.startswith("emp_")]
        analysis.table("cifar100_table", table[columns], "CIFAR-100: certified accuracy (%)", shown=compact_table(own, analysis.baseline))
    for what in missing_from(analysis.study, read_paper(Path(__file__).parent / "paper"), "cifar100"):
        analysis.missing(what)


if __name__ == "__main__":
    script(main)
