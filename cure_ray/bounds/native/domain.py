"""The input set of a batch of samples, and what is exact about it: linear functionals and the first affine layer."""

from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from cure_ray.bounds.native.affine import Affine
from cure_ray.bounds.native.rounding import reach
from cure_ray.bounds.native.vertices import Vertices
from cure_ray.threats.balls import Ball
from cure_ray.threats.box import Box
from cure_ray.threats.geometry import dual_norm, minimise_linear, offsets

USUAL = (1e-12, 1e12)  # radii of the threat outside are bounded without balls and vertices: their squares leave the range of float32


@dataclass(frozen=True, eq=False)
class LayerBall:
    """|z - centre|_2 <= radius for the pre-activations z of one layer; radius 0: nothing is known. What the layer carries past its
    ReLUs has a ball of its own, of the radius `carried_B1`."""

    centre_BN: Tensor
    radius_B1: Tensor
    carried_B1: Tensor | None = None

    def select(self, index: Tensor) -> "LayerBall":
        carried_B1 = None if self.carried_B1 is None else self.carried_B1[index]
        return LayerBall(self.centre_BN[index], self.radius_B1[index], carried_B1)

    def to(self, dtype: torch.dtype) -> "LayerBall":
        carried_B1 = None if self.carried_B1 is None else self.carried_B1.to(dtype)
        return LayerBall(self.centre_BN.to(dtype), self.radius_B1.to(dtype), carried_B1)


@dataclass(frozen=True, eq=False)
class Domain:
    """Ball∩box around every sample, as flat tensors, and the balls around the hidden layers where they are known (l2, l1)."""

    x_BN: Tensor
    low_BN: Tensor
    high_BN: Tensor
    threat: Ball
    box: Box
    balls: tuple[LayerBall, ...] = field(default=(), kw_only=True)
    repeated: bool = field(default=False, kw_only=True)  # all rows are of one sample
    cache: dict[int, Vertices] = field(default_factory=dict, init=False, repr=False)  # `replace` begins an empty one

    @staticmethod
    def around(x_BN: Tensor, threat: Ball, box: Box) -> "Domain":
        return Domain(x_BN, *offsets(x_BN, threat.eps, box), threat, box)

    def select(self, index: Tensor) -> "Domain":
        balls = tuple(ball.select(index) for ball in self.balls)
        repeated = self.repeated or len(self.x_BN) == 1
        x_BN, low_BN, high_BN = self.x_BN[index], self.low_BN[index], self.high_BN[index]
        chosen = replace(self, x_BN=x_BN, low_BN=low_BN, high_BN=high_BN, balls=balls, repeated=repeated)
        if repeated:  # one sample: its vertices serve all rows
            object.__setattr__(chosen, "cache", self.cache)
        return chosen

    def to(self, dtype: torch.dtype) -> "Domain":
        """Recomputed from x, not cast: float32 offsets are not the float64 ones."""
        around = Domain.around(self.x_BN.to(dtype), self.threat, self.box)
        return replace(around, balls=tuple(ball.to(dtype) for ball in self.balls))

    @property
    def coupled(self) -> bool:
        """Whether sub-problems begin with balls; in l1 vertices serve them better."""
        return bool(self.balls) and self.threat.norm == "l2"

    @property
    def steps(self) -> int:
        """Steps on the dual multiplier: any number is sound, so the searching pass takes few."""
        return 4 if self.x_BN.dtype == torch.float32 else 8

    def minimise(self, A_BSN: Tensor, steps: int | None = None) -> tuple[Tensor, Tensor]:
        """min of A.x over the set for every row, [B, S]; and the offset of a minimiser."""
        x, low, high = (t.unsqueeze(1) for t in (self.x_BN, self.low_BN, self.high_BN))
        return minimise_linear(A_BSN, x, low, high, self.threat, self.box, steps or self.steps)

    def spread(self, layer: Affine) -> Tensor:
        """How far an affine layer's outputs move with the offsets, [B, N]."""
        return layer.linear((self.high_BN - self.low_BN) / 2, layer.weight_abs)

    @property
    def has_vertices(self) -> bool:
        return self.threat.norm == "l1" and USUAL[0] <= self.threat.eps <= USUAL[1]

    def vertices(self, layer: Affine) -> Vertices | None:
        """What the vertices of an l1 ball do to the first layer; computed once. Other balls have too many, or none."""
        if not self.has_vertices:
            return None
        if id(layer) not in self.cache:
            size = (1, 1) if not layer.is_conv else (layer.in_shape[1], layer.in_shape[2])
            x_BN = self.x_BN[:1] if self.repeated else self.x_BN
            self.cache[id(layer)] = Vertices.around(layer, layer(x_BN), self.threat.eps, size, layer.padding)
        return self.cache[id(layer)]

    @property
    def reach(self) -> Tensor:
        """Bounds |x'| and every intermediate magnitude of the support functions, per pixel."""
        return reach(self.x_BN, self.threat.eps)


def first_layer(layer: Affine, domain: Domain, gamma: float) -> tuple[Tensor, Tensor, Tensor]:
    """Exact bounds of the first affine layer up to rounding: (lower, upper, scale), the last a bound on the summed magnitudes."""
    centre_BN = layer(domain.x_BN + (domain.low_BN + domain.high_BN) / 2)
    if gamma:
        scale_BN = layer.magnitude(domain.reach) + layer.bias_scale_N
        slack_BN = 3 * gamma * scale_BN
    else:
        scale_BN = slack_BN = torch.zeros_like(centre_BN)
    radius_BN = domain.spread(layer) + slack_BN
    if domain.threat.norm == "linf":
        return centre_BN - radius_BN, centre_BN + radius_BN, scale_BN
    at_x_BN = layer(domain.x_BN)
    ball_N = domain.threat.eps * _unit_ball_radius(layer, domain.threat) + slack_BN
    lower_BN, upper_BN = at_x_BN - ball_N, at_x_BN + ball_N
    if domain.box.bounded:
        lower_BN = torch.maximum(lower_BN, centre_BN - radius_BN)
        upper_BN = torch.minimum(upper_BN, centre_BN + radius_BN)
        _tighten_unstable(layer, domain, at_x_BN, slack_BN, lower_BN, upper_BN)
    return lower_BN, upper_BN, scale_BN


def _unit_ball_radius(layer: Affine, threat: Ball) -> Tensor:
    """The dual norm of every row of the layer, [N]; at a padded border only the taps inside the image count."""
    key = ("ball", threat.norm)
    if key not in layer.cache:
        layer.cache[key] = dual_norm(_rows(layer), threat.norm).reshape(-1)
    return layer.cache[key]


def _rows(layer: Affine) -> Tensor:
    """The coefficients of every output on its own inputs: [N, I], or for a convolution [P, O, K] with taps outside zeroed."""
    if not layer.is_conv:
        return layer.weight
    inside_PK = _patches(layer, torch.ones_like(layer.weight[:1, 0, 0, 0]).expand(1, layer.inputs))[0]
    return layer.weight.reshape(layer.out_shape[0], -1) * inside_PK.unsqueeze(1)


def _patches(layer: Affine, x_BN: Tensor) -> Tensor:
    """The inputs each output pixel reads: [B, pixels, I*kh*kw], zero outside the image."""
    C, H, W = layer.in_shape
    image = x_BN.reshape(-1, H, W, C).permute(0, 3, 1, 2)
    return F.unfold(image, layer.kernel, 1, layer.padding, layer.stride).transpose(1, 2)


def _tighten_unstable(layer: Affine, domain: Domain, at_x_BN: Tensor, slack_BN: Tensor, lower_BN: Tensor, upper_BN: Tensor) -> None:
    """Replace, in place, the bounds of the neurons that are still unstable by the support function of ball∩box."""
    row_R, neuron_R = ((lower_BN < 0) & (upper_BN > 0)).nonzero(as_tuple=True)
    if len(row_R) == 0:
        return
    low, high = domain.low_BN, domain.high_BN
    if layer.is_conv:
        pixel_R, channel_R = neuron_R // layer.out_shape[0], neuron_R % layer.out_shape[0]
        low_RK, high_RK = _patches(layer, low)[row_R, pixel_R], _patches(layer, high)[row_R, pixel_R]
        A_RK = layer.weight.reshape(layer.out_shape[0], -1)[channel_R]
    else:
        low_RK, high_RK, A_RK = low[row_R], high[row_R], layer.weight[neuron_R]
    zero = torch.zeros_like(low_RK)
    at_x_R, slack_R = at_x_BN[row_R, neuron_R], slack_BN[row_R, neuron_R]
    down_R = minimise_linear(A_RK, zero, low_RK, high_RK, domain.threat, domain.box, domain.steps)[0]
    up_R = minimise_linear(-A_RK, zero, low_RK, high_RK, domain.threat, domain.box, domain.steps)[0]
    lower_BN[row_R, neuron_R] = torch.maximum(lower_BN[row_R, neuron_R], at_x_R + down_R - slack_R)
    upper_BN[row_R, neuron_R] = torch.minimum(upper_BN[row_R, neuron_R], at_x_R - up_R + slack_R)
