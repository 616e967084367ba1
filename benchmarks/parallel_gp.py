"""Wall time of an epoch with gradient projection: both branches at once on Ray Train, beside the same epoch in one process.

    python benchmarks/parallel_gp.py [--images 12000] [--epochs 4]

Claim: once an epoch lasts 10 s or more on two idle cores, the parallel epoch takes at most 1.10 times its slower branch (the certified
one), so the natural branch is free. What is timed is the leader's epoch: its branch, waiting for the other, the exchange through the
object store, the merge, and loading the result; validation and checkpoints are the same work in both modes and are left out.
"""

import argparse
import tempfile
from pathlib import Path
from statistics import median

from sections import context, write_section

from cure_ray.cluster.session import session
from cure_ray.cluster.training.workers import train_parallel
from cure_ray.config import resolve
from cure_ray.runs.metrics import read_metrics
from cure_ray.runs.run import train_run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", type=int, default=1437, help="training images (digits has 1437; with --mnist up to 60000)")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--width", type=float, default=4.0)
    parser.add_argument("--mnist", type=Path, default=None, help="data directory with MNIST; digits otherwise")
    options = parser.parse_args()
    training = {"method": "scratch", "standard_epochs": 0, "anneal_epochs": 0, "epochs": options.epochs, "lr_milestones": []}
    experiment = resolve(
        {
            "preset": "smoke",
            "dataset": {"name": "mnist" if options.mnist else "digits", "train_samples": options.images, "validation": 100},
            "network": {"name": "conv-small", "width": options.width},
            "training": training,
            "execution": {"device": "cpu"},
        }
    )
    with tempfile.TemporaryDirectory() as scratch, session(cpus=2):
        train_run(experiment, Path(scratch) / "serial", data_dir=options.mnist, quiet=True)
        train_parallel(experiment, Path(scratch) / "parallel", data_dir=options.mnist, quiet=True)
        serial, parallel = (read_metrics(Path(scratch) / name)[1:] for name in ("serial", "parallel"))
    together = median(row["exchange_seconds"] for row in parallel)
    slower = median(max(row["seconds"], row["nt_seconds"]) for row in parallel)
    alone = median(row["seconds"] + row["nt_seconds"] + row["merge_seconds"] for row in serial)
    body = f"""{context(0, 1)}

Gradient projection on {options.images} images of {experiment.dataset.name}, conv-small x{options.width:g},
median of {len(parallel)} epochs, wall time.

| | seconds | times the slower branch |
|---|---|---|
| slower branch (certified) | {slower:.2f} | 1 |
| parallel epoch, exchange and merge included (target 1.10) | {together:.2f} | {together / slower:.3f} |
| serial epoch: natural, certified, merge | {alone:.2f} | {alone / slower:.3f} |
"""
    print(body)
    write_section("Parallel gradient projection", body)


if __name__ == "__main__":
    main()
