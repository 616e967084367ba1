"""A study: the evaluations of a store with what is known of their runs, named so that a reader can tell them apart."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import pandas as pd

from cure_ray.config import Experiment
from cure_ray.config.methods import display_name, method_rank
from cure_ray.errors import UserError
from cure_ray.results.evaluations import Evaluation, ThreatColumn, evaluations, main_threats
from cure_ray.threats.norms import NORMS

_SAME = (
    "name", "origin", "seed", "execution.", "certification.", "threats.", "dataset.name", "dataset.path", "training.method",
    "training.start_from",
)  # fmt: skip
"""Beginnings of the fields that do not make a variant of a method."""


@dataclass(frozen=True)
class RunInfo:
    """What the store, or the run's directory, says about how a checkpoint came to be. Everything may be unknown."""

    checkpoint: str
    experiment: Mapping[str, Any] = field(default_factory=dict)
    directory: Path | None = None
    epoch: int | None = None
    hardware: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, Any] = field(default_factory=dict)
    metrics: Mapping[str, Any] = field(default_factory=dict)  # of the checkpoint's epoch
    about: Mapping[str, Any] = field(default_factory=dict)

    @property
    def method(self) -> str:
        """The training method; for a network trained elsewhere, its name."""
        known = self.experiment.get("training", {}).get("method")
        known = known or next((self.about[k] for k in ("weights", "network", "onnx") if self.about.get(k)), None)
        return Path(str(known)).stem if known else self.checkpoint[:8]

    @property
    def paper_name(self) -> str:
        """The method as the paper calls it, whatever else is special about the run."""
        return display_name(self.method)

    @property
    def seed(self) -> int:
        return int(self.experiment.get("seed", 0))

    def setting(self, path: str) -> Any:
        """A field of the experiment by its dotted path, e.g. training.eta; None where unknown."""
        value: Any = self.experiment
        for key in path.split("."):
            value = value.get(key) if isinstance(value, Mapping) else None
        return value

    @property
    def radii(self) -> tuple[tuple[str, float], ...] | None:
        """The experiment's threats; None where unknown. A radius of 0 means: not part of the union."""
        threats = self.experiment.get("threats")
        if not isinstance(threats, Mapping):
            return None
        eps = {norm: float(Fraction(str(threats.get(norm, 0)))) for norm in NORMS}
        return tuple((norm, e) for norm, e in eps.items() if e > 0)


@dataclass(frozen=True)
class Entry:
    """One row of a table to be: a certified checkpoint."""

    info: RunInfo
    evaluation: Evaluation  # the complete block the entry is about: the l_p threats of the union, or else all transformations
    everything: Evaluation  # every verdict there is, holes included
    label: str = ""

    @property
    def balls(self) -> bool:
        """Whether there is a union to speak of; else only transformations and patches were certified."""
        return self.evaluation.threats[0].family == "lp"

    @property
    def headline(self) -> str:
        """The column entries of a setting are ranked by: the union, or the mean over transformations and patches (1.3)."""
        if self.balls:
            return "union"
        return "gcr_all" if self.everything.family("patch") else "gcr_geo"

    @property
    def setting(self) -> str:
        """What must be equal for two entries to be compared: data, and the radii of the union (or the transformations)."""
        names = (", " if self.balls else "; ").join(t.name for t in self.evaluation.threats)
        return f"{self.evaluation.dataset} ({self.evaluation.split}), {names}"


@dataclass(frozen=True)
class Study:
    """Everything the tables need."""

    entries: tuple[Entry, ...]
    source: Path | None = None

    @property
    def settings(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(e.setting for e in self.entries))

    def within(self, setting: str) -> "Study":
        return replace(self, entries=tuple(e for e in self.entries if e.setting == setting))


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            flat.update(flatten(value, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = tuple(value) if isinstance(value, list) else value
    return flat


def _shown(value: Any) -> str:
    if isinstance(value, tuple):
        return "+".join(map(str, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def labels(infos: Sequence[RunInfo]) -> list[str]:
    """Names for table rows: the method, and whatever settings tell runs of that method apart (seeds never do).

    Where runs differ in several settings, defaults are left out: `CURE-Max` beside `CURE-Max [regions.l2=ball, lambda_2=0.5]`.
    """
    defaults = flatten(Experiment().model_dump(mode="json"))
    flats = [{k: v for k, v in flatten(i.experiment).items() if not k.startswith(_SAME)} for i in infos]
    families = [(i.method, i.setting("dataset.name"), i.radii) for i in infos]
    names = []
    for info, flat, family in zip(infos, flats, families, strict=True):
        peers = [f for f, other in zip(flats, families, strict=True) if other == family]
        differing = [k for k in flat if any(p.get(k) != flat[k] for p in peers)]
        differing = [k for k in differing if flat[k] is not None]  # nothing was said about it
        if len(differing) > 1:
            differing = [k for k in differing if flat[k] != defaults.get(k)]
        variant = ", ".join(f"{k.removeprefix('training.')}={_shown(flat[k])}" for k in differing)
        names.append(info.paper_name + (f" [{variant}]" if variant else ""))
    return names


def recipe(info: RunInfo) -> dict[str, Any]:
    """The settings that make a run what it is: method and variant, without the seed, the names and how it was executed or judged."""
    return {k: v for k, v in flatten(info.experiment).items() if not k.startswith(_SAME) or k == "training.method"}


def own_names(infos: Sequence[RunInfo]) -> list[str]:
    """The experiments' own names, which must not be shared by runs that differ in more than their seed."""
    same: dict[tuple[str, Any, Any], dict[str, Any]] = {}
    names = []
    for info in infos:
        name = str(info.experiment.get("name") or info.method)
        flat = recipe(info)
        other = same.setdefault((name, info.setting("dataset.name"), info.radii), flat)
        changed = [k for k in {**flat, **other} if flat.get(k) != other.get(k)]
        if changed:
            raise UserError(
                f"two different experiments are called {name!r} ({changed[0]}: {other.get(changed[0])} and {flat.get(changed[0])}); "
                "rows cannot go by name: leave out --names, or give every variant a `name` of its own"
            )
        names.append(name)
    return names


def build_study(
    verdicts: pd.DataFrame,
    infos: Mapping[str, RunInfo] | None = None,
    threats: Iterable[tuple[str, float]] | None = None,
    source: Path | None = None,
    by_name: bool = False,
) -> Study:
    """From rows to named, complete evaluations. Every run must have the whole union; a hole anywhere is an error.

    `by_name` calls rows by their experiments' names instead of their methods.
    """
    chosen = tuple(threats) if threats is not None else None
    blocks = evaluations(verdicts)
    known = [(infos or {}).get(b.checkpoint, RunInfo(b.checkpoint)) for b in blocks]
    _refuse_two_checkpoints(blocks, known)
    entries = []
    for block, info in zip(blocks, known, strict=True):
        main: tuple[ThreatColumn, ...] = main_threats(block, chosen if chosen is not None else info.radii, chosen is not None)
        whole = block.only(main) if main[0].family == "lp" else block.common(main)
        entries.append(Entry(info, whole, block))
    names = own_names(known) if by_name else labels(known)
    entries = [replace(e, label=name) for e, name in zip(entries, names, strict=True)]
    entries.sort(key=lambda e: (e.setting, method_rank(e.info.method), e.label, e.info.seed, e.evaluation.checkpoint))
    return Study(tuple(entries), source)


def _refuse_two_checkpoints(blocks: Sequence[Evaluation], infos: Sequence[RunInfo]) -> None:
    """Two epochs of one training run are two rows that look alike; which one is meant is the user's to say."""
    seen: dict[tuple[str, str, str], tuple[Evaluation, RunInfo]] = {}
    for block, info in zip(blocks, infos, strict=True):
        if not info.experiment:
            continue
        identity = (str(sorted(flatten(info.experiment).items(), key=lambda kv: kv[0])), block.dataset, block.split)
        if identity in seen:
            other, about = seen[identity]
            raise UserError(
                f"the store mixes two checkpoints of one training run ({info.method}, seed {info.seed}): "
                f"{other.short} (epoch {about.epoch}) and {block.short} (epoch {info.epoch}). Choose one with --checkpoint {block.short}"
            )
        seen[identity] = (block, info)


def identity(entry: Entry) -> dict[str, object]:
    """The columns that say whose row it is."""
    return {
        "setting": entry.setting,
        "method": entry.label,
        "seed": entry.info.seed,
        "checkpoint": entry.evaluation.checkpoint,
        "n": entry.evaluation.n,
    }
