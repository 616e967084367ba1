"""Ascents that cannot reach 0 stop; those that can go on, whoever shares their batch."""

import torch
from torch import nn

from cure_ray.bounds.native import optimized
from cure_ray.bounds.native.effort import Effort
from cure_ray.bounds.native.engine import NativeEngine
from cure_ray.bounds.native.linear import in_reach
from cure_ray.networks.models import Network
from cure_ray.threats.balls import Ball


def test_what_is_in_reach() -> None:
    best, before = torch.tensor([[-1.0], [-1.0], [0.5], [-0.2]]), torch.tensor([[-1.5], [-1.1], [0.4], [-0.2]])
    assert in_reach(best, before, 3.0).tolist() == [True, False, True, False]


def test_hopeless_rows_are_left_and_verdicts_do_not_depend_on_company(monkeypatch) -> None:
    torch.manual_seed(0)
    network = Network([nn.Flatten(), nn.Linear(36, 40), nn.ReLU(), nn.Linear(40, 40), nn.ReLU(), nn.Linear(40, 3)], (1, 6, 6), 3).eval()
    x = torch.rand(12, 1, 6, 6, generator=torch.Generator().manual_seed(1))
    y = network(x).argmax(1)
    engine = NativeEngine(network, effort=Effort(hidden="ibp"))
    rows: list[int] = []
    whole = optimized.evaluate

    def counting(*arguments, **words):
        rows.append(len(arguments[3][1]))
        return whole(*arguments, **words)

    monkeypatch.setattr(optimized, "evaluate", counting)
    for threat in (Ball("linf", 0.03), Ball("linf", 0.15)):
        together = engine.margins(engine.problem(x, y, threat), "alpha-crown")
        alone = torch.cat([engine.margins(engine.problem(x[i : i + 1], y[i : i + 1], threat), "alpha-crown") for i in range(12)])
        torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-4)
    rows.clear()
    engine.margins(engine.problem(x, y, Ball("linf", 0.6)), "alpha-crown")
    assert 2 * optimized.LEG <= len(rows) < 20, "a hopeless batch is climbed to the end"
