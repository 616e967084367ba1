"""A Tune trial: the process that takes one configuration through its rungs, all seeds at once, and reports to Tune.

It holds no resources. Training and judging are Ray tasks: in mode `serial` one task with the CPUs and GPUs of a rank; in mode
`parallel` a task that holds nothing and waits for exactly one placement group, that of its Ray Train run. A trial that held a CPU while
waiting for others could deadlock a full cluster. Light on imports: torch is loaded where it is used, in the tasks.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray

from cure_ray.config import Experiment
from cure_ray.errors import SoundnessError, storage_full
from cure_ray.runs.lease import LostLeaseError
from cure_ray.search.layout import seed_run, trial_home
from cure_ray.search.records import Row, epochs_after, epochs_of, mean, rungs_passed
from cure_ray.search.space import Judging, Sweep, experiment_at

Report = Callable[[Row], None]
MAX_DEATHS = 8  # of the processes of one leg; each costs at most the epoch it was in
MAX_ERRORS = 2  # exceptions that are ours and not the cluster's: they tend to come back
# What a report may hold besides metrics.
RUNG, OBJECTIVE, FAILED, UNSOUND, FULL, LOST, NOTE = "rung", "objective", "failed", "unsound", "full", "lost", "note"
# Tune runs a trial inside a placement group of its own; tasks that it starts must not look for their CPUs there.
OUTSIDE = {"scheduling_strategy": "DEFAULT", "max_retries": 0}  # retries are ours: Ray burns its own within seconds on a dying node


@dataclass(frozen=True)
class Contest:
    """A sweep and where it is."""

    sweep: Sweep
    directory: Path


@dataclass(frozen=True)
class Leg:
    """A part of a trial: train `experiment` in `directory` until epoch `until`, then judge it."""

    experiment: Experiment
    directory: Path
    until: int
    term: int  # of the trial; a later one takes the run over
    judging: Judging
    data_dir: str | None
    device: str
    contest: Contest | None = None  # its last part: whom it would have to beat to win


@dataclass(frozen=True)
class LegResult:
    """What came of it. `failed` is a sentence if it diverged or was wrong from the start: trying again would not help."""

    values: dict[str, float]
    failed: str = ""


@dataclass(frozen=True)
class Driver:
    """What every trial of a call has in common. Calling it runs one."""

    sweep: Sweep
    directory: Path
    data_dir: str | None

    def __call__(self, config: Mapping[str, Any]) -> None:
        from ray import tune

        self.run(config, lambda row: tune.report(row))

    def run(self, config: Mapping[str, Any], report: Report) -> None:
        """Report the mean of every epoch's metrics over the seeds, and at each rung the objective; Tune stops it when it likes."""
        number, rungs = config["trial"], config["rungs"]
        experiments = {seed: experiment_at(self.sweep, config["point"], number, seed) for seed in self.sweep.seeds}
        home = trial_home(self.directory, number, experiments[self.sweep.seeds[0]].config_hash)
        runs = {seed: seed_run(home, seed) for seed in experiments}
        for rung in range(max(config["rung"], rungs_passed(list(runs.values()), rungs)), len(rungs)):
            legs = {seed: self._leg(e, runs[seed], rungs[rung], config) for seed, e in experiments.items()}
            try:
                values = _run_legs(legs, {"num_cpus": config["cpus"], "num_gpus": config["gpus"]}, report)
            except _EndedError as ended:
                report(ended.row)
                return
            report({RUNG: rung, "timesteps_total": rungs[rung], OBJECTIVE: mean(list(values.values()))})

    def _leg(self, experiment: Experiment, run: Path, until: int, config: Mapping[str, Any]) -> Leg:
        device = "cpu" if not config["gpus"] and experiment.execution.device == "auto" else experiment.execution.device
        # Only at its end: before, counterexamples say nothing about what it will be once it has learnt more.
        contest = Contest(self.sweep, self.directory) if self.sweep.ends_by_bound and until == config["rungs"][-1] else None
        return Leg(experiment, run, until, config["term"], self.sweep.judging, self.data_dir, device, contest)


class _EndedError(Exception):
    """The trial is over; its last report."""

    def __init__(self, row: Row) -> None:
        super().__init__(row)
        self.row = row


def _run_legs(legs: Mapping[int, Leg], resources: Row, report: Report) -> dict[int, Row]:
    """All legs to their end, those whose process dies again and again; meanwhile every epoch that all of them have finished."""
    runs = [leg.directory for leg in legs.values()]
    seen, values, ends = min(map(epochs_of, runs)), dict[int, Row](), Counter[tuple[int, bool]]()
    flying = {submit(leg, resources): seed for seed, leg in legs.items()}
    try:
        while flying:
            ready, _ = ray.wait(list(flying), num_returns=1, timeout=1.0)
            for ref in ready:
                seed = flying.pop(ref)
                result = _result(ref, seed, ends, report)
                if result is None:
                    flying[submit(legs[seed], resources)] = seed
                elif result.failed:
                    raise _EndedError({FAILED: result.failed})
                else:
                    values[seed] = result.values
            for epoch, row in epochs_after(runs, seen):
                report(row)
                seen = epoch
    finally:
        for ref in flying:
            ray.cancel(ref, force=True)
    return values


def submit(leg: Leg, resources: Row) -> Any:
    """The leg as a Ray task."""
    if leg.experiment.execution.mode != "parallel":
        return ray.remote(_run).options(**resources, **OUTSIDE).remote(leg)
    trained = ray.remote(_train).options(num_cpus=0, **OUTSIDE).remote(leg)
    return ray.remote(_judge_trained).options(**resources, **OUTSIDE).remote(trained, leg)


def _run(leg: Leg) -> LegResult:
    from cure_ray.cluster.trials.trial import run_leg

    return run_leg(leg)


def _train(leg: Leg) -> LegResult:
    from cure_ray.cluster.trials.trial import train_leg

    return train_leg(leg)


def _judge_trained(trained: LegResult, leg: Leg) -> LegResult:
    from cure_ray.cluster.trials.trial import judge_leg

    return trained if trained.failed else judge_leg(leg)


def _result(ref: Any, seed: int, ends: Counter[tuple[int, bool]], report: Report) -> LegResult | None:
    """A leg's result; None if its process died or raised and it is worth another try. `ends` counts both, per seed and apart."""
    try:
        result: LegResult = ray.get(ref)
        return result
    except ray.exceptions.RayError as error:
        cause = getattr(error, "cause", None) or error
    if isinstance(cause, SoundnessError):
        raise _EndedError({UNSOUND: str(cause)})
    if isinstance(cause, LostLeaseError):
        raise _EndedError({LOST: str(cause)})
    if storage_full(cause):
        raise _EndedError({FULL: str(cause)})
    kind, ours = type(cause).__name__, not isinstance(cause, ray.exceptions.RayError)
    ends[seed, ours] += 1
    if ends[seed, ours] > (MAX_ERRORS if ours else MAX_DEATHS):
        lines = str(cause).strip().splitlines() or ["it gives no reason"]
        raise _EndedError({FAILED: f"{kind}: {lines[-1][:300]}"})
    report({NOTE: f"a worker {'failed' if ours else 'died'} ({kind}), continued from its last checkpoint"})
    return None
