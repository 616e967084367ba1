"""Parallel training: the same bits as one process, undisturbed or killed, and data parallelism that only changes rounding."""

import errno
import os
import signal
import threading
import time
from pathlib import Path

import pytest
import ray
import torch
from cluster_helpers import files_of, tiny

from cure_ray.cluster.session import Session
from cure_ray.cluster.training import rank, reducer
from cure_ray.cluster.training.ranks import Phase, phases
from cure_ray.cluster.training.workers import train_parallel
from cure_ray.errors import NoRoomError, UserError
from cure_ray.runs import record
from cure_ray.runs.checkpoints import load_checkpoint
from cure_ray.runs.lease import LostLeaseError, holder, take, take_for, workers
from cure_ray.runs.metrics import read_metrics
from cure_ray.runs.run import train_run
from cure_ray.training.loop import start


def kill_after_first_epoch(directory: Path, role: str, key: str = "pid") -> threading.Thread:
    """kill -9 a process of a run as soon as its first epoch is saved."""

    def watch() -> None:
        while not read_metrics(directory):
            time.sleep(0.02)
        now = holder(directory)
        assert now is not None
        os.kill(workers(now)[role][key], signal.SIGKILL)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    return thread


def test_natural_rank_exists_only_from_full_radius_on() -> None:
    assert phases(tiny()) == [Phase(3, 1, True)]
    assert phases(tiny(epochs=6, standard_epochs=1, anneal_epochs=2)) == [Phase(3, 1, False), Phase(6, 1, True)]
    assert phases(tiny(method="max")) == [Phase(3, 1, False)]
    assert phases(tiny(beta=0.0)) == [Phase(3, 1, False)]


def test_killed_parallel_run_has_the_bits_of_a_serial_one(ray_session: Session, tmp_path: Path) -> None:
    """Weights and both Adam states after: ramp phase, projection phase, kill -9 of the natural rank, restart."""
    experiment = tiny(epochs=8)
    serial = train_run(experiment, tmp_path / "serial", quiet=True)
    killer = kill_after_first_epoch(tmp_path / "parallel", "nt0")
    parallel = train_parallel(experiment, tmp_path / "parallel", quiet=True)
    assert not killer.is_alive()
    assert files_of(parallel.checkpoint) == files_of(serial.checkpoint)
    assert set(files_of(parallel.checkpoint)) == {"weights.safetensors", "optimizer_ct.safetensors", "optimizer_nt.safetensors"}
    assert [p.name for p in sorted((tmp_path / "parallel" / "checkpoints").glob("epoch_*"))] == ["epoch_0007", "epoch_0008"]
    rows = read_metrics(tmp_path / "parallel")
    assert [row["epoch"] for row in rows] == list(range(1, 9))
    timed = {"seconds", "nt_seconds", "merge_seconds", "epoch_seconds", "exchange_seconds"}
    for mine, theirs in zip(rows, read_metrics(tmp_path / "serial"), strict=True):
        assert {k: v for k, v in mine.items() if k not in timed} == {k: v for k, v in theirs.items() if k not in timed}


def test_a_parallel_run_has_the_bits_of_a_serial_one_with_average_accumulation_and_exact_statistics(
    ray_session: Session, tmp_path: Path
) -> None:
    """The certified ranks keep the average, every rank makes the statistics, a copied Adam travels to the natural one."""
    switches = {"loss": "mtl", "lambda_2": 0.3, "ema": 0.9, "accumulate": 2, "precise_bn": True, "weight_decay": 0.01}
    experiment = tiny(epochs=2, nt_optimizer="copy", **switches)
    serial = train_run(experiment, tmp_path / "serial", quiet=True)
    parallel = train_parallel(experiment, tmp_path / "parallel", quiet=True)
    assert files_of(parallel.checkpoint) == files_of(serial.checkpoint)


def test_a_reducer_that_was_told_to_end_does_not_let_ranks_wait_for_ever(ray_session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    """By SIGTERM between the arrivals of the two branches: it waits for the first's call, and never takes the second's."""
    monkeypatch.setattr(reducer, "PAUSE_SECONDS", 0.5)
    monkeypatch.setattr(reducer, "SILENCE_SECONDS", 3.0)
    meeting = reducer.create_reducer(0.5, 2)
    first = meeting.exchange.remote(1, "ct", reducer.Part(failed="no matter"))
    os.kill(ray.get(meeting.pid.remote()), signal.SIGTERM)
    time.sleep(0.5)
    with pytest.raises((RuntimeError, ray.exceptions.RayError)):
        reducer.exchange(meeting, 1, "nt", reducer.Part())
    assert not ray.wait([first], timeout=0.1)[0]  # it really was waiting, and still is
    ray.kill(meeting)


def test_a_leader_that_cannot_save_says_so_once_instead_of_failing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No exception, which would be a failure to restart from: a sentence for all ranks, of the right kind for whoever waits."""
    progress = start(tiny(), torch.device("cpu"))

    def no_space(*given: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with take(tmp_path) as lease:
        run = record.Record(tiny(), tmp_path, lease)
        assert rank.ended(lambda: run.save(progress, {"epoch": 0})) is None
        for place in ("write_checkpoint", "Record._write_rows"):
            with monkeypatch.context() as full:
                full.setattr(f"cure_ray.runs.record.{place}", no_space)
                ending = rank.ended(lambda: run.save(progress, {"epoch": 0}))
            assert ending is not None
            assert f"the disk of {tmp_path} is full; epoch 0 could not be saved" in ending.text
            assert isinstance(ending.error, NoRoomError)
        with take_for(tmp_path, 9):
            lost = rank.ended(lambda: run.save(progress, {"epoch": 0}))
        assert lost is not None
        assert isinstance(lost.error, LostLeaseError)


def test_two_certified_ranks_match_one_to_1e_5_after_an_epoch(ray_session: Session, tmp_path: Path) -> None:
    """Same global batch, gamma count and BN statistics. Without attacks: the sign of a gradient that is 0 up to rounding would
    move a pixel by the whole radius. Biases in front of BN are left out, and the running means that follow them: BN cancels
    them, their gradient is 0, and Adam makes steps of size lr of its rounding in one process as in two."""
    experiment = tiny(epochs=1, lr=1e-4, lambda_inf=1.0, lambda_2=1.0, projection=False)
    one = load_checkpoint(train_run(experiment, tmp_path / "one", quiet=True).checkpoint)
    shared = experiment.model_copy(update={"execution": experiment.execution.model_copy(update={"ct_workers": 2})})
    two = load_checkpoint(train_parallel(shared, tmp_path / "two", quiet=True).checkpoint)
    ours, theirs = one.network.state_dict(), two.network.state_dict()
    means = [name for name in ours if name.endswith("running_mean")]
    noise = {*means, *(f"{int(name.split('.')[0]) - 1}.bias" for name in means)}
    for name in ours.keys() - noise:
        assert (theirs[name].double() - ours[name].double()).abs().max() < 1e-5, name
    for key in ("loss", "robust", "loss_linf", "gamma_share", "train_accuracy"):
        assert two.meta["metrics"][key] == pytest.approx(one.meta["metrics"][key], rel=1e-5)


def test_what_the_cluster_can_never_give_is_refused(ray_session: Session, tmp_path: Path) -> None:
    experiment = tiny()
    greedy = experiment.model_copy(update={"execution": experiment.execution.model_copy(update={"cpus_per_worker": 2.0})})
    with pytest.raises(UserError, match="needs 2 workers with 2 CPUs each; the cluster has room for 1"):
        train_parallel(greedy, tmp_path / "run", quiet=True)
    uneven = experiment.model_copy(update={"execution": experiment.execution.model_copy(update={"ct_workers": 3})})
    with pytest.raises(UserError, match="cannot be split evenly"):
        train_parallel(uneven, tmp_path / "other", quiet=True)
