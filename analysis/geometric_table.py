"""Geometric and patch tables (12.2): certified accuracy per perturbation, and their means gcr_geo and gcr_all.

python analysis/geometric_table.py STORE --out analysis/out
"""

from cure_ray.results.outputs import Analysis, script
from cure_ray.results.tables import accuracy_table, readable, seed_table


def main(analysis: Analysis) -> None:
    """Geometric and patch tables."""
    threats = dict.fromkeys(t.name for e in analysis.study.entries for t in e.everything.family("geometric", "patch"))
    if not threats:
        analysis.missing("verdicts for geometric perturbations and patches: certify a checkpoint for them first")
        return
    table = seed_table(analysis.study)
    columns = [c for c in (*(f"cert_{t}" for t in threats), "gcr_geo", "gcr_all") if c in table]
    done = table[table[columns].notna().any(axis=1)].astype({"n_gcr": int})
    who = done[["setting", "method", "seeds", "n_gcr"]]
    ends = [f"{c}{end}" for c in columns for end in ("", "_sd", "_low", "_high")]
    caption = "Certified accuracy (%) against geometric perturbations and patches, 95 % Wilson intervals; GCR: their mean"
    analysis.table("geometric_table", who.join(done[ends]), caption, shown=who.join(readable(done, columns)))
    runs = accuracy_table(analysis.study)
    for row in runs[runs[columns].isna().any(axis=1)].itertuples():
        analysis.missing(f"{row.method}, seed {row.seed}: some of {', '.join(threats)}")


if __name__ == "__main__":
    script(main)
