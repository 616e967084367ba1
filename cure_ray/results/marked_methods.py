"""Tables that compare methods of training by the networks of the zoo under one protocol, as Markdown for documents.

The sections `<!-- zoo:methods DATASET THREATS [BASELINE] -->`, `zoo:stages` and `zoo:decomposition` hold them (marked.py). Rows are called
by the names of the experiments, seeds are averaged. `<!-- zoo:curve DATASET THREATS SETTING -->` has a row for every value of one setting
of training, of networks that differ in nothing else. A last word `only=tuned-*` leaves out networks of other names.
"""

from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pandas as pd

from cure_ray.errors import UserError
from cure_ray.results.cards import protocol_key
from cure_ray.results.comparisons import baseline_table
from cure_ray.results.decomposition import decomposition_summary, main_decomposition
from cure_ray.results.frames import Loaded, load
from cure_ray.results.grids import vary
from cure_ray.results.outputs import to_markdown
from cure_ray.results.tables import accuracy_table, difference_text, heading, metrics_of, readable, seed_table, stage_table, status_table
from cure_ray.zoo.manifest import RESULTS, read_manifest


def methods_section(kind: str, zoo: Path, words: Sequence[str]) -> str:
    """One of the tables, of what is ours in the zoo under this protocol."""
    only = next((word.removeprefix("only=") for word in words if word.startswith("only=")), "*")
    words = [word for word in words if not word.startswith("only=")]
    if not 2 <= len(words) <= 3:
        raise UserError(
            f"zoo:{kind} takes a data set, threats and perhaps a baseline (of zoo:curve the setting) and only=NAMES, "
            f"e.g. mnist linf=0.1,l2=0.3,l1=1 max only=tuned-*; got {' '.join(words)!r}"
        )
    dataset, threats, *third = words
    wanted = protocol_key(dataset, threats)
    ours = [e for e in read_manifest(zoo).entries if e.kind == "ours" and protocol_key(e.dataset, e.threats) == wanted]
    ours = [e for e in ours if fnmatchcase(e.name, only)]
    if not ours:
        raise UserError(f"the zoo has no network of ours for {dataset} with {threats}" + (f" called {only}" if only != "*" else ""))
    loaded = load([zoo / e.folder / RESULTS for e in ours], threats.split(","), by_name=True)
    table = TABLES[kind](loaded, third[0] if third else None)
    return to_markdown(table).rstrip()


def _methods(loaded: Loaded, baseline: str | None) -> pd.DataFrame:
    """Accuracies, best union first; only the union with its interval and the value of every seed."""
    table = seed_table(loaded.study).sort_values("union", ascending=False, kind="stable")
    each = accuracy_table(loaded.study).sort_values("seed").groupby("method")["union"]
    columns = ["clean_all" if "clean_all" in table else "clean", *(c for c in metrics_of(table) if c.startswith("cert_")), "union"]
    rows = table.to_dict("records")
    out = table[["method"]].join(pd.DataFrame({heading(c): [_mean(row, c) for row in rows] for c in columns}, table.index))
    out["95 % interval"] = [f"{row['union_low']:.1f} to {row['union_high']:.1f}" for row in rows]
    out["every seed"] = [", ".join(f"{v:.1f}" for v in each.get_group(method)) for method in table["method"]]
    if baseline is not None:
        tests = baseline_table(loaded.study, baseline).set_index("method").to_dict("index")
        out[f"against {baseline}"] = [difference_text(tests.get(method)) for method in table["method"]]
    return out


def _mean(row: Mapping[Any, Any], metric: str) -> str:
    return f"{row[metric]:.1f}" + (f" ± {row[f'{metric}_sd']:.1f}" if row["seeds"] > 1 else "")


def _stages(loaded: Loaded, baseline: str | None) -> pd.DataFrame:
    """The union as the cascade grows, what no attack broke, and the share of verdicts that stay open."""
    stages, enabled = stage_table(loaded.study), loaded.enabled_stages(loaded.study)
    wide = stages[stages["stage"].isin(enabled)].pivot_table(index="method", columns="stage", values="union", sort=False)
    means = seed_table(loaded.study).set_index("method")
    counts = status_table(loaded.study).groupby("method", sort=False)[["unknown", "n"]].sum()
    wide["not broken"], wide["open, % of verdicts"] = means["emp_union"], 100 * counts["unknown"] / counts["n"]
    table = wide.sort_values(str(wide.columns[-3]), ascending=False, kind="stable").reset_index()
    return table.map(lambda v: f"{v:.1f}" if isinstance(v, float) else v)


def _decomposition(loaded: Loaded, baseline: str | None) -> pd.DataFrame:
    """R_union = R_r + R_align, r the norm with most errors."""
    weakest = main_decomposition(decomposition_summary(loaded.study))
    shown = weakest[["method", "r"]].join(readable(weakest, ["R_r", "R_align", "R_union"]))
    return shown.loc[weakest["R_union"].sort_values(kind="stable").index]


def _curve(loaded: Loaded, setting: str | None) -> pd.DataFrame:
    """Clean accuracy, norms and union over one setting."""
    methods = {entry.info.method for entry in loaded.study.entries}
    found = vary(loaded.study, setting, sorted(methods)) if setting else []
    if len(found) != 1:
        raise UserError(
            f"zoo:curve needs networks of one method that differ in one setting alone, e.g. training.eta; {setting} gives {len(found)}"
        )
    table, name = found[0], str(setting).rpartition(".")[2]
    certified = [c for c in metrics_of(table) if c.startswith("cert_")]
    columns = ["clean_all" if "clean_all" in table else "clean", *certified, "union"]
    rows = table.to_dict("records")
    out = pd.DataFrame({name: [f"{row[name]:.3g}" for row in rows]})
    out = out.join(pd.DataFrame({heading(c): [_mean(row, c) for row in rows] for c in columns}))
    out["95 % interval of the union"] = [f"{row['union_low']:.1f} to {row['union_high']:.1f}" for row in rows]
    return out


TABLES: dict[str, Callable[[Loaded, str | None], pd.DataFrame]] = {
    "methods": _methods,
    "stages": _stages,
    "decomposition": _decomposition,
    "curve": _curve,
}
