"""alpha-CROWN: gradient ascent on the lower slopes of unstable ReLUs, rows that are positive, or will not be, dropped on the way."""

from collections.abc import Sequence

import torch
from torch import Tensor

from cure_ray.bounds.native.affine import Affine
from cure_ray.bounds.native.domain import Domain
from cure_ray.bounds.native.linear import Ascent, evaluate, in_reach, slope_gradients, usual_slopes
from cure_ray.bounds.native.relaxation import Relaxation

RATE, DECAY = 0.25, 0.95
LEG = 4  # iterations between two looks at what is in reach


def optimise(
    layers: Sequence[Affine],
    relaxations: Sequence[Relaxation],
    domain: Domain,
    A_BSN: Tensor,
    b_BS: Tensor,
    iterations: int,
    stop_when_positive: bool = False,
) -> tuple[Tensor, list[Tensor]]:
    """The best values [B, S] seen and the slopes [B, S, N] that gave them (every reported value was evaluated)."""
    S = b_BS.shape[1]
    alphas = [slope_BN.unsqueeze(1).expand(-1, S, -1).clone() for slope_BN in usual_slopes(relaxations, domain)]
    best_BS = torch.full_like(b_BS, -torch.inf)
    best = [a.clone() for a in alphas]
    ascent = Ascent(alphas)
    live_B = torch.arange(len(b_BS), device=b_BS.device)
    before_BS: Tensor | None = None
    for t in range(iterations):
        last = t + 1 == iterations
        found = evaluate(layers, relaxations, domain, (A_BSN, b_BS), alphas, 0.0, trace=not last)
        better_BS = found.value_BS > best_BS[live_B]
        rows, specs = better_BS.nonzero(as_tuple=True)
        best_BS[live_B[rows], specs] = found.value_BS[rows, specs]
        for kept, alpha in zip(best, alphas, strict=True):
            kept[live_B[rows], specs] = alpha[rows, specs]
        if last:
            break
        ascent.step(alphas, slope_gradients(found, relaxations), RATE * DECAY**t)
        for alpha in alphas:
            alpha.clamp_(0, 1)
        if stop_when_positive:
            open_B, looks = ~(best_BS[live_B] > 0).all(1), t % LEG == LEG - 1
            if looks:
                if before_BS is not None:
                    open_B &= in_reach(best_BS[live_B], before_BS[live_B], (iterations - t - 1) / LEG)
                before_BS = best_BS.clone()
            keep = open_B.nonzero(as_tuple=True)[0]
            if len(keep) == 0:
                break
            if len(keep) <= 0.75 * len(live_B) or (looks and len(keep) < len(live_B)):  # whoever shares the batch: out of reach is out
                live_B, domain = live_B[keep], domain.select(keep)
                A_BSN, b_BS = A_BSN[keep], b_BS[keep]
                alphas = [a[keep] for a in alphas]
                relaxations = [r.select(keep) for r in relaxations]
                ascent.select(keep)
    return best_BS, best
