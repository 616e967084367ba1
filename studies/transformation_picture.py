"""What each transformation does to an image at its extremes, as a picture.

python studies/transformation_picture.py docs/images/transformations.png [--dataset mnist] [--index 0] [--data-dir DIR]
"""

import argparse
from pathlib import Path

import matplotlib
import torch

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from cure_ray.config import Dataset
from cure_ray.data.images import load_dataset
from cure_ray.threats.transformations import parse_transformation
from cure_ray.threats.warps import transformed

SHOWN = ("R(30)", "Tu(2),Tv(2)", "Sc(5),R(5),C(5),B(0.01)", "Sh(2),R(2),Sc(2),C(2),B(0.001)")


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("picture", type=Path)
    options.add_argument("--dataset", default="mnist")
    options.add_argument("--index", type=int, default=0)
    options.add_argument("--data-dir", type=Path)
    arguments = options.parse_args()
    image, _ = load_dataset(Dataset(name=arguments.dataset), "test", arguments.data_dir).batch(torch.tensor([arguments.index]))
    figure, axes = plt.subplots(len(SHOWN), 5, figsize=(7.5, 6.4))
    for number, (row, text) in enumerate(zip(axes, SHOWN, strict=True)):
        steps = parse_transformation(text).steps
        low, middle, high = ([getattr(s, end) if end else (s.low + s.high) / 2 for s in steps] for end in ("low", "", "high"))
        at_low, at_high = (transformed(steps, p, image) for p in (low, high))
        difference = (at_high - at_low).abs()
        pictures = [image, at_low, transformed(steps, middle, image), at_high, difference]
        for axis, name, picture in zip(row, ("original", "lowest", "middle", "highest", "|highest - lowest|"), pictures, strict=True):
            axis.imshow(picture[0].permute(1, 2, 0).squeeze(-1).numpy(), cmap="gray", vmin=0, vmax=1)
            axis.set_xticks([])
            axis.set_yticks([])
            axis.set_title(name if number == 0 else "", fontsize=8)
        row[0].set_ylabel(text.replace("),", "),\n"), fontsize=7, rotation=0, ha="right", va="center")
    figure.tight_layout()
    arguments.picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(arguments.picture, dpi=110)


if __name__ == "__main__":
    main()
