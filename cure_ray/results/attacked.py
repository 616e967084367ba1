"""Attacks on words, from the store: accuracy under attack, how far vectors moved, and a check against what is certified.

Accuracy under attack says that an attack failed, nothing more; certificates are about vectors. Where both speak of the same vector they
must agree, and a sentence whose vector lies in a certified ball and is misclassified stops everything.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import pyarrow.compute as pc

from cure_ray.errors import SoundnessError
from cure_ray.results.evaluations import STATUSES, Bools, Evaluation
from cure_ray.results.store import Store
from cure_ray.results.study import Entry, Study
from cure_ray.text.record import WordsRecord, inside
from cure_ray.threats.balls import EACH
from cure_ray.threats.norms import NORMS

FAMILY = "text"
UNKNOWN = STATUSES.index("unknown")
_COLUMNS = [
    "checkpoint_digest", "threat", "sample_index", "label", "predicted", "status", "nodes", "attack_margin", "message", "family",
]  # fmt: skip


@dataclass(frozen=True)
class Attacked:
    """One sentence under one attack on one network."""

    checkpoint: str
    attack: str
    sample: int
    label: int
    predicted: int
    status: str
    queries: int
    margin: float | None
    record: WordsRecord

    @property
    def tried(self) -> bool:
        """Whether there was anything to attack: a sentence that is misclassified as it stands is not."""
        return self.status in ("falsified", "unknown")


def read_attacked(stores: Sequence[Store]) -> list[Attacked]:
    """Every row of an attack on words."""
    found = []
    for store in stores:
        table = store.read(_COLUMNS)
        for row in table.filter(pc.equal(table["family"], FAMILY)).to_pylist():
            record = WordsRecord.of_json(row["message"], store.root)
            who = (row["checkpoint_digest"], row["threat"], row["sample_index"], row["label"], row["predicted"])
            found.append(Attacked(*who, row["status"], row["nodes"], row["attack_margin"], record))
    return found


def refuse_contradictions(stores: Sequence[Store]) -> None:
    """SoundnessError if a sentence broke a network though its vector lies in a ball that is certified around the original's."""
    broken = [row for row in read_attacked(stores) if row.status == "falsified"]
    proven = set()
    for store in stores:
        table = store.read(["checkpoint_digest", "sample_index", "norm", "eps", "status", "family"])
        rows = table.filter(pc.and_(pc.equal(table["status"], "certified"), pc.equal(table["family"], "lp")))
        proven |= set(zip(*(rows[c].to_pylist() for c in ("checkpoint_digest", "sample_index", "norm", "eps")), strict=True))
    balls = {(norm, eps) for _, _, norm, eps in proven}
    for row in broken:
        for norm, eps in balls:
            near = row.record.distances is not None and inside(row.record.distances, {norm: eps}).get(norm)
            if near and (row.checkpoint, row.sample, norm, eps) in proven:
                raise SoundnessError(
                    f"sentence {row.sample} of checkpoint {row.checkpoint[:12]} is certified for {norm}={eps:g} in latent space, but "
                    f"{row.attack} found one that is misclassified and whose vector lies in that ball: {row.record.to_json()}"
                )


def words_table(study: Study, rows: Sequence[Attacked]) -> pd.DataFrame:
    """Per method and attack, over seeds: mean queries, words changed, and the share of attacked sentences that stay in each ball.

    `inside_*` is about the worst sentence the attack came to, `singles_*` about all sentences with one substitution that were tried.
    """
    by_checkpoint: dict[tuple[str, str], list[Attacked]] = {}
    for row in rows:
        by_checkpoint.setdefault((row.checkpoint, row.attack), []).append(row)
    out = []
    for entry in study.entries:
        for threat in entry.everything.family(FAMILY):
            mine = by_checkpoint.get((entry.evaluation.checkpoint, threat.name), [])
            out.append({"setting": entry.setting, "method": entry.label, "attack": threat.name, **_measures(entry, mine)})
    if not out:
        return pd.DataFrame()
    frame = pd.DataFrame(out)
    grouped = frame.groupby(["setting", "method", "attack"], sort=False)
    return grouped.mean(numeric_only=True).reset_index().assign(seeds=grouped.size().to_numpy())


def _measures(entry: Entry, rows: Sequence[Attacked]) -> dict[str, float]:
    tried = [row for row in rows if row.tried]
    broken = [row for row in tried if row.status == "falsified"]
    radii: dict[str, float] = {str(t.norm): t.eps for t in entry.evaluation.threats if t.family == "lp" and EACH not in t.name}
    measures: dict[str, float] = {
        "n": len(rows),
        "attacked": len(tried),
        "success": _percent(len(broken), len(tried)),
        "queries": _mean([row.queries for row in tried]),
        "words_changed": _mean([len(row.record.changes) for row in broken]),
    }
    singles = sum(row.record.singles for row in tried)
    for norm in NORMS:
        if norm not in radii:
            continue
        stays = [row.record.distances is not None and row.record.distances[norm] <= radii[norm] for row in tried]
        measures[f"inside_{norm}"] = _percent(sum(stays), len(tried))
        near = sum((row.record.singles_inside or {}).get(norm, 0) for row in tried)
        measures[f"singles_{norm}"] = _percent(near, singles)
        moved = [row.record.distances[norm] for row in broken if row.record.distances is not None]
        measures[f"moved_{norm}"] = float(np.median(moved)) if moved else float("nan")
    return measures


def _percent(hits: int, of: int) -> float:
    return 100.0 * hits / of if of else float("nan")


def _mean(values: Sequence[Any]) -> float:
    return float(np.mean(values)) if values else float("nan")


def under_attack(entry: Entry) -> dict[str, tuple[float, int]]:
    """Per attack: the share of sentences that are classified rightly and stay so, in percent, and of how many."""
    found = {}
    for threat in entry.everything.family(FAMILY):
        block = entry.everything.only([threat])
        found[threat.name] = (100.0 * float(stands(block).mean()), block.n)
    return found


def stands(block: Evaluation) -> Bools:
    """Of a block of one attack: the sentences it tried and could not break. A row that failed does not stand."""
    return np.asarray(block.status[:, 0] == UNKNOWN)
