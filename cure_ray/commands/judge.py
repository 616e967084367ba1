"""`cure-ray judge`: a published network, certified from its authors' weights, beside what was published about it."""

from pathlib import Path
from typing import Annotated

import typer

from cure_ray.commands.train import DataDirOption
from cure_ray.errors import UserError


def judge(
    name: Annotated[
        str | None, typer.Argument(help="A published network, or a .yaml file of your own; without one, they are listed.")
    ] = None,
    weights: Annotated[Path | None, typer.Option(help="The authors' file: .mat, .pt, .safetensors or .onnx.")] = None,
    out: Annotated[Path | None, typer.Option(help="Directory of verdicts and judgement; default certificates/NAME.")] = None,
    data: Annotated[Path | None, typer.Option(help=".npz with the `images` and `labels` its authors chose, where they did.")] = None,
    samples: Annotated[int | None, typer.Option(min=1, help="How many images; default: the protocol's.")] = None,
    nodes: Annotated[
        int | None, typer.Option(min=0, help="Branch-and-bound sub-problems per image and threat; default: the protocol's.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the attacks.")] = 0,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:N.")] = "auto",
    threads: Annotated[int, typer.Option(min=1, help="CPU threads.")] = 1,
    workers: Annotated[int, typer.Option(min=1, help="Certify on so many Ray workers; 1: in this process.")] = 1,
    gpus_per_worker: Annotated[float, typer.Option(min=0, help="GPUs per worker with --device cuda; fractions allowed.")] = 1.0,
    address: Annotated[str | None, typer.Option(help="A running Ray cluster; default: RAY_ADDRESS, else this machine.")] = None,
    unverified: Annotated[bool, typer.Option("--unverified", help="Judge weights that fit but are not the published ones.")] = False,
    data_dir: DataDirOption = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print only the judgement.")] = False,
) -> None:
    """Certify a published network under its own protocol, and set every published figure beside what is proven here.

    Weights are not shipped: the list says where their authors keep them. A file is recognised by its checksum, or by what its network
    computes. Writes OUT/judgement.json and OUT/judgement.md beside the verdicts; the same command continues where it stopped.

    Example: `cure-ray judge mmr-universal-mnist --weights mmr_univ_mnist.mat`.
    """
    from cure_ray.zoo.published import all_published, find_published

    if name is None:
        for described in all_published().values():
            print(f"{described.name}: {described.title}; {described.protocol.threats}, {described.data.n} images")
            at = (
                f"{described.source.url} {described.source.path or ''}".strip()
                if described.source
                else "none known; its figures are claims"
            )
            print(f"    weights: {at}")
        return
    described = find_published(name)
    if weights is None and described.recomputable:
        at = f"{described.source.url}, {described.source.path}" if described.source else ""
        raise UserError(f"which weights? Download them from {at}, and name the file with --weights FILE")
    from cure_ray.api.judge import Effort, default_out
    from cure_ray.api.judge import judge as certified
    from cure_ray.api.request import Execution
    from cure_ray.results.judgement import write_judgement

    folder = out or default_out(name)
    execution = Execution(device, threads, workers, gpus_per_worker, address, quiet)
    judgement, _ = certified(
        name, weights or "", folder, data=data, data_dir=data_dir, effort=Effort(samples, nodes, seed), execution=execution,
        unverified=unverified,
    )  # fmt: skip
    paths = write_judgement(judgement, folder)
    print(judgement.as_markdown())
    print(f"verdicts: {folder}/verdicts; {paths[0]}, {paths[1].name}")
