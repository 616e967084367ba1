"""Coupled bounds: the ReLUs of a layer charged together, because its pre-activations stay in a ball (docs/explanation/coupled-bounds.md).

CROWN charges every unstable ReLU for its own worst case. In an l2 or l1 ball they cannot all be at their worst at once: the
pre-activations z of a layer keep |z - centre|_2 <= radius. With one multiplier m >= 0 for that ball and any coefficients g,

    c.relu(z) >= g.z + sum_i min { c_i relu(t) - g_i t + m/2 (t - centre_i)^2 : lower_i <= t <= upper_i } - m/2 radius^2.

The minimum is exact for every neuron: one clipped parabola on either side of 0. m = 0 is CROWN, an infinite box SDP-CROWN's form.
Rows are [P, Q, N]: samples and specifications, or signs and windows; tensors of a layer broadcast to that.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from cure_ray.bounds.native.affine import Affine
from cure_ray.bounds.native.domain import Domain
from cure_ray.bounds.native.relaxation import Relaxation
from cure_ray.bounds.native.rounding import weighed

SMALLEST, LARGEST = 2.0**-100, 2.0**100  # multipliers outside are taken for 0, which is always sound


@dataclass(frozen=True, eq=False)
class CoupledLayer:
    """What rows need of one layer of ReLUs; each broadcasts to [P, Q, N], `radius` to [P, Q, 1]."""

    right: tuple[Tensor, Tensor]  # the range of z at and above 0, as offsets from the centre
    left: tuple[Tensor, Tensor]  # at and below 0
    centre: Tensor
    radius: Tensor  # 0: no ball is known
    unstable: Tensor  # bool: where g is free, which it is for split neurons too
    lower_slope: Tensor  # where g starts for positive coefficients; exact on stable neurons
    upper_slope: Tensor  # for negative ones
    bias_less_centre: Tensor
    rounding: "Rounding | None"  # None in the searching pass
    carried: Tensor | None = None  # bool: linear, outside the ball and centred at 0
    beyond: tuple[Tensor, Tensor] | None = None  # in sub-problems: inf where a split has cut off the left, the right; else -inf

    @staticmethod
    def of(
        lower: Tensor,
        upper: Tensor,
        centre: Tensor,
        radius: Tensor,
        relaxed: "Slopes",
        bias: Tensor,
        rounding: "Rounding | None",
        carried: Tensor | None = None,
    ) -> "CoupledLayer":
        if carried is not None:  # ranges of one point, 0: with g = c the minimum of every such neuron is 0
            lower, upper, centre = (torch.where(carried, torch.zeros_like(t), t) for t in (lower, upper, centre))
        right = (lower.clamp_min(0) - centre, upper.clamp_min(0) - centre)
        left = (lower.clamp_max(0) - centre, upper.clamp_max(0) - centre)
        return CoupledLayer(right, left, centre, radius, *relaxed, bias - centre, rounding, carried)


Slopes = tuple[Tensor, Tensor, Tensor]  # unstable, lower slope, upper slope
Rounding = tuple[Tensor, float, float]  # a bound of |z|, |centre| and the sums behind them; what the layer's products lose; their floor


@dataclass(frozen=True, eq=False)
class CoupledRows:
    """Rows on their way down: coefficients `A` on the last layer's ReLUs, `b`, and how to walk."""

    layers: Sequence[CoupledLayer]
    A: Tensor
    b: Tensor  # [P, Q]
    down: Callable[[int, Tensor], Tensor]  # coefficients on z of layer i -> on what lies below it
    up: Callable[[int, Tensor], Tensor]  # points below layer i -> W x, without the bias
    image: Callable[[Tensor], tuple[Tensor, Tensor]]  # coefficients on the image -> the least value [P, Q], a minimiser
    gamma: float


@dataclass(eq=False)
class Choice:
    """What a bound is free to choose, per layer: what is added to CROWN's coefficients [P, Q, N], the ball's multiplier [P, Q, 1]."""

    extras: list[Tensor]
    multipliers: list[Tensor]

    def parts(self) -> tuple[list[Tensor], ...]:
        return self.extras, self.multipliers

    def select(self, keep: Tensor) -> "Choice":
        return Choice(*([t[keep] for t in part] for part in self.parts()))

    def to(self, dtype: torch.dtype) -> "Choice":
        return Choice(*([t.to(dtype) for t in part] for part in self.parts()))


@dataclass(frozen=True, eq=False)
class Trace:
    """What the ascent needs, per layer: the coefficients c and g, the worst pre-activations as offsets from the centre, their
    squared length [P, Q, 1], and how far the minimiser of the linear bound is from them (the gradient in g)."""

    above: list[Tensor]
    below: list[Tensor]
    worst: list[Tensor]
    used: list[Tensor]
    excess: list[Tensor]


def worst_offset(c: Tensor, g: Tensor, m: Tensor, layer: CoupledLayer) -> tuple[Tensor, Tensor]:
    """The least value of c relu(t) - g t + m/2 (t - centre)^2 on [lower, upper] per neuron, less (c - g) centre; and t - centre.

    On either side of 0 it is a parabola in the offset from the centre, cut off at the ends of the side. 0 counts to both sides
    whatever the bounds are: a point too many only lowers a minimum, and where a neuron is stable its value is not the least.
    """
    q, half, turn = c - g, m / 2, -1 / m.clamp_min(torch.finfo(c.dtype).tiny)
    right = torch.clamp(q * turn, layer.right[0], layer.right[1])
    left = torch.clamp(g * -turn, layer.left[0], layer.left[1])
    at_right = torch.addcmul(q, half, right) * right
    at_left = torch.addcmul(torch.addcmul(-g, half, left) * left, c, layer.centre, value=-1)
    return torch.minimum(at_right, at_left), torch.where(at_right < at_left, right, left)


def multiplier(m: Tensor, radius: Tensor) -> Tensor:
    """The multipliers as they are used: none without a ball, none so small or large that its products could vanish."""
    usable = (m >= SMALLEST) & (m <= LARGEST) & (radius >= SMALLEST) & (radius <= LARGEST)
    return torch.where(usable, m, torch.zeros_like(m))


def coefficients_below(c: Tensor, layer: CoupledLayer, m: Tensor, extra: Tensor) -> tuple[Tensor, Tensor]:
    """g, and the slopes it is made of: the lower line's where c is positive, the upper line's where negative, plus what was added,
    but no steeper than the convex hull of c relu(t) + m/2 (t - centre)^2 over the range, which keeps the ascent from overshooting.
    Beyond the end of the range that a split has made, g is free: there it is the split's multiplier."""
    base = torch.where(c < 0, layer.upper_slope, layer.lower_slope)
    least, most = m * layer.left[0], torch.addcmul(c, m, layer.right[1])
    chord = torch.addcmul(c * layer.upper_slope, m / 2, layer.left[0] + layer.right[1])
    low, high = torch.minimum(least, chord), torch.maximum(most, chord)
    if layer.beyond is not None:
        low, high = torch.minimum(low, -layer.beyond[0]), torch.maximum(high, layer.beyond[1])
    g = torch.addcmul(extra, c, base)
    if layer.carried is not None:  # exact, whatever was added
        g = torch.where(layer.carried, c * base, g)
    return torch.where(layer.unstable, torch.clamp(g, low, high), g), base


def evaluate(rows: CoupledRows, choice: Choice, trace: bool = False) -> tuple[Tensor, Trace | None]:
    """Lower bounds [P, Q] of the rows, for any choice. With gamma they are lowered by the rounding of this pass, except that of the
    rows handed in; `image` charges its own."""
    c, b = rows.A, rows.b
    found, bases = Trace([], [], [], [], []), []
    for i in range(len(rows.layers) - 1, -1, -1):
        layer = rows.layers[i]
        m = multiplier(choice.multipliers[i], layer.radius)
        g, base = coefficients_below(c, layer, m, choice.extras[i])
        value, worst = worst_offset(c, g, m, layer)
        ball = (m / 2 * layer.radius.square()).squeeze(-1)
        b = b + value.sum(-1) + _dot(c, layer.centre) + _dot(g, layer.bias_less_centre) - ball
        if layer.rounding is not None:
            scale, lost, floor = layer.rounding
            # Products and sums lose gamma of their sizes. A worst point off by u (|centre| + |t|) raises its parabola by m/2 times
            # the square of that. What underflows is below the floors.
            flat = (g.abs() + c.abs() + floor) * scale
            bend = m * (worst.square() + rows.gamma * scale.square())
            b = b - 8 * rows.gamma * ((flat + bend).sum(-1) + ball)
            if lost:
                b = b - lost * ((g.abs() + floor) * scale).sum(-1)
        if trace:
            found.above.append(c)
            found.below.append(g)
            found.worst.append(worst)
            found.used.append(torch.linalg.vector_norm(worst, dim=-1, keepdim=True).square())
            bases.append(base)
        c = rows.down(i, g)
    value, point = rows.image(c)
    value = value + b
    if not trace:
        return value, None
    for part in (found.above, found.below, found.worst, found.used, bases):
        part.reverse()
    for i, layer in enumerate(rows.layers):
        excess = (rows.up(i, point) + layer.bias_less_centre).sub_(found.worst[i])
        found.excess.append(excess)
        if i + 1 < len(rows.layers):
            point = torch.addcmul((found.worst[i] + layer.centre).clamp_min_(0), bases[i], excess)
    return value, found


def _dot(g: Tensor, v: Tensor) -> Tensor:
    """Sum over the neurons; a matrix product where all rows of a sample share v."""
    if v.dim() == 3 and v.shape[1] == 1:
        return torch.matmul(g, v.transpose(1, 2)).squeeze(-1)
    return (g * v).sum(-1)


def relaxation_gaps(rows: CoupledRows, choice: Choice, found: Trace) -> tuple[list[Tensor], list[Tensor]]:
    """What each neuron's share of the bound lies below its true value at the minimiser, and how low that share is: what to split."""
    gaps, charges = [], []
    for i, layer in enumerate(rows.layers):
        c, g, excess = found.above[i], found.below[i], found.excess[i]
        worst = found.worst[i] + layer.centre
        at = worst + excess
        bends = (at - layer.centre).square() - found.worst[i].square()
        m = multiplier(choice.multipliers[i], layer.radius)
        gaps.append((c * (at.clamp_min(0) - worst.clamp_min(0)) - g * excess + m / 2 * bends).clamp_min(0))
        charges.append((g * worst - c * worst.clamp_min(0)).clamp_min(0))
    return gaps, charges


def with_splits(rows: CoupledRows, splits: Sequence[Tensor]) -> CoupledRows:
    """Rows of sub-problems: where a split (+1, -1, 0) has cut a range, g may pass its end."""
    inf = torch.full((), torch.inf, dtype=rows.b.dtype, device=rows.b.device)
    layers = [
        replace(layer, unstable=layer.unstable | (s != 0), beyond=(torch.where(s > 0, inf, -inf), torch.where(s < 0, inf, -inf)))
        for layer, s in zip(rows.layers, splits, strict=True)
    ]
    return replace(rows, layers=layers)


def dense_rows(
    layers: Sequence[Affine], relaxations: Sequence[Relaxation], domain: Domain, A_BSN: Tensor, b_BS: Tensor, gamma: float
) -> CoupledRows:
    """Whole rows [B, S, N] on the ReLUs of the last of `layers`."""
    B, S = b_BS.shape
    views = []
    for layer, r, ball in zip(layers, relaxations, domain.balls, strict=False):
        lower, upper, centre, radius, unstable, adaptive, slope, scale = (
            t.unsqueeze(1)
            for t in (r.lower_BN, r.upper_BN, ball.centre_BN, ball.radius_B1, r.unstable_BN, r.adaptive_BN, r.upper_slope_BN, r.scale_BN)
        )
        relaxed = (unstable, adaptive, slope)
        rounding = (scale, layer.lost, layer.floor) if gamma else None
        views.append(CoupledLayer.of(lower, upper, centre, radius, relaxed, layer.bias_N, rounding, layer.carried_N))

    def image(A_BSN: Tensor) -> tuple[Tensor, Tensor]:
        value_BS, offset_BSN = domain.minimise(A_BSN)
        if gamma:
            value_BS = value_BS - 4 * gamma * weighed(A_BSN, domain.reach)
        return value_BS, domain.x_BN.unsqueeze(1) + offset_BSN

    return CoupledRows(
        views, A_BSN, b_BS,
        down=lambda i, g_BSN: layers[i].transpose(g_BSN.flatten(0, 1)).view(B, S, layers[i].inputs),
        up=lambda i, x_BSN: layers[i].linear(x_BSN.flatten(0, 1)).view(B, S, layers[i].outputs),
        image=image, gamma=gamma,
    )  # fmt: skip
