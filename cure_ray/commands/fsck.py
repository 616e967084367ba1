"""`cure-ray fsck`: is a results store whole? What is missing, torn, duplicated or foreign, by name; and put it right."""

from pathlib import Path
from typing import Annotated

import typer

from cure_ray.commands.train import AllowCodeOption, DataDirOption
from cure_ray.errors import UserError


def fsck(
    directory: Annotated[str, typer.Argument(metavar="STORE", help="A results directory (or fsspec URI) of `cure-ray certify`.")],
    repair: Annotated[bool, typer.Option("--repair", help="Delete what is broken or foreign, and compute what is missing.")] = False,
    workers: Annotated[int, typer.Option(min=1, help="Repair on so many Ray workers; 1: in this process.")] = 1,
    replay: Annotated[bool, typer.Option("--replay", help="Question some rows of every network that is at hand.")] = False,
    rows: Annotated[int, typer.Option(min=1, help="--replay: rows of every network, threat and status.")] = 3,
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="--replay: which rows, and of the new attacks.")] = 1,
    network: Annotated[str | None, typer.Option(help="--replay: package.module:factory of a network trained elsewhere.")] = None,
    weights: Annotated[Path | None, typer.Option(help="--replay: its weights, if they have moved.")] = None,
    data: Annotated[Path | None, typer.Option(help="--replay: the .npz of the images, if it has moved.")] = None,
    data_dir: DataDirOption = None,
    allow_code: AllowCodeOption = [],  # noqa: B006 - the option's callback acts on it
) -> None:
    """Check every shard, row and witness of a store against what its runs set out to do.

    Exit code 0: whole. 2: something was found; each finding is one line, and `--repair` recomputes exactly what is affected, to the
    same bytes (it needs the checkpoints where they were when they were certified).

    `--replay` loads each network from where it was certified and questions rows of it: is the label that of the data and the clean
    prediction that of the network, does the witness lie in its threat and fool the network, does a new attack leave a certificate
    standing and does its proof come again? It says what it replayed, what it could not, and why; a contradicted row is a finding.
    """
    from cure_ray.api.repair import repair_store
    from cure_ray.api.replay import Hand, replay_store
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
    if replay:
        found = replay_store(store, Hand(network, weights, data, data_dir), rows, seed)
        for line in (line for one in found for line in one.lines()):
            print(line)
        wrong = sum(len(one.contradicted) for one in found)
        if wrong:
            raise UserError(f"{directory}: {wrong} rows are contradicted by their network; do not use these results")
        if not any(one.asked for one in found):
            raise UserError(f"{directory}: nothing could be replayed")
    print(f"{directory} is whole: {len(store.shards())} shards, {store.read(['status']).num_rows} verdicts")
