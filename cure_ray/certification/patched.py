"""Concrete patches: images with a rectangle laid over them, and a search for the worst of them that does not ask the bounds."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from cure_ray.attacks import margin
from cure_ray.threats.patches import Patch

PLACES, STEPS = 12, 3  # of the search: positions drawn per image, vertices tried at each


def covered(x_BCHW: Tensor, fill_BCHW: Tensor, top_B: Tensor, left_B: Tensor, patch: Patch) -> Tensor:
    """The images with `fill` inside a rectangle, each at its own position."""
    rows, columns = (torch.arange(size, device=x_BCHW.device) for size in x_BCHW.shape[2:])
    in_rows = (rows >= top_B[:, None]) & (rows < top_B[:, None] + patch.height)
    in_columns = (columns >= left_B[:, None]) & (columns < left_B[:, None] + patch.width)
    return torch.where(in_rows[:, None, :, None] & in_columns[:, None, None, :], fill_BCHW, x_BCHW)


def worst_patches(network: nn.Module, x_BCHW: Tensor, y_B: Tensor, patch: Patch, seeds: Sequence[int]) -> Tensor:
    """The patched image of smallest margin found for each: random positions and contents, then the vertex the gradient points to.

    One seed per image, so that what is found for it does not depend on its batch.
    """
    B, C, H, W = x_BCHW.shape
    streams = [torch.Generator().manual_seed(seed % 2**63) for seed in seeds]
    best, lowest = x_BCHW, torch.full((B,), torch.inf, device=x_BCHW.device)
    for _ in range(PLACES):
        unit = torch.stack([torch.rand(2, generator=stream) for stream in streams]).to(x_BCHW.device)
        top, left = ((unit[:, i] * room).long() for i, room in ((0, H - patch.height + 1), (1, W - patch.width + 1)))
        fill = torch.stack([torch.rand(C, H, W, generator=stream) for stream in streams]).to(x_BCHW)
        for step in range(STEPS + 1):
            point = covered(x_BCHW, fill, top, left, patch).detach().requires_grad_()
            with torch.enable_grad():
                value = margin(network(point), y_B)
                slope = torch.autograd.grad(value.sum(), point)[0]
            closer = value.detach() < lowest
            best = torch.where(closer[:, None, None, None], point.detach(), best)
            lowest = torch.where(closer, value.detach(), lowest)
            fill = (slope < 0).to(x_BCHW) if step < STEPS else fill
    return best
