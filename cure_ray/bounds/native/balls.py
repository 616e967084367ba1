"""The balls in which the pre-activations of the hidden layers stay when the image moves in an l2 or l1 ball."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from cure_ray.bounds.native.affine import Affine, activated
from cure_ray.bounds.native.compiled import Compiled
from cure_ray.bounds.native.domain import USUAL, Domain, LayerBall
from cure_ray.bounds.native.norms import ball_stretch, part_stretch, stretch
from cure_ray.bounds.native.relaxation import start_magnitude, start_rows
from cure_ray.threats.norms import Norm


def ball_margins(net: Compiled, domain: Domain, C_BSK: Tensor) -> Tensor:
    """Lower bounds [B, S] of the rows of C on the logits by norms alone: what they are at the image, less how far the last ball lets
    them move. The cheapest certificate there is; networks trained for small norms need no other."""
    A_BSN, b_BS, guard_BS = start_rows(net, C_BSK)
    ball, carried_N = domain.balls[-1], net.layers[-2].carried_N
    known_B1 = ball.radius_B1 > 0
    if carried_N is None:
        moved_BS, reach_BN = torch.linalg.vector_norm(A_BSN, dim=-1) * ball.radius_B1, ball.centre_BN.abs() + ball.radius_B1
    else:
        assert ball.carried_B1 is not None
        known_B1 = (known_B1 | carried_N.all()) & (ball.carried_B1 < torch.inf)
        moved_BS = torch.linalg.vector_norm(A_BSN * ~carried_N, dim=-1) * ball.radius_B1
        moved_BS = moved_BS + torch.linalg.vector_norm(A_BSN * carried_N, dim=-1) * ball.carried_B1
        reach_BN = ball.centre_BN.abs() + torch.where(carried_N, ball.carried_B1, ball.radius_B1)
    centre_BN = activated(ball.centre_BN, carried_N)
    value_BS = torch.matmul(A_BSN, centre_BN.unsqueeze(-1)).squeeze(-1) + b_BS - moved_BS
    if net.gamma:
        value_BS = value_BS - 4 * net.gamma * (guard_BS + start_magnitude(net, C_BSK, reach_BN) + moved_BS)
    return torch.where(known_B1, value_BS, torch.full_like(value_BS, -torch.inf))


def with_balls(net: Compiled, domain: Domain) -> Domain:
    """The domain with a ball around every layer but the last, in the deciding precision; l_inf has none.

    ReLU moves no two numbers apart, so a layer's ball is the one below it times the layer's norm. The centre is the clean
    pre-activation as computed; what it is off by is added to the radius. What is carried past a ReLU has a ball of its own: a
    residual block then moves as far as its branches do together, and its ReLUs are not charged for what passes them.
    """
    if domain.threat.norm == "linf" or not USUAL[0] <= domain.threat.eps <= USUAL[1]:
        return domain
    balls: list[LayerBall] = []
    point_BN, reach_BN = domain.x_BN, domain.reach
    below = _Moved(torch.full_like(domain.x_BN[:, :1], domain.threat.eps), None, None)
    for layer in net.layers[:-1]:
        centre_BN = layer(point_BN)
        scale_BN = layer.magnitude(reach_BN) + layer.bias_scale_N
        below = _moved(layer, below, 2 * net.gamma * scale_BN, None if balls else domain.threat.norm)
        known_B1 = torch.nan_to_num(below.active_B1, nan=0.0, posinf=0.0)
        if below.carried_B1 is not None:
            known_B1 = torch.where(below.carried_B1 < torch.inf, known_B1, torch.zeros_like(known_B1))
        balls.append(LayerBall(centre_BN, known_B1, below.carried_B1))
        point_BN, reach_BN = layer.activated(centre_BN), centre_BN.abs() + net.gamma * scale_BN
    return replace(domain, balls=tuple(balls))


@dataclass(frozen=True, eq=False)
class _Moved:
    """How far what a layer hands on can move: the part behind its ReLUs, and the part it carries, on these channels."""

    active_B1: Tensor
    carried_B1: Tensor | None
    carried_C: Tensor | None


def _moved(layer: Affine, below: _Moved, off_BN: Tensor, norm: Norm | None) -> _Moved:
    """One layer more; `norm` is that of the image where the layer reads the image. `off_BN` bounds what its centre is off by."""
    carried_C, grow = layer.carried_channels(), 1 + 2.0**-40
    if carried_C is None and below.carried_C is None:
        whole = stretch(layer) if norm is None else ball_stretch(layer, norm)
        return _Moved((whole * below.active_B1 + torch.linalg.vector_norm(off_BN, dim=1, keepdim=True)) * grow, None, None)
    rows = {False: torch.ones(layer.out_shape[0], dtype=torch.bool, device=off_BN.device)}
    if carried_C is not None:
        rows = {False: ~carried_C, True: carried_C}
    columns = {False: torch.ones(layer.in_shape[0], dtype=torch.bool, device=off_BN.device)}
    if below.carried_C is not None:
        columns = {False: ~below.carried_C, True: below.carried_C}
    found = list[Tensor]()
    for out, row_C in rows.items():
        off_B1 = torch.linalg.vector_norm(off_BN * row_C.repeat(layer.outputs // len(row_C)), dim=1, keepdim=True)
        for source, column_C in columns.items():
            radius_B1 = below.carried_B1 if source else below.active_B1
            assert radius_B1 is not None
            off_B1 = off_B1 + part_stretch(layer, row_C, column_C, ("part", out, source, norm), norm) * radius_B1
        found.append(off_B1 * grow)
    return _Moved(found[0], found[1] if carried_C is not None else None, carried_C)
