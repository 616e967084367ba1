"""A certification under way: its jobs and shards, and the one place that chooses between this process and Ray."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from cure_ray import seeding
from cure_ray.api.progress import Reporter
from cure_ray.api.request import CertificationRequest, Execution
from cure_ray.api.subject import Subject
from cure_ray.certification.balls import Certifier
from cure_ray.certification.engines import make_engine
from cure_ray.certification.job import Job, Shard, plan
from cure_ray.certification.pace import Pace
from cure_ray.certification.shard import certify_shard
from cure_ray.results.store import Store
from cure_ray.runs.stopping import StoppedError, stop_on_signals
from cure_ray.threats import Ball, Threat


@dataclass(frozen=True, eq=False)
class Task:
    """A subject with its job, and the shards of it that are left to do."""

    subject: Subject
    job: Job
    threats: tuple[Threat, ...]
    indices: tuple[int, ...]
    shards: tuple[Shard, ...]

    @property
    def total(self) -> int:
        return len(self.indices) * len(self.threats)

    @property
    def left(self) -> int:
        return sum(len(s.indices) * len(s.threats) for s in self.shards)


def placed(execution: Execution) -> torch.device:
    """Where bounds are computed. With workers, `auto` is the CPU: whether the cluster has GPUs is not for this machine to say."""
    return seeding.resolve_device(execution.device if execution.workers == 1 or execution.device != "auto" else "cpu")


def prepare(request: CertificationRequest, subject: Subject, root: str, many: bool) -> Task:
    """The job of one subject, claimed in the store, and what of it is left to do."""
    device, threats, indices = placed(request.execution), request.threats_of(subject), request.indices_of(subject)
    settings = request.settings_of(subject)
    engine = make_engine(request.cascade.engine, subject.network, device, subject.input_shape)
    job = Job.make(subject.digest, subject.samples, engine, settings, request.seed, request.union_only)
    store = Store.create(root, job.dataset, job.split, job.data_digest, many)
    done = store.begin(job, threats, indices, subject.describe(device))
    if request.union_only:
        pilot = indices[:16]
        x, y = subject.samples.images[pilot].to(device), subject.samples.labels[pilot].to(device)
        certifier = Certifier(engine, subject.network.to(device), settings, request.seed, device=device)
        threats = [*certifier.failure_order(x, y, [t for t in threats if isinstance(t, Ball)])]  # other families were refused
        subject.network.cpu()
    # A shard of one batch on workers, of two here: the batches, and so every bit of the bounds, are the same.
    size = settings.batch if request.execution.workers > 1 else 2 * settings.batch
    return Task(subject, job, tuple(threats), tuple(indices), tuple(plan(job, threats, indices, done, size)))


MEMORY = "memory://"


def in_memory(store: Store) -> bool:
    return store.root.startswith(MEMORY)


def execute(store: Store, tasks: Sequence[Task], execution: Execution) -> None:
    """Certify all shards that are left, here or on Ray, and keep each as soon as it is finished."""
    with Reporter(sum(t.total for t in tasks), execution.quiet) as reporter:
        reporter.start(sum(t.total - t.left for t in tasks))
        bundles = Path(store.root if "://" not in store.root else ".") / "soundness-failure"
        run = _here if execution.workers == 1 else _on_ray
        run(store, tasks, execution, bundles, reporter)
    for task in tasks:
        store.compact(task.job, task.threats)


def _here(store: Store, tasks: Sequence[Task], execution: Execution, bundles: Path, reporter: Reporter) -> None:
    finished, device = 0, placed(execution)
    pace = Pace(shard for task in tasks for shard in task.shards)
    reporter.begin(pace)
    for task in tasks:
        engine = make_engine(task.job.engine, task.subject.network, device, task.subject.input_shape)
        network = task.subject.network.to(device)
        certifier = Certifier(engine, network, task.job.settings, task.job.seed, bundles, reporter, device)
        for shard in pace.one_of_each_first(task.shards):
            began = time.perf_counter()
            try:
                rows = certify_shard(certifier, shard, task.subject.samples, lambda image: store.write_witness(image.numpy()))
                store.write(shard, rows)
            except KeyboardInterrupt:
                if in_memory(store):
                    raise
                kept = f"{finished} of {sum(len(t.shards) for t in tasks)} shards are finished and kept in {store.root}"
                raise StoppedError(f"stopped. {kept}; run the same command to continue.") from None
            finished += 1
            pace.learn(shard, time.perf_counter() - began)


def _on_ray(store: Store, tasks: Sequence[Task], execution: Execution, bundles: Path, reporter: Reporter) -> None:
    from cure_ray.cluster import certification

    work = [
        (certification.Subject(t.subject.network.cpu(), t.subject.samples, t.job.engine, t.job.seed, bundles.absolute()), t.shards)
        for t in tasks
    ]
    device = placed(execution)
    share = execution.gpus_per_worker if device.type == "cuda" else 0.0
    crew = certification.Crew(execution.workers, str(device), execution.threads, share, execution.address)
    with stop_on_signals() as stop:
        try:
            certification.certify_shards(store, work, crew, reporter, stop)
        except StoppedError as stopped:
            kept = f"finished shards are kept in {store.root}"
            raise StoppedError(f"stopped by {stopped}; {kept}; run the same command to continue.") from None


@contextmanager
def threads(count: int) -> Iterator[None]:
    """So many CPU threads inside, the caller's number again afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
