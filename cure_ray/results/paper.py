"""The paper's published values beside ours, with its known inconsistencies marked (docs/explanation/algorithms.md 13, 15)."""

from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import numpy as np
import pandas as pd

from cure_ray.catalogue.published import PUBLISHED
from cure_ray.results.evaluations import Evaluation
from cure_ray.results.study import Study
from cure_ray.results.tables import accuracy_table, stage_table

DATASETS = {row.display: name for name, row in PUBLISHED.items() if row.display}


@dataclass(frozen=True)
class Doubt:
    """A value of the paper that contradicts another of its values or itself."""

    id: str
    why: str
    experiment: str
    dataset: str = ""
    methods: tuple[str, ...] = ()
    metrics: tuple[str, ...] = ()


DOUBTS = (
    Doubt(
        "K1", "Joint and Random are identical in all five columns: a copy error is likely", "main", "MNIST", ("CURE-Joint", "CURE-Random")
    ),
    Doubt("K2", "captions and labels of the geometric tables disagree; the captions are followed here", "geometric"),
    Doubt("K3", "the caption gives TinyImageNet's radii for CIFAR-10", "patch_2x2", "CIFAR-10"),
    Doubt("K6", "GP's cost on TinyImageNet is 82 s in the text, 84 s in the table", "runtime_gp", "TinyImageNet"),
    Doubt("K7", "Scratch takes 153 s in one table and 154 s in the other", "runtime_methods", "MNIST", ("CURE-Scratch",)),
    Doubt("K9", "l2's own certificate differs by 0.1 between tables", "l2_certified_vs_pgd"),
    Doubt("K11", "the end points differ from the single-norm rows by up to 0.7; its union leaves out l1", "ablation_alpha"),
    Doubt("K12", "three different models have identical l2 and l1 values", "cgt_vs_multinorm", "", (), ("cert_l2", "cert_l1")),
    Doubt("K13", "16.6 is not a multiple of 1/170", "main", "TinyImageNet", ("CURE-Finetune",), ("union",)),
    Doubt("K24", "the gap is implausible for lambda_2 = 1e-5 as the only difference", "l2_certified_vs_pgd", "", ("PGD training",)),
    Doubt("K25", "Random beats Scratch here, against the text", "main", "TinyImageNet", ("CURE-Random", "CURE-Scratch"), ("union",)),
)


def doubts(experiment: str, dataset: str, method: str, metric: str) -> str:
    """The ids of what is known to be odd about a value, e.g. `K1`; empty if nothing is."""
    return " ".join(
        d.id
        for d in DOUBTS
        if d.experiment == experiment
        and d.dataset in ("", dataset)
        and (not d.methods or method in d.methods)
        and (not d.metrics or metric in d.metrics)
    )


def read_paper(folder: Path) -> pd.DataFrame:
    """All values of analysis/paper as one table; `radii` in numbers, `doubt` with the ids of known inconsistencies."""
    parts = [pd.read_csv(p, dtype={"value": str}) for p in sorted(folder.glob("*.csv"))]
    table = pd.concat(parts, ignore_index=True)
    table = table[pd.to_numeric(table["value"], errors="coerce").notna()].copy()
    table["value"] = pd.to_numeric(table["value"])
    table["eps"] = table["eps"].fillna("")
    keys = ["experiment", "dataset", "method", "metric"]
    table["doubt"] = [doubts(*(str(v) for v in row)) for row in table[keys].itertuples(index=False, name=None)]
    return table.reset_index(drop=True)


def parse_radii(eps: str) -> dict[str, float]:
    """`linf=8/255;l2=0.5` as numbers."""
    pairs = (part.split("=") for part in eps.split(";") if part)
    return {norm: float(Fraction(radius)) for norm, radius in pairs}


def matches(evaluation: Evaluation, dataset: str, radii: dict[str, float]) -> bool:
    """Same data, same radii: only then may two numbers stand side by side. The paper's union may leave out l1."""
    if evaluation.dataset != DATASETS.get(dataset, dataset):
        return False
    ours = {t.norm: t.eps for t in evaluation.threats}
    return all(norm in ours and np.isclose(ours[norm], eps, rtol=1e-6) for norm, eps in radii.items())


def compare(study: Study, paper: pd.DataFrame) -> pd.DataFrame:
    """Every value of the paper we have a counterpart for: ours by alpha-CROWN or earlier (comparable), and by the whole cascade."""
    whole = accuracy_table(study).set_index("checkpoint")
    stages = stage_table(study)
    alpha = stages[stages["stage"] == "alpha-crown"].set_index("checkpoint")
    rows = []
    for (experiment, dataset, eps), block in paper[paper["eps"] != ""].groupby(["experiment", "dataset", "eps"], sort=False):
        radii = parse_radii(str(eps))
        for entry in study.entries:
            if not matches(entry.evaluation, str(dataset), radii):
                continue
            key = entry.evaluation.checkpoint
            for value in block[block["method"] == entry.info.paper_name].itertuples():
                metric = str(value.metric)
                if metric not in whole.columns:
                    continue
                ours_alpha = alpha.loc[key, metric] if metric in alpha.columns else float("nan")
                rows.append(
                    {
                        "experiment": experiment, "dataset": dataset, "method": entry.label, "seed": entry.info.seed, "metric": metric,
                        "paper": value.value, "ours, alpha-CROWN": ours_alpha if metric != "clean" else whole.loc[key, metric],
                        "ours, all stages": whole.loc[key, metric], "n": entry.evaluation.n, "doubt": value.doubt,
                    }
                )  # fmt: skip
    columns = ["experiment", "dataset", "method", "seed", "metric", "paper", "ours, alpha-CROWN", "ours, all stages", "n", "doubt"]
    return pd.DataFrame(rows, columns=columns)


def missing_from(study: Study, paper: pd.DataFrame, experiment: str) -> list[str]:
    """Rows of a table of the paper that this store has nothing for, in words."""
    out = []
    for (dataset, eps), block in paper[paper["experiment"] == experiment].groupby(["dataset", "eps"], sort=False):
        here = [e for e in study.entries if matches(e.evaluation, str(dataset), parse_radii(str(eps)))]
        have = {e.info.paper_name for e in here}
        lacking = [m for m in dict.fromkeys(block["method"]) if m not in have]
        if lacking:
            out.append(f"{dataset} at {str(eps).replace(';', ', ')}: {', '.join(lacking)}")
    return out
