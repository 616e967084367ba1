"""The best configurations of a sweep, and where their networks are."""

from pathlib import Path

import optuna
from optuna.trial import FrozenTrial, TrialState

from cure_ray.errors import UserError
from cure_ray.search.layout import SWEEP, trial_runs
from cure_ray.search.space import load_sweep
from cure_ray.search.study import read_study


def ranked(study: optuna.Study) -> list[FrozenTrial]:
    """Finished trials, best first; of several objectives the Pareto front first, ordered by the first objective."""
    done = [t for t in study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,)) if "duplicate_of" not in t.user_attrs]
    front = {t.number for t in study.best_trials} if len(study.directions) > 1 else set[int]()
    return sorted(done, key=lambda t: (t.number not in front, [-v for v in t.values], t.number))


def best_runs(directory: Path, count: int) -> list[Path]:
    """Run directories of a sweep's best configurations, every seed of each."""
    if not (directory / SWEEP).is_file():
        raise UserError(f"{directory} is no sweep: it holds no {SWEEP}")
    best = ranked(read_study(directory, load_sweep(directory / SWEEP)))[:count]
    if not best:
        raise UserError(f"the sweep in {directory} has no finished trial yet; see `cure-ray status {directory}`")
    return [run for trial in best for run in trial_runs(directory, trial.number)]
