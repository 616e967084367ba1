"""`cure-ray report`: one HTML file for people, from certification results."""

from pathlib import Path
from typing import Annotated

import typer

from cure_ray.commands.train import DataDirOption


def report(
    directory: Annotated[str, typer.Argument(metavar="DIR", help="Results of `cure-ray certify`, or a directory above several of them.")],
    out: Annotated[Path | None, typer.Option("--out", help="HTML file to write; by default DIR/report.html.")] = None,
    runs: Annotated[
        list[Path],
        typer.Option("--runs", help="Where the training runs are (learning curves, hardware); repeatable. Neighbours of DIR are searched."),
    ] = [],  # noqa: B006 - typer reads the default, nothing mutates it
    threat: Annotated[
        list[str],
        typer.Option("--threat", help="Radius the union is taken over, e.g. linf=8/255; repeatable. By default the experiment's."),
    ] = [],  # noqa: B006
    checkpoint: Annotated[
        list[str], typer.Option("--checkpoint", help="Only this checkpoint (first digits of its digest); repeatable.")
    ] = [],  # noqa: B006
    baseline: Annotated[
        str | None, typer.Option("--baseline", metavar="METHOD", help="Also print how every method differs from this one, and p-values.")
    ] = None,
    names: Annotated[bool, typer.Option("--names", help="Call rows by the experiments' names instead of their methods.")] = False,
    images: Annotated[int, typer.Option("--images", min=0, help="Images per method in the gallery.")] = 24,
    data_dir: DataDirOption = None,
) -> None:
    """Write the report of certification results: one HTML file that needs no network.

    The claim, the union table with intervals and paired tests, trade-offs, stages and budgets, which norms fail together, learning
    curves, and a gallery of images with their margins and counterexamples. Every number links to the file it came from.
    """
    from cure_ray.api.results import load_results
    from cure_ray.results.tables import BASELINE_NOTE
    from cure_ray.results.words import NOTE

    results = load_results(directory, threats=threat, checkpoints=checkpoint, runs=runs, by_name=names)
    table = results.table(baseline)
    seeds = ", mean ± deviation over seeds" if (table["seeds"] > 1).any() else ""
    print(f"certified accuracy in %{seeds}, 95 % Wilson intervals")
    print(table.to_string(index=False))
    if baseline is not None:
        print(BASELINE_NOTE)
    words = results.words(baseline)
    if not words.empty:
        print(f"\n{NOTE}\n{words.to_string(index=False)}")
    path = results.report(out, images=images, runs=runs, data_dir=data_dir)
    print(f"report: {path} ({path.stat().st_size / 1e6:.1f} MB)")
