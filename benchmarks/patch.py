"""Patch certification, measured: all positions of a 2x2 patch through their windows, and the naive propagation of whole images.

    python benchmarks/patch.py RUN [--images 100] [--naive-positions 20] [--data-dir DIR]

RUN is a run directory of `cure-ray train`. One core. The naive time is that of some positions, scaled to all of them.
"""

import argparse
import time
from pathlib import Path

import torch

from cure_ray.bounds.compiled import flatten_images
from cure_ray.bounds.native import NativeEngine
from cure_ray.certify.boxes import box_margins
from cure_ray.certify.patch import Patch, certify_patch
from cure_ray.certify.windows import clean_pass, patch_margins, positions
from cure_ray.checkpoints import load_checkpoint
from cure_ray.datasets import load_dataset
from cure_ray.run import hardware


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--images", type=int, default=100)
    parser.add_argument("--naive-positions", type=int, default=20)
    parser.add_argument("--data-dir", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    checkpoint = load_checkpoint(arguments.run)
    x, y = load_dataset(checkpoint.experiment.dataset, "test", arguments.data_dir).batch(torch.arange(arguments.images))
    engine = NativeEngine(checkpoint.network)
    assert engine.decide is not None
    places = positions(x.shape[2:], 2, 2)
    print(f"{checkpoint.experiment.name}, first {len(x)} test images, {len(places)} positions, 1 thread of "
          f"{hardware(torch.device('cpu'))['processor']}\n")  # fmt: skip

    started = time.process_time()
    outcomes = certify_patch(engine, checkpoint.network, x, y, Patch())
    print(f"certify_patch: {sum(o.status == 'certified' for o in outcomes)} certified, {time.process_time() - started:.1f} CPU s")

    clean = clean_pass(engine.decide, flatten_images(x.double()), y)
    started = time.process_time()
    for place in places:
        patch_margins(clean, place, 2, 2)
    print(f"windows, all positions of all images, no early stop: {time.process_time() - started:.1f} CPU s")

    started = time.process_time()
    for row, column in places[:: max(1, len(places) // arguments.naive_positions)][: arguments.naive_positions]:
        low, high = x.double().clone(), x.double().clone()
        low[..., row : row + 2, column : column + 2], high[..., row : row + 2, column : column + 2] = 0.0, 1.0
        box_margins(engine, flatten_images(low), flatten_images(high), y, "ibp")
    naive = (time.process_time() - started) * len(places) / arguments.naive_positions
    print(f"naive, all positions of all images: about {naive:.0f} CPU s")


if __name__ == "__main__":
    main()
