"""Open sub-problems of branch and bound: their rows, and the pool in which they wait for their turn."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor


@dataclass(eq=False)
class Nodes:
    """Sub-problems, one row each; U runs over the unstable neurons of the sample (padded)."""

    bound_D: Tensor
    sample_D: Tensor
    spec_D: Tensor
    split_DU: Tensor  # int8: +1 z >= 0, -1 z <= 0, 0 open
    alpha_DU: Tensor
    beta_DU: Tensor  # multipliers of splits; with balls what is added to the coefficients
    price_DL: Tensor  # with balls: the multiplier of every layer's ball
    candidate_DK: Tensor  # neurons to try, into U; -1 where there is none
    plain_D: Tensor  # bool: bounded by slopes and split multipliers, not with balls

    def select(self, index: Tensor) -> "Nodes":
        return Nodes(*(getattr(self, f.name)[index] for f in fields(self)))

    @staticmethod
    def joined(parts: "Sequence[Nodes]") -> "Nodes":
        return Nodes(*(torch.cat([getattr(part, f.name) for part in parts]) for f in fields(Nodes)))

    def by_kind(self) -> "tuple[Nodes, Nodes, Tensor]":
        """Those bounded plainly, those bounded with balls, and where each row of both together has gone."""
        index = torch.cat([self.plain_D.nonzero(as_tuple=True)[0], (~self.plain_D).nonzero(as_tuple=True)[0]])
        count = int(self.plain_D.sum())
        return self.select(index[:count]), self.select(index[count:]), index.argsort()

    def parts(self, size: int) -> "Iterator[Nodes]":
        for start in range(0, len(self), size):
            yield self.select(torch.arange(start, min(start + size, len(self)), device=self.bound_D.device))

    def __len__(self) -> int:
        return len(self.bound_D)


class Pool:
    """Nodes under way. Rows are written once into slots and read once, so that a step costs what it works on, not what waits."""

    def __init__(self, like: Nodes) -> None:
        self._rows = like.select(torch.zeros(0, dtype=torch.long, device=like.bound_D.device))
        self._used = self._free = torch.zeros(0, dtype=torch.long, device=like.bound_D.device)

    def __len__(self) -> int:
        return len(self._used)

    def bounds(self) -> Tensor:
        return self._rows.bound_D[self._used]

    def samples(self) -> Tensor:
        return self._rows.sample_D[self._used]

    def add(self, nodes: Nodes) -> None:
        if len(nodes) > len(self._free):
            self._grow(max(len(nodes), len(self._rows)))
        slots, self._free = self._free[: len(nodes)], self._free[len(nodes) :]
        for f in fields(nodes):
            getattr(self._rows, f.name)[slots] = getattr(nodes, f.name)
        self._used = torch.cat([self._used, slots])

    def take(self, index: Tensor) -> Nodes:
        """Remove these nodes (numbers as in `bounds()`) and return their rows."""
        slots = self._used[index]
        keep_D = torch.ones_like(self._used, dtype=torch.bool)
        keep_D[index] = False
        self._free = torch.cat([self._free, slots])
        self._used = self._used[keep_D]
        return self._rows.select(slots)

    def _grow(self, more: int) -> None:
        old = len(self._rows)
        for f in fields(self._rows):
            rows = getattr(self._rows, f.name)
            setattr(self._rows, f.name, torch.cat([rows, rows.new_zeros(more, *rows.shape[1:])]))
        self._free = torch.cat([self._free, torch.arange(old, old + more, device=self._free.device)])
