"""Sub-problems of branch and bound: compact rows over the unstable neurons of a sample, and their bounds."""

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
        self.sizes, self.carried = [b.lower_BN.shape[1] for b in bounds], [b.carried_N for b in bounds]
        self.lower_BN = torch.cat([b.lower_BN for b in bounds], 1)
        self.upper_BN = torch.cat([b.upper_BN for b in bounds], 1)
        self.scale_BN = torch.cat([b.scale_BN for b in bounds], 1)
        self.A_BSN, b_BS, guard_BS = start_rows(net, C_BSK.to(dtype))
        reach_BN = bounds[-1].reach()
        # The rounding of the rows handed to `evaluate` is charged here, once.
        self.b_BS = b_BS - 4 * net.gamma * (guard_BS + start_magnitude(net, C_BSK.to(dtype), reach_BN))

    def value(self, nodes: Nodes) -> Tensor:
        """The bounds [D] of sub-problems with the slopes and multipliers they hold."""
        dtype = self.lower_BN.dtype
        if self.domain.balls:
            rows = self.coupled(nodes)
            return evaluate_coupled(rows, self.choice(nodes))[0][:, 0]
        alpha_DU, beta_DU = nodes.alpha_DU.to(dtype), nodes.beta_DU.to(dtype)
        return self.bound(nodes.sample_D, nodes.spec_D, nodes.split_DU, alpha_DU, beta_DU)[0].value_BS[:, 0]

    def coupled(self, nodes: Nodes) -> CoupledRows:
        """Rows [D, 1, N] for coupled bounds: a split cuts the range of its neuron and changes nothing else."""
        relaxations = self.relaxations(nodes.sample_D, nodes.split_DU)
        split_DN = self._spread(nodes.sample_D, nodes.split_DU, torch.zeros_like(self.lower_BN[nodes.sample_D]))
        A_D1N, b_D1 = self.A_BSN[nodes.sample_D, nodes.spec_D].unsqueeze(1), self.b_BS[nodes.sample_D, nodes.spec_D].unsqueeze(1)
        rows = dense_rows(self.net.layers[:-1], relaxations, self.domain.select(nodes.sample_D), A_D1N, b_D1, self.net.gamma)
        return with_splits(rows, [s.unsqueeze(1) for s in split_DN.split(self.sizes, 1)])

    def choice(self, nodes: Nodes) -> Choice:
        """What sub-problems hold, spread over the layers."""
        zeros_DN = torch.zeros_like(self.lower_BN[nodes.sample_D])
        extras = [t.unsqueeze(1) for t in self._spread(nodes.sample_D, nodes.beta_DU, zeros_DN).split(self.sizes, 1)]
        return Choice(extras, [t.view(-1, 1, 1) for t in nodes.price_DL.to(zeros_DN.dtype).unbind(1)])

    def _spread(self, sample_D: Tensor, values_DU: Tensor, base_DN: Tensor) -> Tensor:
        """Write compact values over a dense base; the padding of U falls into an extra column that is cut off."""
        wide = F.pad(base_DN, (0, 1))
        return wide.scatter(1, self.index_BU[sample_D], values_DU.to(base_DN.dtype))[:, :-1]

    def gather(self, sample_D: Tensor, dense: list[Tensor]) -> Tensor:
        wide = F.pad(torch.cat([t.flatten(1) for t in dense], 1), (0, 1))
        return wide.gather(1, self.index_BU[sample_D])

    def relaxations(self, sample_D: Tensor, split_DU: Tensor) -> list[Relaxation]:
        lower_DN, upper_DN = self.lower_BN[sample_D], self.upper_BN[sample_D]
        split_DN = self._spread(sample_D, split_DU, torch.zeros_like(lower_DN))
        lower_DN = torch.where(split_DN > 0, lower_DN.clamp_min(0), lower_DN)
        upper_DN = torch.where(split_DN < 0, upper_DN.clamp_max(0), upper_DN)
        parts = zip(*(t.split(self.sizes, 1) for t in (lower_DN, upper_DN, self.scale_BN[sample_D])), self.carried, strict=True)
        return [Relaxation.of(LayerBounds(lower, upper, scale, carried)) for lower, upper, scale, carried in parts]

    def bound(
        self,
        sample_D: Tensor,
        spec_D: Tensor,
        split_DU: Tensor,
        alpha_DU: Tensor,
        beta_DU: Tensor,
        trace: bool = False,
        relaxations: list[Relaxation] | None = None,
    ) -> tuple[Evaluation, list[Relaxation]]:
        relaxations = self.relaxations(sample_D, split_DU) if relaxations is None else relaxations
        zeros_DN = torch.zeros_like(self.lower_BN[sample_D])
        alpha = self._spread(sample_D, alpha_DU.clamp(0, 1), zeros_DN).split(self.sizes, 1)
        # z >= 0 is relaxed by -beta z, z <= 0 by +beta z: both are <= 0 on the sub-problem, so they only lower the value there.
        force_DU = -split_DU.to(beta_DU.dtype) * beta_DU.clamp_min(0)
        force = [t.unsqueeze(1) for t in self._spread(sample_D, force_DU, zeros_DN).split(self.sizes, 1)]
        slopes = [r.lower_slope(a).unsqueeze(1) for r, a in zip(relaxations, alpha, strict=True)]
        A_D1N, b_D1 = self.A_BSN[sample_D, spec_D].unsqueeze(1), self.b_BS[sample_D, spec_D].unsqueeze(1)
        rows, domain = (A_D1N, b_D1), self.domain.select(sample_D)
        found = evaluate(self.net.layers[:-1], relaxations, domain, rows, slopes, self.net.gamma, force, trace)
        return found, relaxations


def unstable_index(bounds: list[LayerBounds]) -> Tensor:
    """[B, U]: the unstable neurons of every sample over all layers, padded with N (one past the last)."""
    mask_BN = torch.cat([b.unstable() for b in bounds], 1)
    N = mask_BN.shape[1]
    width = max(1, int(mask_BN.sum(1).max()))
    order_BU = mask_BN.to(torch.int8).argsort(dim=1, descending=True, stable=True)[:, :width]
    return torch.where(mask_BN.gather(1, order_BU), order_BU, torch.full_like(order_BU, N))
