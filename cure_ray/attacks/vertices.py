"""A search over vertices of the l1 ball in the box, where a few pixels are at the end of their range and the rest are untouched.

The minimum of a network that is linear in between lies at a vertex, and neighbouring vertices differ by pixels that gradient steps trade
only slowly. From the gradient at one vertex many are proposed, each with other pixels left out; the best is where the next round starts.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from cure_ray.attacks.apgd import Found, Gradient
from cure_ray.threats.balls import Ball
from cure_ray.threats.box import UNIT, Box
from cure_ray.threats.geometry import minimise_linear, offsets

PROPOSALS = 16  # vertices tried per round, the first with no pixel left out
LEFT_OUT = 0.5  # largest share of pixels left out


def search_vertices(
    gradient: Gradient, margins: Callable[[Tensor], Tensor], x_BN: Tensor, start_BN: Tensor, threat: Ball, rounds: int,
    streams: Sequence[torch.Generator], box: Box = UNIT,
) -> Found:  # fmt: skip
    """The best vertex per sample. `margins` takes [M, B, N] offsets to [M, B] values of what is to be lowered."""
    low, high = offsets(x_BN, threat.eps, box)
    delta = start_BN
    found = Found(delta, torch.full_like(x_BN[:, 0], torch.inf))
    for _ in range(rounds):
        _, _, slope_BN = gradient(delta)
        keep_MBN = _masks(streams, x_BN.shape[1]).to(x_BN.device)
        slope_MBN = torch.nan_to_num(slope_BN) * keep_MBN
        tried_MBN = minimise_linear(slope_MBN, x_BN.expand_as(slope_MBN), low, high, threat, box)[1]
        values_MB = torch.nan_to_num(margins(tried_MBN), nan=torch.inf)
        value_B, pick_B = values_MB.min(0)
        delta = tried_MBN.gather(0, pick_B[None, :, None].expand(1, -1, x_BN.shape[1])).squeeze(0)
        closer_B = (value_B < found.margin_R) & (found.margin_R > 0)
        found = Found(torch.where(closer_B[:, None], delta, found.delta_RN), torch.where(closer_B, value_B, found.margin_R))
    return found


def _masks(streams: Sequence[torch.Generator], size: int) -> Tensor:
    """[M, B, N] which pixels may move: all of them first, then ever fewer, drawn from each sample's own stream."""
    share_M1 = torch.linspace(0, LEFT_OUT, PROPOSALS)[:, None]
    return torch.stack([torch.rand(PROPOSALS, size, generator=stream) >= share_M1 for stream in streams], 1)
