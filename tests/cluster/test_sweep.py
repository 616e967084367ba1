"""Sweeps: killed, shared and continued, they run every configuration once, and every trial can be re-run alone to the bit."""

import errno
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import optuna
import pytest
import ray
import yaml
from cluster_helpers import files_of
from optuna.trial import TrialState

from cure_ray.cluster.session import Session
from cure_ray.cluster.trials.driver import _EndedError, _result
from cure_ray.cluster.trials.sweep import run_sweep
from cure_ray.cluster.trials.tuning import LedgerScheduler, loggers
from cure_ray.config import load_experiment
from cure_ray.errors import NoRoomError, SoundnessError, UserError
from cure_ray.runs.directory import resolve_checkpoint
from cure_ray.runs.run import train_run
from cure_ray.search.calls import submission
from cure_ray.search.layout import JOURNAL
from cure_ray.search.ledger import Ledger
from cure_ray.search.ranking import best_runs
from cure_ray.search.space import Sweep, load_sweep
from cure_ray.search.status import describe_directory
from cure_ray.search.study import claim, read_study

SWEEP = {
    "name": "tiny",
    "base": {
        "preset": "smoke",
        "dataset": {"train_samples": 300, "validation": 40},
        "training": {"epochs": 4, "standard_epochs": 0, "anneal_epochs": 1, "lr_milestones": []},
        "execution": {"device": "cpu"},
    },
    "space": {"training.method": {"grid": ["max", "linf"]}, "training.lambda_inf": {"grid": [0.4, 0.8]}},
    "search": "grid",
    "samples": 10,
    "early_stopping": {"factor": 2, "rungs": 1},
}
DRIVER = """
import sys
from pathlib import Path
from cure_ray.search.space import load_sweep
from cure_ray.cluster.trials.sweep import run_sweep
run_sweep(load_sweep(sys.argv[1]), Path(sys.argv[2]))
"""


@pytest.fixture(scope="module")
def shared_and_killed(ray_session: Session, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A first call is killed with kill -9 while it trains, beside and before a second one that ends the sweep."""
    home = tmp_path_factory.mktemp("sweep")
    (home / "s.yaml").write_text(yaml.safe_dump(SWEEP))
    first = subprocess.Popen([sys.executable, "-c", DRIVER, str(home / "s.yaml"), str(home / "out")], stdout=subprocess.DEVNULL)
    deadline = time.time() + 120
    while not list((home / "out" / "trials").glob("*/seed0/checkpoints/epoch_0001")) and time.time() < deadline:
        assert first.poll() is None, "the first call ended by itself"
        time.sleep(0.1)
    assert "running" in describe_directory(home / "out")  # from another shell, while it runs
    os.kill(first.pid, signal.SIGKILL)
    first.wait()
    run_sweep(load_sweep(home / "s.yaml"), home / "out")
    return home / "out"


def study_of(directory: Path) -> optuna.Study:
    return read_study(directory, load_sweep(directory / "sweep.yaml"))


def test_every_configuration_ran_once_and_none_is_stale(shared_and_killed: Path) -> None:
    trials = study_of(shared_and_killed).get_trials()
    assert {t.state for t in trials} <= {TrialState.COMPLETE, TrialState.PRUNED}
    assert len(trials) == 4
    assert len({t.user_attrs["identity"] for t in trials}) == 4
    assert len(list((shared_and_killed / "trials").iterdir())) == 4
    assert any(t.user_attrs["submission"] == 1 for t in trials)


def test_tensorboard_finds_epochs_and_objectives(shared_and_killed: Path) -> None:
    logs = [p.read_bytes() for p in (shared_and_killed / "tune" / "0001").rglob("events.out.tfevents*")]
    assert any(b"objective/union" in log and b"train_accuracy" in log for log in logs)


def test_a_rung_that_is_reported_again_changes_nothing(shared_and_killed: Path, tmp_path: Path) -> None:
    """As after the death of a trial's process, which Tune starts again from its first rung."""
    (tmp_path / "s.yaml").write_text(yaml.safe_dump(SWEEP))
    sweep = load_sweep(tmp_path / "s.yaml")
    claim(tmp_path / "out", sweep)
    with submission(tmp_path / "out", {}) as me:
        ledger = Ledger(sweep, me, lambda text: None)
        first, second = ledger.next(), ledger.next()
        assert first is not None and second is not None  # noqa: PT018
        assert len(first.rungs) == 2
        assert ledger.judged(first.number, 0, {"union": 0.9, "clean": 0.9})
        assert ledger.judged(first.number, 0, {"union": 0.9, "clean": 0.9})
        assert not ledger.judged(second.number, 0, {"union": 0.1, "clean": 0.9})  # the worse of two
        assert not ledger.judged(first.number, 1, {"union": 0.8, "clean": 0.9})  # its last rung
        assert not ledger.judged(first.number, 1, {"union": 0.8, "clean": 0.9})
        states = [t.state for t in ledger.study.get_trials() if t.number in (first.number, second.number)]
        assert states == [TrialState.COMPLETE, TrialState.PRUNED]
        assert ledger.over()


def test_a_soundness_failure_in_a_trial_stops_the_sweep_and_is_kept_for_the_user() -> None:
    scheduler = LedgerScheduler(cast(Ledger, None))
    with pytest.raises(SoundnessError, match="margin"):
        scheduler.on_trial_result(None, SimpleNamespace(config={"trial": 0}), {"unsound": "a margin was wrong"})
    assert isinstance(scheduler.halted, SoundnessError)  # Tune hides what its schedulers raise


def test_a_full_disk_ends_the_call_and_costs_no_trial(ray_session: Session, tmp_path: Path) -> None:
    @ray.remote(num_cpus=0)
    def leg(error: Exception) -> None:
        raise error

    for error in (NoRoomError("epoch 3 could not be saved"), OSError(errno.ENOSPC, "No space left on device")):
        with pytest.raises(_EndedError) as ended:
            _result(leg.remote(error), 0, Counter(), lambda row: None)
        assert "full" in ended.value.row
    sweep = Sweep.model_validate(SWEEP)
    claim(tmp_path, sweep)
    with submission(tmp_path, {}) as me:
        ledger = Ledger(sweep, me, lambda text: None)
        trial = ledger.next()
        assert trial is not None
        scheduler = LedgerScheduler(ledger)
        with pytest.raises(NoRoomError, match="free some space and run the same command again"):
            scheduler.on_trial_result(None, SimpleNamespace(config={"trial": trial.number}), ended.value.row)
    with submission(tmp_path, {}) as me:
        again = Ledger(sweep, me, lambda text: None).next()
        assert again is not None
        assert (again.number, again.point) == (trial.number, trial.point)


def test_a_line_that_a_full_disk_cut_short_does_not_spoil_the_study(tmp_path: Path) -> None:
    sweep = Sweep.model_validate(SWEEP)
    claim(tmp_path, sweep)
    with submission(tmp_path, {}) as me:
        trial = Ledger(sweep, me, lambda text: None).next()
    journal = tmp_path / JOURNAL
    intact = journal.read_bytes()
    for torn in (b"{", b'{"op_code": 4, "worker_id": "a'):
        journal.write_bytes(intact + torn)
        with submission(tmp_path, {}) as me:
            again = Ledger(sweep, me, lambda text: None).next()
        assert trial is not None
        assert again is not None
        assert again.number == trial.number
        assert read_study(tmp_path, sweep).get_trials()  # whoever only looks can read it too


def test_what_ray_train_wraps_is_unwrapped(tmp_path: Path) -> None:
    from cure_ray.cluster.training.workers import _user_error

    def unwrapped(error: Exception, **where: Any) -> UserError | None:
        outer = RuntimeError("training failed")
        for name, value in (where or {"worker_failures": {0: error}}).items():
            setattr(outer, name, value)
        return _user_error(outer, tmp_path)

    full = OSError(errno.ENOSPC, "No space left on device")
    for found in (unwrapped(full), unwrapped(full, controller_failure=full)):
        assert isinstance(found, NoRoomError)
        assert f"the disk of {tmp_path} is full" in str(found)
        assert "--resume" in str(found)
    assert str(unwrapped(NoRoomError("epoch 3 could not be saved"))) == "epoch 3 could not be saved"
    wrong = unwrapped(UserError("lr < 0"))
    assert isinstance(wrong, UserError)
    assert not isinstance(wrong, NoRoomError)
    assert unwrapped(OSError(errno.EIO, "I/O error")) is None


@pytest.mark.parametrize(("line", "says"), [({"wandb": {}}, "pip install wandb"), ({"mlflow": {}}, "pip install mlflow")])
def test_a_logger_that_is_not_installed_is_named(line: dict[str, Any], says: str) -> None:
    if find_spec(next(iter(line))) is not None:
        pytest.skip(f"{next(iter(line))} is installed here")
    with pytest.raises(UserError, match=says):
        loggers(Sweep.model_validate({**SWEEP, **line}))


def test_running_it_again_runs_nothing(shared_and_killed: Path, ray_session: Session) -> None:
    began = time.time()
    again = run_sweep(load_sweep(shared_and_killed / "sweep.yaml"), shared_and_killed)
    assert len(study_of(shared_and_killed).trials) == 4
    assert again.trials
    assert time.time() - began < 20


def test_a_trial_is_reproduced_to_the_bit_by_its_experiment_file(shared_and_killed: Path, tmp_path: Path) -> None:
    run = best_runs(shared_and_killed, 1)[0]
    alone = train_run(load_experiment(run / "experiment.yaml"), tmp_path / "alone", quiet=True)
    assert files_of(alone.checkpoint) == files_of(resolve_checkpoint(run))


def test_status_tells_the_best_and_that_nobody_works(shared_and_killed: Path) -> None:
    text = describe_directory(shared_and_killed)
    assert "best: trial" in text
    assert "nobody at work; continue: cure-ray sweep" in text
    with pytest.raises(UserError, match="neither"):
        describe_directory(shared_and_killed / "trials")


def test_a_directory_of_another_sweep_is_refused(shared_and_killed: Path, tmp_path: Path, ray_session: Session) -> None:
    (tmp_path / "other.yaml").write_text(yaml.safe_dump({**SWEEP, "samples": 11}))
    with pytest.raises(UserError, match="belongs to another sweep"):
        run_sweep(load_sweep(tmp_path / "other.yaml"), shared_and_killed)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("precious")
    with pytest.raises(UserError, match="is not empty"):
        run_sweep(load_sweep(tmp_path / "other.yaml"), tmp_path / "full")
