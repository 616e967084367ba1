"""Which hidden neurons are worth bounding again when there is not work enough for all: those that cost the open margins most."""

from collections.abc import Sequence

import torch
from torch import Tensor

from cure_ray.bounds.native.compiled import Compiled
from cure_ray.bounds.native.domain import Domain
from cure_ray.bounds.native.linear import evaluate
from cure_ray.bounds.native.relaxation import LayerBounds, Relaxation, start_rows
from cure_ray.bounds.native.windows import row_elements


def neuron_costs(search: Compiled, domain: Domain, bounds: Sequence[LayerBounds], C_BSK: Tensor, open_BS: Tensor) -> list[Tensor]:
    """What the relaxation of every neuron can take from the open margins: its coefficient times the gap of its triangle, [B, N]."""
    relaxations = [Relaxation.of(b.to(torch.float32)) for b in bounds]
    A_BSN, b_BS, _ = start_rows(search, C_BSK.float())
    slopes = [r.adaptive_BN for r in relaxations]
    found = evaluate(search.layers[:-1], relaxations, domain.to(torch.float32), (A_BSN, b_BS), slopes, 0.0, trace=True)
    weight_BS1 = open_BS.float().unsqueeze(2)
    return [(A.abs() * weight_BS1).sum(1) * r.upper_intercept_BN for A, r in zip(found.coefficients, relaxations, strict=True)]


def affordable(net: Compiled, bounds: Sequence[LayerBounds], costs: Sequence[Tensor], limit: int) -> list[Tensor]:
    """Masks [B, N] of unstable neurons for `limit` coefficients a sample: the last layers first, in a layer what costs most."""
    left_B = torch.full_like(costs[0][:, 0], limit, dtype=torch.float64)
    masks: list[Tensor] = []
    for k in range(len(bounds) - 1, -1, -1):
        unstable_BN = bounds[k].unstable()
        if k == 0:  # exact already
            masks.insert(0, torch.zeros_like(unstable_BN))
            break
        price = row_elements(net, k)
        rank_BN = torch.where(unstable_BN, costs[k], torch.full_like(costs[k], -1.0)).argsort(1, descending=True).argsort(1)
        masks.insert(0, unstable_BN & (rank_BN < (left_B // price).unsqueeze(1)))
        left_B = left_B - masks[0].sum(1) * price
    return masks
