"""Patch certification: a 2x2 patch everywhere, by windows and by whole images. Writes '## Patches' of docs/benchmarks.md.

    python benchmarks/patch.py [RUN] [--images 100] [--naive-positions 20] [--data-dir DIR]

RUN is a run directory of `cure-ray train`, by default that of benchmarks/geometric.py. The naive time is that of some positions, scaled to
all of them.
"""

import argparse
import time
from pathlib import Path

import torch
from geometric import DEFAULT, described, trained
from sections import context, write_section

from cure_ray.bounds.native.compiled import flatten_images
from cure_ray.bounds.native.engine import NativeEngine
from cure_ray.certification.boxes import box_margins
from cure_ray.certification.patches import PatchSettings, certify_patch
from cure_ray.certification.windows import clean_pass, patch_margins, positions
from cure_ray.data.images import load_dataset
from cure_ray.threats.patches import Patch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, nargs="?", default=DEFAULT)
    parser.add_argument("--images", type=int, default=100)
    parser.add_argument("--naive-positions", type=int, default=20)
    parser.add_argument("--data-dir", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    checkpoint = trained(arguments.run, arguments.data_dir)
    x, y = load_dataset(checkpoint.experiment.dataset, "test", arguments.data_dir).batch(torch.arange(arguments.images))
    engine = NativeEngine(checkpoint.network)
    assert engine.decide is not None
    places = positions(x.shape[2:], 2, 2)
    rows = [f"| 2x2 patch, {len(places)} positions, {len(x)} images | certified | CPU s |", "|---|---|---|"]

    for name, settings in (("`certify_patch`", PatchSettings()), ("with `--patch-precheck`", PatchSettings(precheck=True))):
        started = time.process_time()
        outcomes = certify_patch(engine, checkpoint.network, x, y, Patch(), settings)
        seconds = time.process_time() - started
        early = sum((o.message or "").startswith("proven for all") for o in outcomes)
        certified = sum(o.status == "certified" for o in outcomes)
        rows.append(f"| {name} | {certified}{f', {early} of them by the pre-check' if settings.precheck else ''} | {seconds:.1f} |")

    clean = clean_pass(engine.decide, flatten_images(x.double()), y)
    started = time.process_time()
    for place in places:
        patch_margins(clean, place, 2, 2)
    rows.append(f"| windows, all positions of all images, no early stop | | {time.process_time() - started:.1f} |")

    started = time.process_time()
    for row, column in places[:: max(1, len(places) // arguments.naive_positions)][: arguments.naive_positions]:
        low, high = x.double().clone(), x.double().clone()
        low[..., row : row + 2, column : column + 2], high[..., row : row + 2, column : column + 2] = 0.0, 1.0
        box_margins(engine, flatten_images(low), flatten_images(high), y, "ibp")
    naive = (time.process_time() - started) * len(places) / arguments.naive_positions
    rows.append(f"| whole images, extrapolated from {arguments.naive_positions} positions | | {naive:.0f} |")
    print("\n".join(rows))
    write_section("Patches", "\n".join([context(0, 1), "", described(checkpoint, len(x)), "", *rows]))


if __name__ == "__main__":
    main()
