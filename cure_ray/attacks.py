"""Attacks: projected gradient descent on the margin in ball∩[0,1], and the check that makes a candidate a witness.

The search runs on any device in float32 and may be as rough as it likes: a candidate counts only after `check_witness` has
put it inside the ball and the image domain and replayed it on the CPU in float64.
"""

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from cure_ray.threats.balls import Ball
from cure_ray.threats.geometry import distance, minimise_linear, offsets, project

_PAIR = 2  # restarts that run together: one by projection, one by Frank-Wolfe
_INSIDE = 1 - 1e-12  # relative shrinking of the radius, so that adding an offset to an image cannot round it out of the ball


@dataclass(frozen=True)
class AttackSettings:
    """How hard to search. Half of the restarts project, half are Frank-Wolfe: they fail on different samples."""

    steps: int = 30
    restarts: int = 4
    rows: int = 1024  # samples times restarts in one forward pass


@dataclass(frozen=True)
class Witnesses:
    """What the replay says of one candidate per sample, on the CPU in float64."""

    images: Tensor  # [B, C, H, W], inside ball∩[0,1] where `valid`
    margins: Tensor  # [B], min over i of f_y - f_i at `images`; NaN where the network returns NaN
    valid: Tensor  # [B], True: in the ball, in [0, 1] and misclassified


def margin(logits_BK: Tensor, y_B: Tensor) -> Tensor:
    """min over i != y of f_y - f_i: positive iff correctly classified, by a gap."""
    own = logits_BK.gather(1, y_B[:, None])
    others = logits_BK.masked_fill(torch.zeros_like(logits_BK, dtype=torch.bool).scatter(1, y_B[:, None], True), -math.inf)
    return (own - others.amax(1, keepdim=True)).squeeze(1)


def attack(network: nn.Module, x_BCHW: Tensor, y_B: Tensor, threat: Ball, seeds: Sequence[int], settings: AttackSettings) -> Tensor:
    """The image of smallest margin found for every sample, [B, C, H, W]. One seed per sample, so batches do not matter."""
    if len(seeds) != len(x_BCHW):
        raise ValueError(f"one seed per sample: got {len(seeds)} seeds for {len(x_BCHW)} samples")
    best, best_margin = x_BCHW.clone(), torch.full_like(x_BCHW.flatten(1)[:, :1].squeeze(1), math.inf)
    starts_RBN = _starts(x_BCHW, threat, seeds, settings.restarts)
    for first in range(0, settings.restarts, _PAIR):
        todo = (best_margin > 0).nonzero().squeeze(1)  # a sample that has fallen needs no more restarts
        for piece in todo.split(max(1, settings.rows // _PAIR)):
            starts = starts_RBN[first : first + _PAIR, piece]
            found, found_margin = _descend(network, x_BCHW[piece], y_B[piece], threat, starts, first, settings)
            better = found_margin < best_margin[piece]
            best[piece[better]], best_margin[piece[better]] = found[better], found_margin[better]
    return best


def _starts(x_BCHW: Tensor, threat: Ball, seeds: Sequence[int], restarts: int) -> Tensor:
    """[R, B, N] offsets: the image itself first, then points spread over the ball."""
    size = x_BCHW[0].numel() if len(x_BCHW) else 0
    starts = torch.zeros(restarts, len(seeds), size)
    for b, seed in enumerate(seeds):
        rng = torch.Generator().manual_seed(seed % 2**63)
        noise = torch.rand(max(restarts - 1, 0), size, generator=rng) * 2 - 1
        if threat.norm == "l1":  # a few pixels carry the whole budget
            keep = torch.rand(noise.shape, generator=rng) < min(1.0, 4 * max(threat.eps, 1.0) / max(size, 1))
            noise = noise * keep
        if threat.norm != "linf":
            noise = noise / distance(noise, threat.norm).clamp_min(1e-12)[:, None]
        starts[1:, b] = noise * threat.eps
    return starts.to(x_BCHW.device, x_BCHW.dtype)


def _descend(
    network: nn.Module, x_BCHW: Tensor, y_B: Tensor, threat: Ball, starts_RBN: Tensor, first: int, settings: AttackSettings
) -> tuple[Tensor, Tensor]:
    """The best of all restarts per sample and its margin."""
    restarts, batch = starts_RBN.shape[:2]
    x = x_BCHW.flatten(1).repeat(restarts, 1)
    y = y_B.repeat(restarts)
    frank_wolfe = ((torch.arange(restarts, device=x.device) + first) % 2 == 1).repeat_interleave(batch)[:, None]
    low, high = offsets(x, threat.eps)
    delta = project(starts_RBN.flatten(0, 1), x, threat, steps=20)
    best, best_margin = delta, torch.full((len(x),), math.inf, device=x.device, dtype=x.dtype)
    target: Tensor | None = None
    for step in range(settings.steps + 1):
        point = delta.detach().requires_grad_()
        with torch.enable_grad():
            logits = network((x + point).view(-1, *x_BCHW.shape[1:]))
            value = margin(logits, y)
            if target is None:
                target = _targets(logits.detach(), y, restarts, first)
            aimed = logits.gather(1, y[:, None]) - logits.gather(1, target.clamp_min(0)[:, None])
            gradient = torch.autograd.grad(torch.where(target < 0, value, aimed.squeeze(1)).sum(), point)[0]
        # A fallen sample is left as it is, so that what is reported of it does not depend on the rest of its batch.
        standing = (best_margin.view(restarts, batch).amin(0) > 0).repeat(restarts)
        better = (value.detach() < best_margin) & standing
        best = torch.where(better[:, None], delta, best)
        best_margin = torch.where(better, value.detach(), best_margin)
        if step == settings.steps or bool((best_margin.view(restarts, batch).amin(0) <= 0).all()):
            break
        gradient = torch.nan_to_num(gradient)
        vertex = minimise_linear(gradient, x, low, high, threat, box=True)[1]
        toward = delta + 2 / (step + 2) * (vertex - delta)
        rate = threat.eps * (0.5 if threat.norm == "linf" else 1.0) * 0.03 ** (step / settings.steps)
        along = delta + rate * _direction(gradient, delta, low, high, threat)
        delta = project(torch.where(frank_wolfe, toward, along), x, threat, steps=20)
    index = best_margin.view(restarts, batch).argmin(0) * batch + torch.arange(batch, device=x.device)
    return (x + best)[index].view_as(x_BCHW), best_margin[index]


def _targets(logits: Tensor, y: Tensor, restarts: int, first: int) -> Tensor:
    """The class each row aims at, -1 for whichever is nearest: two restarts are free, later pairs take the runners-up."""
    batch = len(y) // restarts
    ranked = logits.scatter(1, y[:, None], -math.inf).argsort(1, descending=True)[:, : logits.shape[1] - 1]
    number = (torch.arange(restarts, device=y.device) + first).repeat_interleave(batch)
    rank = (number // 2) % ranked.shape[1]
    return torch.where(number < 2, torch.full_like(y, -1), ranked.gather(1, rank[:, None]).squeeze(1))


def _direction(gradient: Tensor, delta: Tensor, low: Tensor, high: Tensor, threat: Ball) -> Tensor:
    """The steepest descent direction of unit norm, over the pixels that can still move that way inside the box."""
    movable = torch.where(gradient > 0, delta > low, delta < high)
    gradient = gradient * movable
    if threat.norm == "linf":
        return -gradient.sign()
    if threat.norm == "l2":
        return -gradient / distance(gradient, "l2").clamp_min(1e-20)[:, None]
    # Steepest in l1 is one pixel, but a pixel has at most [0,1] to move in: about eps of them share the step. (Four times
    # as many halved the number of samples broken on an MNIST net at eps 8; Frank-Wolfe's vertex has the same sparsity.)
    count = min(gradient.shape[1], max(1, math.ceil(threat.eps)))
    _, index = gradient.abs().topk(count, dim=1)
    return torch.zeros_like(gradient).scatter(1, index, -gradient.gather(1, index).sign() / count)


# ---------------------------------------------------------------- witnesses


def replay_network(network: nn.Module) -> nn.Module:
    """The network as witnesses are judged: a copy in eval mode, on the CPU, in float64."""
    return copy.deepcopy(network).cpu().double().eval().requires_grad_(False)


@torch.no_grad()
def check_witness(replay: nn.Module, x_BCHW: Tensor, y_B: Tensor, candidates_BCHW: Tensor, threat: Ball) -> Witnesses:
    """Put candidates into ball∩[0,1] in float64 and see which are misclassified there. `replay` is from replay_network."""
    x = x_BCHW.detach().to("cpu", torch.float64)
    flat = x.flatten(1)
    delta = candidates_BCHW.detach().to("cpu", torch.float64).flatten(1) - flat
    delta = torch.nan_to_num(delta, nan=0.0, posinf=0.0, neginf=0.0)
    # Adding an offset to a pixel rounds by at most 2^-53 each way; all pixels together by the norm of that.
    rounding = distance(flat.new_full((flat.shape[1],), 2.0**-52), threat.norm)
    inner = Ball(threat.norm, max(0.0, threat.eps * _INSIDE - float(rounding)))
    images = (flat + project(delta, flat, inner)).clamp(0, 1)
    inside = (distance(images - flat, threat.norm) <= threat.eps) & ((images >= 0) & (images <= 1)).all(1)
    images = images.view_as(x)
    margins = margin(replay(images), y_B.cpu())
    return Witnesses(images, margins, inside & (margins <= 0))
