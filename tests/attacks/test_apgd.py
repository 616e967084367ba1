"""The descent: steps judged when the paper judges them, points inside ball∩box, no reading back to the host."""

import pytest
import torch
from torch import Tensor

from cure_ray.attacks.apgd import checkpoints, descend, steepest
from cure_ray.threats.balls import Ball
from cure_ray.threats.geometry import distance, offsets
from cure_ray.threats.norms import NORMS, Norm

RADII: dict[Norm, float] = {"linf": 0.2, "l2": 0.7, "l1": 1.5}


def everyone(margin_R: Tensor) -> Tensor:
    return torch.ones_like(margin_R, dtype=torch.bool)


def test_steps_are_judged_at_the_published_moments() -> None:
    assert sorted(checkpoints(100)) == [22, 41, 57, 70, 80, 87, 93, 99]


@pytest.mark.parametrize("norm", NORMS)
def test_every_point_asked_about_lies_in_the_ball_and_the_box_and_the_best_one_is_kept(norm: Norm) -> None:
    rng = torch.Generator().manual_seed(0)
    x = torch.rand(6, 30, generator=rng, dtype=torch.float64).round(decimals=1)  # some pixels at the ends of their range
    w = torch.randn(6, 30, generator=rng, dtype=torch.float64)
    threat, seen = Ball(norm, RADII[norm]), list[Tensor]()

    def bumpy(delta: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        point = delta.detach().requires_grad_()
        value = (w * point + 0.3 * torch.sin(20 * point)).sum(1)
        seen.append(value.detach())
        assert (distance(delta, norm) <= threat.eps * (1 + 1e-9)).all()
        assert ((x + delta >= 0) & (x + delta <= 1)).all()
        return value.detach(), value.detach(), torch.autograd.grad(value.sum(), point)[0]

    found = descend(bumpy, x, torch.randn(x.shape, generator=rng, dtype=torch.float64), threat, 20, everyone)
    assert len(seen) == 21
    assert torch.equal(found.margin_R, torch.stack(seen).amin(0))
    assert torch.equal(bumpy(found.delta_RN)[0], found.margin_R)


def test_a_row_that_has_fallen_is_left_as_it_is() -> None:
    values = iter([3.0, 2.0, -1.0, -5.0, -6.0])

    def scripted(delta: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        value = torch.full((1,), next(values))
        return value, value, torch.ones_like(delta)

    found = descend(scripted, torch.full((1, 4), 0.5), torch.zeros(1, 4), Ball("l2", 0.1), 4, lambda margin: margin > 0)
    assert float(found.margin_R) == -1.0


@pytest.mark.parametrize("norm", NORMS)
def test_the_direction_is_of_unit_length_and_moves_only_pixels_that_can(norm: Norm) -> None:
    x = torch.tensor([[0.0, 1.0, 0.5, 0.5, 0.5]])
    low, high = offsets(x, 0.2)
    slope = torch.tensor([[9.0, -9.0, 3.0, -2.0, 1.0]])  # the first two would have to leave the box
    direction = steepest(slope, torch.zeros_like(x), low, high, Ball(norm, 0.2), torch.tensor([[2.0]]))
    assert direction[0, :2].tolist() == [0.0, 0.0]
    assert float(distance(direction, norm)) == pytest.approx(1.0)
    assert float((direction * slope).sum()) < 0
    if norm == "l1":
        assert direction[0].tolist() == [0.0, 0.0, -0.5, 0.5, 0.0]


@pytest.mark.parametrize("norm", NORMS)
def test_the_descent_reads_nothing_back_to_the_host(norm: Norm) -> None:
    x = torch.empty(4, 12, device="meta")

    def linear(delta: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return delta.sum(1), delta.sum(1), torch.ones_like(delta)

    found = descend(linear, x, torch.zeros_like(x), Ball(norm, 0.1), 10, lambda margin: margin > 0)
    assert found.delta_RN.shape == x.shape
