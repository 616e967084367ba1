"""The tables: accuracies with intervals, per-stage columns, decomposition, paired tests, seeds, Pareto. Percentages throughout.

Certified and empirical numbers never share a column: `cert_*` and `union*` are proofs, `emp_*` only says that an attack failed.
"""

import itertools
from typing import Any

import numpy as np
import pandas as pd

from cure_ray.errors import UserError
from cure_ray.results.evaluations import ABSENT, STATUSES, Bools, Evaluation, ThreatColumn
from cure_ray.results.statistics import holm, hypervolume, mcnemar, pareto_front, wilson
from cure_ray.results.study import Entry, Study

BOUND_STAGES = ("ibp", "crown-ibp", "crown", "alpha-crown", "branch-and-bound")
"""The stages that can certify. The paper's certified columns are alpha-CROWN columns (docs/algorithms.md 17)."""


def _identity(entry: Entry) -> dict[str, object]:
    return {
        "setting": entry.setting,
        "method": entry.label,
        "seed": entry.info.seed,
        "checkpoint": entry.evaluation.checkpoint,
        "n": entry.evaluation.n,
    }


def column_of(threat: ThreatColumn) -> str:
    return threat.norm if threat.family == "lp" else threat.name


def _share(hits: "Bools | np.bool_") -> float:
    return 100.0 * float(hits.mean()) if hits.size else float("nan")


def _union(block: Bools, evaluation: Evaluation, norms: tuple[str, ...]) -> Bools | None:
    picked = [i for i, t in enumerate(evaluation.threats) if t.norm in norms]
    return every(block[:, picked]) if len(picked) == len(norms) else None


def every(block: Bools) -> Bools:
    """Per sample: all threats."""
    return np.asarray(block.all(1))


def _accuracies(entry: Entry) -> dict[str, float]:
    e, row = entry.evaluation, dict[str, float]()
    counts: dict[str, Bools] = {"clean": e.correct}
    for i, threat in enumerate(e.threats):
        if not e.skipped[:, i].any():
            counts[f"cert_{column_of(threat)}"] = e.certified[:, i]
    counts["union"] = every(e.certified)
    two = _union(e.certified, e, ("linf", "l2"))
    if two is not None and len(e.threats) > 2:
        counts["union_linf_l2"] = two
    for name, hits in counts.items():
        low, high = wilson(int(hits.sum()), e.n)
        row |= {name: _share(hits), f"{name}_low": 100 * float(low), f"{name}_high": 100 * float(high)}
    for i, threat in enumerate(e.threats):
        row[f"emp_{column_of(threat)}"] = _share(e.empirical[:, i]) if e.attacked[:, i].all() else float("nan")
    # A sample that one norm breaks is broken in the union whatever the others would have said.
    settled = (every(e.attacked) | (~e.empirical).any(1)).all()
    row["emp_union"] = _share(every(e.empirical)) if settled else float("nan")
    return row


def _other_families(entry: Entry) -> dict[str, float]:
    """Certified accuracy per geometric configuration and patch, and their means gcr_geo and gcr_all (docs/algorithms.md 1.3)."""
    e, row = entry.everything, dict[str, float]()
    values: dict[str, list[float]] = {"geometric": [], "patch": []}
    for threat in e.family("geometric", "patch"):
        block = e.only([threat])
        share = _share(block.certified[:, 0])
        row[f"cert_{column_of(threat)}"] = share
        values[threat.family].append(share)
    if row:  # grids are dear: often fewer images than for the norms
        row["n_gcr"] = min(e.only([t]).n for t in e.family("geometric", "patch"))
    if values["geometric"]:
        row["gcr_geo"] = float(np.mean(values["geometric"]))
    if values["patch"]:
        row["gcr_all"] = float(np.mean(values["geometric"] + values["patch"]))
    return row


def accuracy_table(study: Study) -> pd.DataFrame:
    """One row per certified checkpoint: clean, certified per norm, union (with Wilson intervals), empirical, GCR."""
    return pd.DataFrame([_identity(e) | _accuracies(e) | _other_families(e) for e in study.entries])


def stage_table(study: Study) -> pd.DataFrame:
    """Certified accuracy by a stage or an earlier one, per norm and for the union; `stage` alpha-crown compares with the paper."""
    rows = []
    for entry in study.entries:
        e = entry.evaluation
        for stage in BOUND_STAGES:
            block = e.certified_by(stage)
            row = _identity(entry) | {"stage": stage}
            row |= {f"cert_{column_of(t)}": _share(block[:, i]) for i, t in enumerate(e.threats) if not e.skipped[:, i].any()}
            rows.append(row | {"union": _share(every(block))})
    return pd.DataFrame(rows)


def status_table(study: Study) -> pd.DataFrame:
    """How many samples have which status, per threat, of every family. The counts of a row add up to its n."""
    rows = []
    for entry in study.entries:
        e = entry.everything
        for i, threat in enumerate(e.threats):
            counts = {s: int((e.status[:, i] == code).sum()) for code, s in enumerate(STATUSES)}
            absent = int((e.status[:, i] == ABSENT).sum())
            who = {"family": threat.family, "threat": threat.name, "n": e.n - absent}
            rows.append(_identity(entry) | who | counts | {"no_verdict": absent})
    return pd.DataFrame(rows)


def time_table(study: Study) -> pd.DataFrame:
    """Per threat and deciding stage: how many samples, how many of them certified, and the seconds they took in all."""
    rows = []
    for entry in study.entries:
        e = entry.everything
        for i, threat in enumerate(e.threats):
            for code, stage in enumerate(e.stages):
                here = e.stage[:, i] == code
                if here.any():
                    certified = int((here & e.certified[:, i]).sum())
                    spent = {"decided": int(here.sum()), "certified": certified, "seconds": float(e.seconds[here, i].sum())}
                    rows.append(_identity(entry) | {"threat": threat.name, "stage": stage} | spent)
    return pd.DataFrame(rows)


def decomposition_table(study: Study) -> pd.DataFrame:
    """R_union = R_r + R_align, per run: with r the weaker norm, with r = linf as the paper fixes it, and for all norms at once.

    Counts of samples are added, so the identity is checked exactly; a violation would be a bug and stops everything.
    """
    rows = []
    for entry in study.entries:
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
            rows.append(_identity(entry) | {"union": name, "r": r} | {k: 100 * v / e.n for k, v in percent.items()})
    return pd.DataFrame(rows)


def _outcome(entry: Entry, metric: str) -> Bools:
    e = entry.evaluation
    if metric in ("clean", "union"):
        return e.correct if metric == "clean" else every(e.certified)
    return e.certified[:, [f"cert_{column_of(t)}" for t in e.threats].index(metric)]


SIGNIFICANCE_COLUMNS = [
    "setting", "metric", "method_a", "method_b", "seed", "n", "a", "b", "difference", "only_a", "only_b", "p", "p_holm", "significant",
]  # fmt: skip


def significance_table(study: Study, metric: str = "union", level: float = 0.05) -> pd.DataFrame:
    """Exact McNemar between every two methods at equal seed, on the same samples; Holm over all tests of a setting."""
    frames = []
    for setting in study.settings:
        entries = study.within(setting).entries
        hits = [_outcome(e, metric) for e in entries]
        rows: list[dict[str, Any]] = []
        for i, j in itertools.combinations(range(len(entries)), 2):
            one, two = entries[i], entries[j]
            if one.label == two.label or one.info.seed != two.info.seed:
                continue
            if not np.array_equal(one.evaluation.samples, two.evaluation.samples):
                raise UserError(
                    f"{one.label} and {two.label} (seed {one.info.seed}) were certified on different samples of {setting} "
                    f"({one.evaluation.n} and {two.evaluation.n}); a paired comparison needs the same ones: use equal --samples."
                )
            a, b, n = int(hits[i].sum()), int(hits[j].sum()), len(hits[i])
            both = int(np.count_nonzero(hits[i] & hits[j]))
            who = {"setting": setting, "metric": metric, "method_a": one.label, "method_b": two.label, "seed": one.info.seed, "n": n}
            shares = {"a": 100 * a / n, "b": 100 * b / n, "difference": 100 * (a - b) / n, "only_a": a - both, "only_b": b - both}
            rows.append(who | shares)
        p_values = mcnemar([r["only_a"] for r in rows], [r["only_b"] for r in rows]).tolist() if rows else []
        for row, p, adjusted in zip(rows, p_values, holm(p_values), strict=True):
            frames.append(row | {"p": p, "p_holm": adjusted, "significant": adjusted < level})
    return pd.DataFrame(frames, columns=SIGNIFICANCE_COLUMNS)


def seed_table(study: Study) -> pd.DataFrame:
    """Mean and sample deviation over seeds. The interval is Wilson's at the mean, for n samples: seeds share their samples."""
    table = accuracy_table(study)
    metrics = [c for c in table.columns if c.startswith(("clean", "cert_", "union", "emp_", "gcr_")) and not c.endswith(("_low", "_high"))]
    rows = []
    for (setting, method), group in table.groupby(["setting", "method"], sort=False):
        row: dict[str, object] = {"setting": setting, "method": method, "seeds": len(group), "n": int(group["n"].min())}
        for m in metrics:
            values = group[m]
            mean = float(values.mean(skipna=False))
            row |= {m: mean, f"{m}_sd": float(values.std(ddof=1)) if len(group) > 1 else float("nan")}
            if f"{m}_low" in group:
                low, high = wilson(mean / 100 * float(group["n"].min()), float(group["n"].min()))
                row |= {f"{m}_low": 100 * float(low), f"{m}_high": 100 * float(high)}
        rows.append(row)
    return pd.DataFrame(rows)


def pareto_table(study: Study) -> pd.DataFrame:
    """Which methods no other beats in clean and union accuracy at once, and the area each setting's methods dominate together."""
    table = seed_table(study)[["setting", "method", "seeds", "clean", "union"]].copy()
    table["on_front"], table["hypervolume"] = False, float("nan")
    for setting in study.settings:
        here = (table["setting"] == setting).to_numpy()
        points = table.loc[here, ["clean", "union"]].to_numpy()
        table.loc[here, "on_front"] = pareto_front(points)
        table.loc[here, "hypervolume"] = hypervolume(points) / 100.0
    return table


def failure_patterns(entry: Entry) -> pd.DataFrame:
    """How many correctly classified samples fail in exactly this combination of norms; the empty one is the union's complement."""
    e = entry.evaluation
    names = [column_of(t) for t in e.threats]
    failed = ~e.certified[e.correct]
    rows = []
    for pattern in itertools.product((False, True), repeat=len(names)):
        count = int((failed == np.array(pattern)).all(1).sum())
        rows.append(dict(zip(names, pattern, strict=True)) | {"samples": count})
    return pd.DataFrame(rows).sort_values("samples", ascending=False, ignore_index=True, kind="stable")


def compact_table(study: Study) -> pd.DataFrame:
    """The union table as people read it: `value [low, high]`, and ` ± deviation` where there are several seeds."""
    table = seed_table(study)
    metrics = [c for c in table.columns if f"{c}_low" in table.columns] + [c for c in ("gcr_geo", "gcr_all") if c in table]
    metrics.sort(key=lambda c: (c == "union", c == "union_linf_l2"))
    out = table[["setting", "method", "seeds", "n"]].copy()
    for m in metrics:
        out[m.removeprefix("cert_")] = [_cell(row, m) for row in table.to_dict("records")]
    return out if len(study.settings) > 1 else out.drop(columns="setting")


def _cell(row: dict[Any, Any], metric: str) -> str:
    if pd.isna(row.get(metric)):
        return "-"
    spread = f" ± {row[f'{metric}_sd']:.1f}" if row["seeds"] > 1 else ""
    interval = f" [{row[f'{metric}_low']:.1f}, {row[f'{metric}_high']:.1f}]" if f"{metric}_low" in row else ""
    return f"{row[metric]:.1f}{spread}{interval}"
