"""What a search asks next: Optuna's samplers, seeded per call, and what they are shown of trials that were stopped."""

import copy
import logging
from collections.abc import Container, Sequence
from typing import Any

import optuna
from optuna.distributions import BaseDistribution
from optuna.samplers import BaseSampler, GPSampler, NSGAIISampler, RandomSampler, TPESampler
from optuna.trial import FrozenTrial, TrialState

from cure_ray import seeding
from cure_ray.search.halving import Values
from cure_ray.search.space import Sweep
from cure_ray.search.trials import last_reached


def make_sampler(sweep: Sweep, submission: int) -> BaseSampler:
    """Seeded per call: two calls with one seed would propose the same points."""
    seed = seeding.derive(sweep.seed, "search", submission) % 2**32
    startup = min(10, max(2, (sweep.trials or 30) // 3))
    tpe = TPESampler(seed=seed, constant_liar=True, n_startup_trials=startup)
    several = len(sweep.objectives) > 1
    if sweep.search == "tpe":
        return Informed(tpe, sweep) if several else tpe  # of one objective it reads intermediate values itself
    if sweep.search == "gp":  # fields that only some configurations have are no part of its model: TPE proposes those
        logging.getLogger("optuna._gp").setLevel(logging.ERROR)  # that greenlet would make it faster is said in docs/guide/sweeps.md
        return Informed(GPSampler(seed=seed, independent_sampler=tpe, n_startup_trials=startup, warn_independent_sampling=False), sweep)
    if sweep.search == "nsga2":
        return Informed(NSGAIISampler(seed=seed, population_size=min(50, max(4, (sweep.trials or 200) // 4))), sweep)
    return RandomSampler(seed=seed)  # also fills what a grid has not fixed, which is nothing


class Informed(BaseSampler):
    """A sampler to which a stopped trial is a trial with the values it was stopped at.

    Optuna's samplers for several objectives, and its Gaussian processes for one, forget stopped trials: of a search with early stopping
    they would see the third that was let on, and propose again and again what was stopped. Values at rungs are comparable by design.
    """

    def __init__(self, sampler: BaseSampler, sweep: Sweep) -> None:
        self.sampler, self.sweep = sampler, sweep

    def _shown(self, study: optuna.Study) -> "_Shown":
        return _Shown(study, self.sweep)

    def infer_relative_search_space(self, study: optuna.Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        found: dict[str, BaseDistribution] = self.sampler.infer_relative_search_space(self._shown(study), trial)
        return found

    def sample_relative(self, study: optuna.Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]) -> dict[str, Any]:
        found: dict[str, Any] = self.sampler.sample_relative(self._shown(study), trial, search_space)
        return found

    def sample_independent(self, study: optuna.Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution) -> Any:
        return self.sampler.sample_independent(self._shown(study), trial, param_name, param_distribution)

    def before_trial(self, study: optuna.Study, trial: FrozenTrial) -> None:
        self.sampler.before_trial(self._shown(study), trial)

    def after_trial(self, study: optuna.Study, trial: FrozenTrial, state: TrialState, values: Sequence[float] | None) -> None:
        self.sampler.after_trial(self._shown(study), trial, state, values)

    def reseed_rng(self) -> None:
        self.sampler.reseed_rng()


class _Shown(optuna.Study):
    """A study in which stopped trials are finished; everything else is the study itself."""

    def __init__(self, study: optuna.Study, sweep: Sweep) -> None:
        self.__dict__.update(study.__dict__)
        self._sweep = sweep

    def _get_trials(self, deepcopy: bool = True, states: Container[TrialState] | None = None, use_cache: bool = False) -> list[FrozenTrial]:
        found = super()._get_trials(deepcopy=deepcopy, states=None, use_cache=use_cache)
        shown = (self._finished(t) if t.state == TrialState.PRUNED else t for t in found)
        return [t for t in shown if states is None or t.state in states]

    def _finished(self, trial: FrozenTrial) -> FrozenTrial:
        values: Values | None = last_reached(trial, self._sweep.objectives)
        if values is None:
            return trial
        shown = copy.copy(trial)
        shown.state, shown.values = TrialState.COMPLETE, list(values)
        return shown
