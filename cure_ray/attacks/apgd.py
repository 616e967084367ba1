"""Projected gradient descent with momentum whose step halves where it stops paying (APGD), in l_inf, l2 and l1 on ball∩box.

The step rule is that of Croce and Hein (2020), in l1 that of the same authors (2021): there sparsity takes the place of momentum. All
decisions are taken row by row on the device, so a row does not depend on its batch.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from cure_ray.threats.balls import Ball
from cure_ray.threats.box import UNIT, Box
from cure_ray.threats.geometry import distance, offsets, project

MOMENTUM = 0.75  # weight of the new step against the last move
PROGRESS = 0.75  # share of steps since the last checkpoint that must have descended for the step to stay
BISECTIONS = 16  # of the projection: its result is inside however few, and the witness is projected again in float64

Gradient = Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]  # offsets [R, N] to loss [R], margin [R] and the loss's gradient [R, N]


def checkpoints(steps: int) -> frozenset[int]:
    """The steps at which step sizes are judged: closer together towards the end."""
    marks, before, now = list[int](), 0.0, 0.22
    while now < 1:
        marks.append(max(1, round(now * steps)))
        before, now = now, now + max(now - before - 0.03, 0.06)
    return frozenset(marks)


@dataclass
class Found:
    """The point of smallest margin of each row."""

    delta_RN: Tensor
    margin_R: Tensor


def steepest(gradient_RN: Tensor, delta_RN: Tensor, low_RN: Tensor, high_RN: Tensor, threat: Ball, keep_R1: Tensor) -> Tensor:
    """The direction of descent of unit norm, over the pixels that can still move that way; in l1 over the `keep_R1` steepest."""
    gradient = gradient_RN * torch.where(gradient_RN > 0, delta_RN > low_RN, delta_RN < high_RN)
    if threat.norm == "linf":
        return -gradient.sign()
    if threat.norm == "l2":
        return -gradient / distance(gradient, "l2").clamp_min(torch.finfo(gradient.dtype).tiny)[:, None]
    size = gradient.abs()
    last = (keep_R1.round().long() - 1).clamp(0, gradient.shape[1] - 1)
    threshold = size.sort(1, descending=True).values.gather(1, last)
    kept = gradient.sign() * (size >= threshold)
    return -kept / distance(kept, "l1").clamp_min(1)[:, None]


def descend(
    gradient: Gradient, x_RN: Tensor, start_RN: Tensor, threat: Ball, steps: int, standing: Callable[[Tensor], Tensor], box: Box = UNIT
) -> Found:
    """`standing` says which rows go on, given their smallest margins: a fallen sample is left as it is, whatever else is in its batch."""
    low, high = offsets(x_RN, threat.eps, box)
    sparse = threat.norm == "l1"
    delta = project(start_RN, x_RN, threat, box, steps=BISECTIONS)
    before, marks, last = delta, checkpoints(steps), 0
    step = torch.full_like(x_RN[:, :1], threat.eps * (1.0 if sparse else 2.0))
    keep, moving = torch.full_like(step, 4 * threat.eps + 1), torch.full_like(step, float(x_RN.shape[1]))
    progress, halved = torch.zeros_like(step), torch.ones_like(step, dtype=torch.bool)
    lowest = earlier = previous = torch.full_like(step, torch.inf)
    best, best_gradient = delta, torch.zeros_like(delta)
    found = Found(delta, torch.full_like(step[:, 0], torch.inf))
    for k in range(steps + 1):
        loss, margin, slope = gradient(delta)
        alive = standing(found.margin_R)
        closer = (margin < found.margin_R) & alive
        found = Found(torch.where(closer[:, None], delta, found.delta_RN), torch.where(closer, margin, found.margin_R))
        if k == steps:
            break
        loss, slope = torch.nan_to_num(loss[:, None], nan=torch.inf), torch.nan_to_num(slope)
        progress = progress + (loss < previous)
        previous = loss
        better = loss < lowest
        best, best_gradient = torch.where(better, delta, best), torch.where(better, slope, best_gradient)
        lowest = torch.where(better, loss, lowest)
        moved = delta - before
        if k in marks:
            if sparse:
                halt, step, moving = _resparsify(best, step, moving, threat.eps)
                keep = moving / 1.5
            else:
                halt = (progress < PROGRESS * (k - last)) | (~halved & (lowest >= earlier))
                step = torch.where(halt, step / 2, step)
            halved, earlier, progress, last = halt, lowest, torch.zeros_like(progress), k
            delta, slope = torch.where(halt, best, delta), torch.where(halt, best_gradient, slope)
            moved = torch.where(halt, torch.zeros_like(moved), moved)
        toward = project(delta + step * steepest(slope, delta, low, high, threat, keep), x_RN, threat, box, steps=BISECTIONS)
        before = delta
        if sparse or k == 0:
            delta = toward
        else:
            delta = project(delta + MOMENTUM * (toward - delta) + (1 - MOMENTUM) * moved, x_RN, threat, box, steps=BISECTIONS)
    return found


def _resparsify(best: Tensor, step: Tensor, moving: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """In l1: where the best point moves fewer pixels than before, go on from it with long steps; elsewhere shorten them."""
    count = (best != 0).sum(1, keepdim=True).to(step.dtype)
    sparser = count < 0.95 * moving
    return sparser, torch.where(sparser, torch.full_like(step, eps), (step / 1.5).clamp_min(eps / 10)), count
