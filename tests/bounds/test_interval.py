"""IBP in centre and radius: containment at every layer, exactness where it must be exact, BN statistics as specified."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from cure_ray.networks.models import Network, Normalize
from cure_ray.networks.sequence import read_blocks
from cure_ray.training.folding import _BatchNorm, clean_forward, fold_batch, fold_running
from cure_ray.training.propagation import Region, certified, dual_norm_of_rows, full_region, interval_relu, propagate, upper_bounds


def random_network(
    seed: int, normalize: bool = True, batch_norm: bool = True, stride: int = 2, padding: int = 1, bias: bool = True
) -> Network:
    """A small network whose BN statistics are not the identity."""
    torch.manual_seed(seed)
    side = (6 + 2 * padding - 3) // stride + 1
    layers: list[nn.Module] = [Normalize([0.3, 0.5], [0.2, 0.7])] if normalize else []
    layers.append(nn.Conv2d(2, 4, 3, stride, padding, bias=bias))
    layers += [nn.BatchNorm2d(4)] if batch_norm else []
    layers += [nn.ReLU(), nn.Flatten(), nn.Linear(4 * side * side, 9, bias=bias)]
    layers += [nn.BatchNorm1d(9)] if batch_norm else []
    layers += [nn.ReLU(), nn.Linear(9, 5, bias=bias)]
    network = Network(layers, (2, 6, 6), 5)
    for module in network:
        if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d):
            assert module.running_mean is not None
            assert module.running_var is not None
            module.running_mean.normal_()
            module.running_var.uniform_(0.3, 2)
            nn.init.normal_(module.weight)
            nn.init.normal_(module.bias)
    return network.eval()


def sample(region: Region, generator: torch.Generator) -> Tensor:
    """A point of the region, often an extreme one."""
    noise = torch.rand(region.centre.shape, generator=generator) * 2 - 1
    if region.norm == "linf":
        corner = noise.sign() if torch.rand((), generator=generator) < 0.5 else noise
        return region.centre + region.radius * corner
    radius = region.radius.view(-1, 1, 1, 1)
    if region.norm == "l2":
        return region.centre + radius * noise / noise.flatten(1).norm(dim=1).view(-1, 1, 1, 1)
    if torch.rand((), generator=generator) < 0.5:  # a vertex of the cross-polytope
        flat = torch.zeros_like(noise.flatten(1))
        index = torch.randint(flat.shape[1], (len(flat), 1), generator=generator)
        return region.centre + radius * flat.scatter(1, index, noise.flatten(1).gather(1, index).sign()).view_as(noise)
    return region.centre + radius * noise / noise.flatten(1).abs().sum(1).view(-1, 1, 1, 1)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 10**6),
    st.sampled_from(["linf", "l2", "l1"]),
    st.floats(1e-6, 0.5),
    st.booleans(),
    st.booleans(),
    st.sampled_from([(1, 0), (1, 1), (2, 0), (2, 1)]),
    st.booleans(),
)
def test_points_of_a_region_stay_inside_the_bounds_at_every_layer(seed, norm, eps, normalize, batch_norm, conv, bias) -> None:  # type: ignore[no-untyped-def]
    network = random_network(seed, normalize, batch_norm, *conv, bias=bias).double()
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(3, 2, 6, 6, generator=generator).double()
    y = torch.randint(5, (3,), generator=generator)
    region = full_region(x, norm, eps)
    folded = fold_running(read_blocks(network))
    boxes = propagate(folded, [region], keep_hidden=True)
    u = upper_bounds(folded, boxes, y)
    hidden = [module for module in network if isinstance(module, nn.ReLU)]
    for _ in range(10):
        z = sample(region, generator)
        values, seen = z, []
        for module in network:
            if module in hidden:
                seen.append(values)
            values = module(values)
        for value, (c, r) in zip(seen, boxes.hidden, strict=True):
            assert bool(((value - c).abs() <= r + 1e-9).all())
        margins = values - values.gather(1, y[:, None])
        assert bool((margins <= u + 1e-9).all())


def test_a_point_region_reproduces_the_forward_pass() -> None:
    network = random_network(0)
    x, y = torch.rand(4, 2, 6, 6), torch.tensor([0, 1, 2, 3])
    folded = fold_running(read_blocks(network))
    boxes = propagate(folded, [Region(x, torch.zeros_like(x), "linf")])
    logits = network(x)
    assert torch.allclose(upper_bounds(folded, boxes, y), logits - logits.gather(1, y[:, None]), atol=1e-5)
    assert torch.allclose(folded.logits(x), logits, atol=1e-5)
    assert bool((boxes.radius == 0).all())


def test_elided_margins_are_at_least_as_tight_as_separate_logit_bounds() -> None:
    network = random_network(1)
    x, y = torch.rand(6, 2, 6, 6), torch.randint(5, (6,))
    folded = fold_running(read_blocks(network))
    last = folded.layers[-1]
    for eps in (0.0, 0.05):
        boxes = propagate(folded, [full_region(x, "linf", eps)])
        elided = upper_bounds(folded, boxes, y)
        assert boxes.radius is not None
        c, r = F.linear(boxes.centre, last.weight, last.bias), F.linear(boxes.radius, last.weight.abs())
        naive = (c + r) - (c - r).gather(1, y[:, None])
        others = torch.ones_like(elided, dtype=torch.bool).scatter(1, y[:, None], False)
        assert bool((elided <= naive + 1e-5)[others].all())
        if eps == 0:
            assert torch.allclose(elided, naive, atol=1e-5)
    assert bool((elided.gather(1, y[:, None]) == 0).all())


@pytest.mark.parametrize("norm", ["l2", "l1"])
@pytest.mark.parametrize("kind", ["conv", "linear"])
def test_the_first_layer_radius_of_a_ball_is_attained(norm: str, kind: str) -> None:
    torch.manual_seed(0)
    first = nn.Conv2d(2, 3, 3, 1, 1) if kind == "conv" else nn.Linear(2 * 25, 3)
    layers = [first, nn.ReLU(), nn.Flatten()] if kind == "conv" else [nn.Flatten(), first, nn.ReLU()]
    network = Network([*layers, nn.Linear(75 if kind == "conv" else 3, 2)], (2, 5, 5), 2)
    x, eps = torch.rand(1, 2, 5, 5), 0.3
    folded = fold_running(read_blocks(network))
    (c, r) = propagate(folded, [full_region(x, norm, eps)], keep_hidden=True).hidden[0]
    row = first.weight[0].flatten()
    direction = row / row.norm() if norm == "l2" else F.one_hot(row.abs().argmax(), len(row)) * row[row.abs().argmax()].sign()
    if kind == "conv":  # put the kernel's maximiser under the centre pixel
        moved = torch.zeros(2, 5, 5)
        moved[:, 1:4, 1:4] = direction.view(2, 3, 3)
        reached = first(x + eps * moved)[0, 0, 2, 2] - c[0, 0, 2, 2]
        assert float(reached.detach()) == pytest.approx(float(r[0, 0, 2, 2]), abs=1e-5)
    else:
        reached = first(x.flatten(1) + eps * direction)[0, 0] - c[0, 0]
        assert float(reached.detach()) == pytest.approx(float(r[0, 0]), abs=1e-5)


def test_dual_norms_are_taken_over_the_normalised_kernel() -> None:
    network = random_network(3, normalize=True, batch_norm=False)
    x = torch.rand(1, 2, 6, 6)
    folded = fold_running(read_blocks(network))
    (_, r) = propagate(folded, [full_region(x, "l2", 1.0)], keep_hidden=True).hidden[0]
    normalize, conv = network[0], network[1]
    assert isinstance(conv, nn.Conv2d)
    expected = (conv.weight / normalize.std).flatten(1).norm(dim=1)  # type: ignore[operator]
    assert torch.allclose(r[0, :, 0, 0], expected, atol=1e-5)
    assert torch.allclose(dual_norm_of_rows(conv.weight, "l1"), conv.weight.flatten(1).abs().amax(1))


def test_relu_keeps_tiny_radii_exactly() -> None:
    c, r = torch.tensor([1000.0, -1000.0, 0.0]), torch.tensor([1e-9, 1e-9, 1e-9])
    centre, radius = interval_relu(c, r)
    assert radius.tolist() == pytest.approx([1e-9, 0.0, 5e-10], rel=1e-6)
    assert centre.tolist() == pytest.approx([1000.0, 0.0, 5e-10], rel=1e-6)


@pytest.mark.parametrize("shrink", [1.0, 0.8])
def test_the_relu_rule_and_its_gradient_match_autograd_of_the_plain_formula(shrink: float) -> None:
    torch.manual_seed(0)
    c, r = torch.randn(50, dtype=torch.double, requires_grad=True), torch.rand(50, dtype=torch.double, requires_grad=True)

    def plain(c: Tensor, r: Tensor) -> tuple[Tensor, Tensor]:
        low, high = c - r, c + r
        half = shrink * high / 2
        active, dead = low >= 0, high <= 0
        zero = torch.zeros_like(c)
        return torch.where(active, c, torch.where(dead, zero, half)), torch.where(active, r, torch.where(dead, zero, half))

    weights = torch.randn(2, 50, dtype=torch.double)
    results = []
    for rule in (plain, lambda c, r: interval_relu(c, r, shrink)):
        out = rule(c, r)
        loss = (weights[0] * out[0] + weights[1] * out[1]).sum()
        results.append((*out, *torch.autograd.grad(loss, (c, r))))
    for expected, got in zip(*results, strict=True):
        assert torch.allclose(expected, got)


def test_the_clean_pass_is_torchs_own_in_output_gradient_and_running_statistics() -> None:
    ours, theirs = random_network(5).train(), random_network(5).train()
    x, y = torch.rand(8, 2, 6, 6), torch.randint(5, (8,))
    logits, _ = clean_forward(read_blocks(ours), x)
    F.cross_entropy(logits, y).backward()
    expected = theirs(x)
    F.cross_entropy(expected, y).backward()
    assert torch.allclose(logits, expected, atol=1e-5)
    for (name, p), q in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert p.grad is not None
        assert q.grad is not None
        assert torch.allclose(p.grad, q.grad, atol=1e-5), name
    for (name, p), q in zip(ours.named_buffers(), theirs.buffers(), strict=True):
        assert torch.allclose(p, q, atol=1e-6), name


@pytest.mark.parametrize("shape", [(5, 3), (4, 3, 2, 2)])
def test_gradients_flow_through_the_batch_statistics(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    x, weight, bias = torch.randn(shape).double(), torch.randn(3).double(), torch.randn(3).double()
    inputs = tuple(t.requires_grad_() for t in (x, weight, bias))
    assert torch.autograd.gradcheck(lambda x, w, b: _BatchNorm.apply(x, w, b, 1e-5), inputs)


def test_boxes_use_the_clean_batchs_statistics_and_touch_nothing() -> None:
    network = random_network(6).train()
    x, y = torch.rand(8, 2, 6, 6), torch.randint(5, (8,))
    blocks = read_blocks(network)
    logits, stats = clean_forward(blocks, x)
    before = {k: v.clone() for k, v in network.state_dict().items()}
    folded = fold_batch(blocks, stats)
    u = upper_bounds(folded, propagate(folded, [Region(x, torch.zeros_like(x), "linf")]), y)
    assert torch.allclose(u, logits - logits.gather(1, y[:, None]), atol=1e-4)
    assert all(torch.equal(before[k], v) for k, v in network.state_dict().items())


@pytest.mark.parametrize(("stride", "padding"), [(1, 0), (1, 1), (2, 0), (2, 1)])
def test_attack_logits_have_the_networks_values_and_input_gradient(stride: int, padding: int) -> None:
    network = random_network(11, stride=stride, padding=padding)
    x = torch.rand(3, 2, 6, 6, requires_grad=True)
    folded = fold_running(read_blocks(network))
    weights = torch.randn(3, 5)
    (expected,) = torch.autograd.grad((network(x) * weights).sum(), x)
    out = folded.attack_logits(x)
    (got,) = torch.autograd.grad((out * weights).sum(), x)
    assert torch.allclose(out, network(x), atol=1e-5)
    assert torch.allclose(got, expected, atol=1e-5)


def test_stacking_regions_changes_nothing() -> None:
    network = random_network(7)
    x, y = torch.rand(3, 2, 6, 6), torch.randint(5, (3,))
    folded = fold_running(read_blocks(network))
    regions = [full_region(x, norm, eps) for norm, eps in (("linf", 0.05), ("l2", 0.2), ("l1", 0.4))]
    together = upper_bounds(folded, propagate(folded, regions), y.repeat(3)).split(3)
    for region, u in zip(regions, together, strict=True):
        assert torch.allclose(upper_bounds(folded, propagate(folded, [region]), y), u, atol=1e-5)


def test_bounds_and_gradients_run_without_reading_back_from_the_device() -> None:
    network = random_network(8).train().to("meta")
    x, y = torch.empty(4, 2, 6, 6, device="meta"), torch.empty(4, dtype=torch.long, device="meta")
    blocks = read_blocks(network)
    _, stats = clean_forward(blocks, x)
    folded = fold_batch(blocks, stats)
    regions = [full_region(x, "linf", 0.1), full_region(x, "l2", 0.2), full_region(x, "l1", 0.2)]
    upper_bounds(folded, propagate(folded, regions), y.repeat(3)).sum().backward()


def test_certified_is_strict_and_ignores_the_label_column() -> None:
    u = torch.tensor([[0.0, -1.0], [0.0, 0.0], [0.0, math.nan]])
    assert certified(u, torch.zeros(3, dtype=torch.long)).tolist() == [True, False, False]


@pytest.mark.parametrize(
    ("layers", "says"),
    [
        ([nn.Flatten(), nn.Linear(4, 4), nn.Sigmoid(), nn.Linear(4, 2)], "Sigmoid"),
        ([nn.Flatten(), nn.Linear(4, 4), nn.ReLU()], "ends in a Linear"),
        ([nn.Conv2d(2, 2, 1, groups=2), nn.ReLU(), nn.Flatten(), nn.Linear(4, 2)], "nor groups"),
    ],
)
def test_structures_it_cannot_bound_are_refused_by_name(layers: list[nn.Module], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        read_blocks(nn.Sequential(*layers))
