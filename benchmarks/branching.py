"""Branch and bound on samples alpha-CROWN leaves open, by node budget, with and without giving up the hopeless ones.

    python benchmarks/branching.py --checkpoint results/mnist-study/runs/max-seed0 [--checkpoint ...] --data DIR

Both ways run in one process, one after the other on the same samples, and are compared by CPU time. Writes the section "Branch and
bound" of docs/benchmarks.md.
"""

import argparse
import time

import torch
from sections import context, write_section
from torch import Tensor

from cure_ray.bounds.engine import Branching
from cure_ray.bounds.native.branching import Settings
from cure_ray.bounds.native.effort import Effort
from cure_ray.bounds.native.engine import NativeEngine
from cure_ray.data.images import load_dataset
from cure_ray.runs.checkpoints import load_checkpoint
from cure_ray.threats.balls import Ball

BUDGETS = (20, 100, 1000)
NEVER = Settings(hope=0.0)
PROVEN = " | ".join(f"proven with {n:,} nodes" for n in BUDGETS)
HEADER = [
    f"| network, threat | open | {PROVEN} | without giving up | nodes | CPU seconds |",
    "|---|---|" + "---|" * (len(BUDGETS) + 3),
]


def open_samples(engine: NativeEngine, x: Tensor, y: Tensor, threat: Ball, most: int) -> Tensor:
    """The first samples alpha-CROWN neither proves nor the network misclassifies."""
    with torch.no_grad():
        right = (engine.network(x).argmax(1) == y).nonzero()[:, 0]
    margins = engine.margins(engine.problem(x[right], y[right], threat), "alpha-crown")
    return right[~(margins > 0).all(1)][:most]


def searched(
    network: torch.nn.Sequential, settings: Settings | None, x: Tensor, y: Tensor, threat: Ball, nodes: int
) -> tuple[list[Branching], float]:
    engine = NativeEngine(network, "cpu", effort=Effort(branching=settings or Settings()))
    problem = engine.problem(x, y, threat)
    engine.margins(problem, "alpha-crown")
    started = time.process_time()
    return engine.branch(problem, 1e9, nodes), time.process_time() - started


def proven(found: list[Branching]) -> int:
    return sum(bool((f.margins > 0).all()) for f in found)


def row(name: str, network: torch.nn.Sequential, x: Tensor, y: Tensor, threat: Ball, most: int) -> str:
    index = open_samples(NativeEngine(network, "cpu"), x, y, threat, most)
    cells = [f"{name}, {threat}", str(len(index))]
    if len(index) == 0:
        return "| " + " | ".join([*cells, *["-"] * (len(BUDGETS) + 3)]) + " |"
    runs = [searched(network, None, x[index], y[index], threat, nodes) for nodes in BUDGETS]
    stubborn, slow = searched(network, NEVER, x[index], y[index], threat, BUDGETS[-1])
    found, fast = runs[-1]
    mean = [sum(f.nodes for f in each) / len(index) for each in (found, stubborn)]
    cells += [str(proven(each)) for each, _ in runs]
    cells += [str(proven(stubborn)), f"{mean[0]:.0f} instead of {mean[1]:.0f}", f"{fast / slow:.2f} of {slow / len(index):.2f} s a sample"]
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", action="append", required=True)
    parser.add_argument("--data")
    parser.add_argument("--samples", type=int, default=200, help="test images to look for open ones in")
    parser.add_argument("--open", type=int, default=40, help="open samples per network and threat")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    lines = [context(0, 1), "", *HEADER]
    for path in arguments.checkpoint:
        checkpoint = load_checkpoint(path)
        experiment = checkpoint.experiment
        x, y = load_dataset(experiment.dataset, "test", arguments.data, download=False).batch(torch.arange(arguments.samples))
        for norm in ("l2", "l1"):
            threat = Ball(norm, float(getattr(experiment.threats, norm)))
            lines.append(row(f"{experiment.name}, seed {experiment.seed}", checkpoint.network, x, y, threat, arguments.open))
            print(lines[-1], flush=True)
    lines += [
        "",
        f"The first {arguments.open} of the first {arguments.samples} test images that alpha-CROWN leaves open; attacks would "
        "break some of them. Networks are called as in docs/results.md. A budget is looked at every 16 splits, so 20 nodes may be 50. "
        f"*Without giving up*: proven with {BUDGETS[-1]:,} nodes when no sample is given up; nodes and CPU seconds "
        "(of branch and bound alone) compare the two.",
    ]
    write_section("Branch and bound", "\n".join(lines))


if __name__ == "__main__":
    main()
