"""The geometry of balls that every consumer shares, on tensors whose last dimension is the flattened image: dual norms,
projections onto ball∩box (attacks), and the support function of ball∩box (certificates). The box is the domain of the inputs.
"""

import torch
from torch import Tensor

from cure_ray.threats.balls import Ball
from cure_ray.threats.box import UNIT, Box
from cure_ray.threats.norms import DUAL, Norm, P

NEGLIGIBLE = 1e-15


def offsets(x: Tensor, eps: float | Tensor, box: Box = UNIT) -> tuple[Tensor, Tensor]:
    """The smallest and largest change of every pixel: within eps (one, or [..., 1] per row), without leaving the domain."""
    edge = torch.zeros_like(x) + eps
    return torch.maximum(-edge, box.low - x), torch.minimum(edge, box.high - x)


def dual_norm(A: Tensor, norm: Norm) -> Tensor:
    """max A.d over the unit ball of `norm`, over the last dimension."""
    return torch.linalg.vector_norm(A, P[DUAL[norm]], dim=-1)


def distance(delta: Tensor, norm: Norm) -> Tensor:
    return torch.linalg.vector_norm(delta, P[norm], dim=-1)


# ---------------------------------------------------------------- projections


def project(delta: Tensor, x: Tensor, threat: Ball, box: Box = UNIT, steps: int = 60) -> Tensor:
    """The point of ball∩box nearest (in l2) to x + delta, as an offset from x. Feasible whether or not it has converged."""
    return nearest(delta, x, threat.norm, threat.eps, box, steps)


def nearest(delta: Tensor, x: Tensor, norm: Norm, eps: float | Tensor, box: Box = UNIT, steps: int = 60) -> Tensor:
    """`project` with a radius that may be [..., 1], one per row.

    The minimiser is clip(shrink(delta, t), lo, hi) for one multiplier t >= 0 per sample, and its norm falls as t grows, so
    bisection finds t; its upper end is always feasible.
    """
    low, high = offsets(x, eps, box)
    if norm == "linf":
        return delta.clamp(low, high)

    def at(t: Tensor) -> Tensor:
        moved = delta / (1 + t) if norm == "l2" else delta.sign() * (delta.abs() - t).clamp_min(0)
        return moved.clamp(low, high)

    feasible = distance(at(torch.zeros_like(delta[..., :1])), norm).unsqueeze(-1) <= eps
    # At `far` even the unclipped point is inside the ball; at radius 0 the offsets are 0, and everything is.
    size = distance(delta, norm).unsqueeze(-1)
    far = size / eps if norm == "l2" else delta.abs().amax(-1, keepdim=True)
    near = torch.zeros_like(far)
    for _ in range(steps):
        middle = (near + far) / 2
        inside = distance(at(middle), norm).unsqueeze(-1) <= eps
        near, far = torch.where(inside, near, middle), torch.where(inside, middle, far)
    return at(torch.where(feasible, torch.zeros_like(far), far))


# ---------------------------------------------------------------- support functions


def _dot(A: Tensor, v: Tensor) -> Tensor:
    """Sum over the last dimension; a matrix product where v is shared by all rows (dimension -2 of size 1)."""
    if A.dim() >= 2 and v.dim() == A.dim() and v.shape[-2] == 1:
        return torch.matmul(A, v.transpose(-1, -2)).squeeze(-1)
    return (A * v).sum(-1)


def minimise_linear(A: Tensor, x: Tensor, low: Tensor, high: Tensor, threat: Ball, box: Box, steps: int = 10) -> tuple[Tensor, Tensor]:
    """min of A.(x + d) over the offsets d of the ball, with a bounded `box` also low <= d <= high; and a minimiser.

    For l2 and l1 with the box the value is that of the Lagrangian dual at some multiplier, hence a lower bound by weak duality
    whether or not the multiplier is optimal. The minimiser steers searches only: nothing sound depends on it.
    """
    eps = threat.eps
    if threat.norm == "linf":
        centre, radius = (low + high) / 2, (high - low) / 2
        return _dot(A, x + centre) - _dot(A.abs(), radius), torch.where(A >= 0, low, high)
    base = _dot(A, x)
    if eps == 0:
        return base, torch.zeros_like(A)
    if not box.bounded or eps < NEGLIGIBLE:  # the whole ball contains ball∩box; below this radius eps * eps underflows in float32
        value, d = _ball_l2(A, eps) if threat.norm == "l2" else _ball_l1(A, eps)
    else:
        value, d = _boxed_l2(A, low, high, eps, steps) if threat.norm == "l2" else _boxed_l1(A, low, high, eps)
    return base + value, d


def _ball_l2(A: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    size = torch.linalg.vector_norm(A, dim=-1)
    tiny = torch.finfo(A.dtype).tiny
    return -eps * size, -eps * A / size.clamp_min(tiny).unsqueeze(-1)


def _ball_l1(A: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    size, index = A.abs().max(-1, keepdim=True)
    d = torch.zeros_like(A).scatter(-1, index, -eps * torch.gather(A, -1, index).sign())
    return -eps * size.squeeze(-1), d


def _boxed_l2(A: Tensor, low: Tensor, high: Tensor, eps: float, steps: int) -> tuple[Tensor, Tensor]:
    """Dual in the multiplier m of (|d|^2 - eps^2) / 2: d(m) = clip(-A/m, low, high).

    m starts at the optimum without the box and only falls: given which coordinates are clipped, the m that puts d(m) on the
    sphere has a closed form. A fixed number of steps, so that the result of a row does not depend on its batch; once none moves, the
    rest would move none.
    """
    tiny = torch.finfo(A.dtype).tiny ** 0.5
    m = (torch.linalg.vector_norm(A, dim=-1, keepdim=True) / eps).clamp_min(tiny)
    for _ in range(steps):
        unclipped = A / -m
        d = torch.clamp(unclipped, low, high)
        all_squares = torch.linalg.vector_norm(d, dim=-1, keepdim=True).square()
        free_squares = torch.linalg.vector_norm(d * (d == unclipped), dim=-1, keepdim=True).square()  # masks are slow on doubles
        left = eps * eps - (all_squares - free_squares)
        better = m * (free_squares / left.clamp_min(tiny)).sqrt()
        before, m = m, torch.where((left > 0) & (better < m), better.clamp_min(tiny), m)
        if m.device.type == "cpu" and torch.equal(before, m):  # elsewhere asking takes longer than the step
            break
    d = torch.clamp(A / -m, low, high)
    return (d * torch.addcmul(A, m / 2, d)).sum(-1) - m.squeeze(-1) * (eps * eps / 2), d


def _boxed_l1(A: Tensor, low: Tensor, high: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Spend eps on the coordinates of largest |A|, each up to its room."""
    value, take = knapsack(A.abs(), torch.where(A < 0, high, -low), eps)
    return value, -take * A.sign()


def knapsack(worth: Tensor, room: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The least -worth.t with 0 <= t <= room and sum t <= eps: a fractional knapsack; and t. Dual price = the worth at the crossing.

    Only the largest entries are sorted; when they do not use up eps, the price is the smallest of them, still sound.
    """
    worth = torch.where(room > 0, worth, torch.zeros_like(worth)).clamp_min_(0)
    count = min(worth.shape[-1], int(6 * min(eps, worth.shape[-1])) + 24)
    worth_K, index_K = worth.topk(count, dim=-1)
    room_K = torch.gather(room.expand_as(worth), -1, index_K)
    spent_K = room_K.cumsum(-1)
    crossed = spent_K >= eps
    price = worth_K.masked_fill(~crossed, 0).amax(-1, keepdim=True)
    floor = worth_K[..., -1:] if count < worth.shape[-1] else torch.zeros_like(price)
    price = torch.where(crossed[..., -1:], price, floor)
    value = -(price.squeeze(-1) * eps + ((worth_K - price).clamp_min(0) * room_K).sum(-1))
    take_K = torch.minimum(room_K, (eps - (spent_K - room_K)).clamp_min(0))
    return value, torch.zeros_like(worth).scatter(-1, index_K, take_K)
