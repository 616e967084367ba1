"""Our engines under the contract that any engine keeps, and against each other."""

import pytest
import torch

from cure_ray.bounds.engine import Engine
from cure_ray.bounds.native.engine import NativeEngine
from cure_ray.networks.models import Network
from cure_ray.testing.engines import NETWORKS, EngineContract, images
from cure_ray.threats.balls import Ball


class TestNative(EngineContract):
    def make(self, network: Network) -> Engine:
        return NativeEngine(network, "cpu")


class TestAutoLirpa(EngineContract):
    def make(self, network: Network) -> Engine:
        from cure_ray.bounds.lirpa.engine import LirpaEngine

        return LirpaEngine(network, torch.device("cpu"), alpha_iterations=4)  # sound after any number of steps


@pytest.mark.parametrize("network", ["stride-no-padding", "bn-after-both", "normalize-no-bias", "linear-one-pair"])
def test_engines_agree_with_the_native_one_on_ibp(network: str) -> None:
    """Configured alike (no box), interval bounds are the same mathematics; l1 differs, as auto_LiRPA uses a looser first layer."""
    net = NETWORKS[network]
    x = images(3)
    y = net(x).argmax(1)
    for threat in (Ball("linf", 0.03), Ball("l2", 0.2)):
        ours, other = (e.margins(e.problem(x, y, threat, box=False), "ibp") for e in (TestNative().make(net), TestAutoLirpa().make(net)))
        if threat.norm == "linf":
            torch.testing.assert_close(ours, other.cpu(), rtol=1e-3, atol=2e-3)
        else:  # a folded border: native counts only the taps inside the image, so it is never looser
            assert (ours >= other.cpu() - 2e-3).all()
