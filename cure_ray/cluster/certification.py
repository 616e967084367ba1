"""Certification on many workers: a queue of shards, one in flight per worker, and a store that only the caller writes.

A shard is a pure function of its content (checkpoint digest, data, threat, samples, settings), so where and how often it was tried
leaves no trace: any number of workers and any pattern of deaths ends in the same table. Workers return rows and witnesses; they need
no access to the store, which may therefore be any place the caller can write.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch
from torch import Tensor, nn

from cure_ray.certification.balls import Certifier
from cure_ray.certification.engines import make_engine
from cure_ray.certification.job import Shard
from cure_ray.certification.pace import Kind, Pace, Watcher
from cure_ray.certification.shard import certify_shard
from cure_ray.certification.verdict import Verdict
from cure_ray.cluster.session import Need, require, session
from cure_ray.cluster.staff import Staff, node_lost
from cure_ray.data.samples import Samples
from cure_ray.errors import SoundnessError, UserError
from cure_ray.results.store import Store

START_SECONDS = 120.0  # patience with slow nodes before the first shards go out
MAX_DEATHS = 3  # of workers over one shard: a shard that kills every worker it meets must end in a message


@dataclass(frozen=True)
class Subject:
    """What a worker needs to certify shards of one checkpoint."""

    network: nn.Module
    samples: Samples
    engine: str
    seed: int
    bundles: Path


@dataclass(frozen=True)
class Crew:
    """How many workers, and what each of them has."""

    workers: int
    device: str = "cpu"
    threads: int = 1
    gpus: float = 0.0  # fractions allowed
    address: str | None = None  # of a running cluster


@dataclass(frozen=True)
class Done:
    """A finished shard: rows, the witnesses they name, and how many samples each stage decided."""

    rows: list[Verdict]
    witnesses: list[np.ndarray[Any, Any]]
    decided: dict[str, int]
    seconds: float


class Worker:
    """An actor that certifies shards; it keeps the engine of the checkpoint it worked on last."""

    def __init__(self, device: str, threads: int) -> None:
        torch.set_num_threads(threads)
        self.device = torch.device(device)
        self.subject: tuple[str, Subject, Certifier] | None = None
        self.decided: dict[str, int] = defaultdict(int)

    def ready(self) -> bool:
        return True

    def _certifier(self, shard: Shard, subjects: list[Any]) -> tuple[Subject, Certifier]:
        digest = shard.job.run_id
        if self.subject is None or self.subject[0] != digest:
            subject: Subject = ray.get(subjects[0])
            engine = make_engine(subject.engine, subject.network, self.device, tuple(subject.samples.images.shape[1:]))
            network = subject.network.to(self.device)

            def count(stage: str, decided: int) -> None:
                self.decided[stage] += decided

            certifier = Certifier(engine, network, shard.job.settings, subject.seed, subject.bundles, count, self.device)
            self.subject = (digest, subject, certifier)
        return self.subject[1], self.subject[2]

    def work(self, shard: Shard, subjects: list[Any]) -> Done:
        """`subjects` holds one object reference; inside a list Ray does not fetch it before it is needed."""
        from cure_ray.results.store import witness_digest

        subject, certifier = self._certifier(shard, subjects)
        self.decided.clear()
        witnesses: list[np.ndarray[Any, Any]] = []

        def keep(image: Tensor) -> str:
            witnesses.append(np.ascontiguousarray(image.numpy(), dtype=np.float64))
            return witness_digest(witnesses[-1])

        began = time.perf_counter()
        rows = certify_shard(certifier, shard, subject.samples, keep)
        return Done(rows, witnesses, dict(self.decided), time.perf_counter() - began)


class _Queue:
    """Shards waiting, dearest first as far as finished ones tell: the last shard to end should be a cheap one."""

    def __init__(self, shards: Sequence[Shard], pace: Pace) -> None:
        self.pace, self.kinds = pace, defaultdict[Kind, list[Shard]](list)
        for shard in shards:
            self.kinds[pace.kind(shard)].append(shard)
        for waiting in self.kinds.values():  # taken from the end: large ones first, else in their order
            waiting.reverse()
            waiting.sort(key=lambda shard: len(shard.indices))

    def __bool__(self) -> bool:
        return any(self.kinds.values())

    def _price(self, kind: Kind) -> float:
        price = self.pace.price(self.kinds[kind][-1])
        return float("inf") if price is None else price  # unknown kinds first, to learn their price

    def take(self) -> Shard:
        """A look at each kind, not at each shard: there may be many thousands."""
        return self.kinds[max((kind for kind, waiting in self.kinds.items() if waiting), key=self._price)].pop()

    def put_back(self, shard: Shard) -> None:
        self.kinds[self.pace.kind(shard)].append(shard)


def certify_shards(
    store: Store,
    work: Sequence[tuple[Subject, Sequence[Shard]]],
    crew: Crew,
    progress: Watcher = Watcher(),  # noqa: B008 - it keeps nothing
    stop: Callable[[], None] = lambda: None,
    ready: Callable[[], None] = lambda: None,
    hire: Callable[[], Any] | None = None,
) -> None:
    """Certify all shards on these workers and write each as soon as it is finished.

    `stop` may raise between shards; `ready` is called when all workers stand; `hire` starts another actor than `Worker`.
    """
    every = [shard for _, shards in work for shard in shards]
    if not every:
        return
    need = Need(min(crew.workers, len(every)), float(crew.threads), crew.gpus)
    queue = _Queue(every, Pace(every, need.workers))
    with session(crew.address):
        require(
            need,
            "certification",
            "--workers, --threads or --gpus-per-worker (a fraction is allowed)" if crew.gpus else "--workers or --threads",
        )
        subjects = {shards[0].job.run_id: [ray.put(subject)] for subject, shards in work if shards}
        staff = Staff(hire or (lambda: _worker(need, crew)), need.workers)
        flying: dict[Any, tuple[Any, Shard]] = {}
        deaths: dict[str, int] = defaultdict(int)
        try:
            staff.assemble(START_SECONDS)
            ready()
            progress.begin(queue.pace)
            while queue or flying:
                stop()
                while staff.idle and queue:
                    shard, worker = queue.take(), staff.idle.pop()
                    flying[worker.work.remote(shard, subjects[shard.job.run_id])] = (worker, shard)
                finished = []
                for ref in _landed([*flying, *staff.starting]):
                    if ref in staff.starting:
                        staff.stands(ref)
                        continue
                    worker, shard = flying.pop(ref)
                    try:
                        done: Done = ray.get(ref)
                    except ray.exceptions.RayTaskError as error:
                        raise _ours(error) from None
                    except ray.exceptions.RayError as error:  # the worker, or the node that still held its result, is gone
                        deaths[shard.name] += not node_lost(error)
                        if deaths[shard.name] >= MAX_DEATHS:
                            raise RuntimeError(_hopeless(shard, error)) from None
                        queue.put_back(shard)
                        staff.add()
                        continue
                    finished.append((shard, done))
                    queue.pace.learn(shard, done.seconds)
                    if queue:  # give the worker its next shard before writing this one
                        following = queue.take()
                        flying[worker.work.remote(following, subjects[following.job.run_id])] = (worker, following)
                    else:
                        staff.idle.append(worker)
                for shard, done in finished:
                    _keep(store, shard, done)
                    for stage, decided in done.decided.items():
                        progress(stage, decided)
        finally:
            staff.dismiss()
            for worker, _ in flying.values():
                ray.kill(worker)


def _worker(need: Need, crew: Crew) -> Any:
    return ray.remote(Worker).options(num_cpus=need.cpus, num_gpus=need.gpus, max_restarts=0).remote(crew.device, crew.threads)


def _landed(refs: list[Any]) -> list[Any]:
    """All that have an answer, once there is one; none if there is none for a second."""
    if not ray.wait(refs, num_returns=1, timeout=1.0)[0]:
        return []
    return list(ray.wait(refs, num_returns=len(refs), timeout=0)[0])


def _keep(store: Store, shard: Shard, done: Done) -> None:
    for witness in done.witnesses:
        store.write_witness(witness)  # before the rows that name it
    store.write(shard, done.rows)


def _ours(error: "ray.exceptions.RayTaskError") -> Exception:
    cause = getattr(error, "cause", None)
    for kind in (SoundnessError, UserError):
        if isinstance(cause, kind):
            return kind(str(cause))
    return RuntimeError(f"a certification worker failed: {error}")


def _hopeless(shard: Shard, error: Exception) -> str:
    threats = ", ".join(map(str, shard.threats))
    return (
        f"samples {shard.indices[0]} to {shard.indices[-1]} under {threats} killed {MAX_DEATHS} workers in a row "
        f"({type(error).__name__}); the usual reason is memory: use fewer workers, or a larger machine. Finished shards are kept."
    )
