"""What the run directories of a trial know by themselves: finished epochs, and the objective measured at some of them."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from cure_ray.runs.lease import Lease
from cure_ray.runs.metrics import read_lines, read_metrics

JUDGED = "objective.jsonl"
BOUND = "_at_most"
Row = dict[str, Any]


def judged_at(run: Path, epoch: int) -> Row | None:
    """The objective of the run measured after this epoch, with the bounds logged in training after the same epoch; None if it was not."""
    for row in read_lines(run / JUDGED):
        if row["epoch"] == epoch:
            return {**{k: v for k, v in row.items() if k not in ("epoch", "seconds")}, **_logged(run, epoch)}
    return None


def note_judged(lease: Lease, epoch: int, values: Mapping[str, float], seconds: float) -> Row:
    """Keep a measurement for whoever asks again."""
    path = lease.directory / JUDGED
    rows = [*read_lines(path), {"epoch": epoch, **values, "seconds": seconds}]
    lease.write(path, "".join(json.dumps(row) + "\n" for row in rows))
    return {**values, **_logged(lease.directory, epoch)}


def _logged(run: Path, epoch: int) -> Row:
    row = next((row for row in read_metrics(run) if row["epoch"] == epoch), {})
    return {k: v for k, v in row.items() if k.startswith("ibp_")}


def mean_judged(runs: Sequence[Path], epoch: int) -> Row | None:
    """The mean objective of a configuration after this epoch, once all of its runs were measured there."""
    rows = [judged_at(run, epoch) for run in runs]
    return mean([row for row in rows if row is not None]) if None not in rows else None


def bound_name(name: str) -> str:
    """Under which an objective that was not measured to its end is noted: what it is at most."""
    return f"{name}{BOUND}"


def at_most(row: Mapping[str, float], names: Iterable[str]) -> Row:
    """What is known only by a bound."""
    return {name: row[bound_name(name)] for name in names if name not in row}


def mean(rows: Sequence[Row]) -> Row:
    """Of every number that all rows have; where one has only a bound, the mean is a bound."""
    bounded = [k.removesuffix(BOUND) for k in dict.fromkeys(k for row in rows for k in row) if k.endswith(BOUND)]
    rows = [{**row, **{bound_name(k): row[k] for k in bounded if k in row}} for row in rows]
    keys = [k for k, v in rows[0].items() if isinstance(v, int | float) and all(k in row for row in rows)]
    return {k: sum(row[k] for row in rows) / len(rows) for k in keys}


def epochs_of(run: Path) -> int:
    """Finished epochs."""
    return max((int(row["epoch"]) for row in read_metrics(run)), default=0)


def rungs_passed(runs: Sequence[Path], rungs: Sequence[int]) -> int:
    """How many rungs the runs have left behind: training goes on after one only if it was decided so."""
    furthest = max(map(epochs_of, runs))
    return sum(epoch < furthest for epoch in rungs)


def epochs_after(runs: Sequence[Path], seen: int) -> Iterator[tuple[int, Row]]:
    """Means over the runs of the metrics of every later epoch that all of them have finished."""
    tables = [{int(row["epoch"]): row for row in read_metrics(run)} for run in runs]
    for epoch in sorted(set.intersection(*(set(t) for t in tables))):
        if epoch > seen:
            yield epoch, {**mean([t[epoch] for t in tables]), "epoch": epoch, "timesteps_total": epoch}
