"""What is made of the weights before they are evaluated: a moving average of them, and exact BN statistics."""

import copy
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from cure_ray.data.images import Images
from cure_ray.networks.sequence import read_blocks
from cure_ray.training.folding import clean_forward


@dataclass(frozen=True)
class Average:
    """A moving average of every floating tensor of a network's state; counters are those of the network."""

    network: nn.Sequential
    decay: float

    @staticmethod
    def of(network: nn.Sequential, decay: float) -> "Average":
        return Average(copy.deepcopy(network).requires_grad_(False), decay)

    @torch.no_grad()
    def take_in(self, network: nn.Sequential) -> None:
        own, other = self.network.state_dict(), network.state_dict()
        floating = [name for name, tensor in own.items() if tensor.is_floating_point()]
        torch._foreach_lerp_([own[n] for n in floating], [other[n] for n in floating], 1 - self.decay)
        for name in own.keys() - set(floating):
            own[name].copy_(other[name])


@torch.no_grad()
def precise_statistics(network: nn.Sequential, images: Images, batch_size: int, channels_last: bool) -> None:
    """Running BN statistics become those of the unaugmented images, pooled over batches like those of training; the rest is dropped.

    Each batch is normalised by its own statistics, as in training (Wu and Johnson, Rethinking "Batch" in BatchNorm, 2021).
    """
    blocks = read_blocks(network)
    norms = [block.norm for block in blocks.blocks]
    kept = [None if norm is None or norm.num_batches_tracked is None else norm.num_batches_tracked.clone() for norm in norms]
    sums: list[Tensor | None] = [None] * len(norms)
    batches = len(images) // batch_size
    for batch in range(batches):
        x, _ = images.batch(torch.arange(batch * batch_size, (batch + 1) * batch_size, device=images.raw.device))
        x = x.contiguous(memory_format=torch.channels_last) if channels_last else x
        for i, (norm, found) in enumerate(zip(norms, clean_forward(blocks, x)[1], strict=True)):
            if norm is not None and found is not None:
                mean, variance = found.mean.double(), found.inverse_std.double().pow(-2) - norm.eps
                moments = torch.stack([mean, variance + mean.square()])
                known = sums[i]
                sums[i] = moments if known is None else known + moments
    for norm, total, count in zip(norms, sums, kept, strict=True):
        if norm is not None and total is not None:
            assert norm.running_mean is not None
            assert norm.running_var is not None
            mean, square = total / batches
            norm.running_mean.copy_(mean)
            norm.running_var.copy_((square - mean.square()).clamp(min=0))
            if norm.num_batches_tracked is not None and count is not None:
                norm.num_batches_tracked.copy_(count)
