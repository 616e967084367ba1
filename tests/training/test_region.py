"""Regions: where they lie, what they leave untouched, and that each option does what it says."""

import pytest
import torch
from helpers import batch, experiment
from torch import Tensor

from cure_ray import seeding
from cure_ray.config import Attack
from cure_ray.networks.build import new_network
from cure_ray.networks.sequence import read_blocks
from cure_ray.threats.box import EVERYWHERE, UNIT, Box
from cure_ray.training.folding import fold_running
from cure_ray.training.propagation import full_region
from cure_ray.training.region import Noise, RegionSpec, _Range, attack_offsets, build_regions, step_sizes

NETWORK = new_network(experiment()).eval()
with torch.no_grad():  # a fresh network is nearly constant; give its logits some slope to climb
    NETWORK[-1].weight.mul_(40)
LOGITS = fold_running(read_blocks(NETWORK)).logits
EPS = {"linf": 0.1, "l2": 0.35, "l1": 0.7}


def noise(norm: str, seed: int = 0) -> Noise:
    return Noise(seeding.generator("cpu", seed, norm))


def build(norm: str, ratio: float, ball: bool = False, attack: Attack | None = None, eps: float | None = None):  # type: ignore[no-untyped-def]
    x, y = batch()
    spec = RegionSpec(norm, EPS[norm] if eps is None else eps, ratio, ball)  # type: ignore[arg-type]
    return x, build_regions(LOGITS, x, y, [spec], attack or Attack(), [noise(norm)])[0]


@pytest.mark.parametrize("tau_mode", ["dimwise", "scalar"])
@pytest.mark.parametrize("ratio", [0.0, 1e-5, 0.4, 1.0])
@pytest.mark.parametrize("norm", ["linf", "l2"])
def test_the_small_box_lies_inside_the_clipped_full_box(norm: str, ratio: float, tau_mode: str) -> None:
    x, region = build(norm, ratio, attack=Attack(tau_mode=tau_mode))  # type: ignore[arg-type]
    slack = 1e-6
    low, high = (x - EPS[norm]).clamp(min=0), (x + EPS[norm]).clamp(max=1)
    assert bool((region.centre - region.radius >= low - slack).all())
    assert bool((region.centre + region.radius <= high + slack).all())
    assert bool((region.radius >= 0).all())
    if ratio == 0:
        assert bool((region.radius == 0).all())
    if tau_mode == "dimwise":
        assert torch.allclose(region.radius, ratio * (high - low) / 2, atol=1e-7)


def test_lambda_one_is_the_centre_of_the_full_box_without_an_attack() -> None:
    def fail(z: Tensor) -> Tensor:
        raise AssertionError("no attack is needed")

    x, y = batch()
    (region,) = build_regions(fail, x, y, [RegionSpec("linf", 0.1, 1.0, False)], Attack(), [noise("linf")])
    assert torch.allclose(region.centre, ((x - 0.1).clamp(min=0) + (x + 0.1).clamp(max=1)) / 2, atol=1e-7)


def test_tiny_radii_stay_exact() -> None:
    """At lambda 1e-5 and a barely started ramp, half the pixels' width is 5e-12: far below float32 resolution around 1."""
    x, region = build("l2", 1e-5, eps=1e-6)
    inner = (x > 0.1) & (x < 0.9)
    assert bool((region.radius[inner] > 0).all())
    assert torch.allclose(region.radius[inner], torch.full_like(region.radius[inner], 1e-11), rtol=1e-5, atol=0)


@pytest.mark.parametrize("project", ["sphere", "ball"])
def test_the_l2_attack_ends_inside_the_ball_and_the_image(project: str) -> None:
    x, y = batch(64)
    (end,) = attack_offsets(LOGITS, [x], [y], [RegionSpec("l2", 0.35, 1e-5, False)], Attack(l2_project=project), [noise("l2")])  # type: ignore[arg-type]
    lengths = end.flatten(1).norm(dim=1)
    assert float(lengths.max()) <= 0.35 * (1 + 1e-6)
    assert bool((x + end >= 0).all())
    assert bool((x + end <= 1 + 1e-6).all())
    unclipped = ((x + end > 1e-6) & (x + end < 1 - 1e-6)).flatten(1).all(1)
    if project == "sphere" and bool(unclipped.any()):
        assert torch.allclose(lengths[unclipped], torch.tensor(0.35), atol=1e-5)


@pytest.mark.parametrize("norm", ["l2", "l1"])
@pytest.mark.parametrize("ratio", [0.0, 0.3, 0.9, 1.0])
def test_a_ball_region_lies_inside_the_threats_ball(norm: str, ratio: float) -> None:
    x, region = build(norm, ratio, ball=True)
    assert region.norm == norm
    power = {"l2": 2, "l1": 1}[norm]
    distance = (region.centre - x).flatten(1).norm(p=power, dim=1)
    assert bool((distance + region.radius <= EPS[norm] * (1 + 1e-5)).all())
    assert bool(((region.centre >= -1e-6) & (region.centre <= 1 + 1e-6)).all())
    if ratio == 1:
        assert torch.equal(region.centre, x)
    elif ratio < 0.9:
        assert float(distance.mean()) > 0.3 * (1 - ratio) * EPS[norm]


@pytest.mark.parametrize("norm", ["linf", "l2", "l1"])
def test_the_attack_raises_the_loss(norm: str) -> None:
    x, y = batch(64)
    spec = RegionSpec(norm, 3 * EPS[norm], 0.0, norm == "l1")  # type: ignore[arg-type]
    (end,) = attack_offsets(LOGITS, [x], [y], [spec], Attack(), [noise(norm)])
    clean, attacked = (torch.nn.functional.cross_entropy(LOGITS(z), y) for z in (x, x + end))
    assert float(attacked) > float(clean) + 0.01


def test_the_best_iterate_has_at_least_the_loss_of_the_last() -> None:
    x, y = batch(64)
    spec = RegionSpec("linf", 0.1, 0.0, False)
    ends = [attack_offsets(LOGITS, [x], [y], [spec], Attack(returns=r), [noise("linf")])[0] for r in ("last", "best")]  # type: ignore[arg-type]
    last, best = (torch.nn.functional.cross_entropy(LOGITS(x + e), y, reduction="none") for e in ends)
    wrong = LOGITS(x + ends[1]).argmax(1) != y
    assert bool(((best >= last - 1e-6) | wrong).all())


def test_the_authors_l2_attack_leaves_the_ball_but_not_the_box() -> None:
    x, y = batch(64)
    attack = Attack(l2_project="accumulate", l2_init="ball", l2_step=0.2)
    (end,) = attack_offsets(LOGITS, [x], [y], [RegionSpec("l2", 0.35, 1e-5, False)], attack, [noise("l2")])
    assert float(end.flatten(1).norm(dim=1).max()) > 0.35
    assert float(end.abs().max()) <= 0.35 + 1e-6
    assert bool((x + end >= 0).all())


def test_the_attack_leaves_network_gradients_and_modes_untouched() -> None:
    network = new_network(experiment()).train()
    network(batch()[0]).sum().backward()
    before = {k: v.clone() for k, v in network.state_dict().items()}
    gradients = [p.grad.clone() for p in network.parameters() if p.grad is not None]
    x, y = batch()
    logits = fold_running(read_blocks(network)).logits
    build_regions(
        logits, x, y, [RegionSpec("linf", 0.1, 0.4, False), RegionSpec("l2", 0.35, 1e-5, False)], Attack(), [noise("linf"), noise("l2")]
    )
    assert all(torch.equal(before[k], v) for k, v in network.state_dict().items())
    assert all(torch.equal(a, p.grad) for a, p in zip(gradients, network.parameters(), strict=True) if p.grad is not None)
    assert network.training


def test_stacked_attacks_equal_separate_ones() -> None:
    x, y = batch(32)
    specs = [RegionSpec("linf", 0.1, 0.4, False), RegionSpec("l2", 0.35, 1e-5, False), RegionSpec("l1", 0.7, 0.5, True)]
    together = attack_offsets(LOGITS, [x] * 3, [y] * 3, specs, Attack(), [noise(s.norm) for s in specs])
    for spec, end in zip(specs, together, strict=True):
        (alone,) = attack_offsets(LOGITS, [x], [y], [spec], Attack(), [noise(spec.norm)])
        close = (alone - end).abs().flatten(1).amax(1) < 1e-4
        assert float(close.float().mean()) >= 0.9  # the sign of a gradient that rounds to 0 may flip a step


def test_steps_shrink_at_half_four_fifths_and_nine_tenths() -> None:
    assert step_sizes(8, 0.5) == pytest.approx([0.5] * 4 + [0.05] * 3 + [0.005])


def test_ranges_are_exact_at_the_image_border() -> None:
    reach = _Range.of(torch.tensor([0.0, 1.0, 0.5]), 0.1)
    assert reach.half.tolist() == pytest.approx([0.05, 0.05, 0.1])


@pytest.mark.parametrize("tau_mode", ["dimwise", "scalar"])
@pytest.mark.parametrize("ratio", [0.0, 0.4, 1.0])
@pytest.mark.parametrize(("norm", "ball"), [("linf", False), ("l2", False), ("l2", True), ("l1", True)])
def test_regions_of_another_domain_are_the_moved_regions_of_the_unit_cube(norm: str, ball: bool, ratio: float, tau_mode: str) -> None:
    x, y = batch()
    box = Box(-1.0, 1.0)
    attack = Attack(tau_mode=tau_mode)  # type: ignore[arg-type]
    here = RegionSpec(norm, EPS[norm], ratio, ball)  # type: ignore[arg-type]
    there = RegionSpec(norm, 2 * EPS[norm], ratio, ball, box=box)  # type: ignore[arg-type]
    (a,) = build_regions(LOGITS, x, y, [here], attack, [noise(norm)])
    (b,) = build_regions(lambda z: LOGITS((z + 1) / 2), 2 * x - 1, y, [there], attack, [noise(norm)])
    torch.testing.assert_close(2 * a.centre - 1, b.centre, rtol=0, atol=1e-3 if norm == "l2" else 1e-5)
    torch.testing.assert_close(2 * a.radius, b.radius, rtol=0, atol=1e-3 if norm == "l2" else 1e-5)


@pytest.mark.parametrize("tau_mode", ["dimwise", "scalar"])
@pytest.mark.parametrize(("norm", "ball"), [("linf", False), ("l2", False), ("l2", True), ("l1", True)])
def test_without_limits_a_region_lies_in_the_ball_alone(norm: str, ball: bool, tau_mode: str) -> None:
    x, y = batch()
    spec = RegionSpec(norm, EPS[norm], 0.4, ball, box=EVERYWHERE)  # type: ignore[arg-type]
    (region,) = build_regions(LOGITS, x - 3, y, [spec], Attack(tau_mode=tau_mode), [noise(norm)])  # type: ignore[arg-type]
    assert bool(torch.isfinite(region.centre).all())
    assert bool(((region.centre - x + 3).abs() <= EPS[norm] + 1e-5).all())
    if not ball:
        torch.testing.assert_close(region.radius, torch.full_like(x, 0.4 * EPS[norm]), rtol=0, atol=1e-6)


def test_the_full_region_is_cut_off_by_the_domain_alone() -> None:
    x = torch.tensor([[-1.0, 0.0, 0.95]])
    for box, low, high in ((Box(-1, 1), [-1.0, -0.1, 0.85], [-0.9, 0.1, 1.0]), (EVERYWHERE, [-1.1, -0.1, 0.85], [-0.9, 0.1, 1.05])):
        region = full_region(x, "linf", 0.1, box)
        torch.testing.assert_close(region.centre - region.radius, torch.tensor([low]))
        torch.testing.assert_close(region.centre + region.radius, torch.tensor([high]))
    assert torch.equal(full_region(x.abs(), "linf", 0.1, UNIT).centre, full_region(x.abs(), "linf", 0.1).centre)
