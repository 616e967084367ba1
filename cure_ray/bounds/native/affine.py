"""One affine layer on flat vectors: a matrix, or a convolution on whole images and on windows of them.

Inside convolutions the order is height, width, channel, which makes transposed convolutions on CPUs about three times faster
and lets windows be gathered as contiguous rows.
"""

import math
from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from cure_ray.bounds.native.rounding import FLOOR, SINGLE_FLOOR, capped, floored

Shape = tuple[int, ...]


def activated(z_BN: Tensor, carried_N: Tensor | None) -> Tensor:
    """relu(z), and z where it is carried past the ReLU."""
    return z_BN.clamp_min(0) if carried_N is None else torch.where(carried_N, z_BN, z_BN.clamp_min(0))


@dataclass(eq=False)
class Affine:
    """z = W x + b on flat vectors; W is a matrix or a convolution kernel. The bias is a full map: with zero padding a folded
    Normalize changes it at the borders. `bias_scale_N` bounds the magnitudes that were summed into the bias (rounding).
    `lost` is the share of its magnitudes that a product in float32 may lose (single.py), beyond what rounding takes in float64."""

    weight: Tensor  # [O, I] or [O, I, kh, kw]
    bias_N: Tensor
    bias_scale_N: Tensor
    in_shape: Shape  # (C, H, W) or (N,)
    out_shape: Shape
    stride: tuple[int, int] = (1, 1)
    padding: tuple[int, int] = (0, 0)
    carried_N: Tensor | None = None  # bool: outputs that no ReLU follows, handed past it; None: there are none
    lost: float = 0.0
    single_up: bool = False  # products of doubles are carried out in float32 (single.py): W x,
    single_down: bool = False  # W^T A
    cache: dict[object, Tensor] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        self.is_conv = self.weight.dim() == 4
        self.inputs, self.outputs = math.prod(self.in_shape), math.prod(self.out_shape)
        self.positions = self.outputs // self.out_shape[0] if self.is_conv else 1  # where the kernel is applied
        if self.is_conv:
            self.weight = self.weight.contiguous(memory_format=torch.channels_last)
            self.kernel = (self.weight.shape[2], self.weight.shape[3])
        self.floor = SINGLE_FLOOR if self.single_up or self.single_down else FLOOR
        self.weight_abs = floored(self.weight.abs(), self.floor)

    def to(self, device: torch.device, dtype: torch.dtype) -> "Affine":
        tensors = (self.weight, self.bias_N, self.bias_scale_N)
        weight, bias_N, scale_N = (t.to(device=device, dtype=dtype) for t in tensors)
        carried_N = None if self.carried_N is None else self.carried_N.to(device)
        return replace(self, weight=weight, bias_N=bias_N, bias_scale_N=scale_N, carried_N=carried_N, cache={})

    def linear(self, x_RN: Tensor, weight: Tensor | None = None) -> Tensor:
        """W x without the bias; another kernel of the same shape (|W|, W^2) may take W's place."""
        weight = self.weight if weight is None else weight
        return self.linear_in_single(x_RN, weight) if self.single_up else self._linear(x_RN, weight)

    def linear_in_single(self, x_RN: Tensor, weight: Tensor) -> Tensor:
        """The same in float32, whatever `single_up` says."""
        return self._linear(x_RN.float(), self._single(weight)).double()

    def _single(self, weight: Tensor) -> Tensor:
        """A weight in float32; those of this layer are kept."""
        key = "W" if weight is self.weight else "|W|" if weight is self.weight_abs else None
        if key is None or key not in self.cache:
            single = weight.float()
            single = single.contiguous(memory_format=torch.channels_last) if self.is_conv else single
            if key is None:
                return single
            self.cache[key] = single
        return self.cache[key]

    def _linear(self, x_RN: Tensor, weight: Tensor) -> Tensor:
        if not self.is_conv:
            return x_RN @ weight.t()
        C, H, W = self.in_shape
        image = x_RN.reshape(-1, H, W, C).permute(0, 3, 1, 2)
        return F.conv2d(image, weight, None, self.stride, self.padding).permute(0, 2, 3, 1).reshape(-1, self.outputs)

    def __call__(self, x_RN: Tensor) -> Tensor:
        return self.linear(x_RN) + self.bias_N

    def activated(self, z_RN: Tensor) -> Tensor:
        """What the layer hands on: relu(z), but z itself where it is carried."""
        return activated(z_RN, self.carried_N)

    def carried_channels(self) -> Tensor | None:
        """Which channels of the output are carried; of a vector, which entries."""
        return None if self.carried_N is None else self.carried_N[: self.out_shape[0]]

    def part(self, rows: Tensor, columns: Tensor) -> "Affine":
        """W from some channels of the input to some of the output (bool), without its bias."""
        if self.is_conv:
            weight, in_shape = self.weight[rows][:, columns], (int(columns.sum()), *self.in_shape[1:])
        else:
            weight = self.weight[rows][:, columns.repeat(self.inputs // len(columns))]
            in_shape = (weight.shape[1],)
        out_shape = (len(weight), *self.out_shape[1:])
        zeros_N = weight.new_zeros(math.prod(out_shape))
        return Affine(weight, zeros_N, zeros_N, in_shape, out_shape, self.stride, self.padding)

    def magnitude(self, reach_RN: Tensor) -> Tensor:
        """|W| reach: the magnitudes summed into W x for |x| <= reach, with the floors of rounding; NaN where too large to vouch for."""
        size_RN = floored(reach_RN, self.floor)
        return capped(self.linear_in_single(size_RN, self.weight_abs) if self.single_down else self.linear(size_RN, self.weight_abs))

    def transpose(self, A_RN: Tensor) -> Tensor:
        """W^T A for every row."""
        if self.single_down:
            return self._transposed(A_RN.float()).double()
        return self._transposed(A_RN)

    def _transposed(self, A_RN: Tensor) -> Tensor:
        if not self.is_conv:
            return A_RN @ (self._single(self.weight) if self.single_down else self.weight)
        C, H, W = self.out_shape
        A_RHWC = A_RN.reshape(-1, H, W, C)
        top, left = self.padding
        height, width = self.in_shape[1:]
        full = self._overlap_add(A_RHWC, height + 2 * top, width + 2 * left)
        return full[:, top : top + height, left : left + width].reshape(-1, self.inputs)

    def transpose_window(self, A_RhwC: Tensor) -> Tensor:
        """The transposed convolution on a window, without padding: [R, h, w, O] -> [R, (h-1)s+k, (w-1)s+k, I]."""
        if self.single_down:
            return self._transposed_window(A_RhwC.float()).double()
        return self._transposed_window(A_RhwC)

    def _transposed_window(self, A_RhwC: Tensor) -> Tensor:
        h, w = A_RhwC.shape[1:3]
        dense = self._window_matrix(h, w)
        if dense is not None:
            height, width = self.window_below(h, w)
            return (A_RhwC.flatten(1) @ dense).view(-1, height, width, self.in_shape[0])
        return self._overlap_add(A_RhwC, *self.window_below(h, w))

    def linear_window(self, x_RhwI: Tensor, h: int, w: int) -> Tensor:
        """The convolution on a window without padding, giving an h x w window of outputs; the adjoint of transpose_window."""
        dense = self._window_matrix(h, w)
        if dense is not None:
            return (x_RhwI.flatten(1) @ dense.t()).view(-1, h, w, self.out_shape[0])
        return F.conv2d(x_RhwI.permute(0, 3, 1, 2), self.weight, None, self.stride).permute(0, 2, 3, 1)

    def window_below(self, h: int, w: int) -> tuple[int, int]:
        return (h - 1) * self.stride[0] + self.kernel[0], (w - 1) * self.stride[1] + self.kernel[1]

    def _overlap_add(self, A_RHWC: Tensor, height: int, width: int) -> Tensor:
        R, H, W, C = A_RHWC.shape
        (sy, sx), (ky, kx) = self.stride, self.kernel
        weight = self._single(self.weight) if self.single_down else self.weight
        if self.in_shape[0] > 4 or self.weight.device.type != "cpu":
            unread = (height - ((H - 1) * sy + ky), width - ((W - 1) * sx + kx))  # border that no output reads
            image = A_RHWC.permute(0, 3, 1, 2)
            return F.conv_transpose2d(image, weight, None, self.stride, 0, unread).permute(0, 2, 3, 1)
        # Few input channels: one matrix product and k*k shifted additions are 2 to 3 times faster on CPUs.
        if "columns" not in self.cache:
            self.cache["columns"] = weight.permute(0, 2, 3, 1).reshape(C, -1).contiguous()
        columns = (A_RHWC.reshape(-1, C) @ self.cache["columns"]).view(R, H, W, ky, kx, -1)
        out = A_RHWC.new_zeros(R, height, width, columns.shape[-1])
        for i in range(ky):
            for j in range(kx):
                out[:, i : i + sy * (H - 1) + 1 : sy, j : j + sx * (W - 1) + 1 : sx] += columns[:, :, :, i, j]
        return out

    def _window_matrix(self, h: int, w: int) -> Tensor | None:
        """The transposed convolution of a small window as one matrix: at these sizes a product beats a convolution."""
        height, width = self.window_below(h, w)
        C, inputs = self.out_shape[0], self.in_shape[0]
        small = C * h * w * inputs * height * width <= 8_000_000 and height * width <= 8 * self.kernel[0] * self.kernel[1]
        if not small:
            return None
        if (h, w) not in self.cache:
            count = C * h * w
            dtype = torch.float32 if self.single_down else self.weight.dtype
            eye = torch.eye(count, dtype=dtype, device=self.weight.device).view(count, h, w, C)
            self.cache[(h, w)] = self._overlap_add(eye, height, width).reshape(count, -1).contiguous()
        return self.cache[(h, w)]
