"""Layers with joins as a chain: what a later layer adds or reads is carried past the ones between, beside what they compute.

A residual block x + f(x) with f = W2 relu(W1 x) is the chain of the two maps x -> (W1 x, x) and (h, s) -> W2 h + s with ReLU on the
first half alone. Written as one convolution each, its kernels side by side, this is a chain of plain layers, and a backward pass
through it is the very one through the graph.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from cure_ray.bounds.native.affine import Affine, Shape
from cure_ray.bounds.native.rounding import floored
from cure_ray.errors import UserError
from cure_ray.networks.sequence import Block

Term = tuple[int, Affine]  # of a sum: the value it reads, and the map


@dataclass(frozen=True)
class _State:
    """What lies between two maps of the chain: values side by side in their channels, by the block they are the outcome of."""

    values: tuple[int, ...]
    shapes: tuple[Shape, ...]

    def shape(self) -> Shape:
        first = self.shapes[0]
        return first if len(self.shapes) == 1 else (sum(shape[0] for shape in self.shapes), *first[1:])

    def offset(self, value: int) -> int:
        return sum(shape[0] for shape in self.shapes[: self.values.index(value)])

    def identity(self, value: int, like: Tensor) -> Affine:
        shape = self.shapes[self.values.index(value)]
        eye = torch.eye(shape[0], dtype=like.dtype)
        zeros = torch.zeros(int(torch.Size(shape).numel()), dtype=like.dtype)
        return Affine(eye if len(shape) == 1 else eye.view(*eye.shape, 1, 1), zeros, zeros, shape, shape)


def chained(blocks: Sequence[Block], maps: Sequence[Affine]) -> list[Affine]:
    """The maps of the blocks as a chain in which each reads all that the one before it gives."""
    chain = list[Affine]()
    state = _State((-1,), (maps[0].in_shape,))
    waiting = dict[int, Affine]()  # maps without a ReLU whose outcome is not computed yet

    def needed_after(i: int) -> set[int]:
        ahead = {source for block in blocks[i + 1 :] for source in (block.reads, block.adds) if source is not None}
        return {source for source in ahead if source in waiting or source in state.values}

    def advance(value: int, terms: Sequence[Term], relu: bool, wanted: set[int]) -> None:
        """One more map: `value` is the sum of the terms; what is wanted later goes along."""
        nonlocal state
        lead = terms[0][1]
        parts, values = [list(terms)], [value]
        for source in sorted(wanted):
            if source in waiting and blocks[source].reads in state.values and _side_by_side(lead, waiting[source]):
                parts.append([(blocks[source].reads, waiting.pop(source))])
                values.append(source)
        held = {blocks[source].reads if source in waiting else source for source in wanted - set(values)}
        for source in sorted(held - {value}):
            if source not in state.values or not _side_by_side(lead, state.identity(source, lead.weight)):
                raise UserError(
                    f"layer {blocks[max(value, 0)].position}: what a shortcut adds later, of shape {_shown(state, source)}, does not fit "
                    f"beside its output of shape {lead.out_shape}"
                )
            parts.append([(source, state.identity(source, lead.weight))])
            values.append(source)
        layer = _side(parts, state)
        plain = relu and len(parts) == 1
        chain.append(layer if plain else replace(layer, carried_N=_carried(layer, parts[0][0][1].out_shape[0] if relu else 0)))
        state = _State(tuple(values), tuple(part[0][1].out_shape for part in parts))

    for i, block in enumerate(blocks):
        if not block.relu and block.adds is None and i + 1 < len(blocks):
            waiting[i] = maps[i]
            continue
        if block.reads in waiting:  # the outcome of a layer without a ReLU
            source = block.reads
            advance(source, [(blocks[source].reads, waiting.pop(source))], False, needed_after(i - 1) - {source})
        terms: list[Term] = [(block.reads, maps[i])]
        if block.adds is not None:
            other = waiting.pop(block.adds, None)
            terms.append((block.adds, state.identity(block.adds, maps[i].weight)) if other is None else (blocks[block.adds].reads, other))
            if terms[1][1].out_shape != maps[i].out_shape:
                raise UserError(
                    f"layer {block.position}: the branches of its residual block give {maps[i].out_shape} and {terms[1][1].out_shape}, "
                    "which cannot be added"
                )
        advance(i, terms, block.relu or i + 1 == len(blocks), needed_after(i))
    return chain


def _shown(state: _State, source: int) -> str:
    return str(state.shapes[state.values.index(source)]) if source in state.values else "unknown"


def _side_by_side(lead: Affine, other: Affine) -> bool:
    """Whether one map can give both outputs, in channels of one image or in one vector."""
    if not lead.is_conv or not other.is_conv:
        return not lead.is_conv and not other.is_conv and len(lead.in_shape) == len(other.in_shape) == 1
    return lead.out_shape[1:] == other.out_shape[1:] and lead.in_shape[1:] == other.in_shape[1:] and lead.stride == other.stride


def _carried(layer: Affine, active: int) -> Tensor:
    """True on all but the first `active` channels of the output."""
    channels = torch.arange(layer.out_shape[0]) >= active
    return channels.repeat(layer.outputs // layer.out_shape[0])


def _side(parts: Sequence[Sequence[Term]], state: _State) -> Affine:
    """Sums of maps, one below the other, as one map of the whole state."""
    lead = parts[0][0][1]
    if len(parts) == 1 and len(parts[0]) == 1 and len(state.values) == 1:
        return lead
    every = [layer for part in parts for _, layer in part]
    if not all(_side_by_side(lead, layer) for layer in every):
        raise UserError(f"a residual block whose branches, of kernels {_kernels(every)}, cannot be computed side by side")
    outs = [part[0][1].out_shape[0] for part in parts]
    in_shape, out_shape = state.shape(), (sum(outs), *lead.out_shape[1:])
    padding = (max(layer.padding[0] for layer in every), max(layer.padding[1] for layer in every))
    size = tuple(padding[d] + max(layer.kernel[d] - layer.padding[d] for layer in every) for d in (0, 1)) if lead.is_conv else ()
    weight = torch.zeros(out_shape[0], in_shape[0], *size, dtype=lead.weight.dtype)
    bias, scale = (torch.zeros(out_shape, dtype=lead.weight.dtype) for _ in range(2))
    row = 0
    for part, count in zip(parts, outs, strict=True):
        for source, layer in part:
            column = state.offset(source)
            where = weight[row : row + count, column : column + layer.in_shape[0]]
            if lead.is_conv:
                (top, left), (height, width) = (p - q for p, q in zip(padding, layer.padding, strict=True)), layer.kernel
                where = where[:, :, top : top + height, left : left + width]
            where += layer.weight
            for whole, own in ((bias, layer.bias_N), (scale, layer.bias_scale_N)):
                whole[row : row + count] += own if not lead.is_conv else own.view(*layer.out_shape[1:], -1).permute(2, 0, 1)
        row += count
    if lead.is_conv:
        reached = tuple((n + 2 * p - k) // s + 1 for n, p, k, s in zip(in_shape[1:], padding, size, lead.stride, strict=True))
        if reached != lead.out_shape[1:]:
            raise UserError(f"a residual block whose branches, of kernels {_kernels(every)}, cannot be computed side by side")
        bias, scale = (t.permute(1, 2, 0).reshape(-1) for t in (bias, scale))
    return Affine(weight, bias, floored(scale), in_shape, out_shape, lead.stride, padding)


def _kernels(layers: Sequence[Affine]) -> str:
    return ", ".join(f"{tuple(layer.weight.shape)} with stride {layer.stride} and padding {layer.padding}" for layer in layers)
