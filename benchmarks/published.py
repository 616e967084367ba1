"""Published l2 networks under the whole cascade, beside what was published about them.

    python benchmarks/published.py --weights DIR [--nodes 1000] [--only lipschitz-mnist-mlp]

The networks are those that cure_ray/zoo/published/ describes. DIR holds the weights as NAME.safetensors (or .pt, .mat; hyphens may be
underscores), and sdp_cifar_200.npz with the 200 CIFAR-10 images (uint8) and labels the authors chose: from the repository of SDP-CROWN
(Chiu, Chen, Zhang and Zhang, ICML 2025), whose table the published figures are.
Every verdict is the cascade's: attack, bounds on ball∩[0, 1], branch and bound. CPU time of one process.
"""

import argparse
import time
from pathlib import Path

import torch
from sections import context, write_section

import cure_ray
from cure_ray.api.judge import published_samples, take
from cure_ray.zoo.published import Published, all_published

NETWORKS = {name: described for name, described in all_published().items() if name.startswith("lipschitz-")}
IMAGES = {"lipschitz-cifar10-cnn-a": "sdp_cifar_200.npz"}
HEADER = [
    "| network, l2 radius | n | clean | by bounds | certified | not broken | open | CPU s a sample | published, certified / not broken |",
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
    certified = ", ".join(f"{f.certifier} {f.value:g}" for f in described.figures if f.what == "certified")
    return f"{certified} / {', '.join(f'{f.value:g}' for f in described.figures if f.what == 'not broken')}"


def row(name: str, weights: Path, nodes: int, seed: int) -> str:
    described = NETWORKS[name]
    network = take(described, weights_of(described, weights)).network
    samples = published_samples(described, weights / IMAGES[name] if name in IMAGES else None)
    (threat,) = described.protocol.read()
    started = time.process_time()
    found = cure_ray.certify(network, samples.images, samples.labels, [threat], nodes=nodes, seed=seed).verdicts
    seconds = time.process_time() - started
    status = found["status"].value_counts()
    percent = 100 / len(found)
    certified, clean = status.get("certified", 0), len(found) - status.get("misclassified", 0)
    alone = ((found["status"] == "certified") & (found["stage"] != "branch-and-bound")).sum()
    cells = [
        f"{name}, {threat.eps:.4g}", len(found), f"{clean * percent:.1f}", f"{alone * percent:.1f}", f"{certified * percent:.1f}",
        f"{(clean - status.get('falsified', 0)) * percent:.1f}", clean - certified - status.get("falsified", 0),
        f"{seconds / len(found):.2f}",
        published_figures(described),
    ]  # fmt: skip
    return "| " + " | ".join(map(str, cells)) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", type=Path, required=True)
    parser.add_argument("--nodes", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=NETWORKS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    lines = [row(name, options.weights, options.nodes, options.seed) for name in NETWORKS if options.only in (None, name)]
    print("\n".join([*HEADER, *lines]))
    if options.only is None:
        write_section("Published l2 networks", "\n".join([context(options.seed, 1), "", *HEADER, *lines]))


if __name__ == "__main__":
    main()
