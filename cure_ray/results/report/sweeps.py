"""Sweeps: which hyper-parameters mattered, from the Optuna journal a sweep leaves behind."""

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

JOURNALS = ("*.journal", "*journal*.log", "*journal*.jsonl")


@dataclass(frozen=True)
class Sweep:
    """One study of a journal: importances add up to 1; empty where there are too few finished trials to say anything."""

    name: str
    journal: Path
    trials: int
    finished: int
    best: float | None
    importances: tuple[tuple[str, float], ...]


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
    sweeps: list[Sweep] = []
    journals = find_journals(roots, beside)
    if not journals:
        return sweeps
    import optuna
    from optuna.importance import FanovaImportanceEvaluator, get_param_importances
    from optuna.storages import JournalStorage
    from optuna.trial import TrialState

    from cure_ray.search.journal import DamagedJournalError, JournalReader

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    for path in journals:
        try:
            storage = JournalStorage(JournalReader(path))
            summaries = optuna.get_all_study_summaries(storage)
        except DamagedJournalError as error:
            if error.line > 1:  # its first line is a record: no foreign log
                print(f"left out of the report: {error}", file=sys.stderr)
            continue
        except Exception:  # whatever a foreign file makes the parser raise
            continue
        for summary in summaries:
            study = optuna.load_study(study_name=summary.study_name, storage=storage)
            finished = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
            importances: dict[str, float] = {}
            if len(finished) >= 4:
                # Seeded, or two reports of one sweep would differ. Of several objectives the first one counts: the sweep names it first.
                evaluator = FanovaImportanceEvaluator(seed=0)
                try:
                    importances = dict(get_param_importances(study, evaluator=evaluator, target=lambda t: t.values[0]))
                except (ValueError, RuntimeError):  # all values equal, or one parameter value only
                    importances = {}
            sign = 1.0 if study.directions[0] == optuna.study.StudyDirection.MAXIMIZE else -1.0
            best = max((sign * t.values[0] for t in finished), default=None)
            best = None if best is None else sign * best
            sweeps.append(Sweep(summary.study_name, path, len(study.trials), len(finished), best, tuple(importances.items())))
    return sweeps
