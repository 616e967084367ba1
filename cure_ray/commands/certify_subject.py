"""What `cure-ray certify` is pointed at: a network, its images, and what is known of it."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from cure_ray.errors import UserError, nearest

if TYPE_CHECKING:
    import torch
    from torch import nn

    from cure_ray.config import Certification
    from cure_ray.data.samples import Samples
    from cure_ray.threats.balls import Ball


class Subject:
    """A network, its images, and what is known of it. `digest` is the identity of what the network computes."""

    def __init__(self, network: "nn.Module", name: str, samples: "Samples", threats: "list[Ball]", defaults: "Certification | None",
                 about: dict[str, Any]) -> None:  # fmt: skip
        from cure_ray.catalogue.published import STANDARD
        from cure_ray.certification.identity import network_identity
        from cure_ray.runs.checkpoints import state_digest

        self.network, self.digest, self.name, self.samples = network, network_identity(network), name, samples
        self.grid = STANDARD  # of transformations, unless the request names one
        self.threats, self.defaults, self.about = threats, defaults, {**about, "weights_digest": state_digest(network.state_dict())}


def load_subject(
    checkpoint: Path | None, network: str | None, weights: Path | None, data: Path | None, split: str, data_dir: Path | None,
    onnx: Path | None = None,
) -> Subject:  # fmt: skip
    from cure_ray.interchange.foreign import load_foreign_network, load_npz
    from cure_ray.runs.checkpoints import load_checkpoint

    if (checkpoint is not None) + (network is not None) + (onnx is not None) != 1:
        raise UserError(
            "give either a CHECKPOINT directory of `cure-ray train`, or --network package.module:factory, or --onnx net.onnx, with --data"
        )
    if data is not None and split != "test":
        raise UserError(f"--split {split} chooses a part of the experiment's data set, but --data {data} is certified as it is: drop one")
    if onnx is not None:
        return _from_onnx(onnx, data)
    if network is not None:
        if data is None:
            raise UserError("--network needs --data file.npz with the images and labels to certify")
        module = load_foreign_network(network, weights)
        about: dict[str, Any] = {"network": network, "weights": str(weights) if weights else None, "data": str(data)}
        name = (weights.stem if weights else network.partition(":")[2]).replace("/", "-")
        return Subject(module, name, load_npz(data), [], None, about)
    from cure_ray.threats.balls import Ball
    from cure_ray.threats.norms import NORMS

    assert checkpoint is not None
    loaded = load_checkpoint(checkpoint)
    experiment = loaded.experiment
    samples = load_npz(data) if data is not None else _dataset(experiment.dataset, split, data_dir)
    threats = [Ball(norm, experiment.threats.eps(norm)) for norm in NORMS if experiment.threats.eps(norm) > 0]
    about = {
        "name": experiment.name, "method": experiment.training.method, "seed": experiment.seed, "config_hash": experiment.config_hash,
        "epoch": loaded.epoch, "checkpoint": str(loaded.path.absolute()),
        "experiment": experiment.model_dump(mode="json"), "metrics": loaded.meta.get("metrics", {}), **_trained(loaded.path),
    }  # fmt: skip
    subject = Subject(loaded.network, experiment.name, samples, threats, experiment.certification, about)
    subject.grid = experiment.grid
    return subject


def _trained(checkpoint: Path) -> dict[str, Any]:
    """Hardware and versions of the training, so that a store tells them without its run directory."""
    import json

    described = checkpoint.parent.parent / "run.json"
    try:
        known = json.loads(described.read_text())
    except (OSError, ValueError):
        return {}
    return {key: known[key] for key in ("hardware", "versions") if key in known}


def describe(subject: Subject, device: "torch.device") -> dict[str, Any]:
    """What the store keeps of a checkpoint: where it came from, where it was certified, and its clean accuracy on every image of the
    split, which is what papers report beside certificates on a few."""
    from cure_ray.runs.run import hardware

    return {**subject.about, "certified_on": hardware(device), "clean_all": clean_accuracy(subject, device)}


def clean_accuracy(subject: Subject, device: "torch.device") -> dict[str, int]:
    import torch

    network = subject.network.to(device).eval()
    with torch.no_grad():
        correct = sum(
            int((network(x.to(device)).argmax(1).cpu() == y).sum())
            for x, y in zip(subject.samples.images.split(500), subject.samples.labels.split(500), strict=True)
        )
    subject.network.cpu()
    return {"correct": correct, "images": len(subject.samples)}


def _from_onnx(onnx: Path, data: Path | None) -> Subject:
    from cure_ray.interchange import load_onnx
    from cure_ray.interchange.foreign import load_npz

    if data is None:
        raise UserError("--onnx needs --data file.npz with the images and labels to certify")
    samples = load_npz(data)
    channels, height, width = samples.images.shape[1:]
    network = load_onnx(onnx, (channels, height, width))
    return Subject(network, onnx.stem, samples, [], None, {"onnx": str(onnx), "data": str(data)})


def _dataset(config: Any, split: str, data_dir: Path | None) -> "Samples":
    from cure_ray.data.images import load_dataset
    from cure_ray.data.samples import Samples

    valid = ("test", "validation", "train")
    if split not in valid:
        raise UserError(f"unknown split {split!r}.{nearest(split, valid)}")
    images = load_dataset(config.model_copy(update={"augment": False}), split, data_dir)  # type: ignore[arg-type]
    return Samples(config.name, split, images.pixels(), images.labels)
