"""R_union = R_r + R_align: how much of the union's error one norm has alone, and how much is norms not agreeing. Percentages."""

import numpy as np
import pandas as pd

from cure_ray.results.study import Study, identity

DECOMPOSITION_COLUMNS = ["setting", "method", "seed", "checkpoint", "n", "union", "r", "R_r", "R_align", "R_union"]


def decomposition_table(study: Study) -> pd.DataFrame:
    """R_union = R_r + R_align, per run: with r the weaker norm, with r = linf as the paper fixes it, and for all norms at once.

    Counts of samples are added, so the identity is checked exactly; a violation would be a bug and stops everything.
    """
    rows = []
    for entry in study.entries:
        if not entry.balls:
            continue
        e = entry.evaluation
        errors = {t.norm: int((~e.certified[:, i]).sum()) for i, t in enumerate(e.threats)}
        certified = {t.norm: e.certified[:, i] for i, t in enumerate(e.threats)}
        choices: list[tuple[str, str, tuple[str, ...]]] = []
        if "linf" in errors and "l2" in errors:
            weaker = max(("linf", "l2"), key=lambda norm: errors[norm])
            choices += [("linf_l2, weaker first", weaker, ("linf", "l2")), ("linf_l2, r = linf", "linf", ("linf", "l2"))]
        if len(errors) > 2:
            choices += [("all, weakest first", max(errors, key=lambda norm: errors[norm]), tuple(errors))]
            choices += [("all, r = linf", "linf", tuple(errors))] if "linf" in errors else []
        for name, r, norms in choices:
            rest = np.stack([certified[q] for q in norms if q != r]).all(0)
            r_union = e.n - int((certified[r] & rest).sum())
            r_align = int((certified[r] & ~rest).sum())
            if r_union != errors[r] + r_align:
                raise AssertionError(f"decomposition identity violated for {entry.label}: {r_union} != {errors[r]} + {r_align}")
            percent = {"R_r": errors[r], "R_align": r_align, "R_union": r_union}
            rows.append(identity(entry) | {"union": name, "r": r} | {k: 100 * v / e.n for k, v in percent.items()})
    return pd.DataFrame(rows, columns=DECOMPOSITION_COLUMNS)


def decomposition_summary(study: Study) -> pd.DataFrame:
    """The decomposition per method: means and deviations over seeds, and every norm that was the weakest in some seed."""
    rows = []
    for (setting, method, union), group in decomposition_table(study).groupby(["setting", "method", "union"], sort=False):
        who = {"setting": setting, "method": method, "union": union, "seeds": len(group), "n": int(group["n"].min())}
        row: dict[str, object] = {**who, "r": ", ".join(dict.fromkeys(group["r"]))}
        for part in ("R_r", "R_align", "R_union"):
            row |= {part: float(group[part].mean())}
            row |= {f"{part}_sd": float(group[part].std(ddof=1)) if len(group) > 1 else float("nan")}
        rows.append(row)
    parts = [c for p in ("R_r", "R_align", "R_union") for c in (p, f"{p}_sd")]
    return pd.DataFrame(rows, columns=["setting", "method", "union", "seeds", "n", "r", *parts])


WEAKEST = ("all, weakest first", "linf_l2, weaker first")
FIXED = ("all, r = linf", "linf_l2, r = linf")


def main_decomposition(summary: pd.DataFrame, choice: tuple[str, str] = WEAKEST) -> pd.DataFrame:
    """Per method the one row about the whole union: of three norms, or where there are only two, of those."""
    chosen = summary[summary["union"].isin(choice)]
    best = chosen.assign(rank=chosen["union"].map(choice.index)).sort_values("rank", kind="stable")
    return best.drop_duplicates(["setting", "method"]).sort_index().drop(columns="rank")
