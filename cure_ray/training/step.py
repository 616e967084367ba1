"""One training step: clean pass, attacks, regions, objective, regularisers. Reads nothing back to the host.

Section 5.7 of docs/explanation/algorithms.md.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from cure_ray.config import Experiment, Training
from cure_ray.networks.sequence import Blocks
from cure_ray.threats.norms import Norm, P
from cure_ray.training import losses as objectives
from cure_ray.training.crown import linear_upper_bounds
from cure_ray.training.folding import FoldedNetwork, clean_forward, fold_batch, fold_running
from cure_ray.training.propagation import Propagated, Region, propagate, upper_bounds
from cure_ray.training.region import Noise, RegionSpec, build_regions
from cure_ray.training.regularizers import l1_norm, warmup

Propagate = Callable[..., Propagated]
AttackLogits = Callable[[FoldedNetwork, Tensor], Tensor]
STANDARD_RADIUS = 1e-6  # the box the warm-up regulariser looks at while nothing is propagated yet (5.6)


def _same(tensor: Tensor) -> Tensor:
    return tensor


@dataclass(frozen=True)
class Ranks:
    """Data parallelism as four facts. The default is one process; cluster/ supplies the distributed one."""

    rank: int = 0
    world: int = 1
    all_sum: Callable[[Tensor], Tensor] = _same  # differentiable sum over ranks (BN statistics)
    total: Callable[[Tensor], Tensor] = _same  # the same without gradient (counts)
    sync_gradients: Callable[[Sequence[Tensor]], None] = field(default=lambda parameters: None)

    def mean(self, local: Tensor) -> Tensor:
        """The mean over the global batch of a local batch mean, differentiably."""
        return self.all_sum(local) / self.world


@dataclass(frozen=True)
class Moment:
    """Where in a run a step stands: epoch from 1, batch from 0, and the fraction of the full radii."""

    epoch: int
    batch: int
    batches: int
    rho: float


@dataclass(frozen=True)
class Streams:
    """The random streams of one certified epoch: one per attack, one for the partition of method random."""

    attacks: dict[Norm, Noise]
    partition: torch.Generator


@dataclass(frozen=True)
class StepResult:
    """The loss as its terms (their sum is minimised) and what is worth logging, all still on the device."""

    terms: dict[str, Tensor]
    logs: dict[str, Tensor]

    @property
    def loss(self) -> Tensor:
        return torch.stack(list(self.terms.values())).sum()


@functools.cache
def _kernels(compiled: bool) -> tuple[Propagate, AttackLogits]:
    """The two passes a step spends its time in, eager or through torch.compile (execution.compile)."""
    if compiled:
        return torch.compile(propagate), torch.compile(FoldedNetwork.attack_logits)
    return propagate, FoldedNetwork.attack_logits


def _reference(regions: Sequence[Region], norms: Sequence[Norm]) -> int:
    """The region the warm-up regulariser looks at (A17): l_inf if there is one, else the first."""
    return norms.index("linf") if "linf" in norms else 0


def _radius_in(region: Region, network: FoldedNetwork) -> Tensor:
    """Mean radius entering the first layer, after normalisation; for a ball that of its largest inscribed cube."""
    std = 1.0 if network.normalize is None else network.normalize.std
    if region.norm == "linf":
        return (region.radius / std).mean()
    cube = region.radius.mean() * region.centre[0].numel() ** (-1 / P[region.norm])
    return cube * (1 / torch.as_tensor(std)).mean()


def region_specs(experiment: Experiment, rho: float, batch: int, streams: Streams) -> list[tuple[RegionSpec, ...]]:
    """Which regions this step builds: for each norm the one that is bounded, before it the attacked point if its loss takes both.

    At its ends a loss takes one of them, as SABR's does between them. The objective `parts` gives every norm its own part of the batch.
    """
    training = experiment.training
    norms = training.active_norms
    rows: list[Tensor | None] = [None] * len(norms)
    if training.objective == "parts":
        order = torch.randperm(batch, generator=streams.partition, device=streams.partition.device)
        rows = list(order.tensor_split(len(norms)))
    plans = list[tuple[RegionSpec, ...]]()
    for norm, part in zip(norms, rows, strict=True):
        between = training.loss.of(norm) != "sabr"
        ball = norm != "linf" and (between or getattr(training.regions, norm) == "ball")
        spec = RegionSpec(norm, rho * experiment.training_eps(norm), training.lambda_of(norm), ball, part, experiment.dataset.box)
        attacked = replace(spec, eps=training.attack.radius * spec.eps, ratio=0.0)
        if between and spec.ratio == 0:
            plans.append((attacked,))
        elif between and spec.ratio < 1:
            plans.append((attacked, replace(spec, ratio=1.0)))
        else:
            plans.append((spec,))
    return plans


def _attacked_margins(
    network: FoldedNetwork, found: Sequence[tuple[Region, ...]], ys: Sequence[Tensor], bound: Propagate
) -> list[Tensor | None]:
    """u [B, K] at the attacked points, in one pass without radii; None for norms whose loss takes one region."""
    pairs = [i for i, of_norm in enumerate(found) if len(of_norm) > 1]
    out: list[Tensor | None] = [None] * len(found)
    if pairs:
        parts = [ys[i] for i in pairs]
        points = bound(network, [found[i][0] for i in pairs], points=True)
        u = upper_bounds(network, points, torch.cat(parts)).split([len(part) for part in parts])
        for i, u_BK in zip(pairs, u, strict=True):
            out[i] = u_BK
    return out


def _of_part(hidden: Sequence[tuple[Tensor, Tensor]], ys: Sequence[Tensor], i: int) -> list[tuple[Tensor, Tensor]]:
    """The hidden boxes of one norm's region, of those of all regions stacked."""
    start = sum(len(part) for part in ys[:i])
    rows = slice(start, start + len(ys[i]))
    return [(c[rows], r[rows]) for c, r in hidden]


def certified_step(
    blocks: Blocks,
    x: Tensor,
    y: Tensor,
    rho: float,
    experiment: Experiment,
    streams: Streams,
    parameters: Sequence[Tensor],
    ranks: Ranks,
) -> StepResult:
    """A step of any certified method, from epoch `standard_epochs + 1` on: only robust terms (6.1)."""
    training = experiment.training
    count = len(x) * ranks.world
    clean_logits, stats = clean_forward(blocks, x, ranks.all_sum, ranks.world)
    plans = region_specs(experiment, rho, len(x), streams)
    specs = [spec for plan in plans for spec in plan]
    bound, attack_logits = _kernels(experiment.execution.compile)
    frozen = functools.partial(attack_logits, fold_running(blocks))
    built = iter(build_regions(frozen, x, y, specs, training.attack, [streams.attacks[s.norm] for s in specs]))
    found = [tuple(next(built) for _ in plan) for plan in plans]
    regions = [of_norm[-1] for of_norm in found]
    ys = [y if plan[-1].rows is None else y[plan[-1].rows] for plan in plans]
    network = fold_batch(blocks, stats)
    warming = training.warmup_weight > 0 and rho < 1
    mixing = training.ramp_bound == "crown-ibp" and rho < 1
    linear = [i for i, norm in enumerate(training.active_norms) if training.bounds.of(norm) == "crown-ibp" and plans[i][-1].ratio > 0]
    points = not (warming or mixing) and all(plan[-1].ratio == 0 for plan in plans)
    boxes = bound(network, regions, training.relu_shrink or 1.0, keep_hidden=bool(warming or mixing or linear), points=points)
    u_all = upper_bounds(network, boxes, torch.cat(ys))
    if mixing:
        u_all = rho * u_all + (1 - rho) * linear_upper_bounds(network, regions, boxes.hidden, torch.cat(ys))
    u = list(u_all.split([len(part) for part in ys]))
    for i in linear:
        u[i] = torch.minimum(u[i], linear_upper_bounds(network, [regions[i]], _of_part(boxes.hidden, ys, i), ys[i]))
    attacked = _attacked_margins(network, found, ys, bound)
    per_norm = [
        objectives.of_norm(training.loss.of(norm), at, u_BK, training.lambda_of(norm))
        for norm, at, u_BK in zip(training.active_norms, attacked, u, strict=True)
    ]
    terms = {"robust": objectives.OBJECTIVES[training.objective](training)(per_norm, ranks.world)}
    if training.natural_weight > 0:
        terms["robust"] = (1 - training.natural_weight) * terms["robust"]
        terms["natural"] = training.natural_weight * F.cross_entropy(clean_logits, y, reduction="sum") / count
    logs = {"train_correct": (clean_logits.detach().argmax(1) == y).sum()}
    for norm, values in zip(training.active_norms, per_norm, strict=True):
        logs[f"loss_{norm}"] = values.detach().mean()
    if training.row.watches_worst and len(per_norm) > 1:
        logs["share_first_norm"] = (objectives.worst_of(per_norm) == per_norm[0]).detach().float().mean()
    if training.uses_alignment:
        first, second = (u[training.active_norms.index(norm)] for norm in training.align)
        divergence, size = objectives.bound_alignment(first, second, training.align_subset, ranks.total)
        terms["alignment"] = training.eta * divergence
        logs["gamma_share"] = size / count
    if warming:
        i = _reference(regions, training.active_norms)
        hidden = _of_part(boxes.before_relu(network), ys, i)
        terms["warmup"] = training.warmup_weight * (1 - rho) / ranks.world * warmup(hidden, _radius_in(regions[i], network), ranks.mean)
    return finish(terms, logs, training, parameters, ranks)


def standard_step(blocks: Blocks, x: Tensor, y: Tensor, experiment: Experiment, parameters: Sequence[Tensor], ranks: Ranks) -> StepResult:
    """A step of the epochs before the ramp: natural cross-entropy, with the warm-up regulariser on a tiny box."""
    training = experiment.training
    logits, stats = clean_forward(blocks, x, ranks.all_sum, ranks.world)
    terms = {"natural": F.cross_entropy(logits, y, reduction="sum") / (len(x) * ranks.world)}
    if training.warmup_weight > 0:
        network = fold_batch(blocks, stats)
        region = Region(x, torch.full_like(x, STANDARD_RADIUS), "linf")
        hidden = propagate(network, [region], training.relu_shrink or 1.0, keep_hidden=True).before_relu(network)
        terms["warmup"] = training.warmup_weight / ranks.world * warmup(hidden, _radius_in(region, network), ranks.mean)
    logs = {"train_correct": (logits.detach().argmax(1) == y).sum()}
    return finish(terms, logs, training, parameters, ranks)


def natural_step(blocks: Blocks, x: Tensor, y: Tensor, ranks: Ranks) -> StepResult:
    """A step of the natural branch of gradient projection: cross-entropy and nothing else (A24)."""
    logits, _ = clean_forward(blocks, x, ranks.all_sum, ranks.world)
    terms = {"natural": F.cross_entropy(logits, y, reduction="sum") / (len(x) * ranks.world)}
    return StepResult(terms, {"train_correct": (logits.detach().argmax(1) == y).sum()})


def finish(terms: dict[str, Tensor], logs: dict[str, Tensor], training: Training, parameters: Sequence[Tensor], ranks: Ranks) -> StepResult:
    if training.l1_weight > 0:
        terms["l1"] = training.l1_weight / ranks.world * l1_norm(parameters)
    return StepResult(terms, logs)
