"""What the report says, as plain values for the template: one `Setting` per data set and set of radii (or of transformations)."""

import math
from dataclasses import dataclass
from typing import Any

import pandas as pd
from markupsafe import Markup

from cure_ray.config.stages import BOUND_STAGES
from cure_ray.results import tables
from cure_ray.results.evaluations import STATUSES
from cure_ray.results.frames import Loaded
from cure_ray.results.report.charts import Dot, scatter, upset
from cure_ray.results.report.curves import Panel, panels
from cure_ray.results.report.sentences import WordsSection, words_section
from cure_ray.results.report.words import claim, comparison, facts, unit
from cure_ray.results.study import Entry, Study

TONES = 12  # colours in the style sheet
Row = dict[str, Any]
Columns = tuple[tuple[str, str], ...]  # (column, heading)


@dataclass(frozen=True)
class Setting:
    """One data set at one set of radii: everything that may be compared with each other."""

    name: str
    balls: bool  # else only transformations and patches were certified
    headline: str  # the column methods are ranked by
    claim: str
    comparison: str
    unit: str  # what a sample is called
    facts: tuple[tuple[str, str], ...]
    metrics: Columns  # of the first table
    bars: Columns
    transformations: Columns  # where there are balls too: a table of their own
    empirical: Columns
    rows: tuple[Row, ...]  # per method, over seeds
    runs: tuple[Row, ...]  # per checkpoint
    run_metrics: Columns
    run_threats: dict[str, str]  # column -> threat, for links to its file
    tones: dict[str, int]
    best: Entry
    pareto: Markup
    hypervolume: float
    decomposition: tuple[Row, ...]
    pairs: tuple[Row, ...]
    stages: tuple[Row, ...]
    stage_metrics: Columns
    enabled: tuple[str, ...]  # stages that can certify and were switched on
    union_by_stage: tuple[Row, ...]
    funnel: tuple[Row, ...]
    statuses: tuple[Row, ...]
    patterns: tuple[tuple[str, Markup], ...]
    curves: tuple[Panel, ...]
    entries: tuple[Entry, ...]
    words: WordsSection | None = None  # attacks on words, where there were any


def records(frame: pd.DataFrame) -> tuple[Row, ...]:
    return tuple({str(k): v for k, v in row.items()} for row in frame.to_dict("records"))


def first_seeds(study: Study) -> tuple[Entry, ...]:
    """One entry per method: where a picture per method is wanted."""
    seen: dict[str, Entry] = {}
    for entry in study.entries:
        seen.setdefault(entry.label, entry)
    return tuple(seen.values())


def _against_best(rows: tuple[Row, ...], best: str, pooled: pd.DataFrame, pairs: pd.DataFrame) -> tuple[Row, ...]:
    """The pooled test decides; how many seeds show it alone is said beside it."""

    def between(table: pd.DataFrame, other: str) -> pd.DataFrame:
        a, b = table["method_a"], table["method_b"]
        return table[((a == best) & (b == other)) | ((b == best) & (a == other))]

    out = []
    for row in rows:
        together, each = between(pooled, row["method"]), between(pairs, row["method"])
        verdict, p = ("best" if row["method"] == best else ""), math.nan
        if len(together):
            test = together.iloc[0]
            for_best = (test["only_a"] > test["only_b"]) == (test["method_a"] == best)
            verdict, p = "worse" if bool(test["significant"]) and for_best else "not separated", float(test["p_holm"])
        out.append(row | {"versus": verdict, "p": p, "seeds_significant": int(each["significant"].sum()), "seeds_compared": len(each)})
    return tuple(out)


def _funnel(study: Study) -> tuple[Row, ...]:
    """Per stage, over all runs: how many verdicts it decided, as what, and what that cost."""
    table = tables.time_table(study)
    table = table[table["family"] != "text"]  # attacks on words are no stage of a proof
    order = {stage: i for i, stage in enumerate(study.entries[0].everything.stages)}
    grouped = table.groupby("stage", sort=False)[["decided", "certified", "seconds"]].sum().reset_index()
    grouped = grouped.sort_values("stage", key=lambda s: s.map(order), ignore_index=True)
    total = int(grouped["decided"].sum())
    grouped["reached"] = total - grouped["decided"].cumsum().shift(fill_value=0)
    grouped["share"] = 100 * grouped["reached"] / total
    grouped["share_decided"] = 100 * grouped["decided"] / total
    grouped["share_seconds"] = 100 * grouped["seconds"] / max(float(grouped["seconds"].sum()), 1e-12)
    return records(grouped)


def _patterns(entries: tuple[Entry, ...], one: str) -> tuple[tuple[str, Markup], ...]:
    out = []
    for entry in entries:
        found = tables.failure_patterns(entry)
        names = [str(c) for c in found.columns if c != "samples"]
        combos = [(tuple(bool(row[n]) for n in names), int(row["samples"])) for row in records(found)]
        total = int(entry.evaluation.correct.sum())
        out.append((entry.label, upset(f"{entry.label}: what fails together, of {total} correct {one}s", names, combos, total)))
    return tuple(out)


def make_setting(loaded: Loaded, study: Study, name: str) -> Setting:
    """All sections of one setting."""
    own = study.within(name)
    balls, headline = own.entries[0].balls, own.entries[0].headline
    table, runs = tables.seed_table(own), tables.accuracy_table(own)
    norms = [f"cert_{tables.column_of(t)}" for t in own.entries[0].evaluation.threats] if balls else []
    known = [c for c in tables.metrics_of(table) if table[c].notna().any()]
    configurations = [c for c in known if c.startswith("cert_") and c not in norms]
    means = [c for c in ("gcr_geo", "gcr_all") if c in known]
    mixed = balls and bool(configurations)
    clean = ["clean", *(["clean_all"] if "clean_all" in known and (table["n_all"] != table["n"]).any() else [])]
    if balls:
        metrics = ["union", *clean, *(c for c in norms if c in known), *(c for c in ("union_linf_l2",) if c in known), *means]
        bars = ["clean", *(c for c in norms if c in known), "union"]
    else:
        others = [c for c in means if c != headline and not (len(configurations) == 1 and headline in known)]
        metrics = [headline, *clean, *others, *configurations]
        bars = ["clean", *configurations, headline]

    def columns(chosen: list[str]) -> Columns:
        return tuple((c, tables.heading(c, mixed)) for c in chosen)

    best_label = str(table.loc[table[headline].idxmax(), "method"])
    pairs = tables.significance_table(own)
    rows = _against_best(records(table), best_label, tables.significance_table(own, pooled=True), pairs)
    best_row = next(r for r in rows if r["method"] == best_label)
    tones = {str(m): i % TONES for i, m in enumerate(table["method"])}
    front = tables.pareto_table(own).set_index("method")
    dots = [
        Dot(r["method"], _whisker(r, "clean"), _whisker(r, headline), tones[r["method"]], bool(front.loc[r["method"], "on_front"]))
        for r in rows
    ]
    up = "certified union accuracy, %" if balls else "certified, mean over transformations, %"
    one_each = first_seeds(own)
    enabled = tuple(s for s in loaded.enabled_stages(own) if s in BOUND_STAGES)
    stages = tables.stage_table(own)
    stages = stages[stages["stage"].isin(enabled)]
    shown = [c for c in stages.columns if c.startswith("cert_") or c == "union"]
    per_stage = stages.groupby(["method", "stage"], sort=False)[shown].mean().reset_index()
    status = tables.status_table(own).groupby(["method", "threat"], sort=False)[[*STATUSES, "no_verdict", "n"]].sum().reset_index()
    split = tables.decomposition_table(own).groupby(["method", "union"], sort=False)
    split = split.agg({"r": lambda r: ", ".join(dict.fromkeys(r)), "R_r": "mean", "R_align": "mean", "R_union": "mean"}).reset_index()
    threats = [t for t in own.entries[0].everything.threats if t.family != "lp"] + list(own.entries[0].evaluation.threats)
    return Setting(
        name=name,
        balls=balls,
        headline=headline,
        claim=claim(own, best_row),
        comparison=comparison(rows, best_row, headline, unit(own)),
        unit=unit(own),
        facts=facts(loaded, own),
        metrics=columns(metrics),
        bars=tuple((c, tables.heading(c)) for c in bars),
        transformations=columns([*means, *configurations]) if mixed else (),
        empirical=columns([c for c in known if c.startswith("emp_")]),
        rows=rows,
        runs=records(runs),
        run_metrics=columns(metrics + (configurations if mixed else [])),
        run_threats={f"cert_{tables.column_of(t)}": t.name for t in threats},
        tones=tones,
        best=next(e for e in one_each if e.label == best_label),
        pareto=scatter("Clean against certified accuracy", dots, "clean accuracy, %", up),
        hypervolume=float(front["hypervolume"].iloc[0]),
        decomposition=records(split),
        pairs=records(pairs.sort_values("p_holm", kind="stable")),
        stages=records(per_stage),
        stage_metrics=columns([c for c in ("union", *norms, *configurations) if c in shown]),
        enabled=enabled,
        union_by_stage=records(per_stage.pivot(index="method", columns="stage", values="union").reindex(list(tones)).reset_index())
        if balls
        else (),
        funnel=_funnel(own),
        statuses=records(status),
        patterns=_patterns(one_each, unit(own)),
        curves=tuple(panels(own.entries, tones)),
        entries=own.entries,
        words=words_section(loaded, own, one_each),
    )


def _whisker(row: Row, metric: str) -> tuple[float, float, float]:
    return row[f"{metric}_low"], row[metric], row[f"{metric}_high"]
