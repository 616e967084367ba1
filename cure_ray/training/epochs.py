"""Epochs as pure functions of (weights, optimiser state, seed): everything random is derived from names, nothing is carried over."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from cure_ray import seeding
from cure_ray.config import Experiment
from cure_ray.config.methods import Step
from cure_ray.data.images import AugmentationTable, Images, augmented_batch
from cure_ray.networks.sequence import Blocks, read_blocks
from cure_ray.training.cgt import cgt_step
from cure_ray.training.region import Noise
from cure_ray.training.schedules import learning_rate, radius_fraction
from cure_ray.training.step import Moment, Ranks, StepResult, Streams, certified_step, natural_step, standard_step

Branch = Literal["ct", "nt"]
Take = Callable[[Tensor, Tensor, Moment], StepResult]
Tick = Callable[[int, int], None]  # called with (batches done, batches in all)
ONE_PROCESS = Ranks()


def silent(done: int, total: int) -> None:
    return None


class DivergedError(RuntimeError):
    """A loss term stopped being finite."""

    def __init__(self, epoch: int, batch: int, term: str, value: float) -> None:
        super().__init__(f"the loss term {term!r} became {value} in epoch {epoch}, batch {batch}")
        self.epoch, self.batch, self.term, self.value = epoch, batch, term, value


@dataclass
class Learner:
    """A network with its optimiser: the state an epoch advances."""

    network: nn.Sequential
    optimizer: torch.optim.Adam

    @staticmethod
    def of(network: nn.Sequential, lr: float) -> "Learner":
        return Learner(network, torch.optim.Adam(network.parameters(), lr=lr, betas=(0.9, 0.999), eps=1e-8, fused=True))

    def optimizer_tensors(self) -> dict[str, Tensor]:
        """Adam's state by parameter name, on the CPU; empty before the first step."""
        state = self.optimizer.state
        return {
            f"{name}.{key}": state[p][key].detach().cpu().clone().contiguous()
            for name, p in self.network.named_parameters()
            if p in state
            for key in ("step", "exp_avg", "exp_avg_sq")
        }

    def load_optimizer_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """The inverse of `optimizer_tensors`."""
        for name, p in self.network.named_parameters():
            if f"{name}.step" not in tensors:
                continue
            moments = {k: torch.empty_like(p).copy_(tensors[f"{name}.{k}"]) for k in ("exp_avg", "exp_avg_sq")}
            self.optimizer.state[p] = {"step": tensors[f"{name}.step"].to(p.device), **moments}


def batch_order(images: Images, experiment: Experiment, epoch: int, branch: Branch, ranks: Ranks) -> Tensor:
    """[batches, local batch] indices: one shuffle per (seed, epoch, branch), the rest dropped; ranks take consecutive slices."""
    size, batches = experiment.training.batch_size, len(images) // experiment.training.batch_size
    order = torch.randperm(len(images), generator=seeding.generator("cpu", experiment.seed, epoch, branch, "order"))
    mine = order[: batches * size].view(batches, ranks.world, size // ranks.world)[:, ranks.rank]
    return mine.to(images.raw.device)


def _streams(experiment: Experiment, epoch: int, device: torch.device, ranks: Ranks) -> Streams:
    def noise(norm: str) -> Noise:
        return Noise(seeding.generator(device, experiment.seed, epoch, "ct", f"attack_{norm}"), ranks.rank, ranks.world)

    attacks = {norm: noise(norm) for norm in experiment.training.active_norms}
    return Streams(attacks, seeding.generator(device, experiment.seed, epoch, "ct", "partition", ranks.rank))


class _Trace:
    """Every step's terms and logs, kept on the device and read once, at the end of the epoch."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.rows: list[Tensor] = []
        self.terms = 0

    def add(self, result: StepResult) -> None:
        if not self.names:
            self.names, self.terms = [*result.terms, *result.logs], len(result.terms)
        self.rows.append(torch.stack([v.detach().float() for v in (*result.terms.values(), *result.logs.values())]))

    def check(self, epoch: int) -> Tensor:
        """The whole table on the host; raises at the first term that is not finite."""
        table = torch.stack(self.rows).cpu().double()
        broken = (~table[:, : self.terms].isfinite()).nonzero()
        if len(broken):
            batch, term = (int(v) for v in broken[0])
            raise DivergedError(epoch, batch, self.names[term], float(table[batch, term]))
        return table

    def means(self, table: Tensor, samples: int) -> dict[str, float]:
        out = dict(zip(self.names, table.mean(0).tolist(), strict=True))
        out["train_accuracy"] = out.pop("train_correct") * len(table) / samples
        out["loss"] = sum(out[name] for name in self.names[: self.terms])
        return out


def _step_of(
    branch: Branch,
    blocks: Blocks,
    experiment: Experiment,
    epoch: int,
    streams: Streams,
    parameters: Sequence[Tensor],
    ranks: Ranks,
) -> Take:
    """The step of this epoch, picked once: the natural branch's, or the method's; certified methods train naturally before the ramp."""
    if branch == "nt":
        return lambda x, y, moment: natural_step(blocks, x, y, ranks)
    training = experiment.training
    kind: Step = training.row.step
    steps: dict[Step, Take] = {
        "natural": lambda x, y, moment: standard_step(blocks, x, y, experiment, parameters, ranks),
        "certified": lambda x, y, moment: certified_step(blocks, x, y, moment.rho, experiment, streams, parameters, ranks),
        "transformation": lambda x, y, moment: cgt_step(blocks, x, y, moment, experiment, streams.partition, parameters, ranks),
    }
    return steps["natural" if kind == "certified" and epoch <= training.standard_epochs else kind]


def run_epoch(
    branch: Branch,
    learner: Learner,
    images: Images,
    experiment: Experiment,
    epoch: int,
    ranks: Ranks = ONE_PROCESS,
    tick: Tick = silent,
    channels_last: bool = False,
) -> dict[str, float]:
    """Advance the learner by one epoch of its branch and return the epoch's mean terms, logs and seconds."""
    started = time.perf_counter()
    training, network = experiment.training, learner.network
    network.train()
    blocks = read_blocks(network)
    parameters = list(network.parameters())
    order = batch_order(images, experiment, epoch, branch, ranks)
    table = AugmentationTable.draw(images, experiment.seed, epoch, branch)
    streams = _streams(experiment, epoch, images.raw.device, ranks)
    rate = learning_rate(training, epoch)
    for group in learner.optimizer.param_groups:
        group["lr"] = rate
    trace, rho = _Trace(), 0.0
    take = _step_of(branch, blocks, experiment, epoch, streams, parameters, ranks)
    for batch in range(len(order)):
        x, y = augmented_batch(images, table, order[batch])
        if channels_last:
            x = x.contiguous(memory_format=torch.channels_last)
        rho = radius_fraction(training, epoch, batch, len(order))
        result = take(x, y, Moment(epoch, batch, len(order), rho))
        learner.optimizer.zero_grad(set_to_none=True)
        result.loss.backward()
        ranks.sync_gradients(parameters)
        if training.grad_clip is not None and branch == "ct":
            nn.utils.clip_grad_norm_(parameters, training.grad_clip)
        learner.optimizer.step()
        trace.add(result)
        tick(batch + 1, len(order))
    metrics = trace.means(trace.check(epoch), order.numel())
    return {**metrics, "rho": rho if branch == "ct" and training.ramps else 1.0, "lr": rate, "seconds": time.perf_counter() - started}
