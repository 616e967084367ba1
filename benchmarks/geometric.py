"""Geometric certification, measured: seconds and boxes per configuration, against the flat grid of the same leaves.

    python benchmarks/geometric.py RUN [--images 100] [--data-dir DIR]

RUN is a run directory of `cure-ray train` on MNIST. One core. Printed as a Markdown table with its context; docs/geometric.md holds
the published one. "flat" counts leaves times certified images: what a flat grid bounds for the images it certifies.
"""

import argparse
import time
from pathlib import Path

import torch

from cure_ray.bounds.native import NativeEngine
from cure_ray.certify.geometric import GeometricSettings, certify_geometric
from cure_ray.checkpoints import load_checkpoint
from cure_ray.config.transforms import parse_transformation
from cure_ray.datasets import load_dataset
from cure_ray.run import hardware

CONFIGURATIONS = ("R(30)", "Tu(2),Tv(2)", "Sc(5),R(5),C(5),B(0.01)", "Sh(2),R(2),Sc(2),C(2),B(0.001)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--images", type=int, default=100)
    parser.add_argument("--data-dir", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    checkpoint = load_checkpoint(arguments.run)
    experiment = checkpoint.experiment
    x, y = load_dataset(experiment.dataset, "test", arguments.data_dir).batch(torch.arange(arguments.images))
    engine = NativeEngine(checkpoint.network)
    machine = hardware(torch.device("cpu"))
    print(f"{experiment.name}, {experiment.network.name}, first {len(x)} test images, 1 thread of {machine['processor']}, IBP\n")
    print("| transformation | leaves | certified | CPU s | boxes per certified image | flat / bisected |")
    print("|---|---|---|---|---|---|")
    for text in CONFIGURATIONS:
        transformation = parse_transformation(text, experiment.dataset.name)
        started = time.process_time()
        outcomes = certify_geometric(engine, checkpoint.network, x, y, transformation, GeometricSettings())
        seconds = time.process_time() - started
        boxes = [o.nodes for o in outcomes if o.status == "certified"]
        ratio = f"{transformation.leaves * len(boxes) / sum(boxes):.1f}x" if boxes else "-"
        per_image = f"{sum(boxes) / len(boxes):.0f}" if boxes else "-"
        print(f"| {text} | {transformation.leaves:,} | {len(boxes)} of {len(x)} | {seconds:.1f} | {per_image} | {ratio} |", flush=True)


if __name__ == "__main__":
    main()
