"""Learning curves from the runs' metrics.jsonl."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from cure_ray.results.report.charts import Series, line_chart
from cure_ray.results.study import Entry
from cure_ray.runs.metrics import read_metrics

PANELS: tuple[tuple[str, str, float, float | None, float | None], ...] = (
    ("rho", "radius, % of target", 100, 0, 100),
    ("loss", "training loss", 1, None, None),
    ("clean", "clean accuracy, % (validation)", 100, None, None),
    ("ibp_linf", "linf certified by IBP, % (validation)", 100, None, None),
    ("ibp_union", "union certified by IBP, % (validation)", 100, None, None),
    ("gamma_share", "γ: share of the batch that is aligned, %", 100, None, None),
    ("share_first_norm", "share where the first norm is the worst, %", 100, None, None),
    ("alignment", "bound-alignment loss", 1, None, None),
    ("cosine_mean", "mean cosine of natural and certified update", 1, None, None),
    ("lr", "learning rate", 1, None, None),
)
"""(metric, title, factor, lowest, highest)."""


@dataclass(frozen=True)
class Panel:
    title: str
    chart: Markup


def panels(entries: Sequence[Entry], tones: Mapping[str, int]) -> list[Panel]:
    """A small chart per metric that any run has; the first seed of a method is drawn strongly."""
    curves = [(e, read_metrics(e.info.directory)) for e in entries if e.info.directory is not None]
    out = []
    for metric, title, factor, low, high in PANELS:
        series, strong = [], set[str]()
        for entry, rows in curves:
            points = tuple((float(r["epoch"]), factor * float(r[metric])) for r in rows if isinstance(r.get(metric), int | float))
            if not points or all(math.isnan(y) for _, y in points):
                continue
            series.append(Series(f"{entry.label}, seed {entry.info.seed}", points, tones[entry.label], entry.label in strong))
            strong.add(entry.label)
        if series and any(y != 0 for s in series for _, y in s.points):
            out.append(Panel(title, line_chart(title, series, low=low, high=high)))
    return out
