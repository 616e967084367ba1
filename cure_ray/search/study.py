"""A sweep on disk: its claim, its Optuna study, what is asked of it, and which of its trials nobody works on any more.

Trials are never lost to a dead call: the next one, or another that is still running, takes them over and continues them from their
checkpoints under the same number.
"""

import errno
import fcntl
import json
import logging
import math
import os
import socket
import sys
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import IO, Any

import optuna
import yaml
from optuna.storages import BaseStorage, JournalStorage
from optuna.trial import FrozenTrial, TrialState

from cure_ray.config import Experiment
from cure_ray.errors import UserError
from cure_ray.search.calls import Calls
from cure_ray.search.dimensions import active, ordered
from cure_ray.search.journal import JournalReader, JournalWriter
from cure_ray.search.layout import JOURNAL, SUBMISSIONS, SWEEP, TRIALS
from cure_ray.search.space import MAY_CHANGE, Sweep, load_sweep
from cure_ray.search.trials import OWNER


def default_directory(sweep: Sweep) -> Path:
    return Path("sweeps-out") / f"{sweep.name}-{sweep.identity[:8]}"


def claim(directory: Path, sweep: Sweep) -> None:
    """Make the directory this sweep's, or say whose it is."""
    described = directory / SWEEP
    if described.exists():
        owner = load_sweep(described)
        if owner.identity != sweep.identity:
            raise UserError(
                f"{directory} belongs to another sweep ({owner.name}, {owner.identity[:8]}; this one is {sweep.name}, "
                f"{sweep.identity[:8]}: {_differ(owner, sweep)}). Choose another --out, or continue the one there: "
                f"cure-ray sweep {described} --out {directory}"
            )
        return
    ours = (SUBMISSIONS, TRIALS)  # of a call that is at this place now, or died here
    if directory.exists() and any(p.name not in ours and not p.name.startswith(f".{SWEEP}.") for p in directory.iterdir()):
        raise UserError(f"{directory} is not empty and was not written by `cure-ray sweep`. Choose another --out.")
    try:
        for name in (SUBMISSIONS, TRIALS):
            (directory / name).mkdir(parents=True, exist_ok=True)
        partial = directory / f".{SWEEP}.{os.getpid()}"
        partial.write_text(yaml.safe_dump(sweep.model_dump(mode="json", exclude_none=True, by_alias=True), sort_keys=False, width=120))
        partial.replace(described)
    except OSError as error:
        raise UserError(f"cannot write to {directory}: {error.strerror}. Choose another --out.") from None


def _differ(there: Sweep, here: Sweep) -> str:
    """In what two sweeps differ, few words each."""

    def brief(value: Any) -> str:
        text = str(value)
        return text if len(text) <= 40 else f"{text[:37]}..."

    old, new = (sweep.model_dump(mode="json", by_alias=True, exclude=MAY_CHANGE) for sweep in (there, here))
    return "; ".join(f"{key} {brief(old[key])} there, {brief(new[key])} here" for key in new if old[key] != new[key])


@contextmanager
def locked(directory: Path, patience: float = 10.0) -> Iterator[None]:
    """One call at a time, on every machine that sees the directory; released by the system when its holder dies."""
    path, me, until = directory / ".lock", f"process {os.getpid()} on {socket.gethostname()}", time.monotonic() + patience
    with path.open("a+") as file:
        while not _try_lock(file, path):
            if time.monotonic() > until:
                file.seek(0)
                print(
                    f"waiting for {file.read() or 'somebody'}, who holds {path}; should it be stopped, continue or end it", file=sys.stderr
                )
                until = math.inf
            time.sleep(0.02)
        file.truncate(0)
        file.write(me)
        file.flush()
        yield


@contextmanager
def deciding(directory: Path, study: optuna.Study) -> Iterator[None]:
    """Alone with the study, for one decision: its lines wait for the disk once, before anybody else may decide."""
    journal = getattr(study._storage, "_backend", None)
    with locked(directory), journal.together() if isinstance(journal, JournalWriter) else nullcontext():
        yield


def _try_lock(file: IO[str], path: Path) -> bool:
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN):
            return False
        raise UserError(
            f"{path} cannot be locked ({error.strerror}): this file system knows no locks between machines. Put the sweep on another "
            "(NFS 4, or version 3 with its lock service), or run it on one machine with --out on a local disk."
        ) from None
    return True


def _name(sweep: Sweep) -> str:
    return f"{sweep.name}-{sweep.identity[:8]}"


def open_study(directory: Path, sweep: Sweep, sampler: "optuna.samplers.BaseSampler") -> optuna.Study:
    """The sweep's study to work on, made if need be."""
    optuna.logging.set_verbosity(logging.WARNING)
    with _explained(directory, sweep):
        study = optuna.create_study(
            study_name=_name(sweep),
            storage=sweep.storage or JournalStorage(JournalWriter(directory / JOURNAL)),
            sampler=sampler,
            directions=["maximize"] * len(sweep.objectives),
            load_if_exists=True,
        )
        if study.metric_names is None:  # for whoever opens the study without the sweep: the report, Optuna's dashboard
            with warnings.catch_warnings(action="ignore", category=optuna.exceptions.ExperimentalWarning):
                study.set_metric_names(list(sweep.objectives))
        return study


def read_study(directory: Path, sweep: Sweep) -> optuna.Study:
    """The sweep's study to look at: nothing is written, locked or repaired. Empty if no call has begun it."""
    optuna.logging.set_verbosity(logging.WARNING)
    with _explained(directory, sweep):
        storage: BaseStorage = _reading(sweep.storage) if sweep.storage else JournalStorage(JournalReader(directory / JOURNAL))
        try:
            return optuna.load_study(study_name=_name(sweep), storage=storage)
        except KeyError:
            return optuna.create_study(directions=["maximize"] * len(sweep.objectives))


def _reading(url: str) -> BaseStorage:
    """A database as it is: Optuna would make its tables, SQLite the file."""
    scheme, _, path = url.partition(":///")
    if scheme == "sqlite" and "?" not in path:
        if not Path(path).exists():
            return optuna.storages.InMemoryStorage()
        url = f"sqlite:///file:{path}?mode=ro&uri=true"
    return optuna.storages.RDBStorage(url, skip_table_creation=True)


@contextmanager
def _explained(directory: Path, sweep: Sweep) -> Iterator[None]:
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # of whatever kind a storage chooses
        raise UserError(f"the study cannot be opened in {sweep.storage or directory}: {type(error).__name__}: {error}") from None


def suggest(trial: optuna.Trial, sweep: Sweep, base: Experiment) -> dict[str, Any]:
    """A point, define-by-run: fields whose condition does not hold are not asked for."""
    point: dict[str, Any] = {}
    for path in ordered(sweep.space):
        if not active(sweep.space, path, point, base):
            continue
        kind = sweep.space[path]
        if kind.values is not None:  # Optuna's categories are scalars: lists travel as JSON
            texts = [json.dumps(v) for v in kind.values]
            point[path] = json.loads(trial.suggest_categorical(path, texts))
        elif kind.whole is not None:
            point[path] = trial.suggest_int(path, *kind.whole)
        else:
            low, high = kind.uniform or kind.loguniform or (0.0, 1.0)
            point[path] = trial.suggest_float(path, low, high, log=kind.loguniform is not None)
    return point


def as_params(point: Mapping[str, Any], sweep: Sweep) -> dict[str, Any]:
    """A point as the study keeps it; the inverse of what `suggest` does with categories."""
    return {path: json.dumps(v) if sweep.space[path].values is not None else v for path, v in point.items()}


def enqueue(study: optuna.Study, sweep: Sweep, points: Sequence[Mapping[str, Any]]) -> None:
    """Line up fixed points, each once per study however many calls there are (hold the lock)."""
    known = [t.system_attrs.get("fixed_params") for t in study.get_trials(deepcopy=False)]
    for point in points:
        params = as_params(point, sweep)
        if params not in known:
            known.append(params)
            study.enqueue_trial(params)


def orphans(study: optuna.Study, calls: Calls) -> list[FrozenTrial]:
    """Running trials whose call is dead (hold the lock while taking them over)."""
    running = study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))
    dead = {owner for owner in {t.user_attrs.get(OWNER, -1) for t in running} if calls.state(owner) == "dead"}
    return [t for t in running if t.user_attrs.get(OWNER, -1) in dead]


def counted(study: optuna.Study) -> int:
    """Trials that use up the budget: all that were started, but for duplicates that were never run."""
    states = (TrialState.RUNNING, TrialState.COMPLETE, TrialState.PRUNED, TrialState.FAIL)
    return sum("duplicate_of" not in t.user_attrs for t in study.get_trials(deepcopy=False, states=states))
