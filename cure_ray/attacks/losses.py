"""What an attack descends on: margin, cross-entropy and the scale-free DLR, untargeted or towards one class.

All are signed so that lower is closer to a misclassification. They fail on different samples: the margin follows whichever class is
nearest, cross-entropy pulls at all of them, and DLR does not flatten where logits are large.
"""

import math
from typing import Literal

import torch
from torch import Tensor

Loss = Literal["margin", "cross-entropy", "dlr"]
LOSSES: tuple[Loss, ...] = ("margin", "cross-entropy", "dlr")
ANY = -1  # no target: whichever class is nearest


def margin(logits_BK: Tensor, y_B: Tensor) -> Tensor:
    """min over i != y of f_y - f_i: positive iff correctly classified, by a gap."""
    own = logits_BK.gather(1, y_B[:, None])
    return (own - _others(logits_BK, y_B).amax(1, keepdim=True)).squeeze(1)


def _others(logits_BK: Tensor, y_B: Tensor) -> Tensor:
    return logits_BK.masked_fill(torch.zeros_like(logits_BK, dtype=torch.bool).scatter(1, y_B[:, None], True), -math.inf)


def ranked_classes(logits_BK: Tensor, y_B: Tensor) -> Tensor:
    """[B, K-1] the other classes, the nearest to winning first."""
    return _others(logits_BK, y_B).argsort(dim=1, descending=True, stable=True)[:, : logits_BK.shape[1] - 1]


def objective(logits_BK: Tensor, y_B: Tensor, target_B: Tensor, loss_B: Tensor) -> Tensor:
    """[B] what to descend on: `loss_B` numbers LOSSES, `target_B` is a class or ANY. Rows of every kind share a batch."""
    free_B = target_B == ANY
    towards_BK = target_B.clamp_min(0)[:, None]
    aimed_B = (logits_BK.gather(1, y_B[:, None]) - logits_BK.gather(1, towards_BK)).squeeze(1)
    gap_B = torch.where(free_B, margin(logits_BK, y_B), aimed_B)
    log_p_BK = logits_BK.log_softmax(1)
    entropy_B = torch.where(free_B, log_p_BK.gather(1, y_B[:, None]).squeeze(1), -log_p_BK.gather(1, towards_BK).squeeze(1))
    return torch.where(loss_B == 0, gap_B, torch.where(loss_B == 1, entropy_B, gap_B / _spread(logits_BK, free_B)))


def _spread(logits_BK: Tensor, free_B: Tensor) -> Tensor:
    """The distance of the largest logit from the third (with a target: from the mean of third and fourth), as far as there are so many."""
    if logits_BK.shape[1] < 3:  # of two logits the distance is the margin itself, and their ratio constant
        return torch.ones_like(logits_BK[:, 0])
    top = logits_BK.topk(min(4, logits_BK.shape[1]), dim=1).values
    third, fourth = top[:, 2], top[:, -1]
    return (top[:, 0] - torch.where(free_B, third, (third + fourth) / 2)).clamp_min(1e-12)
