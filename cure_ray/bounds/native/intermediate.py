"""Bounds of the hidden layers by backward passes: only for (sample, neuron) pairs the intervals leave unstable.

Neurons of convolutions go back on their windows, all others as whole rows. Chunked to a number of coefficients, so memory is
bounded whatever the network. Every result is intersected with the interval bounds.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from cure_ray.bounds.native.affine import Affine
from cure_ray.bounds.native.compiled import Compiled
from cure_ray.bounds.native.coupled import CoupledRows, dense_rows
from cure_ray.bounds.native.coupled import evaluate as evaluate_coupled
from cure_ray.bounds.native.coupled_ascent import ascend, start
from cure_ray.bounds.native.domain import Domain
from cure_ray.bounds.native.linear import enclose, evaluate, usual_slopes
from cure_ray.bounds.native.optimized import optimise
from cure_ray.bounds.native.relaxation import LayerBounds, Relaxation, interval_bounds, interval_layer
from cure_ray.bounds.native.windows import WindowRows, gather_rows, row_elements, vertex_elements, windows_pay

LOOSE = 0.4  # share of a layer's neurons that intervals leave unstable, from which on an enclosure pays


def crown_bounds(net: Compiled, domain: Domain, elements: int) -> list[LayerBounds]:
    """Sparse CROWN: every hidden layer, cheapest slopes first. `elements` is the number of coefficients held at once."""
    bounds = interval_bounds(net, domain)[:1]
    relaxations = [Relaxation.of(b) for b in bounds]
    for k in range(1, net.hidden):
        rows = Rows(net, k, relaxations, interval_layer(net.layers[k], bounds[-1], net.gamma), domain)
        unstable_BN = rows.bounds.unstable()
        # What an enclosure makes stable, as most where intervals decide little, needs no CROWN; vertices make it stable themselves.
        if not windows_pay(net, k) and not domain.has_vertices:
            rows.enclose(unstable_BN & (unstable_BN.double().mean(1, keepdim=True) >= LOOSE), elements)
        rows.crown(rows.bounds.unstable(), elements)
        if domain.threat.norm == "l2":
            # Ball∩box makes adaptive slopes flip, so that a smaller set can give a looser bound; slope 0 is the safety net.
            rows.crown(rows.bounds.unstable(), elements, zero=True)
        bounds.append(rows.bounds)
        relaxations.append(Relaxation.of(rows.bounds))
    return bounds


def optimised_bounds(
    search: Compiled,
    decide: Compiled,
    domain: Domain,
    elements: int,
    iterations: int,
    known: Sequence[LayerBounds] | None = None,
    which: Sequence[Tensor] | None = None,
) -> list[LayerBounds]:
    """Layer-wise alpha-CROWN: slopes are searched for in the precision of `search`; the bounds are those of `decide` with them.

    Layer-wise instead of joint: each row has its own slopes, and an order of magnitude less work for the same tightness.
    `known` are proven bounds to begin with: CROWN's, which is then not repeated. `which` are the neurons to optimise, all without it.
    """
    exact = domain.to(decide.layers[0].weight.dtype)
    quick = domain.to(search.layers[0].weight.dtype)
    bounds = interval_bounds(decide, exact)[:1]
    for k in range(1, search.hidden):
        proven = Rows(decide, k, [Relaxation.of(b) for b in bounds], interval_layer(decide.layers[k], bounds[-1], decide.gamma), exact)
        if known is not None:
            proven.bounds = proven.bounds.tightened(known[k].lower_BN, known[k].upper_BN)
        low = [b.to(quick.x_BN.dtype) for b in [*bounds, proven.bounds]]
        tried = Rows(search, k, [Relaxation.of(b) for b in low[:-1]], low[-1], quick)
        hard_BN = unstable_BN = proven.bounds.unstable()
        if known is None:
            tried.crown(unstable_BN, elements)
            hard_BN = unstable_BN & ~(tried.bounds.lower_BN >= 0) & ~(tried.bounds.upper_BN <= 0)
            proven.crown(unstable_BN & ~hard_BN, elements // 2)
        if which is not None:
            hard_BN = hard_BN & which[k]
        tried.optimise(hard_BN, elements // 4, iterations, proven)
        bounds.append(proven.bounds)
    return bounds


class Rows:
    """Layer k of a network over a batch, with bounds that only ever tighten."""

    def __init__(self, net: Compiled, k: int, relaxations: Sequence[Relaxation], bounds: LayerBounds, domain: Domain) -> None:
        self.net, self.k, self.relaxations, self.bounds, self.domain = net, k, relaxations, bounds, domain

    def enclose(self, mask_BN: Tensor, elements: int) -> None:
        """Both ends of the neurons in the mask by one pass with parallel lines, half of CROWN's price or less."""
        layer = self.net.layers[self.k]
        for samples, neuron_GS in dense_groups(mask_BN, max(1, elements // (2 * row_elements(self.net, self.k)))):
            relaxations, domain = [r.select(samples) for r in self.relaxations], self.domain.select(samples)
            low_GS, high_GS = enclose(self.net.layers[: self.k], relaxations, domain, layer_rows(layer, neuron_GS), self.net.gamma)
            guard_GS = self._guard(samples, neuron_GS)
            self._keep(samples.unsqueeze(1).expand_as(neuron_GS), neuron_GS, low_GS - guard_GS, high_GS + guard_GS)

    def crown(self, mask_BN: Tensor, elements: int, zero: bool = False) -> None:
        """Plain CROWN for the neurons in the mask with the usual slopes, or with zero slopes."""
        for samples, neurons in self._chunks(mask_BN, elements):
            if neurons.dim() == 1:
                rows = self._gather(samples, neurons)
                slopes = rows.initial_slopes()
                slopes = rows.with_slopes([torch.zeros_like(a) for a in slopes]) if zero else slopes
                value = rows.evaluate(slopes)[0]
                self._keep(samples, neurons, value[0], -value[1])
            else:
                relaxations = [r.select(samples) for r in self.relaxations]
                A_BSN, b_BS, guard_BS = self._start(samples, neurons)
                layers, domain = self.net.layers[: self.k], self.domain.select(samples)
                slopes = usual_slopes(relaxations, domain)
                if zero:
                    slopes = [r.lower_slope(torch.zeros_like(r.active_BN)) for r in relaxations]
                value_BS = evaluate(layers, relaxations, domain, (A_BSN, b_BS), slopes, self.net.gamma).value_BS
                self._keep_dense(samples, neurons, value_BS - guard_BS)

    def optimise(self, mask_BN: Tensor, elements: int, iterations: int, proven: "Rows") -> None:
        """Search slopes for the neurons in the mask and hand them to `proven`, which evaluates and keeps the bounds.

        With balls also coefficients and multipliers: in so few steps neither ascent finds what the other does, and both are kept."""
        for samples, neurons in self._chunks(mask_BN, elements):
            if self.domain.balls:
                tried = self._coupled(samples, neurons)
                _, choice, _ = ascend(tried, start(tried), iterations, rate=0.25, decay=0.9)
                del tried
                value = evaluate_coupled(proven._coupled(samples, neurons), choice.to(proven.domain.x_BN.dtype))[0]
                if neurons.dim() == 1:
                    proven._keep(samples, neurons, value[0], -value[1])
                else:
                    proven._keep_dense(samples, neurons, value)
            if neurons.dim() == 1:
                rows = self._gather(samples, neurons)
                _, alphas = rows.optimise(iterations)
                del rows
                checked = proven._gather(samples, neurons)
                dtype = checked.b_2R.dtype
                value, _ = checked.evaluate(checked.with_slopes([a.to(dtype) for a in alphas]))
                proven._keep(samples, neurons, value[0], -value[1])
            else:
                relaxations = [r.select(samples) for r in self.relaxations]
                A_BSN, b_BS, _ = self._start(samples, neurons)
                domain = self.domain.select(samples)
                _, alphas = optimise(self.net.layers[: self.k], relaxations, domain, A_BSN, b_BS, iterations)
                relaxations = [r.select(samples) for r in proven.relaxations]
                A_BSN, b_BS, guard_BS = proven._start(samples, neurons)
                slopes = [r.lower_slope(a.to(A_BSN.dtype)) for r, a in zip(relaxations, alphas, strict=True)]
                layers, domain = proven.net.layers[: self.k], proven.domain.select(samples)
                value_BS = evaluate(layers, relaxations, domain, (A_BSN, b_BS), slopes, proven.net.gamma).value_BS
                proven._keep_dense(samples, neurons, value_BS - guard_BS)

    def _gather(self, samples: Tensor, neurons: Tensor) -> WindowRows:
        """Rows on their windows. Samples come in order, and only the images from the first to the last are laid out for it."""
        first, last = int(samples[0]), int(samples[-1]) + 1
        some = torch.arange(first, last, device=samples.device)
        relaxations, bounds = [r.select(some) for r in self.relaxations], self.bounds.select(some)
        return gather_rows(self.net, self.k, relaxations, bounds, self.domain.select(some), samples - first, neurons)

    def _coupled(self, samples: Tensor, neurons: Tensor) -> CoupledRows:
        """The rows of a chunk, ready for coupled bounds; what rounding took before the pass is charged."""
        if neurons.dim() == 1:
            return self._gather(samples, neurons).coupled()
        A_BSN, b_BS, guard_BS = self._start(samples, neurons)
        relaxations, domain = [r.select(samples) for r in self.relaxations], self.domain.select(samples)
        return dense_rows(self.net.layers[: self.k], relaxations, domain, A_BSN, b_BS - guard_BS, self.net.gamma)

    def _chunks(self, mask_BN: Tensor, elements: int) -> Iterator[tuple[Tensor, Tensor]]:
        """(sample_R, neuron_R) for windows, (sample_G, neuron_GS) for whole rows."""
        limit = max(1, elements // (2 * row_elements(self.net, self.k)))
        if windows_pay(self.net, self.k):
            if self.domain.has_vertices:
                # Vertices are written once and read once, coefficients many times.
                limit = max(1, elements // (2 * row_elements(self.net, self.k) + vertex_elements(self.net, self.k) // 4))
            sample_R, neuron_R = mask_BN.nonzero(as_tuple=True)
            if len(sample_R) == 0:
                return
            yield from zip(sample_R.split(limit), neuron_R.split(limit), strict=True)
        else:
            yield from dense_groups(mask_BN, limit)

    def _start(self, samples: Tensor, neuron_GS: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Rows +z and -z, [G, 2S, N] on the post-activations below; their constants; and the rounding of both."""
        A_GSN, b_GS = layer_rows(self.net.layers[self.k], neuron_GS)
        guard_GS = self._guard(samples, neuron_GS)
        return torch.cat([A_GSN, -A_GSN], 1), torch.cat([b_GS, -b_GS], 1), torch.cat([guard_GS, guard_GS], 1)

    def _guard(self, samples: Tensor, neuron_GS: Tensor) -> Tensor:
        """The rounding of rows before they begin their pass. Those of a matrix are read from it, which loses nothing to float32."""
        scale_GS, layer = torch.gather(self.bounds.scale_BN[samples], 1, neuron_GS), self.net.layers[self.k]
        return (4 * self.net.gamma + (layer.lost if layer.is_conv else 0.0)) * scale_GS

    def _keep(self, samples: Tensor, neurons: Tensor, lower_R: Tensor, upper_R: Tensor) -> None:
        lower_BN, upper_BN = self.bounds.lower_BN.clone(), self.bounds.upper_BN.clone()
        lower_BN[samples, neurons] = torch.maximum(lower_BN[samples, neurons], lower_R)
        upper_BN[samples, neurons] = torch.minimum(upper_BN[samples, neurons], upper_R)
        self.bounds = replace(self.bounds, lower_BN=lower_BN, upper_BN=upper_BN)

    def _keep_dense(self, samples: Tensor, neuron_GS: Tensor, value_G2S: Tensor) -> None:
        S = neuron_GS.shape[1]
        rows = samples.unsqueeze(1).expand_as(neuron_GS)
        self._keep(rows, neuron_GS, value_G2S[:, :S], -value_G2S[:, S:])


def layer_rows(layer: Affine, neuron_GS: Tensor) -> tuple[Tensor, Tensor]:
    """The coefficients of single neurons on the inputs of their layer, [G, S, N], and their biases."""
    if not layer.is_conv:
        return layer.weight[neuron_GS], layer.bias_N[neuron_GS]
    G, S = neuron_GS.shape
    one_hot = torch.zeros(G * S, layer.outputs, dtype=layer.weight.dtype, device=layer.weight.device)
    one_hot.scatter_(1, neuron_GS.reshape(-1, 1), 1.0)
    return layer.transpose(one_hot).view(G, S, -1), layer.bias_N[neuron_GS]


def dense_groups(mask_BN: Tensor, limit: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Samples with similar counts share a group of at most `limit` rows, padded with neurons outside the mask (harmless)."""
    count_B = mask_BN.sum(1)
    order = count_B.argsort(descending=True)
    order = order[count_B[order] > 0]
    counts = count_B[order].tolist()
    start = 0
    while start < len(counts):
        most = counts[start]
        end = start + 1
        while end < len(counts) and counts[end] * 2 >= most and (end + 1 - start) * most <= limit:
            end += 1
        samples = order[start:end]
        neuron_GS = mask_BN[samples].to(torch.int8).argsort(dim=1, descending=True, stable=True)[:, :most]
        for part in neuron_GS.split(max(1, limit // len(samples)), dim=1):
            yield samples, part
        start = end
