"""Is the difference between two methods more than chance? Exact paired tests on the same images, Holm-corrected.

An image speaks for the method that certifies it more often: in more seeds, where seeds are pooled, or against more transformations,
where the metric is a mean over those. With one seed and one yes or no per image this sign test is the exact McNemar test. Images are
the unit, so seeds that share them are not counted as more data; what other seeds would have given is the deviation's to say.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
import pandas as pd

from cure_ray.errors import UserError
from cure_ray.results.attacked import stands
from cure_ray.results.evaluations import Ints
from cure_ray.results.statistics import holm, mcnemar
from cure_ray.results.study import Entry, Study

SIGNIFICANCE_COLUMNS = [
    "setting", "metric", "method_a", "method_b", "seed", "n", "a", "b", "difference", "only_a", "only_b", "p", "p_holm", "significant",
]  # fmt: skip
BASELINE_COLUMNS = [
    "setting", "metric", "method", "baseline", "seeds", "n", "value", "baseline_value", "difference", "difference_sd", "better", "worse",
    "p", "p_holm", "significant",
]  # fmt: skip


@dataclass(frozen=True)
class Scores:
    """Per image, in how many of `of` cases it is certified (or, for clean, correct)."""

    samples: Ints
    hits: Ints
    of: int

    @property
    def percent(self) -> float:
        return 100 * float(self.hits.sum()) / (self.of * len(self.hits))

    def pooled(self, other: "Scores") -> "Scores":
        return Scores(self.samples, self.hits + other.hits, self.of + other.of)


def scores(entry: Entry, metric: str) -> Scores:
    """What a column of the accuracy table says, image by image."""
    e = entry.evaluation
    if metric == "clean":
        return Scores(e.samples, e.correct.astype(np.int64), 1)
    if metric == "union":
        if not entry.balls:
            raise UserError(f"{entry.label} was certified against transformations only: there is no union to compare")
        return Scores(e.samples, np.asarray(e.certified.all(1), dtype=np.int64), 1)
    every = entry.everything
    families = {"gcr_geo": ("geometric",), "gcr_all": ("geometric", "patch")}
    if metric.startswith("words_"):
        attacked = every.only([t for t in every.family("text") if metric == f"words_{t.name}"] or _no_verdicts(entry, metric))
        return Scores(attacked.samples, stands(attacked).astype(np.int64), 1)
    if metric in families:
        threats = every.family(*families[metric])
    else:
        name = metric.removeprefix("cert_")
        threats = tuple(t for t in e.threats if t.norm == name and t.family == "lp") or tuple(t for t in every.threats if t.name == name)
    if not threats:
        _no_verdicts(entry, metric)
    block = every.common(threats)
    return Scores(block.samples, block.certified.sum(1).astype(np.int64), len(threats))


def _no_verdicts(entry: Entry, metric: str) -> NoReturn:
    raise UserError(f"{entry.label} (seed {entry.info.seed}) has no verdicts for {metric}; there are {', '.join(_metrics(entry))}")


def _metrics(entry: Entry) -> list[str]:
    kinds = {"lp": lambda t: f"cert_{t.norm}", "text": lambda t: f"words_{t.name}"}
    own = [kinds.get(t.family, lambda t: f"cert_{t.name}")(t) for t in entry.everything.threats]
    return ["clean", *(["union"] if entry.balls else []), *dict.fromkeys(own)]


def _compare(one: Scores, two: Scores, names: tuple[str, str], setting: str) -> dict[str, Any]:
    if not np.array_equal(one.samples, two.samples):
        raise UserError(
            f"{names[0]} and {names[1]} were certified on different samples of {setting} "
            f"({len(one.samples)} and {len(two.samples)}); a paired comparison needs the same ones: use equal --samples."
        )
    if one.of != two.of:
        raise UserError(f"{names[0]} and {names[1]} were certified against different transformations of {setting}: nothing to compare")
    a, b = int((one.hits > two.hits).sum()), int((two.hits > one.hits).sum())
    return {
        "n": len(one.samples), "a": one.percent, "b": two.percent, "difference": one.percent - two.percent, "only_a": a, "only_b": b,
    }  # fmt: skip


def _adjusted(rows: list[dict[str, Any]], level: float) -> list[dict[str, Any]]:
    p_values = mcnemar([r["only_a"] for r in rows], [r["only_b"] for r in rows]).tolist() if rows else []
    pairs = zip(rows, p_values, holm(p_values), strict=True)
    return [row | {"p": p, "p_holm": adjusted, "significant": adjusted < level} for row, p, adjusted in pairs]


def by_seed(entries: Sequence[Entry], metric: str) -> dict[str, dict[int, Scores]]:
    """method -> seed -> scores."""
    found: dict[str, dict[int, Scores]] = {}
    for entry in entries:
        found.setdefault(entry.label, {})[entry.info.seed] = scores(entry, metric)
    return found


def pool(one: dict[int, Scores], two: dict[int, Scores]) -> tuple[list[int], Scores, Scores] | None:
    """Both methods over the seeds they share; None if they share none."""
    shared = sorted(one.keys() & two.keys())
    if not shared:
        return None
    pooled = []
    for runs in (one, two):
        total = runs[shared[0]]
        for seed in shared[1:]:
            if not np.array_equal(total.samples, runs[seed].samples):
                raise UserError(
                    f"seeds {shared[0]} and {seed} of one method were certified on different samples ({len(total.samples)} and "
                    f"{len(runs[seed].samples)}); seeds are pooled image by image: use equal --samples."
                )
            total = total.pooled(runs[seed])
        pooled.append(total)
    return shared, pooled[0], pooled[1]


def significance_table(study: Study, metric: str | None = None, pooled: bool = False, level: float = 0.05) -> pd.DataFrame:
    """Every pair of methods of a setting; Holm's correction runs over all tests of the setting.

    One row per pair and shared seed, or, `pooled`, one per pair (then `seed` says which seeds). `metric` is a column of the accuracy
    table; by default the union, or the mean over transformations where no balls were certified.
    """
    rows = []
    for setting in study.settings:
        own = study.within(setting).entries
        name = metric or own[0].headline
        found, tests = by_seed(own, name), list[dict[str, Any]]()
        for one, two in itertools.combinations(found, 2):
            who = {"setting": setting, "metric": name, "method_a": one, "method_b": two}
            together = pool(found[one], found[two])
            if together is None:
                continue
            seeds, *whole = together
            if pooled:
                cases: list[tuple[Any, Scores, Scores]] = [(", ".join(map(str, seeds)), whole[0], whole[1])]
            else:
                cases = [(seed, found[one][seed], found[two][seed]) for seed in seeds]
            tests += [who | {"seed": seed} | _compare(a, b, (one, two), setting) for seed, a, b in cases]
        rows += _adjusted(tests, level)
    return pd.DataFrame(rows, columns=SIGNIFICANCE_COLUMNS)


def compare_pooled(found: dict[str, dict[int, Scores]], method: str, other: str, setting: str) -> dict[str, Any] | None:
    """Method minus other over the seeds both have, with the deviation over seeds and the unadjusted p; None if they share no seed."""
    together = pool(found[method], found[other])
    if together is None:
        return None
    seeds, a, b = together
    test = _compare(a, b, (method, other), setting)
    each = [found[method][s].percent - found[other][s].percent for s in seeds]
    spread = float(np.std(each, ddof=1)) if len(each) > 1 else float("nan")
    return test | {"seeds": len(seeds), "difference_sd": spread, "p": float(mcnemar(test["only_a"], test["only_b"]))}


def baseline_table(study: Study, baseline: str, metric: str | None = None, level: float = 0.05) -> pd.DataFrame:
    """Every other method against one, pooled over the seeds both have; Holm's correction runs over the methods of a setting.

    `difference` is method minus baseline in points, `difference_sd` its deviation over seeds; `better` and `worse` count the images
    that are certified in more, or in fewer, seeds than by the baseline.
    """
    known = list(dict.fromkeys(e.label for e in study.entries))
    if baseline not in known:
        raise UserError(f"there is no method called {baseline!r} to compare with; there are: {', '.join(known)}")
    rows = []
    for setting in study.settings:
        own = study.within(setting).entries
        name = metric or own[0].headline
        found = by_seed(own, name)
        tests = list[dict[str, Any]]()
        for method in found if baseline in found else ():
            test = compare_pooled(found, method, baseline, setting) if method != baseline else None
            if test is not None:
                who = {"setting": setting, "metric": name, "method": method, "baseline": baseline}
                tests.append(test | who | {"value": test["a"], "baseline_value": test["b"]})
        rows += [r | {"better": r["only_a"], "worse": r["only_b"]} for r in _adjusted(tests, level)]
    return pd.DataFrame(rows, columns=BASELINE_COLUMNS)
