"""The search for coupled bounds: ascent in coefficients and multipliers. Whatever it ends with is a valid choice."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from cure_ray.bounds.native.coupled import Choice, CoupledLayer, CoupledRows, Trace, evaluate, worst_offset
from cure_ray.bounds.native.linear import Ascent, in_reach

NOISE = 1e-2  # of a row's largest gradient


def start(rows: CoupledRows, steps: int = 6) -> Choice:
    """CROWN's coefficients, and multipliers that fit them: m times (used / radius^2)^(1/2), a few times over, nears dh/dm = 0."""
    choice = Choice([rows.b.new_zeros(*rows.b.shape, layer.centre.shape[-1]) for layer in rows.layers], [])
    c = rows.A
    for i in range(len(rows.layers) - 1, -1, -1):
        layer = rows.layers[i]
        g = c * torch.where(c < 0, layer.upper_slope, layer.lower_slope)
        m = torch.linalg.vector_norm(c * layer.unstable, dim=-1, keepdim=True) / (2 * layer.radius).clamp_min(1e-20)
        for _ in range(steps):
            worst = worst_offset(c, g, m, layer)[1]
            m = stepped(m, torch.linalg.vector_norm(worst, dim=-1, keepdim=True).square(), layer.radius)
        choice.multipliers.insert(0, m)
        c = rows.down(i, g)
    return choice


def stepped(m: Tensor, used: Tensor, radius: Tensor) -> Tensor:
    """A multiplier nearer to the one at which the worst points lie on the sphere."""
    return m * (used / radius.square().clamp_min(1e-30)).clamp(1 / 16, 16).sqrt()


def ascend(rows: CoupledRows, choice: Choice, iterations: int, rate: float, decay: float) -> tuple[Tensor, Choice, Trace]:
    """Adam in the coefficients, a step of each multiplier beside; the best values seen, the choice that gave them, the last trace.

    Coefficients move in units of their row, so that a step means the same whatever the scale of the network.
    """
    multipliers, extras = list(choice.multipliers), list(choice.extras)
    best, kept = torch.full_like(rows.b, -torch.inf), Choice(list(extras), list(multipliers))
    moved = [torch.zeros_like(e) for e in extras]
    ascent = Ascent(moved)
    units: list[Tensor] = []
    for t in range(iterations):
        value, found = evaluate(rows, Choice(extras, multipliers), trace=True)
        assert found is not None
        better = (value > best).unsqueeze(-1)
        best = torch.where(better[..., 0], value, best)
        for mine, theirs in zip(kept.parts(), (extras, multipliers), strict=True):
            mine[:] = [torch.where(better, new, old) for new, old in zip(theirs, mine, strict=True)]
        if t + 1 == iterations:
            break
        units = units or [_unit(c, layer) for c, layer in zip(found.above, rows.layers, strict=True)]
        gradients = [u * e for u, e in zip(units, found.excess, strict=True)]
        # Adam would turn the rounding of a gradient that is 0 into whole steps: what counts is measured by the row's largest.
        floors = [NOISE * torch.linalg.vector_norm(g, torch.inf, dim=-1, keepdim=True).clamp_min(1e-30) for g in gradients]
        ascent.step(moved, gradients, rate * decay**t, floors)
        extras = [torch.addcmul(e, v, u) for e, v, u in zip(choice.extras, moved, units, strict=True)]
        multipliers = [stepped(m, used, layer.radius) for m, used, layer in zip(multipliers, found.used, rows.layers, strict=True)]
    assert found is not None
    return best, kept, found


def ascend_open(build: Callable[[Tensor], CoupledRows], count: int, legs: Sequence[int], rate: float, decay: float, stop: bool) -> Choice:
    """`ascend` for `count` rows (dimension 0) in legs; with `stop` each leg goes on with the rows that are not positive yet but may be."""
    rows = build(torch.arange(count))
    live, choice = torch.arange(count, device=rows.b.device), start(rows)
    whole, done = choice, 0
    before: Tensor | None = None
    for leg in legs:
        best, choice, _ = ascend(rows, choice, leg, rate * decay**done, decay)
        done += leg
        for into, new in zip(whole.parts(), choice.parts(), strict=True):
            into[:] = [old.index_copy(0, live, part) for old, part in zip(into, new, strict=True)]
        if stop:
            open_R = ~(best > 0).all(1)
            if before is not None:
                open_R &= in_reach(best, before, (sum(legs) - done) / leg)
            still = open_R.nonzero(as_tuple=True)[0]
            if len(still) == 0:
                break
            before = best[still]
            if len(still) < len(best):
                live, choice = live[still], choice.select(still)
                rows = build(live)
    return whole


def _unit(c: Tensor, layer: CoupledLayer) -> Tensor:
    """A quarter of a neuron's coefficient and of the mean over the row's unstable neurons; 0 on the others, which stay exact."""
    mean = ((c * layer.unstable).square().sum(-1, keepdim=True) / layer.unstable.sum(-1, keepdim=True).clamp_min(1)).sqrt()
    return 0.35 * (c.abs() + 0.3 * mean) * layer.unstable
