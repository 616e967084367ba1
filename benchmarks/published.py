"""Published networks under the whole cascade, beside what was published about them.

    python benchmarks/published.py --weights DIR [--group l2 | linf | union] [--nodes 1000] [--only lipschitz-mnist-mlp]

The networks are those that cure_ray/zoo/published/ describes. DIR holds the weights as NAME.safetensors (or .pt, .mat; hyphens may be
underscores), and sdp_cifar_200.npz with the 200 CIFAR-10 images (uint8) and labels the authors chose: from the repository of SDP-CROWN
(Chiu, Chen, Zhang and Zhang, ICML 2025), whose table the published figures are.
The group `linf` is CNN-A (adv) of alpha-beta-CROWN's repository, `union` MMR-Universal in three norms at once.
Every verdict is the cascade's: attack, bounds on ball∩[0, 1], branch and bound. CPU time of one process.
"""

import argparse
import time
from pathlib import Path

import pandas as pd
import torch
from sections import context, write_section

import cure_ray
from cure_ray.api.judge import published_samples, take
from cure_ray.zoo.published import Published, all_published

GROUPS = {"l2": ("lipschitz-",), "linf": ("sdp-",), "union": ("mmr-universal-mnist",)}
SECTIONS = {"l2": "Published l2 networks", "linf": "Published l_inf networks", "union": "Published networks in the union of three norms"}
FIRST = {"mmr-universal-mnist": 1000}  # images the published figures are about
NETWORKS = {name: described for name, described in all_published().items() if name.startswith(sum(GROUPS.values(), ()))}
IMAGES = {"lipschitz-cifar10-cnn-a": "sdp_cifar_200.npz"}
HEADER = [
    "| network, radius | n | clean | by bounds | certified | not broken | open | CPU s a sample | published, certified / not broken |",
    "|---|---|---|---|---|---|---|---|---|",
]


def weights_of(described: Published, folder: Path) -> Path:
    """The file of a network, whichever way its name and format are written."""
    stems = (described.name, described.name.replace("-", "_"))
    found = [p for p in sorted(folder.iterdir()) if p.stem in stems and p.suffix in (".safetensors", ".pt", ".pth", ".mat", ".onnx")]
    if not found:
        raise SystemExit(f"{folder} holds no weights of {described.name}: expected {described.name}.safetensors")
    return found[0]


def published_figures(described: Published) -> str:
    shown = [f for f in described.figures if f.threat == "union"] or described.figures
    certified = ", ".join(f"{f.certifier} {f.value:g}" for f in shown if f.what == "certified")
    return f"{certified} / {', '.join(f'{f.value:g}' for f in shown if f.what == 'not broken')}"


def row(name: str, weights: Path, nodes: int | None, seed: int) -> str:
    described = NETWORKS[name]
    network = take(described, weights_of(described, weights)).network
    samples = published_samples(described, weights / IMAGES[name] if name in IMAGES else None)
    threats = described.protocol.read()
    started = time.process_time()
    budget = described.protocol.nodes if nodes is None else nodes
    images, labels = (t[: FIRST.get(name)] for t in (samples.images, samples.labels))
    found = cure_ray.certify(network, images, labels, threats, nodes=budget, seed=seed).verdicts
    seconds = time.process_time() - started
    certified = found["status"] == "certified"
    alone = certified & (found["stage"] != "branch-and-bound")
    standing = certified | ~found["status"].isin(("falsified", "misclassified"))
    clean = found["status"] != "misclassified"
    n = found["sample_index"].nunique()

    def share(which: pd.Series) -> str:
        """Of the samples under every threat at once."""
        return f"{100 * which.groupby(found['sample_index']).all().mean():.1f}"

    cells = [
        f"{name}, {described.protocol.threats.replace('l2=', '') if len(threats) == 1 else described.protocol.threats}",
        n, share(clean), share(alone), share(certified), share(standing), int((standing & ~certified).sum()), f"{seconds / n:.2f}",
        published_figures(described),
    ]  # fmt: skip
    return "| " + " | ".join(map(str, cells)) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", type=Path, required=True)
    parser.add_argument("--group", choices=GROUPS, help="one of the tables; default: all of them")
    parser.add_argument("--nodes", type=int, help="sub-problems per image and threat; default: each protocol's")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=NETWORKS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.only:
        print(row(options.only, options.weights, options.nodes, options.seed))
        return
    for group in [options.group] if options.group else GROUPS:
        lines = []
        for name in (name for name in NETWORKS if name.startswith(GROUPS[group])):
            lines.append(row(name, options.weights, options.nodes, options.seed))
            print(lines[-1], flush=True)
        write_section(SECTIONS[group], "\n".join([context(options.seed, 1), "", *HEADER, *lines]))


if __name__ == "__main__":
    main()
