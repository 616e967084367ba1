"""Published l2 networks under the whole cascade, beside what was published about them.

    python benchmarks/published.py --weights DIR [--nodes 1000] [--only lipschitz_mnist_mlp]

DIR holds the weights as safetensors whose keys fit the networks below, and sdp_mnist_200.npz and sdp_cifar_200.npz with the 200 images each
(uint8) and labels: from the repository of SDP-CROWN (Chiu, Chen, Zhang and Zhang, ICML 2025), whose table the published figures are.
Every verdict is the cascade's: attack, bounds on ball∩[0, 1], branch and bound. CPU time of one process.
"""

import argparse
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file
from sections import context, write_section
from torch import Tensor, nn

import cure_ray
from cure_ray.networks.models import Normalize


def conv_small(channels: int, wide: int) -> list[nn.Module]:
    conv = [nn.Conv2d(channels, 16, 4, 2, 1), nn.ReLU(), nn.Conv2d(16, 32, 4, 2, 1), nn.ReLU(), nn.Flatten()]
    return [*conv, nn.Linear(wide, 100), nn.ReLU(), nn.Linear(100, 10)]


def mlp() -> list[nn.Module]:
    return [nn.Flatten(), nn.Linear(784, 100), nn.ReLU(), nn.Linear(100, 100), nn.ReLU(), nn.Linear(100, 10)]


@dataclass(frozen=True)
class Published:
    images: str
    layers: list[nn.Module]
    radius: float
    figures: str  # certified / not broken by an attack, as published


NETWORKS = {
    "lipschitz_mnist_convsmall": Published(
        "sdp_mnist_200.npz", conv_small(1, 1568), 0.3, "SDP-CROWN 81.5, norms 77.5, beta-CROWN 16 / 84.5"
    ),
    "lipschitz_mnist_mlp": Published("sdp_mnist_200.npz", mlp(), 1.0, "SDP-CROWN 32.5, beta-CROWN 36, semidefinite programme 53 / 54"),
    "lipschitz_cifar10_cnn_a": Published(
        "sdp_cifar_200.npz",
        [Normalize((125.3 / 255, 123.0 / 255, 113.9 / 255), (0.225, 0.225, 0.225)), *conv_small(3, 2048)],
        24 / 255,
        "SDP-CROWN 49, beta-CROWN 20 / 55.5",
    ),
}
HEADER = [
    "| network, l2 radius | n | clean | by bounds | certified | not broken | open | CPU s a sample | published, certified / not broken |",
    "|---|---|---|---|---|---|---|---|---|",
]


def samples(path: Path) -> tuple[Tensor, Tensor]:
    with np.load(path) as file:
        arrays = [torch.from_numpy(file[name]) for name in file.files]
    x, y = sorted(arrays, key=lambda a: -a.dim())
    x = x.unsqueeze(1) if x.dim() == 3 else x
    return x.float() / 255, y.long()


def row(name: str, weights: Path, nodes: int, seed: int) -> str:
    published = NETWORKS[name]
    network = nn.Sequential(*published.layers)
    network.load_state_dict(load_file(weights / f"{name}.safetensors"))
    x, y = samples(weights / published.images)
    started = time.process_time()
    found = cure_ray.certify(network.eval(), x, y, threats=f"l2={published.radius!r}", nodes=nodes, seed=seed).verdicts
    seconds = time.process_time() - started
    status = found["status"].value_counts()
    percent = 100 / len(found)
    certified, clean = status.get("certified", 0), len(found) - status.get("misclassified", 0)
    alone = ((found["status"] == "certified") & (found["stage"] != "branch-and-bound")).sum()
    cells = [
        f"{name}, {published.radius:.4g}", len(found), f"{clean * percent:.1f}", f"{alone * percent:.1f}", f"{certified * percent:.1f}",
        f"{(clean - status.get('falsified', 0)) * percent:.1f}", clean - certified - status.get("falsified", 0),
        f"{seconds / len(found):.2f}",
        published.figures,
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
