"""Checkpoints: safetensors for tensors, JSON for the rest, checked on every load. Nothing is ever unpickled."""

import hashlib
import json
import os
import platform
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

import cure_ray
from cure_ray.config import Experiment, parse_experiment
from cure_ray.errors import UserError
from cure_ray.networks.build import new_network
from cure_ray.networks.models import Network
from cure_ray.runs.directory import META, file_digest, list_checkpoints, resolve_checkpoint

FORMAT = "cure_ray-checkpoint-1"
WEIGHTS = "weights.safetensors"


def state_digest(state: Mapping[str, Tensor]) -> str:
    """Identity of a set of weights: names, types, shapes and bytes."""
    digest = hashlib.sha256()
    for name in sorted(state):
        tensor = state[name].detach().cpu().contiguous()
        digest.update(f"{name}:{tensor.dtype}:{tuple(tensor.shape)};".encode())
        digest.update(tensor.flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def versions() -> dict[str, str]:
    return {"cure_ray": cure_ray.__version__, "torch": torch.__version__, "python": platform.python_version()}


def _save_tensors(tensors: Mapping[str, Tensor], path: Path) -> None:
    """safetensors tells a full disk by an error of its own with the system's number in its text."""
    try:
        save_file(dict(tensors), path)
    except SafetensorError as error:
        number = re.search(r"\(os error (\d+)\)", str(error))
        if number is None:
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1])), str(path)) from None


def write_checkpoint(
    directory: Path,
    experiment: Experiment,
    epoch: int,
    weights: Mapping[str, Tensor],
    optimizers: Mapping[str, Mapping[str, Tensor]],
    metrics: Mapping[str, Any],
    extra: Mapping[str, Any] | None = None,
) -> str:
    """Write a checkpoint as a new directory; nothing is left if that fails. Returns the digest of the weights."""
    directory.mkdir()
    try:
        _save_tensors({k: v.contiguous() for k, v in weights.items()}, directory / WEIGHTS)
        for name, tensors in optimizers.items():
            _save_tensors(tensors, directory / f"optimizer_{name}.safetensors")
        digest = state_digest(weights)
        meta = {
            "format": FORMAT,
            "epoch": epoch,
            "digest": digest,
            "config_hash": experiment.config_hash,
            "experiment": experiment.model_dump(mode="json"),
            "metrics": dict(metrics),
            "versions": versions(),
            "files": {p.name: file_digest(p) for p in sorted(directory.iterdir())},
            **(extra or {}),
        }
        with (directory / META).open("w") as file:
            json.dump(meta, file, indent=1)  # the order of the metrics is that of metrics.jsonl, which may have to be restored from here
            file.flush()
            os.fsync(file.fileno())
    except BaseException:
        shutil.rmtree(directory, ignore_errors=True)
        raise
    return digest


@dataclass(frozen=True)
class Checkpoint:
    """A loaded, checked checkpoint. The network is in evaluation mode on the CPU."""

    path: Path
    experiment: Experiment
    epoch: int
    digest: str
    meta: dict[str, Any]
    network: Network

    def optimizer(self, name: str) -> dict[str, Tensor] | None:
        """Saved optimiser state of a branch, if it had one."""
        path = self.path / f"optimizer_{name}.safetensors"
        return dict(load_file(path)) if path.exists() else None


def _read_meta(path: Path) -> dict[str, Any]:
    try:
        meta = json.loads((path / META).read_text())
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError, OSError) as error:
        raise UserError(f"{path / META} cannot be read ({error}); the checkpoint is damaged, use an earlier one") from None
    if not isinstance(meta, dict) or meta.get("format") != FORMAT:
        given = meta.get("format") if isinstance(meta, dict) else type(meta).__name__
        raise UserError(f"{path} is not a checkpoint of this program: format {given!r}, expected {FORMAT!r}")
    return meta


def load_checkpoint(source: str | Path) -> Checkpoint:
    """Load and check a checkpoint: every file's digest, the architecture, and that all weights are finite numbers."""
    path = resolve_checkpoint(Path(source))
    meta = _read_meta(path)
    files = meta.get("files")
    if not isinstance(files, dict) or WEIGHTS not in files:
        raise UserError(f"{path}: its {META} lists no {WEIGHTS}; the checkpoint is damaged")
    for name, expected in files.items():
        if Path(name).name != name or not (path / name).is_file():
            raise UserError(f"{path}: the file {name} is missing; the checkpoint is damaged, use an earlier one")
        if file_digest(path / name) != expected:
            raise UserError(f"{path / name} is not what was written (its digest differs); the checkpoint is damaged, use an earlier one")
    experiment = parse_experiment(meta["experiment"])
    try:
        weights = load_file(path / WEIGHTS)
    except SafetensorError as error:
        raise UserError(f"{path / WEIGHTS} is not a safetensors file ({error})") from None
    network = new_network(experiment)
    load_weights(network, weights, str(path))
    digest = state_digest(weights)
    if digest != meta.get("digest"):
        raise UserError(f"{path}: the weights do not match the digest in {META}; the checkpoint is damaged, use an earlier one")
    return Checkpoint(path, experiment, int(meta["epoch"]), digest, meta, network.eval())


def newest_intact(run: Path) -> Checkpoint | None:
    """The last checkpoint that passes all checks; a damaged newer one is left alone and skipped."""
    for path in reversed(list_checkpoints(run)):
        try:
            return load_checkpoint(path)
        except UserError as error:
            print(f"skipping a damaged checkpoint: {error}")
    return None


def load_weights(network: torch.nn.Module, weights: Mapping[str, Tensor], source: str) -> None:
    """Put weights into a network; a mismatch is told tensor by tensor."""
    own = network.state_dict()
    problems = [f"missing {k}" for k in own if k not in weights] + [f"unexpected {k}" for k in weights if k not in own]
    problems += [
        f"{k} has shape {tuple(weights[k].shape)}, the network wants {tuple(own[k].shape)}"
        for k in own
        if k in weights and weights[k].shape != own[k].shape
    ]
    if problems:
        listed = "; ".join(problems[:4]) + (f"; and {len(problems) - 4} more" if len(problems) > 4 else "")
        raise UserError(f"{source} belongs to another architecture: {listed}")
    network.load_state_dict(dict(weights))


def checkpoint_bytes(network: torch.nn.Module, branches: int, averaged: bool = False) -> int:
    """Size of one checkpoint: weights (twice where they are averaged), and two Adam moments per branch."""
    weights = sum(t.numel() * t.element_size() for t in network.state_dict().values())
    parameters = sum(p.numel() * p.element_size() for p in network.parameters())
    return (1 + averaged) * weights + 2 * branches * parameters + 100_000
