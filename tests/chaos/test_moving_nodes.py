"""Certification on a cluster whose nodes come and go, as spot instances and autoscaling make it: shards move, nothing is done twice."""

import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from cluster_helpers import several_nodes, tiny

from cure_ray.certification.engines import make_engine
from cure_ray.certification.identity import network_identity
from cure_ray.certification.job import CascadeSettings, Job, Shard, plan
from cure_ray.cluster import certification as shards
from cure_ray.data.images import load_dataset
from cure_ray.data.samples import Samples
from cure_ray.results.store import Store
from cure_ray.runs.checkpoints import load_checkpoint
from cure_ray.runs.run import train_run
from cure_ray.threats.balls import Ball

pytestmark = pytest.mark.chaos


@pytest.fixture
def cluster() -> Iterator[Any]:
    """Two nodes for one worker each."""
    with several_nodes(2, 1) as made:
        yield made


def test_nodes_come_and_go_and_every_shard_is_written_once(cluster: Any, tmp_path: Path) -> None:
    loaded = load_checkpoint(train_run(tiny(method="linf", epochs=2), tmp_path / "run", quiet=True).checkpoint)
    images = load_dataset(loaded.experiment.dataset, "test")
    samples = Samples("digits", "test", images.pixels(), images.labels)
    engine = make_engine("native", loaded.network, torch.device("cpu"), (1, 8, 8))
    threats = [Ball("linf", 0.02), Ball("l2", 0.1), Ball("l1", 0.2)]
    job = Job.make(network_identity(loaded.network), samples, engine, CascadeSettings(("ibp", "crown-ibp", "attack", "crown"), batch=5), 0)
    subject = shards.Subject(loaded.network, samples, "native", 0, tmp_path / "bundles")
    written: Counter[str] = Counter()

    class Slow(shards.Worker):
        """Long enough that a node goes while it works."""

        def work(self, shard: Shard, subjects: list[Any]) -> shards.Done:
            time.sleep(0.4)
            return super().work(shard, subjects)

    class Counting(Store):
        def write(self, shard: Shard, rows: Any) -> Any:
            written[shard.name] += 1
            return super().write(shard, rows)

    def certify(root: Path, workers: int) -> dict[str, Any]:
        import ray

        Store.create(root, "digits", "test", samples.digest)
        store = Counting(root)
        done = store.begin(job, threats, range(120), {})
        todo = plan(job, threats, range(120), done, 5)

        def hire() -> Any:
            return ray.remote(Slow).options(num_cpus=1, max_restarts=0).remote("cpu", 1)

        shards.certify_shards(store, [(subject, todo)], shards.Crew(workers), hire=hire)
        rows = store.read().drop_columns(["seconds"]).sort_by([("threat", "ascending"), ("sample_index", "ascending")])
        found: dict[str, Any] = rows.to_pydict()
        return found

    expected = certify(tmp_path / "undisturbed", 2)
    assert set(written.values()) == {1}
    written.clear()
    moves, result = Counter[str](), dict[str, Any]()
    # Nodes are started in the main thread: Ray sets signal handlers with them.
    work = threading.Thread(target=lambda: result.update(certify(tmp_path / "moved", 2)), daemon=True)
    work.start()

    def go() -> None:
        cluster.remove_node(next(n for n in cluster.list_all_nodes() if n is not cluster.head_node), allow_graceful=False)
        moves["gone"] += 1

    def come() -> None:
        cluster.add_node(num_cpus=1)
        moves["come"] += 1

    for _ in range(4):  # one after another is replaced
        work.join(4)
        if work.is_alive():
            go()
            come()
    if work.is_alive():  # all go and one comes back: two workers are wanted, and one of them never comes
        go()
        go()
        come()
    work.join(400)
    print(f"\n{moves['gone']} nodes went and {moves['come']} came while {len(written)} shards were certified")
    assert not work.is_alive()
    assert result == expected
    assert moves["gone"] >= 3
    assert set(written.values()) == {1}
