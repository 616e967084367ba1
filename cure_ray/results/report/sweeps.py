"""Sweeps: the front that was found and which hyper-parameters mattered, from the Optuna journal a sweep leaves behind."""

import json
import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from markupsafe import Markup

from cure_ray.results.report.charts import Point, points_chart

if TYPE_CHECKING:
    import optuna
    from optuna.trial import FrozenTrial

JOURNALS = ("*.journal", "*journal*.log", "*journal*.jsonl")
FEWEST = 4  # finished trials from which importances are told


@dataclass(frozen=True)
class Objective:
    """One objective of a study: importances add up to 1; empty where there are too few finished trials to say anything."""

    name: str
    best: float | None
    importances: tuple[tuple[str, float], ...]
    slices: tuple[tuple[str, Markup], ...]  # (parameter, chart)


@dataclass(frozen=True)
class Sweep:
    """One study of a journal."""

    name: str
    journal: Path
    trials: int
    finished: int
    stopped: int
    met: int | None  # finished trials that meet the constraints; None: there are none
    front: int  # trials that no other beats; 0: there is one objective
    objectives: tuple[Objective, ...]
    trade_offs: tuple[tuple[str, Markup], ...]  # of several objectives, pair by pair


def find_journals(roots: Iterable[Path], beside: Iterable[Path] = ()) -> list[Path]:
    """Journals up to three levels below `roots`, and directly in `beside`."""
    found: dict[Path, None] = {}
    for root, levels in [*((r, 4) for r in roots), *((b, 1) for b in beside)]:
        for pattern in JOURNALS:
            for depth in range(levels):
                found.update(dict.fromkeys(p.resolve() for p in sorted(root.glob("*/" * depth + pattern)) if p.is_file()))
    return list(found)


def read_sweeps(roots: Iterable[Path], beside: Iterable[Path] = ()) -> list[Sweep]:
    """Every study of every journal. A file that is not a journal is skipped: it is somebody else's log."""
    journals = find_journals(roots, beside)
    if not journals:
        return []
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return [_describe(study, path) for path in journals for study in _studies(path)]


def _studies(path: Path) -> Iterator["optuna.Study"]:
    import optuna
    from optuna.storages import JournalStorage

    from cure_ray.search.journal import DamagedJournalError, JournalReader

    try:
        storage = JournalStorage(JournalReader(path))
        summaries = optuna.get_all_study_summaries(storage)
    except DamagedJournalError as error:
        if error.line > 1:  # its first line is a record: no foreign log
            print(f"left out of the report: {error}", file=sys.stderr)
        return
    except Exception:  # whatever a foreign file makes the parser raise
        return
    for summary in summaries:
        yield optuna.load_study(study_name=summary.study_name, storage=storage)


@dataclass(frozen=True)
class _Seen:
    """A trial with values: measured to its end, or what was known when it was stopped."""

    trial: "FrozenTrial"
    values: tuple[float, ...]
    kind: Literal["front", "finished", "stopped"]

    @property
    def tip(self) -> str:
        return f"trial {self.trial.number} ({self.kind})"


def _describe(study: "optuna.Study", journal: Path) -> Sweep:
    from optuna.trial import TrialState

    from cure_ray.search.trials import last_reached, meets

    trials = [t for t in study.get_trials(deepcopy=False) if "duplicate_of" not in t.user_attrs]
    finished = [t for t in trials if t.state == TrialState.COMPLETE]
    stopped = [t for t in trials if t.state == TrialState.PRUNED]
    names = study.metric_names or [f"objective {i + 1}" if len(study.directions) > 1 else "objective" for i in range(len(study.directions))]
    front = {t.number for t in study.best_trials} if len(names) > 1 else set[int]()
    known = [(t, last_reached(t, names)) for t in stopped]
    seen = [_Seen(t, tuple(t.values), "front" if t.number in front else "finished") for t in finished]
    seen += [_Seen(t, values, "stopped") for t, values in known if values is not None and len(values) == len(names)]
    percent = 100.0 if study.metric_names and all(0 <= v <= 1 for s in seen for v in s.values) else 1.0
    constrained = any(t.constraints for t in finished)
    return Sweep(
        name=study.study_name,
        journal=journal,
        trials=len(trials),
        finished=len(finished),
        stopped=len(stopped),
        met=sum(map(meets, finished)) if constrained else None,
        front=len(front),
        objectives=tuple(_objective(study, finished, seen, i, name, percent) for i, name in enumerate(names)),
        trade_offs=tuple(_trade_off(seen, names, i, j, percent) for i in range(len(names)) for j in range(i + 1, len(names))),
    )


def _objective(
    study: "optuna.Study", finished: Sequence["FrozenTrial"], seen: Sequence[_Seen], index: int, name: str, percent: float
) -> Objective:
    from optuna.study import StudyDirection

    pick = max if study.directions[index] == StudyDirection.MAXIMIZE else min
    best = pick((t.values[index] for t in finished), default=None)
    importances = tuple(_importances(study, index).items()) if len(finished) >= FEWEST else ()
    order = {parameter: place for place, (parameter, _) in enumerate(importances)}
    varied = sorted({p for s in seen for p in s.trial.params}, key=lambda p: (order.get(p, len(order)), p))
    unit = f"{name}, %" if percent != 1 else name
    return Objective(name, best, importances, tuple((p, _slice(seen, p, index, unit, percent)) for p in varied))


def _importances(study: "optuna.Study", index: int) -> dict[str, float]:
    from optuna.importance import FanovaImportanceEvaluator, get_param_importances

    try:  # seeded, or two reports of one sweep would differ
        return dict(get_param_importances(study, evaluator=FanovaImportanceEvaluator(seed=0), target=lambda t: t.values[index]))
    except (ValueError, RuntimeError):  # all values equal, or one parameter value only
        return {}


def _slice(seen: Sequence[_Seen], parameter: str, index: int, unit: str, percent: float) -> Markup:
    """The objective over one parameter, of every trial that has it."""
    own = [s for s in seen if parameter in s.trial.params]
    distribution = own[0].trial.distributions[parameter]
    choices: Sequence[Any] | None = getattr(distribution, "choices", None)
    place = (lambda v: float(choices.index(v))) if choices else math.log10 if getattr(distribution, "log", False) else float
    points = [Point(place(s.trial.params[parameter]), percent * s.values[index], s.kind, s.tip) for s in own]
    ticks = None
    if choices:
        ticks = [(float(i), _word(choice)) for i, choice in enumerate(choices)]
    elif getattr(distribution, "log", False):
        ticks = [(float(k), f"1e{k}") for k in range(math.ceil(min(p.x for p in points)), math.floor(max(p.x for p in points)) + 1)]
    return points_chart(f"{unit} over {parameter}", points, parameter, unit, ticks)


def _word(choice: Any) -> str:
    """A category as people write it: ours are JSON."""
    try:
        return str(json.loads(choice))
    except (TypeError, ValueError):
        return str(choice)


def _trade_off(seen: Sequence[_Seen], names: Sequence[str], i: int, j: int, percent: float) -> tuple[str, Markup]:
    unit = ", %" if percent != 1 else ""
    points = [Point(percent * s.values[i], percent * s.values[j], s.kind, s.tip) for s in seen]
    title = f"{names[j]} against {names[i]}"
    return title, points_chart(title, points, f"{names[i]}{unit}", f"{names[j]}{unit}", staircase=len(names) == 2)
