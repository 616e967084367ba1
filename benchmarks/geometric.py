"""Geometric certification: boxes and CPU seconds, against the flat grid. Writes '## Transformations' of docs/benchmarks.md.

    python benchmarks/geometric.py [RUN] [--images 100] [--data-dir DIR]

RUN is a run directory of `cure-ray train` on MNIST; without one, a network is trained there with certified training first (minutes).
"fewer than the flat grid" is leaves over boxes for the images that are certified: a flat grid bounds all leaves of those.
"""

import argparse
import time
from pathlib import Path

import torch
from sections import context, write_section

from cure_ray.bounds.native.engine import NativeEngine
from cure_ray.certification.transformations import GeometricSettings, certify_geometric
from cure_ray.config import resolve
from cure_ray.data.images import load_dataset
from cure_ray.runs.checkpoints import Checkpoint, load_checkpoint
from cure_ray.runs.run import train_run
from cure_ray.threats.transformations import parse_transformation

CONFIGURATIONS = ("R(30)", "Tu(2),Tv(2)", "Sc(5),R(5),C(5),B(0.01)", "Sh(2),R(2),Sc(2),C(2),B(0.001)")
SEARCHES = {
    "ibp": GeometricSettings(),
    "crown-ibp": GeometricSettings(("crown-ibp",)),
    "ibp, separate logits": GeometricSettings(separate_logits=True),
}
DEFAULT = Path("runs/benchmark-linf")


def trained(run: Path, data_dir: Path | None) -> Checkpoint:
    """The network at `run`; trained first where there is none."""
    if not run.exists():
        print(f"training {run}", flush=True)
        training = {"method": "linf", "lr": 0.003, "batch_size": 100}
        data = {"preset": "mnist-large", "scale": 0.3, "network": {"name": "conv-small"}, "dataset": {"train_samples": 5000}}
        train_run(resolve({**data, "training": training}), run, False, data_dir, True)
    return load_checkpoint(run)


def described(checkpoint: Checkpoint, images: int) -> str:
    e = checkpoint.experiment
    return (
        f"{e.network.name} on {e.dataset.name}, method {e.training.method} at l_inf {e.threats.eps('linf'):g}, {e.dataset.train_size:,} "
        f"training images, {checkpoint.epoch} epochs, seed {e.seed}; first {images} test images; CPU seconds of one thread."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, nargs="?", default=DEFAULT)
    parser.add_argument("--images", type=int, default=100)
    parser.add_argument("--data-dir", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    checkpoint = trained(arguments.run, arguments.data_dir)
    dataset = checkpoint.experiment.dataset
    x, y = load_dataset(dataset, "test", arguments.data_dir).batch(torch.arange(arguments.images))
    engine = NativeEngine(checkpoint.network)
    rows = [
        "| transformation | leaves | bounds | certified | CPU s | boxes per certified image | fewer than the flat grid |",
        "|---|---|---|---|---|---|---|",
    ]
    for text in CONFIGURATIONS:
        transformation = parse_transformation(text, checkpoint.experiment.grid)
        for name, settings in SEARCHES.items():
            started = time.process_time()
            outcomes = certify_geometric(engine, checkpoint.network, x, y, transformation, settings)
            seconds = time.process_time() - started
            boxes = [o.nodes for o in outcomes if o.status == "certified"]
            ratio = f"{transformation.leaves * len(boxes) / sum(boxes):.1f}x" if boxes else "-"
            each = f"{sum(boxes) / len(boxes):.0f}" if boxes else "-"
            rows.append(f"| {text} | {transformation.leaves:,} | {name} | {len(boxes)} of {len(x)} | {seconds:.1f} | {each} | {ratio} |")
            print(rows[-1], flush=True)
    write_section("Transformations", "\n".join([context(0, 1), "", described(checkpoint, len(x)), "", *rows]))


if __name__ == "__main__":
    main()
