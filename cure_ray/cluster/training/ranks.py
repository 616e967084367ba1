"""Who is who in a parallel run, and data parallelism for the certified ranks: global counts, global BN statistics, summed gradients."""

import os
import socket
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from cure_ray.cluster.session import Need
from cure_ray.config import Experiment
from cure_ray.errors import UserError
from cure_ray.training.epochs import ONE_PROCESS
from cure_ray.training.step import Ranks

SUMMED = ("loss", "robust", "natural", "alignment", "warmup", "l1")  # terms: every rank holds its share of the global mean


class _AllSum(torch.autograd.Function):
    """Sum over ranks; the loss of every rank depends on it, so its gradient is the sum of theirs."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        out = tensor.clone()
        dist.all_reduce(out)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        out = gradient.clone()
        dist.all_reduce(out)
        return out


@dataclass(frozen=True)
class Role:
    """One process of a run."""

    branch: Literal["ct", "nt"]
    rank: int  # within its branch

    @property
    def leads(self) -> bool:
        """The certified rank 0 judges, saves and reports."""
        return self.branch == "ct" and self.rank == 0

    def __str__(self) -> str:
        return f"{self.branch}{self.rank}"


@dataclass(frozen=True)
class Phase:
    """Epochs that run in one placement group: up to and including `last`, with or without a natural rank."""

    last: int
    ct_workers: int
    natural: bool

    @property
    def workers(self) -> int:
        return self.ct_workers + self.natural

    def role(self, world_rank: int) -> Role:
        return Role("ct", world_rank) if world_rank < self.ct_workers else Role("nt", 0)


def phases(experiment: Experiment) -> list[Phase]:
    """Certified ranks alone while the radii grow (or for good); with a natural rank from the first epoch at full radius."""
    training, count = experiment.training, experiment.execution.ct_workers
    if not training.uses_projection or training.first_full_epoch > training.epochs:
        return [Phase(training.epochs, count, False)]
    ramp = [Phase(training.first_full_epoch - 1, count, False)] if training.first_full_epoch > 1 else []
    return [*ramp, Phase(training.epochs, count, True)]


def check_batch(experiment: Experiment) -> None:
    size, count = experiment.training.batch_size, experiment.execution.ct_workers
    if size % count:
        raise UserError(f"batch_size {size} cannot be split evenly over ct_workers {count}: choose a batch size that is a multiple")


def rank_need(experiment: Experiment, phase: Phase, cluster_gpus: float) -> Need:
    """GPUs only where the cluster has some and the experiment does not insist on the CPU."""
    execution = experiment.execution
    wants_gpu = execution.device.startswith("cuda") or (execution.device == "auto" and cluster_gpus > 0)
    return Need(phase.workers, execution.cpus_per_worker, execution.gpus_per_worker if wants_gpu else 0.0)


def rendezvous(phase: Phase, same_node: bool, address: str) -> str | None:
    """Where the certified ranks meet; made by their leader. None if there is nobody to meet.

    torch's own store listens on every interface, so ranks on one machine meet in a file and speak over loopback; only ranks on
    several machines, which trust their network, use a port.
    """
    if phase.ct_workers == 1:
        return None
    if same_node:
        return f"file://{tempfile.mkdtemp(prefix='cure_ray_')}/ranks"
    with socket.socket() as probe:
        probe.bind(("", 0))
        return f"tcp://{address}:{probe.getsockname()[1]}"


def certified_ranks(phase: Phase, role: Role, meeting: str | None, backend: str) -> Ranks:
    """The `Ranks` of this process, connected to its peers if it has any."""
    if meeting is None or role.branch == "nt":
        return ONE_PROCESS
    if meeting.startswith("file:"):
        os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = "lo"
    dist.init_process_group(backend, init_method=meeting, rank=role.rank, world_size=phase.ct_workers)

    def total(tensor: Tensor) -> Tensor:
        out = tensor.detach().clone()
        dist.all_reduce(out)
        return out

    def sync_gradients(parameters: Sequence[Tensor]) -> None:
        gradients = [p.grad for p in parameters if p.grad is not None]
        flat = torch.cat([g.flatten() for g in gradients])  # one message a step instead of one per tensor
        dist.all_reduce(flat)
        for gradient, part in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
            gradient.copy_(part.view_as(gradient))

    return Ranks(
        rank=role.rank,
        world=phase.ct_workers,
        all_sum=_AllSum.apply,
        total=total,
        sync_gradients=sync_gradients,
    )


def global_metrics(metrics: Mapping[str, float], ranks: Ranks) -> dict[str, float]:
    """Every rank's epoch means as those of the global batch; seconds are the slowest rank's."""
    if ranks.world == 1:
        return dict(metrics)
    names = sorted(metrics)
    values = ranks.total(torch.tensor([metrics[n] for n in names], dtype=torch.float64)).tolist()
    return {n: v if n in SUMMED else v / ranks.world for n, v in zip(names, values, strict=True)}
