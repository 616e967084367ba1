"""`cure-ray certify`: prove or refute the robustness of every sample, and print the table."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cure_ray.commands.train import AllowCodeOption, DataDirOption
from cure_ray.errors import UserError

if TYPE_CHECKING:
    from cure_ray.api.subject import Subject


def certify(
    checkpoint: Annotated[
        list[Path] | None, typer.Argument(help="Runs or checkpoints of `cure-ray train`, or a directory of `cure-ray sweep` (its best).")
    ] = None,
    threats: Annotated[
        str | None, typer.Option(help="E.g. linf=8/255,l2=0.5 (radii in pixels), R(10), patch=2x2; default: the experiment's.")
    ] = None,
    grid: Annotated[
        str | None,
        typer.Option(help="Cells of transformations: standard, or as published for mnist, fashion-mnist, cifar10, cifar100, tinyimagenet."),
    ] = None,
    split: Annotated[str, typer.Option(help="test, validation or train.")] = "test",
    samples: Annotated[int | None, typer.Option(min=1, help="How many images; default: the experiment's, or all of --data.")] = None,
    out: Annotated[str | None, typer.Option(help="Results directory or fsspec URI; default certificates/NAME-DIGEST.")] = None,
    engine: Annotated[str, typer.Option(help="native, or auto_lirpa for graphs that are not sequential.")] = "native",
    stages: Annotated[str | None, typer.Option(help="Comma separated: ibp,crown-ibp,attack,crown,alpha-crown,branch-and-bound.")] = None,
    budget: Annotated[
        str | None, typer.Option(help="Branch-and-bound time per sample and threat, e.g. 10s; 0: none. Results depend on the machine.")
    ] = None,
    nodes: Annotated[
        int | None,
        typer.Option(min=0, help="Branch-and-bound sub-problems per sample and threat; default 100, 0: none. Alone, time is no limit."),
    ] = None,
    attack: Annotated[str | None, typer.Option(help="default, or strong: finds a little more at 10 to 20 times the cost.")] = None,
    union_only: Annotated[bool, typer.Option("--union-only", help="Stop a sample at its first failed norm; gives the union only")] = False,
    no_box: Annotated[
        bool, typer.Option("--no-box", help="The whole ball, not ball∩[0,1], as other tools take it: --domain none.")
    ] = False,
    domain: Annotated[
        str | None, typer.Option(help="Where inputs lie: LOW,HIGH, or none for no limits. Default 0,1. Balls are cut off by it.")
    ] = None,
    network: Annotated[str | None, typer.Option(help="package.module:factory of a network trained elsewhere.")] = None,
    weights: Annotated[Path | None, typer.Option(help="Its weights: .safetensors, or .pt with plain tensors.")] = None,
    onnx: Annotated[Path | None, typer.Option("--onnx", help="A sequential network as an ONNX file; needs --data.")] = None,
    data: Annotated[
        Path | None, typer.Option(help=".npz with `images` (N,C,H,W; uint8 or floats in [0,1] or --domain) and `labels`.")
    ] = None,
    cross_check: Annotated[str | None, typer.Option("--cross-check", help="Re-derive some certificates with this engine.")] = None,
    add: Annotated[bool, typer.Option("--add", help="Allow results of several checkpoints in one --out.")] = False,
    seed: Annotated[int, typer.Option(help="Seed of the attacks.")] = 0,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:N.")] = "auto",
    threads: Annotated[int, typer.Option(min=1, help="CPU threads.")] = 1,
    workers: Annotated[int, typer.Option(min=1, help="Certify on so many Ray workers; 1: in this process.")] = 1,
    gpus_per_worker: Annotated[float, typer.Option(min=0, help="GPUs per worker with --device cuda; fractions allowed.")] = 1.0,
    address: Annotated[str | None, typer.Option(help="A running Ray cluster; default: RAY_ADDRESS, else this machine.")] = None,
    best: Annotated[int | None, typer.Option(min=1, help="How many of a sweep's best trials; default 1.")] = None,
    front: Annotated[bool, typer.Option("--front", help="Every trial of a sweep's Pareto front.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Start geometric grids of any size.")] = False,
    patch_precheck: Annotated[
        bool, typer.Option("--patch-precheck", help="Patches: try one loose bound for all positions together first.")
    ] = False,
    separate_logits: Annotated[
        bool, typer.Option("--separate-logits", help="Transformations: compare bounds of single logits, as CGT does; looser.")
    ] = False,
    data_dir: DataDirOption = None,
    allow_code: AllowCodeOption = [],  # noqa: B006 - the option's callback acts on it
    quiet: Annotated[bool, typer.Option("--quiet", help="Print only the table.")] = False,
) -> None:
    """Certify a network for l_inf, l2, l1 and their union, geometric transformations and patches.

    Every sample ends as certified (proven), falsified (with a stored witness), unknown, timeout, oom, error or misclassified;
    `OUT/verdicts/*.parquet` says which stage decided and how far each margin is proven (docs/reference/schema.md). Finished work is
    kept: the same command continues where it stopped.

    Examples: `cure-ray certify runs/smoke --samples 100`, `cure-ray certify runs/smoke --threats "R(10);Tu(1),Tv(1);patch=2x2"`,
    `cure-ray certify --network my.nets:resnet --weights w.safetensors --data test.npz --threats linf=2/255 --engine auto_lirpa`.
    """
    from cure_ray.api.certify import default_directory, run
    from cure_ray.api.request import Cascade, CertificationRequest, Execution, parse_seconds, parse_stages

    found = pointed_at(checkpoint, Elsewhere(network, weights, onnx), data, split, data_dir, best, front)
    result = run(
        CertificationRequest(
            found,
            threats,
            samples,
            Cascade(
                parse_stages(stages),
                parse_seconds(budget),
                nodes,
                engine,
                _box(domain, no_box),
                patch_precheck,
                separate_logits,
                attack,
            ),
            Execution(device, threads, workers, gpus_per_worker, address, quiet),
            seed,
            union_only,
            out or default_directory(found),
            add,
            yes,
            grid,
        )
    )
    for task in result.tasks:
        if len(result.tasks) > 1:
            print(f"\n{task.subject.name} ({task.job.checkpoint_digest[:12]})")
        print(result.summary(task))
        for line in result.cross_check(cross_check, task) if cross_check else ():
            print(line)
    print(f"verdicts: {result.store.root}/verdicts")


@dataclass(frozen=True)
class Elsewhere:
    """A network that was not trained here, as options name it."""

    network: str | None = None
    weights: Path | None = None
    onnx: Path | None = None


def pointed_at(
    checkpoint: list[Path] | Path | None, elsewhere: Elsewhere, data: Path | None, split: str, data_dir: Path | None,
    best: int | None = None, front: bool = False,
) -> "tuple[Subject, ...]":  # fmt: skip
    """What the command line points at. Callers in Python may pass one path."""
    from cure_ray.api.subject import foreign_subject, given_samples, onnx_subject, subjects

    network, weights, onnx = elsewhere.network, elsewhere.weights, elsewhere.onnx
    if bool(checkpoint) + (network is not None) + (onnx is not None) != 1:
        raise UserError(
            "give either a CHECKPOINT directory of `cure-ray train`, or --network package.module:factory, or --onnx net.onnx, with --data"
        )
    samples = given_samples(data, split=split)
    if checkpoint:
        return tuple(subjects(checkpoint, samples, split, data_dir, best, front))
    if samples is None:
        raise UserError(f"--{'network' if network else 'onnx'} needs --data file.npz with the images and labels to certify")
    return (foreign_subject(network, weights, samples),) if network is not None else (onnx_subject(onnx, samples),)  # type: ignore[arg-type]


def _box(domain: str | None, no_box: bool) -> str | None:
    if domain is not None and no_box:
        raise UserError("--no-box is --domain none: give one of them")
    return "none" if no_box else domain
