"""Coupled bounds of a batch's margins on its hidden bounds, and where branch and bound may begin."""

from dataclasses import replace

import torch
from torch import Tensor

from cure_ray.bounds.native.compiled import Compiled
from cure_ray.bounds.native.coupled import Choice, CoupledRows, dense_rows, evaluate
from cure_ray.bounds.native.coupled_ascent import ascend_open
from cure_ray.bounds.native.domain import Domain
from cure_ray.bounds.native.effort import Effort
from cure_ray.bounds.native.problem import NativeProblem
from cure_ray.bounds.native.relaxation import Relaxation, margin_rows, start_magnitude, start_rows

RATE, DECAY = 0.25, 0.95


def coupled_margins(
    search: Compiled, decide: Compiled, problem: NativeProblem, relaxations: list[Relaxation], which: tuple[Tensor, Tensor], effort: Effort
) -> NativeProblem:
    """The problem with these margins (samples, specifications) raised; searched for in float32, evaluated in float64."""
    sample_R, spec_R = which
    assert problem.margins_BS is not None
    assert problem.bounds is not None
    device, (B, S) = problem.margins_BS.device, problem.margins_BS.shape
    C_BSK = margin_rows(problem.y_B, decide.classes, torch.float64)
    low, quick = [Relaxation.of(b.to(torch.float32)) for b in problem.bounds], problem.domain.to(torch.float32)
    guard_BS = 4 * decide.gamma * start_magnitude(decide, C_BSK, problem.bounds[-1].reach())

    def rows(net: Compiled, tensors: list[Relaxation], domain: Domain, index: Tensor) -> CoupledRows:
        sample, spec = sample_R[index], spec_R[index]
        A_R1N, b_R1, guard_R1 = start_rows(net, C_BSK[sample, spec].unsqueeze(1).to(domain.x_BN.dtype))
        charged_R1 = b_R1 - (4 * net.gamma * guard_R1 + guard_BS[sample, spec].unsqueeze(1)) if net.gamma else b_R1
        return dense_rows(net.layers[:-1], [r.select(sample) for r in tensors], domain.select(sample), A_R1N, charged_R1, net.gamma)

    whole = Choice(
        [torch.zeros(B, S, r.lower_BN.shape[1], device=device) for r in low],
        [torch.zeros(B, S, 1, device=device) for _ in low],
    )
    if len(sample_R):
        everyone = torch.arange(len(sample_R), device=device)
        choice = ascend_open(lambda i: rows(search, low, quick, i), len(everyone), effort.legs(), RATE, DECAY, effort.stop_early)
        found_R = evaluate(rows(decide, relaxations, problem.domain, everyone), choice.to(torch.float64))[0][:, 0]
        problem.margins_BS[sample_R, spec_R] = torch.maximum(problem.margins_BS[sample_R, spec_R], found_R)
        for kept, part in zip(whole.parts(), choice.parts(), strict=True):
            for into, new in zip(kept, part, strict=True):
                into[sample_R, spec_R] = new[:, 0].to(into.dtype)
    return replace(problem, slopes=[], extras=whole.extras, prices=whole.multipliers)
