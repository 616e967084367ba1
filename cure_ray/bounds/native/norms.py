"""Proven upper bounds of spectral norms: how far an affine layer can stretch a difference of its inputs.

An estimate of a norm (power iteration, an eigenvalue solver) may lie below it, so a certificate may not rest on it. Here it only
proposes: a Cholesky factorisation of m I - W W^T that runs to its end proves |W|^2 <= m, up to a rounding term that is known
(S. M. Rump, Verification of positive definiteness, BIT 46, 2006) and charged.

A large convolution is a part of the same convolution on the infinite plane, whose norm is the largest norm of its symbol, a small
matrix for every frequency. Between the points of a grid of frequencies the symbol is held by Riesz' lemma: a trigonometric
polynomial of degree n that is largest at w0 stays above cos(n (w - w0)) times that value until its first zero.
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from cure_ray.bounds.native.affine import Affine
from cure_ray.threats.norms import Norm

DENSE = 2048  # side of the Gram matrix up to which a convolution is written out as a matrix
GRID = 64  # frequencies per axis
UNIT = 2.0**-53


def stretch(layer: Affine) -> float:
    """|W|_2 of a layer of the deciding network, or a little more; NaN if it cannot be had. Computed once."""
    if "spectral" not in layer.cache:
        layer.cache["spectral"] = torch.tensor(_stretch(layer), dtype=torch.float64)
    return float(layer.cache["spectral"])


def ball_stretch(layer: Affine, norm: Norm) -> float:
    """The largest l2 norm of W d over the unit ball of l2 or l1: the corners of an l1 ball are the unit vectors, so columns of W."""
    spectral = stretch(layer)
    if norm != "l1":
        return spectral
    if "column" not in layer.cache:
        layer.cache["column"] = _longest_column(layer)
    return min(spectral, float(layer.cache["column"]))


def part_stretch(layer: Affine, rows: Tensor, columns: Tensor, key: object, norm: Norm | None) -> float:
    """`stretch` of the part of W between these channels, or with a norm of the image `ball_stretch`. Computed once for a key."""
    if key not in layer.cache:
        whole = bool(rows.any()) and bool(columns.any())
        part = layer.part(rows, columns) if whole else None
        found = 0.0 if part is None else stretch(part) if norm is None else ball_stretch(part, norm)
        layer.cache[key] = torch.tensor(found, dtype=torch.float64)
    return float(layer.cache[key])


def _longest_column(layer: Affine) -> Tensor:
    """A column's squares are the responses of the squared kernel to a unit vector; one pass of ones through its transpose."""
    squares = layer.weight.double().square() + 2.0**-1000
    if layer.is_conv:
        ones = torch.ones(1, layer.out_shape[0], *layer.out_shape[1:], dtype=torch.float64, device=layer.weight.device)
        height, width = layer.in_shape[1:]
        top, left = layer.padding
        unread = [(n + 2 * p - k) % s for n, p, k, s in zip((height, width), (top, left), layer.kernel, layer.stride, strict=True)]
        image = torch.nn.functional.conv_transpose2d(ones, squares, None, layer.stride, 0, unread)
        columns = image[0, :, top : top + height, left : left + width].reshape(-1)
    else:
        columns = squares.sum(0)
    return (columns.max() * (1 + _gamma(layer.outputs))).sqrt() * (1 + 8 * UNIT)


def _stretch(layer: Affine) -> float:
    weight = layer.weight.double()
    if not layer.is_conv:
        return spectral_bound(weight.unsqueeze(0))
    if min(layer.inputs, layer.outputs) <= DENSE:
        matrix = torch.cat([layer.linear(unit.to(layer.weight.dtype)).double() for unit in _unit_vectors(layer.inputs, weight)])
        # A kernel may compute a convolution in a way that rounds even what unit vectors give.
        return spectral_bound(matrix.unsqueeze(0), _gamma(layer.inputs) * float(torch.linalg.vector_norm(matrix)))
    return _symbol_bound(weight, layer.stride)


def _unit_vectors(count: int, like: Tensor, size: int = 256) -> Iterator[Tensor]:
    """All of them, so many at a time."""
    for start in range(0, count, size):
        some = like.new_zeros(min(size, count - start), count)
        some.diagonal(start).fill_(1.0)
        yield some


def spectral_bound(W_FMN: Tensor, error: float = 0.0) -> float:
    """An upper bound of the largest spectral norm of the matrices, real or complex, each known up to `error` in Frobenius norm."""
    size = float(W_FMN.abs().max()) if W_FMN.numel() else 0.0
    if size == 0.0:
        return error
    if not math.isfinite(size) or size < 2.0**-450:
        return math.nan
    up = 2.0 ** -math.frexp(size)[1]  # by a power of two, which rounds nothing that counts
    W_FMN = W_FMN * up
    wide = W_FMN if W_FMN.shape[1] <= W_FMN.shape[2] else W_FMN.mH
    G_FKK = wide @ wide.mH
    G_FKK = (G_FKK + G_FKK.mH) / 2
    lost = float((_gamma(max(W_FMN.shape[1:]), W_FMN.is_complex()) * _squares(W_FMN)).max())
    norm = math.sqrt((_largest_eigenvalue(G_FKK) + lost) * (1 + 8 * UNIT)) * (1 + 8 * UNIT) / up
    return (norm + error) * (1 + 8 * UNIT)


def _largest_eigenvalue(G_FKK: Tensor) -> float:
    """An upper bound of the eigenvalues of Hermitian matrices."""
    K = G_FKK.shape[-1]
    trace = float(torch.diagonal(G_FKK, dim1=1, dim2=2).real.sum(1).max()) * (1 + _gamma(K))
    guess = float(torch.linalg.eigvalsh(G_FKK)[:, -1].max())  # as good as any guess: the factorisation decides
    eye = torch.eye(K, dtype=G_FKK.dtype, device=G_FKK.device)
    for more in (1e-9, 1e-7, 1e-5, 1e-3, 0.1):
        level = guess * (1 + more)
        if level >= trace:
            break
        _, failed_F = torch.linalg.cholesky_ex(eye * level - G_FKK)
        if not bool(failed_F.any()):
            # The shift rounds the diagonal by u times its size; the factorisation perturbs it by gamma times its trace.
            return level + _gamma(K + 1, G_FKK.is_complex()) * K * (level + trace)
    return trace + _gamma(K) * trace  # a matrix without negative eigenvalues has none above its trace


def _squares(W_FMN: Tensor) -> Tensor:
    """The squared Frobenius norms, and a little more."""
    gamma = _gamma(W_FMN.shape[1] * W_FMN.shape[2])
    return W_FMN.abs().square().sum((1, 2)) * (1 + gamma) + 2.0**-900


def _gamma(terms: int, is_complex: bool = False) -> float:
    """What a sum of so many products loses, as in the deciding pass; four times that for complex numbers."""
    return (8 if is_complex else 2) * (terms + 64) * UNIT


def _symbol_bound(weight: Tensor, stride: tuple[int, int]) -> float:
    """The norm on the infinite plane. Stride s: the image as s*s coarser ones, so that the kernel moves by whole pixels."""
    outs, ins, kh, kw = weight.shape
    (sy, sx), (qy, qx) = stride, (-(-kh // stride[0]), -(-kw // stride[1]))
    full = torch.nn.functional.pad(weight, (0, qx * sx - kw, 0, qy * sy - kh))
    phases = full.view(outs, ins, qy, sy, qx, sx).permute(2, 4, 0, 1, 3, 5).reshape(qy, qx, outs, ins * sy * sx)
    grids, factor = [], 1.0
    for taps in (qy, qx):
        degree = taps // 2  # of the symbol after a shift to the middle, rounded up
        points = GRID if degree else 1
        grids.append(torch.arange(points, dtype=torch.float64, device=weight.device) * (2 * math.pi / points))
        factor /= math.cos(math.pi * degree / points) if degree else 1.0
    waves = [torch.exp(1j * grid[:, None] * torch.arange(taps, device=weight.device)) for grid, taps in zip(grids, (qy, qx), strict=True)]
    half = len(grids[0]) // 2 + 1  # the kernel is real: the other half are complex conjugates
    symbol = torch.einsum("ay,bx,yxoi->aboi", waves[0][:half], waves[1], phases.to(torch.complex128)).flatten(0, 1)
    sizes = phases.abs().sum((0, 1))
    error = 32 * (qy * qx + 8) * UNIT * float(torch.linalg.vector_norm(sizes))  # angles, their sines and the sums over the taps
    most = max(spectral_bound(part, error) for part in symbol.split(256))
    return most * factor * (1 + 8 * UNIT)
