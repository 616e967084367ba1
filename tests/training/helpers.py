"""Small experiments for the training tests."""

from typing import Any

import torch

from cure_ray import seeding
from cure_ray.config import Experiment, resolve
from cure_ray.training.epochs import ONE_PROCESS, _streams
from cure_ray.training.step import Streams


def experiment(method: str = "scratch", seed: int = 0, network: str = "conv-small", **training: Any) -> Experiment:
    """The smoke preset with a narrow network; fine-tuning gets a placeholder start."""
    start = {"start_from": "elsewhere"} if method == "finetune" else {}
    return resolve(
        {"preset": "smoke", "seed": seed, "network": {"name": network, "width": 0.5}, "training": {"method": method, **start, **training}}
    )


def streams(described: Experiment, epoch: int = 20, device: str = "cpu") -> Streams:
    return _streams(described, epoch, torch.device(device), ONE_PROCESS)


def batch(n: int = 16, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    rng = seeding.generator("cpu", seed, "test-batch")
    x = torch.rand(n, 1, 8, 8, generator=rng)
    x = torch.where(x < 0.3, 0.0, x)  # exact zeros, as real images have
    return x, torch.randint(10, (n,), generator=rng)
