"""Running a sweep: the session, the study, and Ray Tune between them."""

import itertools
import os
from dataclasses import dataclass
from pathlib import Path

from optuna.trial import FrozenTrial

from cure_ray.cluster.session import Need, fitting, require, session, usable_nodes
from cure_ray.cluster.trials.driver import Driver
from cure_ray.cluster.trials.trial import need_of
from cure_ray.config import resolve
from cure_ray.data.images import load_dataset
from cure_ray.networks.build import new_network
from cure_ray.runs.stopping import StoppedError, stop_on_signals
from cure_ray.search.calls import submission
from cure_ray.search.layout import SWEEP
from cure_ray.search.ledger import Ledger, Say
from cure_ray.search.outlook import Minute
from cure_ray.search.ranking import pareto, ranked
from cure_ray.search.space import Sweep, base_data, experiment_at, grid_points, pinned
from cure_ray.search.study import claim, counted


@dataclass(frozen=True)
class SweepResult:
    directory: Path
    trials: list[FrozenTrial]  # finished ones, best first (a Pareto front first, for several objectives)
    front: frozenset[int]  # numbers of those that no other beats and that meet the constraints


def _widest(ledger: Ledger, cluster_gpus: float) -> Need:
    """What the most demanding configuration asks for."""
    sweep = ledger.sweep
    ends = (experiment_at(sweep, p, 0, sweep.seeds[0]) for p in itertools.islice(grid_points(sweep, ledger.base), 64))
    return max((need_of(e, cluster_gpus) for e in ends), key=lambda need: need.workers)


def run_sweep(
    sweep: Sweep, directory: Path, address: str | None = None, data_dir: str | Path | None = None, quiet: bool = False
) -> SweepResult:
    """Run (or continue, or join) a sweep until its budget is used up."""
    directory = directory.absolute()
    data_dir = data_dir or os.environ.get("CURE_RAY_DATA")
    data = str(Path(data_dir).absolute()) if data_dir else None
    say: Say = (lambda text: None) if quiet else (lambda text: print(text, flush=True))
    sweep = pinned(sweep)
    base = resolve(base_data(sweep))
    new_network(base)  # what cannot be built, or may not run, would fail every trial for good
    load_dataset(base.dataset, "validation", data)  # fetched once; missing, the same
    claim(directory, sweep)
    # The submission ends last: its trials are free for other calls once the session has ended their processes.
    with submission(directory, {"sweep": sweep.name}) as me, session(address) as where, stop_on_signals() as stop:
        from cure_ray.cluster.trials.tuning import run_trials  # once a session is open: importing Tune reads Ray's environment

        ledger = Ledger(sweep, me, say)
        need = _widest(ledger, where.gpus)
        require(need, f"a trial of {sweep.name}")

        def capacity() -> int:
            return sweep.concurrency or max(1, fitting(need, usable_nodes()) // need.workers)

        say(f"sweep {sweep.name}: {capacity()} trainings at once, {counted(ledger.study)} trials there already, in {directory}")
        minute = Minute(ledger)

        def turn() -> None:
            stop()
            minute()

        try:
            run_trials(Driver(sweep, directory, data), ledger, lambda experiment: need_of(experiment, where.gpus), capacity, turn)
        except StoppedError as stopped:
            raise StoppedError(
                f"stopped by {stopped}; everything up to the last epochs is saved in {directory}.\n"
                f"Continue with: cure-ray sweep {directory / SWEEP} --out {directory}"
            ) from None
        return SweepResult(directory, ranked(ledger.study), frozenset(t.number for t in pareto(ledger.study)))
