"""Radius ramp and learning rate at the values the specification lists."""

import itertools

import pytest

from cure_ray.config import load_experiment
from cure_ray.training.schedules import learning_rate, radius_fraction, ramp


@pytest.mark.parametrize(("fraction", "value"), [(0.1, 0.002), (0.2, 0.032), (0.25, 0.077), (0.5, 0.385), (0.75, 0.692)])
def test_the_ramp_passes_through_its_check_values(fraction: float, value: float) -> None:
    start, end = 2000, 22000
    assert ramp(start + round(fraction * (end - start)), start, end) == pytest.approx(value, abs=1e-3)


@pytest.mark.parametrize("preset", ["mnist-small", "cifar-large", "smoke"])
def test_the_radius_is_zero_in_epoch_one_then_never_falls_and_is_full_after_the_ramp(preset: str) -> None:
    training = load_experiment(preset).training
    n = 7
    values = [radius_fraction(training, e, b, n) for e in range(1, training.epochs + 1) for b in range(n)]
    assert values[:n] == [0.0] * n
    assert values[n] > 0
    assert all(a <= b for a, b in itertools.pairwise(values))
    first_full = training.first_full_epoch
    assert radius_fraction(training, first_full, 0, n) == 1.0
    assert radius_fraction(training, first_full - 1, n - 1, n) < 1.0


def test_without_a_ramp_the_radius_is_full_from_the_first_batch() -> None:
    training = load_experiment("smoke", ["training.method=finetune", "training.start_from=x"]).training
    assert radius_fraction(training, 1, 0, 10) == 1.0


def test_the_learning_rate_falls_at_its_milestones() -> None:
    training = load_experiment("mnist-small").training
    assert [learning_rate(training, e) for e in (49, 50, 59, 60)] == pytest.approx([1e-4, 2e-5, 2e-5, 4e-6])
