"""Put a network into the zoo: a finished run with its verdicts, or the verdicts of a published network, with a card, and listed."""

import json
import re
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from cure_ray.api.judge import COST, spent_seconds
from cure_ray.api.progress import remark
from cure_ray.api.subject import run_subject
from cure_ray.api.zoo import Hand, attack_name
from cure_ray.config import Experiment
from cure_ray.data.samples import Samples
from cure_ray.errors import UserError
from cure_ray.results.cards import card
from cure_ray.results.fsck import fsck
from cure_ray.results.shards import thinned
from cure_ray.results.store import Store
from cure_ray.runs.checkpoints import WEIGHTS, Checkpoint, load_checkpoint
from cure_ray.runs.directory import ABOUT, EXPERIMENT, META, checkpoint_at, file_digest
from cure_ray.runs.metrics import METRICS, read_metrics
from cure_ray.threats.text import read_threats
from cure_ray.zoo.manifest import CARD, IMAGES, RESULTS, Cost, Entry, find_zoo, listed_files, read_manifest, write_manifest
from cure_ray.zoo.published import Published, all_published, find_published

FEW = 8  # images kept beside a network, so that it can be certified again anywhere
DECIDED = ("certified", "falsified", "misclassified")


@dataclass(frozen=True)
class Offer:
    """What is to be put into the zoo."""

    source: str  # a run directory, or the name of a published network
    store: Path
    name: str
    title: str
    witnesses: bool = True
    threats: str | None = None  # the protocol, where it is not the run's own


def add(offer: Offer, zoo: str | Path | None = None, hand: Hand | None = None) -> Entry:
    """Copy what is offered into the zoo, with its card, and list it. Nothing is left if anything is wrong with it."""
    root = find_zoo(zoo)
    if not re.fullmatch(r"[a-z0-9][a-z0-9.-]*", offer.name):
        raise UserError(f"--name {offer.name}: small letters, digits, dots and hyphens, such as mine-mnist-0")
    if (root / offer.name).exists():
        raise UserError(f"{root / offer.name} is there already. Choose another --name, or remove the folder to put this in its place.")
    if Path(offer.source).is_dir():
        return _add_run(offer, root, hand or Hand())
    return _add_published(offer, root, find_published(offer.source))


def _add_run(offer: Offer, root: Path, hand: Hand) -> Entry:
    loaded = load_checkpoint(offer.source)
    subject = run_subject(offer.source, None, "test", hand.data_dir)
    own = ",".join(f"{ball.norm}={_exactly(loaded.experiment, ball.norm)}" for ball in subject.threats)
    threats, other = (own, "") if offer.threats is None else (offer.threats, f" --threats {offer.threats}")
    run = loaded.path.parent.parent
    for name in (EXPERIMENT, ABOUT, METRICS):
        if not (run / name).is_file():
            raise UserError(f"{offer.source} is no run of `cure-ray train`: {run / name} is missing, which says how the network was made")
    places = (loaded.experiment.training.start_from, loaded.experiment.dataset.path)
    remark((f"{p} is a place of this machine: others cannot train the network again" for p in places if p and Path(p).is_absolute()), False)
    metrics = read_metrics(run)
    known = json.loads((run / ABOUT).read_text())
    spent = sum(float(m.get("epoch_seconds", 0)) for m in metrics)
    training = Cost(seconds=round(spent, 1), hardware=_machine(known["hardware"]), version=known["versions"]["cure_ray"])
    shared = _shared(root, subject.digest, run, offer.name)
    home = shared or offer.name
    with tempfile.TemporaryDirectory(dir=root, prefix=".adding-") as temporary:
        folder = Path(temporary)
        if shared is None:
            _copy_run(run, loaded, folder)
        about = {"checkpoint": f"zoo/{home}/{checkpoint_at(Path(), loaded.epoch).as_posix()}"}
        plan = _copy_store(offer, subject.digest, threats, folder / RESULTS, about)
        if subject.samples.digest != plan["data_digest"]:
            raise UserError(f"{offer.store} is about other {subject.samples.dataset} images than those of the run's data set here")
        _keep_images(folder, subject.samples)
        n = _common(plan)
        commands = (
            f"cure-ray train zoo/{home}/{EXPERIMENT} --out runs/{home}",
            f"cure-ray certify runs/{home} --samples {n}{other}{_effort(plan)} --out results/{offer.name}",
        )
        entry = _entry(offer, "ours", folder / RESULTS, plan, threats, commands).model_copy(
            update={"seeds": (loaded.experiment.seed,), "training": training, "run": shared}
        )
        return _list(root, folder, entry)


def _shared(root: Path, identity: str, run: Path, name: str) -> str | None:
    """The folder of the zoo that has this very network already, trained by the same experiment: it need not be there twice. What is
    listed under the name of the offer is what the offer replaces."""
    experiment = file_digest(run / EXPERIMENT)
    others = (e for e in read_manifest(root).entries if e.name != name and e.identity == identity)
    return next((e.folder for e in others if e.files.get(EXPERIMENT) == experiment), None)


def _copy_run(run: Path, loaded: Checkpoint, folder: Path) -> None:
    """A run directory with its last checkpoint, without what only a training that goes on needs."""
    for name in (EXPERIMENT, ABOUT, METRICS):
        shutil.copyfile(run / name, folder / name)
    target = checkpoint_at(folder, loaded.epoch)
    target.mkdir(parents=True)
    shutil.copyfile(loaded.path / WEIGHTS, target / WEIGHTS)
    meta = {**loaded.meta, "files": {WEIGHTS: file_digest(target / WEIGHTS)}}
    (target / META).write_text(json.dumps(meta, indent=1) + "\n")


def _exactly(experiment: Experiment, norm: str) -> str:
    """A radius as it was asked for: 8/255, not its first six digits."""
    radius = experiment.threats.model_dump(mode="json")[norm]
    return f"{radius:g}" if isinstance(radius, float) and float(f"{radius:g}") == radius else str(radius)


def _add_published(offer: Offer, root: Path, published: Published) -> Entry:
    threats = published.protocol.threats
    if offer.threats is not None:
        raise UserError(f"--threats is about runs of yours; {published.name} is judged under the protocol it was published with, {threats}")
    if all_published().get(published.name) != published:
        raise UserError(f"{offer.source}: a zoo refers to descriptions that are shipped; put it into cure_ray/zoo/published/ first")
    identity = published.weights.identity if published.weights else None
    if identity is None:
        raise UserError(f"{published.name}: its description gives no identity; without it nobody can tell whose verdicts these are")
    with tempfile.TemporaryDirectory(dir=root, prefix=".adding-") as temporary:
        folder = Path(temporary)
        plan = _copy_store(offer, identity, threats, folder / RESULTS, {})
        command = f"cure-ray judge {published.name} --weights FILE --samples {_common(plan)}{_effort(plan)}"
        entry = _entry(offer, "published", folder / RESULTS, plan, threats, (command,)).model_copy(update={"published": published.name})
        return _list(root, folder, entry)


def _copy_store(offer: Offer, identity: str, threats: str, target: Path, about: dict[str, Any]) -> dict[str, Any]:
    """The verdicts of one network, alone; its plan. Refused if they are not of this network, protocol, or not whole."""
    source = Store.open(offer.store)
    plans = [plan for plan in source.plans() if plan["checkpoint_digest"] == identity]
    if not plans:
        others = ", ".join(sorted({str(p["checkpoint_digest"])[:12] for p in source.plans()}))
        raise UserError(f"{offer.store} holds no verdicts of this network (identity {identity[:12]}); it is about {others or 'none'}")
    wanted = {str(t) for t in read_threats(threats)}
    whole = [plan for plan in plans if wanted <= {*plan["threats"]} and not plan["union_only"]]
    if len(whole) != 1:
        there = "; ".join(", ".join(sorted(plan["threats"])) + " (the union only)" * plan["union_only"] for plan in plans)
        raise UserError(f"{offer.store} is of another protocol: it holds {there}; wanted are {', '.join(sorted(wanted))}, all in one run")
    plan = {**whole[0], "threats": {name: whole[0]["threats"][name] for name in whole[0]["threats"] if name in wanted}}
    identity_file = source.files.read_json("store.json") or {}
    store = Store.create(target, identity_file["dataset"], identity_file["split"], identity_file["data_digest"])
    known = {k: v for k, v in source.about(identity).items() if k not in ("checkpoint", "data", "weights", "onnx")}
    store.files.write_json(f"runs/{identity}.json", {**known, **about})
    store.files.write_json(f"plans/{plan['run_id']}.json", plan)
    for name in source.shards():
        if name.startswith(tuple(f"{identity[:12]}-{threat}-" for threat in wanted)):
            store.files.write_bytes(
                f"verdicts/{name}", thinned(source.files.read_bytes(f"verdicts/{name}"), f"{offer.store}/verdicts/{name}")
            )
    spent = spent_seconds(offer.store)
    if spent:
        (target / COST).write_text(json.dumps({"cpu_seconds": spent}) + "\n")
    for digest in filter(None, store.read(["witness"]).column("witness").to_pylist()) if offer.witnesses else ():
        try:
            store.files.write_bytes(f"witnesses/{digest}.npy", source.files.read_bytes(f"witnesses/{digest}.npy"))
        except FileNotFoundError:
            raise UserError(f"{offer.store} has not all of its counterexamples. Say --no-witnesses to leave them out.") from None
    wrong = [f for f in fsck(store) if offer.witnesses or "witness" not in f.what]
    if wrong:
        raise UserError(f"{offer.store} is not whole: {wrong[0]}" + (f", and {len(wrong) - 1} more" if len(wrong) > 1 else ""))
    return plan


def _effort(plan: dict[str, Any]) -> str:
    """The options that made a plan's settings."""
    attack = attack_name(plan["settings"])
    strong = f" --attack {attack}" if attack not in (None, "default") else ""
    return f" --nodes {plan['settings']['nodes']}{strong}" + (f" --seed {plan['seed']}" if plan["seed"] else "")


def _common(plan: dict[str, Any]) -> int:
    """How many images have a verdict under every threat."""
    return len(set.intersection(*(set(indices) for indices in plan["threats"].values())))


def _entry(
    offer: Offer, kind: Literal["ours", "published"], results: Path, plan: dict[str, Any], threats: str, commands: Sequence[str]
) -> Entry:
    store, identity = Store.open(results), plan["checkpoint_digest"]
    spent = spent_seconds(results) or float(np.sum(store.read(["seconds"]).column("seconds").to_numpy()))
    machine = _machine(store.about(identity).get("certified_on", {}))
    return Entry(
        name=offer.name, title=offer.title, kind=kind, dataset=plan["dataset"], threats=threats, n=_common(plan), identity=identity,
        commands=tuple(commands), certification=Cost(seconds=round(spent, 1), hardware=machine, version=plan["program"]),
        folder=offer.name, files={},
    )  # fmt: skip


def _machine(known: dict[str, Any]) -> str:
    return f"{known.get('gpu') or known.get('processor') or 'unknown'}, {known.get('cpus', '?')} cores"


def _keep_images(folder: Path, samples: Samples) -> None:
    """A few of the certified images: decided under every threat, in as many ways as possible, the cheapest first."""
    rows = Store.open(folder / RESULTS).read(["sample_index", "threat", "status", "stage", "nodes", "seconds"]).to_pandas()
    decided = rows.groupby("sample_index").filter(lambda g: g["status"].isin(DECIDED).all())
    ways = {int(i): {*zip(g["threat"], g["status"], g["stage"], strict=True)} for i, g in decided.groupby("sample_index")}
    cost = decided.groupby("sample_index")[["nodes", "sample_index"]].sum()["nodes"].to_dict()
    chosen, seen = list[int](), set[tuple[str, str, str]]()
    while len(chosen) < min(FEW, len(ways)):
        best = min((i for i in ways if i not in chosen), key=lambda i: (-len(ways[i] - seen), cost[i], i))
        chosen.append(best)
        seen |= ways[best]
    numbers = torch.tensor(sorted(chosen))
    pixels = samples.images[numbers]
    levels = (pixels * 255).round().to(torch.uint8)
    exact = torch.equal(levels.float() / 255, pixels)
    kept = (levels if exact else pixels).numpy()
    np.savez(folder / IMAGES, images=kept, labels=samples.labels[numbers].numpy(), indices=numbers.numpy())


def _list(root: Path, folder: Path, entry: Entry) -> Entry:
    """The finished folder in its place, with its card, and in the manifest."""
    (folder / CARD).write_text(card(folder, entry))
    entry = entry.model_copy(update={"files": listed_files(folder)})
    shutil.copytree(folder, root / entry.folder)
    write_manifest(root, read_manifest(root).with_entry(entry))
    return entry
