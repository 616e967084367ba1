"""Ray Tune on a study: a searcher, a scheduler and a stopper that ask the ledger, and the loggers a sweep names.

Tune runs the trials, restarts those whose process dies and feeds TensorBoard, W&B and MLflow. What it saves of its own state is never read
again: a sweep's truth is its Optuna study and its run directories, which several calls may share.
"""

import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ray import tune
from ray.tune.schedulers import FIFOScheduler, TrialScheduler
from ray.tune.search import Searcher
from ray.tune.stopper import Stopper

from cure_ray.cluster.session import Need
from cure_ray.cluster.trials.driver import FAILED, FULL, LOST, MAX_DEATHS, NOTE, OBJECTIVE, RUNG, UNSOUND, Driver
from cure_ray.config import Experiment
from cure_ray.errors import NoRoomError, SoundnessError, UserError, storage_full
from cure_ray.search.layout import TUNE
from cure_ray.search.ledger import Ledger
from cure_ray.search.space import Sweep

ENVIRONMENT = {
    "TUNE_DISABLE_SIGINT_HANDLER": "1",  # signals are ours
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",  # its CSV and JSON repeat our metrics.jsonl
    "TUNE_PRINT_ALL_TRIAL_ERRORS": "0",  # the scheduler below says what happened
    "TUNE_WARN_EXCESSIVE_EXPERIMENT_CHECKPOINT_SYNC_THRESHOLD_S": "0",
}
NeedOf = Callable[[Experiment], Need]
PAUSE = 1.0  # seconds between looks at the study while there is nothing to start


class LedgerSearcher(Searcher):
    """Configurations from the ledger, as many at once as the cluster holds."""

    def __init__(self, ledger: Ledger, need: NeedOf, capacity: Callable[[], int], check: Callable[[], None]) -> None:
        super().__init__()
        self.ledger, self.need, self.capacity, self.check = ledger, need, capacity, check
        self.numbers, self.looked = dict[str, int](), 0.0

    def suggest(self, trial_id: str) -> dict[str, Any] | str | None:  # type: ignore[override]  # FINISHED is a string
        self.check()  # while no trial runs Tune asks here again and again, and does not come to its stopper
        if time.monotonic() - self.looked < PAUSE:
            return None
        full = len(self.ledger.live) * len(self.ledger.sweep.seeds) >= self.capacity()
        proposal = None if full else self.ledger.next()
        if proposal is None:
            self.looked = time.monotonic()
            return Searcher.FINISHED if self.ledger.over() else None
        self.numbers[trial_id] = proposal.number
        need = self.need(proposal.experiment)
        where = {"cpus": need.cpus, "gpus": need.gpus}
        return {
            "trial": proposal.number,
            "point": proposal.point,
            "rungs": proposal.rungs,
            "rung": proposal.rung,
            "term": proposal.term,
            **where,
        }

    def on_trial_complete(self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False) -> None:
        number = self.numbers.pop(trial_id, None)
        if number is not None:  # a trial that was judged or failed in the ordinary way is no longer live
            log = f"{TUNE}/{self.ledger.me:04d}/trial-{number:04d}/error.txt"
            died = f"its process failed more than {MAX_DEATHS} times; see {log} in the sweep's directory"
            self.ledger.failed(number, died if error else "it ended without a result")

    def save(self, checkpoint_path: str) -> None:
        """Nothing: the study is the state."""

    def restore(self, checkpoint_path: str) -> None:
        raise NotImplementedError("a sweep is continued from its study, not from Tune's state")


class LedgerScheduler(FIFOScheduler):
    """Asynchronous successive halving over all calls' trials; passes on what trials have to say."""

    def __init__(self, ledger: Ledger) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ledger = ledger
        self.halted: SoundnessError | NoRoomError | None = None  # why the whole sweep ends: Tune wraps what its schedulers raise

    def on_trial_result(self, tune_controller: Any, trial: Any, result: dict[str, Any]) -> str:
        number = trial.config["trial"]
        if UNSOUND in result:
            self.halted = SoundnessError(result[UNSOUND])
        elif FULL in result:  # the trial stays running in the study: whoever continues the sweep takes it over
            self.halted = NoRoomError(_no_room(self.ledger, f"trial {number} could not go on ({result[FULL]})"))
        if self.halted is not None:
            raise self.halted
        if LOST in result:
            self.ledger.left(number)
            return TrialScheduler.STOP
        if FAILED in result:
            self.ledger.failed(number, result[FAILED])
            return TrialScheduler.STOP
        if NOTE in result:
            self.ledger.say(f"trial {number}: {result[NOTE]}")
        if RUNG not in result:
            return TrialScheduler.CONTINUE
        values = {k.removeprefix(f"{OBJECTIVE}/"): v for k, v in result.items() if k.startswith(f"{OBJECTIVE}/")}
        return TrialScheduler.CONTINUE if self.ledger.judged(number, result[RUNG], values) else TrialScheduler.STOP

    def on_trial_error(self, tune_controller: Any, trial: Any) -> None:
        if trial.should_recover():
            self.ledger.say(f"trial {trial.config['trial']}: its process failed, started again")


class SignalStopper(Stopper):
    """Looks for a signal at every turn of Tune's loop; `check` raises."""

    def __init__(self, check: Callable[[], None]) -> None:
        self.check = check

    def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:
        return False

    def stop_all(self) -> bool:
        self.check()
        return False


def loggers(sweep: Sweep) -> list[tune.Callback]:
    """TensorBoard always; W&B and MLflow where the sweep names them, with whatever arguments Ray's callbacks take."""
    from ray.tune.logger import TBXLoggerCallback

    found: list[tune.Callback] = [TBXLoggerCallback()]  # type: ignore[no-untyped-call]
    if sweep.wandb is not None:
        from ray.air.integrations.wandb import WandbLoggerCallback

        if "mode" in sweep.wandb:  # Ray asks the environment whether a key is needed
            os.environ.setdefault("WANDB_MODE", str(sweep.wandb["mode"]))
        found.append(_logger("wandb", WandbLoggerCallback, {"project": sweep.name, "group": sweep.name, **sweep.wandb}))
    if sweep.mlflow is not None:
        from ray.air.integrations.mlflow import MLflowLoggerCallback

        found.append(_logger("mlflow", MLflowLoggerCallback, {"experiment_name": sweep.name, **sweep.mlflow}))
    return found


def _logger(package: str, make: Callable[..., tune.Callback], arguments: Mapping[str, Any]) -> tune.Callback:
    from importlib.util import find_spec

    if find_spec(package) is None:
        raise UserError(
            f"the sweep logs to {package}, which is not installed: pip install {package} (or remove `{package}:` from the file)"
        )
    try:
        callback = make(**arguments)
        callback.setup()  # Tune does it again; here what is wrong (a missing key, an unknown server) becomes a sentence
    except Exception as error:  # of whatever kind the package chooses
        raise UserError(f"{package}: {error}. Its keys are the arguments of Ray's {make.__name__}.") from None
    return callback


def run_trials(driver: Driver, ledger: Ledger, need: NeedOf, capacity: Callable[[], int], stop: Callable[[], None]) -> None:
    """Run the ledger's configurations until there are none."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    logging.getLogger("ray.tune").setLevel(logging.ERROR)
    callbacks, scheduler = loggers(ledger.sweep), LedgerScheduler(ledger)
    trainable = tune.with_resources(_function(driver), {"CPU": 0, "memory": 1})  # nothing, in the only way Tune accepts it
    tuner = tune.Tuner(
        trainable,
        tune_config=tune.TuneConfig(
            search_alg=LedgerSearcher(ledger, need, capacity, stop),
            scheduler=scheduler,
            num_samples=-1,
            reuse_actors=False,
            trial_name_creator=_name,
            trial_dirname_creator=_name,
        ),
        run_config=tune.RunConfig(
            name=f"{ledger.me:04d}",
            storage_path=str(Path(ledger.directory) / TUNE),
            stop=SignalStopper(stop),
            callbacks=callbacks,
            failure_config=tune.FailureConfig(max_failures=MAX_DEATHS),
            verbose=0,
        ),
    )
    try:
        tuner.fit()
    except tune.TuneError as error:
        if scheduler.halted is not None:
            raise scheduler.halted from None
        if any(map(storage_full, _origins(error))):
            raise NoRoomError(_no_room(ledger, "the study could not be written")) from None
        raise


def _no_room(ledger: Ledger, what: str) -> str:
    return f"no room in {ledger.directory}: {what}. Nothing is lost: free some space and run the same command again."


def _origins(error: BaseException | None) -> Iterator[BaseException]:
    """An error and what it was raised from: Tune wraps what its parts raise into its own."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _function(driver: Driver) -> Callable[[dict[str, Any]], None]:
    """Tune wants a plain function."""

    def trial(config: dict[str, Any]) -> None:
        driver(config)

    return trial


def _name(trial: Any) -> str:
    return f"trial-{trial.config['trial']:04d}"
