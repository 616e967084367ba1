"""Regularisers: the l1 norm of the weights, and the warm-up terms that keep bounds tight and ReLUs balanced while the radii grow."""

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

Mean = Callable[[Tensor], Tensor]  # averages a local batch mean over data-parallel ranks, differentiably
REFERENCE = 0.5
FLOOR = 1e-12


def l1_norm(parameters: Iterable[Tensor]) -> Tensor:
    """Sum of |p| over all trainable tensors, biases and BN included (A16)."""
    return torch.stack([p.abs().sum() for p in parameters]).sum()


def tightness(radius: Tensor, radius_in: Tensor, mean: Mean) -> Tensor:
    """Penalty when the mean radius of a layer outgrows that of the input."""
    return (REFERENCE - radius_in / mean(radius.mean()).clamp(min=FLOOR)).clamp(min=0) / REFERENCE


def _fold(ratio: Tensor) -> Tensor:
    return torch.minimum(ratio, 1 / ratio.clamp(min=FLOOR))


def balance(centre: Tensor, radius: Tensor, mean: Mean) -> Tensor:
    """Penalty when active and inactive neurons are out of balance, in mean and in variance.

    Without inactive neurons the ratios do not exist and the term is 0; because a masked NaN still poisons gradients, the
    denominators are replaced before the division.
    """
    active = (centre > radius).to(centre.dtype)
    dead = (centre < -radius).to(centre.dtype)
    spread = (centre - mean(centre.mean())).square()
    top_mean, low_mean, top_spread, low_spread = mean(
        torch.stack([(centre * active).mean(), -(centre * dead).mean(), (spread * active).mean(), (spread * dead).mean()])
    ).unbind()
    usable = (low_mean > 0) & (low_spread > 0)
    one = torch.ones_like(low_mean)
    ratio_mean = torch.where(usable, top_mean, one) / torch.where(usable, low_mean, one)
    ratio_spread = torch.where(usable, top_spread, one) / torch.where(usable, low_spread, one)
    return ((REFERENCE - _fold(ratio_mean)).clamp(min=0) + (REFERENCE - _fold(ratio_spread)).clamp(min=0)) / REFERENCE


def warmup(hidden: Sequence[tuple[Tensor, Tensor]], radius_in: Tensor, mean: Mean = lambda local: local) -> Tensor:
    """Mean over ReLU layers of tightness plus balance; weighted by lambda_reg * (1 - rho) by the caller."""
    terms = [tightness(r, mean(radius_in), mean) + balance(c, r, mean) for c, r in hidden]
    return torch.stack(terms).sum() / len(terms)
