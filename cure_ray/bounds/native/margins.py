"""Margins of a batch on given hidden bounds, raised by ascent in slopes, or in coefficients and multipliers where balls are known."""

from dataclasses import replace

import torch
from torch import Tensor

from cure_ray.bounds.native.balls import ball_margins
from cure_ray.bounds.native.compiled import Compiled
from cure_ray.bounds.native.coupled_margins import coupled_margins
from cure_ray.bounds.native.effort import Effort
from cure_ray.bounds.native.linear import best_of_slopes, usual_slopes, with_alphas
from cure_ray.bounds.native.optimized import optimise
from cure_ray.bounds.native.problem import NativeProblem
from cure_ray.bounds.native.relaxation import LayerBounds, Relaxation, interval_margins, margin_rows, start_rows


def raised_margins(search: Compiled, decide: Compiled, problem: NativeProblem, bounds: list[LayerBounds], effort: Effort) -> NativeProblem:
    """The problem with these hidden bounds, the margins found on them in float64, and where branch and bound may begin."""
    C_BSK = margin_rows(problem.y_B, decide.classes, torch.float64)
    value_BS = interval_margins(decide, problem.domain, bounds, C_BSK)
    if not bounds:
        return replace(problem, bounds=[], margins_BS=value_BS, slopes=[])
    if problem.domain.balls:
        value_BS = torch.maximum(value_BS, ball_margins(decide, problem.domain, C_BSK))
    relaxations = [Relaxation.of(b) for b in bounds]
    value_BS = torch.maximum(value_BS, best_of_slopes(decide, problem.domain, bounds, relaxations, C_BSK))

    def left() -> tuple[Tensor, Tensor]:
        sample_R, spec_R = (~((value_BS > 0) & effort.stop_early)).nonzero(as_tuple=True)
        return sample_R, spec_R

    if problem.domain.coupled:
        return coupled_margins(search, decide, replace(problem, bounds=bounds, margins_BS=value_BS), relaxations, left(), effort)
    slopes = [slope_BN.unsqueeze(1).repeat(1, C_BSK.shape[1], 1).half() for slope_BN in usual_slopes(relaxations, problem.domain)]
    sample_R, spec_R = left()
    if len(sample_R):
        low = [Relaxation.of(b.to(torch.float32)).select(sample_R) for b in bounds]
        A_R1N, b_R1, _ = start_rows(search, C_BSK[sample_R, spec_R].unsqueeze(1).float())
        domain = problem.domain.select(sample_R)
        _, alphas = optimise(search.layers[:-1], low, domain.to(torch.float32), A_R1N, b_R1, effort.iterations, effort.stop_early)
        found_R = with_alphas(decide, domain, [b.select(sample_R) for b in bounds], C_BSK[sample_R, spec_R].unsqueeze(1), alphas)
        value_BS[sample_R, spec_R] = torch.maximum(value_BS[sample_R, spec_R], found_R)
        for kept, alpha in zip(slopes, alphas, strict=True):
            kept[sample_R, spec_R] = alpha[:, 0].half()
    found = replace(problem, bounds=bounds, margins_BS=value_BS, slopes=slopes)
    if not problem.domain.balls:
        return found
    beside = coupled_margins(search, decide, found, relaxations, left(), effort)  # what vertices leave open
    return replace(found, margins_BS=beside.margins_BS)
