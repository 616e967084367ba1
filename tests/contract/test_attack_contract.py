"""Our attack under the contract that any attack keeps."""

from collections.abc import Sequence

from torch import Tensor, nn

from cure_ray.attacks import AttackSettings, attack
from cure_ray.testing.attacks import AttackContract
from cure_ray.threats.balls import Ball


class TestAttack(AttackContract):
    def attack(self, network: nn.Module, x_BCHW: Tensor, y_B: Tensor, threat: Ball, seeds: Sequence[int]) -> Tensor:
        return attack(network, x_BCHW, y_B, threat, seeds, AttackSettings())
