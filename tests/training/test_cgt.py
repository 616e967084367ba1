import pytest
import torch

from cure_ray.config import parse_experiment
from cure_ray.config.files import resolve
from cure_ray.data.images import load_dataset
from cure_ray.errors import UserError
from cure_ray.threats.transformations import training_transformation
from cure_ray.training.cgt import draw_range, interval_batch, natural_weight, width_fraction
from cure_ray.training.loop import serial_epoch, start


def experiment(**training: object):
    return parse_experiment(
        {
            "dataset": {"name": "digits"},
            "network": {"name": "conv-small", "width": 0.5},
            "training": {"method": "cgt", "transformation": "R(10)", "epochs": 3, "anneal_epochs": 0, "lr": 0.003, **training},
        }
    )


def test_kappa_falls_from_one_to_a_half_and_the_width_grows_over_half_the_run() -> None:
    assert [natural_weight(e, 2, 6) for e in range(1, 7)] == [1.0, 1.0, 0.875, 0.75, 0.625, 0.5]
    assert width_fraction(1, 0, 10, 10) == pytest.approx(0.02)
    assert width_fraction(5, 9, 10, 10) == 1.0
    assert width_fraction(9, 0, 10, 10) == 1.0


def test_sub_ranges_have_the_training_width_and_stay_in_the_range() -> None:
    target = training_transformation("Tu(2),Tv(2)", "mnist")
    for share in (0.0, 0.4, 1.0):
        for (low, high), step in zip(draw_range(target, 1.0, [share, share]), target.steps, strict=True):
            assert high - low == pytest.approx(0.1)
            assert step.low - 1e-12 <= low
            assert high <= step.high + 1e-12


def test_the_boxes_of_a_batch_lie_in_the_image_domain() -> None:
    x = torch.rand(4, 1, 8, 8)
    target = training_transformation("R(10)", "")
    region = interval_batch(target, draw_range(target, 1.0, [0.3]), x)
    assert region.centre.shape == x.shape
    assert bool((region.centre - region.radius >= -1e-6).all())
    assert bool((region.centre + region.radius <= 1 + 1e-6).all())
    assert bool((region.radius >= 0).all())


def test_cgt_trains_and_is_reproducible() -> None:
    chosen = experiment()
    images = load_dataset(chosen.dataset, "train")
    results = []
    for _ in range(2):
        progress = start(chosen, torch.device("cpu"))
        metrics = [serial_epoch(progress, images, chosen)[0] for _ in range(3)]
        results.append((metrics[-1]["robust"], metrics[-1]["train_accuracy"]))
    assert results[0] == results[1]
    assert results[0][1] > 0.7


def test_cgt_needs_a_transformation_that_parses() -> None:
    with pytest.raises(UserError, match=r"training\.transformation"):
        experiment(transformation=None)
    with pytest.raises(UserError, match="here"):
        experiment(transformation="R(10),X(2)")
    with pytest.raises(UserError, match="no effect"):
        parse_experiment({"training": {"method": "max", "transformation": "R(10)"}})


def test_a_preset_with_method_cgt_takes_its_published_settings() -> None:
    found = resolve({"preset": "mnist-large", "training": {"method": "cgt", "transformation": "R(30)"}})
    assert found.training.grad_clip == 8.0
    assert found.training.l1_weight == 0.0
