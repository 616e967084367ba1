"""Losses between attack and bounds: their ends bit for bit, a textbook MTL-IBP, and what holds between them in every norm."""

import math

import pytest
import torch
import torch.nn.functional as F
from helpers import batch, experiment, streams
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from cure_ray import seeding
from cure_ray.config import METHODS, resolve
from cure_ray.networks.build import new_network
from cure_ray.networks.sequence import read_blocks
from cure_ray.threats.norms import Norm
from cure_ray.training import losses
from cure_ray.training.crown import linear_upper_bounds
from cure_ray.training.epochs import ONE_PROCESS
from cure_ray.training.folding import clean_forward, fold_batch, fold_running
from cure_ray.training.propagation import Region, full_region, propagate, upper_bounds
from cure_ray.training.step import StepResult, certified_step, region_specs

BETWEEN = tuple(losses.BETWEEN)
UNION = {"norms": ["linf", "l2", "l1"], "regions": {"l2": "ball"}}


def step(method: str, rho: float = 1.0, **training: object) -> tuple[nn.Sequential, StepResult]:
    described = experiment(method, **training)
    network = new_network(described).train()
    x, y = batch(16)
    result = certified_step(read_blocks(network), x, y, rho, described, streams(described), list(network.parameters()), ONE_PROCESS)
    result.loss.backward()
    return network, result


def same_bits(a: tuple[nn.Sequential, StepResult], b: tuple[nn.Sequential, StepResult]) -> bool:
    gradients = zip(a[0].parameters(), b[0].parameters(), strict=True)
    return torch.equal(a[1].loss, b[1].loss) and all(p.grad is not None and torch.equal(p.grad, q.grad) for p, q in gradients)


@pytest.mark.parametrize("end", [0.0, 1.0])
@pytest.mark.parametrize("loss", BETWEEN)
def test_the_ends_are_adversarial_training_and_plain_ibp_training_bit_for_bit(loss: str, end: float) -> None:
    """SABR's own ends: lambda 0 propagates the attacked point, lambda 1 the whole region and attacks nothing."""
    for method in ("joint", "max", "random"):
        ratios = {"lambda_inf": end, "lambda_2": end, "lambda_1": end}
        assert same_bits(step(method, loss=loss, **UNION, **ratios), step(method, **UNION, **ratios))


@pytest.mark.parametrize(("norm", "ratio"), [("linf", "lambda_inf"), ("l2", "lambda_2"), ("l1", "lambda_1")])
def test_mtl_is_the_convex_combination_of_the_attacks_loss_and_that_of_bounds_on_the_whole_region(norm: Norm, ratio: str) -> None:
    found = [float(step(norm, loss="mtl", **{ratio: value})[1].terms["robust"].detach()) for value in (0.0, 0.25, 1.0)]
    assert found[0] < found[2]
    assert found[1] == pytest.approx(0.75 * found[0] + 0.25 * found[2], rel=1e-5)
    described = experiment(norm, loss="mtl")
    blocks = read_blocks(new_network(described).train())
    x, y = batch(16)
    folded = fold_batch(blocks, clean_forward(blocks, x)[1])
    whole = propagate(folded, [full_region(x, norm, described.training_eps(norm))])
    assert found[2] == pytest.approx(float(losses.robust_cross_entropy(upper_bounds(folded, whole, y)).mean().detach()), rel=1e-5)


def textbook_mtl_ibp(
    network: nn.Sequential, x: torch.Tensor, y: torch.Tensor, eps: float, b: float, noise: torch.Generator
) -> torch.Tensor:
    """As one would write it from the paper: PGD in evaluation mode, then (lower, upper) through the layers, clean batch statistics."""
    statistics: list[tuple[torch.Tensor, torch.Tensor]] = []
    z = x
    for module in network.train():
        if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d):
            dims = [0] if z.dim() == 2 else [0, 2, 3]
            statistics.append((z.mean(dims), z.var(dims, unbiased=False)))
        z = module(z)  # updates the running statistics the attack uses
    network.eval()
    low, high = (x - eps).clamp(min=0), (x + eps).clamp(max=1)
    z = low + torch.rand(x.shape, generator=noise, dtype=x.dtype) * (high - low)
    for size in (0.5, 0.5, 0.5, 0.5, 0.05, 0.05, 0.05, 0.005):
        z = z.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(F.cross_entropy(network(z), y, reduction="sum"), z)
        z = torch.minimum(torch.maximum(z.detach() + size * eps * gradient.sign(), low), high)

    def interval(lower: torch.Tensor, upper: torch.Tensor) -> torch.Tensor:
        """Lower bounds of f_y - f_i."""
        used = iter(statistics)
        for module in list(network)[:-1]:
            if isinstance(module, nn.Conv2d | nn.Linear):
                c, r = (lower + upper) / 2, (upper - lower) / 2
                if isinstance(module, nn.Conv2d):
                    c = F.conv2d(c, module.weight, module.bias, module.stride, module.padding)  # type: ignore[arg-type]
                    r = F.conv2d(r, module.weight.abs(), None, module.stride, module.padding)  # type: ignore[arg-type]
                else:
                    c, r = F.linear(c, module.weight, module.bias), F.linear(r, module.weight.abs())
                lower, upper = c - r, c + r
            elif isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d):
                mean, variance = next(used)
                shape = [1, -1] + [1] * (lower.dim() - 2)
                gain = (module.weight / (variance + module.eps).sqrt()).view(shape)
                shift = module.bias.view(shape) - gain * mean.view(shape)
                ends = torch.stack([lower * gain + shift, upper * gain + shift])
                lower, upper = ends.amin(0), ends.amax(0)
            else:
                lower, upper = module(lower), module(upper)
        last = network[-1]
        weight = last.weight[y][:, None] - last.weight[None]  # type: ignore[index]
        bias = last.bias[y][:, None] - last.bias[None]  # type: ignore[index]
        worst = torch.where(weight > 0, lower[:, None], upper[:, None])
        return (weight * worst).sum(2) + bias

    attacked, bounded = interval(z, z), interval(low, high)
    wanted = torch.zeros_like(y)
    order = torch.arange(attacked.shape[1])
    place = torch.stack([torch.cat([i[None], order[order != i]]) for i in y])  # the label's margin (0) comes first
    losses_of = [F.cross_entropy(-margins.gather(1, place), wanted) for margins in (attacked, bounded)]
    return (1 - b) * losses_of[0] + b * losses_of[1]


@pytest.mark.parametrize("name", ["conv-small", "mlp"])
def test_single_norm_mtl_ibp_is_the_textbooks(name: str) -> None:
    described = resolve(
        {
            "preset": "smoke",
            "network": {"name": name, "width": 0.5},
            "training": {"method": "linf", "loss": "mtl", "lambda_inf": 0.3, "l1_weight": 0.0},
        }
    )
    x, y = batch(32)
    ours, theirs = (new_network(described).double() for _ in range(2))
    drawn = streams(described)
    noise = seeding.generator("cpu", described.seed, 20, "ct", "attack_linf")
    result = certified_step(read_blocks(ours.train()), x.double(), y, 1.0, described, drawn, list(ours.parameters()), ONE_PROCESS)

    expected = textbook_mtl_ibp(theirs, x.double(), y, 0.1, 0.3, noise)
    assert float(result.loss.detach()) == pytest.approx(float(expected.detach()), abs=1e-6, rel=1e-6)
    result.loss.backward()
    expected.backward()
    for (parameter, p), q in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert p.grad is not None
        assert q.grad is not None
        assert torch.allclose(p.grad, q.grad, atol=1e-6, rtol=1e-6), parameter


@given(st.integers(0, 10**6), st.floats(0.01, 0.99))
@settings(max_examples=50, deadline=None)
def test_every_loss_lies_between_those_of_attack_and_bounds(seed: int, ratio: float) -> None:
    rng = torch.Generator().manual_seed(seed)
    attack, extra = torch.randn(6, 4, generator=rng) * 4, torch.rand(6, 4, generator=rng) * 3
    attack[:, 0], extra[:, 0] = 0, 0  # at the label
    bound = attack + extra
    low, high = losses.robust_cross_entropy(attack), losses.robust_cross_entropy(bound)
    found = {loss: between(attack, bound, ratio) for loss, between in losses.BETWEEN.items()}
    for value in found.values():
        assert bool((value >= low - 1e-5).all())
        assert bool((value <= high + 1e-5).all())
    assert bool((found["cc"] <= found["mtl"] + 1e-5).all())  # cross-entropy is convex in the margins
    assert bool((found["exp"] <= found["mtl"] + 1e-5).all())  # the geometric mean is below the arithmetic one


def test_a_loss_that_rounds_to_nothing_leaves_the_geometric_mean_finite() -> None:
    u = torch.tensor([[0.0, -200.0], [0.0, 3.0]], requires_grad=True)
    losses.geometric_mean(u, u, 0.5).sum().backward()
    assert u.grad is not None
    assert bool(u.grad.isfinite().all())
    assert float(u.grad[1, 1]) == pytest.approx(1 / (1 + math.exp(-3)), rel=1e-5)


@pytest.mark.parametrize("loss", BETWEEN)
@pytest.mark.parametrize("method", [m for m, row in METHODS.items() if "loss" in row.fields])
def test_every_method_takes_every_loss(method: str, loss: str) -> None:
    ratios = {"lambda_inf": 0.3, "lambda_2": 0.2, "lambda_1": 0.1}
    several = {**UNION, **({"align": ["l2", "l1"]} if METHODS[method].aligns else {})} if METHODS[method].multi_norm else {}
    network, result = step(method, loss=loss, **ratios, **several)
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in network.parameters())
    assert ("alignment" in result.terms) == METHODS[method].aligns
    assert float(result.loss.detach()) > 0


def test_a_norm_has_a_loss_of_its_own() -> None:
    mixed = experiment("joint", loss={"l2": "mtl"}, lambda_2=0.5, norms=["linf", "l2", "l1"])
    specs = region_specs(mixed, 1.0, 4, streams(mixed))
    assert [[s.ratio for s in plan] for plan in specs] == [[0.4], [0.0, 1.0], [0.5]]
    assert [plan[-1].ball for plan in specs] == [False, True, True]


def test_the_attack_may_reach_further_than_the_bounds() -> None:
    described = experiment("linf", loss="mtl", attack={"radius": 2.0})
    ((attacked, whole),) = region_specs(described, 0.5, 4, streams(described))
    assert (attacked.eps, whole.eps) == (pytest.approx(0.1), pytest.approx(0.05))
    assert float(step("linf", loss="mtl", attack={"radius": 2.0})[1].loss.detach()) > float(step("linf", loss="mtl")[1].loss.detach())


def test_method_random_gives_attack_and_bounds_of_a_norm_the_same_samples() -> None:
    described = experiment("random", loss="mtl", lambda_2=0.5)
    for attacked, whole in region_specs(described, 1.0, 16, streams(described)):
        assert attacked.rows is not None
        assert attacked.rows is whole.rows


def test_the_natural_weight_shifts_the_loss_to_clean_cross_entropy() -> None:
    plain, half = step("linf")[1], step("linf", natural_weight=0.5)[1]
    network = new_network(experiment("linf")).train()
    x, y = batch(16)
    assert float(half.terms["robust"].detach()) == pytest.approx(0.5 * float(plain.terms["robust"].detach()))
    assert float(half.terms["natural"].detach()) == pytest.approx(0.5 * float(F.cross_entropy(network(x), y).detach()), rel=1e-5)


def moved(x: torch.Tensor, norm: Norm, eps: float, rng: torch.Generator) -> torch.Tensor:
    """A point at the border of the ball: a corner of the box, anywhere on the sphere, a corner of the l_1 ball."""
    direction = torch.randn(x.shape, generator=rng)
    if norm == "linf":
        return x + eps * direction.sign()
    if norm == "l2":
        return x + eps * direction / direction.flatten(1).norm(dim=1).view(-1, 1, 1, 1)
    return x + eps * F.one_hot(direction.flatten(1).argmax(1), x[0].numel()).view_as(x) * direction[:, :, :1, :1].sign()


@pytest.mark.parametrize(("norm", "eps"), [("linf", 0.03), ("l2", 0.3), ("l1", 0.7)])
def test_linear_bounds_hold_at_sampled_points_and_are_tighter_than_boxes(norm: Norm, eps: float) -> None:
    network = fold_running(read_blocks(new_network(experiment("linf"))))
    x, y = batch(8)
    region = Region(x, torch.full_like(x, eps) if norm == "linf" else torch.full((8,), eps), norm)
    boxes = propagate(network, [region], keep_hidden=True)
    plain, linear = upper_bounds(network, boxes, y), linear_upper_bounds(network, [region], boxes.hidden, y)
    assert linear.mean() < plain.mean()
    assert bool((linear.gather(1, y[:, None]) == 0).all())
    rng = torch.Generator().manual_seed(0)
    for _ in range(50):
        logits = network.logits(moved(x, norm, eps, rng))
        assert bool((logits - logits.gather(1, y[:, None]) <= linear + 1e-4).all())


def test_linear_bounds_of_points_are_the_margins_and_bounds_of_a_stack_are_those_of_its_parts() -> None:
    network = fold_running(read_blocks(new_network(experiment("linf"))))
    x, y = batch(8)
    regions = [full_region(x, "linf", 0.05), full_region(x, "l2", 0.2), full_region(x, "l1", 0.0)]
    hidden = propagate(network, regions, keep_hidden=True).hidden
    stacked = linear_upper_bounds(network, regions, hidden, y.repeat(3)).split(8)
    for region, part in zip(regions, stacked, strict=True):
        alone = linear_upper_bounds(network, [region], propagate(network, [region], keep_hidden=True).hidden, y)
        assert torch.allclose(alone, part, atol=1e-5)
    logits = network.logits(x)
    assert torch.allclose(stacked[2], logits - logits.gather(1, y[:, None]), atol=1e-5)


def test_crown_ibps_mixture_acts_on_the_ramp_only() -> None:
    early = [step("joint", rho=0.3, ramp_bound=bound, **UNION)[1].terms["robust"].detach() for bound in ("ibp", "crown-ibp")]
    assert early[1] < early[0]
    assert same_bits(step("joint", ramp_bound="crown-ibp", **UNION), step("joint", **UNION))


def test_linear_bounds_of_one_norm_tighten_its_loss_alone() -> None:
    plain, linear = (step("joint", bounds=bounds, **UNION)[1] for bounds in ("ibp", {"l1": "crown-ibp"}))
    assert linear.logs["loss_l1"] < plain.logs["loss_l1"]
    assert all(torch.equal(linear.logs[f"loss_{norm}"], plain.logs[f"loss_{norm}"]) for norm in ("linf", "l2"))
    assert same_bits(step("joint", bounds="ibp", **UNION), step("joint", **UNION))
    attacked = UNION | {"lambda_1": 0.0}  # nothing is bounded there
    assert same_bits(step("joint", bounds={"l1": "crown-ibp"}, **attacked), step("joint", **attacked))
