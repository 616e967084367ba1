"""Question a results store: some rows of every network that is at hand, replayed; and what could not be, by name."""

import random
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from cure_ray.api.subject import Subject, foreign_subject, given_samples, onnx_subject, run_subject
from cure_ray.certification.replay import Questioner
from cure_ray.certification.verdict import SKIPPED, Verdict
from cure_ray.errors import UserError
from cure_ray.results.fsck import Finding
from cure_ray.results.schema import from_table
from cure_ray.results.store import Store
from cure_ray.threats import Ball, Threat, Transformation, Words
from cure_ray.threats.norms import NORMS
from cure_ray.threats.text import read_threats


@dataclass(frozen=True)
class Hand:
    """What the caller brings: code is never run because a store names it, so a factory must be given again."""

    network: str | None = None  # package.module:factory
    weights: Path | None = None
    data: Path | None = None
    data_dir: Path | None = None


@dataclass
class Replay:
    """What became of one network's rows."""

    checkpoint: str
    rows: int
    confirmed: Counter[str] = field(default_factory=Counter)
    open: list[str] = field(default_factory=list)
    contradicted: list[Finding] = field(default_factory=list)
    unavailable: str | None = None  # why nothing could be replayed

    @property
    def asked(self) -> int:
        return sum(self.confirmed.values()) + len(self.open) + len(self.contradicted)

    def lines(self) -> Iterator[str]:
        name = f"checkpoint {self.checkpoint[:12]}"
        if self.unavailable:
            yield f"{name}: not replayed: {self.unavailable}"
            return
        kinds = ", ".join(f"{n} {_SAID.get(status, status)}" for status, n in sorted(self.confirmed.items())) or "none confirmed"
        yield f"{name}: replayed {self.asked} of {self.rows} rows: {kinds}"
        yield from (f"  open: {what}" for what in self.open)
        yield from (f"  {finding}" for finding in self.contradicted)


_SAID = {
    "certified": "certified (proven again, and attacked with a new seed)",
    "falsified": "falsified (the witness lies in the threat and is misclassified)",
    "misclassified": "misclassified",
    "unknown": "unknown (label and clean prediction)",
    "timeout": "timeout (label and clean prediction)",
}


def replay_store(store: Store, hand: Hand, rows: int = 3, seed: int = 1) -> list[Replay]:
    """Up to so many rows of every network, threat and status, drawn by `seed`."""
    by_network = defaultdict[str, list[Verdict]](list)
    for row in from_table(store.read()):
        by_network[row.checkpoint_digest].append(row)
    return [_replay(store, digest, mine, hand, rows, seed) for digest, mine in sorted(by_network.items())]


def _replay(store: Store, digest: str, rows: list[Verdict], hand: Hand, count: int, seed: int) -> Replay:
    found = Replay(digest, len(rows))
    try:
        subject = _at_hand(store, digest, rows[0], hand)
    except UserError as error:
        found.unavailable = str(error)
        return found
    bundles = Path(store.root if "://" not in store.root else ".") / "soundness-failure"
    questioner = Questioner(subject.network, subject.samples, seed, bundles)
    for row in _drawn(rows, count, seed):
        name = f"sample {row.sample_index}, {row.threat}, {row.status}"
        witness = torch.from_numpy(store.read_witness(row.witness)) if row.witness else None
        answer = questioner.ask(row, _threat(row, subject), witness)
        if answer.kind == "confirmed":
            found.confirmed[str(row.status)] += 1
        elif answer.kind == "open":
            found.open.append(f"{name}: {answer.what}")
        else:
            found.contradicted.append(Finding("contradicted", f"checkpoint {digest[:12]}, {name}: {answer.what}"))
    return found


def _drawn(rows: list[Verdict], count: int, seed: int) -> list[Verdict]:
    groups = defaultdict[tuple[str, str], list[Verdict]](list)
    for row in rows:
        if row.stage != SKIPPED and row.status not in ("error", "oom"):
            groups[row.threat, str(row.status)].append(row)
    drawn = list[Verdict]()
    for key, mine in sorted(groups.items()):
        ordered = sorted(mine, key=lambda row: row.sample_index)
        drawn += random.Random(f"{seed} {key}").sample(ordered, min(count, len(ordered)))
    return drawn


def _threat(row: Verdict, subject: Subject) -> Threat:
    """Exactly as the row has it."""
    if row.norm in NORMS:
        return Ball(row.norm, row.eps)
    if row.family == Words.family:
        return Words(row.threat)
    (threat,) = read_threats(row.threat, image=subject.input_shape)
    return threat.cut(row.grid) if isinstance(threat, Transformation) and row.grid else threat


def _at_hand(store: Store, digest: str, row: Verdict, hand: Hand) -> Subject:
    """The network and images the rows are about; UserError saying what is missing or has changed."""
    about = store.about(digest)
    subject = _load(about, row, hand)
    if subject.digest != digest:
        raise UserError(f"the network that is there now ({_place(about, hand)}) computes something else (identity {subject.digest[:12]})")
    known = (store.files.read_json("store.json") or {}).get("data_digest")
    if subject.samples.digest != known:
        raise UserError(f"the {row.split} images of {row.dataset} that are there now are others than those that were certified")
    return subject


def _place(about: Mapping[str, Any], hand: Hand) -> str:
    return str(about.get("checkpoint") or about.get("onnx") or hand.network)


def _load(about: Mapping[str, Any], row: Verdict, hand: Hand) -> Subject:
    file = hand.data or about.get("data")
    samples = given_samples(Path(file)) if file is not None else None
    if about.get("checkpoint"):
        return run_subject(about["checkpoint"], samples, row.split, hand.data_dir)
    if samples is None:
        raise UserError("its images were given from Python; save them as .npz and name the file with --data")
    if about.get("onnx"):
        return onnx_subject(Path(about["onnx"]), samples)
    if hand.network is None:
        named = about.get("network")
        raise UserError(f"its network is {named}, and code is not run because a store names it: give the factory with --network")
    weights = hand.weights or (Path(about["weights"]) if about.get("weights") else None)
    return foreign_subject(hand.network, weights, samples)
