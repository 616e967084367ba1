"""The check that makes a candidate a witness: put inside the ball and the domain, and replayed on the CPU in float64."""

import copy
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from cure_ray.attacks.losses import margin
from cure_ray.threats.balls import Ball
from cure_ray.threats.box import UNIT, Box
from cure_ray.threats.geometry import distance, nearest

_INSIDE = 1 - 1e-12  # relative shrinking of the radius, so that adding an offset to an image cannot round it out of the ball


@dataclass(frozen=True)
class Witnesses:
    """What the replay says of one candidate per sample, on the CPU in float64."""

    images: Tensor  # [B, C, H, W]
    margins: Tensor  # [B], min over i of f_y - f_i at `images`; NaN where the network returns NaN
    inside: Tensor  # [B], True: the image lies in ball∩box, so that its margin says something about the threat

    @property
    def valid(self) -> Tensor:
        """[B], True: in the ball, in the domain, and misclassified."""
        return self.inside & (self.margins <= 0)


def replay_network(network: nn.Module) -> nn.Module:
    """The network as witnesses are judged: a copy in eval mode, on the CPU, in float64."""
    return copy.deepcopy(network).cpu().double().eval().requires_grad_(False)


@torch.no_grad()
def check_witness(replay: nn.Module, x_BCHW: Tensor, y_B: Tensor, candidates_BCHW: Tensor, threat: Ball, box: Box = UNIT) -> Witnesses:
    """Put candidates into ball∩box in float64 and see which are misclassified there. `replay` is from replay_network."""
    x = x_BCHW.detach().to("cpu", torch.float64)
    flat = x.flatten(1)
    delta = candidates_BCHW.detach().to("cpu", torch.float64).flatten(1) - flat
    delta = torch.nan_to_num(delta, nan=0.0, posinf=0.0, neginf=0.0)
    # Adding an offset to a pixel rounds by at most 2^-53 of the sum each way; all pixels together by the norm of that.
    largest = (flat.abs().amax(1, keepdim=True) + threat.eps).clamp(1.0, max(1.0, box.reach))
    rounding = distance(flat.new_full((flat.shape[1],), 2.0**-52), threat.norm) * largest
    images = flat + nearest(delta, flat, threat.norm, (threat.eps * _INSIDE - rounding).clamp_min(0), box)
    images = images.clamp(box.low, box.high)
    inside = (distance(images - flat, threat.norm) <= threat.eps) & ((images >= box.low) & (images <= box.high)).all(1)
    images = images.view_as(x)
    return Witnesses(images, margin(replay(images), y_B.cpu()), inside)
