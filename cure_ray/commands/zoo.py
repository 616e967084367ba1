"""`cure-ray zoo`: the networks of the zoo listed, certified again, and new ones put in."""

from pathlib import Path
from typing import Annotated

import typer

from cure_ray.commands.train import DataDirOption
from cure_ray.errors import UserError

ZooOption = Annotated[Path | None, typer.Option("--zoo", help="Its directory; default: $CURE_RAY_ZOO, else `zoo/` of the checkout.")]
DataOption = Annotated[Path | None, typer.Option(help=".npz with the images a published network was judged on, where they were chosen.")]

app = typer.Typer(invoke_without_command=True, help="The networks of the zoo: list them, certify one again, put one in.")


@app.callback()
def zoo(context: typer.Context, directory: ZooOption = None) -> None:
    """List the networks of the zoo, what is proven of them, and what it cost.

    `cure-ray zoo certify NAME` computes its verdicts again and compares; `cure-ray zoo add RUN STORE` puts a network in.
    """
    if context.invoked_subcommand is not None:
        return
    from cure_ray.results.cards import claim, read_results
    from cure_ray.results.judgement import measured
    from cure_ray.zoo.manifest import check_entry, find_zoo, read_manifest, zoo_bytes

    root = find_zoo(directory)
    manifest = read_manifest(root)
    for entry in manifest.entries:
        folder = check_entry(root, entry)
        print(f"{entry.name} ({entry.kind}): {entry.title}")
        print(f"    {claim(entry, measured(read_results(folder, entry)))} Certification: {entry.certification.seconds:.0f} s.")
    print(f"{len(manifest.entries)} networks, {zoo_bytes(root) / 1e6:.1f} MB in {root}")


@app.command("certify")
def certify(
    name: Annotated[str | None, typer.Argument(help="A network of the zoo; without one, every network whose weights are in it.")] = None,
    samples: Annotated[int | None, typer.Option(min=1, help="Only so many of its images; default: all it has verdicts of.")] = None,
    few: Annotated[bool, typer.Option("--few", help="Only the images kept in the zoo: needs no data set.")] = False,
    weights: Annotated[Path | None, typer.Option(help="The authors' file, for a published network.")] = None,
    data: DataOption = None,
    workers: Annotated[int, typer.Option(min=1, help="Certify on so many Ray workers; 1: in this process.")] = 1,
    directory: ZooOption = None,
    data_dir: DataDirOption = None,
) -> None:
    """Certify a network of the zoo again, or all of them, with the settings of its verdicts, and compare every one of them.

    Nothing is written. Any difference is named and ends with exit code 1.
    """
    from cure_ray.api.request import Execution
    from cure_ray.api.zoo import Hand, recertify
    from cure_ray.zoo.manifest import find_zoo, read_manifest

    if name is None and (weights is not None or data is not None):
        raise UserError("--weights and --data are about one published network: name it")
    entries = read_manifest(find_zoo(directory)).entries
    missing = [entry.name for entry in entries if name is None and entry.published]
    wrong = 0
    for one in [name] if name is not None else [entry.name for entry in entries if not entry.published]:
        found = recertify(one, directory, samples, few, Hand(weights, data, data_dir), Execution(workers=workers))
        for difference in found.differences:
            print(f"{one}: {difference}")
        wrong += len(found.differences)
        contradictions = sum(d.contradiction for d in found.differences)
        as_in = f"{len(found.differences)} of {found.rows} verdicts differ, {contradictions} of them contradictions"
        print(f"{one}: {as_in if found.differences else f'all {found.rows} verdicts are as in the zoo'}")
    if missing:
        print(f"not certified again, since their weights are their authors': {', '.join(missing)}")
    if wrong:
        raise typer.Exit(1)


@app.command("add")
def add(
    source: Annotated[str, typer.Argument(help="A run directory of `cure-ray train`, or the name of a published network.")],
    store: Annotated[Path, typer.Argument(help="Its verdicts: what `cure-ray certify` or `cure-ray judge` wrote.")],
    name: Annotated[str, typer.Option(help="What it is called in the zoo: small letters, digits, dots and hyphens.")],
    title: Annotated[str, typer.Option(help="What it is, in a few words.")],
    witnesses: Annotated[bool, typer.Option(help="Keep the counterexamples too; they are most of a store.")] = True,
    threats: Annotated[
        str | None, typer.Option(help="Its protocol, where it is not that of the run's experiment: linf=0.1,l2=0.5,l1=1.")
    ] = None,
    directory: ZooOption = None,
    data_dir: DataDirOption = None,
) -> None:
    """Put a network into the zoo: the last checkpoint of a run, its experiment, metrics and verdicts; a card; a line in the manifest.

    Refused unless the verdicts are of this very network, under its whole protocol, and whole.
    """
    from cure_ray.api.enrol import Offer
    from cure_ray.api.enrol import add as enrol
    from cure_ray.api.zoo import Hand

    entry = enrol(Offer(source, store, name, title, witnesses, threats), directory, Hand(data_dir=data_dir))
    how = "--weights FILE" if entry.published else "--few"
    print(f"{entry.name}: {len(entry.files)} files in {entry.folder}; check it with `cure-ray zoo certify {entry.name} {how}`")
