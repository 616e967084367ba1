"""The hidden bounds behind alpha-CROWN and branch and bound: what earlier stages have proven, and better ones as far as the work goes."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from cure_ray.bounds.native.budget import affordable, neuron_costs
from cure_ray.bounds.native.compiled import Compiled
from cure_ray.bounds.native.effort import Effort
from cure_ray.bounds.native.intermediate import crown_bounds, optimised_bounds
from cure_ray.bounds.native.linear import best_of_slopes
from cure_ray.bounds.native.problem import NativeProblem
from cure_ray.bounds.native.relaxation import LayerBounds, Relaxation, interval_bounds, margin_rows
from cure_ray.bounds.native.windows import row_elements

Elements = Callable[[Compiled], int]  # coefficients of backward rows that a network may hold at once


@dataclass(frozen=True)
class Nets:
    """One network three times: in float32, which searches; with products in float32 that prove; in float64, which decides."""

    search: Compiled
    prove: Compiled
    decide: Compiled


def proven_bounds(nets: Nets, problem: NativeProblem) -> list[LayerBounds]:
    """Intervals, tightened by what CROWN has proven before."""
    bounds = interval_bounds(nets.decide, problem.domain)
    if problem.known is None:
        return bounds
    return [loose.tightened(b.lower_BN, b.upper_BN) for loose, b in zip(bounds, problem.known, strict=True)]


def hidden_bounds(nets: Nets, problem: NativeProblem, effort: Effort, elements: Elements) -> list[LayerBounds]:
    """The best of what the stages before have proven and, as far as the work limit goes, of optimised bounds."""
    search, decide = nets.search, nets.decide
    if search.hidden < 2 or effort.hidden == "ibp":
        return interval_bounds(decide, problem.domain)
    if effort.hidden == "crown":
        return crown_bounds(decide, problem.domain, elements(decide))
    bounds = proven_bounds(nets, problem)
    work_B = sum(b.unstable().sum(1) * row_elements(search, k) for k, b in enumerate(bounds) if k > 0)
    whole_B = torch.as_tensor(work_B <= effort.work_limit, device=problem.y_B.device) | (effort.hidden == "alpha")
    for chosen, partly in ((whole_B.nonzero(as_tuple=True)[0], False), ((~whole_B).nonzero(as_tuple=True)[0], True)):
        if len(chosen) == 0:
            continue
        some = problem.select(chosen)
        if partly:
            tight = _as_affordable(nets, some, effort, elements)
        else:
            known = None if problem.known is None else [b.select(chosen) for b in bounds]
            tight = optimised_bounds(search, decide, some.domain, elements(search), effort.hidden_iterations, known)
        bounds = [loose.replaced(chosen, better) for loose, better in zip(bounds, tight, strict=True)]
    return bounds


def _as_affordable(nets: Nets, problem: NativeProblem, effort: Effort, elements: Elements) -> list[LayerBounds]:
    """CROWN for every hidden layer, and optimised bounds of the neurons that cost the open margins most."""
    overflowing = any(not torch.isfinite(b.scale_BN).all() for b in problem.known or ())
    search, prove, domain = nets.search, nets.decide if overflowing else nets.prove, problem.domain
    known = problem.known or crown_bounds(prove, domain, elements(prove))
    C_BSK = margin_rows(problem.y_B, search.classes, torch.float64)
    open_BS = best_of_slopes(prove, domain, known, [Relaxation.of(b) for b in known], C_BSK) <= 0
    which = affordable(search, known, neuron_costs(search, domain, known, C_BSK, open_BS), effort.work_limit)
    return optimised_bounds(search, prove, domain, elements(search), effort.hidden_iterations, known, which)
