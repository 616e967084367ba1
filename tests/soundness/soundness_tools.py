"""One compact check that the bounds of norm balls are sound.

Everything that judges the engine comes from soundness_points, never from the engine's own code. Imports of cure_ray happen inside the
functions: the mutation test runs them against altered copies of the package.
"""

from dataclasses import replace
from types import SimpleNamespace

import torch
from soundness_coupled import check_coupled, check_norms, check_one_layer, check_sharp
from soundness_networks import designed_network, random_network, tied_network
from soundness_numerics import check_numerics
from soundness_points import in_chain, points, preactivations, true_margins, worst_points
from soundness_single import check_single
from torch import Tensor

THREATS = (("linf", 0.04), ("l2", 0.25), ("l1", 0.6))
TOLERANCE = 1e-9  # float64 noise of the judge; the engine itself gets none


def check_sound(case: SimpleNamespace, norm: str, eps: float, box: bool, branch: bool = True, count: int = 24) -> None:
    """Containment at every layer for every method, and no margin above what some point of the set attains."""
    from cure_ray.bounds.native.engine import NativeEngine
    from cure_ray.bounds.native.intermediate import crown_bounds, optimised_bounds
    from cure_ray.bounds.native.relaxation import interval_bounds
    from cure_ray.threats.balls import Ball

    engine = NativeEngine(case.network, "cpu")
    problem = engine.problem(case.x, case.y, Ball(norm, eps), box)
    net, domain = engine.decide, problem.domain
    images = torch.cat([points(case.x, norm, eps, box, count), worst_points(case.network, case.x, case.y, norm, eps, box)])
    P, B = images.shape[:2]
    layers = in_chain([z.view(P, B, -1) for z in preactivations(case.network, images.flatten(0, 1))], net)
    hidden = {
        "ibp": interval_bounds(net, domain),
        "crown": crown_bounds(net, domain, 100_000),
        "alpha": optimised_bounds(engine.search, net, domain, 100_000, 4),
    }
    hidden["enclosed"] = enclosed(net, domain, hidden["ibp"])
    for name, bounds in hidden.items():
        assert len(bounds) == len(layers) - 1
        for k, b in enumerate(bounds):
            assert torch.isfinite(b.lower_BN).all()
            assert torch.isfinite(b.upper_BN).all()
            assert not (layers[k] < b.lower_BN - TOLERANCE).any(), f"{name}: layer {k} goes below its lower bound"
            assert not (layers[k] > b.upper_BN + TOLERANCE).any(), f"{name}: layer {k} goes above its upper bound"
    attained = torch.stack([true_margins(z, case.y) for z in layers[-1]]).amin(0)
    clean = true_margins(layers[-1][0], case.y)
    for stage in ("ibp", "crown-ibp", "crown", "alpha-crown"):
        margins = engine.margins(problem, stage)
        assert margins.shape == attained.shape
        assert torch.isfinite(margins).all(), stage
        proven = (margins > 0).all(1)
        assert (margins <= attained + (TOLERANCE if proven.all() else 1e-4)).all(), f"{stage}: above an attained margin"
        assert (margins[proven] <= attained[proven] + TOLERANCE).all(), f"{stage}: a certificate above an attained margin"
    if branch:
        check_splits(engine, problem, layers, case.y)
        at_x = replace(problem, domain=engine.problem(case.x, case.y, Ball(norm, 1e-9), box).domain)  # one point, the bounds of all
        check_splits(engine, at_x, [z[:1] for z in layers], case.y)
        for b, result in enumerate(engine.branch(problem, seconds=60.0, nodes=40)):
            assert (result.margins <= attained[b] + TOLERANCE).all(), "branch and bound: above an attained margin"
            assert (result.margins <= clean[b] + TOLERANCE).all()


def enclosed(net: object, domain: object, bounds: list) -> list:
    """Every layer by one pass with parallel lines on the interval bounds below it."""
    from cure_ray.bounds.native.intermediate import Rows
    from cure_ray.bounds.native.relaxation import Relaxation

    found = bounds[:1]
    for k in range(1, net.hidden):
        far = torch.full_like(bounds[k].lower_BN, 1e6)
        rows = Rows(net, k, [Relaxation.of(b) for b in bounds[:k]], replace(bounds[k], lower_BN=-far, upper_BN=far), domain)
        rows.enclose(torch.ones_like(far, dtype=torch.bool), 100_000)
        found.append(rows.bounds)
    return found


def check_splits(engine: object, problem: object, layers: list[Tensor], y_B: Tensor) -> None:
    """A sub-problem's bound, with any slopes and multipliers, is below the margin of every point that obeys its splits."""
    from cure_ray.bounds.native.nodes import Nodes
    from cure_ray.bounds.native.relaxation import margin_rows
    from cure_ray.bounds.native.subproblems import Space, unstable_index

    if not problem.bounds:
        return
    g = torch.Generator().manual_seed(0)
    index_BU = unstable_index(problem.bounds)
    bounds = [b.select(torch.arange(len(y_B))) for b in problem.bounds]
    space = Space(engine.decide, problem.domain, bounds, margin_rows(y_B, engine.decide.classes, torch.float64), index_BU)
    padded_PBN = torch.nn.functional.pad(torch.cat(layers[:-1], 2), (0, 1))
    for p in range(len(padded_PBN)):
        z_BU = padded_PBN[p].gather(1, index_BU)
        chosen = torch.rand(z_BU.shape, generator=g) < 0.5
        split_BU = torch.where(chosen, z_BU.sign(), torch.zeros_like(z_BU)).to(torch.int8)
        alpha_BU = torch.rand(z_BU.shape, generator=g, dtype=torch.float64)
        beta_BU = torch.rand(z_BU.shape, generator=g, dtype=torch.float64) * (p % 3)
        margins = true_margins(layers[-1][p], y_B)
        for spec in range(margins.shape[1]):
            specs = torch.full((len(y_B),), spec)
            price_BL = torch.rand(len(y_B), len(problem.bounds), generator=g, dtype=torch.float64) * 3
            plain_B = (torch.arange(len(y_B)) + p) % 2 == 0
            candidate_BK = specs.unsqueeze(1)
            nodes = Nodes(margins[:, spec], torch.arange(len(y_B)), specs, split_BU, alpha_BU, beta_BU, price_BL, candidate_BK, plain_B)
            if not problem.domain.balls:
                nodes.plain_D = torch.ones_like(plain_B)
            assert (space.value(nodes) <= margins[:, spec] + TOLERANCE).all(), "a split bound is above a point that obeys the splits"


def check_ties() -> None:
    """No stage may claim a positive margin where the true one is exactly 0, whatever the rounding."""
    from cure_ray.bounds.native.engine import NativeEngine
    from cure_ray.threats.balls import Ball

    for seed in range(2):
        engine = NativeEngine(tied_network(seed), "cpu")
        x = torch.rand(16, 1, 3, 3, generator=torch.Generator().manual_seed(seed))
        for threat in (Ball("linf", 0.0), Ball("l2", 1e-8), Ball("l1", 1e-8)):
            problem = engine.problem(x, torch.arange(16) % 2, threat)
            for stage in ("ibp", "crown-ibp", "crown", "alpha-crown"):
                assert not (engine.margins(problem, stage) > 0).any(), f"{stage}: certified an exact tie"


def check_open_child() -> None:
    """One neuron whose split proves one side; the other holds a misclassified point, and must keep the tree open."""
    from cure_ray.bounds.native.branching import Settings
    from cure_ray.bounds.native.effort import Effort
    from cure_ray.bounds.native.engine import NativeEngine
    from cure_ray.networks.models import Network
    from cure_ray.threats.balls import Ball

    first, last = torch.nn.Linear(1, 1), torch.nn.Linear(1, 2)
    for sign in (1.0, -1.0):  # the open side is the active one, then the inactive one
        with torch.no_grad():
            first.weight.fill_(sign)
            first.bias.fill_(-0.5 * sign)
            last.weight.copy_(torch.tensor([[-10.0 * sign], [0.0]]))
            last.bias.copy_(torch.tensor([0.5 if sign > 0 else -0.5, 0.0]))
        network = Network([torch.nn.Flatten(), first, torch.nn.ReLU(), last], (1, 1, 1), 2).eval()
        x = torch.full((1, 1, 1, 1), 0.4)  # margin at x: 0.5; below 0 where x > 0.55, above 0.45
        for norm in ("linf", "l2"):
            engine = NativeEngine(network, "cpu", effort=Effort(branching=Settings(hope=0.0)))
            (found,) = engine.branch(engine.problem(x, torch.tensor([0]), Ball(norm, 0.2)), seconds=60.0, nodes=40)
            assert found.nodes > 0, "nothing was split"
            assert not (found.margins > 0).all(), "proven with a misclassified point in an open child"


def check_radius_zero(case: SimpleNamespace) -> None:
    """At radius 0 every method is exact, where float64 multiplies."""
    from cure_ray.bounds.native.effort import Effort
    from cure_ray.bounds.native.engine import NativeEngine
    from cure_ray.threats.balls import Ball

    engine = NativeEngine(case.network, "cpu", effort=Effort(single=False))
    clean = true_margins(preactivations(case.network, case.x)[-1], case.y)
    for norm in ("linf", "l2", "l1"):
        problem = engine.problem(case.x, case.y, Ball(norm, 0.0))
        for stage in ("ibp", "crown-ibp", "crown", "alpha-crown"):
            torch.testing.assert_close(engine.margins(problem, stage), clean, rtol=1e-4, atol=1e-4)


def check_compact() -> None:
    """Minutes of testing in seconds: used on every mutant."""
    check_numerics()
    check_ties()
    check_radius_zero(designed_network(0))
    check_single()
    check_open_child()
    check_norms()
    check_one_layer()
    check_sharp()
    check_coupled(designed_network(0), "l2", 0.25, True)
    check_coupled(random_network(5), "l1", 1.2, False)
    for norm, eps in THREATS:
        check_sound(designed_network(0), norm, eps, True, count=8)
        check_sound(random_network(5), norm, 2 * eps, False, count=8)
    check_sound(designed_network(1), "l2", 0.15, False, count=8)
    check_sound(random_network(14), "l1", 1.0, True, count=8)
    for seed in (2, 5, 14):  # sets with misclassified points, where a leaf left out shows
        for norm, eps in THREATS:
            check_sound(random_network(seed), norm, 4 * eps, True, count=8)
