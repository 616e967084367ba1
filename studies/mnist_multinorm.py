"""Claim under test: on MNIST, multi-norm certified training (CURE) raises the certified union over single-norm training.

    python studies/mnist_multinorm.py --out results/mnist-study [--data-dir DIR] [--seeds 3] [--workers 2]

Twelve ways of training one small convolutional network on 5,000 images, all with the same schedule, then the full cascade on ball∩[0,1]
for the first 500 test images in l_inf 0.1, l2 0.35 and l1 0.7, up to 1,000 sub-problems of branch and bound, all written to one store.
No method is tuned: each gets the preset's weights and one learning rate, fixed beforehand; the radii were chosen on validation images,
so that the unions lie apart. Stop it at any time; the same command continues. What came out, with the commands and the wall clock, is
in docs/results.md.
"""

import argparse
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

COMMON: dict[str, Any] = {
    "preset": "mnist-small",
    "scale": 0.3,
    "dataset": {"train_samples": 6000, "validation": 1000},
    "training": {"batch_size": 128, "lr": 1e-3},
    "certification": {"samples": 500},
}
BALLS = {"norms": ["linf", "l2", "l1"], "regions": {"l2": "ball"}, "lambda_2": 0.5, "lambda_1": 0.5}
VARIANTS: dict[str, dict[str, Any]] = {
    "linf": {"method": "linf"},
    "l2": {"method": "l2"},
    "joint": {"method": "joint"},
    "max": {"method": "max"},
    "random": {"method": "random"},
    "max-ba": {"method": "scratch", "projection": False},
    "max-gp": {"method": "scratch", "eta": 0.0},
    "scratch": {"method": "scratch"},
    "finetune": {"method": "finetune"},
    "l2-ball": {"method": "l2", "regions": {"l2": "ball"}, "lambda_2": 0.5},
    "max-balls": {"method": "max", **BALLS},
    "scratch-balls": {"method": "scratch", **BALLS},
}


def experiment(variant: str, seed: int, out: Path, width: float, radii: list[float]) -> dict[str, Any]:
    training = {**COMMON["training"], **VARIANTS[variant]}
    if variant == "finetune":
        training["start_from"] = str(out / "runs" / f"linf-seed{seed}")
    setting = {"network": {"name": "conv-small", "width": width}, "threats": dict(zip(("linf", "l2", "l1"), radii, strict=True))}
    return {**COMMON, **setting, "name": variant, "seed": seed, "training": training}


def cure_ray(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "cure_ray", *arguments], check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="directory for runs and results")
    parser.add_argument("--data-dir", help="where MNIST is (see `cure-ray data`)")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--width", type=float, default=0.5, help="of conv-small")
    parser.add_argument("--radii", type=float, nargs=3, default=[0.1, 0.35, 0.7], metavar=("LINF", "L2", "L1"))
    parser.add_argument("--nodes", type=int, default=1000, help="branch and bound: sub-problems per image and norm; 0 leaves it out")
    parser.add_argument("--workers", type=int, default=1, help="certify on so many Ray workers")
    parser.add_argument("--only", nargs="*", choices=[*VARIANTS], default=[*VARIANTS], help="a subset of the variants")
    parser.add_argument("--stage", choices=["train", "certify", "all"], default="all")
    options = parser.parse_args()
    data = ["--data-dir", options.data_dir] if options.data_dir else []
    described = options.out / "experiments"
    described.mkdir(parents=True, exist_ok=True)
    runs = [(variant, seed) for seed in range(options.seeds) for variant in options.only]
    for variant, seed in runs if options.stage != "certify" else []:
        file = described / f"{variant}-seed{seed}.yaml"
        file.write_text(yaml.safe_dump(experiment(variant, seed, options.out, options.width, options.radii), sort_keys=False))
        cure_ray("train", str(file), "--out", str(options.out / "runs" / f"{variant}-seed{seed}"), "--resume", "--quiet", *data)
    if options.stage != "train":
        where = [str(options.out / "runs" / f"{variant}-seed{seed}") for variant, seed in runs]
        budget = ["--nodes", str(options.nodes), "--workers", str(options.workers)]
        cure_ray("certify", *where, "--out", str(options.out / "store"), *budget, *data)


if __name__ == "__main__":
    main()
