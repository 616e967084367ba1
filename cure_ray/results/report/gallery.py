"""The gallery: images, how far each class is proven to stay away, and counterexamples beside their originals."""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from markupsafe import Markup
from numpy.typing import NDArray

from cure_ray.errors import UserError
from cure_ray.results.evaluations import STATUSES
from cure_ray.results.frames import Loaded
from cure_ray.results.report.charts import margin_bars
from cure_ray.results.report.pictures import difference_uri, image_uri
from cure_ray.results.report.sources import shards
from cure_ray.results.study import Entry

Images = NDArray[np.float64]
_CLASSES = 12


@dataclass(frozen=True)
class Cell:
    """One threat of a card."""

    threat: str
    status: str
    stage: str
    margin: float
    attack_margin: float
    chart: Markup
    witness: str
    difference: str
    witness_file: str
    file: str  # where the verdict is, if that is one file


@dataclass(frozen=True)
class Card:
    """One image under one method."""

    method: str
    seed: int
    sample: int
    label: int
    predicted: int
    image: str
    cells: tuple[Cell, ...]

    @property
    def worst(self) -> float:
        return min((c.margin for c in self.cells if math.isfinite(c.margin)), default=-1e9)

    @property
    def statuses(self) -> str:
        return " ".join(sorted({c.status for c in self.cells}))


def load_images(entry: Entry, data_dir: Path | None) -> tuple[Images | None, str]:
    """The split that was certified, or why it cannot be shown. Never downloads: a report must not need a network."""
    from cure_ray.config import parse_experiment
    from cure_ray.data.images import load_dataset

    foreign = entry.info.about.get("data")
    if foreign and Path(str(foreign)).exists():
        with np.load(str(foreign), allow_pickle=False) as file:
            raw = np.asarray(file["images"])
        return raw.astype(float) / (255.0 if raw.dtype == np.uint8 else 1.0), ""
    if not entry.info.experiment:
        return None, "the store does not say which data set the images are from"
    try:
        config = parse_experiment(dict(entry.info.experiment)).dataset.model_copy(update={"augment": False})
        images = load_dataset(config, entry.evaluation.split, data_dir, download=False)  # type: ignore[arg-type]
    except UserError as error:
        return None, f"the images are not shown: {error}"
    return images.pixels().double().numpy(), ""


def pick_samples(entry: Entry, count: int) -> list[int]:
    """Positions of samples to show: round-robin over the combinations of statuses, so that rare ones are seen too."""
    groups: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for i, row in enumerate(entry.evaluation.status.tolist()):
        groups[tuple(row)].append(i)
    queues = sorted(groups.values(), key=len)
    picked: list[int] = []
    while len(picked) < count and any(queues):
        for queue in queues:
            if queue and len(picked) < count:
                picked.append(queue.pop(0))
    return sorted(picked)


def _margins(loaded: Loaded, digests: Sequence[str], samples: Sequence[int]) -> dict[tuple[str, str, int], dict[str, Any]]:
    import pyarrow as pa
    import pyarrow.compute as pc

    rows = {}
    for store in loaded.stores:
        table = store.read(["checkpoint_digest", "threat", "sample_index", "margins", "witness"])
        keep = pc.and_(
            pc.is_in(table["sample_index"], value_set=pa.array(list(samples), type=pa.int64())),
            pc.is_in(table["checkpoint_digest"], value_set=pa.array(list(digests), type=pa.string())),
        )
        for row in table.filter(keep).to_pylist():
            rows[row["checkpoint_digest"], row["threat"], row["sample_index"]] = {**row, "store": store}
    return rows


def cards(loaded: Loaded, entries: Sequence[Entry], best: Entry, data_dir: Path | None, count: int = 24) -> tuple[list[Card], str]:
    """The same images for every method, so that they can be compared; and a note where images are missing."""
    images, note = (loaded.images, "") if loaded.images is not None else load_images(best, data_dir)
    if images is not None and images.shape[1] not in (1, 3):
        images, note = None, "the inputs are vectors, not images: only their margins are shown"
    positions = pick_samples(best, count)
    samples = best.evaluation.samples[positions].tolist()
    rows = _margins(loaded, [e.evaluation.checkpoint for e in entries], samples)
    uris = {s: image_uri(images[s]) if images is not None and s < len(images) else "" for s in samples}
    out = []
    for entry in entries:
        e = entry.evaluation
        scales = {
            t.name: _scale([r["margins"] for (d, name, _), r in rows.items() if (d, name) == (e.checkpoint, t.name)]) for t in e.threats
        }
        files = {t.name: _only_file(shards(loaded, e, t.name)) for t in e.threats}
        where = {s: i for i, s in enumerate(e.samples.tolist())}
        for sample in samples:
            i = where.get(sample)
            if i is None:
                continue
            cells = []
            for j, threat in enumerate(e.threats):
                row = rows.get((e.checkpoint, threat.name, sample), {})
                image = images[sample] if images is not None and sample < len(images) else None
                cells.append(_cell(entry, i, j, row, scales[threat.name], image, files[threat.name]))
            out.append(Card(entry.label, entry.info.seed, sample, int(e.labels[i]), int(e.predicted[i]), uris[sample], tuple(cells)))
    return out, note


def _scale(margins: Sequence[Sequence[float]]) -> float:
    """A full bar; the largest tenth of the bounds is clipped, or one loose bound would flatten all others."""
    known = [abs(m) for row in margins for m in row if math.isfinite(m)]
    return float(np.quantile(known, 0.9)) if known else 1.0


def _only_file(found: Sequence[tuple[str, str]]) -> str:
    return f"{found[0][0]}/verdicts/{found[0][1]}" if len(found) == 1 else ""


def _cell(entry: Entry, i: int, j: int, row: dict[str, Any], scale: float, image: Images | None, where: str) -> Cell:
    e = entry.evaluation
    threat, status = e.threats[j], STATUSES[e.status[i, j]]
    margins = row.get("margins") or []
    label = int(e.labels[i])
    pairs = list(zip((k for k in range(len(margins) + 1) if k != label), margins, strict=True)) if margins else []
    if len(pairs) > _CLASSES:  # the classes that are nearest are the ones that matter
        pairs = sorted(sorted(pairs, key=lambda p: p[1])[:_CLASSES])
    title = f"{threat.name}, {status}: proven margins per class"
    chart = margin_bars(title, [k for k, _ in pairs], [m for _, m in pairs], scale) if pairs else Markup("")
    witness = difference = file = ""
    if row.get("witness"):
        file = f"{row['store'].root}/witnesses/{row['witness']}.npy"
        try:
            found = row["store"].read_witness(row["witness"])
        except UserError:
            found = None
        if found is not None:
            witness = image_uri(found)
            difference = difference_uri(image, found) if image is not None and image.shape == found.shape else ""
    stage = e.stages[e.stage[i, j]]
    return Cell(threat.name, status, stage, float(e.margin[i, j]), float(e.attack_margin[i, j]), chart, witness, difference, file, where)
