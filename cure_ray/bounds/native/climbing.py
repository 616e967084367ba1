"""Bounds of sub-problems: ascent in their slopes and multipliers, and which neurons to split next."""

import torch
from torch import Tensor

from cure_ray.bounds.native.coupled import relaxation_gaps
from cure_ray.bounds.native.coupled_ascent import ascend
from cure_ray.bounds.native.linear import Ascent
from cure_ray.bounds.native.nodes import Nodes
from cure_ray.bounds.native.relaxation import Relaxation
from cure_ray.bounds.native.subproblems import Space


def bounded(space: Space, nodes: Nodes, iterations: int, rate: float, decay: float, candidates: int) -> Nodes:
    """Ascent in slopes and multipliers together; also scores the next neurons to split."""
    if space.domain.balls:
        return _coupled(space, nodes, iterations, rate, decay, candidates)
    sample_D, split_DU = nodes.sample_D, nodes.split_DU
    relaxations = space.relaxations(sample_D, split_DU)
    free_DU = space.gather(sample_D, [r.unstable_BN.to(nodes.alpha_DU.dtype) for r in relaxations])
    sign_DU = split_DU.to(nodes.alpha_DU.dtype)
    alpha_DU, beta_DU = nodes.alpha_DU.clone(), nodes.beta_DU.clone()
    best_D = torch.full_like(nodes.bound_D, -torch.inf)
    best_alpha, best_beta = alpha_DU.clone(), beta_DU.clone()
    ascent = Ascent([alpha_DU, beta_DU])
    score_DU = second_DU = torch.zeros_like(alpha_DU)
    for t in range(iterations):
        found, _ = space.bound(sample_D, nodes.spec_D, split_DU, alpha_DU, beta_DU, True, relaxations)
        value_D = found.value_BS[:, 0]
        better_D = value_D > best_D
        best_D = torch.where(better_D, value_D, best_D)
        best_alpha = torch.where(better_D.unsqueeze(1), alpha_DU, best_alpha)
        best_beta = torch.where(better_D.unsqueeze(1), beta_DU, best_beta)
        A_DU = space.gather(sample_D, found.coefficients)
        z_DU = space.gather(sample_D, found.preactivations)
        done = t + 1 == iterations or bool((best_D > 0).all())
        if done:
            score_DU, second_DU = _scores(space, sample_D, relaxations, A_DU, z_DU, alpha_DU)
            break
        ascent.step([alpha_DU, beta_DU], [A_DU.clamp_min(0) * z_DU * free_DU, -z_DU * sign_DU], rate * decay**t)
        alpha_DU.clamp_(0, 1)
        beta_DU.clamp_min_(0)
    candidate_DK = _candidates(score_DU, second_DU, free_DU > 0, candidates)
    bound_D = torch.maximum(best_D, nodes.bound_D)  # a child is part of its parent
    return Nodes(bound_D, sample_D, nodes.spec_D, split_DU, best_alpha, best_beta, nodes.price_DL, candidate_DK)


def _coupled(space: Space, nodes: Nodes, iterations: int, rate: float, decay: float, candidates: int) -> Nodes:
    """The same with balls: free coefficients take the place of split multipliers."""
    rows = space.coupled(nodes)
    best_D1, kept, found = ascend(rows, space.choice(nodes), iterations, rate, decay)
    gaps, charges = (space.gather(nodes.sample_D, part) for part in relaxation_gaps(rows, kept, found))
    open_DU = (nodes.split_DU == 0) & (space.index_BU[nodes.sample_D] < space.lower_BN.shape[1])
    candidate_DK = _candidates(gaps, charges, open_DU, candidates)
    beta_DU = space.gather(nodes.sample_D, kept.extras)
    price_DL = torch.cat([m.flatten(1) for m in kept.multipliers], 1)
    bound_D = torch.maximum(best_D1[:, 0], nodes.bound_D)
    return Nodes(bound_D, nodes.sample_D, nodes.spec_D, nodes.split_DU, nodes.alpha_DU, beta_DU, price_DL, candidate_DK)


def _scores(
    space: Space, sample_D: Tensor, relaxations: list[Relaxation], A_DU: Tensor, z_DU: Tensor, alpha_DU: Tensor
) -> tuple[Tensor, Tensor]:
    """What the relaxation of each neuron costs at the minimiser, and the BaBSR score (its intercept term)."""
    slope_DU = space.gather(sample_D, [r.upper_slope_BN for r in relaxations])
    intercept_DU = space.gather(sample_D, [r.upper_intercept_BN for r in relaxations])
    relu_DU = z_DU.clamp_min(0)
    above_DU, below_DU = slope_DU * z_DU + intercept_DU - relu_DU, relu_DU - alpha_DU * z_DU
    gap_DU = torch.where(A_DU < 0, -A_DU * above_DU, A_DU * below_DU).clamp_min(0)
    return gap_DU, -A_DU.clamp_max(0) * intercept_DU


def _candidates(score_DU: Tensor, second_DU: Tensor, free_DU: Tensor, count: int) -> Tensor:
    """The best by the first score and the best one by the second; -1 where a node has fewer free neurons."""
    columns = []
    for score, k in ((score_DU, count), (second_DU, 1)):
        value, index = score.masked_fill(~free_DU, -1.0).topk(min(k, score.shape[1]), dim=1)
        columns.append(torch.where(value < 0, torch.full_like(index, -1), index))
    found = torch.cat(columns, 1)
    return torch.nn.functional.pad(found, (0, count + 1 - found.shape[1]), value=-1)
