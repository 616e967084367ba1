"""Bounds of sub-problems: ascent in their slopes and multipliers, and which neurons to split next."""

from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from cure_ray.bounds.native.coupled import relaxation_gaps
from cure_ray.bounds.native.coupled_ascent import ascend
from cure_ray.bounds.native.domain import Domain
from cure_ray.bounds.native.linear import Ascent
from cure_ray.bounds.native.nodes import Nodes
from cure_ray.bounds.native.subproblems import Space

TRIAL = 2  # splits between two tries without balls, after the first two of these
WORTH = 1.5  # a bound without balls may be so much further from 0, because its search begins anew and costs half


class Climber(Protocol):
    """Sub-problems of a batch of samples, and how their bounds are searched for."""

    @property
    def domain(self) -> Domain: ...

    def value(self, nodes: Nodes) -> Tensor:
        """The bounds [D] of sub-problems with the slopes and multipliers they hold."""
        ...

    def bounded(self, nodes: Nodes, iterations: int, rate: float, decay: float, candidates: int) -> Nodes:
        """The sub-problems with better bounds, and which neurons to split next."""
        ...


class Together:
    """All samples of a batch at once, on the whole network."""

    def __init__(self, space: Space) -> None:
        self.domain, self.space = space.domain, space

    def value(self, nodes: Nodes) -> Tensor:
        return self.space.value(nodes)

    def bounded(self, nodes: Nodes, iterations: int, rate: float, decay: float, candidates: int) -> Nodes:
        return bounded(self.space, nodes, iterations, rate, decay, candidates)


def bounded(space: Space, nodes: Nodes, iterations: int, rate: float, decay: float, candidates: int) -> Nodes:
    """Ascent in slopes and multipliers, or with balls in coefficients and multipliers; also scores the next neurons to split."""
    plain, coupled, back_D = nodes.by_kind()
    found = []
    if len(plain):
        found.append(_plain(space, plain, iterations, rate, decay, candidates))
    if len(coupled):
        found.append(_tried(space, coupled, iterations, rate, decay, candidates))
    both = Nodes.joined(found).select(back_D)
    return replace(both, bound_D=torch.maximum(both.bound_D, nodes.bound_D))  # a child is part of its parent


def _tried(space: Space, nodes: Nodes, iterations: int, rate: float, decay: float, candidates: int) -> Nodes:
    """Every so many splits also bound without balls, and stay with what is better. Balls win near the root; deep in a tree, where
    splits cut more than the ball does, slopes and split multipliers alone are found in fewer steps, and each costs half."""
    found = _coupled(space, nodes, iterations, rate, decay, candidates)
    depth_D = (nodes.split_DU != 0).sum(1)
    index = ((depth_D % TRIAL == 0) & (depth_D > TRIAL) & ~(found.bound_D > 0)).nonzero(as_tuple=True)[0]
    if len(index) == 0:
        return found
    other = _plain(space, space.without_balls(nodes.select(index)), 2 * iterations, rate, decay, candidates)
    better_D = other.bound_D > WORTH * found.bound_D[index]
    taken, rest = index[better_D], torch.ones_like(found.bound_D, dtype=torch.bool)
    rest[taken] = False
    kept = rest.nonzero(as_tuple=True)[0]
    return Nodes.joined([found.select(kept), other.select(better_D)]).select(torch.cat([kept, taken]).argsort())


def _plain(space: Space, nodes: Nodes, iterations: int, rate: float, decay: float, candidates: int) -> Nodes:
    """Slopes and multipliers of splits together."""
    frame = space.frame(nodes)
    free_DU = frame.relaxed.unstable_BN
    alpha_DU, beta_DU = nodes.alpha_DU.clone(), nodes.beta_DU.clone()
    best_D = torch.full_like(nodes.bound_D, -torch.inf)
    best_alpha, best_beta = alpha_DU.clone(), beta_DU.clone()
    ascent = Ascent([alpha_DU, beta_DU])
    score_DU = second_DU = torch.zeros_like(alpha_DU)
    lines_DU = frame.relaxed.upper_intercept_BN
    if space.domain.has_vertices:  # no line bounds the first layer's ReLUs from above
        lines_DU = lines_DU.masked_fill(space.index_BU[nodes.sample_D] < space.sizes[0], 0.0)
    for t in range(iterations):
        found = space.bound(frame, alpha_DU, beta_DU, trace=True)
        value_D = found.value_BS[:, 0]
        better_D = value_D > best_D
        best_D = torch.where(better_D, value_D, best_D)
        best_alpha = torch.where(better_D.unsqueeze(1), alpha_DU, best_alpha)
        best_beta = torch.where(better_D.unsqueeze(1), beta_DU, best_beta)
        A_DU = space.gather(nodes.sample_D, found.coefficients)
        z_DU = space.gather(nodes.sample_D, found.preactivations)
        done = t + 1 == iterations or bool((best_D > 0).all())
        if done:
            given_DU = space.gather(nodes.sample_D, found.activations)
            # What the relaxation of each neuron costs at the minimiser, and the BaBSR score (its intercept term).
            score_DU, second_DU = (A_DU * (z_DU.clamp_min(0) - given_DU)).clamp_min(0), -A_DU.clamp_max(0) * lines_DU
            break
        ascent.step([alpha_DU, beta_DU], [A_DU.clamp_min(0) * z_DU * free_DU, -z_DU * frame.sign_DU], rate * decay**t)
        alpha_DU.clamp_(0, 1)
        beta_DU.clamp_min_(0)
    candidate_DK = _candidates(score_DU, second_DU, free_DU, candidates)
    return replace(nodes, bound_D=best_D, alpha_DU=best_alpha, beta_DU=best_beta, candidate_DK=candidate_DK)


def _coupled(space: Space, nodes: Nodes, iterations: int, rate: float, decay: float, candidates: int) -> Nodes:
    """The same with balls: free coefficients take the place of split multipliers."""
    rows = space.coupled(nodes)
    best_D1, kept, found = ascend(rows, space.choice(nodes), iterations, rate, decay)
    gaps, charges = (space.gather(nodes.sample_D, part) for part in relaxation_gaps(rows, kept, found))
    open_DU = (nodes.split_DU == 0) & (space.index_BU[nodes.sample_D] < space.lower_BN.shape[1])
    candidate_DK = _candidates(gaps, charges, open_DU, candidates)
    beta_DU = space.gather(nodes.sample_D, kept.extras)
    price_DL = torch.cat([m.flatten(1) for m in kept.multipliers], 1)
    return replace(nodes, bound_D=best_D1[:, 0], beta_DU=beta_DU, price_DL=price_DL, candidate_DK=candidate_DK)


def _candidates(score_DU: Tensor, second_DU: Tensor, free_DU: Tensor, count: int) -> Tensor:
    """The best by the first score and the best one by the second; -1 where a node has fewer free neurons."""
    columns = []
    for score, k in ((score_DU, count), (second_DU, 1)):
        value, index = score.masked_fill(~free_DU, -1.0).topk(min(k, score.shape[1]), dim=1)
        columns.append(torch.where(value < 0, torch.full_like(index, -1), index))
    found = torch.cat(columns, 1)
    return torch.nn.functional.pad(found, (0, count + 1 - found.shape[1]), value=-1)
