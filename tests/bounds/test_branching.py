"""Branch and bound: the pool of open nodes, trees that do not depend on their company, and samples given up in time."""

import random

import pytest
import torch
from test_native import network

from cure_ray.bounds.native.branching import Settings
from cure_ray.bounds.native.effort import Effort
from cure_ray.bounds.native.engine import NativeEngine
from cure_ray.bounds.native.nodes import Nodes, Pool
from cure_ray.networks.models import Network
from cure_ray.threats.balls import Ball

COUNT, THREAT = 6, Ball("l1", 2.7)


def numbered(first: int, count: int) -> Nodes:
    """Rows that all carry their number, so that a mixed-up row shows."""
    n = torch.arange(first, first + count)
    wide = n.unsqueeze(1).expand(-1, 5)
    return Nodes(
        n.float(), n, n + 1, (wide % 100).to(torch.int8), wide.float(), -wide.float(), wide[:, :2].float(), wide[:, :3], n % 2 == 0
    )


@pytest.mark.parametrize("seed", range(20))
def test_a_pool_returns_each_row_once_and_whole(seed: int) -> None:
    rng = random.Random(seed)
    pool, model, number = Pool(numbered(0, 1)), [], 0
    for _ in range(60):
        count = rng.choice([0, 1, 3, 17])
        pool.add(numbered(number, count))
        model += range(number, number + count)
        number += count
        assert pool.bounds().tolist() == pool.samples().tolist()
        assert sorted(pool.samples().tolist()) == sorted(model)
        chosen = [i for i in range(len(pool)) if rng.random() < 0.4]
        expected = pool.samples()[chosen].tolist()
        taken = pool.take(torch.tensor(chosen, dtype=torch.long))
        for row, value in zip(range(len(taken)), expected, strict=True):
            one, want = taken.select(torch.tensor([row])), numbered(value, 1)
            assert all(torch.equal(getattr(one, name), getattr(want, name)) for name in vars(want))
        model = [n for n in model if n not in set(expected)]


def example() -> tuple[Network, torch.Tensor, torch.Tensor]:
    """A network and images; under THREAT some need a few nodes, some hundreds, and some more than anybody has."""
    net = network(2)
    x = torch.rand(COUNT, 1, 10, 10, generator=torch.Generator().manual_seed(0))
    return net, x, net(x).argmax(1)


def searched(branching: Settings | None = None, samples: slice = slice(COUNT), threat: Ball = THREAT, **engine):  # type: ignore[no-untyped-def]
    """Which samples are proven, the nodes of each, and all that is known of them."""
    net, x, y = example()
    e = NativeEngine(net, effort=Effort(branching=branching or Settings()), **engine)
    found = e.branch(e.problem(x[samples], y[samples], threat), seconds=1e9, nodes=320)
    return [bool((r.margins > 0).all()) for r in found], [r.nodes for r in found], found


def test_a_tree_depends_on_nothing_but_its_sample() -> None:
    for threat in (THREAT, Ball("linf", 0.2)):
        proven, nodes, _ = searched(threat=threat)
        assert 0 < sum(proven) < COUNT
        alone = [searched(samples=slice(b, b + 1), threat=threat) for b in range(COUNT)]
        assert [p for one in alone for p in one[0]] == proven
        few = searched(threat=threat, memory_budget=1 << 20)  # few at a time
        assert few[0] == proven
        if threat.norm == "linf":  # with balls, float32 lets company touch the later digits of an ascent, and with them a tree
            assert [n for one in alone for n in one[1]] == nodes == few[1]


def test_which_hidden_bounds_a_sample_gets_does_not_depend_on_its_company() -> None:
    net, x, y = example()
    engines = [NativeEngine(net, effort=Effort(hidden=hidden, stop_early=False)) for hidden in ("alpha", "ibp")]
    best, fixed = (e.margins(e.problem(x, y, THREAT), "alpha-crown") for e in engines)
    e = NativeEngine(net, effort=Effort(work_limit=4_000, stop_early=False))  # a part of the work that every sample would need
    together = e.margins(e.problem(x, y, THREAT), "alpha-crown")
    near = 0.01  # an ascent in float32 lets the company of a sample touch the later digits
    assert (together > fixed + near).all(), "a part of the work gains nothing"
    for b in range(COUNT):
        alone = e.margins(e.problem(x[b : b + 1], y[b : b + 1], THREAT), "alpha-crown")[0]
        torch.testing.assert_close(alone, together[b], atol=near, rtol=0)
        assert (alone <= best[b] + 3 * near).all(), "with less work the bound is better"


def test_hopeless_samples_are_given_up_and_the_others_are_not() -> None:
    stubborn, all_nodes, _ = searched(Settings(hope=0.0))
    proven, nodes, found = searched()
    assert proven == stubborn
    given_up = [b for b in range(COUNT) if nodes[b] < all_nodes[b]]
    assert given_up
    least = Settings().trial[0]
    for b in given_up:
        assert least <= nodes[b] < 2 * least
        assert found[b].exhausted
        assert found[b].margins.min() <= 0
    untouched = [b for b in range(COUNT) if b not in given_up]
    assert [nodes[b] for b in untouched] == [all_nodes[b] for b in untouched]


def test_the_margins_of_open_samples_lie_between_the_roots_and_the_truth() -> None:
    net, x, y = example()
    e = NativeEngine(net)
    problem = e.problem(x, y, THREAT)
    roots = e.margins(problem, "alpha-crown")
    logits = net(x).double()
    for nodes in (10, 100, 320):
        for b, result in enumerate(e.branch(problem, 1e9, nodes)):
            others = [i for i in range(4) if i != int(y[b])]
            assert (result.margins >= roots[b] - 1e-9).all()
            assert (result.margins <= logits[b, y[b]] - logits[b, others] + 1e-5).all()
