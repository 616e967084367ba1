"""Search an experiment's settings with Optuna on Ray."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cure_ray.errors import UserError
from cure_ray.search.layout import trial_runs
from cure_ray.search.ranking import check_met
from cure_ray.search.space import Sweep, load_sweep
from cure_ray.search.study import default_directory
from cure_ray.search.trials import meets

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class Trial:
    """A configuration that was trained to the end: its point of the space, its objectives in [0, 1], its runs (one per seed)."""

    number: int
    point: dict[str, Any]
    values: dict[str, float]
    runs: tuple[Path, ...]
    meets: bool = True  # the sweep's constraints


@dataclass(frozen=True)
class SweepResult:
    """A search that used up its budget; finished trials, best first: who meets the constraints, a Pareto front for several objectives."""

    directory: Path
    trials: tuple[Trial, ...]
    front: tuple[Trial, ...] = ()  # who meets the constraints and is beaten by none, by the first objective; `cure_ray.certify` takes them

    @property
    def best(self) -> Trial:
        """The best trial; `cure_ray.certify` takes it."""
        if not self.trials:
            raise UserError(f"no trial finished; see: cure-ray status {self.directory}")
        if not self.trials[0].meets:
            check_met(self.directory)
        return self.trials[0]

    def table(self) -> "pd.DataFrame":
        """One row per trial: number, objectives, settings."""
        import pandas as pd

        return pd.DataFrame([{"trial": t.number, **t.values, **t.point} for t in self.trials])

    def _repr_html_(self) -> str:
        return str(self.table().to_html(index=False))


def sweep(
    source: Sweep | Mapping[str, Any] | str | Path,
    *,
    out: str | Path | None = None,
    trials: int | None = None,
    address: str | None = None,
    data_dir: str | Path | None = None,
    quiet: bool = False,
) -> SweepResult:
    """Search settings for the best certified accuracy on a validation split; the same call continues where it stopped.

    `source` is a YAML file (docs/guide/sweeps.md), its content as a dict, a Sweep, or the name of one that comes with the program
    (`smoke`); `trials` another budget than its own; `address` a running Ray cluster (by default RAY_ADDRESS, else this machine); `out`
    the sweep's directory, by default sweeps-out/NAME-HASH.
    """
    from cure_ray.cluster.trials.sweep import run_sweep

    search = source if isinstance(source, Sweep) else load_sweep(source)
    if trials is not None:
        if isinstance(trials, bool) or not isinstance(trials, int) or trials < 1:
            raise UserError(f"trials must be a whole number, at least 1, got {trials!r}")
        search = search.model_copy(update={"trials": trials})
    done = run_sweep(search, Path(out) if out is not None else default_directory(search), address, data_dir, quiet)
    found = []
    for trial in done.trials:
        values = dict(zip(search.objectives, trial.values, strict=True))
        runs = tuple(trial_runs(done.directory, trial.number))
        found.append(Trial(trial.number, trial.user_attrs["point"], values, runs, meets(trial)))
    return SweepResult(done.directory, tuple(found), tuple(t for t in found if t.number in done.front))
