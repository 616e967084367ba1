"""What rounding can add to a bound of the deciding pass: the magnitudes that are multiplied by gamma (docs/explanation/soundness.md).

gamma times |a||b| covers the relative error of a product, but not what is lost below the smallest double. Hence the floor: with
|a| + FLOOR and |b| + FLOOR in place of |a| and |b|, gamma times their product also covers a result that was flushed to zero,
2^-1022, whatever it is multiplied with afterwards, as long as that stays below the CEILING. Exact zeros stay zeros: they cost nothing.
"""

import torch
from torch import Tensor

FLOOR = 2.0**-450
SINGLE_FLOOR = 2.0**-50  # the same where float32 multiplies: what it loses is below 2^-126
CEILING = 2.0**450  # magnitudes above it are NaN, which certifies nothing
LARGEST = 2.0**400  # parameters above it are refused, 2.6e120


def floored(size: Tensor, floor: float = FLOOR) -> Tensor:
    """Magnitudes raised by the floor, except where there is nothing to lose. In float32, which never decides, they stay."""
    return torch.add(size, size.sign(), alpha=floor) if size.dtype == torch.float64 else size


def capped(size: Tensor) -> Tensor:
    return torch.where(size <= CEILING, size, torch.nan)


def reach(x: Tensor, eps: float) -> Tensor:
    """Bounds |x'| and every intermediate magnitude of the support functions, per pixel."""
    return capped(floored(x.abs() + eps))


def weighed(A_BSN: Tensor, scale_BN: Tensor, floor: float = FLOOR) -> Tensor:
    """|A|.scale with the floor of every coefficient: one that is 0 may have been more before it was rounded, [B, S]."""
    return torch.matmul(A_BSN.abs(), scale_BN.unsqueeze(-1)).squeeze(-1) + floor * scale_BN.sum(-1, keepdim=True)
