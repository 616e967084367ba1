"""The contract every attack keeps: it finds what is there, by its seeds alone, and what it returns can be put to the test.

Subclass AttackContract in a test module and say how your attack is called. What an attack returns is a candidate: it becomes a
counterexample by `check_witness` only, so an attack may be rough, but not irreproducible, and it may not change the network.
"""

import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from cure_ray.attacks import check_witness, margin, replay_network
from cure_ray.networks.models import Network, conv_small
from cure_ray.threats.balls import Ball
from cure_ray.threats.geometry import distance
from cure_ray.threats.norms import NORMS, Norm

RADII: dict[Norm, float] = {"linf": 0.15, "l2": 0.9, "l1": 2.5}


def linear_network(weights: Tensor, bias: Tensor) -> Network:
    """Two classes with margin w.x + b for class 0, on 1x4x4 images: its worst case over ball∩box is known exactly."""
    layer = nn.Linear(weights.numel(), 2)
    with torch.no_grad():
        layer.weight.copy_(torch.stack([weights, torch.zeros_like(weights)]))
        layer.bias.copy_(torch.stack([bias, torch.zeros_like(bias)]))
    return Network([nn.Flatten(), layer], (1, 4, 4), 2).eval()


def exact_minimum(w: Tensor, x: Tensor, threat: Ball) -> float:
    """min of w.d over ball∩box by bisection on the multiplier (l2), the knapsack (l1) or the interval (linf), in float64."""
    low, high = torch.maximum(-x, torch.tensor(-threat.eps)), torch.minimum(1 - x, torch.tensor(threat.eps))
    if threat.norm == "linf":
        return float((w * torch.where(w > 0, low, high)).sum())
    low, high = -x, 1 - x
    if threat.norm == "l1":
        left, value = threat.eps, 0.0
        for i in w.abs().argsort(descending=True):
            step = min(left, float(-low[i] if w[i] > 0 else high[i]))
            value, left = value - step * float(w[i].abs()), left - step
        return value
    near, far = 1e-9, 1e9
    for _ in range(200):
        middle = math.sqrt(near * far)
        near, far = (middle, far) if float((-w / middle).clamp(low, high).norm()) > threat.eps else (near, middle)
    return float((w * (-w / far).clamp(low, high)).sum())


def small_network(classes: int = 4, side: int = 12) -> Network:
    """A convolutional network with random weights, always the same."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return conv_small((1, side, side), classes, [0.3], [0.4], width=0.5).eval().requires_grad_(False)


class AttackContract:
    """What an attack must do. `attack` returns one candidate image per sample, [B, C, H, W]."""

    reach = 0.02  # of the way from the clean margin to the worst one, what the attack may miss on a linear classifier

    def attack(self, network: nn.Module, x_BCHW: Tensor, y_B: Tensor, threat: Ball, seeds: Sequence[int]) -> Tensor:
        raise NotImplementedError("return your attack's candidates")

    @pytest.mark.parametrize("norm", NORMS)
    def test_it_reaches_the_exact_worst_case_of_a_linear_classifier(self, norm: Norm) -> None:
        rng, threat, y = torch.Generator().manual_seed(0), Ball(norm, RADII[norm]), torch.zeros(6, dtype=torch.long)
        for _ in range(5):
            w, x = torch.randn(16, generator=rng), torch.rand(6, 1, 4, 4, generator=rng)
            network = linear_network(w, torch.tensor(20.0))  # never misclassified, so every restart runs to the end
            found = check_witness(replay_network(network), x, y, self.attack(network, x, y, threat, range(6)), threat)
            for b in range(6):
                clean = float(w.double() @ x[b].double().flatten()) + 20
                exact = clean + exact_minimum(w.double(), x[b].double().flatten(), threat)
                assert exact - 1e-6 <= float(found.margins[b]) <= exact + self.reach * (clean - exact)
            assert not found.valid.any()

    @pytest.mark.parametrize("norm", NORMS)
    def test_every_witness_is_inside_and_misclassified(self, norm: Norm) -> None:
        network, x = small_network(), torch.rand(20, 1, 12, 12, generator=torch.Generator().manual_seed(0))
        x[:, :, :4] = x[:, :, :4].round()  # many pixels already at the border of the domain
        y, threat = network(x).argmax(1), Ball(norm, RADII[norm])
        candidates = self.attack(network, x, y, threat, range(20))
        assert candidates.shape == x.shape
        found = check_witness(replay_network(network), x, y, candidates, threat)
        assert found.valid.any()
        images = found.images[found.valid]
        assert images.dtype == torch.float64
        assert ((images >= 0) & (images <= 1)).all()
        assert (distance((images - x[found.valid].double()).flatten(1), norm) <= threat.eps).all()
        assert (margin(replay_network(network)(images), y[found.valid]) <= 0).all()

    @pytest.mark.parametrize("norm", NORMS)
    def test_a_sample_is_attacked_alike_at_every_call_and_in_any_batch(self, norm: Norm) -> None:
        network = small_network(3, 8).double()
        x = torch.rand(5, 1, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        y, threat = network(x).argmax(1), Ball(norm, 0.3 * RADII[norm])
        together = self.attack(network, x, y, threat, range(5))
        assert torch.equal(together, self.attack(network, x, y, threat, range(5)))
        alone = torch.cat([self.attack(network, x[i : i + 1], y[i : i + 1], threat, [i]) for i in range(5)])
        assert torch.allclose(together, alone, atol=1e-6)

    def test_nothing_from_a_broken_network_counts(self) -> None:
        x, y, threat = torch.full((2, 1, 4, 4), 0.5), torch.zeros(2, dtype=torch.long), Ball("l2", 1.0)
        broken = linear_network(torch.full((16,), math.nan), torch.tensor(0.0))
        found = check_witness(replay_network(broken), x, y, self.attack(broken, x, y, threat, [0, 1]), threat)
        assert not found.valid.any()
        assert found.margins.isnan().all()

    def test_no_samples_are_no_candidates(self) -> None:
        found = self.attack(small_network(3, 8), torch.zeros(0, 1, 8, 8), torch.zeros(0, dtype=torch.long), Ball("linf", 0.1), [])
        assert found.shape == (0, 1, 8, 8)

    def test_attacking_leaves_parameters_gradients_and_mode_untouched(self) -> None:
        network = small_network(3, 8).requires_grad_(True)
        before = {k: v.clone() for k, v in network.state_dict().items()}
        x = torch.rand(4, 1, 8, 8, generator=torch.Generator().manual_seed(2))
        self.attack(network, x, torch.zeros(4, dtype=torch.long), Ball("l1", 1.0), range(4))
        assert all(torch.equal(before[k], v) for k, v in network.state_dict().items())
        assert all(p.grad is None for p in network.parameters())
        assert not network.training
