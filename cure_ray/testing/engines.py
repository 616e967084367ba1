"""The contract every bound engine keeps: same shapes, same order of margins, sound, and honest about what it cannot do.

Subclass EngineContract in a test module and say how your engine is made; every test runs for each stage the engine offers.
"""

import math

import pytest
import torch
from torch import Tensor, nn

from cure_ray.bounds.engine import STAGES, Engine, Stage
from cure_ray.errors import UserError
from cure_ray.networks.models import Network, Normalize
from cure_ray.networks.residual import Residual
from cure_ray.threats.balls import Ball
from cure_ray.threats.geometry import distance
from cure_ray.threats.norms import NORMS

THREATS = (Ball("linf", 0.03), Ball("l2", 0.2), Ball("l1", 0.4))
SHAPE = (2, 6, 6)  # square: auto_LiRPA 0.3 fails on oblong images; the native engine's own tests have them


def networks() -> dict[str, Network]:
    """Small networks with every layer an engine reads, BN with statistics of its own; made anew at each call, always alike."""
    conv, linear, relu = nn.Conv2d, nn.Linear, nn.ReLU

    def build(*layers: nn.Module, classes: int = 3) -> Network:
        return _randomised(Network(list(layers), SHAPE, classes))

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return {
            "linear-one-pair": build(nn.Flatten(), linear(72, 6), relu(), linear(6, 2), classes=2),
            "stride-no-padding": build(conv(2, 3, 3, 2, 0), relu(), nn.Flatten(), linear(12, 5), relu(), linear(5, 3)),
            "padding-two-convs": build(conv(2, 3, 3, 1, 1), relu(), conv(3, 2, 2, 2, 1), relu(), nn.Flatten(), linear(32, 3)),
            "bn-after-both": build(
                conv(2, 3, 2, 2, 0), nn.BatchNorm2d(3), relu(), nn.Flatten(), linear(27, 5), nn.BatchNorm1d(5), relu(), linear(5, 3)
            ),
            "normalize-no-bias": build(
                Normalize([0.4, 0.5], [0.3, 0.2]), conv(2, 3, 3, 1, 1, bias=False), relu(), nn.Flatten(), linear(108, 3)
            ),
            "residual-projection": build(
                conv(2, 3, 3, 1, 1), relu(),
                Residual([conv(3, 4, 3, 2, 1), nn.BatchNorm2d(4), relu(), conv(4, 4, 3, 1, 1)], [conv(3, 4, 1, 2), nn.BatchNorm2d(4)]),
                relu(), nn.AvgPool2d(2), nn.Flatten(), linear(4, 3),
            ),
            "residual-without-relu": build(
                Normalize([0.4, 0.5], [0.3, 0.2]), conv(2, 3, 2, 2, 0), Residual([conv(3, 4, 1), relu(), conv(4, 3, 3, 1, 1)]),
                nn.Flatten(), linear(27, 5), relu(), Residual([linear(5, 4), relu(), linear(4, 5)]), linear(5, 3),
            ),
        }  # fmt: skip


def _randomised(network: Network) -> Network:
    with torch.no_grad():
        for module in network.modules():
            if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d):
                assert module.running_mean is not None
                assert module.running_var is not None
                module.running_mean.normal_(0, 0.2)
                module.running_var.uniform_(0.3, 1.5)
                module.weight.uniform_(-1.2, 1.2)
                module.bias.normal_(0, 0.2)
    return network.eval()


NETWORKS = networks()


def images(count: int) -> Tensor:
    """Always the same, with exact zeros, as real images have."""
    x = torch.rand(count, *SHAPE, generator=torch.Generator().manual_seed(1))
    return torch.where(x < 0.2, torch.zeros_like(x), x)


def logit_margins(network: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """[B, K-1] f_y - f_i for the classes i != y in increasing order, in float64."""
    with torch.no_grad():
        out = network.double()(x.double())
        network.float()
    others = torch.stack([torch.tensor([i for i in range(out.shape[1]) if i != label]) for label in y.tolist()])
    margins: Tensor = out.gather(1, y[:, None]) - out.gather(1, others)
    return margins


class EngineContract:
    """What an engine must do. `make` builds it for one of `NETWORKS`; an ImportError there skips everything."""

    def make(self, network: Network) -> Engine:
        raise NotImplementedError("return your engine for this network")

    def offered(self) -> list[Stage]:
        """The stages under contract; none where the engine is not installed."""
        try:
            return list(self.make(NETWORKS["linear-one-pair"]).stages)
        except ImportError:
            return []

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        if "stage" in metafunc.fixturenames:
            metafunc.parametrize("stage", [s for s in self.offered() if s != "branch-and-bound"])
        if "network" in metafunc.fixturenames:
            metafunc.parametrize("network", NETWORKS)

    @pytest.fixture(autouse=True)
    def _installed(self) -> None:
        if not self.offered():
            pytest.skip("not installed")

    def test_margins_are_below_every_point_of_the_set(self, stage: Stage, network: str) -> None:
        net, x = NETWORKS[network], images(3)
        y, e, g = net(x).argmax(1), self.make(net), torch.Generator().manual_seed(2)
        for threat in THREATS:
            for box in (True, False):
                margins = e.margins(e.problem(x, y, threat, box), stage)
                assert margins.dtype == torch.float64
                assert margins.shape == (3, net.num_classes - 1)
                assert torch.isfinite(margins).all()
                assert (margins <= logit_margins(net, x, y) + 1e-4).all()
                for _ in range(8):
                    noise = torch.randn(x.shape, generator=g, dtype=torch.float64)
                    z = x.double() + noise * (threat.eps / distance(noise.flatten(1), threat.norm)).view(-1, 1, 1, 1)
                    z = z.clamp(0, 1) if box else z
                    assert (margins <= logit_margins(net, z, y) + 1e-4).all()

    def test_radius_zero_gives_the_clean_margins(self, stage: Stage) -> None:
        for net in NETWORKS.values():
            x, y, e = images(2), torch.tensor([0, net.num_classes - 1]), self.make(net)
            for norm in NORMS:
                margins = e.margins(e.problem(x, y, Ball(norm, 0.0)), stage)
                torch.testing.assert_close(margins.cpu(), logit_margins(net, x, y), rtol=1e-3, atol=1e-3)

    def test_a_huge_radius_is_neither_an_error_nor_a_proof(self, stage: Stage) -> None:
        net, x = NETWORKS["padding-two-convs"], images(2)
        e = self.make(net)
        for norm in NORMS:
            margins = e.margins(e.problem(x, net(x).argmax(1), Ball(norm, 1e4), box=False), stage)
            assert not (margins > 0).all(1).any()

    def test_a_batch_of_one_duplicates_and_odd_memory_layouts_agree(self, stage: Stage) -> None:
        net, x = NETWORKS["bn-after-both"], images(3)
        y, e = net(x).argmax(1), self.make(net)
        for threat in THREATS:
            together = e.margins(e.problem(x, y, threat), stage)
            alone = torch.cat([e.margins(e.problem(x[i : i + 1], y[i : i + 1], threat), stage) for i in range(3)])
            torch.testing.assert_close(alone, together, rtol=1e-3, atol=1e-3)
            double = e.margins(e.problem(x[[0, 0, 1]], y[[0, 0, 1]], threat), stage)
            torch.testing.assert_close(double[0], double[1], rtol=1e-3, atol=1e-3)
            strided = x.permute(0, 3, 2, 1).contiguous().permute(0, 3, 2, 1)
            assert not strided.is_contiguous()
            torch.testing.assert_close(e.margins(e.problem(strided, y, threat), stage), together, rtol=1e-3, atol=1e-3)

    def test_selected_samples_keep_their_margins(self, stage: Stage) -> None:
        net, x = NETWORKS["stride-no-padding"], images(4)
        e = self.make(net)
        problem = e.problem(x, net(x).argmax(1), THREATS[1])
        whole = e.margins(problem, stage)
        part = problem.select(torch.tensor([3, 1]))
        assert part.size == 2
        torch.testing.assert_close(e.margins(part, stage), whole[[3, 1]], rtol=1e-3, atol=1e-3)

    def test_a_poisoned_sample_gets_nan_and_its_neighbours_do_not(self, stage: Stage) -> None:
        e, x = self.make(NETWORKS["stride-no-padding"]), images(3)
        x[1, 0, 0, 0] = math.nan
        margins = e.margins(e.problem(x, torch.tensor([0, 0, 0]), THREATS[0]), stage)
        assert torch.isnan(margins[1]).all()
        assert torch.isfinite(margins[[0, 2]]).all()

    def test_bad_networks_are_refused(self) -> None:
        poisoned = networks()["stride-no-padding"]
        first = poisoned[0]
        assert isinstance(first, nn.Conv2d)
        with torch.no_grad():
            first.weight[0, 0, 0, 0] = math.nan
        for network in (poisoned, networks()["bn-after-both"].train()):
            with pytest.raises(UserError):
                self.make(network).problem(images(1), torch.tensor([0]), THREATS[0])

    def test_the_engine_says_what_it_is(self) -> None:
        e = self.make(NETWORKS["linear-one-pair"])
        assert e.name
        assert e.version
        assert [s for s in STAGES if s in e.stages] == list(e.stages)  # cheapest first

    def test_branching_keeps_what_was_proven_and_respects_its_budgets(self) -> None:
        if "branch-and-bound" not in self.offered():
            pytest.skip("offers no branch and bound")
        for net in NETWORKS.values():
            e, x = self.make(net), images(3)
            y = net(x).argmax(1)
            for threat in THREATS:
                problem = e.problem(x, y, Ball(threat.norm, 2 * threat.eps))
                before = e.margins(problem, "alpha-crown")
                for b, result in enumerate(e.branch(problem, seconds=0.0, nodes=1000)):
                    assert result.nodes == 0
                    assert result.exhausted or (before[b] > 0).all()
                for b, result in enumerate(e.branch(problem, seconds=1.0, nodes=30)):
                    assert result.margins.dtype == torch.float64
                    assert (result.margins >= before[b].cpu() - 1e-9).all()
                    assert (result.margins <= logit_margins(net, x, y)[b] + 1e-6).all()
                    assert result.nodes <= 30 + 2 * 64
