"""The attack on a batch: many short descents per sample, each from another start at another class with another loss.

Runs in float32 on any device and may be as rough as it likes: a candidate counts only after `check_witness`. Every sample has its own
random stream, and stops when it has fallen, so what is found for it does not depend on the rest of its batch.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from cure_ray.attacks.apgd import Found, Gradient, descend
from cure_ray.attacks.losses import ANY, LOSSES, margin, objective, ranked_classes
from cure_ray.attacks.settings import OPENING, AttackSettings
from cure_ray.attacks.vertices import PROPOSALS, search_vertices
from cure_ray.threats.balls import Ball
from cure_ray.threats.box import UNIT, Box
from cure_ray.threats.geometry import distance

_WAVES = (OPENING, 2, 4, 8)  # restarts that run together: few first


@dataclass(frozen=True)
class _Problem:
    """Samples under attack, flat, with the order in which other classes are aimed at."""

    network: nn.Module
    shape: torch.Size
    threat: Ball
    x_BN: Tensor
    y_B: Tensor
    order_BS: Tensor  # classes; the first `open_B` of them are worth aiming at
    open_B: Tensor
    streams: tuple[torch.Generator, ...]
    box: Box = UNIT

    def select(self, index: Tensor) -> "_Problem":
        some = [self.streams[i] for i in index.tolist()]
        return _Problem(
            self.network, self.shape, self.threat, self.x_BN[index], self.y_B[index], self.order_BS[index], self.open_B[index],
            tuple(some), self.box,
        )  # fmt: skip

    def logits(self, x_RN: Tensor) -> Tensor:
        return self.network(x_RN.view(-1, *self.shape))

    def gradient(self, x_RN: Tensor, y_R: Tensor, target_R: Tensor, loss_R: Tensor) -> Gradient:
        """The losses of these rows and their gradients, as the descents ask for them."""

        def at(delta_RN: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            point = delta_RN.detach().requires_grad_()
            with torch.enable_grad():
                logits = self.logits(x_RN + point)
                loss = objective(logits, y_R, target_R, loss_R)
                slope = torch.autograd.grad(loss.sum(), point)[0]
            return loss.detach(), margin(logits.detach(), y_R), slope

        return at


def attack(
    network: nn.Module,
    x_BCHW: Tensor,
    y_B: Tensor,
    threat: Ball,
    seeds: Sequence[int],
    settings: AttackSettings,
    bounds_BS: Tensor | None = None,
    box: Box = UNIT,
) -> Tensor:
    """The image of smallest margin found for every sample, [B, C, H, W]. One seed per sample, so batches do not matter.

    `bounds_BS` may hold lower bounds of f_y - f_i for the classes i != y in increasing order: a class proven out is not aimed at, and
    the least provable comes first.
    """
    if len(seeds) != len(x_BCHW):
        raise ValueError(f"one seed per sample: got {len(seeds)} seeds for {len(x_BCHW)} samples")
    if len(seeds) == 0:
        return x_BCHW.clone()
    x_BN = x_BCHW.flatten(1)
    with torch.no_grad():
        order_BS, open_B = _aims(network(x_BCHW), y_B, bounds_BS)
    streams = tuple(torch.Generator().manual_seed(seed % 2**63) for seed in seeds)
    problem = _Problem(network, x_BCHW.shape[1:], threat, x_BN, y_B, order_BS, open_B, streams, box)
    best_BN, best_B = torch.zeros_like(x_BN), torch.full_like(x_BN[:, 0], math.inf)

    def improve(piece: Tensor, found: Found) -> None:
        better = found.margin_R < best_B[piece]
        best_BN[piece[better]], best_B[piece[better]] = found.delta_RN[better], found.margin_R[better]

    for first, count in _waves(settings.restarts, settings.begun):
        for piece in _pieces(best_B > 0, settings.rows // count):  # a sample that has fallen needs no more restarts
            improve(piece, _wave(problem.select(piece), first, count, settings.steps))
    for turn in range(order_BS.shape[1] if settings.vertices and threat.norm == "l1" else 0):
        for piece in _pieces((best_B > 0) & (open_B > turn), settings.rows // PROPOSALS):
            improve(piece, _vertices(problem.select(piece), best_BN[piece], turn, settings.vertices))
    return (x_BN + best_BN).view_as(x_BCHW)


def _pieces(wanted_B: Tensor, most: int) -> list[Tensor]:
    """The samples wanted, in parts of at most so many."""
    todo = wanted_B.nonzero().squeeze(1)
    return list(todo.split(max(1, most))) if len(todo) else []


def _waves(restarts: int, begun: int = 0) -> Iterator[tuple[int, int]]:
    """The first restart of each wave and how many there are in it; waves that have `begun` before are left out."""
    first, wave = 0, 0
    while first < restarts:
        count = min(_WAVES[min(wave, len(_WAVES) - 1)], restarts - first)
        if first >= begun:
            yield first, count
        first, wave = first + count, wave + 1


def _aims(logits_BK: Tensor, y_B: Tensor, bounds_BS: Tensor | None) -> tuple[Tensor, Tensor]:
    """[B, K-1] the other classes, the most promising first, and [B] how many are worth aiming at."""
    ranked_BS = ranked_classes(logits_BK, y_B)
    everything_B = torch.full_like(y_B, ranked_BS.shape[1])
    if bounds_BS is None:
        return ranked_BS, everything_B
    place_BS = ranked_BS - (ranked_BS > y_B[:, None]).long()  # where a class stands among the others in increasing order
    known_BS = torch.nan_to_num(bounds_BS.to(logits_BK), nan=-math.inf).gather(1, place_BS)
    order_BS = known_BS.argsort(dim=1, stable=True)
    open_B = (known_BS <= 0).sum(1)
    return ranked_BS.gather(1, order_BS), torch.where(open_B > 0, open_B, everything_B)


def _schedule(problem: _Problem, first: int, count: int) -> tuple[Tensor, Tensor]:
    """[R, B] target and loss of each restart: the first one is free, then every open class in turn, with another loss each time round."""
    number_R1 = torch.arange(first, first + count, device=problem.y_B.device)[:, None]
    turn_RB = (number_R1 - 1).clamp_min(0)
    rank_RB, round_RB = turn_RB % problem.open_B, turn_RB // problem.open_B
    target_RB = problem.order_BS.t().gather(0, rank_RB)
    loss_RB = (rank_RB + round_RB) % len(LOSSES)
    return torch.where(number_R1 > 0, target_RB, ANY), torch.where(number_R1 > 0, loss_RB, 0)


def _wave(problem: _Problem, first: int, count: int, steps: int) -> Found:
    """These restarts of every sample together; the best of them per sample."""
    batch = len(problem.y_B)
    target_RB, loss_RB = _schedule(problem, first, count)
    x_RN, y_R = problem.x_BN.repeat(count, 1), problem.y_B.repeat(count)
    start_RN = torch.stack([_start(problem, first + r) for r in range(count)]).flatten(0, 1)

    def standing(margin_R: Tensor) -> Tensor:
        return (margin_R.view(count, batch).amin(0) > 0).repeat(count)

    gradient = problem.gradient(x_RN, y_R, target_RB.flatten(), loss_RB.flatten())
    found = descend(gradient, x_RN, start_RN, problem.threat, steps, standing, problem.box)
    index_B = found.margin_R.view(count, batch).argmin(0) * batch + torch.arange(batch, device=x_RN.device)
    return Found(found.delta_RN[index_B], found.margin_R[index_B])


def _start(problem: _Problem, number: int) -> Tensor:
    """[B, N] where a restart begins, as offsets: the image itself first, then points spread over the ball's surface."""
    x_BN, threat = problem.x_BN, problem.threat
    if number == 0:
        return torch.zeros_like(x_BN)
    size = x_BN.shape[1]
    noise = torch.stack([torch.rand(2, size, generator=stream) for stream in problem.streams])
    start = noise[:, 0] * 2 - 1
    if threat.norm == "l1":  # a few pixels carry the whole budget
        start = start * (noise[:, 1] < min(1.0, 4 * max(threat.eps, 1.0) / size))
    if threat.norm != "linf":
        start = start / distance(start, threat.norm).clamp_min(1e-12)[:, None]
    return (start * threat.eps).to(x_BN)


def _vertices(problem: _Problem, start_BN: Tensor, turn: int, rounds: int) -> Found:
    """The search over vertices towards the class whose turn it is."""
    target_B = problem.order_BS[:, turn]
    gradient = problem.gradient(problem.x_BN, problem.y_B, target_B, torch.zeros_like(target_B))

    @torch.no_grad()
    def margins(delta_MBN: Tensor) -> Tensor:
        rows = (problem.x_BN + delta_MBN).flatten(0, 1)
        return margin(problem.logits(rows), problem.y_B.repeat(len(delta_MBN))).view(len(delta_MBN), -1)

    return search_vertices(gradient, margins, problem.x_BN, start_BN, problem.threat, rounds, problem.streams, problem.box)
