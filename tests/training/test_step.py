"""One step of every method: BN statistics, device hygiene, and the relations between methods."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import batch, experiment, streams

from cure_ray.config import METHODS, resolve
from cure_ray.networks.build import new_network
from cure_ray.networks.sequence import read_blocks
from cure_ray.training.epochs import ONE_PROCESS
from cure_ray.training.folding import clean_forward, fold_batch
from cure_ray.training.losses import robust_cross_entropy
from cure_ray.training.propagation import propagate, upper_bounds
from cure_ray.training.region import RegionSpec, build_regions
from cure_ray.training.step import certified_step, standard_step

CERTIFIED = [m for m in METHODS if m not in ("natural", "cgt")]  # cgt has a step of its own


def one_step(method: str, rho: float = 1.0, seed: int = 0, **training: Any):  # type: ignore[no-untyped-def]
    described = experiment(method, **training)
    network = new_network(described).train()
    x, y = batch(16, seed)
    result = certified_step(read_blocks(network), x, y, rho, described, streams(described), list(network.parameters()), ONE_PROCESS)
    return network, result


@pytest.mark.parametrize("rho", [0.3, 1.0])
@pytest.mark.parametrize(("method", "options"), [*((method, {}) for method in CERTIFIED), ("scratch", {"network": "resnet-small"})])
def test_running_statistics_after_a_step_are_those_of_one_clean_pass(method: str, options: dict[str, Any], rho: float) -> None:
    network, result = one_step(method, rho, **options)
    result.loss.backward()
    reference = new_network(experiment(method, **options)).train()
    reference(batch(16)[0])
    for (name, ours), theirs in zip(network.named_buffers(), reference.buffers(), strict=True):
        assert torch.allclose(ours, theirs, atol=1e-6), name
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in network.parameters())


OPTIONS: list[tuple[str, dict[str, object]]] = [
    *((method, {}) for method in CERTIFIED),
    ("scratch", {"loss": "mtl", "lambda_2": 0.5}),
    ("random", {"loss": "cc", "lambda_2": 0.5}),
    ("joint", {"loss": "exp", "natural_weight": 0.5, "ramp_bound": "crown-ibp"}),
]
RESIDUAL = ("scratch", {"network": "resnet-small", "ramp_bound": "crown-ibp"})


@pytest.mark.parametrize(("method", "options"), [*OPTIONS, RESIDUAL])
def test_a_step_reads_nothing_back_and_mixes_no_devices(method: str, options: dict[str, object]) -> None:
    """On the meta device any host synchronisation or stray CPU tensor raises."""
    described = experiment(method, **options)
    network = new_network(described).train().to("meta")
    x, y = torch.empty(8, 1, 8, 8, device="meta"), torch.empty(8, dtype=torch.long, device="meta")
    noise = streams(described, device="cpu")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "rand", lambda *a, generator=None, **k: torch.empty(*a, **k))  # the meta device has no generators
        patch.setattr(torch, "randn", lambda *a, generator=None, **k: torch.empty(*a, **k))
        patch.setattr(torch, "randperm", lambda n, generator=None, device=None: torch.empty(n, dtype=torch.long, device="meta"))
        for rho in (0.5, 1.0):
            certified_step(read_blocks(network), x, y, rho, described, noise, list(network.parameters()), ONE_PROCESS).loss.backward()
        standard_step(read_blocks(network), x, y, described, list(network.parameters()), ONE_PROCESS).loss.backward()


def test_joint_ends_at_the_single_norms() -> None:
    linf, l2 = (float(one_step(m)[1].terms["robust"].detach()) for m in ("linf", "l2"))
    for alpha, expected in ((0.0, linf), (1.0, l2)):
        assert float(one_step("joint", alpha=alpha)[1].terms["robust"].detach()) == pytest.approx(expected, rel=1e-4)
    largest = float(one_step("max")[1].terms["robust"].detach())
    assert max(linf, l2) - 1e-5 <= largest <= linf + l2


def test_a_compiled_step_computes_the_same() -> None:
    losses = []
    for compiled in (False, True):
        described = resolve({"preset": "smoke", "network": {"name": "mlp", "width": 0.2}, "execution": {"compile": compiled}})
        network = new_network(described).train()
        x, y = batch(16)
        result = certified_step(read_blocks(network), x, y, 1.0, described, streams(described), list(network.parameters()), ONE_PROCESS)
        result.loss.backward()
        losses.append((float(result.loss.detach()), network[1].weight.grad))
    assert losses[0][0] == pytest.approx(losses[1][0], rel=1e-4)
    assert torch.allclose(losses[0][1], losses[1][1], atol=1e-4)


def test_scratch_without_alignment_and_projection_is_max() -> None:
    ours, theirs = one_step("scratch", eta=0.0)[1], one_step("max")[1]
    assert torch.equal(ours.loss, theirs.loss)


def test_adversarial_training_is_cross_entropy_at_the_attacked_point_under_clean_statistics() -> None:
    _network, result = one_step("l2_pgd")
    described = experiment("l2_pgd")
    reference = new_network(described).train()
    x, y = batch(16)
    blocks = read_blocks(reference)
    _, stats = clean_forward(blocks, x)
    from cure_ray.training.folding import fold_running

    spec = RegionSpec("l2", 0.35, 0.0, False)
    (region,) = build_regions(fold_running(blocks).logits, x, y, [spec], described.training.attack, [streams(described).attacks["l2"]])
    logits = fold_batch(blocks, stats).logits(region.centre)
    assert float(result.terms["robust"]) == pytest.approx(float(F.cross_entropy(logits, y)), rel=1e-4)
    boxes = propagate(fold_batch(blocks, stats), [region])
    assert float(robust_cross_entropy(upper_bounds(fold_batch(blocks, stats), boxes, y)).mean()) == pytest.approx(
        float(F.cross_entropy(logits, y)), rel=1e-4
    )


@pytest.mark.parametrize("method", ["max", "joint", "scratch"])
def test_ball_regions_and_three_norms_train(method: str) -> None:
    settings = {"norms": ["linf", "l2", "l1"], "regions": {"l2": "ball"}, "lambda_2": 0.5, "lambda_1": 0.5}
    if method == "scratch":
        settings["align"] = ["l2", "l1"]
    network, result = one_step(method, **settings)
    result.loss.backward()
    assert {"loss_linf", "loss_l2", "loss_l1"} <= set(result.logs)
    assert all(bool(p.grad.isfinite().all()) for p in network.parameters() if p.grad is not None)


def test_at_lambda_one_a_ball_loss_bounds_every_attack_in_the_ball() -> None:
    described = experiment("l2", regions={"l2": "ball"}, lambda_2=1.0)
    network = new_network(described).eval()
    x, y = batch(16)
    blocks = read_blocks(network)
    from cure_ray.training.folding import fold_running

    folded = fold_running(blocks)
    noise = streams(described).attacks["l2"]
    (ball,) = build_regions(folded.logits, x, y, [RegionSpec("l2", 0.35, 1.0, True)], described.training.attack, [noise])
    bound = robust_cross_entropy(upper_bounds(folded, propagate(folded, [ball]), y))
    (point,) = build_regions(folded.logits, x, y, [RegionSpec("l2", 0.35, 0.0, True)], described.training.attack, [noise])
    attacked = F.cross_entropy(folded.logits(point.centre), y, reduction="none")
    assert bool((attacked <= bound + 1e-5).all())


def test_the_warmup_term_vanishes_at_full_radius() -> None:
    assert "warmup" in one_step("max", rho=0.99)[1].terms
    assert "warmup" not in one_step("max", rho=1.0)[1].terms


def test_relu_shrink_lowers_the_robust_loss() -> None:
    plain, shrunk = (float(one_step("linf", **s)[1].terms["robust"].detach()) for s in ({}, {"relu_shrink": 0.5}))
    assert shrunk < plain
