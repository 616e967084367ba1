"""Propagation regions: attack every sample in every norm, and put a small box or ball where the attack ended (4).

Numbers are sections of docs/explanation/algorithms.md.

All norms' attacks run as one stacked batch: one forward and one input-gradient pass per step, whatever the number of norms.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from cure_ray.config import Attack
from cure_ray.threats.balls import Ball
from cure_ray.threats.box import UNIT, Box
from cure_ray.threats.geometry import project
from cure_ray.threats.norms import Norm
from cure_ray.training.propagation import Region

TINY = 1e-10


@dataclass(frozen=True)
class RegionSpec:
    """What to build for one norm: current radius, relative size, shape, and which samples of the batch (None: all)."""

    norm: Norm
    eps: float
    ratio: float
    ball: bool
    rows: Tensor | None = None
    box: Box = UNIT  # the domain of the inputs


def step_sizes(steps: int, first: float) -> list[float]:
    """Times 0.1 at 50, 80 and 90 % of the steps."""
    milestones = [math.ceil(fraction * steps) for fraction in (0.5, 0.8, 0.9)]
    return [first * 0.1 ** sum(m <= t for m in milestones) for t in range(steps)]


@dataclass(frozen=True)
class Noise:
    """Random draws for the rows of this rank: the global batch is drawn and sliced, so ranks together see what one process would."""

    generator: torch.Generator
    rank: int = 0
    world: int = 1

    def _mine(self, drawn: Tensor) -> Tensor:
        rows = len(drawn) // self.world
        return drawn[self.rank * rows : (self.rank + 1) * rows]

    def uniform(self, like: Tensor, *shape: int) -> Tensor:
        """U(0, 1) of this shape (the first entry counts local rows)."""
        full = (shape[0] * self.world, *shape[1:])
        return self._mine(torch.rand(full, generator=self.generator, device=like.device, dtype=like.dtype))

    def normal(self, like: Tensor) -> Tensor:
        full = (len(like) * self.world, *like.shape[1:])
        return self._mine(torch.randn(full, generator=self.generator, device=like.device, dtype=like.dtype))


@dataclass(frozen=True)
class _Range:
    """How far each pixel can go down and up inside the radius and the domain; kept as offsets, so that tiny radii stay exact."""

    down: Tensor
    up: Tensor

    @staticmethod
    def of(x: Tensor, eps: float, box: Box = UNIT) -> "_Range":
        return _Range((x - box.low).clamp(max=eps), (box.high - x).clamp(max=eps))

    @property
    def half(self) -> Tensor:
        return (self.down + self.up) / 2


def _per_sample(norms: Tensor, like: Tensor) -> Tensor:
    return norms.view(-1, *[1] * (like.dim() - 1))


def _length(x: Tensor) -> Tensor:
    return _per_sample(x.flatten(1).norm(dim=1), x)


def _l2_offset(x: Tensor, eps: float, noise: Noise) -> Tensor:
    """A Gaussian direction of length eps * U(0, 1)."""
    direction, length = noise.normal(x), noise.uniform(x, len(x))
    return direction / _length(direction).clamp(min=TINY) * _per_sample(eps * length, x)


def _uniform_offset(x: Tensor, eps: float, box: Box, noise: Noise) -> Tensor:
    """Uniform in the clipped box of half-width eps."""
    reach = _Range.of(x, eps, box)
    return noise.uniform(x, *x.shape) * (reach.down + reach.up) - reach.down


def _start(x: Tensor, spec: RegionSpec, radius: float, attack: Attack, noise: Noise) -> Tensor:
    """The offset the attack starts from. The box start of l_2 (A6) lies outside the ball; the first projection brings it in."""
    if spec.norm == "linf" or (spec.norm == "l2" and not spec.ball and attack.l2_init == "box"):
        return _uniform_offset(x, radius, spec.box, noise)
    offset = _l2_offset(x, radius if spec.norm == "l2" else radius / math.sqrt(x[0].numel()), noise)
    if attack.l2_project == "accumulate" and not spec.ball:
        offset = 2 * offset  # the authors' code adds its random start twice
    return _clip(offset, _Range.of(x, radius, spec.box))


def _clip(offset: Tensor, reach: _Range) -> Tensor:
    return torch.minimum(torch.maximum(offset, -reach.down), reach.up)


def _ascend(offset: Tensor, grad: Tensor, x: Tensor, spec: RegionSpec, radius: float, size: float, attack: Attack) -> Tensor:
    """One step of the attack, as an offset from x that stays inside ball∩box (or its documented over-approximation)."""
    reach = _Range.of(x, radius, spec.box)
    if spec.norm == "linf":
        return _clip(offset + size * radius * grad.sign(), reach)
    if spec.norm == "l1":
        step = size * radius * _sparse_direction(grad, offset, reach)
        return project((offset + step).flatten(1), x.flatten(1), Ball("l1", radius), spec.box, steps=20).view_as(x)
    moved = offset + size * radius * grad / (_length(grad) + TINY)
    scale = radius / _length(moved).clamp(min=TINY)
    if attack.l2_project == "sphere" and not spec.ball:
        return _clip(moved * scale, reach)
    inside = moved * scale.clamp(max=1)
    if attack.l2_project == "accumulate" and not spec.ball:
        return _clip(offset + inside, reach)  # the authors' quirk: only the box bounds the iterate
    return _clip(inside, reach)


def _sparse_direction(grad: Tensor, offset: Tensor, reach: _Range) -> Tensor:
    """Unit l_1 direction on the strongest coordinates that can still move: steepest ascent in l_1 is sparse."""
    room = torch.where(grad > 0, reach.up - offset, reach.down + offset) > 0
    strength = (grad.abs() * room).flatten(1)
    keep = max(1, strength.shape[1] // 50)
    threshold = strength.topk(keep, dim=1).values[:, -1:]
    chosen = ((strength >= threshold) & (strength > 0)).to(grad.dtype)
    direction = chosen / chosen.sum(1, keepdim=True).clamp(min=1)
    return direction.view_as(grad) * grad.sign()


@dataclass
class _Best:
    """Keeps, per sample, the iterate of highest loss, or the latest misclassified one (A9: `returns: best`)."""

    offset: Tensor
    loss: Tensor

    def update(self, offset: Tensor, loss: Tensor, wrong: Tensor) -> None:
        better = (loss > self.loss) | wrong
        self.loss = torch.where(better, loss, self.loss)
        self.offset = torch.where(_per_sample(better, offset), offset, self.offset)


def _attack_radius(spec: RegionSpec) -> float:
    """A small ball of radius lambda*eps around a point of the (1-lambda)*eps ball stays inside the eps ball."""
    return (1 - spec.ratio) * spec.eps if spec.ball else spec.eps


def attack_offsets(
    logits: Callable[[Tensor], Tensor],
    xs: Sequence[Tensor],
    ys: Sequence[Tensor],
    specs: Sequence[RegionSpec],
    attack: Attack,
    noises: Sequence[Noise],
) -> list[Tensor]:
    """Where the attack of every spec ends, as offsets. `logits` is the network in evaluation mode; it is left untouched."""
    sizes = [len(x) for x in xs]
    radii = [_attack_radius(spec) for spec in specs]
    offsets = [_start(x, s, radius, attack, n) for x, s, radius, n in zip(xs, specs, radii, noises, strict=True)]
    x, y = torch.cat(list(xs)), torch.cat(list(ys))
    best = None
    if attack.returns == "best":
        loss = torch.full((len(x),), -torch.inf, device=x.device, dtype=x.dtype)
        best = _Best(torch.cat(offsets), loss)
    # The first iterate is outside the region only for the box start of l_2; it is then not eligible.
    eligible = torch.cat([torch.full((n,), not _starts_outside(s, attack), device=x.device) for n, s in zip(sizes, specs, strict=True)])
    constant = attack.l2_project == "accumulate"  # the authors' l_2 attack does not decay its step
    schedule = {
        "linf": step_sizes(attack.steps, attack.step),
        "l2": [attack.l2_step] * attack.steps if constant else step_sizes(attack.steps, attack.l2_step),
        "l1": step_sizes(attack.steps, attack.l2_step),
    }
    for t in range(attack.steps):
        z = (x + torch.cat(offsets)).requires_grad_()
        with torch.enable_grad():
            out = logits(z)
            loss = F.cross_entropy(out, y, reduction="none")
            (grad,) = torch.autograd.grad(loss.sum(), z)
        if best is not None:
            seen = torch.where(eligible, loss.detach(), -torch.inf) if t == 0 else loss.detach()
            wrong = (out.argmax(1) != y) & (eligible if t == 0 else torch.ones_like(eligible))
            best.update(torch.cat(offsets), seen, wrong)
        offsets = [
            _ascend(o, g, xi, s, radius, schedule[s.norm][t], attack)
            for o, g, xi, s, radius in zip(offsets, grad.split(sizes), xs, specs, radii, strict=True)
        ]
    if best is None:
        return offsets
    with torch.no_grad():
        final = torch.cat(offsets)
        out = logits(x + final)
        best.update(final, F.cross_entropy(out, y, reduction="none"), out.argmax(1) != y)
    return list(best.offset.split(sizes))


def _starts_outside(spec: RegionSpec, attack: Attack) -> bool:
    return spec.norm == "l2" and not spec.ball and attack.l2_init == "box"


def _box(x: Tensor, offset: Tensor, spec: RegionSpec, tau_mode: str) -> Region:
    """The small box around the attack's end, pushed inside the clipped full box (R1, R4)."""
    reach = _Range.of(x, spec.eps, spec.box)
    if tau_mode == "dimwise":
        tau = spec.ratio * reach.half
        moved = torch.minimum(torch.maximum(offset, tau - reach.down), reach.up - tau)
        return Region(x + moved, tau, "linf")
    tau = torch.full_like(x, spec.ratio * spec.eps)  # A5: one number, then clipped to the domain; where both ends bind the upper wins
    centre = x + torch.minimum(torch.maximum(offset, tau - reach.down), reach.up - tau)
    down, up = (torch.minimum(tau, room.clamp(min=0)) for room in (centre - spec.box.low, spec.box.high - centre))
    return Region(centre + (up - down) / 2, (up + down) / 2, "linf")


def build_regions(
    logits: Callable[[Tensor], Tensor],
    x: Tensor,
    y: Tensor,
    specs: Sequence[RegionSpec],
    attack: Attack,
    noises: Sequence[Noise],
) -> list[Region]:
    """One region per spec. Only those with 0 <= lambda < 1 need an attack; lambda = 1 is the full ball, lambda = 0 a point."""
    xs = [x if s.rows is None else x[s.rows] for s in specs]
    ys = [y if s.rows is None else y[s.rows] for s in specs]
    attacked = [i for i, s in enumerate(specs) if s.ratio < 1]
    ends: dict[int, Tensor] = {}
    if attacked:
        some_x, some_y, some_specs, some_noise = zip(*((xs[i], ys[i], specs[i], noises[i]) for i in attacked), strict=True)
        found = attack_offsets(logits, some_x, some_y, some_specs, attack, some_noise)
        ends = dict(zip(attacked, found, strict=True))
    regions = []
    for i, (spec, xi) in enumerate(zip(specs, xs, strict=True)):
        if spec.ball:
            centre = xi + ends[i] if i in ends else xi
            regions.append(Region(centre.detach(), xi.new_full((len(xi),), spec.ratio * spec.eps), spec.norm))
        elif spec.ratio < 1:
            regions.append(_box(xi, ends[i].detach(), spec, attack.tau_mode))
        else:
            reach = _Range.of(xi, spec.eps, spec.box)
            regions.append(Region(xi + (reach.up - reach.down) / 2, reach.half, "linf"))
    return regions
