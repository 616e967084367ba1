"""From directories to a study: finds stores, reads them, checks that what was planned is there, and joins the runs' metadata."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa

from cure_ray.errors import UserError
from cure_ray.results.evaluations import REQUIRED, STAGES, named_samples
from cure_ray.results.store import Store
from cure_ray.results.study import RunInfo, Study, build_study
from cure_ray.threats.norms import NORMS

COLUMNS = [*REQUIRED, "schema_version", "witness", "engine_version", "stages", "budget_seconds", "budget_nodes", "box", "nodes"]
"""What the tables need; `margins` is left out because a list per row costs more than everything else together."""
_DEPTH = 4


@dataclass(frozen=True)
class Loaded:
    """A study and where it came from."""

    study: Study
    stores: tuple[Store, ...]
    verdicts: pd.DataFrame
    images: "np.ndarray[Any, Any] | None" = None  # [N, C, H, W] of the split, where the caller has them: the report shows some

    @cached_property
    def shards(self) -> tuple[tuple[str, str], ...]:
        """(store, file name) of every shard, listed once."""
        return tuple((store.root, name) for store in self.stores for name in store.shards())

    def enabled_stages(self, study: Study) -> tuple[str, ...]:
        """The stages any run of the study had switched on, in the cascade's order: what was never tried decides nothing."""
        mine = self.verdicts["checkpoint_digest"].isin([e.evaluation.checkpoint for e in study.entries])
        used = {stage for stages in self.verdicts.loc[mine, "stages"].unique() for stage in str(stages).split(",")}
        return tuple(stage for stage in STAGES if stage in used)


def find_stores(source: str | Path) -> list[Store]:
    """The store at `source`, or all stores below it (a run, a sweep, a folder of runs)."""
    if "://" in str(source):
        return [Store.open(source)]
    root = Path(source)
    if not root.exists():
        raise UserError(f"{root} does not exist. Give the directory that `cure-ray certify` wrote, or one above it.")
    if not root.is_dir():
        raise UserError(f"{root} is a file; give the directory that `cure-ray certify` wrote, or one above it.")
    if (root / "store.json").exists():
        return [Store.open(root)]
    below = [p.parent for depth in range(1, _DEPTH) for p in sorted(root.glob("*/" * depth + "store.json"))]
    if not below:
        raise UserError(f"{root} holds no certification results. Make some: cure-ray certify RUN --out {root / 'results'}")
    return [Store.open(p) for p in below]


def read_verdicts(stores: Sequence[Store], columns: list[str] | None = None) -> pd.DataFrame:
    """All rows of the stores, as pandas; text columns as categories, which keeps 600,000 rows small and fast."""
    table = pa.concat_tables(s.read(columns or COLUMNS) for s in stores)
    return table.to_pandas(strings_to_categorical=True)


def check_same_data(stores: Sequence[Store]) -> None:
    """Results on different images under one name must not meet in one table: sample 7 of one would be paired with sample 7 of another."""
    seen: dict[tuple[str, str], tuple[str, str]] = {}
    for store in stores:
        about = store.files.read_json("store.json") or {}
        name, digest = (str(about.get("dataset")), str(about.get("split"))), str(about.get("data_digest"))
        other, known = seen.setdefault(name, (store.root, digest))
        if digest != known:
            raise UserError(
                f"{other} and {store.root} both hold results on {name[0]} ({name[1]}), but on different images (digests {known[:8]} and "
                f"{digest[:8]}): their numbers are not comparable. Read them one at a time, or give the data files different names."
            )


def parse_threats(texts: Iterable[str]) -> tuple[tuple[str, float], ...] | None:
    """`linf=0.1` or `linf=8/255`, one per norm; None if there are none."""
    chosen: dict[str, float] = {}
    for text in texts:
        norm, _, radius = text.partition("=")
        try:
            top, _, bottom = radius.partition("/")
            eps = float(top) / float(bottom or 1)
        except (ValueError, ZeroDivisionError):
            eps = float("nan")
        if norm not in NORMS or not np.isfinite(eps) or eps <= 0:
            raise UserError(f"--threat takes a norm ({', '.join(NORMS)}) and a radius, e.g. linf=8/255; got {text!r}")
        if norm in chosen:
            raise UserError(f"--threat names {norm} twice; the union takes one radius per norm")
        chosen[norm] = eps
    return tuple(chosen.items()) or None


def check_complete(stores: Sequence[Store], verdicts: pd.DataFrame) -> None:
    """Rows that were planned and are not there are named. Without this, an interrupted certification would look smaller, not partial."""
    have: dict[tuple[str, str], Any] = {}
    grouped = verdicts.groupby(["checkpoint_digest", "threat"], observed=True)["sample_index"]
    for (digest, threat), samples in grouped:
        have[str(digest), str(threat)] = samples.to_numpy()
    known = {digest for digest, _ in have}
    for store in stores:
        for plan in store.plans():
            digest = str(plan["checkpoint_digest"])
            if digest not in known:
                raise UserError(f"{store.root}: checkpoint {digest[:12]} was to be certified, but has no verdicts yet. {_AGAIN}")
            for threat, indices in plan["threats"].items():
                lacking = np.setdiff1d(np.asarray(indices), have.get((digest, threat), np.array([], dtype=int)))
                if len(lacking):
                    what = f"{threat} of checkpoint {digest[:12]} lacks {len(lacking)} of {len(indices)} samples ({named_samples(lacking)})"
                    raise UserError(f"{store.root}: {what}. {_AGAIN}")


_AGAIN = "Run the same `cure-ray certify` command again: it continues where it stopped."


def find_runs(roots: Iterable[Path], levels: int = _DEPTH) -> dict[str, Path]:
    """Training runs at most so far below these directories, by the hash of their experiment. The first one found wins."""
    found: dict[str, Path] = {}
    for root in roots:
        for depth in range(levels):
            for described in sorted(root.glob("*/" * depth + "run.json")):
                try:
                    found.setdefault(str(json.loads(described.read_text())["config_hash"]), described.parent)
                except (OSError, ValueError, KeyError, TypeError):
                    continue  # somebody else's run.json
    return found


def run_info(about: Mapping[str, Any], digest: str, runs: Mapping[str, Path]) -> RunInfo:
    """What `runs/<digest>.json` says, completed from the run's directory where that is known."""
    directory = runs.get(str(about.get("config_hash")))
    described = json.loads((directory / "run.json").read_text()) if directory else {}
    return RunInfo(
        checkpoint=digest,
        experiment=about.get("experiment") or {},
        directory=directory,
        epoch=about.get("epoch"),
        hardware=about.get("hardware") or described.get("hardware") or {},
        versions=about.get("versions") or described.get("versions") or {},
        metrics=about.get("metrics") or {},
        about=about,
    )


def load(
    sources: str | Path | Sequence[str | Path],
    threats: Iterable[str] = (),
    checkpoints: Sequence[str] = (),
    runs: Sequence[Path] = (),
    by_name: bool = False,
) -> Loaded:
    """Everything below the sources as one study. UserError where it is empty, partial, mixed, torn or newer than this code.

    `runs` are directories to look for training runs in (learning curves, hardware), besides the sources and their neighbours.
    `by_name` calls the rows of the tables by their experiments' names instead of their methods.
    """
    paths = [sources] if isinstance(sources, str | Path) else [*sources] if isinstance(sources, Iterable) else []
    if not paths:
        raise UserError(f"results are read from a directory, or a list of them, not from {sources!r}")
    stores = tuple({s.root: s for path in paths for s in find_stores(path)}.values())  # a store named twice is read once
    check_same_data(stores)
    verdicts = read_verdicts(stores)
    if verdicts.empty:
        raise UserError(f"{stores[0].root} has no verdicts yet. {_AGAIN}")
    if checkpoints:
        verdicts = _only(verdicts, checkpoints)
    else:
        check_complete(stores, verdicts)
    local = [Path(store.root) for store in stores if "://" not in store.root]
    named = [Path(str(p)) for p in paths if "://" not in str(p)]
    known = find_runs(dict.fromkeys([*runs, *named, *(root.parent / beside for root in local for beside in ("runs", "sweep"))]))
    known = find_runs(dict.fromkeys(root.parent for root in local), levels=2) | known  # neighbours; no deeper, it may be anybody's home
    infos = {}
    for digest in map(str, verdicts["checkpoint_digest"].unique()):
        about = next((a for s in stores if (a := s.about(digest))), {})
        infos[digest] = run_info(about, digest, known)
    source = Path(str(paths[0])) if "://" not in str(paths[0]) else None
    return Loaded(build_study(verdicts, infos, parse_threats(threats), source, by_name), stores, verdicts)


def _only(verdicts: pd.DataFrame, checkpoints: Sequence[str]) -> pd.DataFrame:
    digests = verdicts["checkpoint_digest"].astype(str)
    for wanted in checkpoints:
        if not digests.str.startswith(wanted).any():
            there = ", ".join(sorted({d[:12] for d in digests.unique()}))
            raise UserError(f"no verdicts of a checkpoint {wanted!r} here; there are: {there}")
    return verdicts[digests.str.startswith(tuple(checkpoints))].reset_index(drop=True)
