"""Certification results as people use them in Python: verdicts and tables in pandas, counterexamples, the report."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from cure_ray.errors import UserError
from cure_ray.results.attacked import read_attacked
from cure_ray.results.frames import Loaded, load
from cure_ray.results.report.build import report_path, write_loaded
from cure_ray.results.store import Store
from cure_ray.results.study import Study
from cure_ray.results.tables import accuracy_table, compact_table
from cure_ray.results.words import attacked_table
from cure_ray.threats import Threat


@dataclass(frozen=True, eq=False, repr=False)
class Results:
    """Everything below one or more results directories, complete and of one kind.

    In a notebook it shows its table. `study` goes into the functions of `cure_ray.results.tables` for everything else they compute.
    """

    read: Callable[[], Loaded]

    @cached_property
    def loaded(self) -> Loaded:
        return self.read()

    @property
    def study(self) -> Study:
        return self.loaded.study

    @property
    def stores(self) -> tuple[Store, ...]:
        return self.loaded.stores

    @property
    def verdicts(self) -> pd.DataFrame:
        """One row per network, image and threat (docs/reference/schema.md)."""
        return self.loaded.verdicts

    def table(self, baseline: str | None = None) -> pd.DataFrame:
        """Accuracies in percent with 95 % intervals as text, one row per method; with a baseline, how much better each is than it."""
        return compact_table(self.study, baseline)

    def accuracies(self) -> pd.DataFrame:
        """The same numbers with all digits, one row per network, and the ends of their intervals in columns of their own."""
        return accuracy_table(self.study)

    def words(self, baseline: str | None = None) -> pd.DataFrame:
        """Per method and attack on words: accuracy under attack, queries, words changed, and how often vectors stay in each ball.

        Empty where no words were attacked. With a baseline: the difference to it in points, and its p-value.
        """
        return attacked_table(self.study, read_attacked(self.stores), baseline)

    @property
    def union(self) -> float:
        """Of the one network here: the share of images certified under every norm, in [0, 1]."""
        table = self.accuracies()
        if len(table) != 1:
            raise UserError(f"these are results of {len(table)} networks: their unions are in .table() and .accuracies()")
        if "union" not in table:
            raise UserError("no norm ball was certified here, so there is no union; .table() has the transformations and patches")
        return float(table["union"].iloc[0]) / 100

    def witness(self, sample: int, threat: Threat | str, checkpoint: str = "") -> "np.ndarray[Any, np.dtype[np.float64]]":
        """The misclassified image [C, H, W] that falsifies this sample. `checkpoint`: first digits, where there are several."""
        rows = self.verdicts
        mine = rows["checkpoint_digest"].astype(str).str.startswith(checkpoint)
        rows = rows[mine & (rows["sample_index"] == sample) & (rows["threat"].astype(str) == str(threat))]
        if len(rows) != 1:
            known = ", ".join(map(str, self.verdicts["threat"].unique()))
            many = f"{len(rows)} networks have one: name the checkpoint" if len(rows) else f"no such row; the threats here are {known}"
            raise UserError(f"sample {sample} under {threat}: {many}")
        row = rows.iloc[0]
        if row["status"] != "falsified":
            raise UserError(f"sample {sample} under {threat} is {row['status']}, not falsified: it has no counterexample")
        holds = [s for s in self.stores if s.about(str(row["checkpoint_digest"]))]
        return holds[0].read_witness(str(row["witness"]))

    def report(
        self, path: str | Path | None = None, *, images: int = 24, runs: Sequence[str | Path] = (), data_dir: str | Path | None = None
    ) -> Path:
        """Write the report, one HTML file that needs no network, and return its path: by default report.html in the results."""
        target = report_path(self.study.source or self.stores[0].root, Path(path) if path is not None else None)
        return write_loaded(self.loaded, target, None if data_dir is None else Path(data_dir), [Path(r) for r in runs], images)

    def __repr__(self) -> str:
        return f"certified accuracy in %, 95 % intervals\n{self.table().to_string(index=False)}"

    def _repr_html_(self) -> str:
        return str(self.table().to_html(index=False))


def load_results(
    sources: str | Path | Sequence[str | Path],
    *,
    threats: Sequence[str] = (),
    checkpoints: Sequence[str] = (),
    runs: Sequence[str | Path] = (),
    by_name: bool = False,
) -> Results:
    """Read what `certify` wrote: a results directory, one above several of them, or a list. Refused where it is partial or mixed.

    `threats` chooses the radii of the union (by default the experiment's), `checkpoints` some networks by the first digits of their
    digest; `runs` says where training runs are (learning curves, hardware), and `by_name` calls rows by their experiments' names.
    """
    loaded = load(sources, threats, checkpoints, _directories(runs), by_name)
    return Results(lambda: loaded)


def _directories(paths: Sequence[str | Path]) -> list[Path]:
    for path in map(Path, paths):
        if not path.is_dir():
            raise UserError(f"--runs: {path} is not a directory")
    return [Path(path) for path in paths]
