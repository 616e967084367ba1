"""Sub-problems of branch and bound: compact rows over the unstable neurons of a sample, and their bounds."""

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from cure_ray.bounds.native.compiled import Compiled
from cure_ray.bounds.native.coupled import Choice, CoupledRows, dense_rows, with_splits
from cure_ray.bounds.native.coupled import evaluate as evaluate_coupled
from cure_ray.bounds.native.domain import Domain
from cure_ray.bounds.native.linear import Evaluation, evaluate
from cure_ray.bounds.native.nodes import Nodes
from cure_ray.bounds.native.relaxation import LayerBounds, Relaxation, start_magnitude, start_rows


class Space:
    """Sub-problems of a batch of samples in one precision.

    Only unstable neurons are stored per sub-problem (a CNN7 has 176 thousand neurons, a sample a few hundred unstable ones);
    they are spread over the dense layers while a batch is being bounded.
    """

    def __init__(self, net: Compiled, domain: Domain, bounds: list[LayerBounds], C_BSK: Tensor, index_BU: Tensor) -> None:
        dtype = net.layers[0].weight.dtype
        self.net, self.domain, self.index_BU = net, domain.to(dtype), index_BU
        bounds = [b.to(dtype) for b in bounds]
        self.sizes = [b.lower_BN.shape[1] for b in bounds]
        self.lower_BN = torch.cat([b.lower_BN for b in bounds], 1)
        self.upper_BN = torch.cat([b.upper_BN for b in bounds], 1)
        self.scale_BN = torch.cat([b.scale_BN for b in bounds], 1)
        # What a split does not change is made once; the padding of U falls into an extra column.
        of_layers = zip(*(Relaxation.of(b).tensors() for b in bounds), strict=True)
        self.wide = Relaxation(*(F.pad(torch.cat(tensors, 1), (0, 1)) for tensors in of_layers))
        self.compact = Relaxation(*(t.gather(1, index_BU) for t in self.wide.tensors()))
        self.alone = replace(self.domain, balls=())
        self.A_BSN, b_BS, guard_BS = start_rows(net, C_BSK.to(dtype))
        reach_BN = bounds[-1].reach()
        # The rounding of the rows handed to `evaluate` is charged here, once.
        self.b_BS = b_BS - 4 * net.gamma * (guard_BS + start_magnitude(net, C_BSK.to(dtype), reach_BN))

    def value(self, nodes: Nodes) -> Tensor:
        """The bounds [D] of sub-problems with the slopes and multipliers they hold."""
        plain, coupled, back_D = nodes.by_kind()
        values = []
        if len(plain):
            alpha_DU, beta_DU = (t.to(self.lower_BN.dtype) for t in (plain.alpha_DU, plain.beta_DU))
            values.append(self.bound(self.frame(plain), alpha_DU, beta_DU).value_BS[:, 0])
        if len(coupled):
            values.append(evaluate_coupled(self.coupled(coupled), self.choice(coupled))[0][:, 0])
        return torch.cat(values)[back_D] if values else self.b_BS.new_zeros(0)

    def without_balls(self, nodes: Nodes) -> Nodes:
        """The same sub-problems, to be bounded plainly, beginning with CROWN's slopes and no multipliers."""
        alpha_DU = self.compact.adaptive_BN[nodes.sample_D].to(nodes.alpha_DU.dtype)
        return replace(nodes, alpha_DU=alpha_DU, beta_DU=torch.zeros_like(nodes.beta_DU), plain_D=torch.ones_like(nodes.plain_D))

    def coupled(self, nodes: Nodes) -> CoupledRows:
        """Rows [D, 1, N] for coupled bounds: a split cuts the range of its neuron and changes nothing else."""
        relaxations = self.relaxations(nodes.sample_D, self.relaxed(nodes.sample_D, nodes.split_DU))
        splits = self._spread(nodes.sample_D, nodes.split_DU)
        A_D1N, b_D1 = self.A_BSN[nodes.sample_D, nodes.spec_D].unsqueeze(1), self.b_BS[nodes.sample_D, nodes.spec_D].unsqueeze(1)
        rows = dense_rows(self.net.layers[:-1], relaxations, self.domain.select(nodes.sample_D), A_D1N, b_D1, self.net.gamma)
        return with_splits(rows, [s.unsqueeze(1) for s in splits])

    def choice(self, nodes: Nodes) -> Choice:
        """What sub-problems hold, spread over the layers."""
        extras = [t.unsqueeze(1) for t in self._spread(nodes.sample_D, nodes.beta_DU)]
        return Choice(extras, [t.view(-1, 1, 1) for t in nodes.price_DL.to(self.lower_BN.dtype).unbind(1)])

    def _spread(self, sample_D: Tensor, values_DU: Tensor) -> list[Tensor]:
        """Compact values in their places of dense layers, [D, N] each, and 0 elsewhere."""
        wide_DN = self.lower_BN.new_zeros(len(sample_D), self.lower_BN.shape[1] + 1)
        return self._layers(wide_DN.scatter_(1, self.index_BU[sample_D], values_DU.to(wide_DN.dtype)))

    def _layers(self, wide_DN: Tensor) -> list[Tensor]:
        return list(wide_DN.split([*self.sizes, 1], 1)[:-1])

    def gather(self, sample_D: Tensor, dense: list[Tensor]) -> Tensor:
        flat = [t.flatten(1) for t in dense]
        return torch.cat([*flat, torch.zeros_like(flat[0][:, :1])], 1).gather(1, self.index_BU[sample_D])

    def relaxed(self, sample_D: Tensor, split_DU: Tensor) -> Relaxation:
        """The unstable neurons of sub-problems, compact: a split neuron is one that is on, or off."""
        c = self.compact.select(sample_D)
        split, on, off = split_DU != 0, split_DU > 0, split_DU < 0
        one_DU = on.to(c.active_BN.dtype)
        active, slope, adaptive = (torch.where(split, one_DU, t) for t in (c.active_BN, c.upper_slope_BN, c.adaptive_BN))
        intercept = c.upper_intercept_BN.masked_fill(split, 0.0)
        lower = torch.where(on, c.lower_BN.clamp_min(0), c.lower_BN)
        upper = torch.where(off, c.upper_BN.clamp_max(0), c.upper_BN)
        return Relaxation(c.unstable_BN & ~split, active, slope, intercept, adaptive, c.scale_BN, lower, upper)

    def relaxations(self, sample_D: Tensor, relaxed: Relaxation) -> list[Relaxation]:
        """The same over whole layers."""
        index_DU, wide = self.index_BU[sample_D], self.wide.select(sample_D)
        for into, new in zip(wide.tensors(), relaxed.tensors(), strict=True):
            into.scatter_(1, index_DU, new)
        return [Relaxation(*layer) for layer in zip(*(self._layers(t) for t in wide.tensors()), strict=True)]

    def frame(self, nodes: Nodes) -> "Frame":
        relaxed = self.relaxed(nodes.sample_D, nodes.split_DU)
        rows = self.A_BSN[nodes.sample_D, nodes.spec_D].unsqueeze(1), self.b_BS[nodes.sample_D, nodes.spec_D].unsqueeze(1)
        relaxations, domain = self.relaxations(nodes.sample_D, relaxed), self.alone.select(nodes.sample_D)
        sign_DU = nodes.split_DU.to(self.lower_BN.dtype)
        return Frame(nodes.sample_D, sign_DU, relaxed, relaxations, self.wide.active_BN[nodes.sample_D], domain, rows)

    def bound(self, frame: "Frame", alpha_DU: Tensor, beta_DU: Tensor, trace: bool = False) -> Evaluation:
        relaxed, index_DU = frame.relaxed, self.index_BU[frame.sample_D]
        slope_DU = torch.where(relaxed.unstable_BN, alpha_DU.clamp(0, 1), relaxed.active_BN)
        slopes = [t.unsqueeze(1) for t in self._layers(frame.active_DN.scatter(1, index_DU, slope_DU))]
        # z >= 0 is relaxed by -beta z, z <= 0 by +beta z: both are <= 0 on the sub-problem, so they only lower the value there.
        force_DU = -frame.sign_DU * beta_DU.clamp_min(0)
        force = [t.unsqueeze(1) for t in self._spread(frame.sample_D, force_DU)]
        return evaluate(self.net.layers[:-1], frame.relaxations, frame.domain, frame.rows, slopes, self.net.gamma, force, trace)


@dataclass(frozen=True, eq=False)
class Frame:
    """What the bounds of some sub-problems share, whatever their slopes and multipliers."""

    sample_D: Tensor
    sign_DU: Tensor  # of the splits
    relaxed: Relaxation  # compact
    relaxations: list[Relaxation]
    active_DN: Tensor  # of the root, with the extra column
    domain: Domain
    rows: tuple[Tensor, Tensor]


def unstable_index(bounds: list[LayerBounds]) -> Tensor:
    """[B, U]: the unstable neurons of every sample over all layers, padded with N (one past the last)."""
    mask_BN = torch.cat([b.unstable() for b in bounds], 1)
    N = mask_BN.shape[1]
    width = max(1, int(mask_BN.sum(1).max()))
    order_BU = mask_BN.to(torch.int8).argsort(dim=1, descending=True, stable=True)[:, :width]
    return torch.where(mask_BN.gather(1, order_BU), order_BU, torch.full_like(order_BU, N))
