"""What the report says, as plain values for the template: one `Setting` per data set and set of radii."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pandas as pd
from markupsafe import Markup

from cure_ray.results import tables
from cure_ray.results.evaluations import STATUSES
from cure_ray.results.frames import Loaded
from cure_ray.results.report.charts import Dot, scatter, upset
from cure_ray.results.report.curves import Panel, panels
from cure_ray.results.study import Entry, Study

Row = dict[str, Any]


@dataclass(frozen=True)
class Setting:
    """One data set at one set of radii: everything that may be compared with each other."""

    name: str
    claim: str
    comparison: str
    facts: tuple[tuple[str, str], ...]
    metrics: tuple[tuple[str, str], ...]  # (column, heading) of the certified accuracies
    empirical: tuple[tuple[str, str], ...]
    rows: tuple[Row, ...]  # per method, over seeds
    runs: tuple[Row, ...]  # per checkpoint
    run_metrics: tuple[tuple[str, str], ...]
    tones: dict[str, int]
    best: Entry
    pareto: Markup
    hypervolume: float
    decomposition: tuple[Row, ...]
    pairs: tuple[Row, ...]
    stages: tuple[Row, ...]
    union_by_stage: tuple[Row, ...]
    funnel: tuple[Row, ...]
    statuses: tuple[Row, ...]
    patterns: tuple[tuple[str, Markup], ...]
    curves: tuple[Panel, ...]
    entries: tuple[Entry, ...]


def records(frame: pd.DataFrame) -> tuple[Row, ...]:
    return tuple({str(k): v for k, v in row.items()} for row in frame.to_dict("records"))


def heading(column: str) -> str:
    names = {"clean": "clean", "union": "union", "union_linf_l2": "union of linf, l2", "gcr_geo": "GCR geometric", "gcr_all": "GCR all"}
    return names.get(column, column.removeprefix("cert_").removeprefix("emp_"))


def first_seeds(study: Study) -> tuple[Entry, ...]:
    """One entry per method: where a picture per method is wanted."""
    seen: dict[str, Entry] = {}
    for entry in study.entries:
        seen.setdefault(entry.label, entry)
    return tuple(seen.values())


def _distinct(verdicts: pd.DataFrame, columns: list[str]) -> list[tuple[Any, ...]]:
    return list(verdicts[columns].drop_duplicates().itertuples(index=False, name=None))


def _facts(loaded: Loaded, study: Study) -> tuple[tuple[str, str], ...]:
    entries = study.entries
    first = entries[0].evaluation
    mine = loaded.verdicts[loaded.verdicts["checkpoint_digest"].isin([e.evaluation.checkpoint for e in entries])]
    seeds = sorted({e.info.seed for e in entries})
    networks = sorted({str(e.info.setting("network.name")) for e in entries if e.info.experiment})
    machines = sorted({_machine(e.info.hardware) for e in entries} - {""})
    provers = sorted({_machine(e.info.about.get("certified_on") or {}) for e in entries} - {""})
    clean = [
        f"{e.label} {100 * c['correct'] / c['images']:.2f} % of {c['images']:,}" for e in entries if (c := e.info.about.get("clean_all"))
    ]
    budgets = []
    for stages, seconds, nodes, box in _distinct(mine[mine["family"] == "lp"], ["stages", "budget_seconds", "budget_nodes", "box"]):
        bab = f"; branch and bound {seconds:g} s or {nodes:,} sub-problems per image and threat" if "branch" in str(stages) else ""
        budgets.append(f"{str(stages).replace(',', ', ')}{bab}; {'ball ∩ [0, 1]' if box else 'whole ball'}")
    versions = sorted(
        {f"cure_ray {e.info.versions['cure_ray']}, torch {e.info.versions.get('torch')}" for e in entries if "cure_ray" in e.info.versions}
    )
    sizes = sorted({e.evaluation.n for e in entries})
    facts = [
        ("data", f"{first.dataset}, {first.split} split"),
        ("radii (pixel units)", ", ".join(t.name for t in first.threats)),
        ("images", " or ".join(map(str, sizes)) + " per checkpoint"),
        ("seeds", ", ".join(map(str, seeds)) + f" ({len(entries)} checkpoints)"),
        ("network", ", ".join(networks)),
        ("engine", ", ".join(f"{a} {b}" for a, b in _distinct(mine, ["engine", "engine_version"]))),
        ("stages and budgets", " / ".join(budgets)),
        ("certification time", f"{duration(float(mine['seconds'].sum()))} for {len(mine):,} verdicts"),
        ("trained on", "; ".join(machines) or "not recorded"),
        ("certified on", "; ".join(provers)),
        ("clean accuracy on the whole split", "; ".join(clean)),
        ("versions", "; ".join(versions)),
    ]
    return tuple((k, v) for k, v in facts if v)


def _machine(h: Mapping[str, Any]) -> str:
    if not h:
        return ""
    return str(h.get("gpu") or f"{h.get('processor') or h.get('machine')}, {h.get('cpus')} CPUs")


def duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.1f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def _against_best(rows: tuple[Row, ...], best: str, pairs: pd.DataFrame) -> tuple[Row, ...]:
    out = []
    for row in rows:
        other = row["method"]
        here = pairs[
            ((pairs["method_a"] == best) & (pairs["method_b"] == other)) | ((pairs["method_b"] == best) & (pairs["method_a"] == other))
        ]
        p = float(here["p_holm"].max()) if len(here) else math.nan
        verdict = "best" if other == best else ("" if here.empty else ("worse" if bool(here["significant"].all()) else "not separated"))
        out.append(row | {"versus": verdict, "p": p, "seeds_significant": int(here["significant"].sum()), "seeds_compared": len(here)})
    return tuple(out)


def _claim(study: Study, best: Row) -> str:
    e = study.entries[0].evaluation
    *most, last = [f"{pretty(t.norm)}\u00a0≤\u00a0{t.eps:g}" for t in e.threats]
    balls = f"{', '.join(most)} and {last}" if most else last
    return f"{best['method']} certifies {best['union']:.1f}\u00a0% of {best['n']} {e.split} images of {e.dataset} against {balls} at once."


def pretty(norm: str) -> str:
    return {"linf": "ℓ∞", "l2": "ℓ2", "l1": "ℓ1"}.get(norm, norm)


def _comparison(rows: tuple[Row, ...], best: Row) -> str:
    seeds = f", mean of {best['seeds']} seeds" if best["seeds"] > 1 else ""
    text = f"95 % interval {best['union_low']:.1f} to {best['union_high']:.1f}{seeds}; clean accuracy {best['clean']:.1f} %."
    others = [r for r in rows if r["versus"] not in ("best", "")]
    if others:
        worse = sum(r["versus"] == "worse" for r in others)
        text += (
            f" Beyond chance it beats {worse} of the {len(others)} other methods (exact McNemar test on the same images, Holm-corrected)."
        )
    return text


def _funnel(study: Study) -> tuple[Row, ...]:
    """Per stage, over all runs: how many verdicts it decided, as what, and what that cost."""
    table = tables.time_table(study)
    order = {stage: i for i, stage in enumerate(study.entries[0].everything.stages)}
    grouped = table.groupby("stage", sort=False)[["decided", "certified", "seconds"]].sum().reset_index()
    grouped = grouped.sort_values("stage", key=lambda s: s.map(order), ignore_index=True)
    total = int(grouped["decided"].sum())
    grouped["reached"] = total - grouped["decided"].cumsum().shift(fill_value=0)
    grouped["share"] = 100 * grouped["reached"] / total
    grouped["share_decided"] = 100 * grouped["decided"] / total
    grouped["share_seconds"] = 100 * grouped["seconds"] / max(float(grouped["seconds"].sum()), 1e-12)
    return records(grouped)


def make_setting(loaded: Loaded, study: Study, name: str) -> Setting:
    """All sections of one setting."""
    own = study.within(name)
    table = tables.seed_table(own)
    pairs = tables.significance_table(own)
    runs = tables.accuracy_table(own)
    run_metrics = [c for c in runs.columns if c in ("clean", "union", "union_linf_l2", "gcr_geo", "gcr_all") or c.startswith("cert_")]
    run_metrics = [c for c in run_metrics if not c.endswith(("_low", "_high"))]
    run_metrics.sort(key=lambda c: (c != "union", c != "clean", c.startswith("gcr"), c == "union_linf_l2", f"{c}_low" not in runs))
    # The first table has what has an interval, and the means over configurations where every seed has them.
    metrics = [c for c in run_metrics if f"{c}_low" in runs or (c.startswith("gcr") and table[c].notna().any())]
    empirical = [c for c in table.columns if c.startswith("emp_") and not c.endswith("_sd") and table[c].notna().any()]
    best_label = str(table.loc[table["union"].idxmax(), "method"])
    rows = _against_best(records(table), best_label, pairs)
    best_row = next(r for r in rows if r["method"] == best_label)
    tones = {str(m): i % 10 for i, m in enumerate(table["method"])}
    front = tables.pareto_table(own).set_index("method")
    dots = [
        Dot(r["method"], (r["clean_low"], r["clean"], r["clean_high"]), (r["union_low"], r["union"], r["union_high"]), tones[r["method"]],
            bool(front.loc[r["method"], "on_front"]))
        for r in rows
    ]  # fmt: skip
    one_each = first_seeds(own)
    patterns = []
    for entry in one_each:
        found = tables.failure_patterns(entry)
        norms = [str(c) for c in found.columns if c != "samples"]
        combos = [(tuple(bool(row[n]) for n in norms), int(row["samples"])) for row in records(found)]
        total = int(entry.evaluation.correct.sum())
        patterns.append((entry.label, upset(f"{entry.label}: which norms fail together, of {total} correct images", norms, combos, total)))
    stages = tables.stage_table(own)
    shown = [c for c in stages.columns if c.startswith("cert_") or c == "union"]
    per_stage = stages.groupby(["method", "stage"], sort=False)[shown].mean().reset_index()
    status = tables.status_table(own).groupby(["method", "threat"], sort=False)[[*STATUSES, "no_verdict", "n"]].sum().reset_index()
    split = tables.decomposition_table(own)
    split = (
        split.groupby(["method", "union"], sort=False)
        .agg({"r": "first", "R_r": "mean", "R_align": "mean", "R_union": "mean"})
        .reset_index()
    )
    return Setting(
        name=name,
        claim=_claim(own, best_row),
        comparison=_comparison(rows, best_row),
        facts=_facts(loaded, own),
        metrics=tuple((c, heading(c)) for c in metrics),
        empirical=tuple((c, heading(c)) for c in empirical),
        rows=rows,
        runs=records(runs),
        run_metrics=tuple((c, heading(c)) for c in run_metrics),
        tones=tones,
        best=next(e for e in one_each if e.label == best_label),
        pareto=scatter("Clean against union accuracy", dots, "clean accuracy, %", "certified union accuracy, %"),
        hypervolume=float(front["hypervolume"].iloc[0]),
        decomposition=records(split),
        pairs=records(pairs.sort_values("p_holm", kind="stable")),
        stages=records(per_stage),
        union_by_stage=records(per_stage.pivot(index="method", columns="stage", values="union").reindex(list(tones)).reset_index()),
        funnel=_funnel(own),
        statuses=records(status),
        patterns=tuple(patterns),
        curves=tuple(panels(own.entries, tones)),
        entries=own.entries,
    )
