"""`cure-ray doctor`: is this machine or cluster fit for a run?"""

from pathlib import Path
from typing import Annotated

import typer

from cure_ray.commands.sweep import AddressOption
from cure_ray.commands.train import AllowCodeOption
from cure_ray.errors import UserError


def doctor(
    storage: Annotated[Path | None, typer.Option("--storage", help="Where runs will be written: checked from every node.")] = None,
    plan: Annotated[str | None, typer.Option("--plan", help="The experiment or preset to come: it must fit the disk.")] = None,
    runs: Annotated[int, typer.Option(min=1, help="How many runs of it.")] = 1,
    address: AddressOption = None,
    allow_code: AllowCodeOption = [],  # noqa: B006 - the option's callback acts on it
) -> None:
    """Check versions, storage, disk, GPUs, TF32, authentication and the dashboard on every node; every finding says what to do.

    Exit code 0: nothing stands in the way. 2: at least one problem.
    """
    from cure_ray.cluster.doctor import diagnose
    from cure_ray.config import load_experiment

    checks = diagnose(storage, load_experiment(plan) if plan else None, runs, address)
    for check in checks:
        print(check)
    problems = sum(check.level == "problem" for check in checks)
    if problems:
        raise UserError(f"{problems} problem{'s' if problems > 1 else ''}; see above for the remedies")
