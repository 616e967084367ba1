"""The tables: accuracies with intervals, per-stage columns, seeds, Pareto. Percentages throughout.

Certified and empirical numbers never share a column: `cert_*` and `union*` are proofs, `emp_*` and `words_*` only say that an attack
failed.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from cure_ray.config.stages import BOUND_STAGES
from cure_ray.results.attacked import under_attack
from cure_ray.results.comparisons import baseline_table as baseline_table
from cure_ray.results.comparisons import significance_table as significance_table
from cure_ray.results.decomposition import decomposition_summary as decomposition_summary
from cure_ray.results.decomposition import decomposition_table as decomposition_table
from cure_ray.results.evaluations import ABSENT, STATUSES, Bools, Evaluation, ThreatColumn
from cure_ray.results.statistics import pareto_front, wilson
from cure_ray.results.study import Entry, Study, identity
from cure_ray.search.halving import hypervolume


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


def _with_interval(name: str, percent: float, n: int) -> dict[str, float]:
    low, high = wilson(percent / 100 * n, n)
    return {name: percent, f"{name}_low": 100 * float(low), f"{name}_high": 100 * float(high)}


def _accuracies(entry: Entry) -> dict[str, float]:
    e, row = entry.evaluation, dict[str, float]()
    counts: dict[str, Bools] = {"clean": e.correct}
    if entry.balls:
        for i, threat in enumerate(e.threats):
            if not e.skipped[:, i].any():
                counts[f"cert_{column_of(threat)}"] = e.certified[:, i]
        counts["union"] = every(e.certified)
        two = _union(e.certified, e, ("linf", "l2"))
        if two is not None and len(e.threats) > 2:
            counts["union_linf_l2"] = two
    for name, hits in counts.items():
        row |= _with_interval(name, _share(hits), e.n)
    whole = entry.info.about.get("clean_all")
    if whole:  # the certified images are often only the first few of the split
        row |= _with_interval("clean_all", 100 * whole["correct"] / whole["images"], whole["images"]) | {"n_all": whole["images"]}
    for i, threat in enumerate(e.threats):
        row[f"emp_{column_of(threat)}"] = _share(e.empirical[:, i]) if e.attacked[:, i].all() else float("nan")
    if entry.balls:
        # A sample that one norm breaks is broken in the union whatever the others would have said.
        settled = (every(e.attacked) | (~e.empirical).any(1)).all()
        row["emp_union"] = _share(every(e.empirical)) if settled else float("nan")
    return row


def _other_families(entry: Entry, configurations: Collection[ThreatColumn]) -> dict[str, float]:
    """Certified accuracy per geometric configuration and patch, and their means gcr_geo and gcr_all (docs/explanation/algorithms.md 1.3).

    `configurations` are those of the setting: a mean over fewer of them would be another quantity in the same column.
    """
    e, row = entry.everything, dict[str, float]()
    own = e.family("geometric", "patch")
    if not own:
        return row
    blocks = {threat: e.only([threat]) for threat in own}
    n = min(block.n for block in blocks.values())  # grids are dear: often fewer images than for the norms
    shares = {threat: _share(block.certified[:, 0]) for threat, block in blocks.items()}
    for threat, block in blocks.items():
        row |= _with_interval(f"cert_{column_of(threat)}", shares[threat], block.n)
    row["n_gcr"] = n
    # Per image a mean of yes and no varies at most as much as one yes or no does: Wilson's interval is wide enough for it.
    for name, families in (("gcr_geo", ("geometric",)), ("gcr_all", ("geometric", "patch"))):
        wanted = [t for t in configurations if t.family in families]
        if (name == "gcr_geo" and wanted) or any(t.family == "patch" for t in wanted):
            complete = all(t in shares for t in wanted)
            row |= _with_interval(name, float(np.mean([shares[t] for t in wanted])) if complete else float("nan"), n)
    return row


def _words(entry: Entry) -> dict[str, float]:
    """Accuracy under attacks on words, which nothing is proven about."""
    row = dict[str, float]()
    for name, (percent, n) in under_attack(entry).items():
        row |= _with_interval(f"words_{name}", percent, n) | {"n_words": min(n, int(row.get("n_words", n)))}
    return row


def accuracy_table(study: Study) -> pd.DataFrame:
    """One row per certified checkpoint: clean, certified per norm, union, transformations, GCR (with Wilson intervals); empirical."""
    configurations: dict[str, dict[ThreatColumn, None]] = {s: {} for s in study.settings}
    for entry in study.entries:
        configurations[entry.setting].update(dict.fromkeys(entry.everything.family("geometric", "patch")))
    return pd.DataFrame([identity(e) | _accuracies(e) | _other_families(e, configurations[e.setting]) | _words(e) for e in study.entries])


def stage_table(study: Study) -> pd.DataFrame:
    """Certified accuracy by a stage or an earlier one, per norm and for the union.

    The paper's certified columns are those of stage alpha-crown (docs/explanation/algorithms.md 17).
    """
    rows = []
    for entry in study.entries:
        e = entry.evaluation
        for stage in BOUND_STAGES:
            block = e.certified_by(stage)
            row = identity(entry) | {"stage": stage}
            row |= {f"cert_{column_of(t)}": _share(block[:, i]) for i, t in enumerate(e.threats) if not e.skipped[:, i].any()}
            rows.append(row | ({"union": _share(every(block))} if entry.balls else {}))
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
            rows.append(identity(entry) | who | counts | {"no_verdict": absent})
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
                    who = {"family": threat.family, "threat": threat.name, "stage": stage}
                    rows.append(identity(entry) | who | spent)
    return pd.DataFrame(rows)


def _n_of(metric: str) -> str:
    """The column with the number of images behind a metric."""
    norms = ("clean", "union", "union_linf_l2", "cert_linf", "cert_l2", "cert_l1")
    if metric == "clean_all":
        return "n_all"
    if metric.startswith("words_"):
        return "n_words"
    return "n" if metric in norms or metric.startswith("emp_") else "n_gcr"


def metrics_of(table: pd.DataFrame) -> list[str]:
    """The accuracies among the columns of an accuracy or seed table."""
    chosen = [c for c in table.columns if c.startswith(("clean", "cert_", "union", "emp_", "gcr_", "words_"))]
    return [c for c in chosen if not c.endswith(("_low", "_high", "_sd"))]


def seed_table(study: Study) -> pd.DataFrame:
    """Mean and sample deviation over seeds. The interval is Wilson's at the mean, for n samples: seeds share their samples."""
    table = accuracy_table(study)
    rows = []
    for (setting, method), group in table.groupby(["setting", "method"], sort=False):
        row: dict[str, object] = {"setting": setting, "method": method, "seeds": len(group), "n": int(group["n"].min())}
        row |= {c: int(group[c].min()) for c in ("n_gcr", "n_all", "n_words") if c in group and group[c].notna().any()}
        for m in metrics_of(table):
            values, n = group[m], row.get(_n_of(m))
            mean = float(values.mean(skipna=False))
            row |= {m: mean, f"{m}_sd": float(values.std(ddof=1, skipna=False)) if len(group) > 1 else float("nan")}
            if f"{m}_low" not in group:
                continue
            if len(group) == 1:
                row |= {f"{m}_{end}": float(group[f"{m}_{end}"].iloc[0]) for end in ("low", "high")}
            elif isinstance(n, int):
                row |= _with_interval(m, mean, n)
        rows.append(row)
    return pd.DataFrame(rows)


def pareto_table(study: Study) -> pd.DataFrame:
    """Which methods no other beats in clean and certified accuracy at once, and the area each setting's methods dominate together.

    `metric` is the union, or the mean over transformations where no balls were certified; `value` is the method's.
    """
    parts = []
    for setting in study.settings:
        own = study.within(setting)
        metric = own.entries[0].headline
        part = seed_table(own)[["setting", "method", "seeds", "clean", metric]].rename(columns={metric: "value"})
        points = part[["clean", "value"]].to_numpy()
        part.insert(4, "metric", metric)
        known = [tuple(point) for point in points.tolist() if all(value > 0 for value in point)]  # NaN: not certified for this metric
        parts.append(part.assign(on_front=pareto_front(points), hypervolume=hypervolume(known) / 100.0))
    return pd.concat(parts, ignore_index=True)


def failure_patterns(entry: Entry) -> pd.DataFrame:
    """How many correctly classified samples fail in exactly this combination of threats; most frequent first."""
    e = entry.evaluation
    patterns, counts = np.unique(~e.certified[e.correct], axis=0, return_counts=True)
    order = np.argsort(-counts, kind="stable")
    columns = {column_of(t): patterns[order, i] for i, t in enumerate(e.threats)}
    return pd.DataFrame({**columns, "samples": counts[order]})


def compact_table(study: Study, baseline: str | None = None) -> pd.DataFrame:
    """The table as people read it: `value [low, high]`, and ` ± deviation` where there are several seeds.

    With a baseline, a last column says by how many points each method differs from it and whether that is more than chance.
    """
    table = seed_table(study)
    has = [m for m in metrics_of(table) if f"{m}_low" in table.columns]
    shown = [m for m in has if m.startswith("cert_") and (_n_of(m) == "n" or "union" not in has)]
    # Transformations one by one would make a table of balls unreadable; their means stand for them, `accuracy_table` has them all.
    whole = ["clean_all"] if "clean_all" in has and (table["n_all"] != table["n"]).any() else []
    order = ["clean", *whole, *shown, *(m for m in ("union_linf_l2", "union", "gcr_geo", "gcr_all") if m in has)]
    order += [m for m in has if m.startswith("words_")]
    sizes = ["n"] + (["n_gcr"] if "n_gcr" in table and (table["n_gcr"] != table["n"]).any() else [])
    out = table[["setting", "method", "seeds", *sizes]].copy()
    out = out.join(readable(table, order, mixed="gcr_geo" in has or "gcr_all" in has))
    if baseline is not None:
        tests = baseline_table(study, baseline).set_index(["setting", "method"]).to_dict("index")
        keys = zip(table["setting"], table["method"], strict=True)
        out[f"against {baseline}"] = [difference_text(tests.get(key)) for key in keys]
    return out if len(study.settings) > 1 else out.drop(columns="setting")


def readable(table: pd.DataFrame, metrics: Sequence[str], mixed: bool = False) -> pd.DataFrame:
    """Columns of a table over seeds as text: value, deviation, interval, as far as there are any."""
    return pd.DataFrame({heading(m, mixed): [_cell(row, m) for row in table.to_dict("records")] for m in metrics}, index=table.index)


def heading(column: str, mixed: bool = False) -> str:
    """A column for people. Beside transformations, the union says that it is about the balls only."""
    names = {"gcr_geo": "GCR geometric", "gcr_all": "GCR all", "union_linf_l2": "union of linf, l2"}
    names["clean_all"] = "clean, whole split"
    if column.startswith("words_"):
        return f"{column.removeprefix('words_')} (attack on words)"
    names["union"] = "union (balls only)" if mixed else "union"
    return names.get(column, column.removeprefix("cert_").removeprefix("emp_"))


def _cell(row: dict[Any, Any], metric: str) -> str:
    if pd.isna(row.get(metric)):
        return "-"
    spread = f" ± {row[f'{metric}_sd']:.1f}" if row["seeds"] > 1 and f"{metric}_sd" in row else ""
    interval = f" [{row[f'{metric}_low']:.1f}, {row[f'{metric}_high']:.1f}]" if f"{metric}_low" in row else ""
    return f"{row[metric]:.1f}{spread}{interval}"


def p_text(p: float) -> str:
    return f"p = {p:.3f}" if p >= 0.001 else "p < 0.001"


BASELINE_NOTE = (
    "Differences in points; p from an exact paired sign test on the same images (McNemar's with one seed), pooled over the seeds both "
    "methods have, Holm-corrected over the methods; * below 0.05."
)


def difference_text(test: Mapping[Any, Any] | None, level: float = 0.05) -> str:
    """A row of a paired test as people read it: points, deviation over seeds, p."""
    if not test or pd.isna(test["difference"]):
        return "-"
    spread = "" if pd.isna(test["difference_sd"]) else f" ± {test['difference_sd']:.1f}"
    return f"{test['difference']:+.1f}{spread} ({p_text(test['p_holm'])}{' *' if test['p_holm'] < level else ''})"
