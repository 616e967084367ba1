"""A small digits classifier, quickly trained on boxes so that some samples are provable, shared by geometric and patch tests."""

from functools import cache

import torch
from torch import Tensor

from cure_ray.config import Dataset
from cure_ray.data.images import load_dataset
from cure_ray.networks.models import Network, conv_small, mlp
from cure_ray.networks.sequence import read_blocks
from cure_ray.training.folding import fold_batch
from cure_ray.training.propagation import Region, propagate, upper_bounds


@cache
def digits_network(name: str = "conv-small") -> tuple[Network, Tensor, Tensor]:
    """An IBP-trained network (no BN), test images and labels."""
    torch.manual_seed(0)
    make = conv_small if name == "conv-small" else mlp
    network = make((1, 8, 8), 10, (0.1,), (0.9,), 1.0, batch_norm=False)
    images = load_dataset(Dataset(name="digits"), "train")
    optimizer = torch.optim.Adam(network.parameters(), lr=5e-3)
    for step in range(250):
        x, y = images.batch(torch.randint(len(images), (64,)))
        radius = torch.full_like(x, 0.03 * min(1.0, step / 150))
        blocks = read_blocks(network)
        folded = fold_batch(blocks, [None] * len(blocks.blocks))
        u = upper_bounds(folded, propagate(folded, [Region(x, radius, "linf")]), y)
        optimizer.zero_grad()
        u.logsumexp(1).mean().backward()
        optimizer.step()
    network.eval().requires_grad_(False)
    test = load_dataset(Dataset(name="digits"), "test")
    x, y = test.batch(torch.arange(40))
    return network, x, y
