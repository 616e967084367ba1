"""A small real classifier of 8x8 digits, trained in a second, and a residual one: networks to try an engine on."""

import functools

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

from cure_ray.networks.models import Network


@functools.cache
def digits() -> tuple[Tensor, Tensor]:
    data = load_digits()
    return torch.tensor(data.images / 16.0, dtype=torch.float32)[:, None], torch.tensor(data.target)


def architecture() -> Network:
    """Module-level and without arguments, so that `--network cure_ray.testing.tiny:architecture` finds it too."""
    layers = [nn.Conv2d(1, 6, 3, 2, 1), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten(), nn.Linear(96, 24), nn.ReLU(), nn.Linear(24, 10)]
    return Network(layers, (1, 8, 8), 10)


@functools.cache
def network() -> Network:
    torch.manual_seed(0)
    net = architecture()
    x, y = digits()
    optimizer = torch.optim.Adam(net.parameters(), 0.01)
    for _ in range(60):
        batch = torch.randint(1000, (200,))
        noise = 0.1 * torch.randn(200, 1, 8, 8)
        loss = nn.functional.cross_entropy(net((x[batch] + noise).clamp(0, 1)), y[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return net.eval().requires_grad_(False)


def samples(n: int, first: int = 1000) -> tuple[Tensor, Tensor]:
    x, y = digits()
    return x[first : first + n].clone(), y[first : first + n].clone()


class Skip(nn.Module):
    """A residual network, which only the general-graph engine reads."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.inner, self.head = nn.Conv2d(1, 4, 3, 2, 1), nn.Conv2d(4, 4, 3, 1, 1), nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.stem((x - 0.5) / 0.25))
        return self.head(torch.flatten(torch.relu(h + self.inner(h)), 1))


def residual() -> Skip:
    torch.manual_seed(0)
    return Skip()
