"""Backward linear bounds (CROWN) of whole rows, with the analytic gradient in the slopes.

One evaluation serves everything: margins, neurons of fully connected layers, optimised slopes, and sub-problems of branch and
bound. No autograd: the gradient of the bound is one linear forward pass of the minimiser.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cure_ray.bounds.native.affine import Affine
from cure_ray.bounds.native.compiled import Compiled
from cure_ray.bounds.native.domain import Domain
from cure_ray.bounds.native.relaxation import LayerBounds, Relaxation, start_magnitude, start_rows
from cure_ray.bounds.native.rounding import weighed

STEPS = 2  # on the dual multiplier of an enclosure: it has little to lose where it decides


@dataclass(frozen=True, eq=False)
class Evaluation:
    """A lower bound for every row and, when asked for, what searches need. Lists run over the hidden layers."""

    value_BS: Tensor
    coefficients: list[Tensor]  # [B, S, N] on the post-activations
    preactivations: list[Tensor]  # [B, S, N] of the minimiser in the relaxed network: also the gradient in the split multipliers
    activations: list[Tensor]  # [B, S, N] what the relaxed network makes of them


def evaluate(
    layers: Sequence[Affine],
    relaxations: Sequence[Relaxation],
    domain: Domain,
    rows: tuple[Tensor, Tensor],
    slopes: Sequence[Tensor],
    gamma: float,
    multipliers: Sequence[Tensor] | None = None,
    trace: bool = False,
) -> Evaluation:
    """Lower-bound A.relu(z) + b, rows (A [B, S, N], b [B, S]), for the pre-activations z of the last of `layers`, over the domain.

    `slopes[i]`, [B, N] or [B, S, N], are lower slopes: in [0, 1] on unstable neurons and exact on stable ones (the caller's duty,
    see Relaxation.lower_slope). `multipliers[i]` [B, S, N] are Lagrange multipliers of splits, added to the coefficients of z.
    With gamma > 0 the value is lowered by the rounding of this very pass, except that of the rows handed in.
    """
    A_BSN, b_BS = rows
    B, S = b_BS.shape
    vertices = domain.vertices(layers[0])
    coefficients: list[Tensor] = []
    concave_BSN: Tensor | None = None
    for i in range(len(layers) - 1, -1, -1):
        layer, relaxation = layers[i], relaxations[i]
        if trace:
            coefficients.append(A_BSN)
        if i == 0 and vertices is not None:
            A_BSN, concave_BSN = beside_concave(A_BSN, relaxation, slopes[0])
            b_BS = b_BS + torch.matmul(concave_BSN, vertices.rest_BN.unsqueeze(-1)).squeeze(-1)
            if gamma:
                b_BS = b_BS - (16 * gamma + 4 * layer.lost) * weighed(concave_BSN, relaxation.scale_BN, layer.floor)
        else:
            A_BSN, intercept_BS = through_relu(A_BSN, relaxation, slopes[i])
            b_BS = b_BS + intercept_BS
        if multipliers is not None:
            A_BSN = A_BSN + multipliers[i]
        b_BS = b_BS + A_BSN @ layer.bias_N
        if gamma:
            b_BS = b_BS - _lost(A_BSN, relaxation, layer, gamma)
        A_BSN = layer.transpose(A_BSN.flatten(0, 1)).view(B, S, layer.inputs)
    mixed_BSN: Tensor | None = None
    if vertices is None or concave_BSN is None:
        value_BS, offset_BSN = domain.minimise(A_BSN)
    else:
        fall_BS, take_BS2N = vertices.lowest(concave_BSN, A_BSN, domain.low_BN, domain.high_BN)
        value_BS = torch.matmul(A_BSN, domain.x_BN.unsqueeze(-1)).squeeze(-1) + fall_BS
        offset_BSN = take_BS2N[:, :, 0] - take_BS2N[:, :, 1]
        mixed_BSN = vertices.mixed(take_BS2N) if trace else None
    value_BS = value_BS + b_BS
    if gamma:
        value_BS = value_BS - 4 * gamma * weighed(A_BSN, domain.reach)
    if not trace:
        return Evaluation(value_BS, [], [], [])
    coefficients.reverse()
    point_BSN = domain.x_BN.unsqueeze(1) + offset_BSN
    return Evaluation(value_BS, coefficients, *_replay(layers, relaxations, coefficients, slopes, point_BSN, mixed_BSN))


def enclose(
    layers: Sequence[Affine], relaxations: Sequence[Relaxation], domain: Domain, rows: tuple[Tensor, Tensor], gamma: float
) -> tuple[Tensor, Tensor]:
    """Lower and upper bounds [B, S] of the rows: `evaluate` of A and of -A with the upper line's slope for the lower line as well.

    Parallel lines give both the same coefficients up to the sign, so one pass serves two. Where most neurons below are stable it
    decides nearly all that CROWN decides.
    """
    A_BSN, b_BS = rows
    B, S = b_BS.shape
    low_BS, high_BS = b_BS, b_BS
    for layer, relaxation in zip(reversed(layers), reversed(relaxations), strict=True):
        intercept_BN1 = relaxation.upper_intercept_BN.unsqueeze(-1)
        below_BS = torch.matmul(A_BSN.clamp_max(0), intercept_BN1).squeeze(-1)
        above_BS = torch.matmul(A_BSN.clamp_min(0), intercept_BN1).squeeze(-1)
        A_BSN = A_BSN * relaxation.upper_slope_BN.unsqueeze(1)
        shift_BS = A_BSN @ layer.bias_N
        lost_BS = _lost(A_BSN, relaxation, layer, gamma) if gamma else torch.zeros_like(b_BS)
        low_BS, high_BS = low_BS + below_BS + shift_BS - lost_BS, high_BS + above_BS + shift_BS + lost_BS
        A_BSN = layer.transpose(A_BSN.flatten(0, 1)).view(B, S, layer.inputs)
    lost_BS = 4 * gamma * weighed(A_BSN, domain.reach) if gamma else torch.zeros_like(b_BS)
    least_BS, most_BS = domain.minimise(A_BSN, STEPS)[0], -domain.minimise(-A_BSN, STEPS)[0]
    return low_BS + least_BS - lost_BS, high_BS + most_BS + lost_BS


def _lost(A_BSN: Tensor, relaxation: Relaxation, layer: Affine, gamma: float) -> Tensor:
    """What rounding can take on the way through a layer, of coefficients on its pre-activations."""
    return (4 * gamma + layer.lost) * weighed(A_BSN, relaxation.scale_BN, layer.floor)


def through_relu(A_BSN: Tensor, relaxation: Relaxation, slope: Tensor) -> tuple[Tensor, Tensor]:
    """Coefficients on relu(z) to coefficients on z: the upper line where they are negative, the lower where positive."""
    if slope.dim() == 2:
        slope = slope.unsqueeze(1)
    negative_BSN = A_BSN.clamp_max(0)
    intercept_BS = torch.matmul(negative_BSN, relaxation.upper_intercept_BN.unsqueeze(-1)).squeeze(-1)
    positive_BSN = A_BSN - negative_BSN
    return negative_BSN.mul_(relaxation.upper_slope_BN.unsqueeze(1)).addcmul_(positive_BSN, slope), intercept_BS


def beside_concave(A: Tensor, relaxation: Relaxation, slope: Tensor) -> tuple[Tensor, Tensor]:
    """Coefficients on relu(z) as coefficients on z, and those of unstable neurons that are negative, which stay on relu(z)."""
    if slope.dim() == 2:
        slope = slope.unsqueeze(1)
    negative = A.clamp_max(0)
    concave = negative * relaxation.unstable_BN.unsqueeze(1)
    exact = (negative - concave) * relaxation.upper_slope_BN.unsqueeze(1)
    return torch.addcmul(exact, A - negative, slope), concave


def _replay(
    layers: Sequence[Affine],
    relaxations: Sequence[Relaxation],
    coefficients: Sequence[Tensor],
    slopes: Sequence[Tensor],
    point_BSN: Tensor,
    mixed_BSN: Tensor | None,
) -> tuple[list[Tensor], list[Tensor]]:
    """The pre-activations of the minimiser when every ReLU is replaced by the line the backward pass chose for it, and what becomes of
    them. With vertices, `mixed_BSN` is what the ReLUs of the first layer give where no line took their place."""
    preactivations: list[Tensor] = []
    activations: list[Tensor] = []
    for i, layer in enumerate(layers):
        B, S = point_BSN.shape[:2]
        z_BSN = layer(point_BSN.flatten(0, 1)).view(B, S, layer.outputs)
        preactivations.append(z_BSN)
        relaxation = relaxations[i]
        slope = slopes[i] if slopes[i].dim() == 3 else slopes[i].unsqueeze(1)
        upper_BSN = torch.addcmul(relaxation.upper_intercept_BN.unsqueeze(1), relaxation.upper_slope_BN.unsqueeze(1), z_BSN)
        if i == 0 and mixed_BSN is not None:
            upper_BSN = torch.where(relaxation.unstable_BN.unsqueeze(1), mixed_BSN, upper_BSN)
        point_BSN = torch.where(coefficients[i] >= 0, slope * z_BSN, upper_BSN)
        activations.append(point_BSN)
    return preactivations, activations


def slope_gradients(evaluation: Evaluation, relaxations: Sequence[Relaxation]) -> list[Tensor]:
    """d value / d alpha_i = max(A_i, 0) z_i on unstable neurons, by the envelope theorem."""
    return [
        (A_BSN.clamp_min(0) * z_BSN).mul_(relaxation.unstable_BN.unsqueeze(1))
        for A_BSN, z_BSN, relaxation in zip(evaluation.coefficients, evaluation.preactivations, relaxations, strict=True)
    ]


class Ascent:
    """Adam, ascending, in place on a list of tensors."""

    def __init__(self, like: Sequence[Tensor]) -> None:
        self.first = [torch.zeros_like(t) for t in like]
        self.second = [torch.zeros_like(t) for t in like]
        self.steps = 0

    def step(
        self, parameters: Sequence[Tensor], gradients: Sequence[Tensor], rate: float, floors: Sequence[Tensor | float] | None = None
    ) -> None:
        """`floors`: gradients well below are noise and move their parameters less than a step."""
        self.steps += 1
        bias1, bias2 = 1 - 0.9**self.steps, 1 - 0.999**self.steps
        floors = floors or [1e-12] * len(self.first)
        for parameter, gradient, m, v, floor in zip(parameters, gradients, self.first, self.second, floors, strict=True):
            m.mul_(0.9).add_(gradient, alpha=0.1)
            v.mul_(0.999).addcmul_(gradient, gradient, value=0.001)
            parameter.addcdiv_(m, v.sqrt().mul_(bias2**-0.5).add_(floor), value=rate / bias1)

    def select(self, index: Tensor) -> None:
        self.first = [t[index] for t in self.first]
        self.second = [t[index] for t in self.second]


def usual_slopes(relaxations: Sequence[Relaxation], domain: Domain) -> list[Tensor]:
    """The lower slopes that searches begin with: the adaptive ones. With vertices those of the image, for few neurons leave its side."""
    if not (domain.has_vertices and domain.balls):
        return [r.adaptive_BN for r in relaxations]
    return [r.lower_slope((b.centre_BN > 0).to(r.active_BN.dtype)) for r, b in zip(relaxations, domain.balls, strict=False)]


def in_reach(best_RS: Tensor, before_RS: Tensor, ahead: float) -> Tensor:
    """[R]: the rows whose values would all be positive if the rest of an ascent, `ahead` times as long as its last leg, gained as much
    again in every leg. Ascents slow down, so the others are not going to be."""
    return (best_RS + ahead * (best_RS - before_RS) > 0).all(1)


def best_of_slopes(net: Compiled, domain: Domain, bounds: list[LayerBounds], relaxations: list[Relaxation], C_BSK: Tensor) -> Tensor:
    """CROWN with the usual lower slopes and, for samples these leave open in l2, also with zero slopes: neither dominates.

    Zero slopes pay where ball∩box makes the adaptive ones flip; elsewhere they cost as much as the whole pass and add next to
    nothing that alpha-CROWN would not find.
    """
    A_BSN, b_BS, guard_BS = start_rows(net, C_BSK)
    if net.gamma:
        b_BS = b_BS - 4 * net.gamma * (guard_BS + start_magnitude(net, C_BSK, bounds[-1].reach()))
    layers = net.layers[:-1]
    value_BS = evaluate(layers, relaxations, domain, (A_BSN, b_BS), usual_slopes(relaxations, domain), net.gamma).value_BS
    left = (~(value_BS > 0).all(1)).nonzero(as_tuple=True)[0]
    if len(left) and domain.box.bounded and domain.threat.norm == "l2":
        some = relaxations if len(left) == len(value_BS) else [r.select(left) for r in relaxations]
        zero = [r.lower_slope(torch.zeros_like(r.adaptive_BN)) for r in some]
        other = evaluate(layers, some, domain.select(left), (A_BSN[left], b_BS[left]), zero, net.gamma).value_BS
        value_BS[left] = torch.maximum(value_BS[left], other)
    return value_BS


def with_alphas(net: Compiled, domain: Domain, bounds: list[LayerBounds], C_R1K: Tensor, alphas: list[Tensor]) -> Tensor:
    relaxations = [Relaxation.of(b) for b in bounds]
    A_R1N, b_R1, guard_R1 = start_rows(net, C_R1K)
    b_R1 = b_R1 - 4 * net.gamma * (guard_R1 + start_magnitude(net, C_R1K, bounds[-1].reach()))
    slopes = [r.lower_slope(a.to(A_R1N.dtype).clamp(0, 1)) for r, a in zip(relaxations, alphas, strict=True)]
    return evaluate(net.layers[:-1], relaxations, domain, (A_R1N, b_R1), slopes, net.gamma).value_BS[:, 0]
