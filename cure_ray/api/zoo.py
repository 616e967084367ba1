"""A network of the zoo certified again as its verdicts were made, and compared with them row by row."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch

from cure_ray.api.certify import run as certified
from cure_ray.api.judge import published_samples, take
from cure_ray.api.request import Cascade, CertificationRequest, Execution
from cure_ray.api.subject import Subject, run_subject
from cure_ray.attacks.settings import STRENGTHS
from cure_ray.data.samples import Samples
from cure_ray.errors import UserError
from cure_ray.networks.models import Network
from cure_ray.results.store import Store
from cure_ray.runs.checkpoints import load_checkpoint
from cure_ray.threats import Ball
from cure_ray.zoo.manifest import IMAGES, RESULTS, Entry, check_entry, find_zoo, read_manifest
from cure_ray.zoo.published import find_published


@dataclass(frozen=True)
class Difference:
    """A row that came out another way."""

    sample: int
    threat: str
    stored: str
    now: str

    @property
    def contradiction(self) -> bool:
        """Both cannot be true: one of them is a proof, the other its counterexample."""
        return {self.stored, self.now} == {"certified", "falsified"}

    def __str__(self) -> str:
        return f"sample {self.sample}, {self.threat}: {self.stored} in the zoo, {self.now} now" + (
            " (a contradiction)" if self.contradiction else ""
        )


@dataclass(frozen=True)
class Comparison:
    """Rows that were computed again, and those that differ."""

    entry: Entry
    rows: int
    differences: tuple[Difference, ...]


@dataclass(frozen=True)
class Hand:
    """What the caller brings: a published network's weights and images are not in the zoo."""

    weights: Path | None = None
    data: Path | None = None
    data_dir: Path | None = None


def recertify(
    name: str, zoo: str | Path | None = None, samples: int | None = None, few: bool = False, hand: Hand | None = None,
    execution: Execution | None = None,
) -> Comparison:  # fmt: skip
    """Certify a network of the zoo again as its store was made, in memory, and compare every verdict.

    `few`: only the images kept in the zoo, which needs no data set; `samples`: only the first of those in the store.
    """
    root = find_zoo(zoo)
    manifest = read_manifest(root)
    entry = manifest.find(name)
    folder, brought = check_entry(root, entry), hand or Hand()
    run = check_entry(root, manifest.run_of(entry))
    store = Store.open(folder / RESULTS)
    (plan,) = store.plans()
    rows = store.read(["sample_index", "threat", "norm", "eps", "status"]).to_pandas()
    network = _network(entry, run, brought)
    images, chosen = _kept(folder, entry) if few else _all(entry, run, brought, plan, rows)
    chosen = chosen[:samples] if samples is not None else chosen
    subject = Subject(network, entry.name, images)
    if subject.digest != entry.identity:
        raise UserError(f"{name}: the network computes something else than the manifest says (identity {subject.digest[:12]})")
    balls = [Ball(norm, eps) for norm, eps in rows[["norm", "eps"]].drop_duplicates().itertuples(index=False)]
    request = CertificationRequest((subject,), balls, chosen, _cascade(plan), execution or Execution(quiet=True), int(plan["seed"]))
    again = request.settings_of(subject).key()
    if again != plan["settings"]:
        changed = ", ".join(k for k in again if again[k] != plan["settings"].get(k))
        raise UserError(f"{name}: its store was made with settings that cannot be asked for any more ({changed})")
    now = certified(request).verdicts
    return Comparison(entry, len(now), tuple(_differences(rows, now)))


def _network(entry: Entry, run: Path, hand: Hand) -> Network:
    if entry.published is None:
        return load_checkpoint(run).network
    published = find_published(entry.published)
    if hand.weights is None:
        at = published.source.url if published.source else "unknown"
        raise UserError(f"{entry.name}: its weights are its authors'. Download them from {at}, and name the file with --weights")
    return take(published, hand.weights).network


def _cascade(plan: dict[str, Any]) -> Cascade:
    """What to ask for so that the settings are those of a plan."""
    settings = plan["settings"]
    stages, engine, box = tuple(settings["stages"]), plan["engine"], settings["box"]
    return Cascade(stages, settings["seconds"], settings["nodes"], engine, box, attack=attack_name(settings))


def attack_name(settings: Mapping[str, Any]) -> str | None:
    """What the attack of these settings is called."""
    return next((n for n, s in STRENGTHS.items() if {k: v for k, v in asdict(s).items() if k != "rows"} == settings["attack"]), None)


def _kept(folder: Path, entry: Entry) -> tuple[Samples, list[int]]:
    """The few images kept in the zoo, at their numbers in the split, on which the random numbers of attacks depend."""
    if not (folder / IMAGES).is_file():
        raise UserError(f"{entry.name}: no images are kept with it; it needs its data set")
    with np.load(folder / IMAGES, allow_pickle=False) as file:
        pixels, labels, numbers = (torch.from_numpy(file[name]) for name in ("images", "labels", "indices"))
    pixels = pixels.float() / 255 if pixels.dtype == torch.uint8 else pixels
    images = torch.zeros(int(numbers.max()) + 1, *pixels.shape[1:])
    every = torch.zeros(len(images), dtype=torch.long)
    images[numbers], every[numbers] = pixels, labels
    return Samples(entry.dataset, "test", images, every), numbers.tolist()


def _all(entry: Entry, run: Path, hand: Hand, plan: dict[str, Any], rows: pd.DataFrame) -> tuple[Samples, list[int]]:
    if entry.published is None:
        images = run_subject(run, None, plan["split"], hand.data_dir).samples
    else:
        images = published_samples(find_published(entry.published), hand.data, hand.data_dir)
    if images.digest != plan["data_digest"]:
        raise UserError(f"{entry.name}: the {plan['split']} images of {entry.dataset} here are others than those that were certified")
    return images, sorted(int(i) for i in rows["sample_index"].unique())


def _differences(stored: pd.DataFrame, now: pd.DataFrame) -> Iterator[Difference]:
    before = {(int(i), str(t)): str(s) for i, t, s in zip(stored["sample_index"], stored["threat"], stored["status"], strict=True)}
    for index, threat, status in zip(now["sample_index"], now["threat"], now["status"], strict=True):
        old = before.get((int(index), str(threat)), "absent")
        if old != str(status):
            yield Difference(int(index), str(threat), old, str(status))
