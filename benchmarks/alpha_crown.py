"""alpha-CROWN with slopes in all layers, in l_inf, beside auto_LiRPA, on one thread. Writes '## alpha-CROWN' of docs/benchmarks.md.

    PYTHONPATH=DIR python benchmarks/alpha_crown.py --checkpoint RUN [--samples 8] [--batch 8]

DIR holds the auto_LiRPA to compare with: the registry has 0.3, the project's repository newer versions. Both sides optimise the slopes of
every hidden layer and of the margins, and take every iteration: ours has no early stop here. The mean bound says what the time bought.
"""

import argparse

import torch
from certify import Peer, timed
from sections import context, write_section

import cure_ray
from cure_ray.bounds.lirpa import compat
from cure_ray.bounds.native.effort import Effort
from cure_ray.bounds.native.engine import NativeEngine
from cure_ray.data.images import load_dataset
from cure_ray.runs.checkpoints import load_checkpoint
from cure_ray.threats.balls import Ball


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", required=True)
    parser.add_argument("--data")
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--batch", type=int, default=8, help="samples bounded together, on both sides")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    checkpoint = load_checkpoint(arguments.checkpoint)
    experiment, network = checkpoint.experiment, checkpoint.network
    threat = Ball("linf", float(experiment.threats.linf))
    images = load_dataset(experiment.dataset, "test", arguments.data, download=False)
    x, y = images.batch(torch.arange(min(400, len(images))))
    with torch.no_grad():
        right = (network(x).argmax(1) == y).nonzero()[:, 0]
    plain = NativeEngine(network, "cpu")
    open_ = ~(plain.margins(plain.problem(x[right], y[right], threat), "crown") > 0).all(1)
    chosen = right[open_][: arguments.samples]  # what plain CROWN leaves open: the samples slopes are optimised for
    x, y, lines, times = x[chosen], y[chosen], list[str](), dict[str, float]()
    peer = Peer(network)
    for batch in sorted({1, arguments.batch}):
        for name, iterations, hidden in (("ours, default", 20, 8), ("ours", 20, 20), ("auto_LiRPA", 20, 20)):
            bounds, seconds = [], 0.0
            for some, labels in zip(x.split(batch), y.split(batch), strict=True):
                if name == "auto_LiRPA":
                    found, spent = timed(peer.ready(some, labels, threat, "alpha-crown"))
                else:
                    engine = NativeEngine(network, "cpu", effort=Effort(iterations=iterations, hidden_iterations=hidden, stop_early=False))
                    problem = engine.problem(some, labels, threat)
                    found, spent = timed(lambda e=engine, p=problem: e.margins(p, "alpha-crown"))
                bounds.append(found)
                seconds += spent
            times[name] = seconds
            worst, ratio = torch.cat(bounds).amin(1), times.get("ours, default", 0.0)
            who = f"auto_LiRPA {compat.version()}" if name == "auto_LiRPA" else f"cure_ray {cure_ray.__version__}"
            lines.append(
                f"| {who} | {iterations} / {hidden} | {batch} | {len(y)} | {1e3 * seconds / len(y):.0f} | {seconds / ratio:.1f}x "
                f"| {seconds / times['ours']:.1f}x | {float(worst.mean()):.4f} | {int((worst > 0).sum())} |"
                if "ours" in times
                else f"| {who} | {iterations} / {hidden} | {batch} | {len(y)} | {1e3 * seconds / len(y):.0f} | 1.0x | "
                f"| {float(worst.mean()):.4f} | {int((worst > 0).sum())} |"
            )
            print(lines[-1], flush=True)
        times.clear()
    what = (
        f"{experiment.network.name} on {experiment.dataset.name}, method {experiment.training.method}, epoch {checkpoint.epoch}, {threat}"
    )
    body = [
        context(0, 1),
        "",
        f"{what}: the first {len(y)} test images that are classified correctly and that CROWN leaves open. Slopes are "
        "optimised in all layers; the columns of iterations are for the margins and for each hidden bound. auto_LiRPA runs in float32 with "
        "lr_alpha 0.1 and its defaults otherwise; ours searches in float32 and evaluates in float64, which its time includes, and stops "
        "nowhere early.",
        "",
        "| engine | iterations, margins / hidden | batch | n | CPU ms/sample | times our default | times ours at 20 / 20 "
        "| mean worst margin | proven |",
        "|---|---|---|---|---|---|---|---|---|",
        *lines,
    ]
    write_section("alpha-CROWN", "\n".join(body))


if __name__ == "__main__":
    main()
