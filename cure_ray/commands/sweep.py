"""`cure-ray sweep`: search an experiment's settings with Optuna on Ray."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cure_ray.commands.train import AllowCodeOption, DataDirOption

if TYPE_CHECKING:
    from cure_ray.api.sweep import Trial

AddressOption = Annotated[
    str | None, typer.Option("--address", help="A running Ray cluster (auto, or host:port); default: RAY_ADDRESS, else this machine.")
]


def sweep(
    file: Annotated[Path, typer.Argument(metavar="SWEEP", help="The search in YAML: base, space, search, budget (docs/guide/sweeps.md).")],
    out: Annotated[Path | None, typer.Option("--out", help="Sweep directory; by default sweeps-out/NAME-HASH.")] = None,
    trials: Annotated[int | None, typer.Option("--trials", min=1, help="Another budget than the file's.")] = None,
    address: AddressOption = None,
    data_dir: DataDirOption = None,
    allow_code: AllowCodeOption = [],  # noqa: B006 - the option's callback acts on it
    quiet: Annotated[bool, typer.Option("--quiet", help="Print only the result.")] = False,
) -> None:
    """Search settings for the best union certified accuracy on a validation split.

    Stop it anywhere and run the same command again: it continues, and no configuration is trained twice. Run it twice at once, from
    two shells or two machines that share the directory, and both work on it. The test set is never touched.

    Examples: `cure-ray sweep smoke`, `cure-ray status sweeps-out/smoke-...`.
    """
    from cure_ray.api.sweep import sweep as search
    from cure_ray.search.ledger import describe
    from cure_ray.search.space import load_sweep

    asked = load_sweep(file)
    result = search(asked, out=out, trials=trials, address=address, data_dir=data_dir, quiet=quiet)
    if not result.trials:
        print(f"no trial finished; see: cure-ray status {result.directory}")
        return
    best, several = result.best, len(asked.objectives) > 1
    met = f", {sum(t.meets for t in result.trials)} of which meet at_least" if asked.at_least else ""
    on = f"on {asked.samples} validation images at most"

    def reached(trial: "Trial") -> str:
        return ", ".join(f"{name} {100 * value:.1f} %" for name, value in trial.values.items())

    if several and len(result.front) > 1:
        print(f"front of {len(result.trials)} finished trials{met}, {on}:")
        for trial in result.front:
            print(f"  trial {trial.number}: {reached(trial)}  ({describe(trial.point)})")
        print(f"certify it on the test set: cure-ray certify {result.directory} --front --workers 2")
        return
    print(f"best of {len(result.trials)} finished trials{met}{' in every objective' if several else ''}: {reached(best)} {on}")
    print(f"  trial {best.number}: {describe(best.point)}")
    print(f"certify it on the test set: cure-ray certify {result.directory} --best 1 --workers 2")
