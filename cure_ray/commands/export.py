"""`cure-ray export`: the network as ONNX and its robustness as VNN-LIB, for other verifiers."""

from pathlib import Path
from typing import Annotated

import typer

from cure_ray.commands.train import AllowCodeOption, DataDirOption
from cure_ray.errors import UserError


def export(
    checkpoint: Annotated[Path, typer.Argument(help="A run or checkpoint directory of `cure-ray train`.")],
    onnx: Annotated[Path | None, typer.Option("--onnx", help="Write the network here, BN folded in.")] = None,
    vnnlib: Annotated[Path | None, typer.Option("--vnnlib", help="Write one property per sample and threat into this directory.")] = None,
    threats: Annotated[str | None, typer.Option(help="Radii in pixels, e.g. linf=8/255,l2=0.5; default: the experiment's.")] = None,
    samples: Annotated[int, typer.Option(min=1, help="How many images to write properties for.")] = 10,
    split: Annotated[str, typer.Option(help="test, validation or train.")] = "test",
    timeout: Annotated[float, typer.Option(min=0, help="Seconds per instance, for instances.csv.")] = 300.0,
    data_dir: DataDirOption = None,
    allow_code: AllowCodeOption = [],  # noqa: B006 - the option's callback acts on it
) -> None:
    """Export a trained network and its properties to other verifiers.

    l_inf properties are VNN-LIB boxes with an `instances.csv` beside them; l2 and l1 balls, which VNN-LIB cannot say, are JSON
    files (docs/guide/geometric.md describes both).

    Example: `cure-ray export runs/smoke --onnx net.onnx --vnnlib properties --samples 20`.
    """
    from cure_ray.data.images import load_dataset, select_samples
    from cure_ray.interchange import Exported, write_onnx, write_properties
    from cure_ray.runs.checkpoints import load_checkpoint
    from cure_ray.threats.balls import Ball
    from cure_ray.threats.norms import NORMS
    from cure_ray.threats.text import parse_balls

    if onnx is None and vnnlib is None:
        raise UserError("say what to write: --onnx FILE, --vnnlib DIR, or both")
    if split not in ("test", "validation", "train"):
        raise UserError(f"unknown split {split!r}: test, validation or train")
    loaded = load_checkpoint(checkpoint)
    experiment = loaded.experiment
    if onnx is not None:
        write_onnx(loaded.network, onnx)
        print(f"network: {onnx}")
    if vnnlib is not None:
        radii = experiment.threats
        balls = parse_balls(threats) if threats else [Ball(norm, radii.eps(norm)) for norm in NORMS if radii.eps(norm) > 0]
        images = load_dataset(experiment.dataset.model_copy(update={"augment": False}), split, data_dir)  # type: ignore[arg-type]
        index = select_samples(len(images), samples, experiment.certification.selection)
        x, y = images.batch(index)
        source = f"{experiment.name} {loaded.digest[:12]}, {experiment.dataset.name} {split}"
        about = Exported(experiment.dataset.num_classes, source, onnx, timeout)
        written = write_properties(vnnlib, about, x, y, index.tolist(), balls)
        print(f"properties: {len(written)} files in {vnnlib}")
