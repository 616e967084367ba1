"""At least 40 faults over training, sweeps and certification on several nodes: nothing lost, nothing twice, same weights, same table.

One test per kind of work; each counts its faults, and the last test reports them all. Seeds of the murderer are fixed, its victims depend
on timing: what must not depend on it is the result.
"""

import errno
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from cluster_helpers import files_of, own_processes, several_nodes, tiny
from optuna.trial import TrialState

from cure_ray.certification.engines import make_engine
from cure_ray.certification.identity import network_identity
from cure_ray.certification.job import CascadeSettings, Job, plan
from cure_ray.cluster import certification as shards
from cure_ray.cluster.training.workers import train_parallel
from cure_ray.cluster.trials.sweep import run_sweep
from cure_ray.data.images import load_dataset
from cure_ray.data.samples import Samples
from cure_ray.results.files import Files
from cure_ray.results.fsck import fsck
from cure_ray.results.store import Store
from cure_ray.runs.checkpoints import load_checkpoint
from cure_ray.runs.directory import resolve_checkpoint
from cure_ray.runs.lease import holder, workers
from cure_ray.runs.metrics import read_metrics
from cure_ray.runs.run import train_run
from cure_ray.search.space import load_sweep
from cure_ray.search.study import read_study
from cure_ray.threats.balls import Ball

pytestmark = pytest.mark.chaos
FAULTS: Counter[str] = Counter()


@pytest.fixture(autouse=True)
def count_aloud() -> Iterator[None]:
    before = FAULTS.copy()
    yield
    print(f"\nfaults: {dict(FAULTS - before)}")


@pytest.fixture(scope="module")
def nodes() -> Iterator[object]:
    """Five nodes besides the head."""
    with several_nodes(5, 2) as cluster:
        yield cluster


class Murderer(threading.Thread):
    """Calls `strike` at random moments until told to stop or the number of faults is reached; counts what really happened."""

    def __init__(self, kind: str, strike: Callable[[random.Random], bool], faults: int, pause: tuple[float, float]) -> None:
        super().__init__(daemon=True)
        self.kind, self.strike, self.faults, self.pause = kind, strike, faults, pause
        self.random, self.done, self.hits = random.Random(0), threading.Event(), 0

    def run(self) -> None:
        while not self.done.is_set() and self.hits < self.faults:
            self.done.wait(self.random.uniform(*self.pause))
            if not self.done.is_set() and self.strike(self.random):
                self.hits += 1
                FAULTS[self.kind] += 1

    def stop(self) -> int:
        self.done.set()
        self.join()
        return self.hits


def kill_one(pids: list[int], rng: random.Random, number: int = signal.SIGKILL) -> bool:
    if not pids:
        return False
    try:
        os.kill(rng.choice(sorted(pids)), number)
    except ProcessLookupError:
        return False
    return True


def ranks_of(directory: Path, key: str = "pid") -> list[int]:
    now = holder(directory)
    found = [about.get(key) for about in workers(now).values()] if now is not None else []
    return [pid for pid in found if pid]


def kill_node_of(cluster: Any, pid: int) -> bool:
    """kill -9 of the raylet that started this process, and of all that it started."""
    try:
        parent = int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])
    except (OSError, IndexError):
        return False
    for node in cluster.list_all_nodes():
        if node.all_processes["raylet"][0].process.pid == parent and node is not cluster.head_node:
            cluster.remove_node(node, allow_graceful=False)
            return True
    return False


def spoil(verdicts: Path, kind: str, name: str, rng: random.Random) -> None:
    """One fault of a disk or of a writer that died."""
    victim = verdicts / name
    if kind == "torn":
        victim.write_bytes(victim.read_bytes()[: victim.stat().st_size // 2])
    elif kind == "missing":
        victim.unlink()
    elif kind == "doubled":
        (verdicts / f"copy-of-{name}").write_bytes(victim.read_bytes())
    elif kind == "foreign":
        (verdicts / f"{rng.random()}.parquet").write_bytes(b"not parquet")
    else:
        (verdicts / f".{name}.deadbeef.partial").write_bytes(b"half")


def test_training_loses_ranks_and_reducers_and_ends_with_the_same_bits(nodes: object, tmp_path: Path) -> None:
    """6 faults: certified and natural ranks and reducer, by SIGKILL or SIGTERM, and every third time the whole node of a rank."""
    from cure_ray.cluster.training.workers import FailurePolicy

    experiment = tiny(epochs=60)
    serial = train_run(experiment, tmp_path / "serial", quiet=True)
    run, reached, strikes, nodes_killed = tmp_path / "parallel", [0], [0], [0]

    def strike(rng: random.Random) -> bool:
        rows = read_metrics(run) if (run / "metrics.jsonl").exists() else []
        if len(rows) <= reached[0]:
            return False  # only an attempt that got somewhere is worth killing
        ranks = ranks_of(run)
        if strikes[0] % 3 == 2:
            hit = any(kill_node_of(nodes, pid) for pid in ranks)
            nodes_killed[0] += hit
        else:
            pids = [*ranks, *ranks_of(run, "reducer_pid")]
            hit = kill_one(pids, rng, rng.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGTERM]))
        strikes[0] += hit
        reached[0] = len(rows) + 1 if hit else reached[0]
        return hit

    murderer = Murderer("process or node under training", strike, 6, (0.05, 0.3))
    murderer.start()
    parallel = train_parallel(experiment, run, quiet=True, policy=FailurePolicy(max_failures=20))
    assert murderer.stop() >= 4
    assert nodes_killed[0] >= 1
    assert files_of(parallel.checkpoint) == files_of(serial.checkpoint)
    assert [row["epoch"] for row in read_metrics(run)] == list(range(1, 61))


def test_sweep_loses_workers_drivers_and_a_node(nodes: object, tmp_path: Path) -> None:
    """12 faults: workers and drivers by SIGKILL and SIGTERM, one node; every configuration is there once, with undisturbed weights."""
    data = {
        "name": "chaos",
        "base": {
            "preset": "smoke",
            "dataset": {"train_samples": 300, "validation": 40},
            "training": {"method": "linf", "epochs": 12, "standard_epochs": 0, "anneal_epochs": 1, "lr_milestones": []},
            "execution": {"device": "cpu"},
        },
        "space": {"training.lambda_inf": {"grid": [0.2, 0.4, 0.6, 0.8]}},
        "search": "grid",
        "samples": 10,
        "seeds": [0, 1],
    }
    (tmp_path / "s.yaml").write_text(yaml.safe_dump(data))
    out = tmp_path / "out"
    code = (
        "import sys; from pathlib import Path; from cure_ray.search.space import load_sweep;"
        "from cure_ray.cluster.trials.sweep import run_sweep;"
        "run_sweep(load_sweep(sys.argv[1]), Path(sys.argv[2]))"
    )

    def trained() -> int:
        return sum(len(p.read_text().splitlines()) for p in out.glob("trials/*/seed*/metrics.jsonl"))

    for number in (signal.SIGKILL, signal.SIGTERM, signal.SIGKILL, signal.SIGKILL):  # drivers with sessions of their own
        before = trained()
        driver = subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "s.yaml"), str(out)], stdout=subprocess.DEVNULL)
        deadline = time.time() + 120
        while trained() <= before and driver.poll() is None and time.time() < deadline:
            time.sleep(0.05)
        driver.send_signal(number)
        driver.wait(60)
        FAULTS["sweep driver"] += 1
    removed = [False]

    def strike(rng: random.Random) -> bool:
        if not removed[0]:
            removed[0] = True
            cluster: object = nodes
            cluster.remove_node(cluster.list_all_nodes()[-1], allow_graceful=False)  # type: ignore[attr-defined]
            return True
        return kill_one([*own_processes("ray::_run"), *own_processes("ray::ImplicitFunc")], rng)  # legs, and Tune's trials

    murderer = Murderer("sweep worker or node", strike, 8, (1.0, 3.0))
    murderer.start()
    run_sweep(load_sweep(tmp_path / "s.yaml"), out, quiet=True)
    murderer.stop()
    trials = read_study(out, load_sweep(tmp_path / "s.yaml")).get_trials()
    assert {t.state for t in trials} == {TrialState.COMPLETE}
    assert len({t.user_attrs["identity"] for t in trials}) == len(trials) == 4
    one = next(out.glob("trials/*/seed1"))
    from cure_ray.config import load_experiment

    alone = train_run(load_experiment(one / "experiment.yaml"), tmp_path / "alone", quiet=True)
    assert files_of(alone.checkpoint) == files_of(resolve_checkpoint(one))


def test_certification_loses_workers_shards_and_disks_and_gives_the_same_table(nodes: object, tmp_path: Path) -> None:
    """About 35 faults: workers by SIGKILL, a stopped (slow) worker, torn, missing, doubled and foreign shards, a full disk."""
    loaded = load_checkpoint(train_run(tiny(method="linf", epochs=2), tmp_path / "run", quiet=True).checkpoint)
    images = load_dataset(loaded.experiment.dataset, "test")
    samples = Samples("digits", "test", images.pixels(), images.labels)
    engine = make_engine("native", loaded.network, torch.device("cpu"), (1, 8, 8))
    threats = [Ball("linf", 0.02), Ball("l2", 0.1), Ball("l1", 0.2)]
    settings = CascadeSettings(("ibp", "crown-ibp", "attack", "crown"), batch=10)
    job = Job.make(network_identity(loaded.network), samples, engine, settings, 0)
    subject = shards.Subject(loaded.network, samples, "native", 0, tmp_path / "bundles")

    def certify(root: Path, workers: int, compact: bool = False) -> Store:
        store = Store.create(root, "digits", "test", samples.digest)
        done = store.begin(job, threats, range(150), {})
        shards.certify_shards(store, [(subject, plan(job, threats, range(150), done, 10))], shards.Crew(workers))
        if compact:
            store.compact(job, threats)
        return store

    def table(store: Store) -> dict[str, list[object]]:
        rows = store.read().drop_columns(["seconds"]).sort_by([("threat", "ascending"), ("sample_index", "ascending")])
        found: dict[str, list[object]] = rows.to_pydict()
        return found

    expected = table(certify(tmp_path / "undisturbed", 1))

    def strike(rng: random.Random) -> bool:
        return kill_one(own_processes("ray::Worker.work"), rng)

    for round_number in range(3):
        murderer = Murderer("certification worker", strike, 4, (0.2, 1.0))
        murderer.start()
        try:
            store = certify(tmp_path / f"killed{round_number}", 3)
        except RuntimeError:  # the same shard was hit three times in a row: refused with a sentence, then resumed
            murderer.stop()
            store = certify(tmp_path / f"killed{round_number}", 3)
        murderer.stop()
        assert table(store) == expected

    def pause(rng: random.Random) -> bool:
        pids = own_processes("ray::Worker.work")
        if not kill_one(pids[:1], rng, signal.SIGSTOP):
            return False
        time.sleep(3)
        kill_one(pids[:1], rng, signal.SIGCONT)
        return True

    slow = Murderer("slow worker", pause, 2, (0.2, 1.0))
    slow.start()
    assert table(certify(tmp_path / "slow", 2)) == expected
    slow.stop()

    rng, store = random.Random(1), Store.open(tmp_path / "slow")
    verdicts = tmp_path / "slow" / "verdicts"
    for kinds in (
        ("torn", "missing", "doubled"),
        ("foreign", "torn", "partial"),
        ("missing", "doubled", "torn"),
        ("partial", "foreign", "missing"),
        ("torn", "torn", "torn"),
        ("missing", "missing", "foreign"),
        ("doubled", "torn", "missing"),
    ):
        for kind, name in zip(kinds, rng.sample(store.shards(), 3), strict=True):
            spoil(verdicts, kind, name, rng)
            FAULTS[f"{kind} shard"] += 1
        findings = fsck(store)
        assert findings
        for finding in findings:
            if finding.file is not None:
                store.discard(finding.file)
        assert table(certify(tmp_path / "slow", 2)) == expected
        assert fsck(store) == []

    full = tmp_path / "full"  # a disk that is full: the write fails, nothing half-written is left, a second call goes on
    original = Files.write_bytes
    try:

        def no_space(self: object, name: str, data: bytes) -> None:
            if name.startswith("verdicts/") and rng.random() < 0.3:
                FAULTS["full disk"] += 1
                raise OSError(errno.ENOSPC, "No space left on device")
            original(self, name, data)  # type: ignore[arg-type]

        Files.write_bytes = no_space  # type: ignore[method-assign,assignment]
        for _ in range(4):
            try:
                certify(full, 2)
                break
            except OSError:
                continue
    finally:
        Files.write_bytes = original  # type: ignore[method-assign]
    assert table(certify(full, 2)) == expected


def test_at_least_forty_faults_were_injected() -> None:
    print(f"\n{sum(FAULTS.values())} faults: " + ", ".join(f"{count} {kind}" for kind, count in sorted(FAULTS.items())))
    assert sum(FAULTS.values()) >= 40, FAULTS
