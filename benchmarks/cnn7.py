"""CNN7, the paper's network, under the whole cascade: certified beside not broken, CPU seconds a sample, the most memory.

    python benchmarks/cnn7.py RUN [--samples 50] [--nodes 100]

RUN is a finished run of `network.name=cnn7`, e.g. of
    cure-ray train mmr-universal-mnist --set name=cnn7-half --set network.name=cnn7 --set network.width=0.5 --set threats.l1=0.5
        --set dataset.train_samples=5120 --set training.batch_size=64 --set training.epochs=9 --set training.anneal_epochs=4
        --set training.lr=1e-3 --set training.lr_milestones=[7,8] --set training.norms=[linf,l1] --set dataset.augment=false
        --set training.attack.steps=2
(a quarter of an hour on one core when nothing else runs; 20 minutes at width 1 with 2048 images). One process, one thread; the memory is
that of the whole process.
"""

import argparse
import resource
import time
from pathlib import Path

import torch
from sections import context, write_section

import cure_ray

HEADER = [
    "| threat | n | clean | by bounds | certified | not broken | open | CPU s a sample | GB |",
    "|---|---|---|---|---|---|---|---|---|",
]


def row(run: Path, threat: str, samples: int, nodes: int) -> str:
    started = time.process_time()
    found = cure_ray.certify(run, threats=threat, samples=samples, nodes=nodes, quiet=True).verdicts
    seconds = time.process_time() - started
    status, percent = found["status"].value_counts(), 100 / len(found)
    certified, falsified = status.get("certified", 0), status.get("falsified", 0)
    clean = len(found) - status.get("misclassified", 0)
    alone = ((found["status"] == "certified") & (found["stage"] != "branch-and-bound")).sum()
    shares = [f"{count * percent:.1f}" for count in (clean, alone, certified, clean - falsified)]
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    cells = [threat, len(found), *shares, clean - certified - falsified, f"{seconds / len(found):.2f}", f"{memory:.1f}"]
    return "| " + " | ".join(map(str, cells)) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--samples", type=int, default=50)
    parser.add_argument("--nodes", type=int, default=100)
    parser.add_argument("--threats", default="linf=0.1,l2=0.3,l1=0.5")
    options = parser.parse_args()
    torch.set_num_threads(1)
    lines = [row(options.run, threat, options.samples, options.nodes) for threat in options.threats.split(",")]
    experiment = cure_ray.load_experiment(options.run / "experiment.yaml")
    network, images = experiment.network, experiment.dataset.train_samples
    trained = f"trained on {images or 'all'} images of MNIST, otherwise as the head of the script says"
    note = f"CNN7 at width {network.width:g}, {trained}; first {options.samples} test images."
    print("\n".join([*HEADER, *lines]))
    write_section(f"CNN7 at width {network.width:g}", "\n".join([context(0, 1), note, "", *HEADER, *lines]))


if __name__ == "__main__":
    main()
