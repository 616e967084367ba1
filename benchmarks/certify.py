"""The native engine beside auto_LiRPA, in one process, on one thread, in CPU time. Writes '## Certification' of docs/benchmarks.md.

    PYTHONPATH=DIR python benchmarks/certify.py --checkpoint RUN [--checkpoint RUN ...] [--data DIR] [--samples 100] [--compared 3]

DIR holds the auto_LiRPA to compare with: the registry has 0.3, the project's repository newer versions. It runs in float32 on the folded
network, the way people run it; native times include what decides: rounding paid for, and float64 where a margin is near 0.
"""

import argparse
import copy
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from sections import context, write_section
from torch import Tensor

import cure_ray
from cure_ray.bounds.engine import Stage
from cure_ray.bounds.lirpa import compat
from cure_ray.bounds.lirpa.engine import LirpaEngine
from cure_ray.bounds.native.effort import Effort
from cure_ray.bounds.native.engine import NativeEngine
from cure_ray.bounds.native.intermediate import crown_bounds
from cure_ray.bounds.native.linear import best_of_slopes
from cure_ray.bounds.native.relaxation import LayerBounds, Relaxation, interval_bounds, margin_rows
from cure_ray.data.images import load_dataset
from cure_ray.networks.models import Network, cnn7, ibp_init
from cure_ray.runs.checkpoints import load_checkpoint
from cure_ray.threats.balls import Ball
from cure_ray.threats.norms import P

PLAIN: tuple[Stage, ...] = ("ibp", "crown-ibp", "crown", "alpha-crown")
BRANCHED = 4  # open samples given to branch and bound
METHODS = {"ibp": "IBP", "crown-ibp": "CROWN-IBP", "crown": "CROWN", "alpha-crown": "CROWN-Optimized"}


def timed(run: Callable[[], Tensor]) -> tuple[Tensor, float]:
    started = time.process_time()
    result = run()
    return result, time.process_time() - started


class Peer:
    """auto_LiRPA in float32: 20 iterations for the final bound and for every hidden layer, its defaults otherwise."""

    def __init__(self, network: Network) -> None:
        self.lirpa = compat.load()
        self.engine = LirpaEngine(network)
        self.model = copy.deepcopy(self.engine._prepared.model).float()
        self.options = {"sparse_features_alpha": False, "sparse_spec_alpha": False, "conv_mode": "patches"}
        self.options["optimize_bound_args"] = {"iteration": 20, "lr_alpha": 0.1}

    def ready(self, x: Tensor, y: Tensor, threat: Ball, stage: Stage) -> Callable[[], Tensor]:
        """Everything prepared, so that only the bounds are timed; a fresh module, as 0.3 leaves optimised slopes behind."""
        bounded = self.lirpa.BoundedModule(self.model, self.engine._images(x[:1]).float(), bound_opts=copy.deepcopy(self.options))
        low = high = None
        if threat.norm == "linf":
            low, high = (self.engine._images((x + s * threat.eps).clamp(0, 1)).float() for s in (-1, 1))
        perturbation = self.lirpa.PerturbationLpNorm(norm=P[threat.norm], eps=threat.eps, x_L=low, x_U=high)
        image = self.lirpa.BoundedTensor(self.engine._images(x).float(), perturbation)
        rows = margin_rows(y, self.engine.num_classes, torch.float32)

        def run() -> Tensor:
            with torch.set_grad_enabled(stage == "alpha-crown"):
                lower, _ = bounded.compute_bounds(x=(image,), C=rows, method=METHODS[stage], bound_upper=False)
            return lower.detach().double()

        return run


def peer_options() -> str:
    """What the ratios are against: they mean nothing without it."""
    return (
        f"cure_ray {cure_ray.__version__} at its default iterations (8 for hidden bounds, 20 for margins) against auto_LiRPA "
        f"{compat.version()} (float32, conv_mode patches; alpha-CROWN: 20 iterations in all layers, lr_alpha 0.1); n is beside the method."
    )


def beside(
    network: Network, x_all: Tensor, y_all: Tensor, threats: list[Ball], stages: tuple[Stage, ...], alpha_samples: int = 1
) -> list[str]:
    """auto_LiRPA needs seconds a sample for slopes in all layers, so that row has fewer samples, on both sides.

    No early stop here: both take every step. auto_LiRPA has no box for l2 and l1: there its bounds are those of the ball."""
    engine, peer = NativeEngine(network, "cpu", effort=Effort(stop_early=False)), Peer(network)
    rows = []
    sets = [(threat, box) for threat in threats for box in ((True,) if threat.norm == "linf" else (False, True))]
    for threat, box in sets:
        for stage in stages:
            if stage == "alpha-crown" and threat.norm != "linf" and not box:
                continue  # minutes of the peer's time to say once more what the line on ball∩box says
            x, y = x_all, y_all
            count = len(y) if stage != "alpha-crown" else min(alpha_samples, len(y))
            x, y = x[:count], y[:count]
            problem = engine.problem(x, y, threat, box)
            engine.margins(problem.select(torch.tensor([0])), stage)  # warm both up
            ours, seconds = timed(lambda p=problem, s=stage: engine.margins(p, s))
            alone = seconds
            if stage != "alpha-crown":
                quick = problem.domain.to(torch.float32)
                alone = timed(lambda d=quick, s=stage, y=y: engine._crown(engine.search, d, y, s))[1]
            try:
                peer.ready(x[:1], y[:1], threat, "ibp")()
                theirs, other = timed(peer.ready(x, y, threat, stage))
                ratios = f"{other / alone:.1f}x | {other / seconds:.1f}x"
                right = f"{1e3 * other / len(y):.1f} | {theirs.mean():.3f} | {int((theirs > 0).all(1).sum())} | {ratios}"
            except (RuntimeError, IndexError, AssertionError) as error:
                right = f"failed ({type(error).__name__}) | | | |"
            left = f"{1e3 * alone / len(y):.1f} | {1e3 * seconds / len(y):.1f} | {ours.mean():.3f} | {int((ours > 0).all(1).sum())}"
            where = "ball∩box" if box else "ball"
            rows.append(f"| {threat}, {where} | {stage}, n={len(y)} | {left} | {right} |")
            print(rows[-1], flush=True)
    return rows


HEADER = (
    "| threat | method | ours, float32 alone, ms/sample | ours, decided | mean bound | verified "
    "| auto_LiRPA, float32, ms/sample | mean bound | verified | ratio, both float32 | ratio, decided |\n" + "|---" * 11 + "|"
)


def cascade(network: Network, x: Tensor, y: Tensor, threats: list[Ball], seconds: float) -> list[str]:
    """The stages one after the other on what is still open, with and without the box; then branch and bound on what is left."""
    engine = NativeEngine(network, "cpu")
    with torch.no_grad():
        correct = network(x).argmax(1) == y
    rows = []
    union = {True: correct.clone(), False: correct.clone()}
    for threat in threats:
        for box in (True, False):
            problem = engine.problem(x, y, threat, box)
            left, spent, per_stage = correct.nonzero()[:, 0], 0.0, []
            for stage in PLAIN:
                if len(left) == 0:
                    break
                part = problem.select(left)
                margins, cost = timed(lambda p=part, s=stage: engine.margins(p, s))
                spent += cost
                proven = (margins > 0).all(1)
                per_stage.append(f"{stage} {int(proven.sum())}")
                left = left[~proven]
            union[box][left] = False
            extra = ""
            if box and seconds and len(left):
                left = left[:BRANCHED]
                results = engine.branch(engine.problem(x[left], y[left], threat), seconds, 1_000_000)
                extra = f"{sum(bool((r.margins > 0).all()) for r in results)} of {len(left)} in {sum(r.seconds for r in results):.0f} s"
            certified = ", ".join(per_stage)
            rows.append(f"| {threat} | {'ball∩box' if box else 'ball'} | {certified} | {1e3 * spent / len(y):.1f} | {extra} |")
            print(rows[-1], flush=True)
    rows.append(
        f"\nUnion of the three without branch and bound: {int(union[True].sum())} of {len(y)} on ball∩box, "
        f"{int(union[False].sum())} of {len(y)} on the ball alone (linf without clipping)."
    )
    print(rows[-1])
    return rows


def union_in_one_pass(network: Network, x: Tensor, y: Tensor, threats: list[Ball]) -> list[str]:
    """One backward pass on the hull of the hidden bounds of all three norms, against one pass per norm."""
    engine = NativeEngine(network, "cpu")
    rows, net = [], engine.search
    for name in ("ibp", "crown"):
        domains = [engine.problem(x, y, t).domain.to(torch.float32) for t in threats]
        C = margin_rows(y, net.classes, torch.float32)
        hidden, cost = timed(
            lambda n=name, d=domains: [interval_bounds(net, q) if n == "ibp" else crown_bounds(net, q, 4_000_000) for q in d]
        )

        def certified(bounds_of: list[list[LayerBounds]], domains=domains, C=C, net=net) -> Tensor:
            values = [best_of_slopes(net, d, b, [Relaxation.of(q) for q in b], C) for d, b in zip(domains, bounds_of, strict=True)]
            return torch.stack([(v > 0).all(1) for v in values]).all(0)

        apart, apart_cost = timed(lambda h=hidden: certified(h))
        hull = [
            LayerBounds(
                torch.stack([q.lower_BN for q in layer]).amin(0), torch.stack([q.upper_BN for q in layer]).amax(0), layer[0].scale_BN
            )
            for layer in zip(*hidden, strict=True)
        ]
        joint, joint_cost = timed(lambda h=hull: certified([h] * 3))
        # The shared pass differs from one of the three only in two more concretisations: a third is its cost to a few percent.
        found, three, one = (1e3 * t / len(y) for t in (cost, apart_cost, joint_cost / 3))
        rows.append(f"| {name} | {found:.1f} | {three:.1f} | {int(apart.sum())} | {one:.1f} | {int(joint.sum())} |")
        print(rows[-1], flush=True)
    return rows


def memory_of_cnn7() -> str:
    """Peak memory of CROWN-IBP for 64 samples, in a process of its own."""
    code = "import certify; certify.cnn7_memory()"
    done = subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parent, capture_output=True, text=True, check=True)
    return done.stdout.strip().splitlines()[-1]


def random_cnn7() -> Network:
    torch.manual_seed(0)
    network = cnn7((1, 28, 28), 10, [0.0], [1.0])
    ibp_init(network)
    return network.eval()


def cnn7_memory() -> None:
    torch.set_num_threads(1)
    engine = NativeEngine(random_cnn7(), "cpu")
    x = torch.rand(64, 1, 28, 28)
    base = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    _, seconds = timed(lambda: engine.margins(engine.problem(x, torch.zeros(64, dtype=torch.long), Ball("linf", 0.1)), "crown-ibp"))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(f"{peak / 2**20:.2f} GB peak of the process ({base / 2**20:.2f} GB before the call), {1e3 * seconds / 64:.0f} ms/sample")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", action="append", default=[])
    parser.add_argument("--data")
    parser.add_argument("--samples", type=int, default=100)
    parser.add_argument("--compared", type=int, default=3, help="samples for the comparison with auto_LiRPA")
    parser.add_argument("--seconds", type=float, default=10.0, help="branch and bound budget per sample")
    parser.add_argument("--no-cnn7", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    body = [context(0, 1), ""]
    for path in arguments.checkpoint:
        checkpoint = load_checkpoint(path)
        experiment = checkpoint.experiment
        images = load_dataset(experiment.dataset, "test", arguments.data, download=False)
        x, y = images.batch(torch.arange(arguments.samples))
        threats = [Ball(norm, float(getattr(experiment.threats, norm))) for norm in ("linf", "l2", "l1")]
        name = f"{experiment.network.name} on {experiment.dataset.name}, method {experiment.training.method}, epoch {checkpoint.epoch}"
        print(name, threats)
        with torch.no_grad():
            right = (checkpoint.network(x).argmax(1) == y).nonzero()[:, 0][: arguments.compared]
        body += [f"### {name}", "", f"Side by side, the first {len(right)} correctly classified test images. {peer_options()}", "", HEADER]
        body += beside(checkpoint.network, x[right], y[right], threats, PLAIN)
        budget = f"branch and bound: {arguments.seconds:g} s a sample, the first {BRANCHED} open ones"
        body += [
            "",
            f"The cascade on the first {len(y)} test images ({budget}):",
            "",
        ]
        body += [
            "| threat | set | certified by stage | ms/sample, without branch and bound | branch and bound proves |",
            "|---|---|---|---|---|",
        ]
        body += cascade(checkpoint.network, x, y, threats, arguments.seconds)
        body += ["", "Union in one pass (hull of the hidden bounds of all norms) against one pass per norm, ms/sample:", ""]
        body += ["| hidden bounds | finding them | three passes | certified | one pass | certified |", "|---|---|---|---|---|---|"]
        body += union_in_one_pass(checkpoint.network, x[right], y[right], threats)
        body.append("")
    if not arguments.no_cnn7:
        network = random_cnn7()
        x = torch.rand(4, 1, 28, 28, generator=torch.Generator().manual_seed(0))
        body += ["### CNN7, width 64, random (IBP initialisation), 4 random images", "", HEADER]
        body += beside(network, x, torch.zeros(4, dtype=torch.long), [Ball("linf", 0.1)], ("ibp", "crown-ibp"))
        body += ["", f"CROWN-IBP for 64 samples: {memory_of_cnn7()}."]
    write_section("Certification", "\n".join(body))


if __name__ == "__main__":
    main()
