"""The first layer on an l1 ball: its ReLUs with negative coefficients are bounded at the vertices, where they are exact.

A row c.relu(z) of the first layer's z = W x + b is convex in x where c is positive and concave where it is negative. Lines bound the
convex part from below. What is left, lines and concave part, is concave, so at x + d with |d|_1 <= eps it is at least the mean over
the vertices x + eps s e_j of the ball with the weights |d_j| / eps, and x itself with what is left of 1. So

    value >= value at x + min { sum of t_js (change at vertex js) : 0 <= t_js <= room_js / eps, sum of t_js <= 1 },

a fractional knapsack, whatever the number of unstable neurons: they cannot all be at their worst, because no pixel reaches them all. In
the ball without a box it is the exact minimum of what the lines leave. A vertex changes only the neurons that read its pixel.
(docs/explanation/vertices.md)
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from cure_ray.bounds.native.affine import Affine
from cure_ray.threats.geometry import knapsack


@dataclass(frozen=True, eq=False)
class Vertices:
    """What going to every vertex of the ball does to the ReLUs of a first layer, or of a window of it.

    P positions of C channels; a vertex is a sign and one of the K inputs that a position reads. A matrix is one position."""

    gain_BPC2K: Tensor  # relu(z at the vertex) - relu(z at the image); B = 1: the same for all rows
    rest_BN: Tensor  # relu(z at the image)
    layer: Affine
    size: tuple[int, int]  # of the image, or of its window
    padding: tuple[int, int]
    eps: float

    @staticmethod
    def around(layer: Affine, z_BN: Tensor, eps: float, size: tuple[int, int], padding: tuple[int, int]) -> "Vertices":
        """`z_BN` are the pre-activations of the image, positions first."""
        C = layer.out_shape[0]
        step_2K = torch.tensor([eps, -eps], dtype=z_BN.dtype, device=z_BN.device).view(2, 1)
        moves_C2K = layer.weight.reshape(C, 1, -1).to(z_BN.dtype) * step_2K
        z_BPC11 = z_BN.reshape(len(z_BN), -1, C, 1, 1)
        gain_BPC2K = (z_BPC11 + moves_C2K).clamp_min_(0).sub_(z_BPC11.clamp_min(0))
        return Vertices(gain_BPC2K, z_BN.clamp_min(0), layer, size, padding, eps)

    def lowest(self, concave_BSN: Tensor, linear_BSI: Tensor, low_BI: Tensor, high_BI: Tensor) -> tuple[Tensor, Tensor]:
        """How far concave coefficients on the ReLUs and linear ones on the image can fall, [B, S]; and a minimiser as what it takes of
        every vertex, [B, S, 2, I], in steps of the image."""
        change_BS2I = self._down(concave_BSN) / self.eps
        worth_BSJ = torch.stack([change_BS2I[..., 0, :] + linear_BSI, change_BS2I[..., 1, :] - linear_BSI], 2).neg_().flatten(2)
        room_B1J = torch.cat([high_BI, -low_BI], -1).unsqueeze(1)
        value_BS, take_BSJ = knapsack(worth_BSJ, room_B1J, self.eps)
        return value_BS, take_BSJ.view_as(change_BS2I)

    def mixed(self, take_BS2I: Tensor) -> Tensor:
        """The ReLUs' values, mixed over the vertices as taken, [B, S, N]."""
        return self.rest_BN.unsqueeze(1) + self._up(take_BS2I / self.eps)

    def _down(self, A_BSN: Tensor) -> Tensor:
        """What coefficients on the ReLUs give for every vertex, [B, S, 2, I]."""
        B, S, _ = A_BSN.shape
        _, P, C, _, K = self.gain_BPC2K.shape
        if not self.layer.is_conv:
            return _matmul(A_BSN, self.gain_BPC2K.flatten(3)[:, 0]).reshape(B, S, 2, K)
        taps = _matmul(A_BSN.reshape(B, S, P, C).transpose(1, 2), self.gain_BPC2K.flatten(3))  # [B, P, S, 2K]
        columns = taps.reshape(B, P, S * 2, K).permute(0, 2, 3, 1).reshape(B * S * 2, K, P)
        image = F.fold(columns, self.size, self.layer.kernel, 1, self.padding, self.layer.stride)
        return image.permute(0, 2, 3, 1).reshape(B, S, 2, -1)

    def _up(self, take_BS2I: Tensor) -> Tensor:
        """The adjoint of `_down`."""
        B, S, _, _ = take_BS2I.shape
        _, P, C, _, K = self.gain_BPC2K.shape
        if not self.layer.is_conv:
            return _matmul(take_BS2I.flatten(2), self.gain_BPC2K.flatten(3)[:, 0].transpose(1, 2))
        image = take_BS2I.reshape(B * S * 2, *self.size, -1).permute(0, 3, 1, 2)
        columns = F.unfold(image, self.layer.kernel, 1, self.padding, self.layer.stride)  # [B S 2, K, P]
        taps = columns.view(B, S, 2, K, P).permute(0, 4, 1, 2, 3).reshape(B, P, S, 2 * K)
        return _matmul(taps, self.gain_BPC2K.flatten(3).transpose(2, 3)).transpose(1, 2).reshape(B, S, P * C)


def _matmul(rows: Tensor, matrix: Tensor) -> Tensor:
    """rows @ matrix, batch by batch; one matrix for all batches is applied to all rows at once."""
    if len(matrix) == 1 and len(rows) > 1:
        joined = rows.movedim(0, -2).flatten(-3, -2) if rows.dim() == 3 else rows.permute(1, 0, 2, 3).flatten(1, 2)
        found = joined @ matrix[0]
        shape = (len(rows), rows.shape[-2], found.shape[-1])
        if rows.dim() == 3:
            return found.view(shape[1], shape[0], shape[2]).transpose(0, 1)
        return found.view(rows.shape[1], *shape).transpose(0, 1)
    return rows @ matrix


def vertex_numbers(layer: Affine, positions: int) -> int:
    """How many numbers the vertices of one sample are, for so many positions of the first layer."""
    return 2 * layer.weight.numel() * positions
