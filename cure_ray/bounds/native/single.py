"""Products in float32 with everything around them in float64: proven bounds at nearly the price of the searching pass.

Convolutions of doubles cost 3 to 8 times as much as those of floats, products of large matrices twice. Where a bound has room to spare,
a product in float32 proves it as well, if what it can lose is paid for: coefficients and weights are rounded to float32, u = 2^-24, and so
is every sum of them, so a product loses at most gamma_(n+2) of its magnitudes, where n is the number of terms that meet in one sum (of a
kernel, of a row or column of a matrix), not the width of the network. That is charged where the float64 pass charges its own rounding
(docs/explanation/soundness.md); sums over neurons, relaxations and the image stay in float64.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from cure_ray.bounds.arithmetic import exact_arithmetic
from cure_ray.bounds.native.affine import Affine
from cure_ray.bounds.native.compiled import Compiled

UNIT = 2.0**-24
SMALL = 2**14  # weights; rounding what a smaller matrix reads and gives takes the time that its product in float32 saves
LONELY = 1 + 0.99 * 2.0**-11  # eleven bits take it for 1, and so lose nearly as much as they can
PROBES = 5
ROWS = (1, 5, 40)  # multiplied at once; kernels are chosen by the number of rows
LONGEST = 2**13  # terms of one sum; a bound that is charged for longer ones, 5e-4 of its magnitudes and more, has seldom room for it


def with_single_products(net: Compiled) -> Compiled:
    """The deciding network with products in float32, or itself where none is worth it or this machine's do not keep their promise.

    The first layer is read from the image in float64: all bounds rest on it, and it is cheap. So are intervals of matrices, one row an
    image: what float32 loses there would grow from layer to layer. The last layer is not multiplied like the others, its rows are
    started from its weights: it stays in float64.
    """
    *inner, last = net.layers
    layers = [*(_single(layer, up=k > 0 and layer.is_conv) if _pays(layer) else layer for k, layer in enumerate(inner)), last]
    if layers == net.layers or any(not _promised(quick, exact) for quick, exact in zip(layers, net.layers, strict=True)):
        return net
    return Compiled(layers, net.in_shape, net.classes, net.gamma)


def _pays(layer: Affine) -> bool:
    return (layer.is_conv or layer.weight.numel() >= SMALL) and _terms(layer) <= LONGEST


def _terms(layer: Affine) -> int:
    """The longest sum in either direction."""
    if not layer.is_conv:
        return max(layer.inputs, layer.outputs)
    return layer.kernel[0] * layer.kernel[1] * max(layer.in_shape[0], layer.out_shape[0])


def _single(layer: Affine, up: bool) -> Affine:
    # The hundredth pays for the magnitudes, which are multiplied in float32 too, and for the quadratic terms of gamma.
    return replace(layer, lost=1.01 * (_terms(layer) + 8) * UNIT, single_up=up, single_down=True, cache={})


def _promised(quick: Affine, exact: Affine) -> bool:
    """Whether sums are rounded by their own terms only, however many rows are multiplied. Fast algorithms (Winograd, Fourier) mix the
    terms of neighbours, and a large neighbour drowns a small sum: so the probes spread over many orders of magnitude. Fewer bits in
    the factors hide in long sums: so some rows have one entry. On GPUs the algorithm may change with the size of a batch in ways that
    no probe can see: there float64 multiplies."""
    if quick is exact:
        return True
    if exact.weight.device.type != "cpu":
        return False
    with exact_arithmetic():
        return _covered(quick, exact)


def _covered(quick: Affine, exact: Affine) -> bool:
    """Whether what is charged covers the products of few rows and of many, W x, |W| x and W^T A. The many are the few again, so that
    float64 multiplies these alone."""
    generator = torch.Generator().manual_seed(5)

    def probe(width: int) -> Tensor:
        sizes = torch.randint(-20, 20, (PROBES, width), generator=generator).double().exp2()
        values = torch.randn(PROBES, width, generator=generator, dtype=torch.float64) * sizes
        lonely = torch.zeros_like(values).scatter_(1, torch.randint(width, (PROBES, 1), generator=generator), LONELY)
        return torch.where(torch.arange(PROBES).unsqueeze(1) % 2 == 1, lonely, values)

    def promised(fast: Callable[[Tensor], Tensor], slow: Callable[[Tensor], Tensor], size: Tensor, probes: Tensor) -> bool:
        truth, room = slow(probes), quick.lost * size
        many = (torch.arange(rows) % PROBES for rows in ROWS)
        return all(bool(((fast(probes[which]) - truth[which]).abs() <= room[which]).all()) for which in many)

    x, A = probe(exact.inputs), probe(exact.outputs)
    positive = replace(exact, weight=quick.weight_abs, cache={})
    sizes = exact.linear(x.abs(), quick.weight_abs)
    return (
        (not quick.single_up or promised(quick.linear, exact.linear, sizes, x))
        and promised(lambda x: quick.linear_in_single(x, quick.weight_abs), positive.linear, sizes, x.abs())
        and promised(quick.transpose, exact.transpose, positive.transpose(A.abs()), A)
    )
