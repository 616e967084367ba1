"""`cure-ray fsck`: is a results store whole? What is missing, torn, duplicated or foreign, by name; and put it right."""

from typing import Annotated

import typer

from cure_ray.commands.train import AllowCodeOption, DataDirOption
from cure_ray.errors import UserError


def fsck(
    directory: Annotated[str, typer.Argument(metavar="STORE", help="A results directory (or fsspec URI) of `cure-ray certify`.")],
    repair: Annotated[bool, typer.Option("--repair", help="Delete what is broken or foreign, and compute what is missing.")] = False,
    workers: Annotated[int, typer.Option(min=1, help="Repair on so many Ray workers; 1: in this process.")] = 1,
    data_dir: DataDirOption = None,
    allow_code: AllowCodeOption = [],  # noqa: B006 - the option's callback acts on it
) -> None:
    """Check every shard, row and witness of a store against what its runs set out to do.

    Exit code 0: whole. 2: something was found; each finding is one line, and `--repair` recomputes exactly what is affected, to the
    same bytes (it needs the checkpoints where they were when they were certified).
    """
    from cure_ray.api.repair import repair_store
    from cure_ray.api.request import Execution
    from cure_ray.results.fsck import fsck as check
    from cure_ray.results.store import Store

    store = Store.open(directory)
    findings = check(store)
    for finding in findings:
        print(finding)
    if findings and repair:
        repair_store(store, findings, Execution(device="cpu", workers=workers), data_dir)
        findings = check(store)
    if findings:
        hint = "could not be repaired" if repair else f"run `cure-ray fsck {directory} --repair`"
        raise UserError(f"{directory}: {len(findings)} findings; {hint}")
    print(f"{directory} is whole: {len(store.shards())} shards, {store.read(['status']).num_rows} verdicts")
