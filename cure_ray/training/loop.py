"""A run in one process: which epoch does what, with gradient projection after the ramp. No files here; see cure_ray/run.py."""

import copy
import time
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from cure_ray.config import Experiment
from cure_ray.data.images import Images
from cure_ray.networks.build import new_network
from cure_ray.training.averaging import precise_statistics
from cure_ray.training.epochs import Learner, Tick, run_epoch, silent
from cure_ray.training.projection import Merge, merge


@dataclass
class Progress:
    """Everything that must survive from one epoch to the next: finished epochs, weights, and each branch's optimiser."""

    epoch: int
    ct: Learner
    nt: Learner | None = None


def prefers_channels_last(experiment: Experiment) -> bool:
    """Convolutions are faster in NHWC, on CUDA and on the CPU (measured: docs/benchmarks.md); a perceptron has none."""
    wanted = experiment.execution.channels_last
    return (wanted is None or wanted) and experiment.network.name != "mlp"


def place(network: nn.Sequential, device: torch.device, channels_last: bool) -> None:
    network.to(device)
    if channels_last:
        network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]


def start(experiment: Experiment, device: torch.device, weights: Mapping[str, Tensor] | None = None) -> Progress:
    """Epoch 0: a fresh network, or `weights` to start from (fine-tuning), and a fresh Adam."""
    network = new_network(experiment)
    if weights is not None:
        network.load_state_dict(dict(weights))
    place(network, device, prefers_channels_last(experiment))
    return Progress(0, Learner.certified(network, experiment.training))


def snapshot(network: nn.Module) -> dict[str, Tensor]:
    """The state on the CPU, as copies."""
    return {name: value.detach().cpu().clone() for name, value in network.state_dict().items()}


def projects(experiment: Experiment, epoch: int) -> bool:
    """Whether this epoch runs both branches: every epoch at full radius, never before (7.1)."""
    return experiment.training.uses_projection and epoch >= experiment.training.first_full_epoch


def natural_learner(progress: Progress, experiment: Experiment) -> Learner:
    """The natural branch's learner for this epoch (A23): its own Adam since the first such epoch, or a copy of the certified one's."""
    if experiment.training.nt_optimizer == "copy":
        twin = Learner.of(copy.deepcopy(progress.ct.network), experiment.training.lr)
        twin.optimizer.load_state_dict(copy.deepcopy(progress.ct.optimizer.state_dict()))
        for group in twin.optimizer.param_groups:
            group["weight_decay"] = 0.0  # the natural branch has cross-entropy and nothing else (A24)
        return twin
    if progress.nt is None:
        progress.nt = Learner.of(copy.deepcopy(progress.ct.network), experiment.training.lr)
    return progress.nt


def settle(progress: Progress, images: Images, experiment: Experiment, merged: bool) -> None:
    """What an epoch ends with before it is judged: the average hears of a merge, and BN statistics are made exact where asked for."""
    if merged:
        progress.ct.follow()
    if experiment.training.precise_bn:
        precise_statistics(progress.ct.result, images, experiment.training.batch_size, prefers_channels_last(experiment))


def merge_metrics(merged: Merge, natural: Mapping[str, float], merge_seconds: float) -> dict[str, float]:
    cosines = list(merged.cosines.values())
    return {
        "nt_loss": natural["loss"],
        "nt_train_accuracy": natural["train_accuracy"],
        "nt_seconds": natural["seconds"],
        "merge_seconds": merge_seconds,
        "cosine_mean": sum(cosines) / len(cosines),
        "cosine_min": min(cosines),
        "cosine_max": max(cosines),
        "cosine_positive_share": sum(c > 0 for c in cosines) / len(cosines),
    }


def serial_epoch(progress: Progress, images: Images, experiment: Experiment, tick: Tick = silent) -> tuple[dict[str, float], Merge | None]:
    """The next epoch, in place; the natural branch first, then the certified one, then the merge."""
    epoch = progress.epoch + 1
    last = prefers_channels_last(experiment)
    if not projects(experiment, epoch):
        metrics = run_epoch("ct", progress.ct, images, experiment, epoch, tick=tick, channels_last=last)
        progress.epoch = epoch
        settle(progress, images, experiment, merged=False)
        return metrics, None
    theta = snapshot(progress.ct.network)
    nt = natural_learner(progress, experiment)
    nt.network.load_state_dict(theta)
    natural = run_epoch("nt", nt, images, experiment, epoch, tick=tick, channels_last=last)
    metrics = run_epoch("ct", progress.ct, images, experiment, epoch, tick=tick, channels_last=last)
    started = time.perf_counter()
    merged = merge(theta, snapshot(nt.network), snapshot(progress.ct.network), experiment.training.beta)
    progress.ct.network.load_state_dict(merged.state)
    merge_seconds = time.perf_counter() - started
    progress.epoch = epoch
    settle(progress, images, experiment, merged=True)
    return {**metrics, **merge_metrics(merged, natural, merge_seconds)}, merged
