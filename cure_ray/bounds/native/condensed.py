"""Sub-problems on the network as one sample sees it: stable neurons are linear on its domain, so only the unstable ones stay.

Layers of thousands of neurons become layers of a few hundred: what an unstable neuron reads of the image, or of unstable neurons
further down, through all that is linear in between, is one matrix. For searching only: whatever is found on the condensed network
is evaluated on the whole one before it decides anything.
"""

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from cure_ray.bounds.native.affine import Affine
from cure_ray.bounds.native.climbing import bounded
from cure_ray.bounds.native.compiled import Compiled
from cure_ray.bounds.native.domain import Domain, LayerBall
from cure_ray.bounds.native.nodes import Nodes
from cure_ray.bounds.native.relaxation import LayerBounds, Relaxation
from cure_ray.bounds.native.subproblems import Space
from cure_ray.bounds.native.vertices import vertex_numbers


class Apart:
    """Sub-problems of a batch of samples, those of each sample for themselves, on its condensed network where that is the smaller.

    Spaces are made when the first sub-problem of their sample comes; `room` is how many coefficients they may keep in all. Where proofs
    are decided no network is condensed."""

    def __init__(self, net: Compiled, domain: Domain, bounds: list[LayerBounds], C_BSK: Tensor, index_BU: Tensor, room: int = 0) -> None:
        dtype = net.layers[0].weight.dtype
        self.net, self.domain, self.C_BSK, self.index_BU, self.room = net, domain.to(dtype), C_BSK.to(dtype), index_BU, room
        self.bounds = [b.to(dtype) for b in bounds]
        self._spaces: dict[int, tuple[Space, int]] = {}  # with the coefficients of each; those used last come last

    def value(self, nodes: Nodes) -> Tensor:
        value_D = torch.empty_like(nodes.bound_D, dtype=self.domain.x_BN.dtype)
        for space, index, own in self._by_sample(nodes):
            value_D[index] = space.value(own)
        return value_D

    def bounded(self, nodes: Nodes, iterations: int, rate: float, decay: float, candidates: int) -> Nodes:
        found, order = [], []
        for space, index, own in self._by_sample(nodes):
            one = bounded(space, own, iterations, rate, decay, candidates)
            found.append(replace(one, sample_D=nodes.sample_D[index]))
            order.append(index)
        return Nodes.joined(found).select(torch.cat(order).argsort()) if found else nodes

    def _by_sample(self, nodes: Nodes) -> Iterator[tuple[Space, Tensor, Nodes]]:
        """Of every sample: its space, where its rows are, and the rows as that space has them."""
        for b in nodes.sample_D.unique().tolist():
            index = (nodes.sample_D == b).nonzero(as_tuple=True)[0]
            own = nodes.select(index)
            yield self._space(b), index, replace(own, sample_D=torch.zeros_like(own.sample_D))

    def _space(self, b: int) -> Space:
        self._spaces[b] = self._spaces.pop(b) if b in self._spaces else self._made(b)
        while len(self._spaces) > 1 and sum(size for _, size in self._spaces.values()) > self.room:
            self._spaces.pop(next(iter(self._spaces)))
        return self._spaces[b][0]

    def _made(self, b: int) -> tuple[Space, int]:
        one = torch.tensor([b], device=self.C_BSK.device)
        domain, bounds, C_1SK = self.domain.select(one), [layer.select(one) for layer in self.bounds], self.C_BSK[one]
        unstable, first = of_layers(self.index_BU[b], [layer.lower_BN.shape[1] for layer in bounds]), self.net.layers[0]
        size = products([len(index) for index in unstable], C_1SK.shape[1], first.inputs)
        making = (sum(len(index) for index in unstable) + C_1SK.shape[1]) * max(layer.outputs for layer in self.net.layers)
        # What decides charges rounding on the whole network.
        if not self.net.gamma and size <= self.net.products and max(size, making) <= self.room:
            small = condensed_space(self.net, domain, bounds, C_1SK[0], unstable, self.index_BU.shape[1])
            return small, size * (3 if domain.has_vertices else 1)
        own = 2 * vertex_numbers(first, first.positions) if domain.has_vertices else 0
        return Space(self.net, domain, bounds, C_1SK, self.index_BU[one]), 8 * self.net.neurons + own


def of_layers(index_U: Tensor, sizes: list[int]) -> list[Tensor]:
    """Places in all layers together as places in each; those past the end are padding."""
    found, start = list[Tensor](), 0
    for size in sizes:
        found.append(index_U[(index_U >= start) & (index_U < start + size)] - start)
        start += size
    return found


def products(counts: list[int], specs: int, inputs: int) -> int:
    """The coefficients of a condensed network with so many neurons in its layers, which are the products of one pass through it."""
    above = [sum(counts[k:]) + specs for k in range(len(counts) + 1)]  # what the layers of the condensed network give
    return above[0] * inputs + sum((count + out) * out for count, out in zip(counts, above[1:], strict=True))


def condensed_space(net: Compiled, domain: Domain, bounds: list[LayerBounds], C_SK: Tensor, unstable: list[Tensor], width: int) -> Space:
    """The space of one sample, whose sub-problems name `width` neurons: the unstable ones, those of lower layers first, and padding."""
    small = condensed(net, bounds, unstable, C_SK)
    layers = [_padded(b, index, layer) for b, index, layer in zip(bounds, unstable, small.layers, strict=False)]
    balls = tuple(
        LayerBall(_padded_columns(ball.centre_BN[:, index], layer.outputs), ball.radius_B1)
        for ball, index, layer in zip(domain.balls, unstable, small.layers, strict=False)
    )
    starts = torch.tensor([layer.outputs for layer in small.layers[:-1]]).cumsum(0).tolist()
    device = C_SK.device
    places = [torch.arange(len(index), device=device) + start for index, start in zip(unstable, [0, *starts], strict=False)]
    places_U = torch.cat([*places, torch.full((width,), starts[-1], device=device)])[:width]
    C_1SS = torch.eye(len(C_SK), dtype=C_SK.dtype, device=device).unsqueeze(0)
    return Space(small, replace(domain, balls=balls), layers, C_1SS, places_U.unsqueeze(0))


def condensed(net: Compiled, bounds: list[LayerBounds], unstable: list[Tensor], C_SK: Tensor) -> Compiled:
    """The rows of C on the logits as a network of the unstable neurons alone, equal to the whole one on the domain of the bounds.

    Its layers: what every unstable neuron of this layer and of those above, and every row, reads of the image, carried up; each layer
    then adds what its own unstable neurons give to all that lies above them.
    """
    last = net.layers[-1]
    rows_RN, constant_R = C_SK @ last.weight, C_SK @ last.bias_N  # on what the layer below hands on
    given: list[Tensor] = []  # per layer, from the top: what its unstable neurons give to the rows above
    for layer, known, index in zip(reversed(net.layers[:-1]), reversed(bounds), reversed(unstable), strict=True):
        given.append(rows_RN[:, index])
        own_UN = rows_RN.new_zeros(len(index), layer.outputs).scatter_(1, index.unsqueeze(1), 1.0)
        linear_N = Relaxation.of(known).active_BN[0].index_fill(0, index, 0.0)  # 1 where the layer hands on what it gets
        rows_RN = torch.cat([own_UN, rows_RN * linear_N])  # on the pre-activations
        constant_R = torch.cat([constant_R.new_zeros(len(index)), constant_R]) + rows_RN @ layer.bias_N
        rows_RN = layer.transpose(rows_RN)
    layers = [_layer(rows_RN, constant_R, len(unstable[0]), net.layers[0].in_shape)]
    for i, rows_RU in enumerate(reversed(given)):
        R = len(rows_RU)
        weight = torch.cat([rows_RU, torch.eye(R, dtype=rows_RU.dtype, device=rows_RU.device)], 1)
        own = len(unstable[i + 1]) if i + 1 < len(unstable) else R
        layers.append(_layer(weight, rows_RU.new_zeros(R), own, (weight.shape[1],)))
    return Compiled(layers, net.in_shape, len(C_SK), net.gamma)


def _layer(weight: Tensor, bias_N: Tensor, own: int, in_shape: tuple[int, ...]) -> Affine:
    """A matrix whose first `own` outputs are followed by a ReLU."""
    carried_N = torch.arange(len(bias_N), device=bias_N.device) >= own
    return Affine(weight, bias_N, bias_N.abs(), in_shape, (len(bias_N),), carried_N=carried_N)


def _padded(bounds: LayerBounds, index: Tensor, layer: Affine) -> LayerBounds:
    """The bounds of the unstable neurons; what is carried has none that matter."""
    lower_BN, upper_BN, scale_BN = (
        _padded_columns(t[:, index], layer.outputs) for t in (bounds.lower_BN, bounds.upper_BN, bounds.scale_BN)
    )
    return LayerBounds(lower_BN, upper_BN, scale_BN, layer.carried_N)


def _padded_columns(values_BU: Tensor, width: int) -> Tensor:
    return torch.nn.functional.pad(values_BU, (0, width - values_BU.shape[1]))
