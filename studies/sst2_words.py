"""Claim under test: certified training in latent space (CURE) makes a sentence classifier harder to break by exchanging words.

    cure-ray embed sst2 --encoder DIR --tune 1600 --train 6000 --augment pwws,cf8 --neighbours FILE --out latents
    python studies/sst2_words.py --latents latents --out results/sst2 --neighbours FILE [--seeds 3] [--samples 500]

Seven ways of training one head (384-100-100-2) on the frozen vectors, all with one schedule fixed beforehand; then the cascade for the
first dev sentences in l_inf, l2 and l1 around the vector, without a box, and the attacks pwws and cf8 on the words, all in one store.
Certificates are about the head in latent space, never about words. Stop it at any time; the same command continues. What came out is
in docs/results.md, written by analysis/words_table.py; how it is defined, in docs/guide/text.md.
"""

import argparse
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

COMMON: dict[str, Any] = {
    "network": {"name": "mlp"},
    "training": {
        "epochs": 20, "standard_epochs": 1, "anneal_epochs": 8, "batch_size": 128, "lr": 1e-3, "lr_milestones": [15, 18],
        "l1_weight": 1e-5, "lambda_inf": 0.4, "lambda_2": 1e-5,
    },
}  # fmt: skip
NATURAL = {"method": "natural", "anneal_epochs": 0, "standard_epochs": 0, "warmup_weight": 0.0, "l1_weight": 0.0}
VARIANTS: dict[str, dict[str, Any]] = {
    "natural": NATURAL,
    "adv-aug": NATURAL,  # on augmented.npz
    "linf": {"method": "linf"},
    "l2": {"method": "l2"},
    "max": {"method": "max"},
    "scratch": {"method": "scratch"},
    "max-balls": {"method": "max", "norms": ["linf", "l2", "l1"], "regions": {"l2": "ball"}, "lambda_2": 0.5, "lambda_1": 0.5},
}


def experiment(variant: str, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    file = "augmented.npz" if variant == "adv-aug" else "latents.npz"
    return {
        **COMMON,
        "name": variant,
        "seed": seed,
        "dataset": {"path": str(options.latents / file), "name": "sst2"},
        "threats": dict(zip(("linf", "l2", "l1"), options.radii, strict=True)),
        "training": {**COMMON["training"], **VARIANTS[variant]},
        "certification": {"samples": options.samples},
    }


def cure_ray(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "cure_ray", *arguments], check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--latents", type=Path, required=True, help="directory of `cure-ray embed`, with augmented.npz")
    parser.add_argument("--out", type=Path, required=True, help="directory for runs and results")
    parser.add_argument("--neighbours", type=Path, required=True, help="neighbours of words, for cf8")
    parser.add_argument("--wordnet", type=Path, help="WordNet's files, for pwws, if they are not where packages put them")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--samples", type=int, default=500, help="dev sentences that are certified and attacked")
    parser.add_argument("--radii", type=float, nargs=3, default=[0.1, 1.5, 10.0], metavar=("LINF", "L2", "L1"))
    parser.add_argument("--nodes", type=int, default=200, help="branch and bound: sub-problems per sentence and norm; 0 leaves it out")
    parser.add_argument("--only", nargs="*", choices=[*VARIANTS], default=[*VARIANTS], help="a subset of the variants")
    parser.add_argument("--stage", choices=["train", "certify", "attack", "all"], default="all")
    options = parser.parse_args()
    described = options.out / "experiments"
    described.mkdir(parents=True, exist_ok=True)
    runs = [(variant, seed) for seed in range(options.seeds) for variant in options.only]
    where = [str(options.out / "runs" / f"{variant}-seed{seed}") for variant, seed in runs]
    store = ["--out", str(options.out / "store"), "--samples", str(options.samples), "--add"]
    for (variant, seed), run in zip(runs, where, strict=True) if options.stage in ("train", "all") else ():
        file = described / f"{variant}-seed{seed}.yaml"
        file.write_text(yaml.safe_dump(experiment(variant, seed, options), sort_keys=False))
        cure_ray("train", str(file), "--out", run, "--resume", "--quiet")
    if options.stage in ("certify", "all"):
        cure_ray("certify", *where, *store, "--nodes", str(options.nodes))
    if options.stage in ("attack", "all"):
        wordnet = ["--wordnet", str(options.wordnet)] if options.wordnet else []
        cure_ray("attack-text", *where, *store, "--neighbours", str(options.neighbours), *wordnet)


if __name__ == "__main__":
    main()
