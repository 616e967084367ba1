"""Warm-up regularisers: values of the formulas, and finiteness where ratios do not exist."""

import pytest
import torch

from cure_ray.training.regularizers import balance, l1_norm, tightness, warmup


def same(value: torch.Tensor) -> torch.Tensor:
    return value


def test_l1_counts_every_tensor() -> None:
    assert float(l1_norm([torch.tensor([1.0, -2.0]), torch.tensor([[3.0]])])) == 6


def test_tightness_penalises_radii_that_outgrow_the_input() -> None:
    grown, shrunk = torch.full((2, 3), 4.0), torch.full((2, 3), 0.5)
    assert float(tightness(grown, torch.tensor(1.0), same)) == pytest.approx((0.5 - 0.25) / 0.5)
    assert float(tightness(shrunk, torch.tensor(1.0), same)) == 0


def test_balance_follows_its_formula() -> None:
    c = torch.tensor([[3.0, 1.0, -2.0, -0.1]])
    r = torch.tensor([[0.5, 0.5, 0.5, 0.5]])
    mean = c.mean()
    ratio_mean = ((3 + 1) / 4) / (2 / 4)
    ratio_var = float(((3 - mean) ** 2 + (1 - mean) ** 2) / ((-2 - mean) ** 2))
    expected = sum(max(0.0, 0.5 - min(z, 1 / z)) for z in (ratio_mean, ratio_var)) / 0.5
    assert float(balance(c, r, same)) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("value", [5.0, -5.0, 0.0])
def test_all_active_all_dead_and_all_crossing_layers_give_finite_values_and_gradients(value: float) -> None:
    c = (torch.rand(3, 4) * 0.1 + value).requires_grad_()
    r = torch.full((3, 4), 0.5 if value else 1.0, requires_grad=True)
    total = warmup([(c, r)], torch.tensor(0.01))
    total.backward()
    assert bool(total.isfinite())
    assert c.grad is not None
    assert r.grad is not None
    assert bool(c.grad.isfinite().all())
    assert bool(r.grad.isfinite().all())


def test_radii_below_the_floor_silence_tightness_without_nan() -> None:
    r = torch.zeros(2, 2, requires_grad=True)
    value = tightness(r, torch.tensor(0.0), same)
    value.backward()
    assert float(value) == 1.0
    assert r.grad is not None
    assert bool(r.grad.isfinite().all())
