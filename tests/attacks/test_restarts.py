"""What restarts aim at and where they begin: the classes bounds leave open, all losses, points away from the image."""

import pytest
import torch
from torch import Tensor, nn

from cure_ray.attacks import STRENGTHS, AttackSettings, attack, attack_settings, check_witness, replay_network
from cure_ray.attacks import search as search_module
from cure_ray.attacks.losses import ANY, LOSSES
from cure_ray.attacks.search import _aims, _schedule, _waves
from cure_ray.attacks.vertices import search_vertices
from cure_ray.bounds.native.engine import NativeEngine
from cure_ray.certification.balls import certify_batch
from cure_ray.certification.job import CascadeSettings
from cure_ray.certification.verdict import Status
from cure_ray.config import Certification
from cure_ray.errors import UserError
from cure_ray.networks.models import Network
from cure_ray.threats.balls import Ball
from cure_ray.threats.geometry import distance
from cure_ray.threats.norms import NORMS, Norm

RADII: dict[Norm, float] = {"linf": 0.2, "l2": 0.5, "l1": 0.9}


def broken(network: Network, x: Tensor, y: Tensor, threat: Ball, settings: AttackSettings, bounds: Tensor | None = None) -> list[bool]:
    found = attack(network, x, y, threat, range(len(x)), settings, bounds)
    return check_witness(replay_network(network), x, y, found, threat).valid.tolist()


def layers(*shapes: tuple[Tensor, Tensor]) -> Network:
    """Linear layers of these weights and biases, with ReLUs between, on 1 x 4 images."""
    parts: list[nn.Module] = [nn.Flatten()]
    for weight, bias in shapes:
        layer = nn.Linear(weight.shape[1], weight.shape[0])
        with torch.no_grad():
            layer.weight.copy_(weight)
            layer.bias.copy_(bias)
        parts += [layer, nn.ReLU()]
    return Network(parts[:-1], (1, 1, 4), len(shapes[-1][1])).eval().requires_grad_(False)


def flat_at_the_image() -> Network:
    """Any change of the image by more than half of what is allowed in one direction breaks it; the image itself has no gradient."""
    detectors = torch.cat([torch.eye(4), -torch.eye(4)])
    weight = torch.zeros(2, 8)
    weight[1] = 100.0
    return layers((detectors, -torch.tensor([0.55] * 4 + [-0.45] * 4)), (weight, torch.tensor([1.0, 0.0])))


@pytest.mark.parametrize("norm", NORMS)
def test_restarts_begin_away_from_the_image(norm: Norm) -> None:
    x, y = torch.full((5, 1, 1, 4), 0.5), torch.zeros(5, dtype=torch.long)
    network = flat_at_the_image()
    assert broken(network, x, y, Ball(norm, RADII[norm]), AttackSettings(10, 1)) == [False] * 5  # from the image nothing is to be seen
    assert broken(network, x, y, Ball(norm, RADII[norm]), AttackSettings(10, 8)) == [True] * 5


def test_starts_lie_on_the_surface_of_the_ball_and_differ() -> None:
    streams = tuple(torch.Generator().manual_seed(s) for s in (1, 2))
    x = torch.full((2, 50), 0.5)
    for norm in NORMS:
        problem = search_module._Problem(
            nn.Identity(), torch.Size([50]), Ball(norm, 0.3), x, torch.zeros(2), torch.zeros(2, 1), torch.ones(2), streams
        )
        first, second = search_module._start(problem, 1), search_module._start(problem, 2)
        assert not torch.equal(first[0], first[1])
        assert not torch.equal(first, second)
        size = distance(first, norm)
        assert (size <= 0.3 * (1 + 1e-6)).all()
        assert (size >= 0.2).all()
        assert not search_module._start(problem, 0).any()


def test_classes_proven_out_are_not_aimed_at_and_the_least_provable_comes_first() -> None:
    logits, y = torch.tensor([[9.0, 1.0, 3.0, 2.0], [1.0, 9.0, 3.0, 2.0]]), torch.tensor([0, 1])
    order, count = _aims(logits, y, None)
    assert (order.tolist(), count.tolist()) == ([[2, 3, 1], [2, 3, 0]], [3, 3])
    bounds = torch.tensor([[-5.0, 1.0, -2.0], [0.5, 0.5, 0.5]])  # of classes 1, 2, 3 and of 0, 2, 3
    order, count = _aims(logits, y, bounds)
    assert order[0, :2].tolist() == [1, 3]
    assert count.tolist() == [2, 3]  # nothing left open: every class again
    order, _ = _aims(logits, y, torch.full((2, 3), -torch.inf))
    assert order.tolist() == [[2, 3, 1], [2, 3, 0]], "where bounds say nothing the logits do"


def test_restarts_take_every_open_class_with_every_loss() -> None:
    order, count = torch.tensor([[3, 1, 2], [2, 0, 3]]), torch.tensor([3, 2])
    problem = search_module._Problem(
        nn.Identity(), torch.Size([4]), Ball("l2", 1.0), torch.zeros(2, 4), torch.tensor([0, 1]), order, count, ()
    )
    target, loss = _schedule(problem, 0, 10)
    assert (target[0].tolist(), loss[0].tolist()) == ([ANY, ANY], [0, 0])
    assert target[1:4, 0].tolist() == [3, 1, 2]
    seen = [{(int(t), int(k)) for t, k in zip(target[1:, b], loss[1:, b], strict=True)} for b in range(2)]
    assert seen[0] == {(c, k) for c in (1, 2, 3) for k in range(len(LOSSES))}
    assert seen[1] == {(c, k) for c in (0, 2) for k in range(len(LOSSES))}
    later, _ = _schedule(problem, 4, 3)
    assert torch.equal(later, target[4:7]), "waves continue each other"


@pytest.mark.parametrize("restarts", [1, 2, 3, 8, 48])
def test_waves_are_all_restarts_once(restarts: int) -> None:
    assert [n for first, count in _waves(restarts) for n in range(first, first + count)] == list(range(restarts))


@pytest.mark.parametrize("restarts", [1, 2, 3, 8, 48])
def test_an_opening_and_its_rest_are_the_whole_attack(restarts: int) -> None:
    whole = AttackSettings(10, restarts)
    parts = [part for part in (whole.opening, whole.rest) if part is not None]
    assert [wave for part in parts for wave in _waves(part.restarts, part.begun)] == list(_waves(restarts))
    searching = AttackSettings(10, 2, vertices=3)
    assert searching.opening.vertices == 0
    assert searching.rest is not None
    assert searching.rest.vertices == 3


def a_far_class() -> Network:
    """Class 3 alone can win, and only far from the image: nothing that follows or aims at the nearest classes sees it."""
    weight = torch.tensor([[0.0, 0.0, 0.0, 0.0], [0.1, 0.0, 0.0, 0.0], [0.0, 0.1, 0.0, 0.0], [0.0, 0.0, 9.0, -9.0]])
    return layers((torch.eye(4), torch.zeros(4)), (weight, torch.tensor([1.0, 0.85, 0.84, -4.5])))


def test_the_rest_of_an_attack_finds_what_its_opening_cannot() -> None:
    x, y = torch.full((3, 1, 1, 4), 0.5), torch.zeros(3, dtype=torch.long)
    threat, whole = Ball("l1", 0.65), AttackSettings(10, 8)
    assert broken(a_far_class(), x, y, threat, whole.opening) == [False] * 3
    assert whole.rest is not None
    assert broken(a_far_class(), x, y, threat, whole.rest) == [True] * 3


@pytest.mark.parametrize("stages", [("attack", "crown", "alpha-crown"), ("attack",), ("attack", "crown")])
def test_a_cascade_makes_the_whole_attack_wherever_it_stops(stages: tuple[str, ...]) -> None:
    x, y = torch.full((3, 1, 1, 4), 0.5), torch.zeros(3, dtype=torch.long)
    settings = CascadeSettings(stages, attack=AttackSettings(10, 8))
    outcomes = certify_batch(NativeEngine(a_far_class()), a_far_class(), x, y, Ball("l1", 0.65), settings)
    assert [(o.status, o.stage) for o in outcomes] == [(Status.FALSIFIED, "attack")] * 3
    standing = certify_batch(NativeEngine(a_far_class()), a_far_class(), x, y, Ball("l1", 0.58), settings)
    assert all(o.stage == stages[-1] for o in standing if o.status == Status.UNKNOWN)


def test_bounds_lead_the_attack_to_the_class_that_can_be_reached() -> None:
    """Of twelve classes one pixel each raises the logit by little, and only the last, far behind at the image, overtakes."""
    weight, bias = torch.zeros(13, 4), torch.zeros(13)
    bias[0] = 4.0
    for c in range(1, 12):
        weight[c, c % 3] = 0.1
        bias[c] = 3.9 - c / 100 - 0.05
    weight[12, 3], bias[12] = 20.0, -10.0 + 1.0
    network = layers((weight, bias))
    x, y, threat = torch.full((3, 1, 1, 4), 0.5), torch.zeros(3, dtype=torch.long), Ball("linf", 0.2)
    bounds = torch.full((3, 12), 0.01)
    bounds[:, 11] = -3.0
    assert broken(network, x, y, threat, AttackSettings(6, 2)) == [False] * 3
    assert broken(network, x, y, threat, AttackSettings(6, 2), bounds) == [True] * 3


def test_vertices_find_a_pair_of_pixels_that_the_gradient_hides() -> None:
    """Linearised at the image two pixels promise most, and lead nowhere together; two others break it."""
    threat, x = Ball("l1", 1.0), torch.zeros(1, 8, dtype=torch.float64)

    def value(d: Tensor) -> Tensor:
        decoy = torch.minimum(3 * (d[..., 0] + d[..., 1]), torch.full_like(d[..., 0], 0.5))
        return 1 - decoy - 1.5 * (d[..., 2] + d[..., 3])

    def gradient(delta: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        point = delta.detach().requires_grad_()
        return value(delta), value(delta), torch.autograd.grad(value(point).sum(), point)[0]

    stream = [torch.Generator().manual_seed(0)]
    found = search_vertices(gradient, value, x, torch.zeros_like(x), threat, 4, stream)
    assert float(found.margin_R) == pytest.approx(-0.5)
    assert float(found.delta_RN[0, 2:4].sum()) == pytest.approx(1.0)
    assert float(distance(found.delta_RN, "l1")) <= 1.0 + 1e-9


@pytest.mark.parametrize("norm", NORMS)
def test_the_strong_attack_is_the_same_for_a_sample_in_any_batch(norm: Norm) -> None:
    torch.manual_seed(0)
    network = layers((torch.randn(12, 4), torch.randn(12)), (torch.randn(5, 12), torch.randn(5))).double()
    x = torch.rand(4, 1, 1, 4, dtype=torch.float64)
    y, threat, settings = network(x).argmax(1), Ball(norm, 0.2 * RADII[norm]), AttackSettings(6, 9, vertices=3)
    bounds = torch.randn(4, 4, dtype=torch.float64)
    together = attack(network, x, y, threat, range(4), settings, bounds)
    alone = torch.cat([attack(network, x[i : i + 1], y[i : i + 1], threat, [i], settings, bounds[i : i + 1]) for i in range(4)])
    assert torch.allclose(together, alone, atol=1e-9)


def test_attacks_are_known_by_name_in_the_configuration_and_on_the_command_line() -> None:
    assert set(STRENGTHS) == set(Certification.model_json_schema()["properties"]["attack"]["enum"])
    assert attack_settings("strong").restarts > attack_settings("default").restarts
    assert attack_settings("default") == AttackSettings()
    with pytest.raises(UserError, match="strong"):
        attack_settings("stron")


def test_what_is_certified_is_attacked_from_the_image_and_from_elsewhere() -> None:
    assert AttackSettings().again == AttackSettings(14, 2)
    assert AttackSettings(5, 1).again.restarts == 1


def test_the_attack_before_branch_and_bound_is_no_longer_than_the_default_and_searches_vertices() -> None:
    assert AttackSettings().closing == AttackSettings(14, 8, vertices=16)
    assert STRENGTHS["strong"].closing == AttackSettings(40, 8, vertices=24)
    assert AttackSettings(5, 1).closing.restarts == 1
