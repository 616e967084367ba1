"""Train one experiment, in this process or (execution.mode=parallel) on Ray Train."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cure_ray.config import Experiment, load_experiment
from cure_ray.errors import UserError
from cure_ray.runs.directory import default_directory
from cure_ray.runs.metrics import read_metrics
from cure_ray.runs.record import RunResult
from cure_ray.runs.run import train_run

if TYPE_CHECKING:
    import pandas as pd

    from cure_ray.networks.models import Network

Overrides = Mapping[str, Any] | Iterable[str]


@dataclass(frozen=True)
class Run(RunResult):
    """A finished training: where it is, its last checkpoint, and what its last epoch measured."""

    name: str = ""

    def history(self) -> "pd.DataFrame":
        """One row per epoch: losses, accuracies, seconds."""
        import pandas as pd

        return pd.DataFrame(read_metrics(self.directory))

    def network(self) -> "Network":
        """The trained network, in evaluation mode on the CPU, with every file of its checkpoint checked."""
        from cure_ray.runs.checkpoints import load_checkpoint

        return load_checkpoint(self.checkpoint).network


def train(
    experiment: Experiment | Mapping[str, Any] | str | Path,
    *,
    method: str | None = None,
    scale: float | None = None,
    overrides: Overrides = (),
    out: str | Path | None = None,
    resume: bool = False,
    data_dir: str | Path | None = None,
    quiet: bool = False,
) -> Run:
    """Train one network; every epoch is saved in `out` (by default runs/NAME-seedS-HASH).

    `experiment` is a preset's name, a YAML file, its content as a dict, or an Experiment. `method` and `scale` are short for the fields
    training.method and scale; `overrides` sets any others, as a mapping of paths to values or as the texts `--set` takes.

    >>> import cure_ray
    >>> run = cure_ray.train("smoke", method="max", scale=0.1, overrides={"dataset.train_samples": 300}, out="runs/tiny", quiet=True)
    >>> run.history()["epoch"].tolist()
    [1, 2, 3]
    >>> run.network().input_shape
    (1, 8, 8)
    """
    short = {path: value for path, value in (("training.method", method), ("scale", scale)) if value is not None}
    if not isinstance(overrides, Mapping) and (isinstance(overrides, str) or not isinstance(overrides, Iterable)):
        raise UserError(f"overrides are a mapping like {{'training.eta': 1}} or a list of texts like ['training.eta=1'], not {overrides!r}")
    wanted = {**overrides, **short} if isinstance(overrides, Mapping) else [*overrides, *(f"{k}={v}" for k, v in short.items())]
    settings = load_experiment(experiment, wanted)
    directory = Path(out) if out is not None else default_directory(settings)
    if settings.execution.mode == "parallel":
        from cure_ray.cluster.training.workers import train_parallel  # on RAY_ADDRESS if it is set, else embedded in this machine

        done = train_parallel(settings, directory, resume, data_dir, quiet)
    else:
        done = train_run(settings, directory, resume, data_dir, quiet)
    return Run(done.directory, done.checkpoint, done.epoch, done.metrics, settings.name)
