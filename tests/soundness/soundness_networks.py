"""Networks the soundness tests run on: random ones, one with everything in it, one whose logits tie.

Imports of cure_ray happen inside the functions: the mutation test runs them against altered copies of the package.
"""

import random
from types import SimpleNamespace

import torch
from torch import nn


def random_network(seed: int) -> SimpleNamespace:
    """A small network with random layers: Normalize or not, 0 to 2 convolutions, 0 to 2 hidden linear layers, BN, missing biases."""
    from cure_ray.networks.models import Network, Normalize

    r = random.Random(seed)
    torch.manual_seed(seed)
    channels, height, width = r.choice([1, 2]), r.choice([4, 5, 6]), r.choice([4, 5, 6])
    shape, classes = (channels, height, width), r.choice([2, 3, 4])
    layers: list[nn.Module] = []
    if r.random() < 0.6:
        mean = [r.uniform(0.1, 0.6) for _ in range(channels)]
        layers.append(Normalize(mean, [r.uniform(0.2, 0.6) for _ in range(channels)]))
    for _ in range(r.choice([0, 1, 1, 2])):
        kernel, stride, padding = r.choice([1, 2, 3]), r.choice([1, 2]), r.choice([0, 1])
        out = r.choice([2, 3, 5])
        new = tuple((n + 2 * padding - kernel) // stride + 1 for n in (height, width))
        if min(new) < 1 or min(height, width) + 2 * padding < kernel:
            continue
        layers.append(nn.Conv2d(channels, out, kernel, stride, padding, bias=r.random() < 0.7))
        layers += [nn.BatchNorm2d(out)] if r.random() < 0.5 else []
        layers.append(nn.ReLU())
        channels, (height, width) = out, new
    layers.append(nn.Flatten())
    features = channels * height * width
    for _ in range(r.choice([0, 1, 1, 2])):
        out = r.choice([3, 6, 9])
        layers.append(nn.Linear(features, out, bias=r.random() < 0.7))
        layers += [nn.BatchNorm1d(out)] if r.random() < 0.4 else []
        layers.append(nn.ReLU())
        features = out
    layers.append(nn.Linear(features, classes, bias=r.random() < 0.8))
    network = Network(layers, shape, classes)
    with torch.no_grad():
        for module in network:
            if isinstance(module, nn.Conv2d | nn.Linear):
                module.weight.mul_(r.uniform(1.0, 2.5))
            if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d):
                module.running_mean.normal_(0, 0.3)
                module.running_var.uniform_(0.2, 2.0)
                module.weight.uniform_(-1.5, 1.5)  # negative gains too
                module.bias.normal_(0, 0.3)
    network.eval()
    x = torch.rand(3, *shape)
    x = torch.where(torch.rand_like(x) < 0.3, (x > 0.5).float(), x)  # pixels on the border of the box
    with torch.no_grad():
        y = network(x).argmax(1)
    y[-1] = (y[-1] + 1) % classes  # one wrong label: its margins are negative, nothing may be certified
    return SimpleNamespace(network=network, x=x, y=y, classes=classes)


def designed_network(seed: int = 0) -> SimpleNamespace:
    """All that can go wrong in one network: two normalised channels, oblong images, strides, padding, BN with negative gains after
    a convolution and a linear layer, a layer without bias, and windows smaller than the images."""
    from cure_ray.networks.models import Network, Normalize

    torch.manual_seed(seed)
    layers = [
        Normalize([0.3, 0.6], [0.25, 0.5]),
        nn.Conv2d(2, 3, 3, 2, 1, bias=False),
        nn.BatchNorm2d(3),
        nn.ReLU(),
        nn.Conv2d(3, 6, 2, 1, (1, 0)),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(6 * 6 * 3, 8),
        nn.BatchNorm1d(8),
        nn.ReLU(),
        nn.Linear(8, 3),
    ]
    network = Network(layers, (2, 9, 8), 3)
    with torch.no_grad():
        for module in network:
            if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d):
                module.eps = 0.05  # not torch's default: whoever folds must read it
                module.running_mean.normal_(0, 0.3)
                module.running_var.uniform_(0.2, 1.0)
                module.weight.uniform_(-1.5, 1.5)
                module.bias.normal_(0, 0.3)
            elif isinstance(module, nn.Conv2d | nn.Linear):
                module.weight.mul_(1.5)
    network.eval()
    x = torch.rand(3, 2, 9, 8)
    x = torch.where(torch.rand_like(x) < 0.3, (x > 0.5).float(), x)
    with torch.no_grad():
        y = network(x).argmax(1)
    return SimpleNamespace(network=network, x=x, y=y, classes=3)


def tied_network(seed: int, width: int = 24) -> nn.Sequential:
    """Two logits that are the same function summed in another order: their margin is exactly 0 everywhere, so any positive
    claim is rounding. Large cancelling weights make the rounding errors large."""
    from cure_ray.networks.models import Network

    torch.manual_seed(seed)
    first, second, last = nn.Linear(9, width), nn.Linear(width, 2 * width), nn.Linear(2 * width, 2)
    order = torch.randperm(width)
    with torch.no_grad():
        first.weight.mul_(10)
        # the second half repeats the first in another order; the logits read one half each
        second.weight[width:], second.bias[width:] = second.weight[order], second.bias[order]
        w = torch.randn(width) * 1000
        last.weight.zero_()
        last.weight[0, :width], last.weight[1, width:] = w, w[order]
        last.bias.fill_(0.1)
    return Network([nn.Flatten(), first, nn.ReLU(), second, nn.ReLU(), last], (1, 3, 3), 2).eval()
