"""The best configurations of a sweep, its Pareto front, and where their networks are."""

from pathlib import Path

import optuna
from optuna.trial import FrozenTrial, TrialState

from cure_ray.errors import UserError
from cure_ray.search.halving import Values
from cure_ray.search.layout import SWEEP, trial_runs
from cure_ray.search.space import Sweep, load_sweep
from cure_ray.search.study import read_study
from cure_ray.search.trials import VALUES, meets


def finished(study: optuna.Study) -> list[FrozenTrial]:
    """Trained and measured to their end."""
    done = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
    return [t for t in done if "duplicate_of" not in t.user_attrs]


def pareto(study: optuna.Study) -> list[FrozenTrial]:
    """Finished trials that meet the constraints and that no other such trial beats, ordered by the first objective."""
    found = [t for t in study.best_trials if "duplicate_of" not in t.user_attrs]
    return sorted(found, key=lambda t: ([-v for v in t.values], t.number))


def ranked(study: optuna.Study) -> list[FrozenTrial]:
    """Finished trials, best first: who meets the constraints before who does not, of several objectives the Pareto front first."""
    ahead = {t.number for t in pareto(study)} if len(study.directions) > 1 else set[int]()
    return sorted(finished(study), key=lambda t: (not meets(t), t.number not in ahead, [-v for v in t.values], t.number))


def rivals(directory: Path, sweep: Sweep) -> list[Values]:
    """Objectives of what a trial would have to beat. None if they cannot be read from here: then nothing ends by bound."""
    try:
        return [tuple(t.values) for t in finished(read_study(directory, sweep)) if meets(t)]
    except UserError:
        return []


def check_met(directory: Path) -> None:
    """Say so if the constraints are met by none of the finished trials."""
    sweep = load_sweep(directory / SWEEP)
    trials = finished(read_study(directory, sweep))
    if not sweep.at_least or any(map(meets, trials)):
        return
    wanted = ", ".join(f"{name} {bound:g}" for name, bound in sweep.at_least.items())
    nearest = min(trials, key=lambda t: sum(max(0.0, miss) for miss in t.constraints.values()))
    reached = ", ".join(f"{name} {nearest.user_attrs[VALUES][name]:.3g}" for name in sweep.at_least)
    raise UserError(
        f"0 of {len(trials)} finished trials meet at_least ({wanted}); trial {nearest.number} comes nearest with {reached}. "
        "Lower the constraint, widen the space, or give it more trials."
    )


def best_runs(directory: Path, count: int = 1, front: bool = False) -> list[Path]:
    """Run directories, every seed of each, of a sweep's best configurations or of its Pareto front."""
    if not (directory / SWEEP).is_file():
        raise UserError(f"{directory} is no sweep: it holds no {SWEEP}")
    sweep = load_sweep(directory / SWEEP)
    study = read_study(directory, sweep)
    trials = ranked(study)
    if not trials:
        raise UserError(f"the sweep in {directory} has no finished trial yet; see `cure-ray status {directory}`")
    check_met(directory)
    chosen = _front(study, sweep, directory) if front else [t for t in trials if meets(t)][:count]
    return [run for trial in chosen for run in trial_runs(directory, trial.number)]


def _front(study: optuna.Study, sweep: Sweep, directory: Path) -> list[FrozenTrial]:
    if len(sweep.objectives) < 2:
        raise UserError(f"the sweep in {directory} has one objective ({sweep.objectives[0]}), so it has no front: use --best N")
    found = pareto(study)
    if len(found) == 1:
        raise UserError(
            f"the front of {directory} is one point: trial {found[0].number} is the best in every objective "
            f"({', '.join(sweep.objectives)}). Certify it with --best 1, or give the search more trials."
        )
    return found
