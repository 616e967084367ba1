"""CGT: certified training against a geometric transformation (docs/explanation/algorithms.md 12.5).

Every batch draws one random sub-range of the training width; all its images share the interpolation weights. The loss is
kappa CE(transformed images) + (1 - kappa) CE(worst case over the sub-range), with kappa falling from 1 to 1/2 after the standard
epochs, and the width growing linearly over the first half of the run.
"""

from collections.abc import Sequence
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from cure_ray.config import Experiment
from cure_ray.networks.sequence import Blocks
from cure_ray.threats.transformations import Transformation, training_transformation
from cure_ray.threats.warps import Ranges, build_warps, pixel_columns, transformed
from cure_ray.training.folding import clean_forward, fold_batch
from cure_ray.training.losses import robust_cross_entropy
from cure_ray.training.propagation import Region, propagate, upper_bounds
from cure_ray.training.step import Moment, Ranks, StepResult, finish


@lru_cache(maxsize=8)
def _target(text: str, dataset: str, widths: tuple[float, ...] | None) -> Transformation:
    return training_transformation(text, dataset, widths)


def natural_weight(epoch: int, standard_epochs: int, epochs: int) -> float:
    """kappa: 1 during the standard epochs, then linearly down to 1/2 in the last one."""
    left = max(1, epochs - standard_epochs)
    return 1 - 0.5 * min(1.0, max(0, epoch - standard_epochs) / left)


def width_fraction(epoch: int, batch: int, batches: int, epochs: int) -> float:
    """The share of the training width: linear over half the epochs."""
    return min(1.0, (epoch - 1 + (batch + 1) / batches) / max(1.0, epochs / 2))


def draw_range(transformation: Transformation, fraction: float, unit: Sequence[float]) -> Ranges:
    """A sub-range of `fraction` of a cell's width in every parameter, placed by numbers in [0, 1]."""
    found = []
    for step, count, share in zip(transformation.steps, transformation.cells, unit, strict=True):
        width = (step.high - step.low) / count * fraction
        low = step.low + (step.high - step.low - width) * share
        found.append((low, low + width))
    return found


@torch.no_grad()
def interval_batch(transformation: Transformation, ranges: Ranges, x: Tensor) -> Region:
    """All images of a batch over one sub-range, as boxes in the images' type."""
    B, C, H, W = x.shape
    (warp,) = build_warps(transformation.steps, [ranges], H, W, x.device)
    low, high = (t.view(H, W, B, C).permute(2, 3, 0, 1) for t in warp.apply(pixel_columns(x).flatten(1)))
    return Region(((low + high) / 2).to(x.dtype).contiguous(), ((high - low) / 2).to(x.dtype).contiguous(), "linf")


def cgt_step(
    blocks: Blocks,
    x: Tensor,
    y: Tensor,
    moment: Moment,
    experiment: Experiment,
    rng: torch.Generator,
    parameters: Sequence[Tensor],
    ranks: Ranks,
) -> StepResult:
    """One step; BN statistics come from the transformed batch and also serve the boxes."""
    training = experiment.training
    assert training.transformation is not None
    target = _target(training.transformation, experiment.dataset.name, training.transformation_widths)
    unit = torch.rand(2, len(target.steps), generator=rng, device=rng.device, dtype=torch.float64).tolist()
    ranges = draw_range(target, width_fraction(moment.epoch, moment.batch, moment.batches, training.epochs), unit[0])
    point = [low + (high - low) * share for (low, high), share in zip(ranges, unit[1], strict=True)]
    moved = transformed(target.steps, point, x).to(x.dtype).contiguous()
    logits, stats = clean_forward(blocks, moved, ranks.all_sum, ranks.world)
    count, kappa = len(x) * ranks.world, natural_weight(moment.epoch, training.standard_epochs, training.epochs)
    terms = {"natural": kappa * F.cross_entropy(logits, y, reduction="sum") / count}
    if kappa < 1:
        network = fold_batch(blocks, stats)
        boxes = propagate(network, [interval_batch(target, ranges, x)], training.relu_shrink or 1.0)
        terms["robust"] = (1 - kappa) * robust_cross_entropy(upper_bounds(network, boxes, y)).sum() / count
    return finish(terms, {"train_correct": (logits.detach().argmax(1) == y).sum()}, training, parameters, ranks)
