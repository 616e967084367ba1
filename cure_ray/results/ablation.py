"""The ladder Max, Max + bound alignment, Max + BA + gradient projection (12.3), and GP alone: what each step adds, all else equal."""

from collections import defaultdict
from typing import Any

import pandas as pd

from cure_ray.config.methods import METHODS
from cure_ray.results.comparisons import by_seed, compare_pooled
from cure_ray.results.decomposition import decomposition_summary, main_decomposition
from cure_ray.results.statistics import holm
from cure_ray.results.study import Entry, RunInfo, Study, flatten
from cure_ray.results.tables import seed_table

STEPS = ("Max", "Max + BA", "Max + GP", "Max + BA + GP")
BELOW = {"Max": (), "Max + BA": ("Max",), "Max + GP": ("Max",), "Max + BA + GP": ("Max + BA", "Max + GP", "Max")}
"""What a step is compared with: the first of these that was run."""
_STEP_FIELDS = ("training.method", "training.eta", "training.beta", "training.projection", "training.align")
_NAMES = ("name", "origin", "seed", "execution.", "certification.", "training.start_from")


def step(info: RunInfo) -> str:
    """Which rung of the ladder a run is; empty if none."""
    row = METHODS.get(info.method)  # type: ignore[call-overload]
    if row is None or not (row.objective == "max" or (row.aligns and row.projects)):
        return ""
    if row.objective == "max":
        return STEPS[0]
    projects = info.setting("training.projection") is not False and (info.setting("training.beta") or 0) > 0
    aligns = bool(info.setting("training.eta"))
    return "Max" + (" + BA" if aligns else "") + (" + GP" if projects else "") if aligns or projects else ""


def ladders(study: Study) -> list[pd.DataFrame]:
    """Per setting and everything else that is equal: rungs with accuracies, decomposition, and the paired test against the rung below.

    Tests pool the seeds both rungs have; Holm's correction runs over the tests of a ladder. Ladders of one rung are left out.
    """
    groups: dict[tuple[str, Any], list[Entry]] = defaultdict(list)
    for entry in study.entries:
        if entry.balls and step(entry.info):
            flat = flatten(entry.info.experiment).items()
            rest = tuple(sorted((k, str(v)) for k, v in flat if not k.startswith((*_STEP_FIELDS, *_NAMES))))
            groups[entry.setting, rest].append(entry)
    tables = [_ladder(entries) for (_, _), entries in groups.items()]
    return [t for t in tables if t["step"].nunique() > 1]


def _ladder(entries: list[Entry]) -> pd.DataFrame:
    own = Study(tuple(sorted(entries, key=lambda e: STEPS.index(step(e.info)))))
    parts = main_decomposition(decomposition_summary(own))
    table = seed_table(own).merge(parts.drop(columns=["seeds", "n"]), on=["setting", "method"], how="left", suffixes=("", "_of"))
    steps = {e.label: step(e.info) for e in own.entries}
    eta = {e.label: e.info.setting("training.eta") for e in own.entries}
    table.insert(0, "step", table["method"].map(steps))
    found, tests = by_seed(own.entries, "union"), dict[str, dict[str, Any]]()
    for method in found:
        below = [m for name in BELOW[steps[method]] for m in found if steps[m] == name and (name != "Max + BA" or eta[m] == eta[method])]
        test = compare_pooled(found, method, below[0], own.settings[0]) if below else None
        if test is not None:
            tests[method] = test | {"below": below[0], "below_step": steps[below[0]]}
    adjusted = dict(zip(tests, holm([t["p"] for t in tests.values()]), strict=True))
    for column in ("below", "below_step", "difference", "difference_sd", "only_a", "only_b", "p"):
        table[column] = [tests.get(m, {}).get(column) for m in table["method"]]
    return table.assign(p_holm=[adjusted.get(m) for m in table["method"]])
