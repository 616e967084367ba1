"""One compact check of attacks: margins and losses by their definition, candidates that count only inside the ball, starts that differ.

Imports of cure_ray happen inside the functions: the mutation test runs them against altered copies of the package.
"""

import itertools

import torch
from soundness_networks import random_network
from torch import Tensor, nn


def check_losses() -> None:
    from cure_ray.attacks.losses import ANY, LOSSES, margin, objective, ranked_classes

    g = torch.Generator().manual_seed(0)
    for classes in (2, 3, 5):
        logits = torch.randn(6, classes, generator=g, dtype=torch.float64)
        y = torch.arange(6) % classes
        others = [[k for k in range(classes) if k != label] for label in y.tolist()]
        gaps = [min(float(row[label] - row[k]) for k in other) for row, label, other in zip(logits, y.tolist(), others, strict=True)]
        assert torch.allclose(margin(logits, y), torch.tensor(gaps, dtype=torch.float64))
        for row, label, other, found in zip(logits, y.tolist(), others, ranked_classes(logits, y).tolist(), strict=True):
            assert found == sorted(other, key=lambda k: -float(row[k])), f"classes of {label} in another order"
        for kind, free in itertools.product(range(len(LOSSES)), (True, False)):
            target = torch.tensor([ANY if free else other[-1] for other in others])
            value = objective(logits, y, target, torch.full((6,), kind))
            for b, (row, label, other) in enumerate(zip(logits, y.tolist(), others, strict=True)):
                gap = float(row[label] - (max(row[k] for k in other) if free else row[other[-1]]))
                log_p = row.log_softmax(0)
                order = row.sort(descending=True).values
                spread = 1.0
                if classes > 2:
                    spread = float(order[0] - (order[2] if free else (order[2] + order[min(3, classes - 1)]) / 2))
                expected = (gap, float(log_p[label] if free else -log_p[other[-1]]), gap / spread)[kind]
                assert abs(float(value[b]) - expected) < 1e-9, (LOSSES[kind], free, classes)


def check_projection() -> None:
    """The nearest point of ball∩box: inside, and nearer than any other point tried; a point inside stays."""
    from cure_ray.threats.balls import Ball
    from cure_ray.threats.box import EVERYWHERE, UNIT, Box
    from cure_ray.threats.geometry import distance, dual_norm, offsets, project

    g = torch.Generator().manual_seed(0)
    for norm, box in itertools.product(("linf", "l2", "l1"), (UNIT, EVERYWHERE, Box(-2.0, -0.5))):
        threat = Ball(norm, 0.7)
        x = torch.rand(8, 12, generator=g, dtype=torch.float64)
        x = x if box != Box(-2.0, -0.5) else x * 1.5 - 2
        delta = torch.randn(8, 12, generator=g, dtype=torch.float64) * torch.tensor([0.05, 0.3, 1.0, 3.0] * 2)[:, None]
        found = project(delta, x, threat, box)
        p = {"linf": float("inf"), "l2": 2.0, "l1": 1.0}[norm]
        assert torch.allclose(distance(delta, norm), delta.abs().pow(p).sum(1).pow(1 / p) if norm != "linf" else delta.abs().amax(1))
        q = {"linf": 1.0, "l2": 2.0, "l1": float("inf")}[norm]
        assert torch.allclose(dual_norm(delta, norm), torch.linalg.vector_norm(delta, q, dim=1))
        assert bool((torch.linalg.vector_norm(found, p, dim=1) <= 0.7 * (1 + 1e-9)).all()), f"{norm}: outside the ball"
        assert bool(((x + found >= box.low - 1e-12) & (x + found <= box.high + 1e-12)).all()), f"{norm}: outside {box}"
        low, high = offsets(x, 0.7, box)
        assert torch.allclose(low, torch.maximum(torch.full_like(x, -0.7), box.low - x))
        assert torch.allclose(high, torch.minimum(torch.full_like(x, 0.7), box.high - x))
        here = (found - delta).norm(dim=1)
        for _ in range(60):  # any other point of the set is farther
            other = found + torch.randn(8, 12, generator=g, dtype=torch.float64) * 0.1
            other = other.clamp(low, high)
            inside = torch.linalg.vector_norm(other, p, dim=1) <= 0.7
            assert bool(((other - delta).norm(dim=1) >= here - 1e-6)[inside].all()), f"{norm}: not the nearest"
        assert torch.allclose(project(found * 0.5, x, threat, box), found * 0.5, atol=1e-9)


def _linear(weight: list[float], bias: float) -> nn.Sequential:
    last = nn.Linear(len(weight), 2)
    with torch.no_grad():
        last.weight.copy_(torch.tensor([weight, [0.0] * len(weight)]))
        last.bias.copy_(torch.tensor([bias, 0.0]))
    return nn.Sequential(nn.Flatten(), last).eval().requires_grad_(False)


def check_witnesses() -> None:
    """What is called a witness lies in the ball and the domain and is misclassified; candidates outside are drawn in first."""
    from cure_ray.attacks.witness import check_witness, replay_network
    from cure_ray.threats.balls import Ball
    from cure_ray.threats.box import UNIT, Box

    network = _linear([1.0, 1.0, 1.0, 1.0], -1.0)  # class 0 while the pixels sum to more than 1
    replay = replay_network(network.train())
    assert not replay.training
    assert next(replay.parameters()).dtype == torch.float64
    for norm, reach in (("linf", 0.1), ("l2", 0.2), ("l1", 0.4)):
        x, y = torch.full((5, 1, 2, 2), 0.3), torch.zeros(5, dtype=torch.long)
        x[1] = 0.3 + 1e-9
        candidates = x - torch.tensor([0.06, 0.2, 0.0, -0.5, 9.0])[:, None, None, None]
        found = check_witness(replay, x, y, candidates, Ball(norm, reach))
        sums = found.images.sum((1, 2, 3))
        assert torch.allclose(found.margins, sums - 1)
        assert found.inside.all()
        assert found.valid.tolist() == [True, True, False, False, True]
        delta = (found.images - x.double()).flatten(1)
        size = {"linf": delta.abs().amax(1), "l2": delta.norm(dim=1), "l1": delta.abs().sum(1)}[norm]
        assert bool((size <= reach).all()), f"{norm}: a witness outside the ball"
        assert bool((size[[1, 3, 4]] >= 0.99 * reach).all()), f"{norm}: drawn in too far"
        assert bool(((found.images >= 0) & (found.images <= 1)).all())
        tie = check_witness(replay, torch.full((1, 1, 2, 2), 0.25), y[:1], torch.full((1, 1, 2, 2), 0.25), Ball(norm, reach))
        assert tie.valid.all(), "an exact tie is misclassified"
        outside = check_witness(replay, x[:1] + 2, y[:1], x[:1] + 2, Ball(norm, reach), UNIT)
        assert not outside.inside.any(), "an image outside the domain says nothing"
        below = check_witness(replay, x[:1] - 2, y[:1], x[:1] - 2, Ball(norm, reach), UNIT)
        assert bool((below.margins <= 0).all())
        assert not below.valid.any(), "misclassified, but outside the ball"
        assert check_witness(replay, x[:1] - 0.5, y[:1], x[:1] - 0.5, Ball(norm, reach), Box(-1.0, 1.0)).valid.all()
    broken = check_witness(replay, x[:1], y[:1], torch.full((1, 1, 2, 2), torch.nan), Ball("l2", 0.2))
    assert torch.allclose(broken.images, x[:1].double())


def check_starts() -> None:
    """Restarts begin apart from the image and from each other, on the surface of the ball; aims leave out what is proven."""
    from cure_ray.attacks import search
    from cure_ray.attacks.settings import STRENGTHS, AttackSettings, attack_settings
    from cure_ray.threats.balls import Ball

    for norm, eps in (("linf", 0.1), ("l2", 0.5), ("l1", 2.0)):
        x, y = torch.full((3, 30), 0.5), torch.zeros(3, dtype=torch.long)
        streams = tuple(torch.Generator().manual_seed(b) for b in range(3))
        order, open_B = torch.tensor([[1, 2, 3]] * 3), torch.tensor([3, 2, 1])
        problem = search._Problem(nn.Identity(), torch.Size([1, 5, 6]), Ball(norm, eps), x, y, order, open_B, streams)
        assert bool((search._start(problem, 0) == 0).all())
        starts = [search._start(problem, number) for number in (1, 2)]
        for start in starts:
            size = {"linf": start.abs().amax(1), "l2": start.norm(dim=1), "l1": start.abs().sum(1)}[norm]
            assert bool((size > 0.8 * eps).all()), f"{norm}: a restart from the image itself"
            assert bool((size <= eps * (1 + 1e-5)).all())
            assert bool((start > 0).any())
            assert bool((start < 0).any())
        assert not torch.allclose(*starts)
        if norm == "l1":
            assert bool(((starts[0] != 0).sum(1) < 25).all()), "l1: not sparse"
        target, loss = search._schedule(problem, 0, 6)
        assert target[:, 0].tolist() == [-1, 1, 2, 3, 1, 2]
        assert target[:, 1].tolist() == [-1, 1, 2, 1, 2, 1]
        assert loss[:, 0].tolist() == [0, 0, 1, 2, 1, 2]
        assert loss[:, 1].tolist() == [0, 0, 1, 1, 2, 2]
    logits = torch.tensor([[5.0, 1.0, 3.0, 2.0], [1.0, 9.0, 3.0, 4.0]])
    order, count = search._aims(logits, torch.tensor([0, 1]), None)
    assert (order.tolist(), count.tolist()) == ([[2, 3, 1], [3, 2, 0]], [3, 3])
    bounds = torch.tensor([[-1.0, 0.5, -2.0], [1.0, 1.0, 1.0]])  # classes 1, 2, 3 and 0, 2, 3
    order, count = search._aims(logits, torch.tensor([0, 1]), bounds)
    assert (order[0].tolist(), count.tolist()) == ([3, 1, 2], [2, 3])
    order, count = search._aims(logits, torch.tensor([0, 1]), torch.tensor([[0.0, 0.5, 1.0], [torch.nan, 1.0, 1.0]]))
    assert (order[:, 0].tolist(), count.tolist()) == ([1, 0], [1, 1])
    assert [sum(c for _, c in search._waves(n)) for n in (1, 2, 5, 8, 20, 48)] == [1, 2, 5, 8, 20, 48]
    assert [f for f, _ in search._waves(20)] == [0, 2, 4, 8, 16]
    assert [p.tolist() for p in search._pieces(torch.tensor([True, False, True, True]), 2)] == [[0, 2], [3]]
    assert search._pieces(torch.tensor([False]), 2) == []
    default, strong = STRENGTHS["default"], STRENGTHS["strong"]
    assert (attack_settings("default"), attack_settings("strong")) == (default, strong)
    assert default.again == AttackSettings(default.steps, 2, default.rows), "the attack after a certificate"
    assert default.again.steps >= 10
    assert AttackSettings(restarts=1).again.restarts == 1
    assert strong.steps * strong.restarts >= 15 * default.steps * default.restarts


def check_strength() -> None:
    """Samples that a brute search breaks are broken, and what is found is about as good as the best of many random points."""
    from cure_ray.attacks import AttackSettings, attack, check_witness, replay_network
    from cure_ray.threats.balls import Ball

    broken = {"linf": 0, "l2": 0, "l1": 0}
    for seed in (2, 5, 14, 21):
        case = random_network(seed)
        x, y = case.x[:2], case.y[:2]
        for norm, eps in (("linf", 0.08), ("l2", 0.5), ("l1", 1.4)):
            threat, settings = Ball(norm, eps), AttackSettings(10, 4)
            both = attack(case.network, x, y, threat, [1, 2], settings)
            found = check_witness(replay_network(case.network), x, y, both, threat)
            brute = _brute(case.network, x, y, norm, eps)
            assert bool((found.margins <= brute + 0.05 * brute.abs() + 0.05).all()), f"{norm}: a random search finds more"
            broken[norm] += int(found.valid.sum())
    assert min(broken.values()) >= 1, broken


def _brute(network: nn.Module, x: Tensor, y: Tensor, norm: str, eps: float) -> Tensor:
    from soundness_points import points, preactivations, true_margins

    images = points(x, norm, eps, True, 60)
    return torch.stack([true_margins(preactivations(network, z)[-1], y).amin(1) for z in images]).amin(0)


def check_attacks() -> None:
    """Everything here: used on every mutant of attacks."""
    check_losses()
    check_projection()
    check_witnesses()
    check_starts()
    check_strength()
