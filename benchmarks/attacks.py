"""How much the attack breaks of what bounds leave open. Writes '## Attacks' of docs/benchmarks.md.

    PYTHONPATH=DIR python benchmarks/attacks.py --results quickstart/results [STORE ...] [--samples 1000]

Stores of cure-ray certify, best by bounds alone (--nodes 0): every network in them is attacked where it is not certified. DIR may
hold torchattacks (`pip install --target DIR --no-deps torchattacks`) and foolbox; what is missing is left out and said. Every
candidate, theirs too, is put into ball∩box and replayed in float64 before it counts. The whole is what any of the attacks breaks.
"""

import argparse
import importlib
import importlib.metadata
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import torch
from sections import context, write_section
from torch import Tensor

import cure_ray
from cure_ray.api.subject import Subject, run_subject
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


@dataclass
class Counts:
    """What one attack broke of what any breaks, over norms and networks."""

    broken: int = 0
    whole: int = 0

    def __str__(self) -> str:
        return f"{100 * self.broken / max(self.whole, 1):.1f} % of {self.whole}"


def installed() -> tuple[dict[str, Attack], list[str]]:
    """Our attacks and those of the libraries that are here; and the names of those that are not."""
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
    return attacks, absent


def rows_of(subject: Subject, verdicts: pd.DataFrame, most: int, attacks: dict[str, Attack], totals: dict[str, Counts]) -> Iterator[str]:
    """The lines of one network: for every norm, what each attack breaks of what is not certified."""
    left = verdicts[verdicts["status"].isin(["unknown", "timeout", "falsified"]) & (verdicts["family"] == "lp")]
    for norm, eps in sorted(set(zip(left["norm"], left["eps"], strict=True)), reverse=True):
        chosen = left.loc[(left["norm"] == norm) & (left["eps"] == eps), "sample_index"].tolist()[:most]
        x, y, threat = subject.samples.images[chosen], subject.samples.labels[chosen], Ball(norm, eps)
        results = {name: broken(subject.network, x, y, threat, how) for name, how in attacks.items()}
        whole = int(torch.stack([r[0] for r in results.values() if r is not None]).any(0).sum())
        for name, result in results.items():
            start = f"| {subject.name} | {threat} | {len(chosen)} | {name} |"
            if result is None:
                yield f"{start} not offered | | |"
                continue
            here, total = Counts(int(result[0].sum()), whole), totals.setdefault(name, Counts())
            total.broken, total.whole = total.broken + here.broken, total.whole + here.whole
            yield f"{start} {here.broken} | {here} | {1e3 * result[1] / len(chosen):.0f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, nargs="+", required=True, help="stores of cure-ray certify")
    parser.add_argument("--data", help="where data sets are")
    parser.add_argument("--samples", type=int, default=1000, help="undecided samples per network and norm, at most")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    attacks, absent = installed()
    lines, totals, subjects = list[str](), dict[str, Counts](), list[str]()
    for results in arguments.results:
        store = cure_ray.load_results(results)
        for digest, verdicts in store.verdicts.groupby("checkpoint_digest", observed=True):
            about = store.loaded.stores[0].about(str(digest))
            subject = run_subject(Path(about["checkpoint"]), data_dir=arguments.data)
            subjects.append(f"{subject.name} ({subject.samples.dataset}, {verdicts['sample_index'].nunique()} images)")
            for line in rows_of(subject, verdicts, arguments.samples, attacks, totals):
                print(line, flush=True)
                lines.append(line)
    d, s, e = STRENGTHS["default"], STRENGTHS["strong"], ENSEMBLE
    over_all = "; ".join(f"{name}: {totals[name]}" for name in attacks if name in totals)
    body = [
        context(0, 1),
        "",
        f"cure_ray {cure_ray.__version__}; {', '.join(subjects)}: every image that is classified correctly and not "
        f"certified by bounds alone. default: {d.restarts} restarts of {d.steps} steps; "
        f"strong: {s.restarts} of {s.steps} and {s.vertices} rounds over vertices in l1; ensemble: {e.restarts} of {e.steps} and "
        f"{e.vertices} rounds, from another seed. torchattacks: APGD (cross-entropy, DLR; 2 restarts of 50) and APGDT; foolbox: PGD of the "
        "norm (50 steps, 10 starts), and in l2 DDN and Carlini-Wagner, in l1 elastic nets. What any of them breaks is the whole.",
        "",
        "| network | threat | undecided | attack | broken | share of what any breaks | CPU ms/sample |",
        "|---|---|---|---|---|---|---|",
        *lines,
        "",
        f"Over all: {over_all}." + (f" Not installed, left out: {', '.join(absent)}." if absent else ""),
    ]
    write_section("Attacks", "\n".join(body))


if __name__ == "__main__":
    main()
