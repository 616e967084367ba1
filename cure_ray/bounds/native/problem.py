"""What the native engine keeps of a batch between stages."""

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from cure_ray.bounds.native.compiled import Compiled
from cure_ray.bounds.native.domain import Domain
from cure_ray.bounds.native.relaxation import LayerBounds


@dataclass(eq=False)
class NativeProblem:
    """Samples under one threat. Everything stored is in float64, so whatever a later stage finds here is proven."""

    domain: Domain
    y_B: Tensor
    usable_B: Tensor  # False where a pixel is NaN or infinite: such samples get NaN margins
    about: Compiled  # the network that everything here is proven of
    known: list[LayerBounds] | None = None  # hidden bounds that CROWN has proven, their sizes as its own products need them
    bounds: list[LayerBounds] | None = None
    margins_BS: Tensor | None = None
    slopes: list[Tensor] = field(default_factory=list)  # [B, S, N] float16, where branch and bound starts
    extras: list[Tensor] = field(default_factory=list)  # with balls, [B, S, N] float32: what is added to the coefficients
    prices: list[Tensor] = field(default_factory=list)  # with balls, [B, S, 1] float32: their multipliers

    @property
    def size(self) -> int:
        return len(self.y_B)

    def select(self, index: Tensor) -> "NativeProblem":
        index = index.to(self.y_B.device)
        return replace(
            self,
            domain=self.domain.select(index),
            y_B=self.y_B[index],
            usable_B=self.usable_B[index],
            known=None if self.known is None else [b.select(index) for b in self.known],
            bounds=None if self.bounds is None else [b.select(index) for b in self.bounds],
            margins_BS=None if self.margins_BS is None else self.margins_BS[index],
            slopes=[s[index] for s in self.slopes],
            extras=[s[index] for s in self.extras],
            prices=[s[index] for s in self.prices],
        )


def visible(margins_BS: Tensor | None) -> Tensor:
    """NaN for the whole sample as soon as one of its margins is not finite."""
    assert margins_BS is not None
    finite_B1 = torch.isfinite(margins_BS).all(1, keepdim=True)
    return torch.where(finite_B1, margins_BS, torch.full_like(margins_BS, torch.nan))


def joined(size: int, parts: list[tuple[Tensor, Tensor]]) -> Tensor:
    """The rows of the parts where their indices say; NaN elsewhere."""
    like = parts[0][1]
    whole = torch.full((size, *like.shape[1:]), torch.nan, dtype=like.dtype, device=like.device)
    for index, part in parts:
        whole[index] = part
    return whole


def joined_bounds(size: int, parts: list[tuple[Tensor, list[LayerBounds]]]) -> list[LayerBounds]:
    whole = []
    for k, first in enumerate(parts[0][1]):
        lower, upper, scale = (joined(size, [(i, getattr(b[k], n)) for i, b in parts]) for n in ("lower_BN", "upper_BN", "scale_BN"))
        whole.append(LayerBounds(lower, upper, scale, first.carried_N))
    return whole


def store(problem: NativeProblem, parts: list[tuple[Tensor, NativeProblem]]) -> None:
    """Gather the hidden bounds, margins and slopes of the batches back into the problem; unusable samples hold NaN."""
    if not parts:
        return
    problem.bounds = joined_bounds(problem.size, [(i, part.bounds or []) for i, part in parts])
    problem.margins_BS = joined(problem.size, [(i, visible(part.margins_BS)) for i, part in parts])
    for name in ("slopes", "extras", "prices"):
        lists = [[(i, t) for t in getattr(part, name)] for i, part in parts]
        setattr(problem, name, [joined(problem.size, list(tensors)) for tensors in zip(*lists, strict=True)])
