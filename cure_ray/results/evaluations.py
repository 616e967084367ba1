"""Verdict rows as evaluations: per checkpoint one samples x threats block of statuses, from which every table is computed.

Blocks of small integers instead of grouped rows: 600,000 verdicts become tables in about a second, and "per sample AND" is
an `all` over an axis. Nothing here guesses: rows that contradict each other, or a union with holes, are errors that say so.
"""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from cure_ray.certification.verdict import CLEAN, SKIPPED, Status
from cure_ray.config.stages import CASCADE
from cure_ray.errors import UserError
from cure_ray.threats.balls import EACH
from cure_ray.threats.norms import NORMS

STATUSES = tuple(map(str, Status))
"""Every status there is. Only the first counts as robust."""
STAGES = (CLEAN, *CASCADE)
"""Stages of the cascade from cheap to expensive; "certified by alpha-crown or earlier" reads this order."""
ABSENT = -1
CERTIFIED, FALSIFIED, MISCLASSIFIED = (STATUSES.index(s) for s in (Status.CERTIFIED, Status.FALSIFIED, Status.MISCLASSIFIED))

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
Floats = NDArray[np.float64]


@dataclass(frozen=True, order=True)
class ThreatColumn:
    """One column of a block. `name` is the threat as people read it, e.g. `l2=0.5`."""

    family: str
    name: str
    norm: str
    eps: float

    @property
    def sort_key(self) -> tuple[int, int, float, str]:
        families, norms = ("lp", "geometric", "patch", "text"), NORMS
        family = families.index(self.family) if self.family in families else len(families)
        return family, norms.index(self.norm) if self.norm in norms else len(norms), self.eps, self.name


@dataclass(frozen=True)
class Evaluation:
    """What was decided about one checkpoint: N samples by T threats. A cell without a verdict is ABSENT."""

    checkpoint: str
    run_ids: tuple[str, ...]  # certifications it was put together from; different families always differ
    dataset: str
    split: str
    engine: str
    samples: Ints
    labels: Ints
    predicted: Ints
    threats: tuple[ThreatColumn, ...]
    status: NDArray[np.int8]
    stage: NDArray[np.int8]
    margin: Floats
    attack_margin: Floats
    seconds: Floats
    stages: tuple[str, ...] = STAGES

    @property
    def n(self) -> int:
        return len(self.samples)

    @property
    def short(self) -> str:
        """The checkpoint as messages name it; `--checkpoint` takes it."""
        return self.checkpoint[:12]

    @property
    def correct(self) -> Bools:
        return self.labels == self.predicted

    @property
    def certified(self) -> Bools:
        return cast(Bools, self.status == CERTIFIED)

    @property
    def skipped(self) -> Bools:
        """Cells that were not looked at: the union is known without them, the norm's own accuracy is not."""
        return self.stage == (self.stages.index(SKIPPED) if SKIPPED in self.stages else len(self.stages))

    def certified_by(self, stage: str) -> Bools:
        """Certified by `stage` or an earlier one."""
        return self.certified & (self.stage <= self.stages.index(stage))

    @property
    def empirical(self) -> Bools:
        """Correct and no counterexample found: an optimistic upper bound, never to be mixed with certificates."""
        return cast(Bools, (self.status != FALSIFIED) & (self.status != MISCLASSIFIED))

    @property
    def attacked(self) -> Bools:
        """Cells whose empirical verdict means something: proven, wrong already, broken, or attacked in vain."""
        decided = np.isin(self.status, (CERTIFIED, FALSIFIED, MISCLASSIFIED))
        return decided | np.isfinite(self.attack_margin)

    def family(self, *families: str) -> tuple[ThreatColumn, ...]:
        return tuple(t for t in self.threats if t.family in families)

    def only(self, threats: Sequence[ThreatColumn]) -> "Evaluation":
        """The complete block for these threats; an error that names the holes if there are any."""
        unknown = [t.name for t in threats if t not in self.threats]
        if unknown:
            raise UserError(
                f"checkpoint {self.short}: no verdicts for {', '.join(unknown)} (present: {', '.join(t.name for t in self.threats)}). "
                "Run `cure-ray certify` on the same checkpoint with that threat."
            )
        columns = [self.threats.index(t) for t in threats]
        present = self.status[:, columns] != ABSENT
        rows = present.any(1)
        holes = rows & ~present.all(1)
        if holes.any():
            parts = []
            for i, threat in enumerate(threats):
                lacking = self.samples[rows & ~present[:, i]]
                if len(lacking):
                    parts.append(f"{threat.name} lacks {len(lacking)} of {int(rows.sum())} samples ({named_samples(lacking)})")
            raise UserError(
                f"checkpoint {self.short}: a union needs a verdict for every sample and threat, but "
                f"{'; '.join(parts)}. Run the same `cure-ray certify` command again: it continues where it stopped."
            )
        return self._pick(rows, threats)

    def common(self, threats: Sequence[ThreatColumn]) -> "Evaluation":
        """The samples that have a verdict for each of these threats: grids are dear, and some may cover fewer images than others."""
        columns = [self.threats.index(t) for t in threats]
        rows: Bools = np.asarray((self.status[:, columns] != ABSENT).all(1))
        if not rows.any():
            raise UserError(
                f"checkpoint {self.short}: no image has a verdict for each of {', '.join(t.name for t in threats)}; "
                "certify the same images for all of them (equal --samples)"
            )
        return self._pick(rows, threats)

    def _pick(self, rows: Bools, threats: Sequence[ThreatColumn]) -> "Evaluation":
        pick = np.ix_(np.flatnonzero(rows), np.array([self.threats.index(t) for t in threats]))
        return replace(
            self,
            threats=tuple(threats),
            samples=self.samples[rows],
            labels=self.labels[rows],
            predicted=self.predicted[rows],
            status=self.status[pick],
            stage=self.stage[pick],
            margin=self.margin[pick],
            attack_margin=self.attack_margin[pick],
            seconds=self.seconds[pick],
        )


def named_samples(indices: Iterable[int]) -> str:
    """The first few, for messages."""
    first = [str(i) for i in itertools.islice(indices, 6)]
    return ", ".join(first[:5]) + (", ..." if len(first) > 5 else "")


REQUIRED = (
    "run_id", "checkpoint_digest", "dataset", "split", "sample_index", "label", "predicted", "family", "threat", "norm", "eps",
    "status", "stage", "margin_lb", "attack_margin", "seconds", "engine",
)  # fmt: skip


def _codes(values: pd.Series, known: Sequence[str], what: str) -> Ints:
    codes = pd.Categorical(values, categories=list(known)).codes.astype(np.int64)
    strange = sorted({str(v) for v in values[(codes < 0) & values.notna().to_numpy()]})
    if strange:
        raise UserError(
            f"the store has the {what} {', '.join(map(repr, strange))}, which this version of cure-ray does not know "
            f"(known: {', '.join(known)}). It was written by another version: upgrade cure-ray, or certify again."
        )
    return codes


def evaluations(verdicts: pd.DataFrame) -> list[Evaluation]:
    """One block per (checkpoint, data set, split), whatever the order of the rows."""
    missing = [c for c in REQUIRED if c not in verdicts.columns]
    if missing:
        raise UserError(f"the verdicts lack the columns {', '.join(missing)}: not a cure-ray store, or a damaged one")
    if verdicts.empty:
        raise UserError("the store has no verdicts yet. Certify a run first: cure-ray certify RUN")
    verdicts = _one_column_each(verdicts)
    status = _codes(verdicts["status"], STATUSES, "status")
    if (status < 0).any():
        raise UserError("some verdicts have no status: the store is damaged. Certify again into a fresh directory.")
    # Other families may bring stages of their own; they sort after the cascade's.
    stages = STAGES + tuple(sorted({str(s) for s in verdicts["stage"].dropna().unique()} - set(STAGES)))
    stage = _codes(verdicts["stage"], stages, "stage")
    group_keys = ["checkpoint_digest", "dataset", "split"]
    group = verdicts.groupby(group_keys, sort=True, dropna=False, observed=True).ngroup().to_numpy()
    order = np.argsort(group, kind="stable")
    cuts = np.flatnonzero(np.diff(group[order])) + 1
    columns = {c: verdicts[c].to_numpy() for c in (*group_keys, "run_id", "sample_index", "label", "predicted", "engine")}
    floats = {c: verdicts[c].to_numpy(dtype=float, na_value=np.nan) for c in ("margin_lb", "attack_margin", "seconds", "eps")}
    threat_keys = ["family", "threat", "norm", "eps"]
    threat_code = verdicts.groupby(threat_keys, sort=False, dropna=False, observed=True).ngroup().to_numpy()
    distinct = verdicts[threat_keys].iloc[np.unique(threat_code, return_index=True)[1]]
    named = [ThreatColumn(str(f), str(t), "" if pd.isna(n) else str(n), float(e)) for f, t, n, e in distinct.itertuples(index=False)]
    return [replace(_block(rows, columns, floats, status, stage, threat_code, named), stages=stages) for rows in np.split(order, cuts)]


def _one_column_each(verdicts: pd.DataFrame) -> pd.DataFrame:
    """Balls with a radius for each image are one column, which goes by the largest radius."""
    each = verdicts["threat"].astype(str).str.contains(EACH, regex=False)
    if not each.any():
        return verdicts
    largest = verdicts.groupby("threat", observed=True)["eps"].transform("max")
    return verdicts.assign(eps=verdicts["eps"].where(~each, largest))


def _block(
    rows: Ints, columns: dict[str, Any], floats: dict[str, Floats], status: Ints, stage: Ints, code: Ints, named: list[ThreatColumn]
) -> Evaluation:
    first = rows[0]
    checkpoint = str(columns["checkpoint_digest"][first])
    here = sorted(set(code[rows].tolist()), key=lambda c: named[c].sort_key)
    place = np.zeros(len(named), dtype=np.int64)
    place[here] = np.arange(len(here))
    samples, i = np.unique(columns["sample_index"][rows], return_inverse=True)
    j = place[code[rows]]
    cell = i * len(here) + j
    twice = np.flatnonzero(np.bincount(cell) > 1)
    if len(twice):
        by_threat = [
            f"{named[c].name} (sample{'s' if len(own) > 1 else ''} {named_samples(own)})"
            for k, c in enumerate(here)
            if len(own := samples[twice[twice % len(here) == k] // len(here)])
        ]
        raise UserError(
            f"checkpoint {checkpoint[:12]} has more than one verdict for {'; '.join(by_threat)}. It was certified twice: counting "
            "both would be wrong, and one table must not mix settings. Read one store at a time; `cure-ray fsck STORE` finds "
            "duplicates inside one."
        )
    shape = (len(samples), len(here))

    def fill(values: Any, empty: float, kind: Any) -> Any:
        block = np.full(shape, empty, dtype=kind)
        block[i, j] = values
        return block

    def per_sample(name: str) -> Ints:
        values = np.zeros(len(samples), dtype=np.int64)
        own = columns[name][rows].astype(np.int64)
        known = own >= 0  # -1: could not be computed, or was not needed
        values[:] = -1
        values[i[known]] = own[known]
        clash = known & (values[i] != own)
        if clash.any():
            sample = samples[i[np.flatnonzero(clash)[0]]]
            raise UserError(
                f"checkpoint {checkpoint[:12]}: sample {sample} has two different values of `{name}`; the store mixes "
                "verdicts of different networks or data. Certify again into a fresh directory."
            )
        return values

    return Evaluation(
        checkpoint=checkpoint,
        run_ids=tuple(sorted({str(r) for r in pd.unique(columns["run_id"][rows])})),
        dataset=str(columns["dataset"][first]),
        split=str(columns["split"][first]),
        engine=", ".join(sorted({str(e) for e in pd.unique(columns["engine"][rows])})),
        samples=samples.astype(np.int64),
        labels=per_sample("label"),
        predicted=per_sample("predicted"),
        threats=tuple(named[c] for c in here),
        status=fill(status[rows], ABSENT, np.int8),
        stage=fill(stage[rows], ABSENT, np.int8),
        margin=fill(floats["margin_lb"][rows], np.nan, float),
        attack_margin=fill(floats["attack_margin"][rows], np.nan, float),
        seconds=fill(floats["seconds"][rows], 0.0, float),
    )


def main_threats(
    evaluation: Evaluation, wanted: Iterable[tuple[str, float]] | None = None, chosen: bool = False
) -> tuple[ThreatColumn, ...]:
    """The l_p threats the union is taken over: the experiment's radii, or, where those are unknown, the only ones there are.

    A checkpoint that was certified against transformations and patches alone has no union; it is about those, all of them.
    """
    present = evaluation.family("lp")
    if not present and not chosen:
        proven = tuple(t for t in evaluation.threats if t.family != "text")
        if not proven:
            raise UserError(
                f"checkpoint {evaluation.short} has attacks on words only, which prove nothing: certify its head into the same directory "
                "(cure-ray certify RUN --out DIR --add), then read both"
            )
        return proven
    if wanted is not None:
        main = []
        for norm, eps in wanted:
            match = [t for t in present if t.norm == norm and np.isclose(t.eps, eps, rtol=1e-6, atol=0)]
            if not match and not chosen:  # what each image was certified at is what there is to say of it
                match = [t for t in present if t.norm == norm and EACH in t.name]
            if not match:
                radii = ", ".join(t.name for t in present) or "none"
                raise UserError(
                    f"checkpoint {evaluation.short}: the union is over {norm}={eps:g} too, but there are verdicts for {radii} only. "
                    "Certify the missing one, or choose the radii with --threat."
                )
            if len(match) > 1:
                raise UserError(
                    f"checkpoint {evaluation.short} has two radii called {match[0].name} that differ by rounding: keep one store"
                )
            main.append(match[0])
        return tuple(sorted(main, key=lambda t: t.sort_key))
    for norm in NORMS:
        several = [t.name for t in present if t.norm == norm]
        if len(several) > 1:
            raise UserError(
                f"checkpoint {evaluation.short} has verdicts for several radii of one norm ({', '.join(several)}); "
                f"say which one the union is over, e.g. --threat {several[0]}"
            )
    return present
