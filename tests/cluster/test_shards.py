"""Distributed certification: one table, whatever the workers and whoever dies."""

import contextlib
import json
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from cluster_helpers import own_processes, tiny

from cure_ray.certification.engines import make_engine
from cure_ray.certification.identity import network_identity
from cure_ray.certification.job import CascadeSettings, Job, plan
from cure_ray.cluster import certification as shards
from cure_ray.cluster.session import Session
from cure_ray.cluster.staff import Staff
from cure_ray.data.images import load_dataset
from cure_ray.data.samples import Samples
from cure_ray.errors import UserError
from cure_ray.results.fsck import fsck
from cure_ray.results.store import Store
from cure_ray.runs.checkpoints import Checkpoint, load_checkpoint
from cure_ray.runs.run import train_run
from cure_ray.threats.balls import Ball

THREATS = [Ball("linf", 0.02), Ball("l2", 0.1), Ball("l1", 0.2)]
SETTINGS = CascadeSettings(("ibp", "crown-ibp", "attack", "crown"), batch=10)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return load_checkpoint(train_run(tiny(method="linf", epochs=2), tmp_path_factory.mktemp("run") / "run", quiet=True).checkpoint)


def certify(checkpoint: Checkpoint, root: str, workers: int, count: int = 40, **more: Any) -> dict[str, list[object]]:
    images = load_dataset(checkpoint.experiment.dataset, "test")
    samples = Samples("digits", "test", images.pixels(), images.labels)
    engine = make_engine("native", checkpoint.network, torch.device("cpu"), (1, 8, 8))
    job = Job.make(network_identity(checkpoint.network), samples, engine, SETTINGS, 0)
    store = Store.create(root, "digits", "test", samples.digest)
    done = store.begin(job, THREATS, range(count), {"name": "tiny"})
    parts = plan(job, THREATS, range(count), done, 10)
    shards.certify_shards(
        store, [(shards.Subject(checkpoint.network, samples, "native", 0, Path("bundles")), parts)], shards.Crew(workers), **more
    )
    store.compact(job, THREATS)
    assert fsck(store) == []
    columns: dict[str, list[object]] = store.read().drop_columns(["seconds"]).to_pydict()
    return columns


@pytest.fixture(scope="module")
def undisturbed(ray_session: Session, checkpoint: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[object]]:
    return certify(checkpoint, str(tmp_path_factory.mktemp("one") / "store"), 1)


def test_any_number_of_workers_and_any_kill_gives_the_same_table(
    undisturbed: dict[str, list[object]], checkpoint: Checkpoint, tmp_path: Path
) -> None:
    earlier = set(own_processes("ray::Worker"))
    killed, over = set[int](), threading.Event()

    def kill_two() -> None:
        """As soon as they are there, since they need less than a second for all there is to do."""
        while len(killed) < 2 and not over.wait(0.02):
            for pid in sorted(set(own_processes("ray::Worker")) - killed - earlier):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                    killed.add(pid)
                break

    killer = threading.Thread(target=kill_two, daemon=True)
    killer.start()
    try:
        assert certify(checkpoint, str(tmp_path / "two"), 2) == undisturbed
    finally:
        over.set()
        killer.join(10)
    assert killed
    assert set(undisturbed["status"]) >= {"certified", "misclassified"}


def test_a_store_on_an_object_store_resumes_and_matches(undisturbed: dict[str, list[object]], checkpoint: Checkpoint) -> None:
    certify(checkpoint, "memory://certificates/a", 1, count=10)
    assert certify(checkpoint, "memory://certificates/a", 1) == undisturbed


def test_more_workers_than_the_cluster_holds_are_refused(ray_session: Session, checkpoint: Checkpoint, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="certification needs 9 workers"):
        certify(checkpoint, str(tmp_path / "many"), 9)
    assert ray.is_initialized()


def test_the_command_agrees_with_one_process_to_the_byte_and_repairs_what_broke(
    ray_session: Session, checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from cure_ray.commands.certify import certify as command
    from cure_ray.commands.fsck import fsck as examine

    def table(root: Path) -> dict[str, list[object]]:
        rows = Store.open(root).read().drop_columns(["seconds"]).sort_by([("threat", "ascending"), ("sample_index", "ascending")])
        found: dict[str, list[object]] = rows.to_pydict()
        return found

    for workers in (1, 2):
        options = {"threats": "linf=0.02,l2=0.1", "samples": 110, "stages": "ibp,crown-ibp,attack,crown", "device": "cpu", "quiet": True}
        command([checkpoint.path], out=str(tmp_path / f"{workers}"), workers=workers, **options)  # type: ignore[arg-type]
    expected = table(tmp_path / "1")
    assert table(tmp_path / "2") == expected
    store = Store.open(tmp_path / "2")
    torn = tmp_path / "2" / "verdicts" / store.shards()[0]
    torn.write_bytes(torn.read_bytes()[:-200])
    (tmp_path / "2" / "verdicts" / "stranger.parquet").write_bytes(b"who")
    with pytest.raises(UserError, match="3 findings; run `cure-ray fsck"):
        examine(str(tmp_path / "2"))
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr("cure_ray.bounds.native.engine.NativeEngine.version", "99.0")
        with pytest.raises(UserError, match=r"engine .*, this is 99\.0: verdicts of the two must not be mixed"):
            examine(str(tmp_path / "2"), repair=True)
        assert torn.exists()
    plan = json.loads(next((tmp_path / "2" / "plans").iterdir()).read_text())
    stale = {**plan, "run_id": "0" * 16, "engine_version": "0.0.1"}  # another version began here and wrote nothing
    (tmp_path / "2" / "plans" / f"{'0' * 16}.json").write_text(json.dumps(stale))
    examine(str(tmp_path / "2"), repair=True)
    assert table(tmp_path / "2") == expected


def test_a_worker_that_never_gets_a_node_keeps_no_shard(
    undisturbed: dict[str, list[object]], checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a cluster that shrank: of two workers one waits for CPUs that are not there, and the other does all the work."""
    monkeypatch.setattr(shards, "START_SECONDS", 1.0)
    cpus = iter((1000, 1))

    def hire() -> Any:
        return ray.remote(shards.Worker).options(num_cpus=next(cpus), max_restarts=0).remote("cpu", 1)

    assert certify(checkpoint, str(tmp_path / "store"), 2, hire=hire) == undisturbed


def test_workers_that_do_not_start_end_in_a_sentence(ray_session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        def __init__(self) -> None:
            raise RuntimeError("no driver for this device")

        def ready(self) -> bool:
            return True

    monkeypatch.setattr("cure_ray.cluster.staff.MAX_FALSE_STARTS", 2)
    staff = Staff(lambda: ray.remote(Broken).options(num_cpus=0).remote(), 1)
    staff.stands(ray.wait(list(staff.starting))[0][0])
    second = ray.wait(list(staff.starting))[0][0]
    with pytest.raises(RuntimeError, match=r"workers do not start: .*no driver for this device"):
        staff.stands(second)
