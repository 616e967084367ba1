"""How much the attack breaks of what bounds leave open. Writes '## Attacks' of docs/benchmarks.md.

    PYTHONPATH=DIR python benchmarks/attacks.py --results quickstart/results [--samples 1000]

DIR may hold torchattacks (`pip install --target DIR --no-deps torchattacks`) and foolbox; what is missing is left out and said. Every
candidate, theirs too, is put into ball∩box and replayed in float64 before it counts. The whole is what any of the attacks breaks.
"""

import argparse
import importlib
import importlib.metadata
import time
from collections.abc import Callable
from pathlib import Path

import torch
from sections import context, write_section
from torch import Tensor

import cure_ray
from cure_ray.api.subject import run_subject
from cure_ray.attacks import STRENGTHS, AttackSettings, attack, check_witness, replay_network
from cure_ray.networks.models import Network
from cure_ray.threats.balls import Ball

Attack = Callable[[Network, Tensor, Tensor, Ball], Tensor]  # candidates [B, C, H, W]
ENSEMBLE = AttackSettings(60, 96, vertices=48)  # three times as many steps as `strong`, from starts of its own


def ours(settings: AttackSettings, seed: int) -> Attack:
    return lambda network, x, y, threat: attack(network, x, y, threat, [seed * 10_000 + i for i in range(len(x))], settings)


def torchattacks(network: Network, x: Tensor, y: Tensor, threat: Ball) -> Tensor | None:
    """APGD with cross-entropy and with DLR, then targeted at nine classes: AutoAttack's white-box part. There is no l1 in it."""
    if threat.norm == "l1":
        return None
    library = importlib.import_module("torchattacks")
    norm = {"linf": "Linf", "l2": "L2"}[threat.norm]
    common = {"norm": norm, "eps": threat.eps, "steps": 50, "seed": 0}
    attacks = [library.APGD(network, loss=loss, n_restarts=2, **common) for loss in ("ce", "dlr")]
    return merged(network, x, y, threat, [a(x, y) for a in [*attacks, library.APGDT(network, n_classes=network.num_classes, **common)]])


def foolbox(network: Network, x: Tensor, y: Tensor, threat: Ball) -> Tensor:
    """Projected gradient descent of each norm with ten random starts, and in l2 Carlini and Wagner, DDN; in l1 elastic nets."""
    library = importlib.import_module("foolbox")
    names = {
        "linf": ["LinfProjectedGradientDescentAttack"],
        "l2": ["L2ProjectedGradientDescentAttack", "DDNAttack", "L2CarliniWagnerAttack"],
        "l1": ["SparseL1DescentAttack", "EADAttack"],
    }[threat.norm]
    wrapped, found = library.PyTorchModel(network, bounds=(0, 1)), list[Tensor]()
    options = {"L2CarliniWagnerAttack": {"binary_search_steps": 5, "steps": 200}, "EADAttack": {"binary_search_steps": 5, "steps": 200}}
    for name in names:
        made = getattr(library.attacks, name)(**options.get(name, {"steps": 50}))
        random = "Descent" in name
        made = made.repeat(10) if random else made
        found.append(made(wrapped, x, library.criteria.Misclassification(y), epsilons=threat.eps)[1])
    return merged(network, x, y, threat, found)


def merged(network: Network, x: Tensor, y: Tensor, threat: Ball, found: list[Tensor]) -> Tensor:
    """The candidate of each sample that replays best."""
    replay = replay_network(network)
    margins = torch.stack([check_witness(replay, x, y, candidate, threat).margins for candidate in found])
    best = margins.argmin(0)
    return torch.stack(found)[best, torch.arange(len(x))]


def broken(network: Network, x: Tensor, y: Tensor, threat: Ball, how: Attack) -> tuple[Tensor, float] | None:
    """Which samples fall, and CPU seconds."""
    started = time.process_time()
    candidates = how(network, x, y, threat)
    if candidates is None:
        return None
    return check_witness(replay_network(network), x, y, candidates, threat).valid, time.process_time() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, required=True, help="a store of cure-ray certify")
    parser.add_argument("--data", help="where data sets are")
    parser.add_argument("--samples", type=int, default=1000, help="undecided samples per norm, at most")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    attacks: dict[str, Attack] = {
        "default": ours(STRENGTHS["default"], 0), "strong": ours(STRENGTHS["strong"], 0), "ensemble": ours(ENSEMBLE, 1),
    }  # fmt: skip
    absent = []
    for name, run in (("torchattacks", torchattacks), ("foolbox", foolbox)):
        try:
            importlib.import_module(name)
            attacks[f"{name} {importlib.metadata.version(name)}"] = run
        except ImportError:
            absent.append(name)
    store = cure_ray.load_results(arguments.results)
    rows = store.verdicts
    (digest,) = rows["checkpoint_digest"].unique()  # one network
    about = store.loaded.stores[0].about(digest)
    subject = run_subject(Path(about["checkpoint"]), data_dir=arguments.data)
    network, samples = subject.network, subject.samples
    left = rows[rows["status"].isin(["unknown", "timeout", "falsified"]) & (rows["family"] == "lp")]
    lines, shares = list[str](), dict[str, list[int]]()
    for norm, eps in sorted(set(zip(left["norm"], left["eps"], strict=True)), reverse=True):
        chosen = left.loc[(left["norm"] == norm) & (left["eps"] == eps), "sample_index"].tolist()[: arguments.samples]
        x, y, threat = samples.images[chosen], samples.labels[chosen], Ball(norm, eps)
        results = {name: broken(network, x, y, threat, how) for name, how in attacks.items()}
        whole = torch.stack([r[0] for r in results.values() if r is not None]).any(0)
        for name, result in results.items():
            if result is None:
                lines.append(f"| {threat} | {len(chosen)} | {name} | not offered | | |")
                continue
            count, total = int(result[0].sum()), int(whole.sum())
            shares.setdefault(name, []).append(count)
            shares.setdefault("whole " + name, []).append(total)
            rate = f"{100 * count / max(total, 1):.1f} %"
            lines.append(f"| {threat} | {len(chosen)} | {name} | {count} | {rate} of {total} | {1e3 * result[1] / len(chosen):.0f} |")
            print(lines[-1], flush=True)
    totals = [
        f"{name}: {100 * sum(shares[name]) / sum(shares['whole ' + name]):.1f} % of {sum(shares['whole ' + name])}"
        for name in attacks if name in shares
    ]  # fmt: skip
    d, s, e = STRENGTHS["default"], STRENGTHS["strong"], ENSEMBLE
    body = [
        context(0, 1),
        "",
        f"cure_ray {cure_ray.__version__}, {subject.name} (epoch {about.get('epoch')}) on {samples.dataset}: every correctly classified "
        f"image of {rows['sample_index'].nunique()} that alpha-CROWN does not certify. default: {d.restarts} restarts of {d.steps} steps; "
        f"strong: {s.restarts} of {s.steps} and {s.vertices} rounds over vertices in l1; ensemble: {e.restarts} of {e.steps} and "
        f"{e.vertices} rounds, from another seed. torchattacks: APGD (cross-entropy, DLR; 2 restarts of 50) and APGDT; foolbox: PGD of the "
        "norm (50 steps, 10 starts), and in l2 DDN and Carlini-Wagner, in l1 elastic nets. What any of them breaks is the whole.",
        "",
        "| threat | undecided | attack | broken | share of what any breaks | CPU ms/sample |",
        "|---|---|---|---|---|---|",
        *lines,
        "",
        f"Over all norms: {'; '.join(totals)}." + (f" Not installed, left out: {', '.join(absent)}." if absent else ""),
    ]
    write_section("Attacks", "\n".join(body))


if __name__ == "__main__":
    main()
