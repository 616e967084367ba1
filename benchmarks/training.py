"""CPU time of one training step at full radius, per method: ours, a textbook implementation, and the passes no one can avoid.

    python benchmarks/training.py            # small nets and CNN7 at widths 0.5 and 1; about ten minutes on one core
    python benchmarks/training.py --quick    # small nets only

The floor of a method is the sum of the plain passes it needs, measured in the same run through PyTorch's own modules in the same
memory layout: per norm 8 forward plus input-gradient passes and two forward-and-backward passes (centre, radius), a third one (the
attacked point) for the losses mtl, cc and exp, plus one clean forward and backward.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from sections import context, write_section
from textbook import loss as textbook_loss

from cure_ray.config import Experiment, resolve
from cure_ray.networks.build import new_network
from cure_ray.networks.sequence import read_blocks
from cure_ray.training.epochs import ONE_PROCESS, Learner, _streams
from cure_ray.training.loop import place
from cure_ray.training.projection import merge
from cure_ray.training.step import certified_step, natural_step

METHODS = ("natural", "linf", "l2", "joint", "max", "random", "scratch", "linf mtl", "joint mtl", "joint cc", "joint exp")
NORMS_OF = {"natural": 0, "linf": 1, "l2": 1, "joint": 2, "max": 2, "random": 1, "scratch": 2}  # random: two halves
TEXTBOOK = {**{name: name for name in METHODS if " " not in name or name == "linf mtl"}, "scratch": "max"}
EPS, RATIO = {"linf": 0.1, "l2": 0.5}, {"linf": 0.4, "l2": 1e-5}


def described(network: str, width: float, batch: int, name: str) -> Experiment:
    """A row's experiment: a method, and behind it the loss of its norms if that is not SABR's."""
    method, _, loss = name.partition(" ")
    return resolve(
        {
            "preset": "mnist-small",
            "network": {"name": network, "width": width},
            "training": {"method": method, "batch_size": batch, "l1_weight": 0.0, **({"loss": loss} if loss else {})},
        }
    )


def interleaved(work: dict[str, Callable[[], None]], rounds: int) -> dict[str, float]:
    """Median CPU seconds of each, taken in turns so that a noisy machine disturbs all alike."""
    times: dict[str, list[float]] = {name: [] for name in work}
    for name in work:
        work[name]()
    for _ in range(rounds):
        for name in work:
            start = time.process_time()
            work[name]()
            times[name].append(time.process_time() - start)
    return {name: statistics.median(values) for name, values in times.items()}


def measure(network_name: str, width: float, batch: int, rounds: int) -> list[str]:
    torch.manual_seed(0)
    x = torch.rand(batch, 1, 28, 28).contiguous(memory_format=torch.channels_last)
    x_plain, y = x.contiguous(), torch.randint(10, (batch,))
    work: dict[str, Callable[[], None]] = {}
    for method in METHODS:
        experiment = described(network_name, width, batch, method)
        network = new_network(experiment)
        place(network, torch.device("cpu"), True)
        learner, blocks, parameters = Learner.of(network, 1e-4), read_blocks(network), list(network.parameters())

        def ours(method=method, experiment=experiment, learner=learner, blocks=blocks, parameters=parameters) -> None:  # type: ignore[no-untyped-def]
            if method == "natural":
                result = natural_step(blocks, x, y, ONE_PROCESS)
            else:
                streams = _streams(experiment, 30, torch.device("cpu"), ONE_PROCESS)
                result = certified_step(blocks, x, y, 1.0, experiment, streams, parameters, ONE_PROCESS)
            learner.optimizer.zero_grad(set_to_none=True)
            result.loss.backward()
            learner.optimizer.step()

        work[method] = ours
        if method not in TEXTBOOK:
            continue
        twin = new_network(experiment)
        twin_learner = Learner.of(twin, 1e-4)

        def textbook(method=method, twin=twin, twin_learner=twin_learner) -> None:  # type: ignore[no-untyped-def]
            twin_learner.optimizer.zero_grad(set_to_none=True)
            textbook_loss(twin, x_plain, y, TEXTBOOK[method], EPS, RATIO).backward()
            twin_learner.optimizer.step()

        work[f"textbook {method}"] = textbook
    plain = new_network(described(network_name, width, batch, "linf"))
    place(plain, torch.device("cpu"), True)
    frozen = new_network(described(network_name, width, batch, "linf")).eval().requires_grad_(False)
    place(frozen, torch.device("cpu"), True)

    def attack_pass() -> None:
        z = x.detach().clone().requires_grad_()
        torch.autograd.grad(F.cross_entropy(frozen(z), y), z)

    def train_pass() -> None:
        plain.zero_grad(set_to_none=True)
        F.cross_entropy(plain(x), y).backward()

    seconds = interleaved({**work, "attack pass": attack_pass, "train pass": train_pass}, rounds)
    a, t = seconds["attack pass"], seconds["train pass"]
    rows = []
    for method in METHODS:
        base, _, loss = method.partition(" ")
        floor = t if base == "natural" else NORMS_OF[base] * (8 * a + (3 if loss else 2) * t) + t
        own, other = seconds[method], seconds.get(f"textbook {method}")
        compared = f"{1e3 * other:.0f} | {other / own:.2f}" if other else " | "
        times = f"{1e3 * own:.0f} | {1e3 * floor:.0f} | {own / floor:.2f}"
        rows.append(f"| {network_name} x{width:g}, batch {batch} | {method} | {times} | {compared} |")
    dearer = ", ".join(f"{seconds[name] / seconds['joint']:.2f}" for name in ("joint mtl", "joint cc", "joint exp"))
    rows.append(
        f"| {network_name} x{width:g}, batch {batch} | ratios | scratch / max {seconds['scratch'] / seconds['max']:.2f} "
        f"| random / joint {seconds['random'] / seconds['joint']:.2f} | joint mtl, cc, exp / joint {dearer} "
        f"| linf mtl / linf {seconds['linf mtl'] / seconds['linf']:.2f} | |"
    )
    return rows


def merge_row(width: float) -> str:
    network = new_network(described("cnn7", width, 64, "scratch"))
    state = {k: v.clone() for k, v in network.state_dict().items()}
    start = time.process_time()
    merge(state, {k: v + 0.1 for k, v in state.items()}, {k: v - 0.1 for k, v in state.items()}, 0.5)
    return f"Merging two CNN7 x{width:g} branches (once per epoch): {time.process_time() - start:.2f} s."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small networks only, result printed but not written")
    quick = parser.parse_args().quick
    torch.set_num_threads(1)
    plan = [("mlp", 1.0, 256, 9), ("conv-small", 1.0, 256, 7)]
    if not quick:
        plan += [("cnn7", 0.5, 64, 3), ("cnn7", 1.0, 64, 3)]
    rows = [row for net in plan for row in measure(*net)]
    header = "| network | method | ours, ms | floor, ms | ours / floor | textbook, ms | textbook / ours |\n|---|---|---|---|---|---|---|"
    body = (
        f"{context(0, 1)}\n\nMedian CPU milliseconds of one full-radius step on 28x28 images. `floor` is the sum of the plain passes a "
        "method cannot avoid; `textbook` is benchmarks/textbook.py. Steps of all kinds are taken in turns.\n\n"
        f"{header}\n" + "\n".join(rows) + f"\n\n{merge_row(1.0)}"
    )
    print(body)
    if not quick:
        write_section("Training", body)


if __name__ == "__main__":
    main()
