"""What the caller of many workers costs: certification's queue, writer and resume, and a sweep's ledger, without networks.

    python benchmarks/scaling.py [--workers 16 64 256] [--seconds 60] [--trials 2000]

Claim: with verdicts of one second, 64 workers are busy for at least 90 % of the time, the caller spends at most 2 ms on a verdict and at
most 50 ms on a proposal after 2,000 trials. Workers sleep as long as real verdicts took (`verdict_seconds.txt`, scaled to a mean of one
second) on a `ray.cluster_utils.Cluster`. Its CPUs are made up, and the workers are threads of eight processes: what is measured is the
caller, which is the real one, and it cannot tell.
"""

import argparse
import heapq
import itertools
import os
import random
import secrets
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from sections import context, write_section

from cure_ray.certification.job import CascadeSettings, Job, Shard, plan
from cure_ray.certification.verdict import SCHEMA_VERSION, Status, Verdict
from cure_ray.cluster.certification import Crew, Done, Subject, certify_shards
from cure_ray.cluster.embedded import reread_environment
from cure_ray.cluster.session import ENVIRONMENT
from cure_ray.results.store import Store, witness_digest
from cure_ray.search.calls import submission
from cure_ray.search.ledger import Ledger
from cure_ray.search.space import Sweep
from cure_ray.search.study import claim, read_study
from cure_ray.threats.balls import Ball

HERE = Path(__file__).parent
GUIDE, PLOT = HERE.parent / "docs" / "guide" / "cluster.md", HERE.parent / "docs" / "images" / "scaling.png"
PROCESSES, SHARD, CONCURRENT = 8, 8, 64
THREATS = [Ball("linf", 0.1), Ball("l2", 0.5), Ball("l1", 1.0)]
JOB = Job("c" * 64, "mnist", "test", "d" * 64, "native", "1", CascadeSettings(), 0)
SWEEP = {
    "name": "scaling",
    "base": {"preset": "mnist-small", "dataset": {"validation": 5000}},
    "space": {
        "training.method": {"choice": ["max", "scratch"]},
        "training.lambda_inf": {"uniform": [0.1, 1.0]},
        "training.lambda_2": {"loguniform": [1e-6, 1e-2]},
        "training.eta": {"uniform": [0.5, 4.0], "when": {"training.method": ["scratch"]}},
    },
    "search": "tpe",
    "trials": 1_000_000,
    "early_stopping": {"factor": 2, "rungs": 2},
}


def recorded() -> list[float]:
    """Seconds of real verdicts, scaled to a mean of one."""
    seconds = np.loadtxt(HERE / "verdict_seconds.txt")
    return list(seconds / seconds.mean())


def slept(shard: Shard, seconds: list[float]) -> list[float]:
    """How long each verdict of a shard takes: drawn by its name, so the same wherever and whenever."""
    return random.Random(shard.name).choices(seconds, k=len(shard.threats) * len(shard.indices))


def made_up(threat: Ball, index: int, seconds: float, rng: random.Random) -> tuple[Verdict, Any]:
    """A row as MNIST's are, one in five with a counterexample."""
    witness = np.full((1, 28, 28), rng.random()) if rng.random() < 0.2 else None
    margins = tuple(rng.random() for _ in range(9))
    row = Verdict(
        SCHEMA_VERSION, JOB.run_id, JOB.checkpoint_digest, JOB.dataset, JOB.split, index, index % 10, index % 10, "lp", str(threat),
        threat.norm, threat.eps, Status.CERTIFIED if witness is None else Status.FALSIFIED, "crown" if witness is None else "attack",
        0.25 if witness is None else None, margins if witness is None else (), 0.5 if witness is None else -0.1,
        None if witness is None else witness_digest(witness), seconds, JOB.engine, JOB.engine_version, JOB.seed,
        ",".join(JOB.settings.stages), 0.0, 20000, "0,1", 0, None,
    )  # fmt: skip
    return row, witness


class Sleeper:
    """A worker that takes its time and has no network."""

    def __init__(self, seconds: list[float]) -> None:
        self.seconds = seconds

    def ready(self) -> bool:
        return True

    def work(self, shard: Shard, subjects: list[Any]) -> Done:
        rng, began = random.Random(shard.name), time.perf_counter()
        times = slept(shard, self.seconds)
        time.sleep(sum(times))
        made = [made_up(t, i, s, rng) for (t, i), s in zip(((t, i) for t in shard.threats for i in shard.indices), times, strict=True)]
        return Done([row for row, _ in made], [w for _, w in made if w is not None], {"crown": len(made)}, time.perf_counter() - began)


@dataclass(frozen=True)
class Certified:
    """What certification with so many workers came to."""

    workers: int
    verdicts: int
    wall: float
    ideal: float  # of a caller that costs nothing
    busy: float
    caller: float  # CPU seconds
    resume: float  # seconds until a finished store is known to be finished
    compact: float

    @property
    def efficiency(self) -> float:
        return self.busy / (self.workers * self.wall)

    @property
    def possible(self) -> float:
        return self.busy / (self.workers * self.ideal)


def ideal(durations: list[float], workers: int) -> float:
    """The same shards in the same order, each to whoever is free first."""
    free = [0.0] * workers
    for seconds in durations:
        heapq.heapreplace(free, free[0] + seconds)
    return max(free)


def certification(workers: int, seconds: float, scratch: Path) -> Certified:
    import ray
    from torch import nn

    times = recorded()
    count = round(workers * seconds / len(THREATS))
    store = Store.create(scratch / f"store{workers}", JOB.dataset, JOB.split, JOB.data_digest)
    shards = plan(JOB, THREATS, range(count), store.begin(JOB, THREATS, range(count), {}), SHARD)
    subject: Any = Subject(nn.Identity(), None, "native", 0, scratch)  # type: ignore[arg-type]  # nobody looks at it
    threads = -(-workers // PROCESSES)
    actors = [ray.remote(Sleeper).options(num_cpus=threads, max_concurrency=threads).remote(times) for _ in range(PROCESSES)]
    ray.get([actor.ready.remote() for actor in actors])
    places = itertools.count()
    clock, cpu = list[float](), list[float]()

    def ready() -> None:
        clock.append(time.perf_counter())
        cpu.append(time.process_time())

    certify_shards(store, [(subject, shards)], Crew(workers), ready=ready, hire=lambda: actors[next(places) % PROCESSES])
    wall, caller = time.perf_counter() - clock[0], time.process_time() - cpu[0]
    began = time.perf_counter()
    assert plan(JOB, THREATS, range(count), store.begin(JOB, THREATS, range(count), {}), SHARD) == []
    resume, began = time.perf_counter() - began, time.perf_counter()
    store.compact(JOB, THREATS)
    durations = [sum(slept(shard, times)) for shard in shards]
    best = ideal(durations, workers)
    return Certified(
        workers, count * len(THREATS), wall, best, sum(durations), caller, resume, time.perf_counter() - began
    )  # fmt: skip


@dataclass(frozen=True)
class Proposed:
    """The ledger's cost while so many trials are finished, per proposal and per judgement: wall seconds, CPU seconds."""

    finished: int
    proposal: tuple[float, float]
    judgement: tuple[float, float]
    journal: int


def ledger_costs(trials: int, directory: Path, every: int = 250) -> tuple[list[Proposed], float]:
    """64 trials run at any time; every one goes through the ledger as in a sweep. And how long opening the study takes at the end."""
    sweep, rng = Sweep.model_validate(SWEEP), random.Random(0)
    claim(directory, sweep)
    found, spent, finished = list[Proposed](), {"next": [0.0, 0.0, 0], "judged": [0.0, 0.0, 0]}, 0
    with submission(directory, {}) as me:
        ledger, rungs = Ledger(sweep, me, lambda text: None), dict[int, int]()

        def timed(what: str, work: Any, *arguments: Any) -> Any:
            wall, cpu = time.perf_counter(), time.process_time()
            result = work(*arguments)
            for place, value in enumerate((time.perf_counter() - wall, time.process_time() - cpu, 1)):
                spent[what][place] += value
            return result

        while finished < trials:
            while len(ledger.live) < CONCURRENT:
                rungs[timed("next", ledger.next).number] = 0
            number = rng.choice(sorted(ledger.live))
            if timed("judged", ledger.judged, number, rungs[number], {"union": rng.random(), "clean": 0.9}):
                rungs[number] += 1
                continue
            finished += 1
            if finished % every == 0:
                means = {what: (wall / n, cpu / n) for what, (wall, cpu, n) in spent.items()}
                found.append(Proposed(finished, means["next"], means["judged"], (directory / "journal.log").stat().st_size))
                spent = {"next": [0.0, 0.0, 0], "judged": [0.0, 0.0, 0]}
                print(found[-1], flush=True)
    began = time.perf_counter()
    assert len(read_study(directory, sweep).trials) >= trials
    return found, time.perf_counter() - began


def plot(certified: list[Certified], proposed: list[Proposed]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
    workers = [c.workers for c in certified]
    left.plot(workers, [100 * c.possible for c in certified], "o--", color="0.6", label="a caller that costs nothing")
    left.plot(workers, [100 * c.efficiency for c in certified], "o-", color="tab:blue", label="measured")
    left.axhline(90, color="tab:red", lw=0.8, ls=":", label="goal")
    left.set(xscale="log", xlabel="workers", ylabel="time workers are busy, %", ylim=(0, 103), title="certification, verdicts of 1 s")
    left.set_xticks(workers, [str(w) for w in workers])
    left.minorticks_off()
    left.legend(frameon=False, loc="lower left")
    trials = [p.finished for p in proposed]
    right.plot(trials, [1e3 * p.proposal[1] for p in proposed], "o-", color="tab:blue", label="a proposal")
    right.plot(trials, [1e3 * p.judgement[1] for p in proposed], "o-", color="tab:orange", label="a judgement at a rung")
    right.axhline(50, color="tab:red", lw=0.8, ls=":", label="goal")
    right.set(xlabel="finished trials", ylabel="CPU time of the caller, ms", ylim=(0, None), title=f"ledger, {CONCURRENT} trials at once")
    right.legend(frameon=False)
    PLOT.parent.mkdir(exist_ok=True)
    figure.savefig(PLOT, dpi=110)


def report(certified: list[Certified], proposed: list[Proposed], opening: float) -> str:
    rows = "\n".join(
        f"| {c.workers} | {c.verdicts} | {c.wall:.1f} | {c.ideal:.1f} | **{100 * c.efficiency:.1f} %** | {100 * c.possible:.1f} % | "
        f"{1e3 * c.caller / c.verdicts:.2f} | {c.resume:.2f} | {c.compact:.2f} |"
        for c in certified
    )
    last = proposed[-1]
    cost = certified[-1].caller / certified[-1].verdicts
    lines = "\n".join(
        f"| {p.finished} | {1e3 * p.proposal[1]:.1f} | {1e3 * p.proposal[0]:.1f} | {1e3 * p.judgement[1]:.1f} | "
        f"{1e3 * p.judgement[0]:.1f} | {p.journal / 1e6:.2f} |"
        for p in proposed
    )
    return f"""{context(0, 1)}

No networks: workers sleep as long as real verdicts took (`benchmarks/verdict_seconds.txt`, scaled to a mean of 1 s; shards of {SHARD}
verdicts), on a `ray.cluster_utils.Cluster` whose CPUs are made up. The workers are threads of {PROCESSES} processes; queue, answers, store
and resume are the real ones, one caller for all.

![time that workers are busy, and the ledger's cost](../images/scaling.png)

| workers | verdicts | wall, s | ideal, s | busy | possible | caller, CPU ms a verdict | resume, s | compaction, s |
|---|---|---|---|---|---|---|---|---|
{rows}

"Ideal" is a caller that costs nothing and takes the shards in the order of the plan: what it loses are the workers that have nothing left
to do at the end. The real one takes dear kinds first, and may do better. Goals: busy at least 90 % with 64 workers, at most 2 ms a
verdict. By its own CPU time the caller would be the limit at about {round(1 / cost, -2):.0f} workers with verdicts of 1 s.

A sweep's ledger with {CONCURRENT} trials at any time (TPE, four dimensions, two rungs of halving), every trial through the same calls as in
a sweep; goal: at most 50 ms a proposal after 2,000 trials, of CPU time, as wall time depends on who else uses the machine.
The study of {last.finished} trials takes {opening:.1f} s to open.

| finished trials | a proposal, CPU ms | wall ms | a judgement, CPU ms | wall ms | journal, MB |
|---|---|---|---|---|---|
{lines}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, nargs="+", default=[16, 64, 256])
    parser.add_argument("--seconds", type=float, default=150.0, help="work of each worker")
    parser.add_argument("--trials", type=int, default=2000)
    options = parser.parse_args()
    os.environ.update({**ENVIRONMENT, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)})
    import ray
    from ray.cluster_utils import Cluster

    reread_environment()
    with tempfile.TemporaryDirectory() as scratch:
        proposed, opening = ledger_costs(options.trials, Path(scratch) / "sweep", max(1, options.trials // 8))
        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
        for _ in range(2):
            cluster.add_node(num_cpus=max(options.workers))
        ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
        try:
            certified = []
            for workers in options.workers:
                certified.append(certification(workers, options.seconds, Path(scratch)))
                print(certified[-1], flush=True)
        finally:
            ray.shutdown()
            cluster.shutdown()
    plot(certified, proposed)
    body = report(certified, proposed, opening)
    print(body)
    write_section("Many workers", body, GUIDE)


if __name__ == "__main__":
    main()
