"""CPU seconds of one epoch at full radius for every method (12.14), without finished runs.

    python studies/epoch_seconds.py --preset mnist-small --images 2000 [--network conv-small] [--data-dir DIR]

CPU time, not wall clock, so that a busy machine does not change it; the second epoch is measured, the first warms up.
"""

import argparse
import time
from pathlib import Path

import torch
from common import table

from cure_ray.config import resolve
from cure_ray.data.images import load_dataset
from cure_ray.runs.hardware import hardware
from cure_ray.training.loop import serial_epoch, start

METHODS = ("linf", "l2", "joint", "max", "random", "scratch", "cgt", "natural")


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--preset", default="mnist-small")
    options.add_argument("--network", default="conv-small")
    options.add_argument("--images", type=int, default=2000)
    options.add_argument("--data-dir", type=Path)
    arguments = options.parse_args()
    torch.set_num_threads(1)
    rows = []
    for method in METHODS:
        dataset = {"train_samples": arguments.images, "validation": 0}
        described = {"preset": arguments.preset, "dataset": dataset, "network": {"name": arguments.network}}
        experiment = resolve({**described, "training": {"method": method, "batch_size": 100}})
        images = load_dataset(experiment.dataset, "train", arguments.data_dir)
        progress = start(experiment, torch.device("cpu"))
        progress.epoch = experiment.training.epochs - 2
        serial_epoch(progress, images, experiment)
        began = time.process_time()
        serial_epoch(progress, images, experiment)
        rows.append((method, time.process_time() - began))
    base = rows[0][1]
    machine = hardware(torch.device("cpu"))["processor"]
    print(f"{arguments.preset}, {arguments.network}, {arguments.images} images, batch 100, 1 thread of {machine}\n")
    print(table(["method", "CPU s per epoch", "relative to linf"], [[m, f"{s:.2f}", f"{s / base:.2f}"] for m, s in rows]))


if __name__ == "__main__":
    main()
