"""What is certified: a network, its images, and what is known of both. From a run, a checkpoint, an ONNX file, or any torch module."""

import copy
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch
from torch import nn

from cure_ray.api.sweep import SweepResult, Trial
from cure_ray.catalogue.published import STANDARD
from cure_ray.certification.identity import network_identity
from cure_ray.config import Certification
from cure_ray.data.images import load_dataset
from cure_ray.data.samples import Samples
from cure_ray.errors import UserError, nearest
from cure_ray.interchange import load_onnx
from cure_ray.interchange.foreign import as_samples, load_foreign_network, load_npz
from cure_ray.runs.checkpoints import Checkpoint, load_checkpoint, state_digest
from cure_ray.runs.hardware import hardware
from cure_ray.runs.record import RunResult
from cure_ray.search.layout import SWEEP
from cure_ray.search.ranking import best_runs
from cure_ray.threats.balls import Ball
from cure_ray.threats.box import UNIT
from cure_ray.threats.norms import NORMS

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    Network: TypeAlias = "Subject | nn.Module | RunResult | Checkpoint | Trial | SweepResult | str | Path"
    Images: TypeAlias = Tensor | np.ndarray[Any, Any] | str | Path
    Labels: TypeAlias = Tensor | np.ndarray[Any, Any] | list[int]

SPLITS = ("test", "validation", "train")


@dataclass(frozen=True, eq=False)
class Subject:
    """A network in evaluation mode and its images; of a run also its radii and defaults."""

    network: nn.Module
    name: str
    samples: Samples
    about: Mapping[str, Any] = field(default_factory=dict)  # what the store keeps of it
    threats: tuple[Ball, ...] = ()  # the experiment's
    defaults: Certification | None = None
    own_data: bool = False  # images the caller gave, not the experiment's
    grid: str = STANDARD  # of transformations, unless the request names one

    @cached_property
    def digest(self) -> str:
        """The identity of what the network computes."""
        return network_identity(self.network)

    @property
    def input_shape(self) -> tuple[int, ...]:
        return tuple(self.samples.images.shape[1:])

    def describe(self, device: torch.device) -> dict[str, Any]:
        """What the store keeps of a checkpoint: where it came from, where it was certified, and its clean accuracy on every image of
        the split, which is what papers report beside certificates on a few."""
        known = {"weights_digest": state_digest(self.network.state_dict()), "certified_on": hardware(device)}
        return {**self.about, **known, "clean_all": self._clean(device)}

    def _clean(self, device: torch.device) -> dict[str, int]:
        network, samples = self.network.to(device), self.samples
        with torch.no_grad():
            correct = sum(
                int((network(x.to(device)).argmax(1).cpu() == y).sum())
                for x, y in zip(samples.images.split(500), samples.labels.split(500), strict=True)
            )
        self.network.cpu()
        return {"correct": correct, "images": len(samples)}


def subjects(
    network: "Network | Iterable[Network]",
    samples: Samples | None,
    split: str = "test",
    data_dir: str | Path | None = None,
    best: int | None = None,
    front: bool = False,
) -> list[Subject]:
    """Everything a person may point at; a sweep stands for its best trials or its front, several networks for one subject each."""
    if front and best is not None:
        raise UserError(f"--front is every trial that no other beats, --best {best} the first {best}: give one of them")
    if isinstance(network, Subject):
        return [network]
    if isinstance(network, nn.Module):
        return [module_subject(network, _needed(samples, "a torch module"))]
    if isinstance(network, Checkpoint | RunResult):
        path = network.path if isinstance(network, Checkpoint) else network.directory
        return [run_subject(path, samples, split, data_dir)]
    if isinstance(network, str | Path):
        path = Path(network)
        if path.suffix == ".onnx":
            return [onnx_subject(path, _needed(samples, "an ONNX file"))]
        sweep = (path / SWEEP).is_file()
        if front and not sweep:
            raise UserError(f"--front is about a directory of `cure-ray sweep`, and {path} is none")
        found = best_runs(path, best or 1, front) if sweep else [path]
        return [run_subject(run, samples, split, data_dir) for run in found]
    if isinstance(network, SweepResult):
        return subjects(network.directory, samples, split, data_dir, best, front)
    several = network.runs if isinstance(network, Trial) else network
    if not isinstance(several, Iterable):
        raise UserError(
            f"a {type(network).__name__} cannot be certified: give a torch module, a run of `train`, a directory of one, or an ONNX file"
        )
    return [subject for one in several for subject in subjects(one, samples, split, data_dir, best, front)]


def _needed(samples: Samples | None, what: str) -> Samples:
    if samples is None:
        raise UserError(f"{what} brings no data: give the images and labels to certify")
    return samples


def run_subject(path: str | Path, samples: Samples | None = None, split: str = "test", data_dir: str | Path | None = None) -> Subject:
    """A run or checkpoint of `train`; on its own data set unless it is given images."""
    loaded = load_checkpoint(path)
    experiment = loaded.experiment
    about = {
        "name": experiment.name, "method": experiment.training.method, "seed": experiment.seed, "config_hash": experiment.config_hash,
        "epoch": loaded.epoch, "checkpoint": str(loaded.path.absolute()),
        "experiment": experiment.model_dump(mode="json"), "metrics": loaded.meta.get("metrics", {}), **_trained(loaded.path),
    }  # fmt: skip
    threats = tuple(Ball(norm, experiment.threats.eps(norm)) for norm in NORMS if experiment.threats.eps(norm) > 0)
    images = samples if samples is not None else _dataset(experiment.dataset, split, data_dir)
    about |= _file(samples)
    defaults, box = experiment.certification, experiment.dataset.box
    if defaults.domain is None and box != UNIT:
        defaults = defaults.model_copy(update={"domain": str(box)})
    return Subject(loaded.network, experiment.name, images, about, threats, defaults, samples is not None, experiment.grid)


def module_subject(network: nn.Module, samples: Samples) -> Subject:
    """Any torch module, copied: what is certified is the module as it is now, in evaluation mode."""
    wrong = {str(t.dtype) for t in network.state_dict().values() if t.is_floating_point() and t.dtype != torch.float32}
    if wrong:
        raise UserError(f"the network's weights are {', '.join(sorted(wrong))}; networks are certified in float32: use network.float()")
    try:
        own = copy.deepcopy(network).cpu().eval()
    except RuntimeError as error:
        raise UserError(f"the network cannot be copied ({str(error).splitlines()[0]})") from None
    return Subject(own, type(network).__name__, samples, {"network": type(network).__name__, **_file(samples)})


def onnx_subject(path: Path, samples: Samples) -> Subject:
    channels, height, width = samples.images.shape[1:]
    network = load_onnx(path, (channels, height, width))
    return Subject(network, path.stem, samples, {"onnx": str(path), **_file(samples)})


def foreign_subject(factory: str, weights: Path | None, samples: Samples) -> Subject:
    """`package.module:factory` and a file of weights, as the command line names a network."""
    network = load_foreign_network(factory, weights)
    name = (weights.stem if weights else factory.partition(":")[2]).replace("/", "-")
    return Subject(network, name, samples, {"network": factory, "weights": str(weights) if weights else None, **_file(samples)})


def given_samples(images: "Images | None", labels: "Labels | None" = None, split: str = "test") -> Samples | None:
    """Images and labels as tensors or arrays, or both in an .npz file; None: the experiment's own."""
    if images is None:
        if labels is not None:
            raise UserError("labels without images: give both, or neither for the experiment's own")
        return None
    if split != "test":
        shown = f"--data {images}" if isinstance(images, str | Path) else "an array of images"
        raise UserError(f"--split {split} chooses a part of the experiment's data set, but {shown} is certified as it is: drop one")
    if isinstance(images, str | Path):
        if labels is not None:
            raise UserError(f"{images} brings its own labels: leave them out")
        return load_npz(Path(images))
    if labels is None:
        raise UserError("images without labels: give both, or neither for the experiment's own")
    return as_samples(images, labels, "images")


def _file(samples: Samples | None) -> dict[str, str]:
    return {"data": str(samples.file)} if samples is not None and samples.file is not None else {}


def _trained(checkpoint: Path) -> dict[str, Any]:
    """Hardware and versions of the training, so that a store tells them without its run directory."""
    try:
        known = json.loads((checkpoint.parent.parent / "run.json").read_text())
    except (OSError, ValueError):
        return {}
    return {key: known[key] for key in ("hardware", "versions") if key in known}


def _dataset(config: Any, split: str, data_dir: str | Path | None) -> Samples:
    if split not in SPLITS:
        raise UserError(f"unknown split {split!r}.{nearest(split, SPLITS)}")
    part: Literal["test", "validation", "train"] = split  # type: ignore[assignment]
    images = load_dataset(config.model_copy(update={"augment": False}), part, data_dir)
    return Samples(config.name, split, images.pixels(), images.labels)
