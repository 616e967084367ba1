"""The linear relaxation of a layer of ReLUs, and interval bounds through a network (docs/explanation/algorithms.md 3.1, 9.2)."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from cure_ray.bounds.native.affine import Affine, activated
from cure_ray.bounds.native.compiled import Compiled
from cure_ray.bounds.native.domain import Domain, first_layer
from cure_ray.bounds.native.rounding import FLOOR


@dataclass(frozen=True, eq=False)
class LayerBounds:
    """Bounds on the pre-activations of one layer; `scale_BN` bounds the summed magnitudes behind each (rounding)."""

    lower_BN: Tensor
    upper_BN: Tensor
    scale_BN: Tensor
    carried_N: Tensor | None = None  # as in the layer: what no ReLU follows

    def select(self, index: Tensor) -> "LayerBounds":
        return LayerBounds(self.lower_BN[index], self.upper_BN[index], self.scale_BN[index], self.carried_N)

    def to(self, dtype: torch.dtype) -> "LayerBounds":
        return LayerBounds(self.lower_BN.to(dtype), self.upper_BN.to(dtype), self.scale_BN.to(dtype), self.carried_N)

    def unstable(self) -> Tensor:
        """ReLUs that may be on or off; what is carried has none."""
        unstable_BN = (self.lower_BN < 0) & (self.upper_BN > 0)
        return unstable_BN if self.carried_N is None else unstable_BN & ~self.carried_N

    def handed_on(self) -> tuple[Tensor, Tensor]:
        """Bounds of what the layer hands on."""
        return activated(self.lower_BN, self.carried_N), activated(self.upper_BN, self.carried_N)

    def reach(self) -> Tensor:
        """Bounds the magnitude of what the layer hands on."""
        high_BN = self.upper_BN.clamp_min(0)
        if self.carried_N is None:
            return high_BN
        return torch.where(self.carried_N, torch.maximum(self.lower_BN.abs(), self.upper_BN.abs()), high_BN)

    def replaced(self, index: Tensor, by: "LayerBounds") -> "LayerBounds":
        """These samples' bounds by others."""
        rows = ((self.lower_BN, by.lower_BN), (self.upper_BN, by.upper_BN), (self.scale_BN, by.scale_BN))
        lower_BN, upper_BN, scale_BN = (whole.index_copy(0, index, part) for whole, part in rows)
        return LayerBounds(lower_BN, upper_BN, scale_BN, self.carried_N)

    def tightened(self, lower_BN: Tensor, upper_BN: Tensor) -> "LayerBounds":
        """The intersection. torch.maximum and minimum hand NaN on, so a bound that failed stays visible."""
        return replace(self, lower_BN=torch.maximum(self.lower_BN, lower_BN), upper_BN=torch.minimum(self.upper_BN, upper_BN))


@dataclass(frozen=True, eq=False)
class Relaxation:
    """lower_slope * z <= relu(z) <= upper_slope * z + upper_intercept on [lower, upper], all [B, N].

    Stable neurons are exact: slopes 1 or 0, no intercept; what is carried is like an active neuron. For unstable ones any lower
    slope in [0, 1] is sound; the adaptive choice (1 if upper > -lower, else 0) has the smaller area.
    """

    unstable_BN: Tensor
    active_BN: Tensor  # 1.0 where lower >= 0, and on what is carried
    upper_slope_BN: Tensor
    upper_intercept_BN: Tensor
    adaptive_BN: Tensor
    scale_BN: Tensor
    lower_BN: Tensor
    upper_BN: Tensor

    @staticmethod
    def of(bounds: LayerBounds) -> "Relaxation":
        lower, upper = bounds.lower_BN, bounds.upper_BN
        unstable = bounds.unstable()
        # NaN bounds are neither stable nor unstable; the slope they get is NaN and poisons the row, as it must.
        passes = lower >= 0 if bounds.carried_N is None else (lower >= 0) | bounds.carried_N
        active = passes.to(lower.dtype) + (lower + upper) * 0
        # A steeper upper line through (lower, 0) is sound too: the floor keeps what is lost in the intercept chargeable to the slope.
        line = (upper / torch.where(unstable, upper - lower, torch.ones_like(lower))).clamp_min(FLOOR)
        slope = torch.where(unstable, line, active)
        intercept = torch.where(unstable, -lower * slope, torch.zeros_like(lower))
        adaptive = torch.where(unstable, (upper > -lower).to(lower.dtype), active)
        return Relaxation(unstable, active, slope, intercept, adaptive, bounds.scale_BN, lower, upper)

    def select(self, index: Tensor) -> "Relaxation":
        return Relaxation(*(t[index] for t in self.tensors()))

    def tensors(self) -> tuple[Tensor, ...]:
        return (
            self.unstable_BN,
            self.active_BN,
            self.upper_slope_BN,
            self.upper_intercept_BN,
            self.adaptive_BN,
            self.scale_BN,
            self.lower_BN,
            self.upper_BN,
        )

    def lower_slope(self, alpha: Tensor) -> Tensor:
        """alpha [..., N] on unstable neurons, the exact slope on stable ones."""
        unstable, active = self.unstable_BN, self.active_BN
        if alpha.dim() == 3:
            unstable, active = unstable.unsqueeze(1), active.unsqueeze(1)
        return torch.where(unstable, alpha, active)


def interval_layer(layer: Affine, below: LayerBounds, gamma: float) -> LayerBounds:
    """One affine layer on the box of what the layer below hands on, centre and radius, widened by what rounding can hide (gamma)."""
    low, high = below.handed_on()
    centre_BN, radius_BN = layer((low + high).div_(2)), layer.linear((high - low).div_(2), layer.weight_abs)
    scale_BN = torch.zeros_like(centre_BN)
    if gamma:
        scale_BN = layer.magnitude(below.reach()) + layer.bias_scale_N
        lost = layer.lost if layer.single_up else 4 * gamma * layer.lost  # what magnitudes in float32 fall short of
        radius_BN = radius_BN + (3 * gamma + lost) * scale_BN
    return LayerBounds(centre_BN - radius_BN, centre_BN + radius_BN, scale_BN, layer.carried_N)


def interval_bounds(net: Compiled, domain: Domain) -> list[LayerBounds]:
    """IBP for every hidden layer, the first one exact."""
    first = net.layers[0]
    bounds = [LayerBounds(*first_layer(first, domain, net.gamma), first.carried_N)] if net.hidden else []
    for layer in net.layers[1:-1]:
        bounds.append(interval_layer(layer, bounds[-1], net.gamma))
    return bounds


def interval_margins(net: Compiled, domain: Domain, bounds: list[LayerBounds], C_BSK: Tensor) -> Tensor:
    """Lower bounds of the rows of C on the logits with the last layer elided, [B, S] (docs/explanation/algorithms.md 3.3)."""
    A_BSN, b_BS, guard_BS = start_rows(net, C_BSK)
    if not bounds:
        value_BS = domain.minimise(A_BSN)[0] + b_BS
        reach_BN = domain.reach
    else:
        low, high = bounds[-1].handed_on()
        centre_BN, radius_BN = (low + high) / 2, (high - low) / 2
        dot = torch.einsum("bsn,bn->bs", A_BSN, centre_BN)
        value_BS = dot + b_BS - torch.einsum("bsn,bn->bs", A_BSN.abs(), radius_BN)
        reach_BN = bounds[-1].reach()
    if net.gamma:
        value_BS = value_BS - 2 * net.gamma * (guard_BS + start_magnitude(net, C_BSK, reach_BN))
    return value_BS


def start_rows(net: Compiled, C_BSK: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The rows of C through the last layer: coefficients on its inputs, constant, magnitude of the constant."""
    last = net.layers[-1]
    return C_BSK @ last.weight, C_BSK @ last.bias_N, C_BSK.abs() @ last.bias_scale_N


def start_magnitude(net: Compiled, C_BSK: Tensor, reach_BN: Tensor) -> Tensor:
    """|C| |W| reach: what the coefficients of start_rows can be multiplied with, summed, [B, S]."""
    return torch.einsum("bsk,bk->bs", C_BSK.abs(), net.layers[-1].magnitude(reach_BN))


def margin_rows(y_B: Tensor, classes: int, dtype: torch.dtype) -> Tensor:
    """[B, K-1, K]: f_y - f_i for the classes i != y in increasing order."""
    step = torch.arange(classes - 1, device=y_B.device).expand(len(y_B), -1)
    other_BS = step + (step >= y_B.unsqueeze(1)).long()
    eye = torch.eye(classes, dtype=dtype, device=y_B.device)
    return eye[y_B].unsqueeze(1) - eye[other_BS]
