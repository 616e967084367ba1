"""Throughput of certification on one and on two workers.

    python benchmarks/certify_scaling.py [--samples 360]

Claim: two workers on two idle cores certify at least 1.8 times the samples a second of one. Workers are started and warmed up before
the clock starts: on real jobs their start (seconds) is lost in the work (minutes to days).
"""

import argparse
import os
import tempfile
import time
from pathlib import Path

from cure_ray.certify.engines import make_engine
from cure_ray.certify.runner import Samples
from cure_ray.certify.settings import CascadeSettings, Job, plan
from cure_ray.checkpoints import load_checkpoint
from cure_ray.cluster.session import session
from cure_ray.cluster.shards import Subject, certify_shards
from cure_ray.config import resolve
from cure_ray.datasets import load_dataset
from cure_ray.norms import NORMS
from cure_ray.results.store import Store
from cure_ray.run import train_run
from cure_ray.threats import Threat


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
        job = Job(loaded.digest, "digits", "test", samples.digest, engine.name, engine.version, settings, 0)
        threats = [Threat(norm, loaded.experiment.threats.eps(norm)) for norm in NORMS]
        subject, rates = Subject(loaded.network, samples, "native", 0, Path(scratch) / "bundles"), {}
        for workers in (1, 2):
            store = Store.create(Path(scratch) / f"store{workers}", "digits", "test", samples.digest)
            indices = range(min(options.samples, len(samples)))
            done = store.begin(job, threats, indices, {})
            clock: list[float] = []
            shards = plan(job, threats, indices, done, 20)
            certify_shards(store, [(subject, shards)], workers, ready=lambda: clock.append(time.perf_counter()))  # noqa: B023
            rates[workers] = len(indices) * len(threats) / (time.perf_counter() - clock[0])
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, {options.samples} samples x {len(threats)} norms, digits, alpha-CROWN")
    print(f"one worker {rates[1]:.1f} verdicts/s, two {rates[2]:.1f}: {rates[2] / rates[1]:.2f} x")


if __name__ == "__main__":
    main()
