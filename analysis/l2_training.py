"""Certified against adversarial l2 training (12.12), and against the literature's l2 certificates (12.13).

python analysis/l2_training.py STORE --out analysis/out
"""

from pathlib import Path

from cure_ray.results.outputs import Analysis, script
from cure_ray.results.paper import read_paper
from cure_ray.results.tables import readable, seed_table


def main(analysis: Analysis) -> None:
    """Certified l2 accuracy of methods l2 and l2_pgd, and the paper's values."""
    wanted = {e.label for e in analysis.study.entries if e.info.method in ("l2", "l2_pgd")}
    table = seed_table(analysis.study)
    if "cert_l2" in table:
        own = table[table["method"].isin(wanted)]
        columns = [c for c in ("setting", "method", "seeds", "n", "clean", "cert_l2", "cert_l2_low", "cert_l2_high") if c in own]
        shown = own[["setting", "method", "seeds", "n"]].join(readable(own, ["clean", "cert_l2"]))
        analysis.table("l2_training", own[columns], "Certified l2 accuracy (%)", shown=shown)
    paper = read_paper(Path(__file__).parent / "paper")
    analysis.table("l2_training_paper", paper[paper["experiment"].isin(["l2_certified_vs_pgd", "compare_l2"])], "The paper's values")
    for method in ("l2", "l2_pgd"):
        if not any(e.info.method == method for e in analysis.study.entries):
            analysis.missing(f"a run with training.method={method}")


if __name__ == "__main__":
    script(main)
