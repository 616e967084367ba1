"""Sweeps: which hyper-parameters mattered, from the Optuna journal a sweep leaves behind."""

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
    from optuna.importance import get_param_importances
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend
    from optuna.trial import TrialState

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    for path in journals:
        try:
            storage = JournalStorage(JournalFileBackend(str(path)))
            summaries = optuna.get_all_study_summaries(storage)
        except Exception:  # whatever a foreign file makes the parser raise
            continue
        for summary in summaries:
            study = optuna.load_study(study_name=summary.study_name, storage=storage)
            finished = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
            single = len(study.directions) == 1
            importances: dict[str, float] = {}
            if single and len(finished) >= 4:
                try:
                    importances = dict(get_param_importances(study))
                except (ValueError, RuntimeError):  # all values equal, or one parameter value only
                    importances = {}
            best = study.best_value if single and finished else None
            sweeps.append(Sweep(summary.study_name, path, len(study.trials), len(finished), best, tuple(importances.items())))
    return sweeps
