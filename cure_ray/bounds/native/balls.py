"""The balls in which the pre-activations of the hidden layers stay when the image moves in an l2 or l1 ball."""

from dataclasses import replace

import torch
from torch import Tensor

from cure_ray.bounds.native.compiled import Compiled
from cure_ray.bounds.native.domain import Domain, LayerBall
from cure_ray.bounds.native.norms import ball_stretch, stretch
from cure_ray.bounds.native.relaxation import start_magnitude, start_rows


def ball_margins(net: Compiled, domain: Domain, C_BSK: Tensor) -> Tensor:
    """Lower bounds [B, S] of the rows of C on the logits by norms alone: what they are at the image, less how far the last ball lets
    them move. The cheapest certificate there is; networks trained for small norms need no other."""
    A_BSN, b_BS, guard_BS = start_rows(net, C_BSK)
    ball = domain.balls[-1]
    known = (ball.radius_B1 > 0).to(A_BSN.dtype)
    size_BS = torch.linalg.vector_norm(A_BSN, dim=-1)
    value_BS = torch.matmul(A_BSN, ball.centre_BN.clamp_min(0).unsqueeze(-1)).squeeze(-1) + b_BS - size_BS * ball.radius_B1
    if net.gamma:
        reach_BN = ball.centre_BN.abs() + ball.radius_B1
        value_BS = value_BS - 4 * net.gamma * (guard_BS + start_magnitude(net, C_BSK, reach_BN) + size_BS * ball.radius_B1)
    return torch.where(known > 0, value_BS, torch.full_like(value_BS, -torch.inf))


EPS = (1e-12, 1e12)  # radii of the threat outside are bounded without balls: their squares leave the range of float32


def with_balls(net: Compiled, domain: Domain) -> Domain:
    """The domain with a ball around every layer but the last, in the deciding precision; l_inf has none.

    ReLU moves no two numbers apart, so a layer's ball is the one below it times the layer's norm. The centre is the clean
    pre-activation as computed; what it is off by is added to the radius.
    """
    if domain.threat.norm == "linf" or not EPS[0] <= domain.threat.eps <= EPS[1]:
        return domain
    balls: list[LayerBall] = []
    point_BN, reach_BN = domain.x_BN, domain.reach
    radius_B1 = torch.full_like(domain.x_BN[:, :1], domain.threat.eps)
    for layer in net.layers[:-1]:
        norm = stretch(layer) if balls else ball_stretch(layer, domain.threat.norm)
        centre_BN = layer(point_BN)
        scale_BN = layer.magnitude(reach_BN) + layer.bias_scale_N
        off_B1 = torch.linalg.vector_norm(2 * net.gamma * scale_BN, dim=1, keepdim=True)
        radius_B1 = (norm * radius_B1 + off_B1) * (1 + 2.0**-40)
        balls.append(LayerBall(centre_BN, torch.nan_to_num(radius_B1, nan=0.0, posinf=0.0)))
        point_BN, reach_BN = centre_BN.clamp_min(0), centre_BN.abs() + net.gamma * scale_BN
    return replace(domain, balls=tuple(balls))
