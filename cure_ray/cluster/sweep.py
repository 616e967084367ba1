"""A search: propose configurations with Optuna, run them as Ray tasks, stop the hopeless, survive everything.

This loop holds no state that matters: configurations and their results are in the study, trainings in their run directories. It can
be stopped anywhere, started again, or run several times at once on one directory (docs/sweeps.md says why it is not Ray Tune).
"""

import itertools
import math
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import optuna
import ray
from optuna.trial import FrozenTrial, TrialState

from cure_ray.cluster.session import Need, Session, fitting, live_nodes, require, session
from cure_ray.cluster.space import Sweep, base_data, experiment_at, grid_points
from cure_ray.cluster.study import (
    FAILED,
    OWNER,
    POINT,
    TRIALS,
    VALUES,
    claim,
    counted,
    enqueue,
    locked,
    make_sampler,
    open_study,
    orphans,
    submission,
    suggest,
    survives,
)
from cure_ray.cluster.trial import Leg, LegResult, need_of, submit
from cure_ray.config import Experiment, resolve
from cure_ray.errors import SoundnessError, UserError
from cure_ray.run import StoppedError, stop_on_signals

Say = Callable[[str], None]
MAX_DEATHS = 8  # of the processes of one leg; each costs at most the epoch it was in
MAX_ERRORS = 2  # exceptions that are ours and not the cluster's: they tend to come back
MAX_DUPLICATES = 50  # proposals in a row that were tried before: the space is exhausted


@dataclass(frozen=True)
class SweepResult:
    directory: Path
    trials: list[FrozenTrial]  # finished ones, best first (a Pareto front first, for several objectives)


def rung_epochs(experiment: Experiment, sweep: Sweep) -> list[int]:
    """Epochs at which a configuration is judged: never before the radii are full, geometrically up to the end."""
    training, stopping = experiment.training, sweep.early_stopping
    ramp = 0 if training.method == "natural" else min(training.first_full_epoch - 1, training.epochs - 1)
    steps = 0 if stopping is None else stopping.rungs
    shares = [(stopping.factor if stopping else 1) ** -k for k in range(steps, -1, -1)]
    return sorted({ramp + math.ceil((training.epochs - ramp) * share) for share in shares})


def describe(point: Mapping[str, Any]) -> str:
    """A point in few words: the last part of every path, numbers short."""
    return ", ".join(f"{p.rsplit('.', 1)[-1]}={v:.3g}" if isinstance(v, float) else f"{p.rsplit('.', 1)[-1]}={v}" for p, v in point.items())


@dataclass
class _Trial:
    """A configuration on its way through its rungs, with one leg in flight per seed."""

    number: int
    point: dict[str, Any]
    experiments: dict[int, Experiment]
    rungs: list[int]
    rung: int = 0
    values: dict[int, dict[str, float]] = field(default_factory=dict)
    deaths: dict[int, int] = field(default_factory=dict)
    since: float = field(default_factory=time.time)

    @property
    def mean(self) -> dict[str, float]:
        rows = list(self.values.values())
        return {k: sum(row[k] for row in rows) / len(rows) for k in rows[0] if all(k in row for row in rows)}


class _Search:
    """One call's part of the sweep."""

    def __init__(self, sweep: Sweep, directory: Path, number: int, where: Session, data_dir: str | None, say: Say) -> None:
        self.sweep, self.directory, self.me, self.where, self.data_dir, self.say = sweep, directory, number, where, data_dir, say
        self.base = resolve(base_data(sweep))
        self.study = open_study(directory, sweep, make_sampler(sweep, number))
        ends = (experiment_at(sweep, p, 0, sweep.seeds[0]) for p in itertools.islice(grid_points(sweep, self.base), 64))
        self.need = max((need_of(e, where.gpus) for e in ends), key=lambda need: need.workers)
        self.pending: dict[Any, tuple[_Trial, int]] = {}
        self.deadline = time.time() + sweep.hours * 3600 if sweep.hours else math.inf
        self.exhausted = False
        fixed = [*sweep.start_with, *(grid_points(sweep, self.base) if sweep.search == "grid" else ())]
        with locked(directory):
            enqueue(self.study, sweep, list(itertools.islice(fixed, sweep.trials)))

    # ------------------------------------------------------------ starting

    @property
    def capacity(self) -> int:
        one = fitting(Need(self.need.workers, self.need.cpus, self.need.gpus), live_nodes()) // self.need.workers
        return self.sweep.concurrency or max(1, one)

    def fill(self) -> None:
        """Take over what dead calls left, then propose, until the cluster is full or the budget is used up."""
        with locked(self.directory):
            for frozen in orphans(self.study, self.directory):
                self._adopt(frozen)
        while len(self.pending) < self.capacity and time.time() < self.deadline and not self.exhausted:
            with locked(self.directory):
                trial = self._propose()
            if trial is None:
                return
            self._launch(trial)

    def _propose(self) -> _Trial | None:
        """The next configuration that is new, or None if there is none (hold the lock)."""
        for _ in range(MAX_DUPLICATES):
            waiting = self.study.get_trials(deepcopy=False, states=(TrialState.WAITING,))
            if not waiting and self.sweep.search == "grid":
                break
            if self.sweep.trials is not None and counted(self.study) >= self.sweep.trials:
                return None
            asked = self.study.ask()
            asked.set_user_attr(OWNER, self.me)
            point = suggest(asked, self.sweep, self.base)
            try:
                trial = self._make(asked.number, point)
            except UserError as error:  # a combination nobody foresaw; say it where it is looked for
                self._fail(asked.number, asked, str(error))
                continue
            identity = trial.experiments[self.sweep.seeds[0]].config_hash
            twin = self._twin(asked.number, identity)
            if twin is not None:
                self._repeat(asked, twin)
                continue
            asked.set_user_attr("identity", identity)
            asked.set_user_attr(POINT, point)
            return trial
        self.exhausted = True
        return None

    def _make(self, number: int, point: dict[str, Any]) -> _Trial:
        experiments = {seed: experiment_at(self.sweep, point, number, seed) for seed in self.sweep.seeds}
        return _Trial(number, point, experiments, rung_epochs(experiments[self.sweep.seeds[0]], self.sweep))

    def _twin(self, number: int, identity: str) -> FrozenTrial | None:
        same = [t for t in self.study.get_trials(deepcopy=False) if t.number != number and t.user_attrs.get("identity") == identity]
        return same[0] if same else None

    def _repeat(self, asked: optuna.Trial, twin: FrozenTrial) -> None:
        """Proposed again: give the sampler the known answer, and run nothing."""
        asked.set_user_attr("duplicate_of", twin.number)
        if twin.state == TrialState.COMPLETE:
            self.study.tell(asked, twin.values)
        else:
            self.study.tell(asked, state=TrialState.FAIL)

    def _adopt(self, frozen: FrozenTrial) -> None:
        handle = self._handle(frozen.number)
        point = frozen.user_attrs.get(POINT)
        if point is None:  # its call died while proposing it: nothing was run
            handle.set_user_attr("duplicate_of", -1)
            self.study.tell(frozen.number, state=TrialState.FAIL)
            if "fixed_params" in frozen.system_attrs:
                self.study.enqueue_trial(frozen.system_attrs["fixed_params"])
            return
        handle.set_user_attr(OWNER, self.me)
        trial = self._make(frozen.number, point)
        trial.rung = max(0, len(frozen.intermediate_values) - 1)
        self.say(f"trial {trial.number}: continued, its call has ended")
        self._launch(trial)

    def _launch(self, trial: _Trial) -> None:
        trial.values.clear()
        for seed in self.sweep.seeds:
            self._submit(trial, seed)

    def _submit(self, trial: _Trial, seed: int) -> None:
        experiment = trial.experiments[seed]
        home = self.directory / TRIALS / f"{trial.number:04d}-{trial.experiments[self.sweep.seeds[0]].config_hash[:8]}" / f"seed{seed}"
        need = need_of(experiment, self.where.gpus)
        device = "cpu" if not need.gpus and experiment.execution.device == "auto" else experiment.execution.device
        wanted = frozenset(self.sweep.objectives)
        leg = Leg(experiment, home, trial.rungs[trial.rung], self.sweep.samples, wanted, self.data_dir, device)
        self.pending[submit(leg, need)] = (trial, seed)

    # ------------------------------------------------------------ finishing

    def collect(self, seconds: float) -> None:
        """Wait for a leg, at most so long, and draw the conclusions."""
        ready, _ = ray.wait(list(self.pending), num_returns=1, timeout=seconds)
        for ref in ready:
            trial, seed = self.pending.pop(ref)
            try:
                result: LegResult = ray.get(ref)
            except ray.exceptions.RayError as error:
                self._died(trial, seed, error)
                continue
            if result.failed:
                self._drop(trial, result.failed)
                continue
            trial.values[seed] = result.values
            if len(trial.values) == len(self.sweep.seeds):
                self._judged(trial)

    def _died(self, trial: _Trial, seed: int, error: Exception) -> None:
        cause = getattr(error, "cause", None)
        if isinstance(cause, SoundnessError):
            raise SoundnessError(str(cause))
        ours = isinstance(error, ray.exceptions.RayTaskError)
        trial.deaths[seed] = trial.deaths.get(seed, 0) + 1
        if trial.deaths[seed] > (MAX_ERRORS if ours else MAX_DEATHS):
            self._drop(trial, f"{type(cause or error).__name__}: {str(cause or error).strip().splitlines()[-1][:300]}")
            return
        self.say(f"trial {trial.number}: a worker died ({type(cause or error).__name__}), continued from its last checkpoint")
        self._submit(trial, seed)

    def _drop(self, trial: _Trial, reason: str) -> None:
        for ref in [r for r, (t, _) in self.pending.items() if t is trial]:
            del self.pending[ref]
            ray.cancel(ref, force=True)
        self._fail(trial.number, self._handle(trial.number), reason)
        self.say(f"trial {trial.number} failed: {reason}")

    def _fail(self, number: int, handle: optuna.Trial, reason: str) -> None:
        handle.set_user_attr(FAILED, reason)
        self.study.tell(number, state=TrialState.FAIL)

    def _judged(self, trial: _Trial) -> None:
        mean, handle = trial.mean, self._handle(trial.number)
        handle.set_user_attr(VALUES, mean)
        values = [mean[name] for name in self.sweep.objectives]
        last = trial.rung == len(trial.rungs) - 1
        if len(values) == 1 and trial.rung not in self.study.trials[trial.number].intermediate_values:
            handle.report(values[0], trial.rung)
        if last:
            self.study.tell(trial.number, values)
            self._tell(trial, mean, "")
        elif self._goes_on(trial, values[0]):
            trial.rung += 1
            self._launch(trial)
        else:
            self.study.tell(trial.number, state=TrialState.PRUNED)
            self._tell(trial, mean, f", stopped at epoch {trial.rungs[trial.rung]}")

    def _goes_on(self, trial: _Trial, value: float) -> bool:
        assert self.sweep.early_stopping is not None
        seen = [t.intermediate_values for t in self.study.get_trials(deepcopy=False) if t.number != trial.number]
        others = [values[trial.rung] for values in seen if trial.rung in values]
        return survives(value, others, self.sweep.early_stopping.factor)

    def _tell(self, trial: _Trial, mean: dict[str, float], note: str) -> None:
        shown = ", ".join(f"{name} {100 * mean[name]:.1f} %" for name in dict.fromkeys([*self.sweep.objectives, "clean"]))
        self.say(f"trial {trial.number}: {shown}{note}  ({describe(trial.point)}; {time.time() - trial.since:.0f} s)")

    def _handle(self, number: int) -> optuna.Trial:
        return optuna.Trial(self.study, self.study.trials[number]._trial_id)

    def cancel(self) -> None:
        for ref in self.pending:
            ray.cancel(ref, force=True)


def ranked(study: optuna.Study) -> list[FrozenTrial]:
    """Finished trials, best first; of several objectives the Pareto front first, ordered by the first objective."""
    done = [t for t in study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,)) if "duplicate_of" not in t.user_attrs]
    front = {t.number for t in study.best_trials} if len(study.directions) > 1 else set[int]()
    return sorted(done, key=lambda t: (t.number not in front, [-v for v in t.values], t.number))


def run_sweep(
    sweep: Sweep, directory: Path, address: str | None = None, data_dir: str | Path | None = None, quiet: bool = False
) -> SweepResult:
    """Run (or continue, or join) a sweep until its budget is used up."""
    directory = directory.absolute()
    data_dir = data_dir or os.environ.get("CURE_RAY_DATA")
    data = str(Path(data_dir).absolute()) if data_dir else None
    say: Say = (lambda text: None) if quiet else (lambda text: print(text, flush=True))
    claim(directory, sweep)
    with session(address) as where, submission(directory, {"sweep": sweep.name}) as me, stop_on_signals() as stop:
        search = _Search(sweep, directory, me.number, where, data, say)
        require(search.need, f"a trial of {sweep.name}")
        say(f"sweep {sweep.name}: {search.capacity} trainings at once, {counted(search.study)} trials there already, in {directory}")
        try:
            while True:
                stop()
                search.fill()
                if search.pending:
                    search.collect(1.0)
                elif orphans_soon(search):
                    time.sleep(1)
                else:
                    break
        except StoppedError as stopped:
            search.cancel()
            raise StoppedError(
                f"stopped by {stopped}; everything up to the last epochs is saved in {directory}.\n"
                f"Continue with: cure-ray sweep {directory / 'sweep.yaml'} --out {directory}"
            ) from None
        except BaseException:
            search.cancel()
            raise
        return SweepResult(directory, ranked(search.study))


def orphans_soon(search: _Search) -> bool:
    """Whether a running trial's call has lost its process: it is taken over as soon as its tasks are surely gone."""
    from cure_ray.cluster.study import process_gone

    running = search.study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))
    return any(process_gone(search.directory, t.user_attrs.get(OWNER, -1)) for t in running)


def best_runs(directory: Path, count: int) -> list[Path]:
    """Run directories of a sweep's best configurations, every seed of each."""
    from cure_ray.cluster.space import load_sweep
    from cure_ray.cluster.study import SWEEP

    if not (directory / SWEEP).is_file():
        raise UserError(f"{directory} is no sweep: it holds no {SWEEP}")
    best = ranked(open_study(directory, load_sweep(directory / SWEEP)))[:count]
    if not best:
        raise UserError(f"the sweep in {directory} has no finished trial yet; see `cure-ray status {directory}`")
    homes = [next((directory / TRIALS).glob(f"{t.number:04d}-*")) for t in best]
    return [run for home in homes for run in sorted(p for p in home.iterdir() if p.is_dir())]
