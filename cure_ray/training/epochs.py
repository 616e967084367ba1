"""Epochs as pure functions of (weights, optimiser state, seed): everything random is derived from names, nothing is carried over."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor, nn

from cure_ray import seeding
from cure_ray.config import Experiment, Training
from cure_ray.config.methods import Step
from cure_ray.data.images import AugmentationTable, Images, augmented_batch
from cure_ray.networks.sequence import Blocks, read_blocks
from cure_ray.training.averaging import Average
from cure_ray.training.cgt import cgt_step
from cure_ray.training.region import Noise
from cure_ray.training.schedules import learning_rate, radius_fraction
from cure_ray.training.step import Moment, Ranks, StepResult, Streams, certified_step, natural_step, standard_step

LIVE = "live/"  # before the names of weights in a file of optimiser state
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
    """A network with its optimiser, and the moving average of its weights if there is one: the state an epoch advances."""

    network: nn.Sequential
    optimizer: torch.optim.Adam
    average: Average | None = None

    @staticmethod
    def of(network: nn.Sequential, lr: float) -> "Learner":
        """With a plain Adam."""
        return Learner(network, torch.optim.Adam(network.parameters(), lr=lr, betas=(0.9, 0.999), eps=1e-8, fused=True))

    @staticmethod
    def certified(network: nn.Sequential, training: Training) -> "Learner":
        """With what the experiment says about the optimiser; an average begins at the network as it is."""
        plain = Learner.of(network, training.lr)
        average = Average.of(network, training.ema) if training.ema > 0 else None
        if training.weight_decay == 0:
            return replace(plain, average=average)
        decaying = torch.optim.AdamW(
            network.parameters(), lr=training.lr, betas=(0.9, 0.999), eps=1e-8, weight_decay=training.weight_decay, fused=True
        )
        return Learner(network, decaying, average)

    @property
    def result(self) -> nn.Sequential:
        """What is evaluated, saved and certified."""
        return self.network if self.average is None else self.average.network

    def step(self) -> None:
        self.optimizer.step()
        self.follow()

    def follow(self) -> None:
        """The average takes in the weights as they are now."""
        if self.average is not None:
            self.average.take_in(self.network)

    def saved_tensors(self) -> dict[str, Tensor]:
        """What a checkpoint holds besides the result: Adam's state, and where there is an average the weights behind it."""
        live = {} if self.average is None else self.network.state_dict()
        return {**self.optimizer_tensors(), **{f"{LIVE}{name}": t.detach().cpu().clone().contiguous() for name, t in live.items()}}

    def load_saved_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """The inverse of `saved_tensors`, on a learner made of the result."""
        live = {name.removeprefix(LIVE): tensor for name, tensor in tensors.items() if name.startswith(LIVE)}
        if live:
            self.network.load_state_dict(live)
        self.load_optimizer_tensors(tensors)

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


def group_of(batch: int, batches: int, accumulate: int) -> tuple[int, int]:
    """First batch and size of the group whose gradients make one step together; the last group of an epoch may be smaller."""
    first = batch - batch % accumulate
    return first, min(accumulate, batches - first)


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
        first, size = group_of(batch, len(order), training.accumulate)
        if batch == first:
            learner.optimizer.zero_grad(set_to_none=True)
        (result.loss if size == 1 else result.loss / size).backward()
        if batch == first + size - 1:
            ranks.sync_gradients(parameters)
            if training.grad_clip is not None and branch == "ct":
                nn.utils.clip_grad_norm_(parameters, training.grad_clip)
            learner.step()
        trace.add(result)
        tick(batch + 1, len(order))
    metrics = trace.means(trace.check(epoch), order.numel())
    return {**metrics, "rho": rho if branch == "ct" and training.ramps else 1.0, "lr": rate, "seconds": time.perf_counter() - started}
