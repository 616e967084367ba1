"""`cure-ray radius`: how far from every image the network is proven right, and where it is wrong."""

from pathlib import Path
from typing import Annotated

import typer

from cure_ray.commands.certify import Elsewhere, pointed_at
from cure_ray.commands.train import AllowCodeOption, DataDirOption


def radius(
    checkpoint: Annotated[Path | None, typer.Argument(help="A run or checkpoint of `cure-ray train`.")] = None,
    norm: Annotated[str, typer.Option(help="linf, l2 or l1.")] = "l2",
    split: Annotated[str, typer.Option(help="test, validation or train.")] = "test",
    samples: Annotated[int | None, typer.Option(min=1, help="How many images; default: the experiment's, or all of --data.")] = None,
    precision: Annotated[float, typer.Option(help="How finely both ends are searched, relative to the radius.")] = 0.01,
    out: Annotated[Path | None, typer.Option(help="Directory to keep what is learnt in: the same command continues from it.")] = None,
    stages: Annotated[str | None, typer.Option(help="Comma separated: ibp,crown-ibp,attack,crown,alpha-crown,branch-and-bound.")] = None,
    budget: Annotated[str | None, typer.Option(help="Branch-and-bound time per sample and radius, e.g. 10s.")] = None,
    nodes: Annotated[int | None, typer.Option(min=0, help="Branch-and-bound sub-problems per sample and radius.")] = None,
    engine: Annotated[str, typer.Option(help="native, or auto_lirpa for graphs that are not sequential.")] = "native",
    network: Annotated[str | None, typer.Option(help="package.module:factory of a network trained elsewhere.")] = None,
    weights: Annotated[Path | None, typer.Option(help="Its weights: .safetensors, or .pt with plain tensors.")] = None,
    onnx: Annotated[Path | None, typer.Option("--onnx", help="A sequential network as an ONNX file; needs --data.")] = None,
    data: Annotated[Path | None, typer.Option(help=".npz with `images` and `labels`.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the attacks.")] = 0,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:N.")] = "auto",
    threads: Annotated[int, typer.Option(min=1, help="CPU threads.")] = 1,
    table: Annotated[Path | None, typer.Option(help="Write one row per image to this .csv file.")] = None,
    data_dir: DataDirOption = None,
    allow_code: AllowCodeOption = [],  # noqa: B006 - the option's callback acts on it
    quiet: Annotated[bool, typer.Option("--quiet", help="Print only the result.")] = False,
) -> None:
    """The largest certified and the smallest falsified radius of every image, by bisection.

    Example: `cure-ray radius runs/smoke --norm l2 --samples 100 --nodes 200 --table radii.csv`.
    """
    from cure_ray.api.radius import radius as search

    (subject,) = pointed_at([checkpoint] if checkpoint else None, Elsewhere(network, weights, onnx), data, split, data_dir, 1)
    found = search(
        subject, norm=norm, samples=samples, precision=precision, out=out, stages=stages, seconds=budget, nodes=nodes, engine=engine,
        seed=seed, device=device, threads=threads, quiet=quiet,
    )  # fmt: skip
    print(found.summary())
    if table is not None:
        found.table.to_csv(table, index=False)
        print(f"table: {table}")
