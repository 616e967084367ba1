"""`cure-ray train`: one experiment, in this process or (execution.mode=parallel) on Ray Train."""

from pathlib import Path
from typing import Annotated

import typer

ExperimentArgument = Annotated[
    str, typer.Argument(metavar="EXPERIMENT", help="An experiment in YAML, or the name of a preset (see `cure-ray config`).")
]
SetOption = Annotated[
    list[str], typer.Option("--set", metavar="KEY=VALUE", help="Override one field, e.g. --set training.eta=1.0; repeatable.")
]
DataDirOption = Annotated[
    Path | None, typer.Option("--data-dir", help="Where data sets are looked for first; then CURE_RAY_DATA, then the user cache.")
]


def _allow(modules: list[str]) -> list[str]:
    from cure_ray.config.factories import allow_code

    allow_code(modules)
    return modules


AllowCodeOption = Annotated[
    list[str],
    typer.Option(
        "--allow-code", metavar="MODULE", callback=_allow,
        help="Let network.factory run code of this module though it is outside the working directory; repeatable.",
    ),
]  # fmt: skip


def train(
    experiment: ExperimentArgument,
    override: SetOption = [],  # noqa: B006 - typer reads the default, nothing mutates it
    out: Annotated[Path | None, typer.Option("--out", help="Run directory; by default runs/NAME-seedS-HASH.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run in --out from its last checkpoint.")] = False,
    data_dir: DataDirOption = None,
    allow_code: AllowCodeOption = [],  # noqa: B006 - the option's callback acts on it
    quiet: Annotated[bool, typer.Option("--quiet", help="Print only the result.")] = False,
) -> None:
    """Train one network.

    Every epoch is saved; Ctrl-C costs at most the epoch it is in. The run directory holds `experiment.yaml` (all settings,
    explicit), `metrics.jsonl` (one line per epoch; `pandas.read_json(path, lines=True)`), `run.json` (hardware, versions) and
    `checkpoints/` (safetensors and JSON).

    Examples: `cure-ray train smoke`, `cure-ray train cifar-large --set scale=0.1 --set training.method=max --out runs/max`.
    """
    from cure_ray.api.train import train as train_one

    result = train_one(experiment, overrides=override, out=out, resume=resume, data_dir=data_dir, quiet=quiet)
    metrics = result.metrics
    split = metrics.get("eval_split", "validation")
    shown = {"clean": "clean", "ibp_linf": "l_inf", "ibp_l2": "l2", "ibp_l1": "l1", "ibp_union": "union"}
    accuracies = ", ".join(f"{label} {100 * metrics[key]:.1f} %" for key, label in shown.items() if key in metrics)
    print(f"trained {result.name} for {result.epoch} epochs: {accuracies} ({split} split; certified by IBP only, a loose lower bound)")
    print(f"checkpoint: {result.checkpoint}")
    print(f"certify it: cure-ray certify {result.directory}")
