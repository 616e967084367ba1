"""What scripts on finished runs share: checkpoints, test images, Markdown tables, and the line that says what was measured where."""

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from cure_ray.data.images import load_dataset
from cure_ray.runs.checkpoints import Checkpoint, load_checkpoint
from cure_ray.runs.hardware import hardware


def parser(doc: str | None, images: int = 100) -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("runs", nargs="+", type=Path, help="run directories of `cure-ray train`")
    found.add_argument("--images", type=int, default=images, help="first test images")
    found.add_argument("--data-dir", type=Path)
    return found


def start(arguments: argparse.Namespace) -> tuple[list[Checkpoint], Tensor, Tensor]:
    """The checkpoints and the first test images of their (common) data set, on one thread."""
    torch.set_num_threads(1)
    checkpoints = [load_checkpoint(run) for run in arguments.runs]
    names = {c.experiment.dataset.name for c in checkpoints}
    if len(names) != 1:
        raise SystemExit(f"the runs are of different data sets: {', '.join(sorted(names))}")
    images = load_dataset(checkpoints[0].experiment.dataset, "test", arguments.data_dir)
    x, y = images.batch(torch.arange(min(arguments.images, len(images))))
    return checkpoints, x, y


def title(checkpoint: Checkpoint) -> str:
    training = checkpoint.experiment.training
    return training.method if training.transformation is None else f"cgt {training.transformation}"


def context(checkpoints: Sequence[Checkpoint], n: int) -> str:
    first = checkpoints[0].experiment
    seeds = sorted({c.experiment.seed for c in checkpoints})
    machine = hardware(torch.device("cpu"))
    return (
        f"{first.dataset.name}, {first.network.name} (width {first.network.width:g}), {first.dataset.train_size} training images, "
        f"{first.training.epochs} epochs, seed {', '.join(map(str, seeds))}; first {n} test images; 1 thread of {machine['processor']}"
    )


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *rows)]
    return "\n".join(lines)


def percent(count: float, total: int) -> str:
    return f"{100 * count / total:.1f}"
