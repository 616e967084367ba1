"""What a proven answer costs beside the same bounds in float32, which prove nothing. Goal: at most 1.5 times as much.

    python benchmarks/deciding.py --checkpoint zoo/mmr-mnist-random [--data DIR] [--turns 12]

`margins` of every plain stage on ball∩[0, 1], as the engine decides, and the pass in float32 alone, in turns; CPU time of one thread, the
least of all turns of each.
"""

import argparse
import time
from collections.abc import Callable

import torch
from sections import context, write_section

from cure_ray.bounds.arithmetic import exact_arithmetic
from cure_ray.bounds.native.engine import NativeEngine
from cure_ray.data.images import load_dataset
from cure_ray.runs.checkpoints import load_checkpoint
from cure_ray.threats.balls import Ball

STAGES = ("ibp", "crown-ibp", "crown")
BATCHES = (8, 64)


def seconds(run: Callable[[], object]) -> float:
    started = time.process_time()
    with torch.no_grad(), exact_arithmetic():
        run()
    return time.process_time() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", required=True, help="a run directory or a network of the zoo")
    parser.add_argument("--data")
    parser.add_argument("--turns", type=int, default=12)
    options = parser.parse_args()
    torch.set_num_threads(1)
    checkpoint = load_checkpoint(options.checkpoint)
    network, experiment = checkpoint.network, checkpoint.experiment
    x, y = load_dataset(experiment.dataset, "test", options.data, download=False).batch(torch.arange(2 * max(BATCHES)))
    with torch.no_grad():
        right = (network(x).argmax(1) == y).nonzero()[:, 0]
    engine = NativeEngine(network, "cpu")
    threats = [Ball(norm, float(getattr(experiment.threats, norm))) for norm in ("linf", "l2", "l1")]
    rows = ["| stage | n | " + " | ".join(map(str, threats)) + " |", "|---" * 5 + "|"]
    for stage in STAGES:
        for n in BATCHES:
            cells = []
            for threat in threats:
                problem = engine.problem(x[right[:n]], y[right[:n]], threat)
                quick = problem.domain.to(torch.float32)
                turns = [
                    (
                        seconds(lambda p=problem, s=stage: engine.margins(p, s)),
                        seconds(lambda d=quick, p=problem, s=stage: engine._crown(engine.search, d, p.y_B, s)),
                    )
                    for _ in range(options.turns)
                ]
                decided, alone = (min(each) for each in zip(*turns, strict=True))
                cells.append(f"{decided / alone:.1f} ({1e3 * decided / n:.2f} ms)")
            rows.append(f"| {stage} | {n} | " + " | ".join(cells) + " |")
            print(rows[-1], flush=True)
    what = (
        f"{experiment.network.name} on {experiment.dataset.name}, {experiment.name}, the first n correctly classified test images, ball∩box"
    )
    read = "Cost of a decided answer as a multiple of the same bounds in float32, which prove nothing, and its CPU milliseconds a sample."
    write_section("Deciding beside a pass in float32", "\n".join([context(0, 1), "", f"{what}. {read}", "", *rows]))


if __name__ == "__main__":
    main()
