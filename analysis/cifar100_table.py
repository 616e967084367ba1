"""CIFAR-100 table: the main table for that data set alone.

python analysis/cifar100_table.py STORE --out analysis/out
"""

from pathlib import Path

from cure_ray.results.outputs import Analysis, script
from cure_ray.results.paper import missing_from, read_paper
from cure_ray.results.tables import seed_table


def main(analysis: Analysis) -> None:
    """The CIFAR-100 table."""
    table = seed_table(analysis.study)
    table = table[table["setting"].str.startswith("cifar100 ")]
    analysis.table("cifar100_table", table[[c for c in table if not c.startswith("emp_")]], "CIFAR-100: certified accuracy (%)")
    for what in missing_from(analysis.study, read_paper(Path(__file__).parent / "paper"), "cifar100"):
        analysis.missing(what)


if __name__ == "__main__":
    script(main)
