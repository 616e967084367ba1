"""Throughput of certification on one and on two workers.

    python benchmarks/certify_scaling.py [--samples 360]

Claim: two workers on two idle cores certify at least 1.8 times the samples a second of one, as far as the machine's cores are
independent. Beside it, in the same run, how far that is: two plain processes that share nothing but the machine. Workers are started and
warmed up before the clock starts: on real jobs their start (seconds) is lost in the work (minutes to days).
"""

import argparse
import itertools
import multiprocessing
import tempfile
import time
from pathlib import Path
from typing import Any

from sections import context, write_section

from cure_ray.certification.balls import Certifier
from cure_ray.certification.engines import make_engine
from cure_ray.certification.identity import network_identity
from cure_ray.certification.job import CascadeSettings, Job, plan
from cure_ray.cluster.certification import Crew, Subject, certify_shards
from cure_ray.cluster.session import session
from cure_ray.config import resolve
from cure_ray.data.images import load_dataset
from cure_ray.data.samples import Samples
from cure_ray.results.store import Store
from cure_ray.runs.checkpoints import load_checkpoint
from cure_ray.runs.run import train_run
from cure_ray.threats.balls import Ball
from cure_ray.threats.norms import NORMS

TURNS = 2


def alone(checkpoint: Path, samples: int, start: Any, times: Any) -> None:
    """All samples in this process, timed from the moment everybody is ready."""
    import torch

    torch.set_num_threads(1)
    loaded = load_checkpoint(checkpoint)
    x, y = load_dataset(loaded.experiment.dataset, "test").batch(torch.arange(samples))
    engine = make_engine("native", loaded.network, torch.device("cpu"), tuple(x.shape[1:]))
    certifier = Certifier(engine, loaded.network, CascadeSettings(batch=20))
    certifier.certify(x[:20], y[:20], Ball("l2", loaded.experiment.threats.eps("l2")), range(20))
    start.wait()
    began = time.perf_counter()
    for first in range(0, samples, 20):
        part = slice(first, min(first + 20, samples))
        for norm in NORMS:
            certifier.certify(x[part], y[part], Ball(norm, loaded.experiment.threats.eps(norm)), range(part.start, part.stop))
    times.put(time.perf_counter() - began)


def processes(count: int, checkpoint: Path, samples: int) -> float:
    """Verdicts a second of so many processes without Ray, each with all the samples."""
    spawn = multiprocessing.get_context("spawn")
    start, times = spawn.Barrier(count), spawn.Queue()
    running = [spawn.Process(target=alone, args=(checkpoint, samples, start, times)) for _ in range(count)]
    for process in running:
        process.start()
    slowest = max(times.get() for _ in running)
    for process in running:
        process.join()
    return count * samples * len(NORMS) / slowest


def main() -> None:
    import torch

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=360)
    options = parser.parse_args()
    torch.set_num_threads(1)
    training = {"method": "max", "epochs": 14, "anneal_epochs": 6, "lr_milestones": [11, 13], "regions": {"l2": "ball"}, "lambda_2": 0.5}
    with tempfile.TemporaryDirectory() as scratch, session(cpus=2):
        experiment = resolve({"preset": "smoke", "training": training, "execution": {"device": "cpu"}})
        run = train_run(experiment, Path(scratch) / "run", quiet=True)
        loaded = load_checkpoint(run.checkpoint)
        images = load_dataset(loaded.experiment.dataset, "test")
        samples = Samples("digits", "test", images.pixels(), images.labels)
        engine = make_engine("native", loaded.network, torch.device("cpu"), tuple(samples.images.shape[1:]))
        settings = CascadeSettings(batch=20)
        job = Job.make(network_identity(loaded.network), samples, engine, settings, 0)
        threats = [Ball(norm, loaded.experiment.threats.eps(norm)) for norm in NORMS]
        subject, rates = Subject(loaded.network, samples, "native", 0, Path(scratch) / "bundles"), {}
        for turn, workers in itertools.product(range(TURNS), (1, 2)):
            store = Store.create(Path(scratch) / f"store{turn}-{workers}", "digits", "test", samples.digest)
            indices = range(min(options.samples, len(samples)))
            done = store.begin(job, threats, indices, {})
            clock: list[float] = []
            shards = plan(job, threats, indices, done, 20)
            certify_shards(store, [(subject, shards)], Crew(workers), ready=lambda: clock.append(time.perf_counter()))  # noqa: B023
            rates[workers] = max(rates.get(workers, 0.0), len(indices) * len(threats) / (time.perf_counter() - clock[0]))
        plain = dict.fromkeys((1, 2), 0.0)
        for _, count in itertools.product(range(TURNS), plain):
            plain[count] = max(plain[count], processes(count, run.checkpoint, options.samples))
    gain, ceiling = rates[2] / rates[1], plain[2] / plain[1]
    body = f"""{context(0, 1)}

{options.samples} digits x {len(threats)} norms, cascade up to alpha-CROWN, shards of 20, a ball-trained convolutional network; verdicts per
second of wall time from the moment everybody is ready, the best of {TURNS} turns each (one, two, one,
two), as the machine's speed varies. The second row is what the machine gives to two processes that share nothing.

| | one | two | gain |
|---|---|---|---|
| Ray workers, writing the store (target 1.8) | {rates[1]:.1f} | {rates[2]:.1f} | **{gain:.2f}** |
| plain processes, writing nothing | {plain[1]:.1f} | {plain[2]:.1f} | {ceiling:.2f} |
"""
    print(body)
    write_section("Certification on two workers", body)


if __name__ == "__main__":
    main()
