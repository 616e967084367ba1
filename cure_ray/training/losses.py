"""The objectives: one small pure function each, on per-sample robust losses or upper bounds.

A sum is divided by the samples of the global batch, that is by those here times `world`, the number of data-parallel ranks: then
the gradients of all ranks add up to the gradient of the global mean.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from cure_ray.config import Training
from cure_ray.config.methods import Loss, Objective

Combine = Callable[[Sequence[Tensor], int], Tensor]  # the norms' losses per sample, ranks -> what is minimised
Between = Callable[[Tensor, Tensor, float], Tensor]  # u [B, K] at the attack, u on the whole region, lambda -> loss per sample
Count = Callable[[Tensor], Tensor]  # adds a count over ranks, without gradient
SMALLEST = 1e-12


def robust_cross_entropy(u_BK: Tensor) -> Tensor:
    """Cross-entropy of the worst case: ln sum_j exp(u_j), per sample; u is 0 at the label."""
    return u_BK.logsumexp(1)


def multi_task(u_attack_BK: Tensor, u_bound_BK: Tensor, ratio: float) -> Tensor:
    """MTL-IBP: the convex combination of the two losses."""
    return (1 - ratio) * robust_cross_entropy(u_attack_BK) + ratio * robust_cross_entropy(u_bound_BK)


def combined_margins(u_attack_BK: Tensor, u_bound_BK: Tensor, ratio: float) -> Tensor:
    """CC-IBP: the loss of the convex combination of the margins."""
    return robust_cross_entropy((1 - ratio) * u_attack_BK + ratio * u_bound_BK)


def geometric_mean(u_attack_BK: Tensor, u_bound_BK: Tensor, ratio: float) -> Tensor:
    """Exp-IBP: the convex combination of the logarithms. A loss that float32 rounds to 0 has no logarithm and gives no gradient."""
    log_attack, log_bound = (robust_cross_entropy(u).clamp(min=SMALLEST).log() for u in (u_attack_BK, u_bound_BK))
    return torch.exp((1 - ratio) * log_attack + ratio * log_bound)


BETWEEN: dict[Loss, Between] = {"mtl": multi_task, "cc": combined_margins, "exp": geometric_mean}  # sabr has one region, between the two


def of_norm(loss: Loss, u_attack_BK: Tensor | None, u_bound_BK: Tensor, ratio: float) -> Tensor:
    """The loss of one norm per sample. Without an attacked point (SABR, and the ends of the others) that of the region bounded."""
    return robust_cross_entropy(u_bound_BK) if u_attack_BK is None else BETWEEN[loss](u_attack_BK, u_bound_BK, ratio)


def single(losses: Sequence[Tensor], world: int) -> Tensor:
    """The mean of one norm's loss."""
    (loss,) = losses
    return loss.sum() / (len(loss) * world)


def joint(losses: Sequence[Tensor], world: int, weights: Sequence[float]) -> Tensor:
    """The weighted sum of the norms' means."""
    return torch.stack([weight * loss.sum() for weight, loss in zip(weights, losses, strict=True)]).sum() / (len(losses[0]) * world)


def maximum(losses: Sequence[Tensor], world: int) -> Tensor:
    """The mean of the per-sample maximum. On ties the earlier norm wins alone (torch.maximum would split the gradient)."""
    return worst_of(losses).sum() / (len(losses[0]) * world)


def worst_of(losses: Sequence[Tensor]) -> Tensor:
    """Per-sample maximum over norms; the gradient goes to one norm."""
    worst = losses[0]
    for loss in losses[1:]:
        worst = torch.where(loss > worst, loss, worst)
    return worst


def parts(losses: Sequence[Tensor], world: int, mean: bool) -> Tensor:
    """Sum of the means over disjoint parts of the batch, one norm each (A12): method random. With `mean`, their average."""
    total = torch.stack([loss.sum() / (len(loss) * world) for loss in losses]).sum()
    return total / len(losses) if mean else total


def _joint_of(training: Training) -> Combine:
    weights = dict(zip(training.norms, training.joint_weights, strict=True))
    return partial(joint, weights=[weights[norm] for norm in training.active_norms])


OBJECTIVES: dict[Objective, Callable[[Training], Combine]] = {
    "single": lambda training: single,
    "joint": _joint_of,
    "max": lambda training: maximum,
    "parts": lambda training: partial(parts, mean=training.random_weights == "mean"),
}


def certified_subset(u_BK: Tensor) -> Tensor:
    """Samples whose small region is certified, as 0/1 (A4: equality counts; this steers training, it proves nothing)."""
    return (u_BK.detach() <= 0).all(1).to(u_BK.dtype)


def bound_alignment(u_first_BK: Tensor, u_second_BK: Tensor, subset: str, total: Count) -> tuple[Tensor, Tensor]:
    """KL(softmax u_first || softmax u_second), averaged over the certified subset; and the size of that subset.

    Gradient flows through both sides (A15). A masked sum, not an index: nothing is read back to the host. An empty subset gives
    exactly 0 and no gradient.
    """
    masks = {"first": lambda: certified_subset(u_first_BK), "second": lambda: certified_subset(u_second_BK)}
    if subset in masks:
        gamma = masks[subset]()
    elif subset == "both":
        gamma = certified_subset(u_first_BK) * certified_subset(u_second_BK)
    else:
        gamma = torch.ones_like(u_first_BK[:, 0])
    log_p, log_q = u_first_BK.log_softmax(1), u_second_BK.log_softmax(1)
    divergence = (log_p.exp() * (log_p - log_q)).sum(1)
    size = total(gamma.sum())
    return (gamma * divergence).sum() / size.clamp(min=1), size
