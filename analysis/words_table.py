"""Sentences whose words were attacked (SST-2): accuracy under each attack beside what is certified in latent space, and paired tests.

python analysis/words_table.py STORE --out analysis/out [--baseline natural] [--names]
"""

from pathlib import Path

from cure_ray.results.attacked import read_attacked, refuse_contradictions
from cure_ray.results.figures import bars
from cure_ray.results.outputs import Analysis, script
from cure_ray.results.paper import read_paper
from cure_ray.results.tables import metrics_of, readable, seed_table
from cure_ray.results.words import NOTE, attacked_by, attacked_table, moved_table, paired_table

TESTS = "exact sign tests on the same sentences, seeds pooled, Holm-corrected over all pairs of an attack"


def main(analysis: Analysis) -> None:
    """Accuracy under attacks on words, certificates in latent space, how far vectors moved, and the paper's values."""
    study = attacked_by(analysis.study)
    if not study.entries:
        analysis.missing("attacks on words: `cure-ray attack-text` writes them into the store")
        return
    refuse_contradictions(analysis.loaded.stores)
    rows, table = read_attacked(analysis.loaded.stores), seed_table(study)
    attacks = [m for m in metrics_of(table) if m.startswith("words_")]
    proven = [m for m in ("cert_linf", "cert_l2", "cert_l1", "union") if m in table]
    columns = [m for m in ("clean_all", "clean", *attacks, *proven) if m in table]
    who = table[["setting", "method", "seeds", "n_words"]]
    ends = [f"{m}{end}" for m in columns for end in ("", "_sd", "_low", "_high")]
    shown = readable(table, columns).rename(columns={m.removeprefix("cert_"): f"{m.removeprefix('cert_')}, latent" for m in proven})
    caption = "Accuracy (%) under attacks on words and certified in latent space, 95 % Wilson intervals"
    analysis.table("words_table", who.join(table[ends]), caption, shown=who.join(shown), note=NOTE)
    what = "What the attacks took, and how often vectors stay in the balls (%)"
    analysis.table("words_attacks", attacked_table(study, rows, analysis.baseline), what, note=NOTE)
    analysis.table("words_moved", moved_table(study, rows), "Vectors of sentences with words exchanged, all networks together")
    analysis.table("words_significance", paired_table(study), f"Accuracy under attack: {TESTS}", digits=4)
    for i, (setting, own) in enumerate(table.groupby("setting", sort=False)):
        title = f"{setting}; union: certified in latent space"
        analysis.figure(f"words_{i}", bars(own, ["clean", *attacks, *proven[-1:]], title, "accuracy, %"))
    paper = read_paper(Path(__file__).parent / "paper")
    paper = paper[paper["experiment"].isin(["sst2", "sst2_flat"])].drop_duplicates(["method", "metric"])
    values = paper.pivot(index="method", columns="metric", values="value").reset_index()
    analysis.table("words_paper", values, "The paper's accuracy (%) under attack; its TextFooler is not cf8")


if __name__ == "__main__":
    script(main)
